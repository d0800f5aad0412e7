"""What a role changes on a node, remembered before the first change, and brought back byte for byte.

One journal a role, `/var/lib/bringup/undo/ROLE.json` (root, 0600: it may hold the text of files). What is in
it was written to the disk before the change that it is about, so a run that is killed can be undone as well.
The first memory of a thing stays: it is what the node had before the role ever came.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from .files import sync_folder, write_atomic
from .inuse import users

FOLDER = Path("/var/lib/bringup/undo")
UNIT_LINKS = Path("/etc/systemd/system")
SCHEMA_VERSION = 1

COMMAND_LIMIT_S = 1200
"""Seconds that one command may take: building kernel modules again after a package is the longest."""

PACKAGE_LOCK_LIMIT_S = 300
"""Seconds to wait for somebody else's package manager."""

QUERY = "${Package}:${Architecture}\t${Version}\t${db:Status-Abbrev}\n"


class UndoFailed(Exception):
    """What could not be brought back, one line a thing; the journal is kept."""


def run(argv: Sequence[str], limit_s: float = COMMAND_LIMIT_S) -> tuple[int, str]:
    """Exit code and everything that was said; 127: there is no such command, 124: it took too long."""
    environment = {**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=limit_s,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 124, f"{argv[0]} took longer than {limit_s:g} s"
    except OSError as error:
        return 127, str(error)
    return done.returncode, done.stdout.decode("utf-8", "replace").strip()


def installed(states: str = "i") -> dict[str, str]:
    """Version of each installed package, by `name:architecture`; states "ic": also those whose settings stayed."""
    found = {}
    for line in run(["dpkg-query", "-W", "-f", QUERY])[1].splitlines():
        name, _, rest = line.partition("\t")
        version, _, status = rest.partition("\t")
        if status[1:2] and status[1:2] in states:
            found[name] = version
    return found


def meaning(text: str) -> str:
    """What a kernel file says: the chosen word of `always [madvise] never`, else the text."""
    chosen = re.search(r"\[([^\]]+)\]", text)
    return chosen.group(1) if chosen else " ".join(text.split())


class Journal:
    """The memory of one role. Every `remember_*` is on the disk when it returns."""

    def __init__(self, role: str, folder: Path | None = None) -> None:
        self.file = (folder or FOLDER) / f"{role}.json"
        self.data: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "role": role,
            "paths": {},
            "trees": [],
            "sizes": {},
            "values": {},
            "units": {},
            "packages": {"added": [], "replaced": {}},
            "installing": None,
            "holds": [],
            "held": [],
            "after": [],
        }
        with suppress(OSError, ValueError):
            self.data.update(json.loads(self.file.read_text(encoding="utf-8")))

    def save(self) -> None:
        """To the disk, readable by root only."""
        folder = self.file.parent
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        write_atomic(self.file, json.dumps(self.data, indent=1, sort_keys=True) + "\n", 0o600)
        sync_folder(folder)

    def is_empty(self) -> bool:
        """Has the role changed nothing?"""
        packages = self.data["packages"]
        kept = [self.data[name] for name in ("paths", "trees", "sizes", "values", "units", "holds")]
        begun = self.data["installing"] is not None
        return not any([*kept, begun, packages["added"], packages["replaced"]])

    def remember_paths(self, paths: Iterable[Path]) -> None:
        """Files, folders and links as they are now, and which folders above them are not there."""
        fresh = [
            path
            for path in dict.fromkeys(above for given in paths for above in (given, *_missing_parents(given)))
            if str(path) not in self.data["paths"]
        ]
        for path in fresh:
            self.data["paths"][str(path)] = look(path)
        if fresh:
            self.save()

    def remember_trees(self, trees: Iterable[Path]) -> None:
        """Folders that are about to be made and filled: an undo removes each whole. One that is there already
        is somebody else's, and stays."""
        fresh = [tree for tree in trees if str(tree) not in self.data["trees"] and not os.path.lexists(tree)]
        for tree in fresh:
            self.remember_paths(_missing_parents(tree))
            self.data["trees"].append(str(tree))
        if fresh:
            self.save()

    def remember_size(self, mount: Path) -> None:
        """The size of a file system in memory before it is changed."""
        if str(mount) not in self.data["sizes"]:
            self.data["sizes"][str(mount)] = size_of(mount)
            self.save()

    def remember_value(self, path: str, text: str) -> None:
        """A kernel setting (a file in /proc/sys or /sys) before it is written."""
        if path not in self.data["values"]:
            self.data["values"][path] = text
            self.save()

    def remember_unit(self, name: str, state: str, active: bool) -> None:
        """A unit before it is enabled, disabled, started or stopped; `state`: its UnitFileState."""
        if name in self.data["units"]:
            return
        links = [*UNIT_LINKS.glob(f"*.wants/{name}"), *UNIT_LINKS.glob(f"*.requires/{name}")]
        self.data["units"][name] = {"state": state, "active": active}
        self.remember_paths(links)
        self.save()

    def remember_holds(self, names: Iterable[str]) -> None:
        """Packages that are about to be held."""
        self.data["holds"] = sorted({*self.data["holds"], *names})
        self.save()

    def remember_after(self, command: Sequence[str]) -> None:
        """A command that must run when all is back, such as `ldconfig`."""
        if list(command) not in self.data["after"]:
            self.data["after"].append(list(command))
            self.save()

    def begin_install(self) -> None:
        """Before packages change: what is installed now. An earlier begin without its end stays."""
        if self.data["installing"] is None:
            self.data["installing"] = installed()
            # What this role holds itself is no state of before.
            others = {*run(["apt-mark", "showhold"])[1].split()} - {*self.data["holds"]}
            self.data["held"] = sorted({*self.data["held"], *others})
            self.save()

    def end_install(self, keep: bool = True) -> None:
        """After packages changed: which came, and what those that were replaced had been."""
        before, after = self.data["installing"] or {}, installed()
        packages = self.data["packages"]
        known = {*packages["added"], *packages["replaced"]}
        for name in sorted({*before, *after}):
            if before.get(name) == after.get(name) or name in known:
                continue
            if name in before:
                packages["replaced"][name] = before[name]
            else:
                packages["added"].append(name)
        self.data["installing"] = None
        if keep:
            self.save()

    # --- back ---------------------------------------------------------------------------------------------

    def restore(self, check_only: bool = False) -> list[str]:
        """Brings everything back and forgets it; what was done, one line a thing. Raises UndoFailed."""
        if self.is_empty():
            return []
        self._refuse_in_use()
        done: list[str] = []
        failed: list[str] = []
        self._units_off(done, failed, check_only)
        self._packages_back(done, failed, check_only)
        if not failed:
            self._trees_off(done, failed, check_only)
            self._paths_back(done, failed, check_only)
            self._sizes_back(done, failed, check_only)
            self._values_back(done, failed, check_only)
            self._units_back(done, failed, check_only)
        if failed:
            raise UndoFailed("\n".join(failed))
        if not check_only:
            for command in self.data["after"]:
                run(command)
            self.file.unlink(missing_ok=True)
            for folder in (self.file.parent, self.file.parent.parent):
                with suppress(OSError):
                    folder.rmdir()
        return done

    def _refuse_in_use(self) -> None:
        running = users([Path(tree) for tree in self.data["trees"]])
        rows = [f"processes {', '.join(map(str, pids))} run from {tree}" for tree, pids in running.items()]
        if rows:
            raise UndoFailed(f"{'; '.join(rows)}. Stop their service, then run this again.")

    def _trees_off(self, done: list[str], failed: list[str], check: bool) -> None:
        for text in self.data["trees"]:
            if not Path(text).is_dir():
                continue
            done.append(f"remove {text} and all in it")
            try:
                if not check:
                    remove_tree(Path(text))
            except OSError as error:
                failed.append(f"{text}: {error}")

    def _sizes_back(self, done: list[str], failed: list[str], check: bool) -> None:
        for mount, size in self.data["sizes"].items():
            if size_of(Path(mount)) == size:
                continue
            done.append(f"size of {mount}: {size} bytes")
            code, said = (0, "") if check else run(["mount", "-o", f"remount,size={size}", mount])
            if code != 0:
                failed.append(f"{mount} does not become {size} bytes: {said}")

    def _systemctl(self, words: Sequence[str], done: list[str], failed: list[str], check: bool) -> None:
        done.append(" ".join(words))
        code, said = (0, "") if check else run(["systemctl", *words])
        if code != 0:
            failed.append(f"systemctl {' '.join(words)}: {said}")

    def _units_off(self, done: list[str], failed: list[str], check: bool) -> None:
        for name, before in self.data["units"].items():
            now, active = unit_state(name)
            if active and not before["active"]:
                self._systemctl(["stop", name], done, failed, check)
            if now == "enabled" and before["state"] not in ("enabled", "enabled-runtime"):
                self._systemctl(["disable", name], done, failed, check)

    def _units_back(self, done: list[str], failed: list[str], check: bool) -> None:
        if not check:
            run(["systemctl", "daemon-reload"])
        for name, before in self.data["units"].items():
            now, active = unit_state(name)
            if before["state"] == "enabled" and now not in ("enabled", ""):
                self._systemctl(["enable", name], done, failed, check)
            if before["active"] and not active:
                self._systemctl(["start", name], done, failed, check)

    def _packages_back(self, done: list[str], failed: list[str], check: bool) -> None:
        if self.data["installing"] is not None:
            self.end_install(keep=not check)
        now = installed()
        holds = [name for name in self.data["holds"] if name not in self.data["held"]]
        if holds:
            done.append(f"unhold {' '.join(holds)}")
            if not check:
                run(["apt-mark", "unhold", *holds])
        packages = self.data["packages"]
        gone = [name for name in packages["added"] if name in installed("ic")]
        back = [
            f"{name}={version}" for name, version in packages["replaced"].items() if now.get(name) != version
        ]
        done += [f"install {word}" for word in back] + [f"purge {name}" for name in gone]
        if check:
            return
        if back:
            # One call, so that what conflicts leaves while what was there before comes back.
            words = ["apt-get", "-o", f"DPkg::Lock::Timeout={PACKAGE_LOCK_LIMIT_S}", "install", "-q", "-y"]
            words += ["--allow-downgrades", "--no-install-recommends", *back]
            self._said([*words, *(f"{name}-" for name in gone if name in now)], failed)
        left = [name for name in gone if name in installed("ic")]
        if left and not failed:
            # dpkg refuses where somebody's package needs one of these; apt would take that away as well.
            self._said(["dpkg", "--purge", *left], failed)
        if back and self.data["held"] and not failed:
            run(["apt-mark", "hold", *self.data["held"]])

    def _said(self, words: Sequence[str], failed: list[str]) -> None:
        code, said = run(words)
        if code != 0:
            failed.append(f"{' '.join(words)}: {said[-600:]}")

    def _paths_back(self, done: list[str], failed: list[str], check: bool) -> None:
        # Deepest first, so that a folder is empty when its turn comes.
        for text in sorted(self.data["paths"], key=lambda name: (-name.count("/"), name)):
            path, before = Path(text), self.data["paths"][text]
            if look(path) == before:
                continue
            done.append(f"restore {text}" if before["kind"] else f"remove {text}")
            try:
                if not check:
                    put_back(path, before)
            except OSError as error:
                failed.append(f"{text}: {error.strerror}")

    def _values_back(self, done: list[str], failed: list[str], check: bool) -> None:
        for text, before in self.data["values"].items():
            with suppress(OSError):
                if meaning(Path(text).read_text(encoding="utf-8", errors="replace")) == before:
                    continue
            done.append(f"write {before} to {text}")
            try:
                if not check:
                    Path(text).write_text(f"{before}\n", encoding="utf-8")
            except OSError as error:
                failed.append(f"{text}: {error.strerror}")


