"""Writes down what each play of a scenario's converge.yml changed, or said that it would: a line of JSON a play.

tests/molecule/run.py compares them: what check mode says on a fresh node must be what the first real play does,
and on a node that has converged it must be nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible import context
from ansible.plugins.callback import CallbackBase

DOCUMENTATION = """
name: rehearsal
type: notification
short_description: what check mode said, and what the real play did
description: Appends a line to the file that BRINGUP_REHEARSAL names.
"""

PLAYED = "converge.yml"


class CallbackModule(CallbackBase):
    """Collects each task's result, and those of its items."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "notification"
    CALLBACK_NAME = "rehearsal"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, Any]] = []
        self.playbook = ""

    def v2_playbook_on_start(self, playbook: Any) -> None:
        self.playbook = Path(playbook._file_name).name

    def v2_runner_on_ok(self, result: Any) -> None:
        task = result.task
        self.rows.append({"host": result.host.get_name(), "task": task.get_name(), **changes(result.result)})

    def v2_playbook_on_stats(self, stats: Any) -> None:
        place = os.environ.get("BRINGUP_REHEARSAL", "")
        if place and self.playbook == PLAYED:
            line = {"check": bool(context.CLIARGS.get("check")), "tasks": self.rows}
            with Path(place).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def changes(result: Mapping[str, Any]) -> dict[str, Any]:
    """Whether a result changed something and what it says of that: paths, steps, and the same of each item."""
    items = [changes(item) for item in result.get("results") or () if isinstance(item, Mapping)]
    said = {name: list(result[name]) for name in ("changed_paths", "done") if name in result}
    return {"changed": bool(result.get("changed")), **said, **({"items": items} if items else {})}
