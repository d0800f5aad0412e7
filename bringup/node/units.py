"""Units of systemd brought to their states in one go (module `node_units`).

Standard library only. Works in check mode on a node that does not have the units yet.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import seal
from .undo import Journal

COMMAND_LIMIT_S = 180
UNIT_FOLDERS = ("/etc/systemd/system/",)
PROPERTIES = ("LoadState", "ActiveState", "UnitFileState", "NeedDaemonReload", "Listen")


class UnitsFailed(Exception):
    """What systemd did not do, one line a unit."""


@dataclass(frozen=True)
class Unit:
    """One unit (with its suffix). `restart_on`: paths; when one of them has just changed, a running unit is
    restarted. `started` None: whatever is so stays.
    """

    name: str
    enabled: bool = True
    started: bool | None = True
    restart_on: tuple[str, ...] = ()


def systemctl(*words: str) -> tuple[int, str]:
    """Exit code and what was said (stdout, else stderr)."""
    try:
        done = subprocess.run(
            ["systemctl", *words],
            capture_output=True,
            timeout=COMMAND_LIMIT_S,
            check=False,
            text=True,
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, str(error)
    return done.returncode, (done.stdout or done.stderr).strip()


def show(name: str) -> dict[str, str]:
    """PROPERTIES of a unit."""
    _, out = systemctl("show", name, "--property", ",".join(PROPERTIES))
    found = seal.properties(out)
    return {key: found.get(key, "") for key in PROPERTIES}


def steps(unit: Unit, state: Mapping[str, str], changed: Sequence[str]) -> list[str]:
    """What is to be done with a unit: some of `enable`, `disable`, `start`, `stop`, `restart`, in order."""
    todo = []
    is_enabled = state["UnitFileState"] in ("enabled", "static", "generated", "indirect")
    is_active = state["ActiveState"] in ("active", "activating", "reloading")
    if unit.enabled != is_enabled:
        todo.append("enable" if unit.enabled else "disable")
    if unit.started is not None and unit.started != is_active:
        todo.append("start" if unit.started else "stop")
    elif unit.started and (set(unit.restart_on) & set(changed) or not seal.is_listening(state["Listen"])):
        todo.append("restart")
    return todo


@contextmanager
def kept_open(listen: str) -> Iterator[None]:
    """Holds a socket unit's FIFOs for as long: who writes into one meanwhile finds it open, and what was written is
    read by the next."""
    handles = []
    try:
        for path in seal.FIFO.findall(listen):
            if Path(path).is_fifo():
                handles.append(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
        yield
    finally:
        for handle in handles:
            os.close(handle)


def apply(
    data: Sequence[Mapping[str, Any]], changed: Sequence[str], check_only: bool = False, undo: str = ""
) -> dict[str, Any]:
    """Bring all units to their states, after a daemon-reload where one is due: {changed, done, diff}. Raises
    UnitsFailed. `undo`: the role in whose journal their old states are kept (bringup/node/undo.py).
    """
    units = [
        Unit(row["name"], row["enabled"], row["started"], tuple(row["restart_on"] or ())) for row in data
    ]
    states = {unit.name: show(unit.name) for unit in units}
    reload = any(path.startswith(UNIT_FOLDERS) for path in changed) or any(
        state["NeedDaemonReload"] == "yes" for state in states.values()
    )
    done: list[str] = []
    if reload and not check_only:
        code, said = systemctl("daemon-reload")
        if code != 0:
            raise UnitsFailed(f"systemctl daemon-reload: {said}")
        states = {unit.name: show(unit.name) for unit in units}
    failed = []
    for unit in units:
        # A socket that is restarted takes the services that require it along: systemd restarts those that run.
        state = states[unit.name]
        for step in steps(unit, state, changed):
            done.append(f"{step} {unit.name}")
            if check_only:
                continue
            if undo:
                Journal(undo).remember_unit(
                    unit.name, state["UnitFileState"], state["ActiveState"] == "active"
                )
            with kept_open(state["Listen"]):
                code, said = systemctl(step, unit.name)
            if code != 0:
                failed.append(f"systemctl {step} {unit.name}: {said}")
                break
    if failed:
        raise UnitsFailed("\n".join(failed))
    if not check_only:
        seal.claim(seal.unit_row(unit.name, unit.enabled, unit.started) for unit in units)
    diff = {"before": "", "after": "\n".join(done) + "\n"} if done else {}
    return {"changed": bool(done), "done": done, "reloaded": reload, "diff": diff}
