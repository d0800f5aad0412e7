#!/usr/bin/python
"""Preloads a newer libstdc++ into servers whose environment needs one (`bringup/node/libraries.py`)."""

from __future__ import annotations

DOCUMENTATION = r"""
module: library_fixes
short_description: Preload a newer libstdc++ into servers whose environment needs one, and into no other
description:
  - Reads the symbol versions in the files themselves; runs nothing of the environment.
  - In check mode an environment that is not there yet has no verdict.
options:
  services:
    description: Servers. C(name), C(prefix) of the environment, C(drop_in) of the unit.
    type: list
    elements: dict
    required: true
    suboptions:
      name:
        description: Name of the service.
        type: str
        required: true
      prefix:
        description: Its environment.
        type: path
        required: true
      drop_in:
        description: File that systemd reads the preload from.
        type: path
        required: true
  folders:
    description: Folders beside the environment that may hold a newer libstdc++.
    type: list
    elements: path
    default: []
  strict:
    description: Whether a need that nothing can cure fails the task; without, it is a warning.
    type: bool
    default: false
  role:
    description: Role in whose journal the old state is kept.
    type: str
    required: true
author: bringup
"""

RETURN = r"""
verdicts:
  description: For each service C(preload), C(missing) (version, files that need it), C(unsolved), C(scanned).
  returned: success
  type: list
  elements: dict
changed_paths:
  description: Paths that were changed, or would be.
  returned: success
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule  # noqa: E402 (documentation comes first)
from ansible.module_utils.bringup_node import libraries, place  # noqa: E402


def main() -> None:
    """Examine each environment and write or remove drop-ins."""
    service = {
        "name": {"type": "str", "required": True},
        "prefix": {"type": "path", "required": True},
        "drop_in": {"type": "path", "required": True},
    }
    module = AnsibleModule(
        argument_spec={
            "services": {"type": "list", "elements": "dict", "required": True, "options": service},
            "folders": {"type": "list", "elements": "path", "default": []},
            "strict": {"type": "bool", "default": False},
            "role": {"type": "str", "required": True},
        },
        supports_check_mode=True,
    )
    given = module.params
    try:
        outcome = libraries.apply(given["services"], given["folders"], given["role"], module.check_mode)
    except (place.PlaceFailed, OSError) as error:
        module.fail_json(msg=str(error))
    unsolved = [line for verdict in outcome["verdicts"] for line in verdict["unsolved"]]
    if unsolved and given["strict"]:
        module.fail_json(msg="\n".join(unsolved), **outcome)
    for line in unsolved:
        module.warn(line)
    module.exit_json(**outcome)


if __name__ == "__main__":
    main()
