"""The models on a node: are they right, what do they take, who uses them, and what may go.

`main(request)` prints one JSON object, the last line; how far a deep look is stands in lines before it. It changes
nothing but for `gc` with `remove`.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import contents, graft, overlay
from .files import read_text
from .store import OURS, READY, Model, Read, StoreFailed, is_stamped, stamp_of, verify


class Teller:
    """Says on stdout how many bytes were read, at most every `every_s` seconds: `{"read": 5, "of": 9}`, one a line."""

    def __init__(self, total: int, every_s: float) -> None:
        self._total, self._every_s = total, every_s
        self._read, self._said = 0, time.monotonic()
        self._lock = threading.Lock()

    def read(self, count: int) -> None:
        """Counts."""
        with self._lock:
            self._read += count
            if time.monotonic() - self._said >= self._every_s:
                self._said = time.monotonic()
                print(json.dumps({"read": self._read, "of": self._total}), flush=True)


def bytes_of(data: Mapping[str, Any]) -> int:
    """Bytes that a deep look at a planned model reads."""
    try:
        whole = overlay.stamped(overlay.Overlay.of(data)) if data.get("graft") else Model.of(data)
    except StoreFailed:
        return 0
    return sum(file.size for file in whole.files)


def verified(data: Mapping[str, Any], deep: bool, read: Read | None = None) -> dict[str, Any]:
    """Is one planned model right? `ready`, `faults` (path -> what), `problems` (what makes no sense)."""
    row: dict[str, Any] = {"model": data["name"], "folder": data["folder"], "deep": deep}
    try:
        if data.get("graft"):
            return {**row, **_overlay(overlay.Overlay.of(data), deep, read)}
        model = Model.of(data)
    except StoreFailed as error:
        return {**row, "ready": False, "faults": {}, "problems": [str(error)], "bytes": 0}
    faults = verify(model, deep, read=read)
    whole = [file.path for file in model.files if file.path not in faults]
    problems = contents.check_model(model.folder, whole, model.expects) if deep and not faults else []
    left = contents.leftovers(model.folder) if model.folder.is_dir() else []
    problems += [
        f"left by a download that was broken off: {name}" for name in left if not name.startswith(OURS)
    ]
    if not model.files:
        problems.append("has no lock")
    return {
        **row,
        "ready": not faults and not problems and is_stamped(model),
        "faults": faults,
        "problems": problems,
        "bytes": sum(file.size for file in model.files),
    }


def _overlay(whole: overlay.Overlay, deep: bool, read: Read | None) -> dict[str, Any]:
    seen = overlay.look(whole, deep, read)
    held = sum(file.size for file in overlay.stamped(whole).files)
    return {"ready": seen["ready"], "faults": seen["faults"], "problems": [], "bytes": held}


def shelf(root: Path, planned: Sequence[str], proc: Path, units: Path) -> list[dict[str, Any]]:
    """Every folder below the models' root: bytes on disk, ready, planned, pids that have it open, units.

    `bytes` of all rows add up to what the disk holds: a file with names in two folders (a graft's) counts in
    the one that it came to first, and as `shared` in the other. `frees` is what removing the folder would free.
    """
    folders = sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
    inside = {folder: _files_of(folder) for folder in folders}
    open_by = users(inside, proc)
    counted: set[Inode] = set()
    rows = {}
    for folder in sorted(folders, key=lambda one: (one / graft.RECORD).is_file()):
        files = inside[folder]
        rows[folder] = {
            "folder": str(folder),
            "model": folder.name,
            "bytes": sum(file.size for inode, file in files.items() if inode not in counted),
            "shared": sum(file.size for inode, file in files.items() if inode in counted),
            "frees": sum(file.size for file in files.values() if file.links == len(file.names)),
            "ours": (folder / OURS).is_dir(),
            "ready": bool(stamp_of(folder)),
            "planned": str(folder) in planned,
            "pids": open_by.get(folder, []),
            "units": units_of(folder, units),
        }
        counted |= files.keys()
    return [rows[folder] for folder in folders]


def used_by(folder: Path, proc: Path = Path("/proc"), units: Path = Path("/etc/systemd/system")) -> list[str]:
    """Who uses one model's folder: services that name it and processes that have it open."""
    pids = users({folder: _files_of(folder)}, proc).get(folder, [])
    return [*units_of(folder, units), *(f"process {pid}" for pid in pids)]


Inode = tuple[int, int]
"""Device and number: what a file is, whatever it is called and from where it is looked at."""


@dataclass
class Held:
    """A file of a folder: bytes on the disk, how many names it has anywhere, and its names in the folder."""

    size: int
    links: int
    names: list[str]


def _files_of(folder: Path) -> dict[Inode, Held]:
    found: dict[Inode, Held] = {}
    for here, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                status = Path(here, name).lstat()
                inode = (status.st_dev, status.st_ino)
                held = found.setdefault(inode, Held(status.st_blocks * 512, status.st_nlink, []))
                held.names.append(name)
    return found


def may_go(row: Mapping[str, Any]) -> bool:
    """Garbage: ours, not planned, open in no process and named by no unit."""
    return bool(row["ours"]) and not (row["planned"] or row["pids"] or row["units"])


def users(folders: Mapping[Path, Mapping[Inode, Held]], proc: Path) -> dict[Path, list[int]]:
    """The processes that have a file of each folder open or mapped.

    By path, and by the file itself: a process in another mount namespace, or one that came by a link or a
    graft's second name, calls it something else.
    """
    spelt = {folder: {f"{folder}/", f"{folder.resolve()}/"} for folder in folders}
    known = {name for files in folders.values() for file in files.values() for name in file.names}
    found: dict[Path, list[int]] = {}
    for entry in proc.iterdir() if folders else ():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            maps = read_text(entry / "maps")
            paths, inodes = _open_files(entry, known)
            seen, inodes = maps + "\n".join(paths) + "\n", inodes | _mapped(maps)
            for folder, files in folders.items():
                if any(text in seen for text in spelt[folder]) or not inodes.isdisjoint(files):
                    found.setdefault(folder, []).append(int(entry.name))
    return found


def _open_files(process: Path, known: Container[str]) -> tuple[list[str], set[Inode]]:
    """Paths of a process's open files, and of those with a known name what they are.

    Others are not touched: looking at a file on a network that is gone would never end.
    """
    paths, inodes = [], set()
    with suppress(OSError):
        for link in (process / "fd").iterdir():
            with suppress(OSError):
                path = link.readlink()
                paths.append(str(path))
                if path.name in known:
                    status = link.stat()
                    inodes.add((status.st_dev, status.st_ino))
    return paths, inodes


def _mapped(maps: str) -> set[Inode]:
    """What a process has mapped, from the text of its `maps` (proc(5))."""
    found = set()
    for line in maps.splitlines():
        words = line.split(None, 5)
        if len(words) == 6 and words[4] != "0":
            major, _, minor = words[3].partition(":")
            found.add((os.makedev(int(major, 16), int(minor, 16)), int(words[4])))
    return found


def units_of(folder: Path, units: Path) -> list[str]:
    """The services whose unit or description names a folder (a stopped one may start again)."""
    names = {str(folder), str(folder.resolve())}
    texts = {
        path: read_text(path) for place in (units, Path("/etc/bringup/services")) for path in _texts(place)
    }
    return sorted(
        path.stem
        for path, text in texts.items()
        if any(f"{name}{end}" in text for name in names for end in ("/", '"', "'", " ", "\n", "\\"))
    )


def _texts(place: Path) -> list[Path]:
    return sorted([*place.glob("*.service"), *place.glob("*.json")]) if place.is_dir() else []


def collect(rows: Sequence[Mapping[str, Any]], remove: bool) -> list[dict[str, Any]]:
    """What may go, and (with `remove`) goes: the stamp first, so that half a folder never counts as ready."""
    garbage = [dict(row) for row in rows if may_go(row)]
    for row in garbage if remove else ():
        folder = Path(row["folder"])
        (folder / READY).unlink(missing_ok=True)
        shutil.rmtree(folder)
    return garbage


def grafts(rows: Sequence[Mapping[str, Any]], undo: str) -> list[dict[str, Any]]:
    """The overlays: of what they are made, and whether they are ready; `undo` (a model's name) goes, unless a
    process has it open."""
    found = []
    for row in rows:
        try:
            record = json.loads(read_text(Path(row["folder"]) / graft.RECORD))
        except ValueError:
            continue
        about = {name: record[name] for name in ("base", "delta", "layer")}
        seen = {"model": row["model"], "folder": row["folder"], "ready": row["ready"], **about}
        if row["model"] == undo:
            if row["pids"]:
                pids = ", ".join(map(str, row["pids"]))
                found.append({**seen, "refused": f"is open in process {pids}: stop it first"})
                continue
            graft.undo(Path(row["folder"]))
            seen["ready"] = False
        found.append(seen)
    return found


def main(
    request: Mapping[str, Any], proc: Path = Path("/proc"), units: Path = Path("/etc/systemd/system")
) -> None:
    """`what`: verify (`models`, `deep`, `say_every_s`), space, gc (`root`, `planned`, `remove`) or graft (`undo`)."""
    if request["what"] == "verify":
        teller = Teller(sum(map(bytes_of, request["models"])), float(request["say_every_s"]))
        read = teller.read if request["deep"] else None
        answer: Any = [verified(model, bool(request["deep"]), read) for model in request["models"]]
    else:
        rows = shelf(Path(request["root"]), request["planned"], proc, units)
        if request["what"] == "graft":
            answer = grafts(rows, str(request["undo"]))
        else:
            answer = rows if request["what"] == "space" else collect(rows, bool(request["remove"]))
    free = {root: shutil.disk_usage(root).free for root in [request.get("root", "/")] if Path(root).is_dir()}
    print(json.dumps({"rows": answer, "free": next(iter(free.values()), None)}))
