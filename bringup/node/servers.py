"""Servers started, or restarted where what defines them has changed (module `engine_servers`).

Whether a running server is what the disk says is decided by the program that starts it (`serve.py
--current`), from what it noted at the start: so a run that was broken off between a change and its restart
restarts the next time.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import common, seal

PYTHON = "/usr/bin/python3"
LIBRARY = Path("/opt/bringup/lib")
STARTS = Path("/var/lib/bringup/starts")
SERVICES = Path("/etc/bringup/services")
CREDENTIALS = Path("/etc/bringup/credentials")
UNITS = Path("/etc/systemd/system")
LEASE = Path("/etc/bringup/lease.json")
LOOK_LIMIT_S = 60.0
MARGIN_S = 240.0
RESTART_POLL_S = 0.5
RESTART_REFUSED = 8
"""How `restart.py` ends when nothing was done."""


class ServersFailed(Exception):
    """What did not come up, one line a server. `refused`: each restart said no, and all servers are as they were."""

    def __init__(self, text: str, refused: bool = False) -> None:
        super().__init__(text)
        self.refused = refused


def run(words: Sequence[str], limit_s: float) -> tuple[int, str, str]:
    """Exit code, stdout, stderr; 124 when it took longer than `limit_s`."""
    try:
        done = subprocess.run(
            list(words), capture_output=True, timeout=limit_s, check=False, text=True, errors="replace"
        )
    except subprocess.TimeoutExpired:
        return 124, "", f"took longer than {limit_s:g} s"
    except OSError as error:
        return 127, "", str(error)
    return done.returncode, done.stdout, done.stderr


def read(path: Path) -> dict[str, Any]:
    """A JSON mapping, or an empty one."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def current(service: Mapping[str, Any]) -> dict[str, Any]:
    """What `serve.py --current` says; a server that is not set up is not active."""
    nothing = {"active": False, "state": "missing", "due": True, "why": "it is not there"}
    if not (LIBRARY / "serve.py").exists():
        return nothing
    code, out, err = run(
        [PYTHON, "-s", str(LIBRARY / "serve.py"), "--current", service["name"]], LOOK_LIMIT_S
    )
    try:
        found: dict[str, Any] = json.loads(out)
    except ValueError:
        return {**nothing, "why": err.strip() or f"exit {code}"}
    return found


def settled(service: Mapping[str, Any]) -> dict[str, Any]:
    """What `current` says; of a server whose planned restart is under way, when that has ended (well or not)."""
    until = time.monotonic() + longest(service)
    while True:
        state = current(service)
        if (state["active"] and not state["due"]) or time.monotonic() >= until:
            return state
        if not seal.is_restarted(*seal.server_units(f"{service['unit']}.service", service["name"]).values()):
            return current(service)
        time.sleep(RESTART_POLL_S)


def longest(service: Mapping[str, Any]) -> float:
    """Seconds that a stop, a start and a warm-up may take together."""
    return 2 * float(service["start_timeout_s"]) + float(service["stop_timeout_s"]) + MARGIN_S


def started(service: Mapping[str, Any], since: float) -> dict[str, Any]:
    """The record of the newest start, as `bringup_starts` of a run's record."""
    kept = read(STARTS / f"{service['unit']}.json")
    names = ("unit", "service", "seconds", "phases", "answer", "model", "address", "outcome", "is_stand_in")
    more: dict[str, Any] = {name: kept.get(name) for name in ("drafting", "warnings") if name in kept}
    return {
        **{name: kept.get(name) for name in names},
        **more,
        "waited_s": round(time.monotonic() - since, 1),
    }


def reason(service: Mapping[str, Any], said: str, since: float) -> str:
    """Why a server did not come up (`since`: when it was told to, seconds since 1970): what its start kept, else
    systemd's and the journal's last lines.
    """
    kept = common.why_not_started(str(service["unit"]), since)
    if kept:
        return kept
    unit = f"{service['unit']}.service"
    _, out, _ = run(
        ["journalctl", f"--unit={unit}", "--lines=5", "--output=cat", "--no-pager", "--quiet"], LOOK_LIMIT_S
    )
    lines = [line for line in (*said.splitlines(), *out.splitlines()) if line.strip()]
    return "; ".join(lines[:6]) or "systemd gives no reason"


def start(service: Mapping[str, Any]) -> dict[str, Any]:
    """Start a server that is not running and wait for its real token. Raises ServersFailed."""
    unit, since, began = f"{service['unit']}.service", time.monotonic(), time.time()
    run(["systemctl", "reset-failed", unit], LOOK_LIMIT_S)
    code, _, err = run(["systemctl", "start", unit], longest(service))
    if code != 0:
        raise ServersFailed(f"{service['name']} does not start: {reason(service, err, began)}")
    return started(service, since)


