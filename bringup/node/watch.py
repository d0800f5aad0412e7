"""`watch.py NAME`: a watchdog that asks a running server for a real token, again and again.

A server whose /health says 200 while nothing comes back is found here. A long prefill is no hang: as long as
the engine's counters move, or a request that is in flight is younger than `prefill_s`, it is left alone. A
server that hangs is killed (with its own user's rights), and systemd starts it again, within the start limit.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from bringup.node import common
from bringup.node.common import NoAnswer, Refusal, say

EVERY_S = 30.0
FAILURES = 3
"""So many probes in a row must fail, without any progress between them, before a server counts as hung."""

PREFILL_S = 900.0
"""How long requests in flight may go without any counter moving: one prefill of a very long prompt."""

PROGRESS = ("generation_tokens_total", "prompt_tokens_total", "requests_total")


@dataclass
class Watch:
    """What was seen so far; `judge` says what follows from one more look."""

    failures: int = FAILURES
    prefill_s: float = PREFILL_S
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
        if self.count < self.failures or (self.busy and now - self.moved_at < self.prefill_s):
            return ""
        return f"{self.count} times in a row: {why}; no progress for {now - self.moved_at:.0f} s"


def look(service: Mapping[str, Any], key: str | None) -> tuple[str, dict[str, float] | None]:
    """One probe: why no token came ("": one came), and the metrics before it (None: they were not given)."""
    limit = float(service["probe_timeout_s"])
    seen: dict[str, float] | None = None
    with suppress(NoAnswer):
        seen = common.metrics(service, timeout_s=limit, key=key)
    try:
        common.ask(service, "Say one word.", 1, timeout_s=limit, key=key)
    except NoAnswer as error:
        return str(error), seen
    return "", seen


def kill(pid: int) -> None:
    """End a server that hangs; its unit's control group goes with it."""
    os.kill(pid, signal.SIGKILL)


def watch(
    service: Mapping[str, Any],
    key: str | None,
    state: Callable[..., dict[str, str]] = common.unit_state,
    end: Callable[[int], None] = kill,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """For ever: look, judge, end what hangs. Only while the unit is active; starting and stopping are not its
    matter.
    """
    started, seen = "", Watch(prefill_s=float(service.get("prefill_s", PREFILL_S)))
    every = float(service.get("watch_every_s", EVERY_S))
    while True:
        pause(every)
        shown = state(f"{service['unit']}.service", ("ActiveState", "MainPID", "InvocationID"))
        if shown["ActiveState"] != "active":
            continue
        if shown["InvocationID"] != started:
            started, seen = shown["InvocationID"], Watch(prefill_s=seen.prefill_s)
        hang = seen.judge(*look(service, key), time.monotonic())
        if not hang:
            continue
        now = state(f"{service['unit']}.service", ("ActiveState", "MainPID", "InvocationID"))
        if now == shown and int(shown["MainPID"] or 0) > 1:
            say(f"{service['unit']} hangs and is killed: {hang}")
            end(int(shown["MainPID"]))


def main(words: list[str]) -> int:
    if len(words) != 1:
        print("usage: watch.py NAME", file=sys.stderr)
        return 2
    try:
        service = common.load(words[0])
        watch(service, common.key_of(service))
    except Refusal as refusal:
        say(str(refusal))
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
