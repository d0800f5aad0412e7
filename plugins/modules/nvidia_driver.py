#!/usr/bin/python
"""Brings the GPU driver of a node to what is wanted (`bringup/node/driver.py`)."""

from __future__ import annotations

DOCUMENTATION = r"""
module: nvidia_driver
short_description: GPU driver, fabric manager, persistence, clocks and power of a node in one call
description:
  - C(present) installs and holds packages, keeps nouveau away, loads the driver and runs its daemons; a
    reboot that is due is named, not done. A node that serves is refused unless C(while_serving) is C(drain).
  - C(guard) refuses or drains before a reboot or an undo. C(checked) waits until the driver shows all GPUs.
  - Never restarts the fabric manager. Keeps what was there in the role's journal, for module C(node_undo).
options:
  state:
    description: What to do.
    type: str
    choices: [present, guard, checked]
    default: present
  wish:
    description: What is wanted, see C(Wish) in C(bringup/node/driver.py).
    type: dict
    required: true
  packages:
    description: Sets of packages that bring a driver, in order of preference.
    type: list
    elements: dict
    required: true
  gpus:
    description: GPUs that the node has.
    type: int
    required: true
  files:
    description: Files, see module C(node_files).
    type: list
    elements: dict
    default: []
  units:
    description: Our own units that set things at boot.
    type: list
    elements: str
    default: []
  archive:
    description: Folder of packages on the node; empty for none.
    type: str
    default: ""
  services:
    description: Servers on the GPUs. C(name), C(unit), C(drain_s), C(stop_timeout_s).
    type: list
    elements: dict
    default: []
  while_serving:
    description: What happens to a node that serves.
    type: str
    choices: [refuse, drain]
    default: refuse
  limit_s:
    description: Seconds until the driver must show all GPUs.
    type: int
    default: 300
author: bringup
"""

RETURN = r"""
done:
  description: What was done, or would be.
  returned: success
  type: list
  elements: str
reboot:
  description: Why a reboot is due; empty when none is.
  returned: when state is present
  type: list
  elements: str
version:
  description: The driver that is installed.
  returned: when state is present
  type: str
"""

from ansible.module_utils.basic import AnsibleModule  # noqa: E402 (documentation comes first)
from ansible.module_utils.bringup_node import driver, packages, place, units  # noqa: E402


def main() -> None:
    """Do what the state says."""
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["present", "guard", "checked"], "default": "present"},
            "wish": {"type": "dict", "required": True},
            "packages": {"type": "list", "elements": "dict", "required": True},
            "gpus": {"type": "int", "required": True},
            "files": {"type": "list", "elements": "dict", "default": [], "no_log": False},
            "units": {"type": "list", "elements": "str", "default": []},
            "archive": {"type": "str", "default": ""},
            "services": {"type": "list", "elements": "dict", "default": []},
            "while_serving": {"type": "str", "choices": ["refuse", "drain"], "default": "refuse"},
            "limit_s": {"type": "int", "default": 300},
        },
        supports_check_mode=True,
    )
    given = module.params
    try:
        if given["state"] == "guard":
            outcome = driver.guard(given, module.check_mode)
        elif given["state"] == "checked":
            outcome = driver.checked(given) if not module.check_mode else {"changed": False}
        else:
            outcome = driver.apply(given, module.check_mode)
    except (
        driver.DriverFailed,
        packages.PackagesFailed,
        place.PlaceFailed,
        units.UnitsFailed,
        OSError,
    ) as error:
        module.fail_json(msg=str(error), bringup_refused=isinstance(error, driver.DriverRefused))
    module.exit_json(**outcome)


if __name__ == "__main__":
    main()
