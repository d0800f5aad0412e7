"""Words and verdicts of the lock on a node: who holds it, whether that run is over, whether it is time."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypedDict

from bringup import runs, windows
from bringup.node.light import HELD

MARK = "bringup_locked"
"""Field of a task's result that failed because the node could not be held."""

GIVEN_BACK = "bringup_given_back"
"""Field of the result of a rescue: what failed on the node was another task, before it."""


def identity(pid: int, task: str = "") -> dict[str, Any]:
    """Who runs what from where: `pid` is the run's process on this machine, `task` where the task stands
    (`/path/playbook.yml:12`).
    """
    birth, machine = runs.birth_of(pid), socket.gethostname()
    return {
        "token": f"{machine}:{pid}:{birth}",
        "id": os.environ.get("BRINGUP_RUN_ID", ""),
        "by": os.environ.get("BRINGUP_BY") or runs.who(),
        "commit": os.environ.get("BRINGUP_COMMIT", ""),
        "where": runs.came_from(),
        "machine": machine,
        "pid": pid,
        "birth": birth,
        "playbook": Path(task.rpartition(":")[0] or task).stem,
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
    }


class Wanted(TypedDict):
    """What a node is asked that is to be held: for whom, over which run's token, from anybody, and why nothing may be
    changed now on a node that is not held yet (`bringup/node/nodelock.py: take`). `reason`: why that does not count."""

    holder: dict[str, Any]
    over: str
    force: bool
    closed: str
    reason: str


def wanted(known: Mapping[str, Any], mine: Mapping[str, Any]) -> Wanted:
    """From the variables of a play: `node_change_windows`, `run_outside_window` (why a change cannot wait) and
    `run_force_unlock`."""
    shut = closed(known.get("node_change_windows") or (), datetime.now(UTC))
    reason = str(known.get("run_outside_window") or "")
    force = str(known.get("run_force_unlock", "")).lower() in ("true", "yes", "1")
    return {
        "holder": dict(mine),
        "over": "",
        "force": force,
        "closed": "" if reason else shut,
        "reason": reason if shut else "",
    }


def through(ask: Callable[[Wanted], dict[str, Any]], lock: Wanted) -> dict[str, Any]:
    """What a node answered that had to be held first. When a run of this machine that is gone holds it, that is taken
    over; any other refusal is a failure with words for the operator, marked as one of the lock."""
    answer = ask(lock)
    held = answer.pop(HELD, {})
    if held.get("how") == "refused" and is_gone(held["other"], socket.gethostname()):
        answer = ask({**lock, "over": held["other"]["token"]})
        held = answer.pop(HELD, {})
    why = {"refused": refusal(held.get("other") or {}), "closed": lock["closed"]}.get(
        str(held.get("how")), ""
    )
    if why:
        return {"failed": True, "changed": False, "msg": why, MARK: True}
    said = notes(held, "" if held.get("how") == "renewed" else lock["reason"])
    return {**answer, "bringup_notes": [*said, *(answer.get("bringup_notes") or ())]} if said else answer


def is_gone(holder: Mapping[str, Any], machine: str) -> bool:
    """Did this machine start that run, and is its process gone?"""
    if holder.get("machine") != machine:
        return False
    pid = int(holder.get("pid") or 0)
    if not runs.pid_alive(pid):
        return True
    born = str(holder.get("birth") or "")
    return bool(born) and runs.birth_of(pid) not in ("", born)


def closed(ranges: Sequence[str], now: datetime) -> str:
    """Why nothing may be changed at this moment; empty: it may."""
    if windows.is_open(ranges, now):
        return ""
    return (
        f"It is {now:%a %H:%M} UTC, and this node is changed only in {', '.join(ranges)} "
        "(node_change_windows). Wait, or say why it cannot: --outside-window REASON"
    )


def refusal(holder: Mapping[str, Any]) -> str:
    """What an operator is told who finds the node held: by whom, whether that run can be seen, and until when."""
    return (
        f"This node is held by {holder.get('by')} on {holder.get('where')} since {holder.get('since')} "
        f"({holder.get('playbook')}{_run(holder)}, process {holder.get('pid')}). {_until(holder)}"
    )


def _until(holder: Mapping[str, Any]) -> str:
    minutes = float(holder.get("idle_s") or 0) / 60
    left = holder.get("left_s")
    if left is None:
        return (
            f"Its SSH connection is open, last renewed {minutes:.0f} min ago. Wait for that run, or break its lock "
            "with --force-unlock when it is certainly dead"
        )
    return (
        f"Its SSH connection is gone, last sign of life {minutes:.0f} min ago: it works on other nodes, or it ended. "
        f"The same command on {holder.get('machine')} takes the lock over at once if it ended; here it is free in "
        f"{float(left) / 60:.0f} min. Ask {holder.get('by')}, or break the lock with --force-unlock"
    )


def _run(holder: Mapping[str, Any]) -> str:
    return f", run {holder['id']}" if holder.get("id") else ""


def notes(answer: Mapping[str, Any], reason: str) -> list[str]:
    """For the record: whose lock was taken over or broken, and why a change did not wait for its window."""
    other = answer.get("other") or {}
    told = {
        "over": "Took over the lock of {by} ({playbook}, process {pid}, gone) from {since}.",
        "forced": "Broke the lock of {by} on {where} from {since} (--force-unlock).",
    }.get(str(answer.get("how")), "")
    found = [told.format_map({**dict.fromkeys(("by", "playbook", "pid", "since", "where"), "?"), **other})]
    if reason:
        found.append(f"Outside of its change window: {reason}")
    return [one for one in found if one]
