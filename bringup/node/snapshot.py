"""The files that define this node's servers, kept while they are good, and brought back (module `node_snapshot`).

`/var/lib/bringup/good/<time>-<digest>.json` (root, 0600): every path with its text, owner and mode, or that it
was not there. Environments and models are not copied: the old ones stay beside the new ones.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .files import read_text, sync_folder, write_atomic

FOLDER = Path("/var/lib/bringup/good")
KEPT = 5
SCHEMA_VERSION = 1
LARGEST_BYTES = 4 * 1024 * 1024


class NoSnapshot(Exception):
    """There is nothing to go back to."""


def look(path: Path) -> dict[str, Any]:
    """A path as it is: kind `file` (text, mode, owner), `link` (target), `missing`, or `other` (not kept)."""
    try:
        about = path.lstat()
    except OSError:
        return {"kind": "missing"}
    if path.is_symlink():
        return {"kind": "link", "target": str(path.readlink())}
    if not path.is_file() or about.st_size > LARGEST_BYTES:
        return {"kind": "other"}
    text = base64.b64encode(path.read_bytes()).decode()
    return {
        "kind": "file",
        "data": text,
        "mode": about.st_mode & 0o7777,
        "uid": about.st_uid,
        "gid": about.st_gid,
    }


def state_of(paths: Iterable[str]) -> dict[str, dict[str, Any]]:
    """All of the paths as they are."""
    return {path: look(Path(path)) for path in sorted(set(paths))}


def digest_of(state: Mapping[str, Any]) -> str:
    """A name for a state: equal states, equal names."""
    return hashlib.sha256(json.dumps(dict(state), sort_keys=True).encode()).hexdigest()[:16]


def kept(folder: Path = FOLDER) -> list[Path]:
    """Snapshots, oldest first."""
    return sorted(folder.glob("*.json")) if folder.is_dir() else []


def keep(paths: Iterable[str], folder: Path = FOLDER, now: float | None = None) -> tuple[str, bool]:
    """Keeps the state of the paths, and of those that the newest snapshot has; its name, and whether it is new."""
    before = kept(folder)
    state = state_of([*paths, *(read(before[-1]) if before else ())])
    digest = digest_of(state)
    if before and before[-1].stem.endswith(digest):
        return before[-1].stem, False
    moment = time.time() if now is None else now
    name = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(moment))}-{digest}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomic(
        folder / f"{name}.json", json.dumps({"schema_version": SCHEMA_VERSION, "files": state}) + "\n", 0o600
    )
    for path in kept(folder)[:-KEPT]:
        path.unlink(missing_ok=True)
    return name, True


def read(path: Path) -> dict[str, dict[str, Any]]:
    """A snapshot's paths and what they were. Raises NoSnapshot when it is none."""
    try:
        files = json.loads(read_text(path))["files"]
    except (ValueError, KeyError, TypeError):
        raise NoSnapshot(f"{path} is no snapshot") from None
    return dict(files)


def choose(name: str = "", folder: Path = FOLDER) -> Path:
    """The snapshot of this name, or the newest that is not what the node is now. Raises NoSnapshot."""
    known = kept(folder)
    found = [path for path in known if (path.stem == name if name else changes(read(path)))]
    if not found:
        raise NoSnapshot(
            f"no snapshot {name} in {folder}" if name else f"{folder} holds nothing else to go back to"
        )
    return found[-1]


def changes(files: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Paths that are not what a snapshot says."""
    return [path for path, was in files.items() if was["kind"] != "other" and look(Path(path)) != was]


def restore(files: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Makes every path what it was; the paths that were changed."""
    changed = changes(files)
    for name in changed:
        _restore(Path(name), files[name])
    return changed


def _restore(path: Path, was: Mapping[str, Any]) -> None:
    if was["kind"] == "missing":
        if path.is_symlink() or path.is_file():
            path.unlink()
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.back")
    beside.unlink(missing_ok=True)
    if was["kind"] == "link":
        beside.symlink_to(was["target"])
    else:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(base64.b64decode(was["data"]))
            os.fchown(stream.fileno(), was["uid"], was["gid"])
            os.fchmod(stream.fileno(), was["mode"])
            stream.flush()
            os.fsync(stream.fileno())
    beside.replace(path)
    sync_folder(path.parent)
