#!/usr/bin/python
"""Brings what a role has on a node to its place: users, files, units (`bringup/node/parts.py`)."""

from __future__ import annotations

DOCUMENTATION = r"""
module: node_parts
short_description: Bring users, files, folders, links and systemd units of a role to their places in one call
description:
  - The modules C(node_accounts), C(node_files) and C(node_units) one after the other, in one round trip. A unit is
    restarted when one of the files changed that it names.
  - Works in check mode, with the same differences, on a node that lacks all of it yet.
options:
  users:
    description: System users without home and shell, each with a group of its name.
    type: list
    elements: str
    default: []
  entries:
    description: Files, folders and links, see module C(node_files).
    type: list
    elements: dict
    default: []
  keys:
    description: Credentials, rows of C(service), C(path) and C(variable), whose value the action of the same name puts
      into the entries.
    type: list
    elements: dict
    default: []
  units:
    description: Units, see module C(node_units).
    type: list
    elements: dict
    default: []
    suboptions:
      name:
        description: Name with its suffix.
        type: str
        required: true
      enabled:
        description: Whether it starts with the node.
        type: bool
        default: true
      started:
        description: Whether it runs. Leave it out to keep whatever is so.
        type: bool
      restart_on:
        description: Paths; when one of them has changed, a running unit is restarted.
        type: list
        elements: str
        default: []
  undo:
    description: Role in whose journal the old states are kept, for module C(node_undo).
    type: str
    default: ""
author: bringup
"""

RETURN = r"""
changed_paths:
  description: Paths that were changed, or would be.
  returned: success
  type: list
  elements: str
done:
  description: What was done with users and units, or would be.
  returned: success
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule  # noqa: E402 (documentation comes first)
from ansible.module_utils.bringup_node import accounts, parts, place, units  # noqa: E402


class QuietModule(AnsibleModule):
    """Does not copy the text of every file into the journal at every call."""

    def _log_invocation(self) -> None:
        self.log(f"{len(self.params['entries'])} entries")


def main() -> None:
    """Bring everything to its place."""
    unit = {
        "name": {"type": "str", "required": True},
        "enabled": {"type": "bool", "default": True},
        "started": {"type": "bool"},
        "restart_on": {"type": "list", "elements": "str", "default": []},
    }
    module = QuietModule(
        argument_spec={
            "users": {"type": "list", "elements": "str", "default": []},
            "entries": {"type": "list", "elements": "dict", "default": [], "no_log": False},
            "keys": {"type": "list", "elements": "dict", "default": [], "no_log": False},
            "units": {"type": "list", "elements": "dict", "default": [], "options": unit},
            "undo": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    given = module.params
    try:
        outcome = parts.apply(
            given["users"], given["entries"], given["units"], module.check_mode, given["undo"]
        )
    except (accounts.AccountsFailed, place.PlaceFailed, units.UnitsFailed, OSError) as error:
        module.fail_json(msg=str(error))
    module.exit_json(**outcome)


if __name__ == "__main__":
    main()
