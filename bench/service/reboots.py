"""A node loses its power at ten points while it is provisioned: the next run must bring it to its planned state.

    python -m bench.service.reboots [--node bench-38] [--points checked,fetching]

For each point a fresh lab node is provisioned; when the point is reached (it is looked for on the node, many times a
second) the node is killed and booted again, the run is let end, and a second one must end with 0, a third must
change nothing, and the server must answer. Prints a table; exit code 1 when one does not.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bringup import lab
from bringup.errors import Exit
from tests.e2e import site as sites
from tests.e2e.site import Site, answers, on

PORT = 8000
POINT_LIMIT_S = 1200.0
RUN_LIMIT_S = 1800.0
ANSWER_LIMIT_S = 240.0
POLL_S = 0.05
ENVIRONMENTS, MODELS = "/opt/bringup/environments", "/srv/models"

POINTS: Mapping[str, tuple[str, str]] = {
    "locked": ("the node is held for the run", "test -e /run/bringup/run.json"),
    "settings": ("kernel settings are written", "ls /etc/sysctl.d/60-bringup.conf"),
    "building": ("the engine's environment is being built", f"ls -d {ENVIRONMENTS}/*/bin"),
    "installing": (
        "packages are being installed into it",
        f"ls -d {ENVIRONMENTS}/*/lib/python3*/site-packages/*",
    ),
    "built": ("the environment is complete", f"ls {ENVIRONMENTS}/*/bringup-environment.json"),
    "model": ("the model's folder is there", f"ls -d {MODELS}/*"),
    "verified": ("the model is verified", f"ls {MODELS}/*/.bringup/ready.json"),
    "logs": ("the log's units are there", "ls /etc/systemd/system/bringup-log-*.socket"),
    "units": ("the server's unit is there", "ls /etc/systemd/system/bringup-words.service"),
    "starting": ("the server starts", "systemctl show -P ActiveState bringup-words | grep -q activating"),
    "serving": ("the server serves, the run goes on", "systemctl is-active bringup-words"),
}


@dataclass(frozen=True)
class Row:
    """One point: was it met before the run's end, exit codes of the three runs, changes of the last, and an answer."""

    point: str
    met_s: float | None
    first: int
    second: int
    second_s: float
    changed: int
    answered: bool

    @property
    def good(self) -> bool:
        """Did the node come to its planned state?"""
        converged = self.second == Exit.DONE and self.changed == 0 and self.answered
        return self.met_s is not None and converged


def reached(name: str, test: str) -> bool:
    """Is the point reached on the node?"""
    return on(name, f"{{ {test}; }} >/dev/null 2>&1 && echo yes || true", check=False) == "yes"


def one(place: Site, name: str, point: str) -> Row:
    """One power cut at a point, and the runs after it."""
    process, began, met = place.start("provision", "--json"), time.monotonic(), None
    while process.poll() is None and time.monotonic() - began < POINT_LIMIT_S:
        if reached(name, POINTS[point][1]):
            met = round(time.monotonic() - began, 1)
            break
        time.sleep(POLL_S)
    engine = lab.find_engine()
    assert engine is not None
    engine.run("kill", name)
    lab.reboot(name, say=sites.quiet)
    process.communicate(timeout=RUN_LIMIT_S)
    begun = time.monotonic()
    second = place.invoke("provision", "--json", limit=RUN_LIMIT_S)
    seconds = time.monotonic() - begun
    if second.code != Exit.DONE:
        print(second.text[-4000:], file=sys.stderr)
    third = place.invoke("provision", "--json", limit=RUN_LIMIT_S)
    changed = sum(host["changed"] for host in third.data["hosts"].values()) if third.code == Exit.DONE else -1
    return Row(point, met, process.returncode, second.code, round(seconds, 1), changed, comes(name))


def comes(name: str) -> bool:
    """Does an answer come within the limit?"""
    until = time.monotonic() + ANSWER_LIMIT_S
    while time.monotonic() < until:
        if answers(name, PORT):
            return True
        time.sleep(1.0)
    return False


def main(words: Sequence[str] | None = None) -> int:
    """Measures, prints, and says whether the node converged each time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--node", default="bench-38")
    parser.add_argument("--points", default=",".join(POINTS))
    given = parser.parse_args(words)
    rows: list[Row] = []
    try:
        for point in given.points.split(","):
            with tempfile.TemporaryDirectory() as folder:
                place = sites.make(Path(folder) / "reboots", [given.node])
                rows.append(one(place, given.node, point))
            print(rows[-1], file=sys.stderr, flush=True)
    finally:
        lab.down([given.node], say=sites.quiet)
    shown = Table("power cut when", "after s", "run", "next run", "s", "changes after", "answers", "")
    for row in rows:
        cells = (
            POINTS[row.point][0],
            row.met_s,
            row.first,
            row.second,
            row.second_s,
            row.changed,
            row.answered,
        )
        shown.add_row(*map(str, cells), "ok" if row.good else "NOT OK")
    Console().print(shown)
    return 0 if rows and all(row.good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
