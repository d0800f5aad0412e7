#!/usr/bin/python
"""Brings kernel values, timers, shared memory and clock to what is wanted (`bringup/node/settings.py`)."""

from __future__ import annotations

DOCUMENTATION = r"""
module: system_settings
short_description: Kernel values, limits, quiet timers, shared memory and clock of a node in one call
description:
  - Writes the files that set things at boot, and sets them now. What cannot be set is reported, not failed.
  - Keeps what was there in the journal of the role, for module C(node_undo).
options:
  files:
    description: Files, see module C(node_files).
    type: list
    elements: dict
    default: []
  values:
    description: Kernel values. C(name), C(path) (may be a pattern) and C(value).
    type: list
    elements: dict
    default: []
  timers:
    description: Timers to be stopped and disabled where the node has them.
    type: list
    elements: str
    default: []
  units:
    description: Units that set things at boot.
    type: list
    elements: str
    default: []
  shared_memory:
    description: Size of /dev/shm, such as C(50%) of memory or C(64G); empty leaves it.
    type: str
    default: ""
  clock_packages:
    description: Packages to install when no time service runs; empty leaves it.
    type: list
    elements: str
    default: []
  role:
    description: Role in whose journal the old state is kept.
    type: str
    required: true
author: bringup
"""

RETURN = r"""
done:
  description: What was done, or would be.
  returned: success
  type: list
  elements: str
skipped_settings:
  description: What cannot be set on this machine (C(name)) and C(why).
  returned: success
  type: list
  elements: dict
"""

from ansible.module_utils.basic import AnsibleModule  # noqa: E402 (documentation comes first)
from ansible.module_utils.bringup_node import packages, place, settings, units  # noqa: E402


def main() -> None:
    """Bring everything to what is wanted."""
    module = AnsibleModule(
        argument_spec={
            "files": {"type": "list", "elements": "dict", "default": [], "no_log": False},
            "values": {"type": "list", "elements": "dict", "default": []},
            "timers": {"type": "list", "elements": "str", "default": []},
            "units": {"type": "list", "elements": "str", "default": []},
            "shared_memory": {"type": "str", "default": ""},
            "clock_packages": {"type": "list", "elements": "str", "default": []},
            "role": {"type": "str", "required": True},
        },
        supports_check_mode=True,
    )
    try:
        outcome = settings.apply(module.params, module.check_mode, module.params["role"])
    except (
        place.PlaceFailed,
        units.UnitsFailed,
        packages.PackagesFailed,
        OSError,
        ValueError,
    ) as error:
        module.fail_json(msg=str(error))
    module.exit_json(**outcome)


if __name__ == "__main__":
    main()
