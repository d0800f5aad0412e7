"""Who runs what, change windows, and runs of this controller that have ended: what the module cannot know."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase

ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

from bringup import holding, seal  # noqa: E402 (the checkout must be on the path first)
from bringup.carrying import Carried  # noqa: E402


class ActionModule(Carried, ActionBase):
    """`node_lock: {state: held}` as the first task of a play, `{state: released}` as its last."""

    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """The lock's state. Fails, with words for the operator, when the node may not be changed now."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        known = task_vars or {}
        if self._task.check_mode:
            return {**result, "changed": False, "held": False}
        # Workers are children of ansible-playbook: its life is the run's.
        mine = holding.identity(os.getppid(), str(self._task.get_path() or ""))
        if self._task.args.get("state") != "held":
            return {**result, **self._released(mine, known)}
        windows, reason = known.get("node_change_windows") or (), str(known.get("run_outside_window") or "")
        closed = holding.closed(windows, datetime.now(UTC))
        if closed and not reason:
            return {**result, "failed": True, "msg": closed}
        force = str(known.get("run_force_unlock", "")).lower() in ("true", "yes", "1")
        answer = self._module(mine, known, force=force)
        if answer.get("how") == "refused" and holding.is_gone(answer["other"], socket.gethostname()):
            answer = self._module(mine, known, over=answer["other"]["token"])
        if answer.get("failed"):
            return {**result, **answer}
        if answer.get("how") == "refused":
            return {**result, "failed": True, "msg": holding.refusal(answer["other"])}
        notes = holding.notes(answer, reason if closed else "")
        return {**result, **answer, "bringup_notes": notes}

    def _released(self, mine: Mapping[str, Any], known: dict[str, Any]) -> dict[str, Any]:
        """Gives the node back, and seals what was played on it unless it failed on the way."""
        host = str(known.get("inventory_hostname"))
        failed = host not in known.get("ansible_play_hosts", ()) or "ansible_failed_result" in known
        wanted = {} if failed else seal.of_run(os.environ.get("BRINGUP_RUN_ID", "")).get(host, {})
        seals, played = wanted.get("inputs", {}), wanted.get("played", [])
        answer = self._module(mine, known, seals=seals, played=played)
        notes = [seal.told(role, rows) for role, rows in (answer.get("unsealed") or {}).items()]
        return {**answer, "bringup_notes": notes}

    def _module(self, mine: Mapping[str, Any], known: dict[str, Any], **more: Any) -> dict[str, Any]:
        arguments = {**self._task.args, "holder": dict(mine), **more}
        answer: dict[str, Any] = self._execute_module(
            module_name="node_lock", module_args=arguments, task_vars=known
        )
        answer.pop("invocation", None)
        return answer
