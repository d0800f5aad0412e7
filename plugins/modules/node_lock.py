#!/usr/bin/python
"""Holds a node for one run, and gives it back (`bringup/node/nodelock.py`)."""

from __future__ import annotations

DOCUMENTATION = r"""
module: node_lock
short_description: Hold a node for one run, and give it back
description:
  - First task of every play that changes nodes, so that two runs never work on one node, whichever controller they
    come from and whether C(invoke), plain C(ansible-playbook) or AWX started them.
  - The action of the same name adds who runs what, refuses outside of the node's change windows, and takes over a lock
    whose run has ended on this controller. It reads C(node_change_windows), C(run_outside_window) (why a change cannot
    wait) and C(run_force_unlock) from the play's variables.
  - Giving back also seals the roles that were played (C(bringup/node/seal.py)).
  - Never counts as a change, and does nothing in check mode.
options:
  state:
    description: C(held) or C(released).
    type: str
    choices: [held, released]
    required: true
  closed:
    description: Why nothing may be changed now on a node that this run does not hold yet. The action fills it.
    type: str
    default: ""
  reason:
    description: Why the change cannot wait, for the record. The action fills it.
    type: str
    default: ""
  stamp:
    description: Whether giving back also writes down on the node that the run has been here.
    type: bool
    default: true
  holder:
    description: Who runs what. The action fills it.
    type: dict
    default: {}
  over:
    description: Token of a run that is known to have ended. The action fills it.
    type: str
    default: ""
  force:
    description: Take the lock from anybody, which is written to C(/var/lib/bringup/audit.jsonl). The action fills it.
    type: bool
    default: false
  seals:
    description: Digest of what went into each role; one without is not sealed. The action fills it.
    type: dict
    default: {}
  played:
    description: Roles that were played to their end on this node. The action fills it.
    type: list
    elements: str
    default: []
author: bringup
"""

RETURN = r"""
held:
  description: Whether the node is this run's still.
  returned: state is released
  type: bool
bringup_held:
  description: How the lock came to this run, and the other run that holds it, or held it until now.
  returned: state is held
  type: dict
sealed:
  description: Roles that were sealed.
  returned: state is released
  type: list
  elements: str
unsealed:
  description: Of each role that was played and not sealed, what does not hold.
  returned: state is released
  type: dict
"""

import time  # noqa: E402 (documentation comes first)

from ansible.module_utils.basic import AnsibleModule  # noqa: E402
from ansible.module_utils.bringup_node import nodelock, seal  # noqa: E402


def main() -> None:
    """Take, renew or give back the lock."""
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["held", "released"], "required": True},
            "stamp": {"type": "bool", "default": True},
            "closed": {"type": "str", "default": ""},
            "reason": {"type": "str", "default": ""},
            "holder": {"type": "dict", "default": {}},
            "over": {"type": "str", "default": ""},
            "force": {"type": "bool", "default": False},
            "seals": {"type": "dict", "default": {}},
            "played": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    given = module.params
    holder = given["holder"]
    if not holder.get("token"):
        module.fail_json(msg="holder has no token: call it through the action of the same name")
    try:
        if given["state"] == "held":
            module.exit_json(changed=False, bringup_held=nodelock.take(given))
        if nodelock.read(nodelock.LOCK).get("token") != holder["token"]:
            module.exit_json(changed=False, held=False, sealed=[], unsealed={})
        # Before the node is given back: the next run goes by it.
        sealed, unsealed = seal.seal(given["seals"], given["played"], holder.get("id", ""), time.time())
        nodelock.give_back(holder["token"])
        if given["stamp"]:
            names = ("id", "by", "commit", "playbook")
            nodelock.stamp({name: holder.get(name, "") for name in names})
    except (OSError, TimeoutError) as error:
        module.fail_json(msg=f"the lock cannot be written: {error}")
    module.exit_json(changed=False, held=False, sealed=sealed, unsealed=unsealed)


if __name__ == "__main__":
    main()