def unit_state(name: str) -> tuple[str, bool]:
    """UnitFileState ("" for no such unit) and whether it runs."""
    _, out = run(["systemctl", "show", name, "--property", "UnitFileState,ActiveState"])
    found = dict(line.split("=", 1) for line in out.splitlines() if "=" in line)
    return found.get("UnitFileState", ""), found.get("ActiveState") in ("active", "activating", "reloading")


def size_of(mount: Path) -> int:
    """Bytes of a file system."""
    room = os.statvfs(mount)
    return room.f_blocks * room.f_frsize


def remove_tree(tree: Path) -> None:
    """Removes a folder: its own files first, so that what says "this is whole" goes before what it is about."""
    for path in sorted(tree.iterdir()):
        if path.is_symlink() or not path.is_dir():
            path.unlink()
    shutil.rmtree(tree)


def _missing_parents(path: Path) -> list[Path]:
    return [folder for folder in path.parents if not folder.exists() and not folder.is_symlink()]


def look(path: Path) -> dict[str, Any]:
    """A path as the journal keeps it: kind ("" for nothing), rights, content (base64) or a link's target."""
    try:
        status = path.lstat()
    except OSError:
        return {"kind": ""}
    if stat.S_ISLNK(status.st_mode):
        return {"kind": "link", "target": str(path.readlink())}
    rights = {"uid": status.st_uid, "gid": status.st_gid, "mode": stat.S_IMODE(status.st_mode)}
    if stat.S_ISDIR(status.st_mode):
        return {"kind": "directory", **rights}
    return {"kind": "file", **rights, "content": base64.b64encode(path.read_bytes()).decode()}


def put_back(path: Path, before: Mapping[str, Any]) -> None:
    """Makes a path what `look` had seen. A folder that others have filled since stays. Raises OSError."""
    kind = before["kind"]
    if not kind:
        _remove(path)
        return
    if kind == "directory":
        path.mkdir(parents=True, exist_ok=True)
        os.chown(path, before["uid"], before["gid"])
        path.chmod(before["mode"])
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.undo")
    if kind == "link":
        beside.symlink_to(before["target"])
    else:
        beside.write_bytes(base64.b64decode(before["content"]))
        os.chown(beside, before["uid"], before["gid"])
        beside.chmod(before["mode"])
    beside.replace(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        with suppress(OSError):
            path.rmdir()
    else:
        path.unlink(missing_ok=True)
