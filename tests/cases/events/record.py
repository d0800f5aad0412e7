"""Records every case again: plays `tests/cases/plays/play.yml` as the case's `extra` says and keeps the
events.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from ansible_runner import interface

HERE = Path(__file__).resolve().parent
PLAYS = HERE.parent / "plays"
KEPT = {
    "playbook_on_play_start": ("name",),
    "playbook_on_task_start": ("task", "role", "name"),
    "runner_on_start": ("host", "task", "role"),
    "runner_on_ok": ("host", "task", "role", "res", "start", "end"),
    "runner_on_failed": ("host", "task", "role", "res", "start", "end", "ignore_errors"),
    "runner_on_unreachable": ("host", "task", "role", "res", "start", "end"),
    "runner_on_skipped": ("host", "task", "role", "res", "start", "end"),
    "playbook_on_stats": ("ok", "changed", "failures", "dark", "skipped", "rescued", "ignored", "processed"),
    "verbose": (),
    "error": (),
}


def record(case: Path) -> None:
    """Plays one case and writes its events beside it."""
    said = yaml.safe_load(case.read_text())
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as folder:

        def keep(event: dict[str, Any]) -> bool:
            if event["event"] in KEPT:
                data = {key: event["event_data"].get(key) for key in KEPT[event["event"]]}
                for result in _results(data.get("res") or {}):
                    for noise in ("invocation", "src", "ansible_facts"):
                        result.pop(noise, None)
                said_in_text = not data or "censored" in (data.get("res") or {})
                kept = {
                    "event": event["event"],
                    "created": event["created"],
                    "stdout": event["stdout"] if said_in_text else "",
                    "event_data": data,
                }
                lines.append(json.dumps(kept).replace(folder, "/tmp/case").replace(str(PLAYS), "plays"))
            return False

        interface.run(
            private_data_dir=folder,
            project_dir=str(PLAYS),
            playbook=said.get("playbook", "play.yml"),
            inventory=str(PLAYS / "hosts.yml"),
            limit=said["limit"],
            extravars={"folder": folder, **said.get("extra", {})},
            cmdline="--diff --check" if said.get("check") else "--diff",
            envvars={"ANSIBLE_NOCOLOR": "1"},
            event_handler=keep,
            settings={"suppress_ansible_output": True},
            suppress_env_files=True,
            quiet=True,
        )
    if said.get("cut"):
        lines = lines[: -int(said["cut"])]
    case.with_suffix(".jsonl").write_text("\n".join(lines) + "\n")


def _results(result: dict[str, Any]) -> list[dict[str, Any]]:
    """A result and those of its loop's items."""
    return [result, *(item for item in result.get("results", []) if isinstance(item, dict))]


if __name__ == "__main__":
    for path in sorted(HERE.glob("*.yml")):
        if len(sys.argv) < 2 or path.stem in sys.argv[1:]:
            record(path)
            print(path.stem)
