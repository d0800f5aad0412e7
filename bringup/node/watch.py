"""`watch.py NAME`: a watchdog that asks a running server for a real token, again and again.

A server whose /health says 200 while nothing comes back is found here. A long prefill is no hang: while
requests of others are in flight, a server is left alone as long as its counters move. Where one of them moves
within a prefill too (STEPPING), they may stand still for `stall_s`; else for `prefill_s`, one whole prefill. A
server that hangs is killed (with its own user's rights), and systemd starts it again, within the start limit.
One that answers and has drifted (`drift.py`) is not killed: a restart is asked for.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bringup.node import common, drift
from bringup.node.common import NoAnswer, Refusal, say

EVERY_S = 30.0
FAILURES = 3
"""So many probes in a row must fail, without any progress between them, before a server counts as hung."""

PREFILL_S = 900.0
"""How long requests in flight may go without any counter moving: one prefill of a very long prompt."""

STALL_S = 300.0
"""The same where a counter moves with each batch of a prefill: no batch takes that long."""

STEPPING = ("steps_total", "kv_usage")
"""Metrics that move with every batch that is computed, those of a prefill too."""

PROGRESS = ("generation_tokens_total", "prompt_tokens_total", "requests_total", *STEPPING)


@dataclass
class Watch:
    """What was seen so far; `judge` says what follows from one more look."""

    failures: int = FAILURES
    prefill_s: float = PREFILL_S
    stall_s: float = STALL_S
    count: int = 0
    counters: dict[str, float] = field(default_factory=dict)
    moved_at: float = 0.0
    busy: bool = False

    def judge(self, why: str, seen: Mapping[str, float] | None, now: float) -> str:
        """One look: why no token came ("": one came), and the metrics just before it was asked for (None:
        they were not given). Gives why the server hangs, or "".
        """
        counters = {name: value for name, value in (seen or {}).items() if name in PROGRESS}
        moved = bool(counters and self.counters and counters != self.counters)
        self.counters = counters or self.counters
        if not why or moved or not self.moved_at:
            self.moved_at = now
        if not why or moved:
            self.count = 0
            return ""
        self.count += 1
        if self.count == 1:
            # Only the first failure's look tells: later ones count our own requests that nobody answered.
            self.busy = sum((seen or {}).get(name, 0.0) for name in ("running", "waiting")) > 0
        if self.count < self.failures or (self.busy and now - self.moved_at < self.patience_s):
            return ""
        return f"{self.count} times in a row: {why}; no progress for {now - self.moved_at:.0f} s"

    @property
    def patience_s(self) -> float:
        """How long the counters may stand still while requests of others are in flight."""
        return self.stall_s if any(name in self.counters for name in STEPPING) else self.prefill_s


def look(service: Mapping[str, Any], key: str | None) -> tuple[str, dict[str, float] | None, float | None]:
    """One probe: why no token came ("": one came), the metrics before it (None: they were not given), and the
    seconds that the token took.
    """
    limit = float(service["probe_timeout_s"])
    seen: dict[str, float] | None = None
    with suppress(NoAnswer):
        seen = common.metrics(service, timeout_s=limit, key=key)
    try:
        answer = common.ask(service, "Say one word.", 1, timeout_s=limit, key=key)
    except NoAnswer as error:
        return str(error), seen, None
    return "", seen, answer.seconds


def kill(pid: int) -> None:
    """End a server that hangs; its unit's control group goes with it."""
    os.kill(pid, signal.SIGKILL)


@dataclass
class Drifting:
    """The drift of one start: what is seen, what is asked for, and said."""

    service: Mapping[str, Any]
    invocation: str
    folder: Path
    asked_at: float | None = None

    def __post_init__(self) -> None:
        self.drift = drift.Drift(self.service.get("drift") or {})
        self.meter = drift.Meter()
        drift.restore(self.drift, self.invocation, self.folder)

    def take(self, seen: Mapping[str, float] | None, token_s: float | None, group: str, now: float) -> None:
        """One more look; asks for a restart when it shows drift."""
        if not self.drift.wishes:
            return
        found = self.drift.judge(self.meter.look(seen, token_s, drift.memory_mib(group), now), now)
        drift.record(self.drift, self.invocation, self.folder)
        if not found or (self.asked_at is not None and now - self.asked_at < drift.AGAIN_S):
            return
        self.asked_at = now
        if drift.too_soon(str(self.service["unit"])):
            say(f"{drift.reason(found)}; it was restarted for drift not long ago and is left alone")
            return
        say(f"{drift.reason(found)}; a restart is asked for")
        drift.ask_restart(found, self.folder)


def watch(
    service: Mapping[str, Any],
    key: str | None,
    state: Callable[..., dict[str, str]] = common.unit_state,
    end: Callable[[int], None] = kill,
    pause: Callable[[float], None] = time.sleep,
    folder: Path | None = None,
    described: Callable[[], Mapping[str, Any]] | None = None,
) -> None:
    """Look, judge, end what hangs, until the server has been started anew or is `described` otherwise: then whoever
    runs this begins again, with the description and the key that are there now (a roll-back may have brought another
    port, and a server that is asked at a wrong one seems to hang). Only while the unit is
    active; starting and stopping are not its matter.
    """
    kept = folder or drift.folder_of(str(service.get("name", "")))
    limits = (float(service.get("prefill_s", PREFILL_S)), float(service.get("stall_s", STALL_S)))
    seen = Watch(prefill_s=limits[0], stall_s=limits[1])
    drifting = Drifting(service, "", kept)
    every = float(service.get("watch_every_s", EVERY_S))
    unit, properties = (
        f"{service['unit']}.service",
        ("ActiveState", "MainPID", "InvocationID", "ControlGroup"),
    )
    while True:
        pause(every)
        shown = state(unit, properties)
        if shown["ActiveState"] != "active":
            continue
        anew = drifting.invocation and shown["InvocationID"] != drifting.invocation
        if anew or (described is not None and described() != service):
            say("the server was started anew or is another: watching begins anew, too")
            return
        if not drifting.invocation:
            seen = Watch(prefill_s=limits[0], stall_s=limits[1])
            drifting = Drifting(service, shown["InvocationID"], kept)
        why, found, token_s = look(service, key)
        now = time.monotonic()
        drifting.take(found, token_s, shown.get("ControlGroup", ""), now)
        hang = seen.judge(why, found, now)
        if not hang:
            continue
        again = state(unit, properties)
        if again == shown and int(shown["MainPID"] or 0) > 1:
            say(f"{service['unit']} hangs and is killed: {hang}")
            end(int(shown["MainPID"]))


def main(words: list[str]) -> int:
    if len(words) != 1:
        print("usage: watch.py NAME", file=sys.stderr)
        return 2
    try:
        service = common.load(words[0])
        watch(service, common.key_of(service), described=lambda: common.load(words[0]))
        return 0
    except Refusal as refusal:
        say(str(refusal))
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
