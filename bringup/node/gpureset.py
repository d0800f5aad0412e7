"""Resets all GPUs of a node, in the one order that works beside a fabric manager (module `gpu_reset`).

Nothing may have a GPU open while it is reset, and on machines with NVSwitches all GPUs are reset together, while
the fabric manager is stopped: it trains the links anew when it starts, and must do so before anything computes.
Order: monitors, persistence daemon, fabric manager down; reset; fabric manager, persistence daemon, clocks and
power, monitors up. Whatever happens, what was stopped is started again. Servers are not touched: whoever resets
has stopped them, and a GPU that somebody still has open is refused before anything is stopped.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from . import common, facts, units

FABRIC = "nvidia-fabricmanager.service"
PERSISTENCE = "nvidia-persistenced.service"
SETTINGS = "bringup-gpu-settings.service"
MONITORS = (
    "nvidia-dcgm-exporter.service",
    "dcgm-exporter.service",
    "nvidia_gpu_exporter.service",
    "nvidia-dcgm.service",
    "dcgm.service",
)
"""Units that keep GPUs open only to look at them, whoever needs one before the one it needs."""

DOWN = (*MONITORS, SETTINGS, PERSISTENCE, FABRIC)
"""In this order they are stopped, and started in the opposite one."""

DEVICE = re.compile(r"/dev/nvidia\d+")
RESET_LIMIT_S = 600.0
LOOK_EVERY_S = 2.0
HELD_LIMIT_S = 20.0
"""How long what was just stopped may take to close its GPUs."""

WELL = ("Completed", None)
"""States of a GPU in the fabric that are good: it has joined, or there is none."""


class ResetFailed(Exception):
    """Why the GPUs were not reset, or are not well after it, and what to do."""


class ResetRefused(ResetFailed):
    """Somebody has a GPU open, and nothing was touched."""


def running(names: Iterable[str]) -> list[str]:
    """Those of the units that are up, in the order of `names`."""
    return [name for name in names if units.show(name).get("ActiveState") in ("active", "activating")]


def holders(down: Sequence[str] = ()) -> list[str]:
    """Processes that have a GPU open or compute on one, as words for people, without those of the units `down`."""
    computing = {pid for _, pid in common.gpu_holders(range(len(_gpus())))}
    found = {pid for pid in common.processes() if any(map(DEVICE.match, common.open_files(pid)))} | computing
    return [
        f"pid {pid} ({common.unit_of(pid) or common.command_line(pid)})"
        for pid in sorted(found)
        if common.unit_of(pid) not in down
    ]


def _gpus() -> list[dict[str, Any]]:
    found = facts.gpu().get("smi") or {}
    rows: list[dict[str, Any]] = found.get("gpus", [])
    return rows


def unwell(gpus: Sequence[Mapping[str, Any]], expected: int) -> list[str]:
    """What is wrong with the GPUs as `nvidia-smi -q -x` shows them (rows of facts.parse_smi), one line each."""
    lines = [] if len(gpus) == expected else [f"{len(gpus)} of {expected} GPUs are there"]
    for number, gpu in enumerate(gpus):
        if gpu.get("fabric_state") not in WELL:
            lines.append(f"GPU {number} is not in the NVLink fabric: {gpu['fabric_state']}")
        if gpu.get("recovery") not in ("None", None):
            lines.append(f"GPU {number} still asks for: {gpu['recovery']}")
        if gpu.get("remap_pending") == "Yes":
            lines.append(f"GPU {number} still waits for a reset to replace bad memory rows")
    return lines


def reset(expected: int, limit_s: float, check_only: bool) -> dict[str, Any]:
    """Resets all GPUs and waits, at most `limit_s`, until all `expected` of them are well:
    {changed, stopped (units, in order), gpus}. Raises ResetFailed.
    """
    stopped = running(DOWN)
    open_now = holders(stopped)
    if open_now:
        raise ResetRefused(
            f"GPUs are in use, so nothing was touched: {', '.join(open_now[:6])}. Stop those first (servers: "
            "`invoke run stop-servers`; what crashed servers left: `invoke run clean-up-leftovers`)."
        )
    if check_only:
        return {"changed": True, "stopped": stopped, "gpus": expected}
    begun: list[str] = []
    try:
        for name in stopped:
            begun.append(name)
            _systemctl("stop", name)
        _reset_all()
    finally:
        failed = [said for name in reversed(begun) if (said := _start(name))]
    if failed:
        raise ResetFailed(
            f"the GPUs are reset, and what was stopped for it does not start: {'; '.join(failed)}"
        )
    return {"changed": True, "stopped": stopped, "gpus": _until_well(expected, limit_s)}


def _reset_all() -> None:
    end = time.monotonic() + HELD_LIMIT_S
    while (still := holders()) and time.monotonic() < end:
        time.sleep(LOOK_EVERY_S)
    if still:
        raise ResetFailed(
            f"GPUs are still open, so they were not reset: {', '.join(still[:6])}. Stop those first."
        )
    # Without -i: all of them, with the switches between them.
    code, out, err = common.run(["nvidia-smi", "--gpu-reset"], RESET_LIMIT_S)
    if code != 0:
        said = " ".join((out + err).split())[-400:]
        raise ResetFailed(
            f"nvidia-smi --gpu-reset ended with {code}: {said}. If it stays so, reboot the node."
        )


def _systemctl(verb: str, name: str) -> None:
    code, said = units.systemctl(verb, name)
    if code != 0:
        raise ResetFailed(f"systemctl {verb} {name}: {said}")


def _start(name: str) -> str:
    """Empty when it is up."""
    code, said = units.systemctl("start", name)
    return f"{name}: {said}" if code != 0 else ""


def _until_well(expected: int, limit_s: float) -> int:
    end = time.monotonic() + limit_s
    while True:
        gpus = _gpus()
        wrong = unwell(gpus, expected)
        if not wrong:
            return len(gpus)
        if time.monotonic() > end:
            raise ResetFailed(
                f"after the reset, within {limit_s:g} s: {'; '.join(wrong)}. Reboot the node; if that does not "
                "help, it is hardware: `invoke run collect-support-bundle`."
            )
        time.sleep(LOOK_EVERY_S)