def restart(service: Mapping[str, Any]) -> dict[str, Any]:
    """Restart a running server, one of its group at a time, and wait for its real token. Raises
    ServersFailed.
    """
    since, began, program = time.monotonic(), time.time(), LIBRARY / "restart.py"
    refused = False
    if not program.exists():
        unit = f"{service['unit']}.service"
        run(["systemctl", "reset-failed", unit], LOOK_LIMIT_S)
        code, _, err = run(["systemctl", "restart", unit], longest(service))
        why = "" if code == 0 else reason(service, err, began)
    else:
        options = ["--now", "--led", "--json", "--reason", "definition changed"]
        limit = longest(service) * 2 + float(service["drain_s"])
        wait = ["--wait-s", str(int(longest(service)))]
        code, out, err = run([PYTHON, "-s", str(program), service["name"], *options, *wait], limit)
        refused = code == RESTART_REFUSED
        try:
            why = "" if code == 0 else str(json.loads(out)["why"])
        except (ValueError, KeyError):
            why = err.strip() or f"exit {code}"
    if why:
        raise ServersFailed(f"{service['name']} was not restarted: {why}", refused)
    return started(service, since)


def apply(
    services: Sequence[Mapping[str, Any]], mode: str, changed: Sequence[str], check_only: bool
) -> dict[str, Any]:
    """Retire what is planned no more, start what is not running, restart what is due (mode `now`) or only name it
    (mode `later`).

    `changed`: paths that this run has changed, or in check mode would have. Gives {changed, bringup_starts,
    bringup_notes (what was wrong with a start that counts), due, diff}. Raises ServersFailed with every server
    that did not come up.
    """
    starts: list[dict[str, Any]] = []
    due: list[str] = []
    failed: list[ServersFailed] = []
    todo: list[str] = []
    for old in surplus(services):
        todo.append(f"retire {old['unit']}: it is planned no more")
        if not check_only:
            retire(old)
    for service in services:
        state = settled(service)
        pending = check_only and bool(set(service["definition"]) & set(changed))
        if not state["active"]:
            todo.append(f"start {service['unit']}: {state['why']}")
            if not check_only:
                _try(start, service, starts, failed)
        elif state["due"] or pending:
            due.append(service["name"])
            why = state["why"] or "its definition would change"
            if mode == "now":
                todo.append(f"restart {service['unit']}: {why}")
            if mode == "now" and not check_only:
                _try(restart, service, starts, failed)
    if failed:
        raise ServersFailed("\n".join(map(str, failed)), all(one.refused for one in failed))
    if not check_only:
        seal.claim(_claims(services))
    diff = {"before": "", "after": "\n".join(todo) + "\n"} if todo else {}
    return {
        "changed": bool(todo),
        "bringup_starts": starts,
        "bringup_notes": [
            f"{row['service']}: {text}" for row in starts for text in row.get("warnings") or ()
        ],
        "due": due,
        "diff": diff,
    }


def _claims(services: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What is to stay so: each server runs from its definition on the disk, and there are no others."""
    how = {"state": "active", "runs from": None, "due": ""}
    rows = [
        {"kind": "server", "name": f"{row['unit']}.service", "service": row["name"], **how}
        for row in services
    ]
    described = sorted(str(SERVICES / f"{row['name']}.json") for row in services)
    return [*rows, {"kind": "listing", "name": str(SERVICES / "*.json"), "paths": described}]


def surplus(planned: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Services described on the node that are planned no more."""
    names = {service["name"] for service in planned}
    found = [read(path) for path in sorted(SERVICES.glob("*.json"))]
    return [service for service in found if service.get("name") and service["name"] not in names]


def retire(service: Mapping[str, Any]) -> None:
    """Stop a server that is planned no more, and take its units away; its logs and records stay.

    Raises ServersFailed when it does not stop.
    """
    name, unit = service["name"], service["unit"]
    units = [f"bringup-restart-{name}.timer", f"bringup-drift-{name}.path", f"bringup-watch-{name}.service"]
    units += [f"{unit}.service", f"bringup-log-{name}.service", f"bringup-log-{name}.socket"]
    there = [one for one in units if (UNITS / one).exists()]
    code, _, err = run(["systemctl", "disable", "--now", *there], longest(service)) if there else (0, "", "")
    if code != 0:
        raise ServersFailed(f"{name} is planned no more and does not stop: {err.strip()}")
    for path in (
        *(
            UNITS / f"{one}"
            for one in (*there, f"bringup-restart-{name}.service", f"bringup-drift-{name}.service")
        ),
        SERVICES / f"{name}.env",
    ):
        path.unlink(missing_ok=True)
    shutil.rmtree(CREDENTIALS / name, ignore_errors=True)
    run(["systemctl", "daemon-reload"], LOOK_LIMIT_S)
    # Last: as long as the description is there, a run that was broken off goes on with it.
    (SERVICES / f"{name}.json").unlink(missing_ok=True)


def _try(
    act: Callable[[Mapping[str, Any]], dict[str, Any]],
    service: Mapping[str, Any],
    starts: list[dict[str, Any]],
    failed: list[ServersFailed],
) -> None:
    try:
        starts.append(act(service))
    except ServersFailed as error:
        failed.append(error)
