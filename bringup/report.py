"""What a run was: the table, the failures with their causes, the answers, and what to do next. No decisions.

Data goes to stdout: a table for people, or one JSON object (`--json`) with `schema_version`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bringup import runs
from bringup.errors import Exit
from bringup.events import HostOutcome
from bringup.progress import elapsed
from bringup.runs import RunRecord

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA_VERSION = 1
MESSAGE_LINES_SHOWN = 12
DIFF_LINES_SHOWN = 40
CHANGES_SHOWN = 30
FAILURES_SHOWN = 20
STYLES = {"done": "green", "changed": "yellow", "failed": "red", "unreachable": "red", "refused": "red"}


def console() -> Console:
    """Stdout, coloured when it is a terminal and NO_COLOR is not set."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=not sys.stdout.isatty())


def print_json(data: Mapping[str, Any]) -> None:
    """One object on stdout; `schema_version` is added when it is missing."""
    whole = {"schema_version": SCHEMA_VERSION, **data}
    print(json.dumps(whole, ensure_ascii=False, indent=2, default=str))


def show_run(record: RunRecord, *, as_json: bool = False, brief: bool = False) -> Exit:
    """Prints a finished run and gives its exit code. `brief` leaves the diffs out."""
    if as_json:
        print_json(runs.to_data(record))
    else:
        show(record, console(), with_diffs=not brief)
    return Exit(record.exit_code if record.exit_code is not None else Exit.INTERNAL)


def show(record: RunRecord, out: Console, *, with_diffs: bool = True) -> None:
    """The report of a run on a terminal."""
    if with_diffs and record.changes:
        _show_changes(record, out)
    if record.hosts:
        out.print(_table(record))
    _show_failures(record, out)
    for error in record.errors:
        out.print(error, style="red", markup=False)
    for cause in record.causes:
        _show_cause(cause, out)
    for answer in record.answers:
        out.print(answer_line(answer), markup=False)
    for note in record.notes:
        out.print(note, style="yellow", markup=False)
    out.print(summary(record), style=STYLES.get(record.status, "bold"), markup=False)
    for line in next_steps(record):
        out.print(f"Next: {line}", markup=False)


def _table(record: RunRecord) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2), header_style="bold")
    table.add_column("host")
    table.add_column("state")
    for name in ("ok", "changed", "failed", "skipped", "time"):
        table.add_column(name, justify="right")
    for name, host in record.hosts.items():
        state = state_of(name, host, record)
        table.add_row(
            Text(name),
            Text(state, STYLES.get(state, "")),
            str(host.ok),
            str(host.changed),
            str(host.failed),
            str(host.skipped),
            elapsed(sum(role.seconds for role in host.roles.values())),
        )
    return table


def state_of(name: str, host: HostOutcome, record: RunRecord) -> str:
    """A host's state in one word."""
    if host.unreachable:
        return "unreachable"
    if host.failed:
        roles = {
            failure.role for failure in record.failures if failure.host == name and failure.kind == "failed"
        }
        return "refused" if roles == {"preflight"} else "failed"
    if host.changed:
        return "pending" if record.arguments.get("check") else "changed"
    return "done"


def _show_changes(record: RunRecord, out: Console) -> None:
    from rich.text import Text

    for change in record.changes[:CHANGES_SHOWN]:
        out.print(Text(f"{change.host}  {change.role}: {change.task}", "yellow"))
        lines = change.diff.splitlines()
        for line in lines[:DIFF_LINES_SHOWN]:
            out.print(Text(f"    {line}", _diff_style(line)))
        if len(lines) > DIFF_LINES_SHOWN:
            out.print(f"    ... {len(lines) - DIFF_LINES_SHOWN} more lines", style="dim")
    if len(record.changes) > CHANGES_SHOWN:
        out.print(f"... and {len(record.changes) - CHANGES_SHOWN} more changes", style="dim")


def _diff_style(line: str) -> str:
    if line.startswith("+") and not line.startswith("+++"):
        return "green"
    return "red" if line.startswith("-") and not line.startswith("---") else "dim"


def _show_failures(record: RunRecord, out: Console) -> None:
    fatal = [failure for failure in record.failures if failure.kind in ("failed", "unreachable")]
    for failure in fatal[:FAILURES_SHOWN]:
        out.print(f"{failure.host}  {failure.role}: {failure.task}", style="red", markup=False)
        lines = failure.message.strip().splitlines()
        for line in lines[:MESSAGE_LINES_SHOWN]:
            out.print(f"    {line}", markup=False)
        if len(lines) > MESSAGE_LINES_SHOWN:
            out.print(f"    ... {len(lines) - MESSAGE_LINES_SHOWN} more lines", style="dim")
    if len(fatal) > FAILURES_SHOWN:
        out.print(f"... and {len(fatal) - FAILURES_SHOWN} more failures", style="dim")


