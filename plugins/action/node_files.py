"""Puts the text of the node's programs into the entries of `node_files` and `node_parts`, and lets a rehearsal say each
thing once: two roles bring some of the same, and in check mode the first of them has not made it yet."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from bringup.carrying import Carried  # noqa: E402 (the checkout must be on the path first)

PROGRAMS = ROOT / "bringup" / "node"
KEY_CHARS = 8
SAID = "bringup_rehearsed_"
"""Begins the names of facts that hold, in check mode only, how a path would be by now."""


class ActionModule(Carried, ActionBase):
    """`program: serve.py` becomes `content: <the text of bringup/node/serve.py>`; `keys` (service, path,
    variable) become entries with what the vault's variable of that name holds."""

    _supports_check_mode = True
    ONE_CALL = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """The module's result, without the files' texts in it."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        keys = arguments.pop("keys", None) or ()
        wrong = [row for row in keys if len(self._secret(row, task_vars or {})) < KEY_CHARS]
        if wrong:
            return {**result, "failed": True, "msg": "\n".join(map(_refusal, wrong))}
        try:
            entries = [_filled(entry) for entry in arguments.get("entries") or ()]
        except OSError as error:
            return {**result, "failed": True, "msg": f"{error.filename}: {error.strerror}"}
        for row in keys:
            entries += _of_key(row, self._secret(row, task_vars or {}))
        rehearsed: dict[str, str] = {}
        if self._task.check_mode:
            entries, rehearsed = _unsaid(entries, (task_vars or {}).get("ansible_facts") or {})
        arguments["entries"] = entries
        answer = self._execute_module(module_args=arguments, task_vars=task_vars)
        answer.pop("invocation", None)
        if rehearsed and not answer.get("failed"):
            answer["ansible_facts"] = rehearsed
        return {**result, **answer}

    def _secret(self, row: Mapping[str, Any], known: Mapping[str, Any]) -> str:
        """What the vault's variable holds that a row names; empty for none."""
        return str(self._templar.template(known.get(row["variable"], "")) or "")


def _refusal(row: Mapping[str, Any]) -> str:
    return f"{row['service']} needs an API key of at least {KEY_CHARS} characters. Set {row['variable']} in the vault."


def _of_key(row: Mapping[str, Any], secret: str) -> list[dict[str, Any]]:
    """Where systemd takes a credential from: root's only, and in no difference."""
    return [
        {"path": str(Path(row["path"]).parent), "state": "directory", "mode": "0700"},
        {"path": row["path"], "content": secret, "mode": "0600", "secret": True},
    ]


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
