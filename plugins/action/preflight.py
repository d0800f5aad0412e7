"""Gathers facts on the node and compares them with the plan here: one task, one round trip, all findings.

The result holds `preflight_findings` (a list of code, severity, what, evidence, remedy) and, unless the node
is refused, `preflight_facts`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase

ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

from bringup import preflight  # noqa: E402 (the checkout must be on the path first)


class ActionModule(ActionBase):
    """`preflight: {expected: ..., leftovers: pattern}`; see `bringup.preflight.Expected`."""

    _supports_check_mode = True
    _supports_diff = False
    _VALID_ARGS = frozenset(("expected", "leftovers"))

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """The task's result; failed when a finding is an error."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        task_vars = task_vars or {}
        expected = preflight.Expected.of({**self._task.args["expected"], "now": time.time()})
        asked = {
            "paths": [room.path for room in expected.rooms],
            "leftovers": self._task.args.get("leftovers", ""),
        }
        gathered = self._execute_module(module_name="node_facts", module_args=asked, task_vars=task_vars)
        if gathered.get("failed"):
            return {**result, **gathered}
        findings = preflight.verdicts(gathered["facts"], expected)
        result["preflight_findings"] = preflight.plain(findings)
        result["changed"] = False
        refusal = preflight.refusal(str(task_vars.get("inventory_hostname", "node")), findings)
        if refusal:
            return {**result, "failed": True, "msg": refusal}
        result["preflight_facts"] = gathered["facts"]
        result["warnings"] = [str(finding) for finding in findings if finding.severity == "warning"]
        return result
