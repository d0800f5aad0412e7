"""Kernel values, timers, shared memory and the clock of a node (module `system_settings`).

A value that cannot be set here, because the machine lacks it or its file is read-only (a container), is
reported with the reason and fails nothing: the files that set it at boot are written all the same.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import packages, place, seal, undo, units

CLOCK_UNITS = ("chrony", "chronyd", "ntpsec", "ntp", "ntpd", "systemd-timesyncd", "phc2sys")
"""Services that keep a clock right; one of them is enough."""

SHM = Path("/dev/shm")
SHM_SLACK = 0.95
"""Part of the wanted size that is as good as all of it: the kernel rounds to pages."""


@dataclass(frozen=True)
class Value:
    """One file and what it should say; `path` may be a pattern, such as one file for each CPU."""

    name: str
    path: str
    value: str


@dataclass(frozen=True)
class Found:
    """What a value's file says now: `now` as the kernel means it, `why` it cannot be set ("": it can)."""

    path: str
    now: str
    why: str


def find(value: Value) -> list[Found]:
    """Each file of a value; one row with a reason when there is none."""
    paths = sorted(str(path) for path in Path("/").glob(value.path.lstrip("/")))
    if not paths:
        return [Found(value.path, "", "this machine has no such setting")]
    found = []
    for path in paths:
        try:
            now = undo.meaning(Path(path).read_text(encoding="utf-8", errors="replace"))
        except OSError as error:
            found.append(Found(path, "", f"cannot be read: {error.strerror}"))
            continue
        why = (
            "" if os.access(path, os.W_OK) else "read-only here (a container has its host's kernel settings)"
        )
        found.append(Found(path, now, why))
    return found


def kernel(values: Sequence[Value], journal: undo.Journal | None) -> tuple[list[str], list[dict[str, str]]]:
    """Sets what differs (`journal` None: check mode, nothing): what was done, what could not be set."""
    done, skipped = [], []
    for value in values:
        for found in find(value):
            if found.now == value.value:
                continue
            why = found.why
            if not why and journal is not None:
                journal.remember_value(found.path, found.now)
                try:
                    Path(found.path).write_text(f"{value.value}\n", encoding="utf-8")
                except OSError as error:
                    why = f'the kernel does not take "{value.value}": {error.strerror}'
            if why:
                skipped.append({"name": value.name, "why": why})
            else:
                done.append(f"{found.path}: {found.now} -> {value.value}")
    if journal is not None:
        seal.claim(row for value in values for row in _claims(value))
    return done, skipped


def _claims(value: Value) -> list[dict[str, Any]]:
    """What is to stay so: the value, or that it cannot be set here."""
    rows: list[dict[str, Any]] = [{"kind": "listing", "name": value.path, "paths": None, "basis": True}]
    for found in find(value):
        if Path(found.path).exists():
            row = {"kind": "value", "name": found.path, "basis": bool(found.why)}
            rows.append({**row, "writable": False} if found.why else {**row, "value": value.value})
    return rows


def shm_bytes(wish: str) -> int:
    """Bytes of a size such as `50%` (of memory) or `64G`."""
    match = re.fullmatch(r"(\d+)([%KMGT]?)", wish)
    if not match:
        raise ValueError(f'shared memory "{wish}" is neither a share such as 50% nor a size such as 64G')
    number, unit = int(match[1]), match[2]
    if unit == "%":
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return int(pages * number // 100)
    factor: int = 1024 ** ("KMGT".index(unit) + 1 if unit else 0)
    return number * factor


def shared_memory(wish: str, journal: undo.Journal | None) -> tuple[list[str], list[dict[str, str]]]:
    """Makes /dev/shm as big as wanted where it is smaller (`journal` None: check mode, it stays)."""
    if not wish:
        return [], []
    size, least = undo.size_of(SHM), int(shm_bytes(wish) * SHM_SLACK)
    done = []
    if size < least:
        done = [f"{SHM}: {size >> 20} MiB -> {wish}"]
        if journal is not None:
            journal.remember_size(SHM)
            code, said = undo.run(["mount", "-o", f"remount,size={wish}", str(SHM)])
            if code != 0:
                return [], [{"name": str(SHM), "why": said}]
    if journal is not None:
        seal.claim([{"kind": "memory", "name": str(SHM), "bytes": least}])
    return done, []


def quiet(timers: Sequence[str], journal: undo.Journal | None) -> list[str]:
    """Stops and disables each timer that the node has and that is on (nothing when `journal` is None)."""
    done = []
    for name in timers:
        state, active = undo.unit_state(name)
        if state not in ("enabled", "enabled-runtime") and not active:
            continue
        done.append(f"quiet {name}")
        if journal is not None:
            journal.remember_unit(name, state, active)
            code, said = undo.run(["systemctl", "disable", "--now", name])
            if code != 0:
                raise units.UnitsFailed(f"systemctl disable --now {name}: {said}")
    if journal is not None:
        seal.claim(seal.unit_row(name, on=False, active=False) for name in timers)
    return done


def clock(
    names: Sequence[str], journal: undo.Journal | None, limit_s: int
) -> tuple[list[str], list[dict[str, str]]]:
    """Installs a time service where none runs; a container has its host's clock."""
    if not names:
        return [], []
    services = [f"{unit}.service" for unit in CLOCK_UNITS]
    done = []
    if not any(undo.unit_state(service)[1] for service in services):
        if undo.run(["systemd-detect-virt", "--container", "--quiet"])[0] == 0:
            return [], [{"name": "clock", "why": "a container has its host's clock"}]
        done = [f"install {' '.join(names)}"]
        if journal is not None:
            packages.refresh()
            packages.install(names, journal, limit_s)
    if journal is not None:
        seal.claim([{"kind": "one of", "name": "time services", "units": services, "active": True}])
    return done, []


def apply(wanted: Mapping[str, Any], check_only: bool, role: str) -> dict[str, Any]:
    """All of it: {changed, done, skipped_settings, diff}. Raises PlaceFailed, UnitsFailed, PackagesFailed,
    OSError.

    `wanted`: files (entries of `node_files`), values, timers, units (oneshot units to enable), shared_memory,
    clock_packages.
    """
    placed = place.apply(wanted["files"], check_only, role)
    journal = None if check_only else undo.Journal(role)
    values = [Value(str(row["name"]), str(row["path"]), str(row["value"])) for row in wanted["values"]]
    done, skipped = kernel(values, journal)
    grown, refused = shared_memory(str(wanted["shared_memory"]), journal)
    done += grown + quiet(wanted["timers"], journal)
    installed, unclocked = clock(wanted["clock_packages"], journal, packages.INSTALL_LIMIT_S)
    enabled = units.apply(
        [{"name": name, "enabled": True, "started": None, "restart_on": []} for name in wanted["units"]],
        placed["changed_paths"],
        check_only,
        role,
    )
    done += installed + enabled["done"]
    diff = [*placed["diff"], {"before": "", "after": "\n".join(done) + "\n"}] if done else placed["diff"]
    return {
        "changed": placed["changed"] or bool(done),
        "done": [*placed["changed_paths"], *done],
        "skipped_settings": skipped + refused + unclocked,
        "diff": diff,
    }
