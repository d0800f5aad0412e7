"""Servers that must be down before something is taken away: refused while they are up, or drained and stopped.

Which servers there are is read on the node, so it holds for those that no plan knows any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import common, drain

STOP_MARGIN_S = 60.0


class StillServing(Exception):
    """Which servers are up, and what to do."""


def up(folder: Path = common.SERVICES) -> list[dict[str, Any]]:
    """The descriptions of the servers that run or start."""
    found = [common.read_json(path) for path in sorted(folder.glob("*.json"))] if folder.is_dir() else []
    return [row for row in found if row.get("unit") and _runs(f"{row['unit']}.service")]


def _runs(unit: str) -> bool:
    state = common.unit_state(unit, ("ActiveState",))["ActiveState"]
    return state in ("active", "activating", "reloading", "deactivating")


def refusal(rows: Sequence[Mapping[str, Any]]) -> str:
    """Why nothing is taken away while servers are up."""
    named = ", ".join(f"{row['name']} ({row['unit']}, port {row['port']})" for row in rows)
    return (
        f"this node serves: {named}. Nothing was changed. Stop its servers before (invoke run stop-servers), or "
        "let requests end and stop them now: --while-serving drain"
    )


def stop(row: Mapping[str, Any]) -> str:
    """Refuses new requests, waits for those in flight (at most the service's `drain_s`), and stops the server.
    Raises StillServing when it does not stop.
    """
    name, unit = str(row["name"]), f"{row['unit']}.service"
    left, _ = drain.drain([name], float(row["drain_s"]))
    code, _, said = common.run(
        ["systemctl", "stop", unit], timeout_s=float(row["stop_timeout_s"]) + STOP_MARGIN_S
    )
    # Nobody serves there any more; the port must be free for whoever comes next.
    drain.put_back([name])
    if code != 0:
        raise StillServing(f"{unit} does not stop: {said.strip() or code}")
    return f"stop {unit}" + (f", {left[name]} requests were cut off" if left[name] else "")
