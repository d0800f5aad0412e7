"""Makes a model's folder ready: the node fetches what it can, and what only the controller has is sent to it.

Files that the controller makes (a small lab model) are made once, under .cache/models, and checked there.
"""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

from bringup import stores  # noqa: E402 (the checkout must be on the path first)
from bringup.carrying import Carried  # noqa: E402
from bringup.errors import BringupError  # noqa: E402
from bringup.node.store import incoming_name  # noqa: E402

SAY_EVERY_S = 300.0
"""How often a run that waits says so."""


class ActionModule(Carried, ActionBase):
    """The options of the module `model_store`; besides, `model` may hold `made_by` and `chain` (host names),
    `seen` names the variable that holds what was seen on each host, `port` is that of the relays, and `hours`
    (ranges of the week), `hours_from_gib` and `hours_wait_s` bound when large models are fetched."""

    TRANSFERS_FILES = True
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """The module's result; `fetched` holds what was sent too."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        task_vars = task_vars or {}
        arguments = dict(self._task.args)
        seen, port = arguments.pop("seen", None), int(arguments.pop("port", 0))
        hours = stores.Hours(
            tuple(arguments.pop("hours", ())),
            float(arguments.pop("hours_from_gib", 0)) * stores.GIB,
            float(arguments.pop("hours_wait_s", 0)),
        )
        if seen:
            host, known = task_vars["inventory_hostname"], task_vars["hostvars"]
            ready = stores.readiness(arguments["model"], host, known, task_vars["ansible_play_hosts"], seen)
            place = stores.place(host, ready, known)
            if place is None:
                return {**result, "changed": False, "ready": True, "faults": {}, "fetched": []}
            if len(ready) > 1:
                arguments["chain"] = {**place, "port": port}
            try:
                arguments["seconds"] = self._await_hours(hours, arguments["model"], known[host][seen])
            except BringupError as error:
                return {**result, "failed": True, "msg": str(error)}
        first = self._ask(arguments, task_vars)
        if first.get("failed") or not first.get("send") or arguments.get("look") or self._task.check_mode:
            return {**result, **first}
        try:
            self._send(arguments["model"], first["send"], first["incoming"])
        except BringupError as error:
            return {**result, "failed": True, "msg": str(error)}
        second = self._ask(arguments, task_vars)
        if not second.get("failed"):
            second.update(changed=True, faults=first["faults"], diff=first.get("diff", {}))
        return {**result, **second}

    def _await_hours(self, hours: stores.Hours, model: dict[str, Any], seen: dict[str, Any]) -> float:
        """Waits until the model may be fetched; returns seconds until that ends (0: never). Raises HostFailed."""
        faults = [row["faults"] for row in seen["results"] if row["item"]["name"] == model["name"]]
        missing = stores.missing_bytes(model, faults[0] if faults and not model.get("made_by") else ())
        wait_s, seconds = stores.delay(hours, model["name"], missing, datetime.now(UTC))
        end = time.monotonic() + (0 if self._task.check_mode else wait_s)
        while (left := end - time.monotonic()) > 0:
            Display().display(f"model {model['name']}: the hours for downloads begin in {stores.told(left)}")
            time.sleep(min(left, SAY_EVERY_S))
        return seconds

    def _ask(self, arguments: dict[str, Any], task_vars: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = self._execute_module(
            module_name="model_store", module_args=arguments, task_vars=task_vars
        )
        answer.pop("invocation", None)
        return answer

    def _send(self, model: dict[str, Any], paths: list[str], incoming: str) -> None:
        """Raises BringupError when the controller has not the right files."""
        folder = stores.controller_folder(model, paths)
        places = {file["path"]: index for index, file in enumerate(model["files"])}
        for path in paths:
            self._transfer_file(str(folder / path), f"{incoming}/{incoming_name(places[path])}")
