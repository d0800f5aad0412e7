"""The library doctor: does the node's libstdc++ (and glibc) have what an environment's libraries ask for?

Every shared library says which versions of which other library it needs (`.gnu.version_r`) and which it
brings (`.gnu.version_d`). Both are read from the files themselves, without running anything. A newer
libstdc++ is preloaded only when something needs it, only when one is at hand, and only when it brings all
that the node's own has: two libraries of one name in a process are a fault, not a fix.
"""

from __future__ import annotations

import json
import mmap
import os
import platform
import re
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from . import place, seal
from .files import write_atomic
from .undo import Journal, run

CXX = "libstdc++.so.6"
LIBC = "libc.so.6"
WATCHED = (CXX, LIBC)
MACHINES = {62: "x86_64", 183: "aarch64"}
CACHE_NAMES = {"x86_64": "x86-64", "aarch64": "AArch64"}
"""What `ldconfig -p` calls each architecture."""

PT_LOAD, PT_DYNAMIC = 1, 2
DT_NEEDED, DT_STRTAB, DT_SONAME = 1, 5, 14
DT_VERDEF, DT_VERDEFNUM, DT_VERNEED, DT_VERNEEDNUM = 0x6FFFFFFC, 0x6FFFFFFD, 0x6FFFFFFE, 0x6FFFFFFF
MOST_ROWS = 65_536
"""Rows of a table of versions before a file counts as damaged."""

WEAK = 2
"""Flag of a need that the loader only warns about."""

MEMORY = Path("/var/cache/bringup/libraries")
"""Where it is kept what was read of each environment's files; anybody may empty it."""

MEMORY_VERSION = 1
SETTLED_S = 2.0
"""A file that changed less than this before it was read is read again: its times could not show another change."""

SHARED = re.compile(r"\.so(\.\d+)*$")
EVIDENCE_KEPT = 3
LDCONFIG_LIMIT_S = 30


class NotElf(Exception):
    """A file that is no 64-bit little-endian ELF file with a dynamic section."""


@dataclass(frozen=True)
class Library:
    """What one file says: `needs` (library -> versions, no weak ones) and `provides` (its own versions)."""

    path: str
    machine: str
    soname: str
    needed: tuple[str, ...]
    needs: Mapping[str, frozenset[str]]
    provides: frozenset[str]


@dataclass(frozen=True)
class Doctor:
    """A verdict on one environment.

    `preload`: the libstdc++ to preload, "" for none; `missing`: version that the node's own libraries lack ->
    files that need it; `unsolved`: what a preload does not cure, one line a cause; `scanned`: libraries read.
    """

    preload: str
    missing: Mapping[str, tuple[str, ...]]
    unsolved: tuple[str, ...]
    scanned: int
    system: Mapping[str, str] = field(default_factory=dict)


# --- one file -----------------------------------------------------------------------------------------------


