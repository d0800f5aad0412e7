"""One run at a time for an inventory: a lock file that says who holds it, since when and for what."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from bringup import runs
from bringup.errors import Locked, Problem


@dataclass(frozen=True)
class Holder:
    """Who holds a lock. `birth` tells a process from a later one with the same number ("" where unknown)."""

    inventory: str
    command: str
    who: str
    where: str
    machine: str
    pid: int
    birth: str
    since: str

    def is_gone(self) -> bool:
        """True when the holder was a process of this machine that no longer runs."""
        if self.machine != socket.gethostname():
            return False
        if not runs.pid_alive(self.pid):
            return True
        return bool(self.birth) and runs.birth_of(self.pid) not in ("", self.birth)


@contextmanager
def hold(
    inventory: str, command: str, *, force: bool = False, folder: Path | None = None
) -> Iterator[tuple[str, ...]]:
    """Holds the inventory's lock; yields notes for the record (whose lock was taken over, and why).

    Raises Locked (exit 8) that says who holds it since when. The lock of a process of this machine that is
    gone is taken over; `force` takes over any, and is written to `runs/audit.jsonl`.
    """
    base = folder or runs.FOLDER
    path = base / ".locks" / f"{inventory.replace('/', '-')}.json"
    mine = Holder(
        inventory=inventory,
        command=command,
        who=runs.who(),
        where=runs.came_from(),
        machine=socket.gethostname(),
        pid=os.getpid(),
        birth=runs.birth_of(os.getpid()),
        since=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    with _guard(path):
        notes = _take(path, mine, force, base)
    try:
        yield notes
    finally:
        with _guard(path):
            if _read(path) == mine:
                path.unlink(missing_ok=True)


def holder(inventory: str, folder: Path | None = None) -> Holder | None:
    """Who holds an inventory's lock now, or None."""
    path = (folder or runs.FOLDER) / ".locks" / f"{inventory.replace('/', '-')}.json"
    found = _read(path)
    return None if found is None or found.is_gone() else found


def _take(path: Path, mine: Holder, force: bool, base: Path) -> tuple[str, ...]:
    before = _read(path)
    notes: tuple[str, ...] = ()
    if before is not None and before.is_gone():
        notes = (f"Took over the lock of {before.who} (process {before.pid}, gone) from {before.since}.",)
    elif before is not None and force:
        notes = (f"Broke the lock of {before.who} on {before.where} from {before.since} (--force-unlock).",)
        entry = {"what": "force-unlock", "by": dataclasses.asdict(mine), "held": dataclasses.asdict(before)}
        runs.append_line(base / "audit.jsonl", entry)
    elif before is not None:
        raise Locked(
            Problem(
                f"inventory {mine.inventory}",
                f"is locked by {before.who} on {before.where} since {before.since} "
                f"({before.command}, process {before.pid})",
                "Wait for that run, or break its lock with --force-unlock when it is certainly dead",
            )
        )
    runs.write_private(path, json.dumps(dataclasses.asdict(mine)) + "\n")
    return notes


def _read(path: Path) -> Holder | None:
    try:
        return Holder(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


@contextmanager
def _guard(path: Path) -> Iterator[None]:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path.parent / ".guard", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
