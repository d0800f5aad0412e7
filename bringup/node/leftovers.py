"""`leftovers.py [--remove ID ...]`: what servers that crashed, or were started by hand, left on this node; as
JSON.

Found: processes of the servers' users outside of their units, files in shared memory and System V segments,
semaphores and queues of those users that nobody uses, locks of killed builds in the servers' caches, planned
ports and GPUs held by processes outside of the units. Only looks, unless IDs (as it printed them) are given; each
is looked at again before it goes, so that nothing is removed that has changed since.
"""

from __future__ import annotations

import argparse
import json
import os
import pwd
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bringup.node import common, serve

SHM = Path("/dev/shm")
SYSV = Path("/proc/sysvipc")
SYSV_KINDS: Mapping[str, tuple[str, str, str, str]] = {
    "sysv": ("shm", "-m", "size", "System V segment {number} ({size} bytes)"),
    "semaphores": ("sem", "-s", "nsems", "System V semaphores {number} ({size})"),
    "messages": ("msg", "-q", "cbytes", "System V queue {number} ({size} bytes)"),
}
"""Kind -> its table, what `ipcrm` calls it, the column that is its size, and what is said of it."""

NUMBERS: Mapping[str, str] = {"shm": "shmid", "sem": "semid", "msg": "msqid"}
"""Table -> its column of numbers."""

TERM_WAIT_S = 10.0
KILL_WAIT_S = 5.0
POLL_S = 0.1
OLD_ENOUGH_S = 60.0
"""A shared-memory file younger than this may belong to a process that is just about to open it."""


@dataclass(frozen=True)
class Leftover:
    """One thing that should not be there. `id` is what `--remove` takes: kind, and what names it for good."""

    id: str
    kind: str
    what: str
    why: str


def services() -> list[dict[str, Any]]:
    """All services described on this node."""
    return [data for path in sorted(common.SERVICES.glob("*.json")) if (data := common.read_json(path))]


def user_ids(known: Iterable[Mapping[str, Any]]) -> dict[int, str]:
    """Number -> name of the servers' own users (never root, nor a person's)."""
    found = {}
    for name in {str(service["user"]) for service in known}:
        try:
            number = pwd.getpwnam(name).pw_uid
        except KeyError:
            continue
        if number != 0:
            found[number] = name
    return found


