"""Puts the text of the node's programs into the entries of the module of the same name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase

PROGRAMS = Path(__file__).resolve().parents[2] / "bringup" / "node"


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
        arguments = {**self._task.args, "entries": entries}
        answer = self._execute_module(module_name="node_files", module_args=arguments, task_vars=task_vars)
        answer.pop("invocation", None)
        return {**result, **answer}


def _filled(entry: Mapping[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in entry.items() if name != "program"}
    if "program" in entry:
        rest["content"] = (PROGRAMS / Path(str(entry["program"])).name).read_text(encoding="utf-8")
    return rest
