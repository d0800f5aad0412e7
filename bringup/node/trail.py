"""`trail.py NAME`, run by systemd whenever a server has ended: what a crash left in the log is kept.

After ten restarts and a rotation nobody finds the lines that mattered. So the end of the log of each server
that ended without being told to (any way: a signal, an error, exit code 0) goes to
/var/lib/bringup/crashes/<unit>/, the newest KEEP of them. `trail.py NAME --show` prints the newest.
"""

from __future__ import annotations

import gzip
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bringup.node import common
from bringup.node.common import Refusal, say

CRASHES = Path("/var/lib/bringup/crashes")
LINES = 400
BYTES = 512 * 1024
KEEP = 10
TOLD = ("success", "signal")
"""How a server that was told to stop may have ended (https://www.freedesktop.org/software/systemd/man/systemd.exec.html)."""
STOPPING = ("stop", "restart")
SETTLE_S = 2.0
SETTLE_POLL_S = 0.1


def crashed(unit: str, environment: Mapping[str, str], job: str | None = None) -> bool:
    """Did the server end without being told to? systemd has a job for the unit while somebody stops or
    restarts it (`job`: its type, such as "stop"; empty for none).

    An engine that is told to stop may end by a signal all the same: SGLang kills itself when it has cleaned up.
    """
    result = environment.get("SERVICE_RESULT", "success")
    if result not in TOLD:
        return True
    if job is None:
        job = job_of(f"{unit}.service")
    return job not in STOPPING


def job_of(unit: str) -> str:
    """The type of systemd's job for a unit ("start", "stop", "restart"); empty when it has none."""
    out = common.run(["systemctl", "list-jobs", "--no-legend", "--plain", unit])[1]
    return next((words[2] for line in out.splitlines() if len(words := line.split()) > 2), "")


def settle(path: Path, limit_s: float = SETTLE_S) -> None:
    """Wait until a file has stopped growing: the last lines are on their way through the log service."""
    until, size = time.monotonic() + limit_s, -1
    while time.monotonic() < until:
        try:
            now = path.stat().st_size
        except OSError:
            return
        if now == size:
            return
        size = now
        time.sleep(SETTLE_POLL_S)


def tail(path: Path) -> list[str]:
    """The last LINES lines of a log, from the file before it too when a rotation has just cut it."""
    files = sorted(path.parent.glob("engine-*.log*"))
    lines: list[str] = []
    while files and len(lines) < LINES:
        file = files.pop()
        if file.suffix == ".part" or file.with_name(file.name + ".gz") in files:
            continue
        try:
            data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else _end(file)
        except (OSError, EOFError):
            continue
        lines = data.decode(errors="replace").splitlines()[-(LINES - len(lines)) :] + lines
    return lines


def _end(file: Path) -> bytes:
    with file.open("rb") as opened:
        opened.seek(max(0, os.fstat(opened.fileno()).st_size - BYTES))
        return opened.read()


def journal(service: Mapping[str, Any]) -> list[str]:
    """The last lines of a server that logs to a journal of its own."""
    settle_s = time.monotonic() + SETTLE_S
    lines: list[str] = []
    while True:
        common.run([*common.journal_of(service), "--sync"])
        query = [*common.journal_of(service), f"--lines={LINES}", "--output=short-iso"]
        found = common.run(query)[1].splitlines()
        if found == lines or time.monotonic() >= settle_s:
            return found
        lines = found
        time.sleep(SETTLE_POLL_S)


def keep(service: Mapping[str, Any], environment: Mapping[str, str], folder: Path | None = None) -> Path:
    """Write the crash's file; its path."""
    os.umask(0o022)
    place = (folder or CRASHES) / str(service["unit"])
    place.mkdir(parents=True, exist_ok=True)
    if service.get("log_path"):
        settle(Path(service["log_path"]))
        lines = tail(Path(service["log_path"]))
    else:
        lines = journal(service)
    how = f"{environment.get('EXIT_CODE', '?')} {environment.get('EXIT_STATUS', '?')}"
    head = f"# {service['unit']} ended at {common.utc()}: {environment.get('SERVICE_RESULT', '?')}, {how}"
    path = (
        place
        / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{environment.get('INVOCATION_ID', '')[:8]}.log"
    )
    path.write_text("\n".join([head, *lines]) + "\n", encoding="utf-8")
    path.chmod(0o640)
    for old in sorted(place.glob("*.log"))[:-KEEP]:
        old.unlink(missing_ok=True)
    return path


def show(name: str) -> int:
    """Print the newest crash; 1 when there is none."""
    files = sorted((CRASHES / str(common.load(name)["unit"])).glob("*.log"))
    if not files:
        say(f"{name} has never crashed here")
        return 1
    print(files[-1].read_text(encoding="utf-8", errors="replace"), end="")
    return 0


def main(words: list[str]) -> int:
    if not words or len(words) > 2 or (len(words) == 2 and words[1] != "--show"):
        print("usage: trail.py NAME [--show]", file=sys.stderr)
        return 2
    showing = len(words) == 2
    try:
        if showing:
            return show(words[0])
        service = common.load(words[0])
        last = common.read_json(common.STARTS / f"{service['unit']}.json")
        refused = last.get("outcome") == "refused" and last.get("invocation") == os.environ.get(
            "INVOCATION_ID"
        )
        if not refused and crashed(service["unit"], os.environ):
            say(f"it ended by itself; the end of its log is kept in {keep(service, os.environ)}")
    except (Refusal, OSError) as error:
        say(f"the crash cannot be {'shown' if showing else 'kept'}: {error}")
        # A server that has ended must not fail once more for its log's sake.
        return int(showing)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
