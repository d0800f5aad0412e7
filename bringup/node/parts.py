"""Users, files and units of a role, brought to their places one after the other (module `node_parts`).

Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from . import accounts, place, units


def apply(
    users: Sequence[str],
    entries: Sequence[Mapping[str, Any]],
    unit_rows: Sequence[Mapping[str, Any]],
    check_only: bool = False,
    undo: str = "",
) -> dict[str, Any]:
    """{changed, changed_paths, done, diff}. Raises AccountsFailed, PlaceFailed, UnitsFailed and OSError: what comes
    after the part that failed is not touched.

    `undo`: the role in whose journal the old states are kept (bringup/node/undo.py).
    """
    made = accounts.apply(users, check_only, undo) if users else {}
    placed = place.apply(entries, check_only, undo) if entries else {}
    paths = placed.get("changed_paths", [])
    ran = units.apply(unit_rows, paths, check_only, undo) if unit_rows else {}
    outcomes = [outcome for outcome in (made, placed, ran) if outcome]
    diffs = [outcome["diff"] for outcome in (made, ran) if outcome and outcome["diff"]]
    return {
        "changed": any(outcome["changed"] for outcome in outcomes),
        "changed_paths": paths,
        "done": [*made.get("done", ()), *ran.get("done", ())],
        "reloaded": ran.get("reloaded", False),
        "diff": [*placed.get("diff", ()), *diffs],
    }
