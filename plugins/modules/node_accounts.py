#!/usr/bin/python
"""Makes the users that a role's programs run as (`bringup/node/accounts.py`)."""

from __future__ import annotations

DOCUMENTATION = r"""
module: node_accounts
short_description: Make users that programs run as, each with a group of its name
description:
  - System users without home and shell. One that is there already stays as it is.
options:
  names:
    description: The users.
    type: list
    elements: str
    required: true
  undo:
    description: Role in whose journal it is kept which of them were made, for module C(node_undo).
    type: str
    default: ""
author: bringup
"""

RETURN = r"""
done:
  description: What was made, or would be.
  returned: success
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule  # noqa: E402 (documentation comes first)
from ansible.module_utils.bringup_node import accounts  # noqa: E402


def main() -> None:
    """Make those that are missing."""
    module = AnsibleModule(
        argument_spec={
            "names": {"type": "list", "elements": "str", "required": True},
            "undo": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    given = module.params
    try:
        outcome = accounts.apply(given["names"], module.check_mode, given["undo"])
    except (accounts.AccountsFailed, OSError) as error:
        module.fail_json(msg=str(error))
    module.exit_json(**outcome)


if __name__ == "__main__":
    main()
