#!/usr/bin/python
"""Gathers what a node is like in one round trip (`bringup/node/facts.py`)."""

from __future__ import annotations

DOCUMENTATION = r"""
module: node_facts
short_description: Gather what a node is like in one round trip
description:
  - Looks at system, memory, disks, listening ports with their owners, GPUs and what earlier servers left.
  - Changes nothing, so that it runs in check mode too.
options:
  paths:
    description: Paths whose file systems are looked at; they need not exist yet.
    type: list
    elements: str
    default: []
  users:
    description: Names of users to look up.
    type: list
    elements: str
    default: []
  programs:
    description: Names of programs to look for.
    type: list
    elements: str
    default: []
  leftovers:
    description: Regular expression of command lines that only a server of ours has.
    type: str
    default: ""
  units:
    description: Names of units (with suffix) whose drop-ins are looked at.
    type: list
    elements: str
    default: []
  settings:
    description: Paths, or patterns of them, below /proc/sys and /sys whose values are read.
    type: list
    elements: str
    default: []
  addresses:
    description: Addresses to reach, rows of host, port, purpose, and optionally kind and unless (a path).
    type: list
    elements: dict
    default: []
  caches:
    description: Folders that must belong to a user, rows of path and user.
    type: list
    elements: dict
    default: []
  models:
    description: Models whose files are looked at, rows of name, folder, stamp, files (path, size), expects and mtp.
    type: list
    elements: dict
    default: []
  memory_nodes:
    description: Memory nodes that processes will be bound to, as numactl writes them.
    type: str
    default: ""
  ports:
    description: Ports of servers, which proxies on the node may stand in front of.
    type: list
    elements: int
    default: []
  linking:
    description: What must be linked at run time, rows of services, languages, libraries, compilers, folders.
    type: list
    elements: dict
    default: []
  logs:
    description: Logs of servers, which logrotate has to leave alone.
    type: list
    elements: str
    default: []
author: bringup
"""

RETURN = r"""
facts:
  description: What was found, see C(gather) in C(bringup/node/facts.py).
  returned: always
  type: dict
"""

from ansible.module_utils.basic import AnsibleModule  # noqa: E402 (documentation comes first)
from ansible.module_utils.bringup_node import facts  # noqa: E402


def main() -> None:
    """Gather and report."""
    module = AnsibleModule(
        argument_spec={
            "paths": {"type": "list", "elements": "str", "default": []},
            "users": {"type": "list", "elements": "str", "default": []},
            "programs": {"type": "list", "elements": "str", "default": []},
            "leftovers": {"type": "str", "default": ""},
            "units": {"type": "list", "elements": "str", "default": []},
            "settings": {"type": "list", "elements": "str", "default": []},
            "addresses": {"type": "list", "elements": "dict", "default": []},
            "caches": {"type": "list", "elements": "dict", "default": []},
            "models": {"type": "list", "elements": "dict", "default": []},
            "memory_nodes": {"type": "str", "default": ""},
            "ports": {"type": "list", "elements": "int", "default": []},
            "linking": {"type": "list", "elements": "dict", "default": []},
            "logs": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    module.exit_json(changed=False, facts=facts.gather(module.params))


if __name__ == "__main__":
    main()