def _show_cause(cause: Mapping[str, Any], out: Console) -> None:
    hosts = ", ".join(cause.get("hosts", ()))
    out.print(f"Cause: {cause.get('title')} ({cause.get('cause')}; {hosts})", style="bold", markup=False)
    for label, key in (("Means", "meaning"), ("Check", "check"), ("Do", "remedy")):
        if cause.get(key):
            out.print(f"    {label}: {str(cause[key]).strip()}", markup=False)
    if cause.get("runbook"):
        out.print(f"    Runbook: invoke run {cause['runbook']}", markup=False)


def answer_line(answer: Mapping[str, Any]) -> str:
    """`lab-01 chat http://198.18.5.11:8000/v1 (model): "..." 8 tokens in 0.21 s`, or why there is none."""
    where = f"{answer['host']}  {answer['service']}  {answer['address']}  ({answer['model']})"
    if answer.get("error"):
        return f"{where}: no answer: {answer['error']}"
    text = " ".join(str(answer.get("text", "")).split())
    return f'{where}: "{text}" ({answer.get("tokens", 0)} tokens in {answer.get("seconds", 0):.2f} s)'


def summary(record: RunRecord) -> str:
    """One line: what, where, how it ended, how long it took, and its id."""
    hosts = "1 host" if len(record.hosts) == 1 else f"{len(record.hosts)} hosts"
    verb = "would change" if record.arguments.get("check") else "changed"
    return (
        f"{record.name} {record.inventory}: {record.status}, {hosts}, {record.changed} {verb}, "
        f"{elapsed(record.seconds)} (run {record.id})"
    )


def next_steps(record: RunRecord) -> list[str]:
    """The commands that make sense now."""
    where = f"--inventory {record.arguments.get('inventory') or record.inventory}"
    bad = [name for name, host in record.hosts.items() if host.failed or host.unreachable]
    limit = f" --limit {','.join(bad)}" if bad and len(bad) < len(record.hosts) else ""
    again = f"{command_of(record)} {where}{limit}"
    code = Exit(record.exit_code) if record.exit_code is not None else Exit.INTERNAL
    if code is Exit.DONE:
        return [f"invoke status {where}"] if record.name in ("provision", "restart") else []
    if code is Exit.PENDING:
        return [f"{command_of(record)} {where} (without --check, to make it so)"]
    steps = {
        Exit.REFUSED: f"mend what is named above, then {again}",
        Exit.UNREACHABLE: f"invoke status {where}{limit} shows who answers; then {again}",
        Exit.FAILED: f"invoke logs {where}{limit}, then {again}",
        Exit.GATE: f"invoke history show {record.id}",
        Exit.INTERRUPTED: f"{again} (it takes up where this run stopped)",
    }
    return [steps.get(code, f"invoke history show {record.id}")]


def command_of(record: RunRecord) -> str:
    """The command that made a run."""
    playbook = str(record.arguments.get("playbook", record.name))
    return f"invoke run {record.name}" if playbook.startswith("runbooks/") else f"invoke {record.name}"


def table(out: Console, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A plain table: a header line and one line a row."""
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, padding=(0, 2), header_style="bold")
    for column in columns:
        shown.add_column(column, overflow="fold")
    for row in rows:
        shown.add_row(*(value if isinstance(value, Text) else Text(str(value)) for value in row))
    out.print(shown)


def show_history(records: Sequence[RunRecord], *, as_json: bool = False) -> None:
    """The list of runs, newest first."""
    if as_json:
        print_json({"runs": [brief(record) for record in records]})
        return
    if not records:
        print("No runs yet.", file=sys.stderr)
        return
    rows = [
        (
            record.id,
            record.status,
            len(record.hosts),
            record.changed,
            elapsed(record.seconds),
            record.who,
            record.commit,
        )
        for record in records
    ]
    table(console(), ("run", "ended", "hosts", "changed", "time", "who", "commit"), rows)


def brief(record: RunRecord) -> dict[str, Any]:
    """A run's line in a list, as data."""
    keys = ("id", "name", "inventory", "status", "exit_code", "who", "begun", "seconds", "commit", "digest")
    return {
        **{key: getattr(record, key) for key in keys},
        "hosts": len(record.hosts),
        "changed": record.changed,
    }


def show_diff(
    rows: Sequence[tuple[str, str, str]], first: str, second: str, *, as_json: bool = False
) -> None:
    """What differs between two runs."""
    if as_json:
        print_json({"first": first, "second": second, "differences": [list(row) for row in rows]})
    elif rows:
        table(console(), ("what", first, second), rows)
    else:
        print("The two runs do not differ.")
