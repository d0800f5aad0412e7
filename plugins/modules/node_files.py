#!/usr/bin/python
"""Brings a role's files, folders and links to their places in one call (`bringup/node/place.py`)."""

from __future__ import annotations

DOCUMENTATION = r"""
module: node_files
short_description: Bring files, folders and links to their places in one call
description:
  - Everything is written beside its place and validated first; only when all of it is good does it change.
  - Works in check mode, with the same differences, on a node that lacks the folders and users yet.
  - The action of the same name fills C(program) entries with the text of the node's program.
options:
  entries:
    description:
      - One mapping a thing. C(path); C(state) is C(file), C(directory), C(link) or C(absent); C(content) of a file or
        C(program), the name of a file in C(bringup/node); C(target) of a link; C(owner), C(group), C(mode);
        C(validate), a command in which %s is the new file; C(secret) keeps the content out of differences; C(whole),
        for a folder that an undo removes with whatever is in it by then.
    type: list
    elements: dict
    required: true
  undo:
    description: Role in whose journal the old state of what changes is kept, for module C(node_undo).
    type: str
    default: ""
author: bringup
"""

RETURN = r"""
changed_paths:
  description: Paths that were changed, or would be.
  returned: success
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule  # noqa: E402 (documentation comes first)
from ansible.module_utils.bringup_node import place  # noqa: E402


class QuietModule(AnsibleModule):
    """Does not copy the text of every file into the journal at every call."""

    def _log_invocation(self) -> None:
        self.log(f"{len(self.params['entries'])} entries")


def main() -> None:
    """Bring all entries to their places."""
    module = QuietModule(
        argument_spec={
            "entries": {"type": "list", "elements": "dict", "required": True, "no_log": False},
            "undo": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    try:
        outcome = place.apply(module.params["entries"], module.check_mode, module.params["undo"])
    except (place.PlaceFailed, OSError) as error:
        module.fail_json(msg=str(error))
    module.exit_json(**outcome)


if __name__ == "__main__":
    main()
