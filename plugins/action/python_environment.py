"""Reads an environment's lock on the controller and hands its text to the module of the same name."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from bringup.carrying import Carried  # noqa: E402 (the checkout must be on the path first)

RATTLER = "catalog/tools/py-rattler.txt"
"""Lock of the library that installs conda packages without conda."""


class ActionModule(Carried, ActionBase):
    """`lock` is a path in this checkout (or an absolute one); all else goes to the module as it is."""

    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """The module's result, without the lock's text in it."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        lock = ROOT / str(arguments.pop("lock"))
        try:
            arguments["lock_text"] = lock.read_text(encoding="utf-8")
            if arguments.get("provider") == "rattler":
                lock = ROOT / RATTLER
                arguments["tool_lock"] = lock.read_text(encoding="utf-8")
        except OSError as error:
            name = arguments.get("name")
            return {**result, "failed": True, "msg": f"environment {name}: lock {lock}: {error.strerror}"}
        answer = self._execute_module(
            module_name="python_environment", module_args=arguments, task_vars=task_vars
        )
        answer.pop("invocation", None)
        return {**result, **answer}
