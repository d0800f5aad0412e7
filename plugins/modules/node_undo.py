#!/usr/bin/python
"""Brings back what a role had changed on the node (`bringup/node/undo.py`)."""

from __future__ import annotations

DOCUMENTATION = r"""
module: node_undo
short_description: Bring back what a role had changed on the node
description:
  - Files, folders, links, kernel settings, units, packages and the size of /dev/shm become what they were before
    the role came, from the journal that the role's other modules kept on the node. Without a journal there is
    nothing to do. While a process runs from a folder that would go, nothing is done.
  - When something cannot be brought back, the journal stays and the task says what.
options:
  role:
    description: The role.
    type: str
    required: true
author: bringup
"""

RETURN = r"""
done:
  description: What was brought back, or would be.
  returned: success
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule  # noqa: E402 (documentation comes first)
from ansible.module_utils.bringup_node import undo  # noqa: E402


def main() -> None:
    """Bring it all back."""
    module = AnsibleModule(
        argument_spec={"role": {"type": "str", "required": True}}, supports_check_mode=True
    )
    try:
        done = undo.Journal(module.params["role"]).restore(module.check_mode)
    except (undo.UndoFailed, OSError) as error:
        module.fail_json(msg=str(error))
    diff = {"before": "", "after": "\n".join(done) + "\n"} if done else {}
    module.exit_json(changed=bool(done), done=done, diff=diff)


if __name__ == "__main__":
    main()
