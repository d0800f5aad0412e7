"""Who runs what, change windows, and runs of this controller that have ended: what the module cannot know."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase

ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

from bringup import holding, seal  # noqa: E402 (the checkout must be on the path first)
from bringup.carrying import Carried  # noqa: E402


class ActionModule(Carried, ActionBase):
    """`node_lock: {state: held}` as the first task of a play, `{state: released}` as its last, and `{state: failed}`
    where a play rescues a node: it is given back without seals, and stays failed."""

    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """The lock's state. Fails, with words for the operator, when the node may not be changed now."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        known = task_vars or {}
        state = str(self._task.args.get("state"))
        failed = {"failed": True, "msg": "This node failed, and is given back.", holding.GIVEN_BACK: True}
        if self._task.check_mode:
            return {**result, "changed": False, "held": False, **(failed if state == "failed" else {})}
        # Workers are children of ansible-playbook: its life is the run's.
        mine = holding.identity(os.getppid(), str(self._task.get_path() or ""))
        if state == "held":
            lock = holding.wanted(known, mine)
            return {**result, **holding.through(lambda wanted: self._module({**wanted}, known), lock)}
        if state == "failed":
            self._module({"state": "released", "holder": mine}, known)
            return {**result, **failed}
        return {**result, **self._released(mine, known)}

    def _released(self, mine: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
        """Gives the node back, and seals what was played on it unless it failed on the way."""
        host = str(known.get("inventory_hostname"))
        failed = host not in known.get("ansible_play_hosts", ()) or "ansible_failed_result" in known
        wanted = {} if failed else seal.of_run(os.environ.get("BRINGUP_RUN_ID", "")).get(host, {})
        answer = self._module({"holder": mine, **seal.for_node(wanted)}, known)
        return {**answer, "bringup_notes": seal.notes_of(answer)}

    def _module(self, more: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = self._execute_module(
            module_name="node_lock", module_args={**self._task.args, **more}, task_vars=known
        )
        answer.pop("invocation", None)
        return answer
