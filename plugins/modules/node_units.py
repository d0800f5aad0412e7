#!/usr/bin/python
"""Brings a role's systemd units to their states in one call (`bringup/node/units.py`)."""

from __future__ import annotations

DOCUMENTATION = r"""
module: node_units
short_description: Enable, start and restart systemd units in one call
description:
  - Reloads systemd first when unit files were changed.
  - Works in check mode on a node that does not have the units yet.
options:
  units:
    description: The units.
    type: list
    elements: dict
    required: true
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
        description: Paths; when one of them is in C(changed_paths), a running unit is restarted.
        type: list
        elements: str
        default: []
  changed_paths:
    description: Paths that this play has changed.
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
done:
  description: What was done, or would be.
  returned: success
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule  # noqa: E402 (documentation comes first)
from ansible.module_utils.bringup_node import units  # noqa: E402


def main() -> None:
    """Bring all units to their states."""
    unit = {
        "name": {"type": "str", "required": True},
        "enabled": {"type": "bool", "default": True},
        "started": {"type": "bool"},
        "restart_on": {"type": "list", "elements": "str", "default": []},
    }
    module = AnsibleModule(
        argument_spec={
            "units": {"type": "list", "elements": "dict", "required": True, "options": unit},
            "changed_paths": {"type": "list", "elements": "str", "default": []},
            "undo": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    try:
        outcome = units.apply(
            module.params["units"], module.params["changed_paths"], module.check_mode, module.params["undo"]
        )
    except units.UnitsFailed as error:
        module.fail_json(msg=str(error))
    module.exit_json(**outcome)


if __name__ == "__main__":
    main()
