"""Asking the operator before something disruptive; without a terminal it refuses (exit 8) instead of
asking.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from bringup.errors import Locked, Problem

HOSTS_NAMED = 8


def disruptive(
    what: str,
    inventory: str,
    hosts: Sequence[str],
    *,
    yes: bool = False,
    ask: Callable[[str], str] | None = None,
) -> None:
    """Returns when the operator agreed to `what` on `hosts`; raises Locked (exit 8) otherwise.

    More than one host: the inventory's name must be typed; one host: `y`. `yes` (from `--yes`) agrees for
    scripts.
    """
    if yes:
        return
    print(f"{what} on {_named(hosts)} of {inventory}.", file=sys.stderr)
    if ask is None and not sys.stdin.isatty():
        raise Locked(
            Problem(what, "is disruptive and there is no terminal to confirm it", "Add --yes to agree")
        )
    many = len(hosts) > 1
    question = f'Type "{inventory}" to go on: ' if many else "Go on? [y/N] "
    try:
        said = (ask or _ask)(question).strip()
    except EOFError:
        said = ""
    if said != inventory if many else said.lower() not in ("y", "yes"):
        raise Locked(Problem(what, "was not confirmed; nothing was changed"))


def _ask(question: str) -> str:
    print(question, end="", file=sys.stderr, flush=True)
    return input()


def _named(hosts: Sequence[str]) -> str:
    shown = ", ".join(hosts[:HOSTS_NAMED])
    more = f" and {len(hosts) - HOSTS_NAMED} more" if len(hosts) > HOSTS_NAMED else ""
    return f"{len(hosts)} hosts ({shown}{more})" if len(hosts) > 1 else shown
