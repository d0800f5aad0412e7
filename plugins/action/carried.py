"""Carries the module of the task's name to the node in the short way (`bringup/carrying.py`).

Files beside this one that link to it are the modules that need nothing else from the controller.
"""

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
    ONE_CALL = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """The module's result, without its options in it."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        answer = self._execute_module(task_vars=task_vars)
        answer.pop("invocation", None)
        return {**result, **answer}
