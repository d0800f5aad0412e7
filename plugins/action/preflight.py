"""Gathers facts on the node and compares them with the plan here: one task, one round trip, all findings.

The result holds `preflight_findings` (a list of code, severity, what, evidence, remedy, mended_by) and, unless the
node is refused, `preflight_facts`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase

ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

from bringup import preflight  # noqa: E402 (the checkout must be on the path first)
from bringup.carrying import Carried  # noqa: E402


class ActionModule(Carried, ActionBase):
    """`preflight: {expected: ..., leftovers: pattern, mending: [role, ...]}`; see `bringup.expected.Expected`.

    `mending`: roles that the play brings after this one. Of those, the ones that this run's tags select count:
    what they mend refuses nobody, and is named in `preflight_deferred`, to be judged again after them; such
    a node joins group `preflight_due`.
    """

    _supports_check_mode = True
    _supports_diff = False
    _VALID_ARGS = frozenset(("expected", "leftovers", "mending"))

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """The task's result; failed when a finding is an error."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        task_vars = task_vars or {}
        expected = preflight.Expected.of({**self._task.args["expected"], "now": time.time()})
        asked = {**preflight.request(expected), "leftovers": self._task.args.get("leftovers", "")}
        gathered = self._execute_module(module_name="node_facts", module_args=asked, task_vars=task_vars)
        if gathered.get("failed"):
            return {**result, **gathered}
        coming = selected(self._task.args.get("mending") or (), task_vars)
        findings = preflight.verdicts(gathered["facts"], expected, coming)
        result["preflight_findings"] = preflight.plain(findings)
        result["preflight_deferred"] = preflight.deferred(gathered["facts"], expected, coming)
        result["changed"] = False
        refusal = preflight.refusal(str(task_vars.get("inventory_hostname", "node")), findings)
        if refusal:
            return {**result, "failed": True, "msg": refusal}
        if result["preflight_deferred"]:
            # As `group_by` does it, which would be one more task on every node.
            result |= {"add_group": "preflight_due", "parent_groups": ["all"]}
        result["preflight_facts"] = gathered["facts"]
        result["warnings"] = [str(finding) for finding in findings if finding.severity == "warning"]
        return result


def selected(roles: Iterable[str], task_vars: Mapping[str, Any]) -> list[str]:
    """Of some roles (each tagged with its name) those that this run plays."""
    wanted, left_out = task_vars.get("ansible_run_tags") or ["all"], task_vars.get("ansible_skip_tags") or []
    return [role for role in roles if ("all" in wanted or role in wanted) and role not in left_out]
