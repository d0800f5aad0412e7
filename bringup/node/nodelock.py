"""One run at a time on a node, whichever controller it comes from (module `node_lock`).

The lock is a file under /run that says who holds it, since when and for what: a reboot takes it away, and so
it cannot outlive what it protects. It counts as held while the SSH session that took or renewed it is there,
and for GRACE_S after that (a run may be busy with other nodes). Whether the run itself still lives is known
to its own controller only, which then says so (`over`).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .files import locked, read_text, write_atomic
from .stamp import old_stamps, stamp_path

LOCK = Path("/run/bringup/run.json")
GUARD = Path("/run/bringup/run.guard")
AUDIT = Path("/var/lib/bringup/audit.jsonl")
STAMPS = Path("/var/lib/bringup/runs")
SCHEMA_VERSION = 1

GRACE_S = 3600.0
"""How long a lock counts after its SSH session has ended: other nodes of the same run may take so long."""

GUARD_LIMIT_S = 10.0
STAMPS_KEPT = 50
ANCESTORS = 32


@dataclass(frozen=True)
class Taken:
    """How an attempt ended: `held` by us or not, the other `holder` (empty: there was none), and `how` the
    lock came to us: `free`, `renewed`, `over` (its run had ended), `forced`, or `refused`.
    """

    held: bool
    how: str
    holder: Mapping[str, Any]


def now() -> float:
    """Seconds since boot, also asleep: no clock that is set can make a lock older or younger."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def hold(
    mine: Mapping[str, Any],
    *,
    over: str = "",
    force: bool = False,
    path: Path = LOCK,
    guard: Path = GUARD,
    audit: Path = AUDIT,
    at: float | None = None,
) -> Taken:
    """Takes or renews the lock for `mine` (`token` tells runs apart).

    `over`: a token whose run is known to have ended; `force`: take it from anybody, which is written down.
    """
    at = now() if at is None else at
    guard.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    with locked(guard, GUARD_LIMIT_S):
        before = read(path)
        how = _how(before, mine, over, force, at)
        if how == "refused":
            return Taken(False, how, {**before, "idle_s": idle(before, at), "left_s": left(before, at)})
        text = {"schema_version": SCHEMA_VERSION, **mine, "session": session(), "renewed": round(at, 1)}
        if how == "renewed":
            text["since"] = before.get("since", mine.get("since", ""))
        write_atomic(path, json.dumps(text, sort_keys=True) + "\n")
    if how == "forced":
        write_line(audit, {"what": "force-unlock", "at": time.time(), "by": dict(mine), "held": before})
    return Taken(True, how, {} if how in ("free", "renewed") else before)


def take(asked: Mapping[str, Any]) -> dict[str, Any]:
    """How a node comes to be held: `how` (see `Taken`, or `closed`) and the `other` run. `asked`: holder, over, force,
    and `closed`: why nothing may be changed now on a node that this run does not hold yet."""
    if asked["closed"] and read(LOCK).get("token") != asked["holder"]["token"]:
        return {"how": "closed", "other": {}}
    taken = hold(asked["holder"], over=asked["over"], force=asked["force"])
    return {"how": taken.how, "other": dict(taken.holder)}


def _how(before: Mapping[str, Any], mine: Mapping[str, Any], over: str, force: bool, at: float) -> str:
    if not before:
        return "free"
    if before.get("token") == mine["token"]:
        return "renewed"
    if (over and before.get("token") == over) or is_over(before, at):
        return "over"
    return "forced" if force else "refused"


def give_back(token: str, *, path: Path = LOCK, guard: Path = GUARD) -> bool:
    """Removes the lock when it is this run's; was it?"""
    guard.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    with locked(guard, GUARD_LIMIT_S):
        ours = read(path).get("token") == token
        if ours:
            path.unlink(missing_ok=True)
    return ours


def stamp(run: Mapping[str, Any], folder: Path = STAMPS, at: float | None = None) -> Path:
    """Writes down on the node that a run has been here; a record, and no change."""
    at = time.time() if at is None else at
    path = stamp_path(folder, str(run.get("id", "")), at)
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    write_atomic(
        path,
        json.dumps({"schema_version": SCHEMA_VERSION, "at": round(at, 3), **run}, indent=1, sort_keys=True)
        + "\n",
    )
    for name in old_stamps([one.name for one in folder.iterdir()], STAMPS_KEPT):
        (folder / name).unlink(missing_ok=True)
    return path


def read(path: Path) -> dict[str, Any]:
    """Who holds a lock; empty: nobody. A file that is no lock holds nothing."""
    try:
        found = json.loads(read_text(path))
    except ValueError:
        return {}
    return found if isinstance(found, dict) and found.get("token") else {}


def is_over(holder: Mapping[str, Any], at: float) -> bool:
    """Has its SSH session ended, and the grace after its last sign of life as well?"""
    return not session_lives(str(holder.get("session", ""))) and idle(holder, at) > GRACE_S


def idle(holder: Mapping[str, Any], at: float) -> float:
    """Seconds since the lock was taken or renewed."""
    return round(max(0.0, at - float(holder.get("renewed") or 0.0)), 1)


def left(holder: Mapping[str, Any], at: float) -> float | None:
    """Seconds that the lock still counts for other controllers; None while its SSH session is there."""
    if session_lives(str(holder.get("session", ""))):
        return None
    return round(max(0.0, GRACE_S - idle(holder, at)), 1)


def session(pid: int | None = None, proc: Path = Path("/proc")) -> str:
    """The SSH session that this process runs in, as `pid:start`; empty: it runs in none."""
    pid = os.getppid() if pid is None else pid
    for _ in range(ANCESTORS):
        name, fields = _stat(proc, pid)
        if not fields or pid <= 1:
            break
        if name.startswith("sshd"):
            return f"{pid}:{fields[19]}"
        pid = int(fields[1])
    return ""


def session_lives(mark: str, proc: Path = Path("/proc")) -> bool:
    """Is the session that `session` named still there? One that ended and was not collected is not."""
    pid, _, start = mark.partition(":")
    if not pid.isdigit():
        return False
    _, fields = _stat(proc, int(pid))
    return bool(fields) and fields[0] not in ("Z", "X") and fields[19] == start


def _stat(proc: Path, pid: int) -> tuple[str, list[str]]:
    """Name and the fields after it (state first) of a process; nothing when it is gone."""
    head, _, tail = read_text(proc / str(pid) / "stat").rpartition(")")
    return head.partition("(")[2], tail.split()


def write_line(path: Path, data: Mapping[str, Any]) -> None:
    """Appends a line for auditors, synced; root's only."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(descriptor, (json.dumps(data, sort_keys=True) + "\n").encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
