"""Takes this node out of rotation and waits until its servers are idle; or puts it back (module `node_drain`).

The mark is a file a service under /run/bringup/draining: `/v1/state` of the lease listener shows it to
gateways. A reboot takes it away.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from . import common
from .common import Refusal

MARKS = common.RUN / "draining"
POLL_S = 0.5
IDLE_LOOKS = 3
"""So many looks in a row must find no request before a server counts as idle."""


def marked(names: Iterable[str], folder: Path = MARKS) -> list[str]:
    """Those of the services that are marked."""
    return [name for name in names if (folder / name).exists()]


def drain(
    names: Iterable[str],
    limit_s: float,
    look: Callable[[Mapping[str, Any]], int] | None = None,
    folder: Path = MARKS,
) -> dict[str, int]:
    """Marks the services and waits, at most `limit_s` each; how many requests each still had (0: idle)."""
    folder.mkdir(parents=True, exist_ok=True)
    left: dict[str, int] = {}
    for name in names:
        (folder / name).touch()
    for name in names:
        left[name] = _wait(name, limit_s, look or in_flight)
    return left


def _wait(name: str, limit_s: float, look: Callable[[Mapping[str, Any]], int]) -> int:
    try:
        service = common.load(name)
    except Refusal:
        return 0
    until, quiet = time.monotonic() + limit_s, 0
    while True:
        count = look(service)
        quiet = 0 if count else quiet + 1
        if quiet >= IDLE_LOOKS or (count and time.monotonic() >= until):
            return count
        time.sleep(POLL_S)


def in_flight(service: Mapping[str, Any]) -> int:
    """Requests that run or wait; 0 for a server that does not run."""
    state = common.unit_state(f"{service['unit']}.service", ("ActiveState",))["ActiveState"]
    return common.in_flight(service, key=common.key_of(service)) if state == "active" else 0


def put_back(names: Iterable[str], folder: Path = MARKS) -> None:
    """Removes the marks."""
    for name in names:
        (folder / name).unlink(missing_ok=True)
