#!/usr/bin/python
"""Fetches and verifies a model's files on a node (`bringup/node/store.py`)."""

from __future__ import annotations

DOCUMENTATION = r"""
module: model_store
short_description: Fetch and verify a model's files
description:
  - A folder is ready when every file has the size and sha256 that the lock says; its stamp is written last.
  - A later run looks at sizes and times only, or reads everything (C(deep)). A wrong file is fetched
    again alone.
  - Of files that the controller has, C(send) says which and C(incoming) where to put them; the action of
    the same name does that and calls again.
options:
  model:
    description: Name, folder, files (path, size, sha256), sources (kind, locator), expectations, and of a
      grafted one what it is made of.
    type: dict
    required: true
  look:
    description: Say what is wrong and do nothing.
    type: bool
    default: false
  chain:
    description: The node's place in a chain of nodes that hand the model on, see C(bringup/node/chain.py).
    type: dict
    suboptions:
      before:
        description: Addresses of the nodes to follow, nearest first; none for the head.
        type: list
        elements: str
        required: true
      allowed:
        description: Addresses that may ask this node.
        type: list
        elements: str
        required: true
      port:
        description: Port of the relays.
        type: int
        required: true
  verify:
    description: How closely files that were verified before are looked at.
    type: str
    choices: [quick, deep]
    default: quick
  huggingface:
    description: Address of the hub or of a mirror that speaks like it.
    type: str
    default: https://huggingface.co
  huggingface_token:
    description: Token for that hub.
    type: str
    default: ""
  modelscope:
    description: Address of the hub.
    type: str
    default: https://modelscope.cn
  modelscope_token:
    description: Token for that hub.
    type: str
    default: ""
  client:
    description: Interpreter of an environment with the hubs' own clients; without it plain http is used.
    type: str
    default: ""
  rate_mib_s:
    description: The most that one file may take of the network, in MiB a second; 0 for no cap.
    type: float
    default: 0
  seconds:
    description: How long fetching may go on (the hours for downloads end then); 0 for no end.
    type: float
    default: 0
  undo:
    description: Role in whose journal it is kept what comes, for module C(node_undo).
    type: str
    default: ""
author: bringup
"""

RETURN = r"""
ready:
  description: Whether the folder is ready now.
  returned: success
  type: bool
faults:
  description: What was wrong before, by path.
  returned: success
  type: dict
fetched:
  description: Paths that were fetched now.
  returned: success
  type: list
  elements: str
came:
  description: Where each file came from, and what failed before it.
  returned: success
  type: dict
send:
  description: Paths that must come from the controller.
  returned: success
  type: list
  elements: str
incoming:
  description: Folder to put them into.
  returned: success
  type: str
"""

import os  # noqa: E402 (documentation comes first)
import time  # noqa: E402
from typing import Any  # noqa: E402

from ansible.module_utils.basic import AnsibleModule  # noqa: E402
from ansible.module_utils.bringup_node import chain, download, overlay, seal, store, undo  # noqa: E402

MIB = 1024 * 1024


def login_uid() -> int | None:
    """The user who logged in, when sudo brought us here: files from the controller arrive as theirs."""
    given = os.environ.get("SUDO_UID", "")
    return int(given) if given.isdigit() else None


def act(given: dict[str, Any], access: store.Access, check_only: bool) -> dict[str, Any]:
    """What the options ask for. Raises StoreFailed or OSError."""
    deep = given["verify"] == "deep"
    if given["model"].get("graft"):
        whole = overlay.Overlay.of(given["model"])
        if given["look"] or check_only:
            return {**overlay.look(whole, deep), **({"changed": False} if given["look"] else {})}
        if given["undo"]:
            undo.Journal(given["undo"]).remember_content(whole.folder, [], [whole.folder])
        return overlay.ensure(whole, deep)
    model = store.Model.of(given["model"])
    if given["look"]:
        return {**store.look(model, deep), "changed": False}
    if check_only:
        return store.look(model, deep)
    if given["undo"]:
        store.remember(model, undo.Journal(given["undo"]))
    if given["chain"]:
        row = given["chain"]
        place = chain.Chain(tuple(row["before"]), tuple(row["allowed"]), row["port"], access.limits.bytes_s)
        if given["undo"]:
            chain.remember(model, undo.Journal(given["undo"]))
        return chain.ensure(model, given["model"], place, access, deep, login_uid())
    return store.ensure(model, access, deep, login_uid())


def main() -> None:
    """Bring the folder to what the lock says."""
    module = AnsibleModule(
        argument_spec={
            "model": {"type": "dict", "required": True},
            "look": {"type": "bool", "default": False},
            "chain": {
                "type": "dict",
                "options": {
                    "before": {"type": "list", "elements": "str", "required": True},
                    "allowed": {"type": "list", "elements": "str", "required": True},
                    "port": {"type": "int", "required": True},
                },
            },
            "verify": {"type": "str", "choices": ["quick", "deep"], "default": "quick"},
            "huggingface": {"type": "str", "default": "https://huggingface.co"},
            "huggingface_token": {"type": "str", "default": "", "no_log": True},
            "modelscope": {"type": "str", "default": "https://modelscope.cn"},
            "modelscope_token": {"type": "str", "default": "", "no_log": True},
            "client": {"type": "str", "default": ""},
            "rate_mib_s": {"type": "float", "default": 0},
            "seconds": {"type": "float", "default": 0},
            "undo": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    given = module.params
    access = store.Access(
        huggingface=given["huggingface"],
        modelscope=given["modelscope"],
        huggingface_token=given["huggingface_token"],
        modelscope_token=given["modelscope_token"],
        client=given["client"],
        limits=download.Limits(
            bytes_s=given["rate_mib_s"] * MIB,
            until=time.monotonic() + given["seconds"] if given["seconds"] else float("inf"),
        ),
    )
    try:
        answer = act(given, access, module.check_mode)
    except (store.StoreFailed, OSError) as error:
        module.fail_json(msg=str(error))
    if answer.get("ready") and not module.check_mode:
        seal.claim([{"kind": "model", "name": given["model"]["folder"], "record": None, "touched": []}])
    for text in answer.pop("warned", ()):
        module.warn(text)
    # A fault of a graft as a whole has no path.
    named = {path or given["model"]["name"]: text for path, text in answer["faults"].items()}
    before = "".join(f"{path} {text}\n" for path, text in named.items())
    after = "".join(f"{path} is as the lock says\n" for path in named)
    diff = {"before": before, "after": after} if before else {}
    module.exit_json(**answer, diff=diff)


if __name__ == "__main__":
    main()
