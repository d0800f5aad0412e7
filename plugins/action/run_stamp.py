"""The last call on a node: its stamp, what of it is kept, its seals, and that it is given back.

In a play whose modules hold the node (`node_lock_along`) all of that is one call; elsewhere only the stamp.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase

ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

from bringup import closing  # noqa: E402 (the checkout must be on the path first)
from bringup.carrying import Carried  # noqa: E402


class ActionModule(Carried, ActionBase):
    """The module's result, without its options in it."""

    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Of a node that was given back: also that it is done, and roles that could not be sealed."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        known = task_vars or {}
        options = dict(self._task.args)
        lock = self._lock(known)
        if lock is not None:
            options["give_back"] = closing.give_back(known, lock)
        answer = self._execute_module(module_args=options, task_vars=known)
        answer.pop("invocation", None)
        if lock is not None and not answer.get("failed"):
            answer |= closing.said(answer)
        return {**result, **answer}
