"""Puts the text of the node's programs into the entries of the module of the same name, and lets a rehearsal say each
thing once: two roles bring some of the same, and in check mode the first of them has not made it yet."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase

PROGRAMS = Path(__file__).resolve().parents[2] / "bringup" / "node"
SAID = "bringup_rehearsed_"
"""Begins the names of facts that hold, in check mode only, how a path would be by now."""


class ActionModule(ActionBase):
    """`program: serve.py` becomes `content: <the text of bringup/node/serve.py>`."""

    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """The module's result, without the files' texts in it."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        try:
            entries = [_filled(entry) for entry in self._task.args["entries"]]
        except OSError as error:
            return {**result, "failed": True, "msg": f"{error.filename}: {error.strerror}"}
        rehearsed: dict[str, str] = {}
        if self._task.check_mode:
            entries, rehearsed = _unsaid(entries, (task_vars or {}).get("ansible_facts") or {})
        arguments = {**self._task.args, "entries": entries}
        answer = self._execute_module(module_name="node_files", module_args=arguments, task_vars=task_vars)
        answer.pop("invocation", None)
        if rehearsed and not answer.get("failed"):
            answer["ansible_facts"] = rehearsed
        return {**result, **answer}


def _filled(entry: Mapping[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in entry.items() if name != "program"}
    if "program" in entry:
        rest["content"] = (PROGRAMS / Path(str(entry["program"])).name).read_text(encoding="utf-8")
    return rest


def _unsaid(
    entries: Sequence[dict[str, Any]], facts: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The entries that no task of this rehearsal has brought so already, and the facts that say them."""
    named = [(_name(str(entry["path"])), _state(entry), entry) for entry in entries]
    left = [(name, state, entry) for name, state, entry in named if facts.get(name) != state]
    return [entry for _, _, entry in left], {name: state for name, state, _ in left}


def _name(path: str) -> str:
    return SAID + hashlib.sha256(path.encode()).hexdigest()[:16]


def _state(entry: Mapping[str, Any]) -> str:
    names = ("state", "content", "target", "owner", "group", "mode")
    text = json.dumps([entry.get(name) for name in names], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
