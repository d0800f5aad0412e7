#!/usr/bin/python
"""Gathers what support needs to know of a node (`bringup/node/bundle.py`)."""

from __future__ import annotations

DOCUMENTATION = r"""
module: node_bundle
short_description: Gather what support needs to know of a node
description:
  - The action of the same name takes secrets out of every text and writes C(dest) on the controller, so that what
    leaves the controller can be given away.
  - Looks, and changes nothing on the node.
options:
  dest:
    description: Archive to write on the controller (.tar.gz).
    type: path
    default: ""
author: bringup
"""

RETURN = r"""
files:
  description: Name and text of each file of the bundle; the action keeps only how many there are.
  returned: success
  type: dict
"""

from ansible.module_utils.basic import AnsibleModule  # noqa: E402 (documentation comes first)
from ansible.module_utils.bringup_node import bundle  # noqa: E402


def main() -> None:
    """Gather."""
    module = AnsibleModule(argument_spec={"dest": {"type": "path", "default": ""}}, supports_check_mode=True)
    module.exit_json(changed=False, files=bundle.gather())


if __name__ == "__main__":
    main()
