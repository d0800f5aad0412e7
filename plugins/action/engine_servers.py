"""Starts servers, and puts a node whose servers are due for a restart later into group `engine_service_due`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase

ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

from bringup.carrying import Carried  # noqa: E402 (the checkout must be on the path first)


class ActionModule(Carried, ActionBase):
    """The module's result."""

    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """The module's result, without its options in it."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        answer = self._execute_module(task_vars=task_vars)
        answer.pop("invocation", None)
        if answer.get("due") and self._task.args.get("restart") == "later":
            # As `group_by` does it, which would be one more task on every node.
            answer |= {"add_group": "engine_service_due", "parent_groups": ["all"]}
        return {**result, **answer}