def start_ticks(pid: int) -> str:
    """When the process was started, in the kernel's ticks: with its number, its name for good."""
    try:
        text = (Path("/proc") / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[19]


def ours(unit: str) -> bool:
    """Does a process in this unit belong there? Our units are named `bringup-...`."""
    return unit.startswith("bringup-") and unit.endswith(".service")


def _process(pid: int, why: str) -> Leftover:
    return Leftover(
        f"process:{pid}:{start_ticks(pid)}", "process", f"process {pid} ({common.command_line(pid)})", why
    )


def lost_processes(users: Mapping[int, str]) -> list[Leftover]:
    """Processes of the servers' users outside of our units."""
    found = []
    for pid in common.processes():
        try:
            owner = (Path("/proc") / str(pid)).stat().st_uid
        except OSError:
            continue
        if owner in users and not ours(common.unit_of(pid)):
            found.append(_process(pid, f"runs as {users[owner]} outside of every server's unit"))
    return found


def held_ports(known: Iterable[Mapping[str, Any]]) -> list[Leftover]:
    """Processes that listen on a planned port and are not in its server's unit."""
    found = []
    for service in known:
        for pid in common.holders(common.sockets(int(service["port"]), common.LISTENING)):
            if common.unit_of(pid) != f"{service['unit']}.service":
                found.append(
                    _process(
                        pid, f"listens on port {service['port']}, which is planned for {service['name']}"
                    )
                )
    return found


def held_gpus(known: Iterable[Mapping[str, Any]]) -> list[Leftover]:
    """Processes that compute on a planned GPU and are in none of our units."""
    gpus = {gpu for service in known for gpu in service.get("gpus") or []}
    found = []
    for gpu, pid in common.gpu_holders(gpus):
        if not ours(common.unit_of(pid)):
            found.append(_process(pid, f"holds GPU {gpu}"))
    return found


def used_shm() -> set[str]:
    """Names in shared memory that some process has mapped or open (as that process sees them)."""
    used: set[str] = set()
    for pid in common.processes():
        with suppress(OSError):
            maps = (Path("/proc") / str(pid) / "maps").read_text(encoding="utf-8", errors="replace")
            used.update(row.partition(f"{SHM}/")[2] for row in maps.splitlines() if f"{SHM}/" in row)
            opened = common.open_files(pid)
            used.update(name.partition(f"{SHM}/")[2] for name in opened if name.startswith(f"{SHM}/"))
    return used


def lost_shm(users: Mapping[int, str], now: float, folder: Path = SHM) -> list[Leftover]:
    """Files in shared memory of the servers' users that no process has open."""
    used, found = used_shm(), []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        status = path.lstat()
        if (
            status.st_uid in users
            and path.is_file()
            and path.name not in used
            and now - status.st_mtime > OLD_ENOUGH_S
        ):
            what = f"{path} ({status.st_size / 1024**2:.1f} MiB)"
            why = f"belongs to {users[status.st_uid]} and no process uses it"
            found.append(Leftover(f"shm:{path.name}:{status.st_ino}", "shm", what, why))
    return found


def lost_sysv(users: Mapping[int, str], running: Iterable[int], folder: Path = SYSV) -> list[Leftover]:
    """System V segments of the servers' users with no process attached, and semaphores and queues of those
    without any process at all (`running`: owners of processes).
    """
    found, alive = [], set(running)
    for kind, (table, _, measure, what) in SYSV_KINDS.items():
        for row in _table(folder / table):
            owner, number, size = int(row["uid"]), row[NUMBERS[table]], row[measure]
            used = row["nattch"] != "0" if "nattch" in row else owner in alive
            if owner in users and not used:
                why = f"belongs to {users[owner]} and no process uses it"
                found.append(
                    Leftover(f"{kind}:{number}:{size}", kind, what.format(number=number, size=size), why)
                )
    return found


def _table(path: Path) -> list[dict[str, str]]:
    """Rows of a table of the kernel's with a head."""
    try:
        head, *rows = path.read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return []
    return [dict(zip(head.split(), row.split())) for row in rows]  # noqa: B905 (nodes have Python 3.9)


def lost_locks(known: Iterable[Mapping[str, Any]]) -> list[Leftover]:
    """Locks of builds that were killed: every later start of the server waits for them."""
    return [
        Leftover(f"lock:{path}:{path.stat().st_ino}", "lock", f"lock {path}", "no process holds it")
        for service in known
        for path in serve.stale_locks(service)
    ]


def owners() -> set[int]:
    """Users that have a process."""
    found = set()
    for pid in common.processes():
        with suppress(OSError):
            found.add((common.PROC / str(pid)).stat().st_uid)
    return found


def find() -> list[Leftover]:
    """Everything that is left over on this node, each thing once."""
    known = services()
    users = user_ids(known)
    found = [
        *held_gpus(known),
        *held_ports(known),
        *lost_processes(users),
        *lost_shm(users, time.time()),
        *lost_sysv(users, owners()),
        *lost_locks(known),
    ]
    return list({item.id: item for item in reversed(found)}.values())[::-1]


def gone(pid: int, ticks: str, limit_s: float) -> bool:
    """Wait for a process's end; was it in time?"""
    until = time.monotonic() + limit_s
    while start_ticks(pid) == ticks:
        if time.monotonic() >= until:
            return False
        time.sleep(POLL_S)
    return True


def end_process(pid: int, ticks: str) -> str:
    """TERM, then KILL; why it is still there, or the empty string."""
    for number, limit in ((signal.SIGTERM, TERM_WAIT_S), (signal.SIGKILL, KILL_WAIT_S)):
        if start_ticks(pid) != ticks:
            return ""
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return ""
        except PermissionError:
            return "not allowed: run as root"
        if gone(pid, ticks, limit):
            return ""
    return "it does not end, not even by SIGKILL (waiting for a driver?)"


def remove(item: Leftover) -> str:
    """Remove one thing that was just found; why it is still there, or the empty string."""
    name, mark = item.id.partition(":")[2].rsplit(":", 1)
    if item.kind == "process":
        return end_process(int(name), mark)
    if item.kind in SYSV_KINDS:
        code, _, err = common.run(["ipcrm", SYSV_KINDS[item.kind][1], name])
        return "" if code == 0 else err.strip()
    try:
        # A lock's name is a whole path.
        (SHM / name).unlink(missing_ok=True)
    except OSError as error:
        return str(error.strerror)
    return ""


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="leftovers.py", description="what crashed servers left on this node"
    )
    parser.add_argument(
        "--remove", nargs="+", metavar="ID", default=[], help="remove these, as printed before"
    )
    options = parser.parse_args(words)
    found = find()
    removed, failed = [], {}
    for item in found:
        if item.id in options.remove:
            why = remove(item)
            if why:
                failed[item.id] = why
            else:
                removed.append(item.id)
    left = [asdict(item) for item in found if item.id not in removed]
    missing = [one for one in options.remove if one not in {item.id for item in found}]
    print(
        json.dumps(
            {"schema_version": 1, "leftovers": left, "removed": removed, "failed": failed, "missing": missing}
        )
    )
    return 4 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
