"""Signs that a server which still answers has drifted from the level recorded after its warm-up.

Three signs, each on only when its ratio is given: memory (of the unit's control group, without the cache of
files), the seconds of our own probe while nothing else runs, and tokens a second for each running request,
compared among looks with about as many requests at once. A level is the median of the first looks after a
start; a sign is one when every look is past its ratio for `for_s` seconds. The watchdog asks for a restart then,
by a file that starts the restart's unit: the restart itself waits, asks and drains like any other.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bringup.node import common

CGROUPS = Path("/sys/fs/cgroup")
RESTARTS = Path("/var/lib/bringup/restarts")

SAMPLES = 5
"""Looks that make a level, and looks past the ratio that a sign needs at least."""

PAUSE_S = 6 * 3600.0
"""A server that drifts again sooner than this after such a restart is left alone, and that is said."""

AGAIN_S = 3600.0
"""When a restart that was asked for has not come, it is asked for again after this."""

FRESH_S = 600.0
"""A file that asks for a restart counts for so long."""

REQUEST = "drift.json"
LEVELS = "levels.json"
REQUEST_BYTES = 4096
REASON = "drift"

SIGNS: Mapping[str, tuple[str, str]] = {
    "memory": ("memory_ratio", "its memory is {now:.0f} MiB, it was {level:.0f} MiB after its warm-up"),
    "latency": ("latency_ratio", "an idle token takes {now:.2f} s, it took {level:.2f} s after its warm-up"),
    "throughput": (
        "throughput_ratio",
        "a request gets {now:.1f} tokens/s, it got {level:.1f} tokens/s after its warm-up",
    ),
}
"""Sign -> its ratio's name in the description, and what is said of it."""


@dataclass(frozen=True)
class Look:
    """One look at a running server. None: could not be measured now. `memory` in MiB, `latency` in seconds,
    `throughput` in tokens a second and request; `load`: how many requests ran, as a power of two.
    """

    memory: float | None = None
    latency: float | None = None
    throughput: float | None = None
    load: int = 0


@dataclass
class Drift:
    """Levels of one start, and since when each sign has been past its ratio."""

    wishes: Mapping[str, Any]
    values: dict[str, list[float]] = field(default_factory=dict)
    since: dict[str, float] = field(default_factory=dict)
    count: dict[str, int] = field(default_factory=dict)

    def judge(self, look: Look, now: float) -> dict[str, Any] | None:
        """What is past its ratio for long enough after one more look: {sign, level, now, for_s}; else None."""
        found = None
        for sign, (name, _) in SIGNS.items():
            ratio, value = self.wishes.get(name), getattr(look, sign)
            if not ratio or value is None:
                continue
            key = f"throughput {look.load}" if sign == "throughput" else sign
            level = self._level(key, value)
            if level is None:
                continue
            past = value < level * ratio if sign == "throughput" else value > level * ratio
            if not past:
                self.since.pop(key, None)
                self.count.pop(key, None)
                continue
            self.since.setdefault(key, now)
            self.count[key] = self.count.get(key, 0) + 1
            for_s = now - self.since[key]
            if for_s >= float(self.wishes.get("for_s", 0)) and self.count[key] >= SAMPLES:
                found = found or {"sign": sign, "level": level, "now": value, "for_s": for_s}
        return found

    def _level(self, key: str, value: float) -> float | None:
        """The level under this name; the first SAMPLES values make it, and have nothing to be compared with."""
        values = self.values.setdefault(key, [])
        if len(values) >= SAMPLES:
            return statistics.median(values)
        values.append(value)
        return None


def load_of(running: float) -> int:
    """How many requests run, as the power of two below: 1, 2 (2-3), 4 (4-7) ..."""
    return 1 << (max(1, int(running)).bit_length() - 1)


