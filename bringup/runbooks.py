"""Runbooks: what each one says of itself, and running one with the same care as every other.

A runbook is `playbooks/runbooks/<verb>-<thing>.yml` that begins with a comment block:

    # when: an engine hangs, or must take up new settings
    # effect: restarts every server, one host after the other, drained and verified
    # disruptive: yes
    # undo: none: a restart leaves nothing to undo
    # verify: a real token comes back from the right model
    # owner: sre
    # duration: 2 min a host

A line that begins with more than one space after `#` goes on with the line before it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bringup import ROOT, confirm, fleet, playbook
from bringup import inventory as inventories
from bringup.errors import Problem, UsageError, unknown
from bringup.runs import RunRecord

FOLDER = ROOT / "playbooks" / "runbooks"
KEYS = ("when", "effect", "disruptive", "undo", "verify", "owner", "duration")


@dataclass(frozen=True)
class Runbook:
    """A runbook's header. `undo` names the command that takes it back, or says `none: why`."""

    name: str
    when: str
    effect: str
    disruptive: bool
    undo: str
    verify: str
    owner: str
    duration: str


def listed(folder: Path | None = None) -> list[Runbook]:
    """Every runbook, by name. Raises UsageError with everything wrong with any header."""
    found: list[Runbook] = []
    problems: list[Problem] = []
    for path in sorted((folder or FOLDER).glob("*.yml")):
        try:
            found.append(read(path))
        except UsageError as error:
            problems.extend(error.problems)
    if problems:
        raise UsageError(problems)
    return found


def read(path: Path) -> Runbook:
    """One runbook's header. Raises UsageError with every key that is missing, unknown or wrong."""
    where = f"playbooks/runbooks/{path.name}"
    said = header(path.read_text(encoding="utf-8"))
    problems = [Problem(where, f'its header lacks "{key}:"') for key in KEYS if not said.get(key)]
    problems += [Problem(where, *unknown("header key", key, KEYS)) for key in said if key not in KEYS]
    if said.get("disruptive", "yes") not in ("yes", "no"):
        problems.append(Problem(f"{where}: disruptive", f'should be yes or no, is "{said["disruptive"]}"'))
    if said.get("undo", "x") == "none":
        problems.append(
            Problem(f"{where}: undo", "should say why there is none, as in `none: nothing changes`")
        )
    if problems:
        raise UsageError(problems)
    return Runbook(
        name=path.stem,
        disruptive=said["disruptive"] == "yes",
        **{key: said[key] for key in KEYS if key != "disruptive"},
    )


def header(text: str) -> dict[str, str]:
    """The `key: value` lines of the comment block that a file begins with."""
    found: dict[str, str] = {}
    last = ""
    for line in text.removeprefix("---\n").splitlines():
        if not line.startswith("#"):
            break
        match = re.match(r"# ([a-z]+): (.*)", line)
        if match:
            last = match[1]
            found[last] = match[2].strip()
        elif last and line.startswith("#  "):
            found[last] += " " + line[1:].strip()
    return found


def find(name: str) -> Runbook:
    """A runbook by its name. Raises UsageError with a suggestion."""
    path = FOLDER / f"{name}.yml"
    if not path.is_file():
        known = [one.stem for one in FOLDER.glob("*.yml")]
        raise UsageError(Problem("playbooks/runbooks", *unknown("runbook", name, known)))
    return read(path)


def run(
    name: str,
    inventory: str,
    *,
    limit: str | None = None,
    serial: str = "1",
    max_fail: int = 0,
    check: bool = False,
    yes: bool = False,
    extra: Mapping[str, Any] | None = None,
    force_unlock: bool = False,
    outside_window: str = "",
    resume: str = "",
) -> RunRecord:
    """Runs a runbook: hosts `serial` at a time (the first is the canary), stopping after `max_fail` percent
    failed.

    `outside_window`: why it cannot wait for the nodes' change windows; `resume`: an earlier run whose
    finished hosts are left out. Raises UsageError for a wrong name or limit and Locked when a disruptive one
    is not confirmed.
    """
    book = find(name)
    batches = in_batches(serial)
    hosts = fleet.matching(fleet.groups_of(inventory), limit)
    for line in plan_of(book, hosts, batches, max_fail):
        print(line, file=sys.stderr)
    if book.disruptive and not check:
        if not yes and sys.stdin.isatty():
            _show_served(inventory, limit)
        confirm.disruptive(book.name, inventories.folder_of(inventory).name, hosts, yes=yes)
    return playbook.run(
        f"runbooks/{name}",
        inventory,
        limit=limit,
        check=check,
        extra={**(extra or {}), "runbook_serial": batches, "runbook_max_fail": max_fail},
        force_unlock=force_unlock,
        outside_window=outside_window,
        resume=resume,
    )


def in_batches(serial: str) -> list[str]:
    """`--serial` as batches: one host first, the canary, then so many at a time; `100%` is all at once.

    Raises UsageError for anything but a number of hosts or a percentage.
    """
    found = re.fullmatch(r"(\d+)(%?)", serial.strip())
    if not found or not 0 < int(found[1]) <= (100 if found[2] else sys.maxsize):
        raise UsageError(Problem("--serial", f'"{serial}" is no number of hosts (2) or percentage (25%)'))
    return [serial] if serial in ("1", "100%") else ["1", serial]


def failures_allowed(max_fail: int, *, fail_fast: bool, keep_going: bool) -> int:
    """The percentage of hosts that may fail before the rest is left alone. Raises UsageError when words
    contradict each other.
    """
    if fail_fast and (keep_going or max_fail):
        raise UsageError(Problem("--fail-fast", "contradicts --keep-going and --max-fail"))
    if not 0 <= max_fail <= 100:
        raise UsageError(Problem("--max-fail", f"{max_fail} is no percentage from 0 to 100"))
    return 100 if keep_going else max_fail


def plan_of(book: Runbook, hosts: Sequence[str], batches: Sequence[str], max_fail: int) -> Iterator[str]:
    """What will happen, in the words of the header, and to which hosts in which order."""
    yield f"{book.name}: {book.effect}"
    yield f"  undo: {book.undo}"
    yield f"  verified by: {book.verify}"
    yield f"  expected: {book.duration}"
    order = "all at once" if batches[0] == "100%" else f"{hosts[0]} first"
    if len(hosts) > 1 and batches[0] != "100%":
        order += f", then {batches[-1]} at a time; it stops when more than {max_fail} % failed"
    yield f"  hosts: {len(hosts)}, {order}"


def undo_of(name: str, folder: Path | None = None) -> str:
    """The command that takes a runbook back; empty: there is none, or no such runbook (any more)."""
    try:
        undo = read((folder or FOLDER) / f"{name}.yml").undo
    except (OSError, UsageError):
        return ""
    return undo if undo.startswith("invoke ") else ""


def _show_served(inventory: str, limit: str | None) -> None:
    """What is served there now, before somebody agrees to its end."""
    from rich.console import Console

    from bringup import looking, remote, report

    rows = looking.status(looking.targets(inventory, limit))
    remote.close_all()
    Console(stderr=True, highlight=False).print(report.status_table(rows))


def restart_variables(service: str | None, *, rolling: bool) -> dict[str, Any]:
    """Variables of `restart-servers`: which service (None: all), and whether nodes agree on who restarts."""
    chosen = {"runbook_service": service} if service else {}
    return chosen if rolling else {**chosen, "runbook_lease": "--alone"}
