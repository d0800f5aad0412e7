"""The floor: all things of a host in one script, sent over one OpenSSH connection. Nothing can be had for less.

    python floor.py HOSTS THINGS DIGESTS -- SSH ...

HOSTS: lines of `name address`; THINGS: things.yml; DIGESTS: JSON of the weights' sha256; SSH: the command up to the
address. It keeps nothing, knows nothing of other runs, and cannot say what would change: it is a measure, not a tool.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from bench.provision.compare import workload

AT_ONCE = 16
LIMIT_S = 300


def program(data: dict[str, object], digests: dict[str, str], host: str) -> str:
    """The text that a host's Python runs."""
    rows = [thing.row() for thing in workload.by_lines(workload.things(data, digests, host))]
    code = (workload.FOLDER / "floor_node.py").read_text(encoding="utf-8")
    return code.replace('THINGS = "[]"', f"THINGS = {json.dumps(rows)!r}", 1)


def main() -> int:
    """Prints a line a host; 1 when one failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("hosts", "things", "digests"):
        parser.add_argument(name, type=Path)
    parser.add_argument("ssh", nargs="+")
    given = parser.parse_args()
    hosts = [line.split() for line in given.hosts.read_text().splitlines()]
    data, digests = workload.read(given.things), json.loads(given.digests.read_text())
    ssh = given.ssh

    def one(row: list[str]) -> bool:
        done = subprocess.run(
            [*ssh, row[1], "python3 -I -S -"],
            input=program(data, digests, row[0]),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        said = f"changed={len(json.loads(done.stdout))}" if done.returncode == 0 else done.stderr.strip()
        print(f"{row[0]}: {said}", flush=True)
        return done.returncode == 0

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return 0 if all(list(pool.map(one, hosts))) else 1


if __name__ == "__main__":
    raise SystemExit(main())
