#!/usr/bin/python
"""Builds a locked Python environment and switches to it (`bringup/node/environment.py`)."""

from __future__ import annotations

DOCUMENTATION = r"""
module: python_environment
short_description: Build a locked Python environment beside the old one and switch to it
description:
  - Builds in its final place and counts only when its manifest is there, which is written last.
  - The old one stays until the new one has passed its checks; others beyond C(keep) are removed unless a
    process runs from them or a unit names them.
  - The action of the same name reads the lock on the controller and hands over its text.
options:
  name:
    description: Name of the environment.
    type: str
    required: true
  provider:
    description: What fills it.
    type: str
    default: pip
  prefix:
    description: Where it will stay; the name should end in the digest.
    type: path
    required: true
  lock_text:
    description: Text of the lock, every line with hashes.
    type: str
    required: true
  digest:
    description: Digest of all that goes in. Another digest is another environment.
    type: str
    required: true
  python:
    description: C(system), a version such as C(3.12), or the path of an interpreter.
    type: str
    default: system
  link:
    description: Link that always leads to the current environment.
    type: path
  checks:
    description: Commands that must end with 0 before the environment counts.
    type: list
    elements: list
    default: []
  packages:
    description: Distribution packages to install when the interpreter cannot make environments.
    type: list
    elements: str
    default: []
  planned:
    description: Prefixes of all environments that this node must have; they are never removed.
    type: list
    elements: path
    default: []
  keep:
    description: How many other environments stay, the newest, to go back to.
    type: int
    default: 1
  cache:
    description: Folder for downloads, so that a build that was broken off fetches nothing twice.
    type: path
    default: /var/cache/bringup/packages
  log:
    description: File that the build writes to while it works.
    type: path
    required: true
  settings:
    description: Environment variables for the provider, such as a mirror's address.
    type: dict
    default: {}
  tool_lock:
    description: Lock of what provider C(rattler) itself needs; the action fills it in.
    type: str
    default: ""
  role:
    description: Role in whose journal it is kept what was there before, for module C(node_undo).
    type: str
    default: ""
author: bringup
"""

RETURN = r"""
built:
  description: Whether it was built now.
  returned: success
  type: bool
switched:
  description: Whether the link was moved.
  returned: success
  type: bool
pruned:
  description: Old environments that were removed.
  returned: success
  type: list
  elements: str
prefix:
  description: Where the environment is.
  returned: success
  type: str
"""

from ansible.module_utils.basic import AnsibleModule  # noqa: E402 (documentation comes first)
from ansible.module_utils.bringup_node import environment  # noqa: E402


def main() -> None:
    """Bring the environment to what is wanted."""
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "provider": {"type": "str", "default": "pip"},
            "prefix": {"type": "path", "required": True},
            "lock_text": {"type": "str", "required": True},
            "digest": {"type": "str", "required": True},
            "python": {"type": "str", "default": "system"},
            "link": {"type": "path"},
            "checks": {"type": "list", "elements": "list", "default": []},
            "packages": {"type": "list", "elements": "str", "default": []},
            "planned": {"type": "list", "elements": "path", "default": []},
            "keep": {"type": "int", "default": 1},
            "cache": {"type": "path", "default": "/var/cache/bringup/packages"},
            "log": {"type": "path", "required": True},
            "settings": {"type": "dict", "default": {}},
            "tool_lock": {"type": "str", "default": ""},
            "role": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    given = {name: value for name, value in module.params.items() if name != "lock_text"}
    wanted = environment.Wanted(**{**given, "link": given["link"] or "", "lock": module.params["lock_text"]})
    try:
        outcome = environment.ensure(wanted, check_only=module.check_mode)
    except (environment.EnvironmentFailed, OSError) as error:
        module.fail_json(msg=str(error), log=wanted.log)
    before, after = {"environment": "none or another"}, {"environment": wanted.prefix}
    diff = {"before": before, "after": after} if outcome["built"] or outcome["switched"] else {}
    module.exit_json(**outcome, diff=diff)


if __name__ == "__main__":
    main()
