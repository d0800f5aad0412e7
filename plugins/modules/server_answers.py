#!/usr/bin/python
"""Asks a node's servers, once or under load (`bringup/node/answers.py`)."""

from __future__ import annotations

DOCUMENTATION = r"""
module: server_answers
short_description: Ask a node's servers, once or under load
description:
  - Each server must give a real token. With C(seconds) it is asked by several clients for so long, and must not have
    been started again meanwhile, nor the kernel have reported a fault of a GPU.
  - Changes nothing; in check mode nothing is asked.
options:
  services:
    description: Names of the services.
    type: list
    elements: str
    required: true
  seconds:
    description: How long to ask; 0 for one request a server.
    type: float
    default: 0
  at_once:
    description: How many clients ask at the same time.
    type: int
    default: 1
  warm:
    description: Send the warm-up set of each server instead.
    type: bool
    default: false
  locked:
    description: A server with an API key must refuse a request without one.
    type: bool
    default: false
author: bringup
"""

RETURN = r"""
answers:
  description: Service, requests, tokens, slowest answer in seconds and tokens a second of each server.
  returned: success
  type: list
  elements: dict
"""

from ansible.module_utils.basic import AnsibleModule  # noqa: E402 (documentation comes first)
from ansible.module_utils.bringup_node import answers  # noqa: E402


def main() -> None:
    """Ask, and fail with every server that does not answer."""
    module = AnsibleModule(
        argument_spec={
            "services": {"type": "list", "elements": "str", "required": True},
            "seconds": {"type": "float", "default": 0.0},
            "at_once": {"type": "int", "default": 1},
            "warm": {"type": "bool", "default": False},
            "locked": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    given = module.params
    if module.check_mode:
        module.exit_json(changed=False, answers=[])
    try:
        rows = answers.check(
            given["services"],
            seconds=given["seconds"],
            at_once=given["at_once"],
            warm=given["warm"],
            locked=given["locked"],
        )
    except answers.NotAnswering as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=False, answers=rows)


if __name__ == "__main__":
    main()