@dataclass
class Meter:
    """Turns what the watchdog sees into looks; keeps the counters of the look before."""

    tokens: float | None = None
    running: float = 0.0
    at: float = 0.0

    def look(
        self, seen: Mapping[str, float] | None, token_s: float | None, memory: float | None, now: float
    ) -> Look:
        """`seen`: metrics before the probe; `token_s`: the probe's seconds, None when no token came."""
        if not seen:
            self.tokens = None
            return Look(memory=memory)
        running, tokens = seen.get("running", 0.0), seen.get("generation_tokens_total")
        busy = running + seen.get("waiting", 0.0) > 0
        rate = None
        if tokens is not None and self.tokens is not None and now > self.at and running and self.running:
            same = load_of(running) == load_of(self.running)
            rate = (tokens - self.tokens) / (now - self.at) / ((running + self.running) / 2) if same else None
        self.tokens, self.running, self.at = tokens, running, now
        return Look(memory, None if busy else token_s, rate, load_of(running))


def memory_mib(control_group: str, root: Path = CGROUPS) -> float | None:
    """MiB of a control group that are no cache of files (its own and its shared memory); where the kernel does not
    count by group (some containers), those of its processes' own memory. None: not known.
    """
    group = root / control_group.lstrip("/")
    try:
        text = (group / "memory.stat").read_text(encoding="ascii")
    except OSError:
        return _by_processes(group)
    rows = dict(line.split(" ", 1) for line in text.splitlines() if " " in line)
    return (int(rows.get("anon", 0)) + int(rows.get("shmem", 0))) / 1024**2 if "anon" in rows else None


def _by_processes(group: Path) -> float | None:
    found = []
    with suppress(OSError):
        for pid in (group / "cgroup.procs").read_text(encoding="ascii").split():
            with suppress(OSError):
                text = (common.PROC / pid / "status").read_text(encoding="utf-8", errors="replace")
                found += [int(line.split()[1]) for line in text.splitlines() if line.startswith("RssAnon:")]
    return sum(found) / 1024 if found else None


def folder_of(name: str) -> Path:
    """Where the watchdog of a service keeps levels and asks for a restart (its unit's RuntimeDirectory)."""
    return Path("/run") / f"bringup-watch-{name}"


def restore(drift: Drift, invocation: str, folder: Path) -> None:
    """Take the levels that an earlier watchdog recorded of the same start."""
    kept = common.read_json(folder / LEVELS)
    if kept.get("invocation") == invocation and isinstance(kept.get("values"), dict):
        drift.values.update({str(key): list(map(float, row)) for key, row in kept["values"].items()})


def record(drift: Drift, invocation: str, folder: Path) -> None:
    """Keep the levels; a folder that cannot be written only costs them a restart of the watchdog."""
    with suppress(OSError):
        common.write_json(folder / LEVELS, {"invocation": invocation, "values": drift.values})


def too_soon(unit: str, now: float | None = None, restarts: Path = RESTARTS) -> bool:
    """Was this server restarted for drift within PAUSE_S?"""
    try:
        rows = (restarts / f"{unit}.history.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    moment = time.time() if now is None else now
    for row in rows:
        with suppress(ValueError):
            data = json.loads(row)
            recent = moment - common.seconds_of(str(data.get("at"))) < PAUSE_S
            if str(data.get("reason", "")).startswith(REASON) and recent:
                return True
    return False


def ask_restart(found: Mapping[str, Any], folder: Path) -> None:
    """Write the file that starts the restart's unit."""
    common.write_json(folder / REQUEST, dict(found))


def reason(found: Mapping[str, Any]) -> str:
    """The reason as it is recorded: `drift: an idle token takes ...`. Raises ValueError for anything else."""
    try:
        text = SIGNS[found["sign"]][1].format(now=float(found["now"]), level=float(found["level"]))
        return f"{REASON}: {text}, for {float(found['for_s']):.0f} s"
    except (KeyError, TypeError, ValueError):
        raise ValueError("no sign of drift") from None


def requested(folder: Path) -> str:
    """The reason that the watchdog has just given for a restart. Raises ValueError when it gave none.

    The file is the server's user's, so nothing but its numbers is believed, and no link is followed.
    """
    try:
        handle = os.open(folder / REQUEST, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ValueError(f"no restart is asked for: {error.strerror}") from None
    with os.fdopen(handle, "rb") as file:
        fresh = time.time() - os.fstat(handle).st_mtime < FRESH_S
        content = file.read(REQUEST_BYTES)
    data = json.loads(content)
    if not fresh or not isinstance(data, dict):
        raise ValueError("no restart is asked for now")
    return reason(data)
