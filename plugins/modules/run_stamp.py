#!/usr/bin/python
"""Writes what a node was planned to be and that a run has been there (`bringup/node/stamp.py`)."""

from __future__ import annotations

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
author: bringup
"""

RETURN = r"""
stamp:
  description: Path of the stamp, empty in check mode.
  returned: success
  type: str
"""

from pathlib import Path  # noqa: E402 (documentation comes first)

from ansible.module_utils.basic import AnsibleModule  # noqa: E402
from ansible.module_utils.bringup_node import snapshot, stamp  # noqa: E402


def main() -> None:
    """Write both files."""
    module = AnsibleModule(
        argument_spec={
            "plan_file": {"type": "path", "required": True},
            "runs": {"type": "path", "required": True},
            "summary": {"type": "dict", "required": True},
            "run": {"type": "dict", "required": True},
            "keep": {"type": "int", "default": 50},
        },
        supports_check_mode=True,
    )
    given = module.params
    try:
        answer = stamp.ensure(
            Path(given["plan_file"]),
            Path(given["runs"]),
            given["summary"],
            given["run"],
            given["keep"],
            check_only=module.check_mode,
            records=[snapshot.FOLDER],
        )
    except OSError as error:
        module.fail_json(msg=f"{error.filename}: {error.strerror}")
    before, after = answer.pop("before"), answer.pop("after")
    diff = {
        "before": before,
        "after": after,
        "before_header": given["plan_file"],
        "after_header": given["plan_file"],
    }
    module.exit_json(**answer, diff=diff if answer["changed"] else {})


if __name__ == "__main__":
    main()
