"""An earlier run again: the same playbook, inventory, hosts and variables, shown and agreed to first."""

from __future__ import annotations

import json
import sys

from bringup import confirm, fleet, playbook, redact, runs
from bringup.errors import Problem, UsageError
from bringup.runs import RunRecord

KEYS = ("playbook", "inventory", "limit", "tags", "skip_tags", "check", "extra")


def run(name: str, *, yes: bool = False) -> RunRecord:
    """Plays the run `name` again. Raises UsageError when it was no playbook or had a secret among its
    arguments, and Locked when it is not confirmed.
    """
    before = runs.find(name)
    given = {key: before.arguments.get(key) for key in KEYS}
    where = f"run {before.id}"
    if not given["playbook"]:
        raise UsageError(
            Problem(where, f"{before.name} is no playbook, and cannot be run again from its record")
        )
    if redact.HIDDEN in json.dumps(given):
        raise UsageError(
            Problem(
                where, "it had a secret among its arguments, which no record keeps", "Run its command again"
            )
        )
    inventory = str(given["inventory"])
    hosts = fleet.matching(fleet.groups_of(inventory), given["limit"])
    for key, value in given.items():
        if value:
            print(f"  {key}: {value}", file=sys.stderr)
    confirm.disruptive(f"again {before.name}", before.inventory, hosts, yes=yes or bool(given["check"]))
    return playbook.run(
        str(given["playbook"]),
        inventory,
        name=before.name,
        limit=given["limit"],
        tags=given["tags"],
        skip_tags=given["skip_tags"],
        check=bool(given["check"]),
        extra=given["extra"] or {},
    )
