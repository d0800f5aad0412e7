"""Takes this node's servers out of rotation and waits until they are idle; or puts them back (module `node_drain`,
and each restart).

Two things stop new requests. A mark, a file a service under /run/bringup/draining: the lease listener's
`/v1/ready/<service>` turns 503, for load balancers. And the kernel: new connections from other machines to the
server's port are refused (nftables), so that clients which ask nobody go to another node at once. Connections
that are open go on, and so do the node's own (watchdog, warm-up, verification). A reboot takes both away, and both
end by themselves where whoever made them gave them an end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from . import common
from .common import Refusal

POLL_S = 0.5
IDLE_LOOKS = 3
"""So many looks in a row must find no request before a server counts as idle."""

RULES = """\
table inet {table}
delete table inet {table}
table inet {table} {{
  set ports {{ type inet_service; flags timeout; }}
  chain input {{
    type filter hook input priority -300; policy accept;
    iifname != "lo" tcp dport @ports tcp flags & (fin|syn|rst|ack) == syn counter reject with tcp reset
  }}
}}
add element inet {table} ports {{ {port}{timeout} }}
"""
"""Replaces the service's table in one transaction. The port is in a set because elements can have an end: a
restart that dies does not leave its server refused for ever."""

NO_NFT = "nft is not installed on this node"


def table(name: str) -> str:
    """The service's table of the packet filter."""
    return f"bringup-{name}"


def rules(name: str, port: int, limit_s: float | None) -> str:
    """What `nft -f -` is given; `limit_s`: when refusing ends by itself (None: when it is taken back)."""
    timeout = "" if limit_s is None else f" timeout {max(1, int(limit_s))}s"
    return RULES.format(table=table(name), port=port, timeout=timeout)


def refuse_new(name: str, port: int, limit_s: float | None) -> str:
    """Refuse new connections from other machines; why that could not be done, or the empty string."""
    code, _, err = common.run(["nft", "-f", "-"], stdin=rules(name, port, limit_s))
    if code == 127:
        return NO_NFT
    return "" if code == 0 else (err.strip().splitlines() or [f"nft ended with {code}"])[0]


def take_new(name: str) -> None:
    """Let new connections in again."""
    common.run(["nft", "delete", "table", "inet", table(name)])


def marked(names: Iterable[str], folder: Path | None = None) -> list[str]:
    """Those of the services that are marked."""
    return [name for name in names if common.drained(name, folder)]


def mark(service: Mapping[str, Any], limit_s: float | None, folder: Path | None = None) -> str:
    """Mark a service and refuse new connections to it, for `limit_s` (None: until `put_back`); why those are not
    refused, or the empty string.
    """
    _note(str(service["name"]), limit_s, folder)
    return refuse_new(str(service["name"]), int(service["port"]), limit_s)


def _note(name: str, limit_s: float | None, folder: Path | None) -> None:
    """Write the mark (`common.drained`). Half written it is empty, which counts too."""
    marks = folder or common.DRAINING
    marks.mkdir(parents=True, exist_ok=True)
    end = "" if limit_s is None else f"{time.clock_gettime(time.CLOCK_BOOTTIME) + limit_s:.0f}"
    (marks / name).write_text(end, encoding="ascii")


def drain(
    names: Iterable[str],
    limit_s: float,
    look: Callable[[Mapping[str, Any]], int] | None = None,
    folder: Path | None = None,
) -> tuple[dict[str, int], dict[str, str]]:
    """Marks the services and waits, at most `limit_s` each; how many requests each still had (0: idle), and why new
    connections are not refused to those to which they are not.
    """
    services = {name: _described(name) for name in names}
    open_because = {}
    for name, service in services.items():
        _note(name, None, folder)
        why = refuse_new(name, int(service["port"]), None) if service else ""
        if why:
            open_because[name] = why
    left = {
        name: _wait(service, limit_s, look or in_flight) if service else 0
        for name, service in services.items()
    }
    return left, open_because


def _described(name: str) -> dict[str, Any] | None:
    try:
        return common.load(name)
    except Refusal:
        return None


def _wait(service: Mapping[str, Any], limit_s: float, look: Callable[[Mapping[str, Any]], int]) -> int:
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


def put_back(names: Iterable[str], folder: Path | None = None) -> None:
    """Removes the marks, and lets new connections in."""
    for name in names:
        ((folder or common.DRAINING) / name).unlink(missing_ok=True)
        take_new(name)
