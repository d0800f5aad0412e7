#!/usr/bin/python
"""Brings back what a role had changed on the node (`bringup/node/undo.py`)."""

from __future__ import annotations

DOCUMENTATION = r"""
module: node_undo
short_description: Bring back what a role had changed on the node
description:
  - Files, folders, links, users, kernel settings, units, packages and the size of /dev/shm become what they were before
    the role came, from the journal that the role's other modules kept on the node. Without a journal there is
    nothing to do. While a process runs from a folder that would go, nothing is done.
  - What another role has brought as well stays until that one is undone. A model that something uses stays, and so do
    files that were there before and logs; all that stays is named.
  - When something cannot be brought back, the journal stays and the task says what.
options:
  role:
    description: The role.
    type: str
    required: true
  servers:
    description: What to do about servers that are up; C(leave) them alone, C(refuse), or C(drain) and stop them.
    type: str
    choices: [leave, refuse, drain]
    default: leave
  stand_on_it:
    description: Roles that work only with this one; as long as the node has one of them, this one is not undone.
    type: list
    elements: str
    default: []
  along:
    description: Roles (tags; C(all) is each) that the same play undoes. A rehearsal does not take them for obstacles.
    type: list
    elements: str
    default: []
  look:
    description: Only say whether something is in the way, and change nothing.
    type: bool
    default: false
author: bringup
"""

RETURN = r"""
done:
  description: What was brought back, or would be.
  returned: success
  type: list
  elements: str
kept:
  description: What stays on the node, and why.
  returned: success
  type: list
  elements: str
"""

from collections.abc import Mapping  # noqa: E402 (documentation comes first)
from typing import Any  # noqa: E402

from ansible.module_utils.basic import AnsibleModule  # noqa: E402
from ansible.module_utils.bringup_node import shelf, stopping, undo  # noqa: E402


def obstacle(given: Mapping[str, Any], check_only: bool) -> str:
    """Why the role is not undone now, "" when nothing is in the way."""
    along = {*given["along"]} if check_only else set()
    standing = [
        role
        for role in given["stand_on_it"]
        if not along & {role, "all"} and not undo.Journal(role).is_empty()
    ]
    if standing:
        return (
            f"{', '.join(standing)} works only with {given['role']}: undo that before, or together with it."
        )
    rows = stopping.up() if given["servers"] == "refuse" else []
    return stopping.refusal(rows) if rows else ""


def stopped(given: Mapping[str, Any], check_only: bool) -> list[str]:
    """Stops the servers that are up where that is asked for."""
    rows = stopping.up() if given["servers"] == "drain" else []
    return [f"stop {row['unit']}.service" if check_only else stopping.stop(row) for row in rows]


def main() -> None:
    """Bring it all back."""
    module = AnsibleModule(
        argument_spec={
            "role": {"type": "str", "required": True},
            "servers": {"type": "str", "choices": ["leave", "refuse", "drain"], "default": "leave"},
            "stand_on_it": {"type": "list", "elements": "str", "default": []},
            "along": {"type": "list", "elements": "str", "default": []},
            "look": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    given = module.params
    journal = undo.Journal(given["role"])
    if journal.is_empty():
        if not (module.check_mode or given["look"]):
            journal.break_seals()
        module.exit_json(changed=False, done=[], kept=[])
    if why := obstacle(given, module.check_mode):
        module.fail_json(msg=why, bringup_refused=True)
    if given["look"]:
        module.exit_json(changed=False, done=[], kept=[])
    try:
        first = stopped(given, module.check_mode)
        # A rehearsal finds the servers up once more.
        done = list(dict.fromkeys([*first, *journal.restore(module.check_mode, shelf.used_by)]))
    except (stopping.StillServing, undo.UndoFailed, OSError) as error:
        module.fail_json(msg=str(error))
    diff = {"before": "", "after": "\n".join(done) + "\n"} if done else {}
    notes = [f"kept {line}" for line in journal.kept]
    module.exit_json(changed=bool(done), done=done, kept=journal.kept, bringup_notes=notes, diff=diff)


if __name__ == "__main__":
    main()
