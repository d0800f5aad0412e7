"""The last call on a node: its stamp, what of it is kept, its seals, and that it is given back (module `run_stamp`).

It is a task of its own, or goes along with the last role's (`bringup/narrowing.py: ALONG`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from bringup import events, holding, narrowing, seal
from bringup.node import light


def give_back(known: Mapping[str, Any], lock: holding.Wanted) -> dict[str, Any]:
    """What the module is told of giving a node back: the token of the run, and what to seal."""
    run = os.environ.get("BRINGUP_RUN_ID", "")
    wanted = seal.of_run(run).get(str(known.get("inventory_hostname")), {})
    return {"token": lock["holder"]["token"], **seal.for_node(wanted)}


def said(answer: Mapping[str, Any]) -> dict[str, Any]:
    """What is known of a node that was given back: that it is done, and the roles that could not be sealed."""
    return {
        events.DONE: True,
        "bringup_notes": [*(answer.get("bringup_notes") or ()), *seal.notes_of(answer)],
    }


def along(known: Mapping[str, Any], lock: holding.Wanted | None, templar: Any) -> dict[str, Any] | None:
    """The call that goes along with the task whose variables these are; None where none does."""
    found = known.get(narrowing.ALONG)
    if not found or lock is None or known.get("ansible_role_name") != found["role"]:
        return None
    # As the role itself would have them: its defaults, the host's own, and what its import says.
    variables = {**found["defaults"], **known, **found["vars"]}
    options = templar.copy_with_new_env(available_variables=variables).template(found["options"])
    return {"name": narrowing.STAMP, "options": {**options, "give_back": give_back(known, lock)}}


def parted(answer: Mapping[str, Any]) -> dict[str, Any]:
    """A module's answer when the last call was to go along: the host is done where it did."""
    rest = {name: value for name, value in answer.items() if name != light.LAST}
    last = answer.get(light.LAST)
    if last is None or answer.get("failed"):
        return rest
    told = said(last)
    notes = [*(rest.get("bringup_notes") or ()), *told.pop("bringup_notes")]
    # Ansible calls the one changed that comes into a new group, and so it is: else the call does not go along.
    group = {"add_group": narrowing.DONE_GROUP, "parent_groups": ["all"]}
    return {**rest, **told, **group, "bringup_notes": notes, events.LAST: last}
