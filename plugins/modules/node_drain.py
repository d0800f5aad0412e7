#!/usr/bin/python
"""Takes a node out of rotation and puts it back (`bringup/node/drain.py`)."""

from __future__ import annotations

DOCUMENTATION = r"""
module: node_drain
short_description: Take a node out of rotation, or put it back
description:
  - Marks each service as draining, which gateways see, and waits until no request runs or waits.
  - Requests that do not end in time are counted, and left to whoever stops the server.
options:
  services:
    description: Names of the services.
    type: list
    elements: str
    required: true
  state:
    description: C(drained) or C(serving).
    type: str
    choices: [drained, serving]
    required: true
  limit_s:
    description: Seconds that the requests of a server may take to end.
    type: float
    default: 120
author: bringup
"""

RETURN = r"""
left:
  description: Requests that a server still had when the time was over, by service.
  returned: state is drained
  type: dict
not_refused:
  description: Why new connections are not refused to a server, by service.
  returned: state is drained
  type: dict
"""

from ansible.module_utils.basic import AnsibleModule  # noqa: E402 (documentation comes first)
from ansible.module_utils.bringup_node import drain  # noqa: E402


def main() -> None:
    """Drain, or put back."""
    module = AnsibleModule(
        argument_spec={
            "services": {"type": "list", "elements": "str", "required": True},
            "state": {"type": "str", "choices": ["drained", "serving"], "required": True},
            "limit_s": {"type": "float", "default": 120.0},
        },
        supports_check_mode=True,
    )
    given = module.params
    wanted = given["state"] == "drained"
    marked = drain.marked(given["services"])
    changed = len(marked) < len(given["services"]) if wanted else bool(marked)
    left: dict[str, int] = {}
    not_refused: dict[str, str] = {}
    if wanted and not module.check_mode:
        left, not_refused = drain.drain(given["services"], given["limit_s"])
    elif not module.check_mode:
        drain.put_back(given["services"])
    for name, why in not_refused.items():
        module.warn(f"new connections to {name} are not refused: {why}")
    module.exit_json(changed=changed, left=left, not_refused=not_refused)


if __name__ == "__main__":
    main()
