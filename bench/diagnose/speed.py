"""Seconds and memory that the rules take for 100 MB of log on one core.

    python -m bench.diagnose.speed [MEGABYTES]

Five logs are made: a server's usual lines repeated, lines that are all distinct (identifiers, times, addresses),
the same with a random word in each, JSON lines, and a kernel log in which each line is a GPU fault. Each is read in a
process of its own, pinned to one core; seconds are of that core, so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MEGABYTES = 100
LIMIT_S = 3.0
LIMIT_MB = 150
HELD_TO_LIMIT = ("usual", "distinct", "words", "json", "faults")
"""Every log is held to the limit, the worst that can be made too; the seconds are those of a quiet machine."""

SEED = 20261129

_WORDS = (
    "prefill decode batch queue cached token request worker tensor expert layer chunk graph stream".split()
)


def _usual(rng: random.Random) -> Iterator[str]:
    lines = [
        f"[2026-11-29 18:51:{second:02} TP{rank}] Decode batch, #running-req: {rank}, #token: {second * 64}, "
        f"token usage: 0.{second:02}, accept len: 3.{second:02}, accept rate: 0.76, cuda graph: True"
        for second in range(60)
        for rank in range(8)
    ]
    while True:
        yield from lines


def _distinct(rng: random.Random) -> Iterator[str]:
    number = 0
    while True:
        number += 1
        yield (
            f"2026-11-29 18:51:05.{number:09} INFO {rng.choice(_WORDS)}:{number % 977}] "
            f"req-{rng.getrandbits(128):032x} "
            f"{rng.choice(_WORDS)} took {rng.random():.6f} s for {rng.choice(_WORDS)} {number}, "
            f"{rng.choice(_WORDS)}={rng.getrandbits(20)} client 10.{number % 251}.{number % 241}.{number % 239}"
        )


def _words(rng: random.Random) -> Iterator[str]:
    for line in _distinct(rng):
        name = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=8))
        yield f"{line} session {name}"


def _json(rng: random.Random) -> Iterator[str]:
    for line in _distinct(rng):
        yield json.dumps({"level": "info", "ts": 1.5, "msg": line})


def _faults(rng: random.Random) -> Iterator[str]:
    number = 0
    while True:
        number += 1
        yield (
            f"[{number}.{number % 997:06}] NVRM: Xid (PCI:0000:{number % 8:02x}:00): 13, pid={number % 77}, "
            f"name=python3, Graphics Exception: ESR 0x{rng.getrandbits(24):x}=0x{rng.getrandbits(24):x}"
        )


LOGS: dict[str, Callable[[random.Random], Iterator[str]]] = {
    "usual": _usual,
    "distinct": _distinct,
    "words": _words,
    "json": _json,
    "faults": _faults,
}


def make(path: Path, kind: str, megabytes: int) -> None:
    """Write a log of that kind and size, the same one each time."""
    left = megabytes * 1_000_000
    with path.open("w", encoding="utf-8") as file:
        for line in LOGS[kind](random.Random(SEED)):
            file.write(line + "\n")
            left -= len(line) + 1
            if left <= 0:
                return


def measure(path: Path) -> dict[str, float]:
    """Read one log in this process: processor seconds (rules loaded before), peak memory in MB, first finding."""
    from bringup import diagnose, failures

    failures.library()
    diagnose.of_text("warm")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    diagnosis = diagnose.of_paths([str(path)])
    seconds = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "seconds": round(seconds, 2),
        "peak_mb": round(peak / 1024),
        "growth_mb": round((peak - before) / 1024),
        "lines": diagnosis.lines,
        "findings": len(diagnosis.findings),
    }


def main(megabytes: int) -> int:
    """Measure every kind; 1 when one is over the limits."""
    code = 0
    print(
        f"{'log':10}{'MB':>5}{'lines':>10}{'s':>7}{'MB/s':>7}{'peak MB':>9}{'growth MB':>10}{'findings':>9}"
    )
    for kind in LOGS:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{kind}.log"
            make(path, kind, megabytes)
            command = [sys.executable, __file__, "--measure", str(path)]
            done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
        row = json.loads(done.stdout)
        rate = megabytes / row["seconds"]
        print(
            f"{kind:10}{megabytes:>5}{row['lines']:>10}{row['seconds']:>7}{rate:>7.0f}"
            f"{row['peak_mb']:>9}{row['growth_mb']:>10}{row['findings']:>9}"
        )
        slow = row["seconds"] > LIMIT_S * megabytes / MEGABYTES and kind in HELD_TO_LIMIT
        if slow or row["peak_mb"] > LIMIT_MB:
            code = 1
    return code


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("megabytes", nargs="?", type=int, default=MEGABYTES, help="of each log")
    parser.add_argument("--measure", type=Path, metavar="LOG", help="only read this log, pinned to one core")
    return parser.parse_args()


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    arguments = _arguments()
    if arguments.measure:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        print(json.dumps(measure(arguments.measure)))
    else:
        sys.exit(main(arguments.megabytes))
