#!/usr/bin/python
"""Starts servers, restarts those whose definition changed, and waits for real tokens
(`bringup/node/servers.py`).
"""

from __future__ import annotations

DOCUMENTATION = r"""
module: engine_servers
short_description: Start servers, restart those whose definition changed, and wait for real tokens
description:
  - A server that is planned no more is stopped, and its units go.
  - A server that does not run is started. One that runs from an older definition is restarted, or only named.
  - Ends when each server that was started has given a real token and is warmed up.
options:
  services:
    description: The servers of this node.
    type: list
    elements: dict
    required: true
    suboptions:
      name:
        description: Name of the service.
        type: str
        required: true
      unit:
        description: Its unit without suffix.
        type: str
        required: true
      definition:
        description: Files that define it.
        type: list
        elements: str
        required: true
      start_timeout_s:
        description: Seconds that a start may take until the first token.
        type: int
        required: true
      stop_timeout_s:
        description: Seconds that a stop may take.
        type: int
        required: true
      drain_s:
        description: Seconds that requests in flight may take to end before a restart.
        type: int
        required: true
  restart:
    description: Whether a running server that is due is restarted C(now) or only named as due (C(later)).
    type: str
    choices: [now, later]
    default: now
  changed_paths:
    description: Paths that this play has changed; in check mode they decide what would be restarted.
    type: list
    elements: str
    default: []
author: bringup
"""

RETURN = r"""
bringup_starts:
  description: The starts of this call - unit, seconds, phases, answer, model and address.
  returned: success
  type: list
  elements: dict
bringup_notes:
  description: Warnings of these starts, such as drafts of which nothing is accepted.
  returned: success
  type: list
  elements: str
due:
  description: Names of servers that run from an older definition.
  returned: success
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule  # noqa: E402 (documentation comes first)
from ansible.module_utils.bringup_node import servers  # noqa: E402


def main() -> None:
    """Start and restart what is to be."""
    service = {
        "name": {"type": "str", "required": True},
        "unit": {"type": "str", "required": True},
        "definition": {"type": "list", "elements": "str", "required": True},
        "start_timeout_s": {"type": "int", "required": True},
        "stop_timeout_s": {"type": "int", "required": True},
        "drain_s": {"type": "int", "required": True},
    }
    module = AnsibleModule(
        argument_spec={
            "services": {"type": "list", "elements": "dict", "required": True, "options": service},
            "restart": {"type": "str", "choices": ["now", "later"], "default": "now"},
            "changed_paths": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    given = module.params
    try:
        outcome = servers.apply(
            given["services"], given["restart"], given["changed_paths"], module.check_mode
        )
    except servers.ServersFailed as error:
        module.fail_json(msg=str(error), bringup_refused=error.refused)
    module.exit_json(**outcome)


if __name__ == "__main__":
    main()
