"""A node loses its power at a point of its provisioning: the next run must bring it to its planned state.

    python -m bench.service.reboots [--nodes bench-38,bench-39] [--points locked,model+verified+units]

For each point a fresh lab node is provisioned; when the point is reached (the node itself looks for it, twenty times
a second) the node is killed and booted again, the run is let end, and a second one must end with 0, a third must
change nothing, and the server must answer. Points joined by `+` are met by one node in a row: it loses its power at
the first, the next run at the second, and so on. As many nodes at once as are named. Prints a table; exit code 1 when
one does not converge. What a disk loses that was not written out yet is not lost here: the node's kernel lives on.
"""

from __future__ import annotations

import argparse
import queue
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bringup import lab
from bringup.errors import Exit
from tests.e2e import site as sites
from tests.e2e.site import Site, answers

PORT = 8000
POINT_LIMIT_S = 1200.0
RUN_LIMIT_S = 1800.0
ANSWER_LIMIT_S = 240.0
POLL_S = 0.02
ENVIRONMENTS, MODELS = "/opt/bringup/environments", "/srv/models"

POINTS: Mapping[str, tuple[str, str]] = {
    "locked": ("the node is held for the run", "test -e /run/bringup/run.json"),
    "building": ("the engine's environment is being built", f"ls -d {ENVIRONMENTS}/*/bin"),
    "installing": (
        "packages are being installed into it",
        f"ls -d {ENVIRONMENTS}/*/lib/python3*/site-packages/*",
    ),
    "built": ("the environment is complete", f"ls {ENVIRONMENTS}/*/bringup-environment.json"),
    "model": ("the model's folder is there", f"ls -d {MODELS}/*"),
    "verified": ("the model is verified", f"ls {MODELS}/*/.bringup/ready.json"),
    "users": ("the log's user is made", "getent passwd bringup-log"),
    "logs": ("the log's units are there", "ls /etc/systemd/system/bringup-log-*.socket"),
    "units": ("the server's unit is there", "ls /etc/systemd/system/bringup-words.service"),
    "starting": ("the server starts", "systemctl show -P ActiveState bringup-words | grep -q activating"),
    "serving": ("the server serves, the run goes on", "systemctl is-active bringup-words"),
}


@dataclass(frozen=True)
class Row:
    """Points met by one node: seconds until each (None: the run ended before), exit codes of the runs that were cut
    and of the next, the changes of the last, and an answer.
    """

    points: tuple[str, ...]
    met_s: tuple[float | None, ...]
    cut: tuple[int, ...]
    second: int
    second_s: float
    changed: int
    answered: bool

    @property
    def good(self) -> bool:
        """Did the node come to its planned state?"""
        converged = self.second == Exit.DONE and self.changed == 0 and self.answered
        return None not in self.met_s and converged


def wait_for(engine: lab.Engine, name: str, test: str, process: subprocess.Popen[str]) -> float | None:
    """Seconds until the point was reached on the node; None: the run ended before, or it took too long."""
    loop = f"until {{ {test}; }} >/dev/null 2>&1; do sleep 0.05; done"
    began = time.monotonic()
    with subprocess.Popen(engine.argv("exec", name, "sh", "-c", loop)) as looking:
        while looking.poll() is None and process.poll() is None:
            if time.monotonic() - began > POINT_LIMIT_S:
                break
            time.sleep(POLL_S)
        met = looking.poll() == 0
        looking.kill()
    return round(time.monotonic() - began, 1) if met else None


def cut(place: Site, name: str, point: str) -> tuple[float | None, int]:
    """A run whose node loses its power at a point: when it was reached, and the run's exit code."""
    engine = lab.find_engine()
    assert engine is not None
    process = place.start("provision", "--json")
    met = wait_for(engine, name, POINTS[point][1], process)
    engine.run("kill", name)
    lab.reboot(name, say=sites.quiet)
    process.communicate(timeout=RUN_LIMIT_S)
    return met, process.returncode


def one(place: Site, name: str, points: Sequence[str]) -> Row:
    """Power cuts at points, one after the other, and the runs after them."""
    met, codes = zip(*(cut(place, name, point) for point in points), strict=True)
    begun = time.monotonic()
    second = place.invoke("provision", "--json", limit=RUN_LIMIT_S)
    seconds = time.monotonic() - begun
    if second.code != Exit.DONE:
        print(second.text[-4000:], file=sys.stderr)
    third = place.invoke("provision", "--json", limit=RUN_LIMIT_S)
    changed = sum(host["changed"] for host in third.data["hosts"].values()) if third.code == Exit.DONE else -1
    return Row(tuple(points), met, codes, second.code, round(seconds, 1), changed, comes(name))


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
    parser.add_argument("--nodes", default="bench-38,bench-39")
    parser.add_argument("--points", default=",".join(POINTS))
    given = parser.parse_args(words)
    names, points = given.nodes.split(","), given.points.split(",")
    free: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in names:
        free.put(name)

    def try_one(joined: str) -> Row:
        name = free.get()
        try:
            with tempfile.TemporaryDirectory() as folder:
                # A name of its own: one inventory is provisioned by one run at a time.
                row = one(
                    sites.make(Path(folder) / f"reboots-{joined.partition('+')[0]}", [name]),
                    name,
                    joined.split("+"),
                )
            print(row, file=sys.stderr, flush=True)
            return row
        finally:
            free.put(name)

    try:
        with ThreadPoolExecutor(len(names)) as pool:
            rows = list(pool.map(try_one, points))
    finally:
        lab.down(names, say=sites.quiet)
    shown = Table("power cut when", "after s", "run", "next run", "s", "changes after", "answers", "")
    for row in rows:
        cells = (
            ", then ".join(POINTS[point][0] for point in row.points),
            ", ".join(map(str, row.met_s)),
            ", ".join(map(str, row.cut)),
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