def read(path: str | Path) -> Library:
    """Reads one file. Raises NotElf, OSError."""
    with Path(path).open("rb") as file:
        head = file.read(64)
        if len(head) < 64 or head[:6] != b"\x7fELF\x02\x01":
            raise NotElf(f"{path}: no 64-bit little-endian ELF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _Reader(data).library(str(path))
            except (struct.error, IndexError, ValueError, OverflowError) as error:
                raise NotElf(f"{path}: damaged ELF file ({error})") from None


class _Reader:
    """Looks into one mapped file (System V gABI, GNU symbol versioning); struct checks every offset."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.machine = MACHINES.get(struct.unpack_from("<H", data, 18)[0], "other")
        start, size, count = (
            struct.unpack_from(form, data, at)[0] for form, at in (("<Q", 32), ("<H", 54), ("<H", 56))
        )
        rows = [struct.unpack_from("<IIQQQQQQ", data, start + index * size) for index in range(count)]
        self.loads = [(row[3], row[2], row[5]) for row in rows if row[0] == PT_LOAD]
        self.dynamic = list(self._dynamic([row for row in rows if row[0] == PT_DYNAMIC]))
        self.strings = self._offset(self._one(DT_STRTAB)) if self.dynamic else 0

    def _dynamic(self, segments: Sequence[tuple[int, ...]]) -> Iterator[tuple[int, int]]:
        for segment in segments:
            for at in range(segment[2], segment[2] + segment[5], 16):
                tag, value = struct.unpack_from("<qQ", self.data, at)
                if tag == 0:
                    return
                yield tag, value

    def _one(self, tag: int) -> int:
        return next((value for found, value in self.dynamic if found == tag), 0)

    def _offset(self, address: int) -> int:
        """Where in the file an address of the loaded library lies."""
        for start, offset, size in self.loads:
            if start <= address < start + size:
                return int(offset + address - start)
        raise ValueError(f"address {address:#x} lies in no segment")

    def _text(self, at: int) -> str:
        start = self.strings + at
        return self.data[start : self.data.find(b"\0", start)].decode("utf-8", "replace")

    def library(self, path: str) -> Library:
        """All that it says."""
        if not self.dynamic:
            raise ValueError("no dynamic section")
        soname = self._one(DT_SONAME)
        return Library(
            path=path,
            machine=self.machine,
            soname=self._text(soname) if soname else "",
            needed=tuple(self._text(value) for tag, value in self.dynamic if tag == DT_NEEDED),
            needs=self._needs(),
            provides=frozenset(self._provides()),
        )

    def _needs(self) -> dict[str, frozenset[str]]:
        found: dict[str, frozenset[str]] = {}
        count = min(self._one(DT_VERNEEDNUM), MOST_ROWS)
        at = self._offset(self._one(DT_VERNEED)) if count else 0
        for _ in range(count):
            _, rows, file, first, step = struct.unpack_from("<HHIII", self.data, at)
            name = self._text(file)
            found[name] = found.get(name, frozenset()) | frozenset(self._versions(at + first, rows))
            at += step
        return found

    def _versions(self, at: int, rows: int) -> Iterator[str]:
        for _ in range(rows):
            _, flags, _, name, step = struct.unpack_from("<IHHII", self.data, at)
            if not flags & WEAK:
                yield self._text(name)
            at += step

    def _provides(self) -> Iterator[str]:
        count = min(self._one(DT_VERDEFNUM), MOST_ROWS)
        at = self._offset(self._one(DT_VERDEF)) if count else 0
        for _ in range(count):
            _, flags, _, _, _, first, step = struct.unpack_from("<HHHHIII", self.data, at)
            if not flags & 1:  # the base version is the library's own name
                yield self._text(struct.unpack_from("<I", self.data, at + first)[0])
            at += step


# --- the node -----------------------------------------------------------------------------------------------


def parse_cache(text: str, machine: str) -> dict[str, str]:
    """Path by name of each library of this architecture, from `ldconfig -p`: the first is the one loaded."""
    found: dict[str, str] = {}
    mark = CACHE_NAMES.get(machine, "")
    for name, kind, path in re.findall(r"^\s+(\S+) \(([^)]*)\) => (\S+)$", text, re.MULTILINE):
        if mark and mark in kind.split(","):
            found.setdefault(name, path)
    return found


def loaded() -> dict[str, str]:
    """Where the loader finds each library on this node."""
    text = next((out for tool in ("ldconfig", "/sbin/ldconfig") for out in [_ldconfig(tool)] if out), "")
    spaced = re.sub(r"\((libc6[^)]*)\)", lambda match: f"({match[1].replace(', ', ',')})", text)
    return parse_cache(spaced, platform.machine())


def _ldconfig(tool: str) -> str:
    code, text = run([tool, "-p"], LDCONFIG_LIMIT_S)
    return text + "\n" if code == 0 else ""


def scan(prefix: Path, memory: Memory | None = None) -> list[Library]:
    """All readable ELF libraries below a folder (links left out), with what a verdict asks of them; what is
    none is left out. With a memory only what it does not know as it is now is read."""
    kept = memory if memory is not None else Memory()
    found = [one for path in kept.paths(prefix) if (one := kept.library(path))]
    kept.forget_others()
    return found


class Memory:
    """What was read of an environment before: a row for each folder and each library, good for as long as its
    size, times of change and inode are the same. `file` None: nothing is kept beyond this object.

    A folder's time changes with every name that comes, goes or is replaced in it, so a folder that is as it was
    is not listed again; a file that is written in its place shows it by its own times.
    """

    def __init__(self, file: Path | None = None) -> None:
        self.file = file
        self.read_again = 0
        self._before: dict[str, Any] = {}
        self._now: dict[str, Any] = {}
        if file is not None:
            with suppress(OSError, ValueError, KeyError, TypeError):
                data = json.loads(file.read_text(encoding="utf-8"))
                if data["version"] == MEMORY_VERSION:
                    self._before = dict(data["rows"])

    @classmethod
    def of(cls, prefix: Path) -> Memory:
        """The memory of an environment on this node."""
        return cls(MEMORY / f"{quote(str(prefix), safe='')}.json")

    def paths(self, prefix: Path) -> Iterator[str]:
        """What is called like a shared library below a folder, links left out."""
        todo = [str(prefix)]
        while todo:
            folder = todo.pop()
            listed = self._known(folder, _listed)
            if listed:
                todo += [f"{folder}/{name}" for name in listed[0]]
                yield from (f"{folder}/{name}" for name in listed[1])

    def library(self, path: str) -> Library | None:
        """What a file says; None: no library."""
        return _library(path, self._known(path, _row))

    def _known(self, path: str, look: Callable[[str], Any]) -> Any:
        """What `look` says of a path, asked only when it is not known as it is now; None when it is gone."""
        try:
            status = os.lstat(path)
        except OSError:
            return None
        stamp = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        row = self._before.get(path)
        if row is None or row[0] != stamp:
            self.read_again += 1
            row = [stamp, look(path)]
        if time.time() - status.st_ctime > SETTLED_S:
            self._now[path] = row
        return row[1]

    def forget_others(self) -> None:
        """What was not asked for is gone: it is not remembered."""
        self._before, self._now = self._now, {}

    def save(self, role: str) -> None:
        """To the disk when something was read; memories of environments that are gone go. `role`: in whose
        journal it is, for an undo. Raises OSError."""
        if self.file is None or not self.read_again:
            return
        Journal(role).remember_paths([self.file])
        text = json.dumps({"version": MEMORY_VERSION, "rows": self._before}, separators=(",", ":"))
        write_atomic(self.file, text)
        for other in self.file.parent.glob("*.json"):
            if not Path(unquote(other.stem)).is_dir():
                other.unlink(missing_ok=True)


def _listed(folder: str) -> list[list[str]]:
    """Names of the folders in a folder, and of what is called like a shared library; links are neither."""
    found: list[list[str]] = [[], []]
    with suppress(OSError), os.scandir(folder) as rows:
        for row in rows:
            if row.is_dir(follow_symlinks=False):
                if row.name != "__pycache__":  # half of the folders, and Python alone writes there
                    found[0].append(row.name)
            elif SHARED.search(row.name) and not row.is_symlink():
                found[1].append(row.name)
    return [sorted(names) for names in found]


def _row(path: str) -> list[Any] | None:
    """What a verdict asks of a library, as JSON: machine, soname, needs of the watched ones, and what a libstdc++
    brings; None: no library."""
    one = _read_or_none(path)
    if one is None:
        return None
    needs = {name: sorted(one.needs[name]) for name in WATCHED if name in one.needs}
    brings = sorted(one.provides) if Path(path).name.startswith(CXX) else []
    return [one.machine, one.soname, needs, brings]


def _library(path: str, row: Sequence[Any] | None) -> Library | None:
    if row is None:
        return None
    machine, soname, needs, brings = row
    return Library(
        path=path,
        machine=machine,
        soname=soname,
        needed=(),
        needs={name: frozenset(versions) for name, versions in needs.items()},
        provides=frozenset(brings),
    )


def of_versions(found: Iterable[Library], library: str) -> dict[str, list[str]]:
    """Version -> files that need it of `library`."""
    needs: dict[str, list[str]] = {}
    for one in found:
        for version in one.needs.get(library, ()):
            needs.setdefault(version, []).append(one.path)
    return needs


def newest(versions: Iterable[str], family: str) -> str:
    """The highest of a family such as GLIBCXX, "" when there is none."""
    numbered = [
        (tuple(int(part) for part in version[len(family) + 1 :].split(".")), version)
        for version in versions
        if re.fullmatch(rf"{family}_[\d.]+", version)
    ]
    return max(numbered)[1] if numbered else ""


# --- the verdict --------------------------------------------------------------------------------------------


def examine(
    prefix: Path,
    extra: Sequence[str] = (),
    cache: Mapping[str, str] | None = None,
    memory: Memory | None = None,
) -> Doctor:
    """Reads an environment and says what to preload. `extra`: folders that may hold another libstdc++;
    `cache`: where the loader finds libraries (default: asked of this node)."""
    paths = loaded() if cache is None else cache
    system = {name: _read_or_none(paths[name]) for name in WATCHED if name in paths}
    machine = next((one.machine for one in system.values() if one), platform.machine())
    found = [one for one in scan(prefix, memory) if one.machine == machine]
    own = {name: one.provides for name, one in system.items() if one}
    missing = {
        name: {
            version: tuple(sorted(files))
            for version, files in of_versions(found, name).items()
            if name in own and version not in own[name]
        }
        for name in WATCHED
    }
    preload, unsolved = "", []
    if missing[CXX]:
        candidates = [*(one for one in found if Path(one.path).name.startswith(CXX)), *_more(extra)]
        chosen, refused = choose(candidates, own[CXX], frozenset(missing[CXX]), own, machine)
        preload = chosen.path if chosen else ""
        if not chosen:
            unsolved.append(_no_cxx(missing[CXX], own[CXX], refused))
    if missing[LIBC]:
        unsolved.append(_no_libc(missing[LIBC], own[LIBC]))
    return Doctor(
        preload=preload,
        missing={version: files for rows in missing.values() for version, files in sorted(rows.items())},
        unsolved=tuple(unsolved),
        scanned=len(found),
        system={name: paths[name] for name in WATCHED if name in paths},
    )


def choose(
    candidates: Sequence[Library],
    own: frozenset[str],
    missing: frozenset[str],
    node: Mapping[str, frozenset[str]],
    machine: str,
) -> tuple[Library | None, list[str]]:
    """The newest candidate that brings all that is missing and all that the node's own has, and that this
    node can load; and why others were refused."""
    good, refused = [], []
    for one in candidates:
        lacks = sorted(missing - one.provides)
        loses = sorted(own - one.provides)
        cannot = sorted(one.needs.get(LIBC, frozenset()) - node.get(LIBC, frozenset()))
        if one.machine != machine or one.soname != CXX:
            refused.append(f"{one.path} is another library or for another machine")
        elif lacks:
            refused.append(f"{one.path} lacks {', '.join(lacks[:3])} as well")
        elif loses:
            refused.append(f"{one.path} lacks {', '.join(loses[:3])}, which the node's own has")
        elif cannot:
            refused.append(f"{one.path} itself needs {', '.join(cannot[:3])}")
        else:
            good.append(one)
    good.sort(key=lambda one: _rank(newest(one.provides, "GLIBCXX")), reverse=True)
    return (good[0] if good else None), refused


def _rank(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def _read_or_none(path: str) -> Library | None:
    try:
        return read(path)
    except (NotElf, OSError):
        return None


def _more(folders: Sequence[str]) -> list[Library]:
    paths = [
        path for folder in folders for path in sorted(Path(folder).glob(f"{CXX}*")) if not path.is_symlink()
    ]
    return [one for one in map(_read_or_none, map(str, paths)) if one]


def _files(rows: Mapping[str, Sequence[str]]) -> str:
    files = sorted({file for found in rows.values() for file in found})
    more = f" and {len(files) - EVIDENCE_KEPT} more" if len(files) > EVIDENCE_KEPT else ""
    return ", ".join(files[:EVIDENCE_KEPT]) + more


def _no_cxx(missing: Mapping[str, Sequence[str]], own: frozenset[str], refused: Sequence[str]) -> str:
    tried = f" ({'; '.join(refused)})" if refused else ""
    wanted = ", ".join(sorted(missing))
    return (
        f"{_files(missing)} need {wanted}; the node's libstdc++ ends at {newest(own, 'GLIBCXX')}, and no "
        f"newer one is at hand{tried}. Add package libstdcxx-ng to the environment's lock, or name a folder "
        "in library_fixes_folders."
    )


def _no_libc(missing: Mapping[str, Sequence[str]], own: frozenset[str]) -> str:
    return (
        f"{_files(missing)} need {', '.join(sorted(missing))}; the node's glibc ends at "
        f"{newest(own, 'GLIBC')}, and glibc cannot be preloaded. Lock packages that were built "
        "for an older system, or use a newer distribution."
    )


# --- on the node --------------------------------------------------------------------------------------------


def drop_in(preload: str) -> str:
    """The text that makes systemd preload a library into a server."""
    return (
        "# Written by bringup: a library of the environment needs a newer libstdc++ than the node's own.\n"
        f"[Service]\nEnvironment=LD_PRELOAD={preload}\n"
    )


def apply(
    services: Sequence[Mapping[str, Any]], folders: Sequence[str], role: str, check_only: bool
) -> dict[str, Any]:
    """A drop-in for each service whose environment needs one, none for others.

    Gives {changed, changed_paths, verdicts, diff}.
    `services`: rows with name, prefix (of its environment) and drop_in (a path). An environment that is not
    there yet (check mode on a bare node) has no verdict. Raises PlaceFailed, OSError.
    """
    verdicts, entries = [], []
    known: dict[str, Doctor] = {}
    for service in services:
        prefix = str(service["prefix"])
        if not Path(prefix).is_dir():
            verdicts.append({"service": service["name"], "preload": "", "unsolved": [], "scanned": 0})
            continue
        if prefix not in known:
            memory = Memory.of(Path(prefix))
            known[prefix] = examine(Path(prefix), folders, memory=memory)
            if not check_only:
                memory.save(role)
        verdict = known[prefix]
        verdicts.append(
            {
                "service": service["name"],
                "preload": verdict.preload,
                "missing": {name: list(files)[:EVIDENCE_KEPT] for name, files in verdict.missing.items()},
                "unsolved": list(verdict.unsolved),
                "scanned": verdict.scanned,
            }
        )
        path = str(service["drop_in"])
        if verdict.preload:
            entries.append({"path": path, "content": drop_in(verdict.preload)})
        else:
            entries.append({"path": path, "state": "absent"})
    placed = place.apply(entries, check_only, role)
    if not check_only:
        seal.claim(_basis(known.values(), folders))
    return {**placed, "verdicts": verdicts}


def _basis(verdicts: Iterable[Doctor], folders: Sequence[str]) -> list[dict[str, Any]]:
    """What the verdicts were made of, beside the environments: the node's own libraries and those at hand."""
    paths = sorted({os.path.realpath(path) for one in verdicts for path in one.system.values()})
    rows = [seal.path_row(path, "file", sha256=None, basis=True) for path in paths]
    wilds = [f"{folder}/{CXX}*" for folder in folders]
    return rows + [{"kind": "listing", "name": wild, "paths": None, "basis": True} for wild in wilds]
