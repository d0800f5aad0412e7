#!/usr/bin/python
"""Resets all GPUs of a node (`bringup/node/gpureset.py`)."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_reset
short_description: Reset all GPUs together, in the right order with the fabric manager
description:
  - Refuses while anything but monitors and the driver's own daemons has a GPU open.
  - Stops monitors, persistence daemon and fabric manager, resets all GPUs, starts them in the opposite order, and
    waits until every GPU is there, has joined the fabric and asks for no further reset.
options:
  gpus:
    description: GPUs that the node must have.
    type: int
    required: true
  limit_s:
    description: Seconds until they must be well again.
    type: float
    default: 300
author: bringup
"""

RETURN = r"""
stopped:
  description: Units that were stopped for it and started again, in the order of stopping.
  returned: success
  type: list
  elements: str
gpus:
  description: GPUs that are well.
  returned: success
  type: int
"""

from ansible.module_utils.basic import AnsibleModule  # noqa: E402 (documentation comes first)
from ansible.module_utils.bringup_node import gpureset  # noqa: E402


def main() -> None:
    """Reset, or say what would be stopped for it."""
    module = AnsibleModule(
        argument_spec={
            "gpus": {"type": "int", "required": True},
            "limit_s": {"type": "float", "default": 300.0},
        },
        supports_check_mode=True,
    )
    given = module.params
    try:
        outcome = gpureset.reset(given["gpus"], given["limit_s"], module.check_mode)
    except (gpureset.ResetFailed, OSError) as error:
        module.fail_json(msg=str(error), bringup_refused=isinstance(error, gpureset.ResetRefused))
    module.exit_json(**outcome)


if __name__ == "__main__":
    main()
