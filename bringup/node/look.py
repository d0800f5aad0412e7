"""What a node's servers are doing right now: sent over SSH and run as root, changes nothing.

`main(request)` prints one JSON object. `request["what"]` is `status` (every service: unit, a real token,
model, times, log size), `ask` (one chat completion from each service) or `crash` (what journal and log say
about the last failure). The API key is read here, on the node: it is in no argv and never leaves it.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bringup.node import common
from bringup.node.common import NoAnswer, Refusal

LOGS = Path("/var/log/bringup")
PROBE_PROMPT = "Say one word."
JOURNAL_AROUND_S = 60
JOURNAL_LINES = 60
TAIL_BYTES = 4 * 1024 * 1024
FAILED = "Main process exited|Failed with result|Start request repeated|oom-kill|OOM killer"
PROPERTIES = (
    "LoadState",
    "ActiveState",
    "SubState",
    "Result",
    "NRestarts",
    "ActiveEnterTimestampMonotonic",
    "InactiveExitTimestampMonotonic",
)


def names(wanted: list[str] | None) -> list[str]:
    """The services described on this node, or those of `wanted` (in its order, also ones that are not
    there).
    """
    if wanted:
        return wanted
    return sorted(path.stem for path in common.SERVICES.glob("*.json"))


def status(name: str, limit_s: float) -> dict[str, Any]:
    """One service's row; `why` says why it is not healthy."""
    row: dict[str, Any] = {"service": name, "state": "missing", "healthy": False, "why": ""}
    try:
        service = common.load(name)
    except Refusal as refusal:
        return {**row, "why": str(refusal)}
    unit = common.unit_state(f"{service['unit']}.service", PROPERTIES)
    timer = f"bringup-restart-{name}.timer"
    times = common.unit_state(timer, ("LoadState", "NextElapseUSecRealtime", "LastTriggerUSec"))
    row.update(
        unit=service["unit"],
        state=unit["ActiveState"] if unit["LoadState"] == "loaded" else "missing",
        sub=unit["SubState"],
        port=service["port"],
        address=service["address"],
        crashes=_number(unit["NRestarts"]),
        uptime_s=_since(unit["ActiveEnterTimestampMonotonic"]) if unit["ActiveState"] == "active" else None,
        starting_s=_since(unit["InactiveExitTimestampMonotonic"]),
        last_restart=_last_start(unit),
        next_restart=_moment(times["NextElapseUSecRealtime"]),
        log_bytes=log_bytes(name),
    )
    if row["state"] != "active":
        return {**row, "why": f"the unit is {row['state']} ({unit['SubState']}, {unit['Result']})"}
    try:
        answer = common.ask(service, PROBE_PROMPT, 1, timeout_s=limit_s, key=common.key_of(service))
    except (NoAnswer, Refusal) as error:
        return {**row, "why": str(error)}
    row["in_flight"] = common.in_flight(service, key=common.key_of(service))
    return {**row, "healthy": True, "model": answer.model, "token_s": round(answer.seconds, 3)}


def ask(name: str, prompt: str, tokens: int, limit_s: float) -> dict[str, Any]:
    """One completion, or `error`."""
    row: dict[str, Any] = {"service": name, "model": "", "text": "", "tokens": 0, "seconds": 0.0, "error": ""}
    try:
        service = common.load(name)
        row.update(model=service["served_name"], port=service["port"], address=service["address"])
        answer = common.ask(service, prompt, tokens, timeout_s=limit_s, key=common.key_of(service))
    except (NoAnswer, Refusal) as error:
        return {**row, "error": str(error)}
    return {
        **row,
        "model": answer.model,
        "text": answer.text,
        "tokens": answer.tokens,
        "seconds": round(answer.seconds, 3),
    }


def crash(name: str, lines: int) -> dict[str, Any]:
    """The unit's last failure: `when` (epoch seconds, 0.0 for none), journal lines around it, log lines
    before it.
    """
    row: dict[str, Any] = {"service": name, "when": 0.0, "journal": [], "log": [], "error": ""}
    try:
        unit = f"{common.load(name)['unit']}.service"
    except Refusal as refusal:
        return {**row, "error": str(refusal)}
    found = common.run(["journalctl", "-u", unit, "-g", FAILED, "-n", "1", "-o", "json", "--no-pager"])[1]
    entry = _json(found.strip().splitlines()[-1] if found.strip() else "{}")
    when = _number(str(entry.get("__REALTIME_TIMESTAMP", "0"))) / 1e6
    if not when:
        return row
    window = ["--since", f"@{when - JOURNAL_AROUND_S:.0f}", "--until", f"@{when + JOURNAL_AROUND_S:.0f}"]
    journal = common.run(
        ["journalctl", "-u", unit, *window, "-n", str(JOURNAL_LINES), "-o", "short-iso", "--no-pager"]
    )[1]
    written = before(tail(LOGS / name / "engine.log"), when)
    return {**row, "when": when, "journal": journal.splitlines(), "log": written[-lines:]}


def before(lines: list[str], when: float) -> list[str]:
    """The lines written until `when`, by the times that lines carry; all when no line carries one."""
    limit = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(when + 1))
    last = None
    for number, line in enumerate(lines):
        found = re.search(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)", line)
        if found and f"{found[1]} {found[2]}" <= limit:
            last = number
    return lines if last is None else lines[: last + 1]


def tail(path: Path) -> list[str]:
    """The last lines of a file, at most TAIL_BYTES of it; none when it cannot be read."""
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - TAIL_BYTES))
            return stream.read().decode(errors="replace").splitlines()
    except OSError:
        return []


def log_bytes(name: str) -> int:
    """Bytes on disk of a service's log, rotated files with it."""
    total = 0
    for path in (LOGS / name).glob("*"):
        try:
            total += 0 if path.is_symlink() else path.stat().st_size
        except OSError:
            continue
    return total


def _since(monotonic_us: str) -> float | None:
    """Seconds since a moment of systemd's monotonic clock; None for never."""
    value = _number(monotonic_us)
    return round(time.clock_gettime(time.CLOCK_MONOTONIC) - value / 1e6, 1) if value else None


def _last_start(unit: Mapping[str, str]) -> str | None:
    since = _since(unit["InactiveExitTimestampMonotonic"])
    return None if since is None else common.utc(time.time() - since)


def _moment(text: str) -> str | None:
    """ISO time of a systemd timestamp printed with TZ=UTC (`Mon 2026-11-30 04:12:00 UTC`); None for none."""
    found = re.search(r"(\d{4}-\d\d-\d\d) (\d\d:\d\d:\d\d)", text)
    return f"{found[1]}T{found[2]}Z" if found else None


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0


def _json(text: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}


def main(request: Mapping[str, Any]) -> None:
    """Looks as `request` says and prints `{"services": [...]}`."""
    os.environ.update(TZ="UTC", LC_ALL="C")
    time.tzset()
    limit = float(request.get("limit_s", 15))
    looks: dict[str, Callable[[str], dict[str, Any]]] = {
        "status": lambda name: status(name, limit),
        "ask": lambda name: ask(name, request["prompt"], int(request["tokens"]), limit),
        "crash": lambda name: crash(name, int(request.get("lines", 80))),
    }
    found = names(request.get("services"))
    with ThreadPoolExecutor(max(1, len(found))) as pool:
        rows = list(pool.map(looks[request["what"]], found))
    json.dump({"services": rows}, sys.stdout)
