"""What a run is waiting for, on stderr: a live table on a terminal, else a plain line now and then.

Quiet for the first two seconds, so that a run that needs nothing prints nothing but its report.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from bringup.events import Doing, Failure, Tally

if TYPE_CHECKING:
    from rich.table import Table

QUIET_S = 2.0
PLAIN_EVERY_S = 10.0
LIVE_EVERY_S = 0.25
HOSTS_SHOWN = 12
HOSTS_NAMED = 4
WIDTH_OF_TASK = 60


class Progress(Protocol):
    """What the runner tells while it waits."""

    def update(self, tally: Tally) -> None:
        """Called after each event and several times a second; cheap."""

    def failed(self, failure: Failure) -> None:
        """A host failed (it may yet be rescued)."""

    def note(self, text: str) -> None:
        """A line for the operator, at once."""

    def close(self) -> None:
        """Nothing more will come."""


def choose(stream: TextIO | None = None) -> Progress:
    """A live table when `stream` (stderr) is a terminal that can show one, plain lines otherwise."""
    out = stream or sys.stderr
    can_move = out.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    return Live(out) if can_move else Plain(out)


class Plain:
    """At most one report every PLAIN_EVERY_S seconds, for logs, pipes and CI."""

    def __init__(self, stream: TextIO, clock: Any = time.time) -> None:
        self._stream = stream
        self._clock = clock
        self._begun = clock()
        self._next = self._begun + QUIET_S

    def update(self, tally: Tally) -> None:
        """Prints what the hosts are doing, when it is time to."""
        now = self._clock()
        if now < self._next or not tally.doing:
            return
        self._next = now + PLAIN_EVERY_S
        for line in lines(tally.doing, now):
            self.note(f"{elapsed(now - self._begun):>7}  {line}")

    def failed(self, failure: Failure) -> None:
        """Prints the failure's first line."""
        self.note(failure_line(failure))

    def note(self, text: str) -> None:
        """Prints a line."""
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Leaves nothing behind."""


class Live:
    """A table that redraws itself and disappears at the end; failures and notes stay above it."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live as RichLive

        self._console = Console(file=stream, highlight=False)
        self._live = RichLive(console=self._console, transient=True, auto_refresh=False)
        self._begun = time.time()
        self._drawn = 0.0
        self._started = False

    def update(self, tally: Tally) -> None:
        """Redraws, when it is time to."""
        now = time.time()
        if now - self._begun < QUIET_S or now - self._drawn < LIVE_EVERY_S:
            return
        if not self._started:
            self._live.start()
            self._started = True
        self._drawn = now
        self._live.update(self._table(tally, now), refresh=True)

    def failed(self, failure: Failure) -> None:
        """Prints the failure's first line above the table."""
        self._console.print(failure_line(failure), style="red", markup=False)

    def note(self, text: str) -> None:
        """Prints a line above the table."""
        self._console.print(text, markup=False)

    def close(self) -> None:
        """Takes the table away."""
        if self._started:
            self._live.stop()
            self._started = False

    def _table(self, tally: Tally, now: float) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, padding=(0, 2), show_header=False)
        table.add_row(
            Text(elapsed(now - self._begun), "bold"), Text(tally.task or tally.play, "bold"), "", ""
        )
        longest = sorted(tally.doing.items(), key=lambda item: item[1].since)
        for host, doing in longest[:HOSTS_SHOWN]:
            table.add_row(Text(host), Text(doing.role), Text(what(doing)), Text(elapsed(now - doing.since)))
        if len(longest) > HOSTS_SHOWN:
            table.add_row(Text(f"and {len(longest) - HOSTS_SHOWN} more"), "", "", "")
        return table


def lines(doing: dict[str, Doing], now: float) -> Iterator[str]:
    """One line for each thing being done: the hosts, role, task, and how long the slowest has been at it."""
    groups: dict[tuple[str, str], list[tuple[str, Doing]]] = {}
    for host, one in doing.items():
        groups.setdefault((one.role, what(one)), []).append((host, one))
    for (role, task), members in groups.items():
        longest = max(now - one.since for _, one in members)
        yield f"{names(host for host, _ in members)}  {role}: {task} ({elapsed(longest)})"


def what(doing: Doing) -> str:
    """The task, cut to a line's length, and which attempt it is at."""
    task = doing.task if len(doing.task) <= WIDTH_OF_TASK else doing.task[: WIDTH_OF_TASK - 1] + "…"
    return f"{task}, {doing.note}" if doing.note else task


def names(hosts: Iterable[str]) -> str:
    """A few names, and how many more there are."""
    known = list(hosts)
    more = f" and {len(known) - HOSTS_NAMED} more" if len(known) > HOSTS_NAMED else ""
    return ", ".join(known[:HOSTS_NAMED]) + more


def failure_line(failure: Failure) -> str:
    """`host  role: task: first line of the message`."""
    first = failure.message.strip().splitlines()[0] if failure.message.strip() else "no message"
    return f"{failure.host}  {failure.role}: {failure.task}: {first}"


def elapsed(seconds: float) -> str:
    """`8 s`, `2 m 05 s`, `1 h 02 m`."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} m {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} m"


@contextmanager
def waiting(text: str | Callable[[], str], progress: Progress) -> Iterator[None]:
    """Says what is waited for (or what `text` then says) when the body takes longer than two seconds, and again
    every ten."""
    import threading

    over = threading.Event()
    begun = time.time()

    def speak() -> None:
        pause = QUIET_S
        while not over.wait(pause):
            said = text if isinstance(text, str) else text()
            progress.note(f"{elapsed(time.time() - begun):>7}  {said}")
            pause = PLAIN_EVERY_S

    thread = threading.Thread(target=speak, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
