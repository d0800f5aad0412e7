"""Files, folders and links of a role, brought to their places in one go (module `node_files`).

Everything is written beside its place and validated first; only when all of it is good does anything change,
each file by one rename. Nothing is changed in check mode, and the differences are the same.
"""

from __future__ import annotations

import grp
import hashlib
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import seal
from .undo import Journal

VALIDATE_LIMIT_S = 60
HIDDEN = "(secret, not shown)\n"


class PlaceFailed(Exception):
    """Why nothing was changed, one line a cause."""


@dataclass(frozen=True)
class Entry:
    """One thing and how it should be. `mode` is octal text; `validate` an argv in which %s is the new file,
    and `beside` texts (by name) of files of other roles that it names: with them it is right also before they
    are there.

    state file: `content`; link: `target`; directory; absent (a file or link goes, a folder only when empty).
    `whole`: whatever will be in a folder is ours, so an undo removes it with that.
    """

    path: Path
    state: str = "file"
    content: str = ""
    target: str = ""
    owner: str = "root"
    group: str = "root"
    mode: str = "0644"
    validate: tuple[str, ...] = ()
    beside: Mapping[str, str] = field(default_factory=dict)
    secret: bool = False
    whole: bool = False

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Entry:
        """From an Ansible mapping; names that are not given keep their defaults."""
        given = {name: value for name, value in data.items() if value is not None}
        return cls(**{**given, "path": Path(given["path"]), "validate": tuple(given.get("validate", ()))})


@dataclass(frozen=True)
class Difference:
    """One path before and after, as text for a diff."""

    path: str
    before: str
    after: str


def number_of_user(name: str) -> int | None:
    """The user's number; None when there is no such user (yet)."""
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        return None


def number_of_group(name: str) -> int | None:
    """The group's number; None when there is no such group (yet)."""
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        return None


def _names(status: os.stat_result) -> tuple[str, str]:
    try:
        owner = pwd.getpwuid(status.st_uid).pw_name
    except KeyError:
        owner = str(status.st_uid)
    try:
        return owner, grp.getgrgid(status.st_gid).gr_name
    except KeyError:
        return owner, str(status.st_gid)


def _rights(owner: str, group: str, mode: int) -> str:
    return f"{owner}:{group} {mode:04o}\n"


def seen(entry: Entry) -> tuple[str, str, str]:
    """What is at the path now: kind ("" for nothing), rights as text, content (or a link's target)."""
    path = entry.path
    try:
        status = path.lstat()
    except OSError:
        return "", "", ""
    rights = _rights(*_names(status), status.st_mode & 0o7777)
    if path.is_symlink():
        return "link", "", str(path.readlink())
    if path.is_dir():
        return "directory", rights, ""
    try:
        return "file", rights, path.read_bytes().decode("utf-8", errors="surrogateescape")
    except OSError as error:
        raise PlaceFailed(f"{path}: {error.strerror}") from None


def wanted(entry: Entry) -> tuple[str, str, str]:
    """What should be at the path, in the form of `seen`."""
    if entry.state == "absent":
        return "", "", ""
    if entry.state == "link":
        return "link", "", entry.target
    rights = _rights(entry.owner, entry.group, int(entry.mode, 8))
    return entry.state, rights, entry.content if entry.state == "file" else ""


def difference(entry: Entry) -> Difference | None:
    """What would change at the entry's path; None: nothing."""
    before, after = seen(entry), wanted(entry)
    if before == after:
        return None
    shown = [_shown(entry, *before), _shown(entry, *after)]
    if entry.secret and before[2] != after[2]:
        shown = [_shown(entry, *before), _shown(entry, *after) + "(another content)\n"]
    return Difference(str(entry.path), *shown)


def _shown(entry: Entry, kind: str, rights: str, content: str) -> str:
    if not kind:
        return ""
    head = f"{kind} {rights}" if rights else f"{kind}\n"
    return head + (HIDDEN if entry.secret and kind == "file" else content)


def problems(entries: Sequence[Entry]) -> list[str]:
    """What is wrong with the entries themselves."""
    found = [f"{entry.path}: not an absolute path" for entry in entries if not entry.path.is_absolute()]
    paths = [entry.path for entry in entries]
    found += [f"{path}: given twice" for path in sorted(set(paths)) if paths.count(path) > 1]
    known = ("file", "directory", "link", "absent")
    found += [f"{entry.path}: state {entry.state}" for entry in entries if entry.state not in known]
    for entry in entries:
        if (
            entry.state != "absent"
            and entry.path.is_dir()
            and not entry.path.is_symlink()
            and entry.state != "directory"
        ):
            found.append(
                f"{entry.path}: is a folder, a {entry.state} was planned. Look at it and move it away"
            )
    return found


def missing_names(entries: Sequence[Entry]) -> list[str]:
    """Users and groups that entries need and the node does not have."""
    real = [entry for entry in entries if entry.state in ("file", "directory")]
    users = sorted({entry.owner for entry in real if number_of_user(entry.owner) is None})
    groups = sorted({entry.group for entry in real if number_of_group(entry.group) is None})
    return [f"no user {name} on this node" for name in users] + [
        f"no group {name} on this node" for name in groups
    ]


