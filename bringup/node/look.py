"""What runs on a node to look at its servers: `bringup.looking` sends it with `common` through SSH.

`main(request)` prints one JSON object. `request["what"]` is `status` (every service: unit, a real token, model,
times, log size), `ask` (one chat completion from each service), `crash` (what journal and log say about the last
failure) or `evidence` (the same, or what they say now, with the kernel's messages). The API key is read here, on
the node: it is in no argv and never leaves it.
"""

from __future__ import annotations

import calendar
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
CRASHES = Path("/var/lib/bringup/crashes")
RESTARTS = Path("/var/lib/bringup/restarts")
PROBE_PROMPT = "Say one word."
JOURNAL_AROUND_S = 60
JOURNAL_LINES = 60
KERNEL_LINES = 2000
TAIL_BYTES = 4 * 1024 * 1024
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
        restart=restart_of(name) or last_restart_of(service["unit"]),
        drained=common.drained(name),
        warnings=list(common.read_json(common.STARTS / f"{service['unit']}.json").get("warnings") or ()),
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
        restart = restart_of(name)
        return {**row, "error": f"{error} ({restart})" if restart else str(error)}
    return {
        **row,
        "model": answer.model,
        "text": answer.text,
        "tokens": answer.tokens,
        "seconds": round(answer.seconds, 3),
    }


def crash(name: str, lines: int) -> dict[str, Any]:
    """The service's last crash: `when` (epoch seconds, 0.0 for none), the journal around it, and the end of
    the log.

    The end of the log is what `trail.py` kept when the server ended, whatever was written since.
    """
    row: dict[str, Any] = {"service": name, "when": 0.0, "journal": [], "log": [], "error": ""}
    try:
        unit = str(common.load(name)["unit"])
    except Refusal as refusal:
        return {**row, "error": str(refusal)}
    kept = sorted((CRASHES / unit).glob("*.log"))
    if not kept:
        return row
    when = _named_time(kept[-1].name)
    window = ["--since", f"@{when - JOURNAL_AROUND_S:.0f}", "--until", f"@{when + JOURNAL_AROUND_S:.0f}"]
    shape = ["-n", str(JOURNAL_LINES), "-o", "short-iso", "--no-pager", "--quiet"]
    journal = common.run(["journalctl", "-u", f"{unit}.service", *window, *shape])[1]
    return {**row, "when": when, "journal": journal.splitlines(), "log": tail(kept[-1])[-lines:]}


def evidence(name: str, lines: int) -> dict[str, Any]:
    """Everything that may show why a service is not well: its last crash, or else its journal and log since it
    was last started; and what the kernel said since boot.
    """
    row = crash(name, lines)
    kernel = ["journalctl", "-k", "-b", "-n", str(KERNEL_LINES), "-o", "short-iso", "--no-pager", "--quiet"]
    row["kernel"] = common.run(kernel)[1].splitlines()
    if row["error"] or row["when"]:
        return row
    unit = f"{common.load(name)['unit']}.service"
    since = _last_start(common.unit_state(unit, PROPERTIES))
    # Journalctl takes no ISO time with a zone letter; everything here is UTC.
    window = ["--since", since.replace("T", " ").rstrip("Z")] if since else ["-b"]
    shape = ["-n", str(lines), "-o", "short-iso", "--no-pager", "--quiet"]
    row["journal"] = common.run(["journalctl", "-u", unit, *window, *shape])[1].splitlines()
    row["log"] = log_lines(common.load(name), lines)
    return row


def log_lines(service: Mapping[str, Any], lines: int) -> list[str]:
    """The last lines of a server's log, from its files or its own journal."""
    if service.get("log_namespace"):
        query = [*common.journal_of(service), f"--lines={lines}", "--output=cat"]
        return common.run(query)[1].splitlines()
    return tail(LOGS / service["name"] / "engine.log")[-lines:]


def _named_time(name: str) -> float:
    """Epoch seconds of a file's name that begins with `20261129T231117Z`; 0.0 for another."""
    try:
        return float(calendar.timegm(time.strptime(name[:16], "%Y%m%dT%H%M%SZ")))
    except ValueError:
        return 0.0


def tail(path: Path) -> list[str]:
    """The last lines of a file, at most TAIL_BYTES of it; none when it cannot be read."""
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - TAIL_BYTES))
            return stream.read().decode(errors="replace").splitlines()
    except OSError:
        return []


def restart_of(name: str) -> str:
    """What a restart of this service is waiting for now (at last for the server that it starts), and until when at
    most; empty: none is.
    """
    waits = common.read_json(common.RUN / "restarting" / f"{name}.json")
    if not waits or not (common.PROC / str(waits.get("pid"))).exists():
        return ""
    return f"its restart waits for {waits.get('for')} since {waits.get('since')}, at most until {waits.get('until')}"


def last_restart_of(unit: str) -> str:
    """What became of the last restart, when it came to nothing; empty: it was done, or there was none."""
    try:
        last = json.loads((RESTARTS / f"{unit}.history.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    except (OSError, ValueError, IndexError):
        return ""
    if last.get("outcome") not in ("refused", "failed"):
        return ""
    what = "failed" if last["outcome"] == "failed" else "was refused"
    return f"its last restart ({last.get('reason')}) {what} at {last.get('at')}: {last.get('why')}"


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


def main(request: Mapping[str, Any]) -> None:
    """Looks as `request` says and prints `{"services": [...]}`."""
    os.environ.update(TZ="UTC", LC_ALL="C")
    time.tzset()
    limit = float(request.get("limit_s", 15))
    looks: dict[str, Callable[[str], dict[str, Any]]] = {
        "status": lambda name: status(name, limit),
        "ask": lambda name: ask(name, request["prompt"], int(request["tokens"]), limit),
        "crash": lambda name: crash(name, int(request.get("lines", 80))),
        "evidence": lambda name: evidence(name, int(request.get("lines", 80))),
    }
    found = names(request.get("services"))
    with ThreadPoolExecutor(max(1, len(found))) as pool:
        rows = list(pool.map(looks[request["what"]], found))
    json.dump({"services": rows}, sys.stdout)
