"""Bringing nodes back to what they were before they were provisioned: all roles, or some (`playbooks/undo.yml`)."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bringup import confirm, fleet, playbook
from bringup import inventory as inventories
from bringup.errors import Problem, UsageError, unknown
from bringup.rolevars import ROLES
from bringup.runs import RunRecord

ORDER = tuple(reversed([role for role in ROLES if role != "preflight"]))
"""The order in which roles are undone: the last one first. Preflight changes nothing."""

BATCHES = ("1", "100%")
"""One host goes first, the canary; then all others."""


def run(
    inventory: str,
    roles: Sequence[str] = (),
    *,
    limit: str | None = None,
    while_serving: str = "refuse",
    check: bool = False,
    yes: bool = False,
    force_unlock: bool = False,
    outside_window: str = "",
) -> RunRecord:
    """Undoes the roles (none named: all) on the hosts.

    Raises UsageError for wrong names and Locked when it is not confirmed.
    """
    problems = [Problem("--role", *unknown("role", role, ORDER)) for role in roles if role not in ORDER]
    if while_serving not in ("refuse", "drain"):
        problems.append(Problem("--while-serving", f'"{while_serving}" is neither refuse nor drain'))
    if problems:
        raise UsageError(problems)
    chosen = [role for role in ORDER if role in roles] or list(ORDER)
    hosts = fleet.matching(fleet.groups_of(inventory), limit)
    print(f"undo, in this order: {', '.join(chosen)}", file=sys.stderr)
    if not check:
        confirm.disruptive("undo", inventories.folder_of(inventory).name, hosts, yes=yes)
    return playbook.run(
        "undo",
        inventory,
        limit=limit,
        tags=",".join(chosen) if roles else None,
        check=check,
        extra={
            "runbook_serial": list(BATCHES),
            "runbook_max_fail": 0,
            "runbook_while_serving": while_serving,
        },
        force_unlock=force_unlock,
        outside_window=outside_window,
    )
