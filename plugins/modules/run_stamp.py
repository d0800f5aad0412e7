#!/usr/bin/python
"""Writes what a node was planned to be and that a run has been there (`bringup/node/stamp.py`)."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

DOCUMENTATION = r"""
module: run_stamp
short_description: Write what a node was planned to be and that a run has been there
description:
  - The plan's summary is changed only when the plan has changed.
  - A run's stamp is a record, like a line in a log, and does not count as a change.
options:
  plan_file:
    description: File of the plan's summary.
    type: path
    required: true
  runs:
    description: Folder of the stamps.
    type: path
    required: true
  summary:
    description: The plan's summary, without secrets.
    type: dict
    required: true
  run:
    description: Who ran what, for the stamp.
    type: dict
    required: true
  keep:
    description: How many stamps stay.
    type: int
    default: 50
  plan:
    description: Whether the plan's summary is written, and servers' files are kept; else only that a run has been here.
    type: bool
    default: true
  kept:
    description: Files of servers that serve well now, of which a snapshot is kept (C(bringup/node/snapshot.py)).
    type: list
    elements: path
    default: []
  give_back:
    description:
      - Token of the run that holds this node, and what to seal (C(seals), C(played)); then the node is given back.
      - The action fills it in a play whose modules hold the node.
    type: dict
    default: {}
author: bringup
"""

RETURN = r"""
stamp:
  description: Path of the stamp, empty in check mode.
  returned: success
  type: str
sealed:
  description: Roles that were sealed.
  returned: when the node was given back
  type: list
  elements: str
unsealed:
  description: Of each role that was played and not sealed, what does not hold.
  returned: when the node was given back
  type: dict
"""

import time  # noqa: E402 (documentation comes first)
from pathlib import Path  # noqa: E402

from ansible.module_utils.basic import AnsibleModule  # noqa: E402
from ansible.module_utils.bringup_node import nodelock, seal, snapshot, stamp  # noqa: E402


def main() -> None:
    """Write the plan's summary and the stamp; keep, seal and give back where that is asked for."""
    module = AnsibleModule(
        argument_spec={
            "plan_file": {"type": "path", "required": True},
            "runs": {"type": "path", "required": True},
            "summary": {"type": "dict", "required": True},
            "run": {"type": "dict", "required": True},
            "keep": {"type": "int", "default": 50},
            "plan": {"type": "bool", "default": True},
            "kept": {"type": "list", "elements": "path", "default": []},
            "give_back": {"type": "dict", "default": {}},
        },
        supports_check_mode=True,
    )
    given = module.params
    try:
        answer = planned(given, module.check_mode) if given["plan"] else {"changed": False, "stamp": ""}
        if not (given["plan"] or module.check_mode):
            answer["stamp"] = str(nodelock.stamp(given["run"], Path(given["runs"])))
        if given["kept"] and given["plan"] and not module.check_mode:
            snapshot.keep(given["kept"])
        if given["give_back"] and not module.check_mode:
            asked, run = given["give_back"], given["run"].get("id", "")
            # Before the node is given back: the next run goes by it.
            answer["sealed"], answer["unsealed"] = seal.seal(
                asked["seals"], asked["played"], run, time.time()
            )
            nodelock.give_back(asked["token"])
    except TimeoutError as error:
        module.fail_json(msg=f"the lock cannot be written: {error}")
    except OSError as error:
        module.fail_json(msg=f"{error.filename}: {error.strerror}")
    module.exit_json(**answer)


def planned(given: dict[str, Any], check_mode: bool) -> dict[str, Any]:
    """The plan's summary and the stamp: changed, stamp, and the difference."""
    answer = stamp.ensure(
        Path(given["plan_file"]),
        Path(given["runs"]),
        given["summary"],
        given["run"],
        given["keep"],
        check_only=check_mode,
        records=[snapshot.FOLDER],
    )
    before, after = answer.pop("before"), answer.pop("after")
    header = {"before_header": given["plan_file"], "after_header": given["plan_file"]}
    return {**answer, "diff": {"before": before, "after": after, **header} if answer["changed"] else {}}


if __name__ == "__main__":
    main()
