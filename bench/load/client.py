"""What the load client itself costs: requests a second on one core, and the error of its times.

    python bench/load/client.py            prints both figures
    python bench/load/client.py --check    and exits 1 when one misses its bar

Each figure is the best of a few rounds, since other work on the machine can only make it worse; all rounds
are printed. The server (server.py) runs as another process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from bringup import load

REQUESTS = 4000
ROUNDS = 5
BAR_RATE = 2000.0
BAR_ERROR_MS = 1.0
CONCURRENT = 32
DELAY_MS = 50.0
SPREAD_MS = 10.0
"""Answers of a server come apart a little; all at once is the hardest case, printed beside it."""
TIMED = 640


@contextlib.contextmanager
def server(*flags: str) -> Iterator[load.Target]:
    """The trivial server as a process, ended afterwards."""
    command = [sys.executable, str(Path(__file__).with_name("server.py")), *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield load.Target(process.stdout.readline().strip(), "none")
    finally:
        process.terminate()
        process.wait(10)


def one_core() -> None:
    """Keeps this process on its last core, and so the server on the others where there are any."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[-1]})


def rates() -> list[float]:
    """Requests a second, round by round."""
    asks = [load.Ask("one two three", 8)] * REQUESTS
    with server() as target:
        return [load.rate_of(asyncio.run(load.closed_loop(target, asks, CONCURRENT))) for _ in range(ROUNDS)]


def errors_ms(spread_ms: float) -> list[float]:
    """Median time that the client adds to the server's own, milliseconds, round by round."""
    asks = [load.Ask("one two three", 8)] * TIMED
    with server("--delay", str(DELAY_MS), "--spread", str(spread_ms)) as target:
        outcomes = [asyncio.run(load.closed_loop(target, asks, CONCURRENT)) for _ in range(ROUNDS)]
    return [statistics.median(added(outcome)) for outcome in outcomes]


def added(outcome: load.Outcome) -> list[float]:
    """What each request took longer than the server says (it writes microseconds as cached tokens)."""
    return [
        (request.ended - request.began) * 1000 - request.cached_tokens / 1000
        for request in outcome.requests
        if not request.error
    ]


def main(words: Sequence[str] | None = None) -> int:
    """Measures, prints, and says whether the bars were met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="exit 1 when a bar is missed")
    options = parser.parse_args(words)
    rate, error, at_once = rates_pinned(), errors_ms(SPREAD_MS), errors_ms(0)
    print(f"requests/s on one core: best {max(rate):,.0f} of {', '.join(f'{value:,.0f}' for value in rate)}")
    for label, values in (("", error), (", answers all at once", at_once)):
        rounds = ", ".join(f"{value:.3f}" for value in values)
        case = f"added to {DELAY_MS:g} ms at {CONCURRENT} concurrent{label}"
        print(f"{case}: best {min(values):.3f} ms of {rounds}")
    met = max(rate) >= BAR_RATE and min(error) < BAR_ERROR_MS
    print(f"bars: {BAR_RATE:,.0f} requests/s, {BAR_ERROR_MS:g} ms: {'met' if met else 'missed'}")
    return 0 if met or not options.check else 1


def rates_pinned() -> list[float]:
    """`rates`, with this process held to one core for as long."""
    before = os.sched_getaffinity(0)
    one_core()
    try:
        return rates()
    finally:
        os.sched_setaffinity(0, before)


if __name__ == "__main__":
    sys.exit(main())
