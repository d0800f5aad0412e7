"""The whole way of a GPU machine without a network, see docs/hopper.md.

python -m bench.hopper prepare --python PATH/python3.12    here: all that travels, into .hop/
python -m bench.hopper commit                              here: the last commit anew, into .hop/commit
python3 -m bench.hopper run OUT                            there, with the checkout and .hop: all of it, into OUT
python -m bench.hopper report OUT                          here: OUT into docs/tuning and the tables of docs/hopper.md
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

DEVICE = Path(__file__).with_name("device.sh")
STEP_MARGIN_S = 60
"""How long before the machine goes back nothing is waited for any more."""


def main() -> int:
    """Each verb imports only what it needs: the machine's Python has none of this project's packages."""
    parser = argparse.ArgumentParser(prog="python -m bench.hopper", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    prepare = verbs.add_parser("prepare", help="make everything that travels")
    prepare.add_argument("--python", default="python3.12", help="a Python of the engine's version")
    verbs.add_parser("commit", help="make the archive of the last commit anew")
    run = verbs.add_parser("run", help="boot the node, go up the ladder, leave results in a folder")
    run.add_argument("out", type=Path)
    run.add_argument("--seconds", type=int, default=1500, help="how long the machine is there")
    results = verbs.add_parser("report", help="results into docs/tuning and the tables of docs/hopper.md")
    results.add_argument("out", type=Path)
    chosen = parser.parse_args()
    if chosen.verb == "run":
        return ladder(chosen.out, chosen.seconds)
    if chosen.verb == "report":
        from bench.hopper.report import run as report_on

        return report_on(chosen.out)
    from bench.hopper import prepare as preparing

    if chosen.verb == "commit":
        print(preparing.commit())
        return 0
    return preparing.run(chosen.python)


def ladder(out: Path, seconds: int) -> int:
    """On the machine: every part that lies here, then the ladder."""
    out.mkdir(parents=True, exist_ok=True)
    surroundings = {**os.environ, "OUT": str(out.resolve())}
    count = len(list((DEVICE.parents[2] / ".hop").glob("part[0-9]*")))
    calls = [["receive", str(number)] for number in range(count)]
    for words in [*calls, ["run", str(seconds), str(seconds + STEP_MARGIN_S)]]:
        done = subprocess.run(["sh", str(DEVICE), *words], env=surroundings, check=False)
        if done.returncode:
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
