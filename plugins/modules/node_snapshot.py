#!/usr/bin/python
"""Keeps the definition of a node's servers, and brings it back (`bringup/node/snapshot.py`)."""

from __future__ import annotations

DOCUMENTATION = r"""
module: node_snapshot
short_description: Keep the definition of a node's servers, or bring it back
description:
  - A snapshot holds the text, owner and mode of files. The newest five stay.
  - Bringing back makes every path of a snapshot what it was; without C(name) the newest that differs is taken.
options:
  state:
    description: C(kept) or C(restored).
    type: str
    choices: [kept, restored]
    required: true
  paths:
    description: Files and links to keep.
    type: list
    elements: path
    default: []
  name:
    description: The snapshot to bring back.
    type: str
    default: ""
author: bringup
"""

RETURN = r"""
name:
  description: The snapshot's name.
  returned: success
  type: str
changed_paths:
  description: Paths that were brought back.
  returned: state is restored
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule  # noqa: E402 (documentation comes first)
from ansible.module_utils.bringup_node import snapshot  # noqa: E402


def main() -> None:
    """Keep, or bring back."""
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["kept", "restored"], "required": True},
            "paths": {"type": "list", "elements": "path", "default": []},
            "name": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    given = module.params
    try:
        if given["state"] == "kept":
            # A snapshot is a record, like a stamp, and no change of the node.
            name = "" if module.check_mode else snapshot.keep(given["paths"])[0]
            module.exit_json(changed=False, name=name)
        chosen = snapshot.choose(given["name"])
        files = snapshot.read(chosen)
        paths = snapshot.changes(files) if module.check_mode else snapshot.restore(files)
    except (snapshot.NoSnapshot, OSError) as error:
        module.fail_json(msg=str(error))
    diff = {"before": "", "after": "".join(f"{path} as in {chosen.stem}\n" for path in paths)}
    module.exit_json(changed=bool(paths), name=chosen.stem, changed_paths=paths, diff=diff)


if __name__ == "__main__":
    main()