def validate(entries: Sequence[Entry]) -> list[str]:
    """Run each entry's validation on a copy, all copies side by side under their own names; what was said
    against them.
    """
    found: list[str] = []
    with tempfile.TemporaryDirectory(prefix="bringup-") as folder:
        for entry in entries:
            if entry.validate:
                for name, content in {**entry.beside, entry.path.name: entry.content}.items():
                    (Path(folder) / name).write_text(content, encoding="utf-8", errors="surrogateescape")
        for entry in entries:
            if entry.validate:
                found += _complaint(entry, str(Path(folder) / entry.path.name), folder)
    return found


def _complaint(entry: Entry, copy: str, folder: str) -> list[str]:
    command = [word.replace("%s", copy) for word in entry.validate]
    environment = {**os.environ, "SYSTEMD_UNIT_PATH": f"{folder}:"}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            timeout=VALIDATE_LIMIT_S,
            check=False,
            env=environment,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"{entry.path}: {command[0]}: {error}"]
    if done.returncode == 0:
        return []
    said = (
        (done.stderr or done.stdout).decode(errors="replace").replace(f"{folder}/", "").strip().splitlines()
    )
    return [f"{entry.path}: {command[0]} refuses it: {'; '.join(said[:4]) or f'exit {done.returncode}'}"]


def _own(path: str | Path, entry: Entry) -> None:
    user, group = number_of_user(entry.owner), number_of_group(entry.group)
    os.chown(path, -1 if user is None else user, -1 if group is None else group)
    Path(path).chmod(int(entry.mode, 8))


def _write(entry: Entry) -> None:
    handle, beside = tempfile.mkstemp(dir=entry.path.parent, prefix=f".{entry.path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(entry.content.encode("utf-8", errors="surrogateescape"))
            file.flush()
            os.fsync(file.fileno())
        _own(beside, entry)
        Path(beside).replace(entry.path)
    except BaseException:
        with suppress(OSError):
            Path(beside).unlink()
        raise


def _link(entry: Entry) -> None:
    beside = entry.path.with_name(f".{entry.path.name}.{os.getpid()}")
    beside.symlink_to(entry.target)
    beside.replace(entry.path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


def put(entry: Entry) -> None:
    """Make one entry so. Raises OSError."""
    if entry.state == "absent":
        _remove(entry.path)
        return
    if entry.state == "directory":
        entry.path.mkdir(parents=True, exist_ok=True)
        _own(entry.path, entry)
        return
    entry.path.parent.mkdir(parents=True, exist_ok=True)
    if entry.state == "link":
        _link(entry)
    elif seen(entry)[::2] == wanted(entry)[::2]:
        _own(entry.path, entry)
    else:
        _write(entry)


def apply(data: Sequence[Mapping[str, Any]], check_only: bool = False, undo: str = "") -> dict[str, Any]:
    """Bring all entries to their places: {changed, changed_paths, diff}. Raises PlaceFailed (nothing changed)
    and OSError.

    In check mode a user that is not there yet is no failure: the role's tasks before this one would have made
    it. `undo`: the role in whose journal the old state is kept (bringup/node/undo.py).
    """
    entries = [Entry.of(row) for row in data]
    found = problems(entries)
    if found:
        raise PlaceFailed("\n".join(found))
    order = {"directory": 0, "file": 1, "link": 2, "absent": 3}
    entries.sort(key=lambda entry: order[entry.state])
    changes = [(entry, change) for entry in entries if (change := difference(entry))]
    changing = [entry for entry, _ in changes]
    found = ([] if check_only else missing_names(changing)) + validate(changing)
    if found:
        raise PlaceFailed("\n".join(found))
    if not check_only:
        _room([entry for entry in changing if entry.state == "file"])
        if undo:
            # All of them: one that another role has brought already is this role's as well.
            Journal(undo).remember_trees(entry.path for entry in entries if entry.whole)
            Journal(undo).remember_paths(entry.path for entry in entries)
        for entry in changing:
            put(entry)
        seal.claim(map(_claim, entries))
    return {
        "changed": bool(changes),
        "changed_paths": [change.path for _, change in changes],
        "diff": [_diff(change) for _, change in changes],
    }


def _claim(entry: Entry) -> dict[str, Any]:
    """What is to stay so, for the role's seal."""
    if entry.state == "absent":
        return seal.path_row(entry.path, "absent")
    if entry.state == "link":
        return seal.path_row(entry.path, "link", target=entry.target)
    rights = {
        "mode": int(entry.mode, 8),
        "uid": number_of_user(entry.owner),
        "gid": number_of_group(entry.group),
    }
    if entry.state == "directory":
        return seal.path_row(entry.path, "directory", **rights)
    content = entry.content.encode("utf-8", errors="surrogateescape")
    return seal.path_row(entry.path, "file", **rights, sha256=hashlib.sha256(content).hexdigest())


def _diff(change: Difference) -> dict[str, str]:
    return {
        "before_header": change.path,
        "after_header": change.path,
        "before": change.before.encode(errors="replace").decode(),
        "after": change.after.encode(errors="replace").decode(),
    }


def _room(entries: Sequence[Entry]) -> None:
    """Refuse before the first change when a disk has no room for what is to be written to it."""
    needed: dict[int, tuple[Path, int]] = {}
    for entry in entries:
        folder = next(parent for parent in entry.path.parents if parent.exists())
        device = folder.stat().st_dev
        needed[device] = (
            folder,
            needed.get(device, (folder, 0))[1] + len(entry.content.encode(errors="replace")) + 4096,
        )
    for folder, size in needed.values():
        if shutil.disk_usage(folder).free < size:
            raise PlaceFailed(f"{folder}: no room for {size} bytes. Make room and run again")
