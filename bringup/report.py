"""What a run was: the table, the failures with their causes, the answers, and what to do next. No decisions.

Data goes to stdout: a table for people, or one JSON object (`--json`) with `schema_version`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bringup import runs
from bringup.errors import Exit, Problem
from bringup.events import HostOutcome
from bringup.progress import elapsed
from bringup.runs import RunRecord

if TYPE_CHECKING:
    from rich.console import Console

    from bringup.benching import Against, BenchResult
    from bringup.diagnose import Diagnosis
    from bringup.lab import Node
    from bringup.planned import Plan
    from bringup.runbooks import Runbook
    from bringup.tuning import Tuned
    from bringup.verdicts import Context

SCHEMA_VERSION = 1
WIDTH_OF_FILES = 240
"""Columns of what goes into a file or a pipe: wide, so that no table is folded."""

MESSAGE_LINES_SHOWN = 12
DIFF_LINES_SHOWN = 40
CHANGES_SHOWN = 30
FAILURES_SHOWN = 20
STYLES = {
    "done": "green",
    "sealed": "green",
    "changed": "yellow",
    "failed": "red",
    "unreachable": "red",
    "refused": "red",
    "locked": "red",
}


def console() -> Console:
    """Stdout, coloured when it is a terminal and NO_COLOR is not set."""
    from rich.console import Console

    if sys.stdout.isatty() or os.environ.get("COLUMNS"):
        return Console(highlight=False)
    return Console(highlight=False, width=WIDTH_OF_FILES, soft_wrap=True)


def print_json(data: Mapping[str, Any]) -> None:
    """One object on stdout; `schema_version` is added when it is missing."""
    whole = {"schema_version": SCHEMA_VERSION, **data}
    print(json.dumps(whole, ensure_ascii=False, indent=2, default=str))


def print_line(data: Mapping[str, Any]) -> None:
    """One object on one line of stdout, at once: for what goes on until Ctrl-C."""
    print(json.dumps({"schema_version": SCHEMA_VERSION, **data}, ensure_ascii=False, default=str), flush=True)


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
    for name in ("ok", "changed", "failed", "skipped", "sealed", "time"):
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
            str(len(host.sealed)),
            elapsed(sum(role.seconds for role in host.roles.values())),
        )
    return table


def state_of(name: str, host: HostOutcome, record: RunRecord) -> str:
    """A host's state in one word."""
    if host.unreachable:
        return "unreachable"
    if host.failed:
        mine = [one for one in record.failures if one.host == name and one.kind == "failed"]
        if mine and all(one.is_lock for one in mine):
            return "locked"
        said_no = mine and all(one.refused or one.role == "preflight" for one in mine)
        return "refused" if said_no else "failed"
    if host.changed:
        return "pending" if record.arguments.get("check") else "changed"
    return "sealed" if host.sealed and not host.roles else "done"


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
    roles = _roles_of(record)
    again = f"{command_of(record)} {where}{roles}{limit}"
    code = Exit(record.exit_code) if record.exit_code is not None else Exit.INTERNAL
    is_undo = record.arguments.get("playbook") == "undo"
    if code is Exit.DONE:
        # After an undo there may be no server left to look at.
        after = (
            f"invoke provision {where}{_limit_of(record)} brings it again"
            if is_undo
            else f"invoke status {where}"
        )
        return [after] if record.changed else []
    if code is Exit.PENDING:
        return [f"{command_of(record)} {where}{roles}, without --check, makes it so"]
    again_all = f"{command_of(record)} {where}{roles} --resume {record.id}"
    held = any(one.is_lock for one in record.failures)
    steps = {
        Exit.REFUSED: f"mend what is named above, then {again}",
        Exit.UNREACHABLE: f"invoke status {where}{limit} shows who answers; then {again}",
        Exit.FAILED: f"mend what is named above, then {again}"
        if is_undo
        else f"invoke logs {where}{limit}, then {again}",
        Exit.GATE: f"invoke history show {record.id}",
        Exit.LOCKED: f"wait for who holds it, then {again}"
        if held
        else f"do what is said above, then {again}",
        Exit.INTERRUPTED: again if is_undo else f"{again_all} (hosts that are done are left out)",
    }
    return [steps.get(code, f"invoke history show {record.id}"), *_undo(record, where, bad)]


def _roles_of(record: RunRecord) -> str:
    """The options that name the roles of a run, so that a command that is offered does not do more than was asked."""
    tags = str(record.arguments.get("tags") or "")
    if not tags:
        return ""
    if record.arguments.get("playbook") == "undo":
        return "".join(f" --role {role}" for role in tags.split(","))
    return f" --tags {tags}"


def _limit_of(record: RunRecord) -> str:
    limit = record.arguments.get("limit")
    return f" --limit {limit}" if limit else ""


def _undo(record: RunRecord, where: str, bad: Sequence[str]) -> list[str]:
    """The command that takes a failed runbook back, where it has one and some host was changed."""
    if not str(record.arguments.get("playbook", "")).startswith("runbooks/"):
        return []
    from bringup import runbooks

    undo = runbooks.undo_of(record.name)
    failed = [name for name in bad if state_of(name, record.hosts[name], record) == "failed"]
    if record.arguments.get("check") or not undo or not failed:
        return []
    return [f"{undo} {where} --limit {','.join(failed)} takes it back on what failed"]


def command_of(record: RunRecord) -> str:
    """The command that made a run."""
    playbook = str(record.arguments.get("playbook", record.name))
    return f"invoke run {record.name}" if playbook.startswith("runbooks/") else f"invoke {playbook}"


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


def show_drift(rows: Sequence[Mapping[str, Any]], inventory: str, *, as_json: bool = False) -> None:
    """What is not as it was left, host by host and role by role, and what brings it back."""
    if as_json:
        print_json({"inventory": inventory, "hosts": list(rows)})
        return
    out = console()
    found = [line for row in rows for line in _drift_lines(row)]
    if found:
        table(out, ("host", "role", "what", "expected", "found"), found)
    bad = [row for row in rows if not row["reached"] or row["due"]]
    names = ",".join(str(row["host"]) for row in bad)
    out.print(f"{len(rows) - len(bad)} of {len(rows)} hosts are as they were left", markup=False)
    if bad:
        limit = f" --limit {names}" if len(bad) < len(rows) else ""
        out.print(f"Next: invoke provision --inventory {inventory}{limit}", markup=False)


def _drift_lines(row: Mapping[str, Any]) -> Iterable[Sequence[Any]]:
    """Rows of the table: what differs, else why a role would be played."""
    host = row["host"]
    if not row["reached"]:
        yield (host, "-", row["why"], "an answer", "none")
    for one in row["differs"]:
        yield (
            host,
            one["role"],
            f"{one['what']}: {one['field']}",
            _plain(one["expected"]),
            _plain(one["found"]),
        )
    told = {one["role"] for one in row["differs"]}
    for role, reasons in row["due"].items():
        if role not in told:
            yield (host, role, reasons[0], "as it was left", "to be played")


def _plain(value: Any) -> str:
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value) or "none"


def show_findings(record: RunRecord, *, as_json: bool = False) -> None:
    """What preflight found, host by host, errors first."""
    if as_json:
        print_json(runs.to_data(record))
        return
    out = console()
    order = {"error": 0, "warning": 1, "note": 2}
    rows = sorted(
        record.findings, key=lambda found: (str(found.get("host")), order.get(str(found.get("severity")), 3))
    )
    if rows:
        names = ("host", "severity", "code", "what", "evidence", "remedy")
        table(out, names, [[found.get(name, "") for name in names] for found in rows])
    if record.exit_code not in (Exit.DONE, Exit.REFUSED):
        show(record, out, with_diffs=False)
        return
    out.print(summary(record), style=STYLES.get(record.status, "bold"), markup=False)


def show_status(rows: Sequence[Mapping[str, Any]], *, as_json: bool = False) -> None:
    """One row a server."""
    if as_json:
        print_json({"services": list(rows)})
    elif not rows:
        print("No services are planned on these hosts.", file=sys.stderr)
    else:
        console().print(status_table(rows))


def status_table(rows: Sequence[Mapping[str, Any]]) -> Any:
    """The table of `invoke status`."""
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, padding=(0, 2), header_style="bold")
    columns = (
        "host",
        "service",
        "unit",
        "answers",
        "model",
        "up",
        "crashes",
        "last restart",
        "next restart",
        "log",
    )
    for column in columns:
        shown.add_column(column)
    for row in rows:
        up = row.get("uptime_s")
        shown.add_row(
            Text(str(row["host"])),
            Text(str(row["service"])),
            Text(str(row["state"]), "green" if row["state"] == "active" else "red"),
            Text("yes", "green") if row["healthy"] else Text("no", "red"),
            Text(str(row.get("model") or "-")),
            "-" if up is None else elapsed(float(up)),
            str(row.get("crashes", "-")),
            _minute(row.get("last_restart")),
            _minute(row.get("next_restart")),
            size(int(row.get("log_bytes") or 0)),
        )
        if row.get("why"):
            shown.add_row("", Text(str(row["why"]), "red"))
        for warning in row.get("warnings") or ():
            shown.add_row("", Text(str(warning), "yellow"))
        if row.get("restart"):
            shown.add_row("", Text(str(row["restart"]), "yellow"))
        elif row.get("drained"):
            said = "it is out of rotation (drained). Put it back: invoke run return-node"
            shown.add_row("", Text(said, "yellow"))
    return shown


def _minute(moment: Any) -> str:
    return str(moment)[:16].replace("T", " ") if moment else "-"


def size(count: int) -> str:
    """Bytes for people: `0 B`, `12 KiB`, `3.4 GiB`."""
    amount, units = float(count), ("B", "KiB", "MiB", "GiB", "TiB")
    for unit in units:
        if amount < 1024 or unit == units[-1]:
            return f"{amount:.0f} {unit}" if unit in ("B", "KiB") or amount >= 100 else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{count} B"


def watch_status(states: Iterable[Sequence[Mapping[str, Any]]], title: str, *, as_json: bool = False) -> None:
    """The status table, redrawn on a terminal and printed again elsewhere, until Ctrl-C; as JSON an object a line."""
    from datetime import UTC, datetime

    if as_json:
        for rows in states:
            print_line({"at": datetime.now(UTC).isoformat(timespec="seconds"), "services": list(rows)})
        return
    out = console()
    if not out.is_terminal:
        for rows in states:
            out.print(f"{title}  {datetime.now():%H:%M:%S}")
            out.print(status_table(rows))
        return
    from rich.console import Group
    from rich.live import Live

    with Live(console=out, auto_refresh=False, screen=False) as live:
        for rows in states:
            head = f"{title}  {datetime.now():%H:%M:%S}  (Ctrl-C ends)"
            live.update(Group(head, status_table(rows)), refresh=True)


def show_answers(rows: Sequence[Mapping[str, Any]], *, as_json: bool = False) -> None:
    """The completions, one line each."""
    if as_json:
        print_json({"answers": list(rows)})
        return
    out = console()
    for row in rows:
        out.print(answer_line(row), style="red" if row.get("error") else "", markup=False)


def show_logs(
    found: Iterable[tuple[str, str, str]], *, as_json: bool = False, as_it_comes: bool = False
) -> Exit:
    """Log lines with host and service before each, as they come (as JSON in one object at the end, or `as_it_comes`
    an object a line); UNREACHABLE when a host was not reached, else FAILED when one gave none.
    """
    code, kept = Exit.DONE, []
    for host, service, line in found:
        if service in ("!", "!!"):
            code = max(code, Exit.UNREACHABLE if service == "!!" else Exit.FAILED)
            print(f"{host}: {line}", file=sys.stderr, flush=True)
        elif as_json and as_it_comes:
            print_line({"host": host, "service": service, "line": line})
        elif as_json:
            kept.append({"host": host, "service": service, "line": line})
        else:
            print(f"{host} {service} | {line}", flush=True)
    if as_json and not as_it_comes:
        print_json({"lines": kept})
    return code


def show_crashes(
    rows: Sequence[Mapping[str, Any]],
    *,
    contexts: Mapping[tuple[str, str], Context] | None = None,
    shown: int | None = None,
    as_json: bool = False,
) -> tuple[Exit, bool]:
    """Each service's last failure with its causes, where they are known; `contexts` by (host, service), `shown`
    the last lines of its log that people see (None: all).

    FAILED when a host was not reached; and whether a cause was found that is more than a note.
    """
    from bringup import diagnose

    code, found_any = Exit.DONE, False
    told = []
    for row in rows:
        lost = row.get("state") == "unreachable" or bool(row.get("error"))
        code = Exit.FAILED if lost else code
        sources = {name: "\n".join(row.get(name, ())) for name in ("journal", "log", "kernel")}
        found = diagnose.of_sources(sources, (contexts or {}).get((row["host"], row["service"])))
        found_any = found_any or found.exit is Exit.FAILED
        told.append({**row, "causes": found.as_json()["findings"]})
        if not as_json:
            _show_crash(row, found, shown)
    if as_json:
        print_json({"services": told, "findings": _all_findings(told)})
    return code, found_any


def _all_findings(told: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The causes of every service with where it is: each one's first, then each one's second, ..."""
    placed = [
        (rank, {**finding, "host": row["host"], "service": row["service"]})
        for row in told
        for rank, finding in enumerate(row["causes"])
    ]
    return [finding for _, finding in sorted(placed, key=lambda item: item[0])]


def _show_crash(row: Mapping[str, Any], found: Any, shown: int | None) -> None:
    from datetime import UTC, datetime

    from bringup import diagnose

    out = console()
    name = f"{row['host']}  {row['service']}"
    if row.get("error") or row.get("why"):
        out.print(f"{name}: {row.get('error') or row.get('why')}", style="red", markup=False)
        if found.exit is Exit.FAILED:
            diagnose.show(found, out)
    elif not row["when"]:
        out.print(f"{name}: the journal knows no failure", style="green", markup=False)
        if found.exit is Exit.FAILED:
            diagnose.show(found, out)
    else:
        when = datetime.fromtimestamp(row["when"], UTC)
        out.print(f"{name}: failed at {when:%Y-%m-%d %H:%M:%S} UTC", style="bold red", markup=False)
        lines = (*row["log"], *row["journal"])
        for line in lines if shown is None else lines[-shown:]:
            out.print(f"    {line}", markup=False)
        diagnose.show(found, out)


def show_diagnosis(found: Diagnosis, *, as_json: bool = False) -> Exit:
    """Causes found in a log; FAILED when there is one."""
    from bringup import diagnose

    if as_json:
        print_json(found.as_json())
    else:
        diagnose.show(found, console())
    return found.exit


def show_cause(cause: Any, *, as_json: bool = False) -> None:
    """All that the catalog says about one cause."""
    data = cause.model_dump(mode="json", exclude_none=True)
    if as_json:
        print_json(data)
        return
    import yaml

    print(yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=100), end="")


def show_runbooks(books: Sequence[Runbook], *, as_json: bool = False) -> None:
    """The runbooks, one a row."""
    if as_json:
        import dataclasses

        print_json({"runbooks": [dataclasses.asdict(book) for book in books]})
        return
    rows = [(book.name, "yes" if book.disruptive else "no", book.duration, book.when) for book in books]
    table(console(), ("runbook", "disrupts", "takes", "when"), rows)


def say(text: str) -> None:
    """A line for the operator, on stderr."""
    print(text, file=sys.stderr, flush=True)


def show_plan(plan: Plan, limit: str | None, *, units: bool = False, as_json: bool = False) -> None:
    """The plan of all hosts, or of those that `limit` picks."""
    import dataclasses

    from bringup import fleet, preview

    names = fleet.matching({host.name: host.groups for host in plan.hosts}, limit)
    shown = dataclasses.replace(plan, hosts=tuple(host for host in plan.hosts if host.name in names))
    if as_json:
        print_json(preview.as_json(shown))
    else:
        preview.show(shown, console(), units=units)


def show_bench(
    record: RunRecord, result: BenchResult, compared: Against | None, *, as_json: bool = False
) -> Exit:
    """The measured loads, what was seen beside them, and the verdict; GATE when a gate failed."""
    from bringup import benching

    if as_json:
        verdict = {"verdict": compared.verdict, "against": compared.as_json()} if compared else {}
        gates = {"run": record.id, "failed_gates": list(record.errors)}
        print_json({**result.as_json(), **gates, **verdict})
    else:
        out = console()
        for one, target in zip(benching.tables(result), result.targets, strict=True):
            out.print(one)
            for line in (*benching.bars(target), *benching.beside_lines(target)):
                out.print(f"  {line}", markup=False)
        if compared is not None:
            out.print(benching.verdict_table(compared))
        for gate in record.errors:
            out.print(f"Gate failed: {gate}", style="red", markup=False)
        out.print(f"Page: runs/{record.id}/report.html")
    return Exit(record.exit_code if record.exit_code is not None else Exit.INTERNAL)


def show_tuned(tuned: Tuned, *, as_json: bool = False) -> Exit:
    """What was tried, what was picked and why, and the profile to add to the catalog."""
    from bringup import tuning

    code = Exit(tuned.record.exit_code if tuned.record.exit_code is not None else Exit.INTERNAL)
    if as_json:
        print_json(tuning.as_json(tuned))
        return code
    out = console()
    rows = [
        (
            one.name or "as it is",
            one.failed or ", ".join(f"{k}: {v.median:.1f}" for k, v in one.loads.items()),
        )
        for one in tuned.measured.values()
    ]
    table(out, ("setting", "tok/s by load, or why not"), rows)
    for name, why in tuned.decision.rejected.items():
        out.print(f"Rejected {name}: {why}", markup=False)
    out.print(f"Picked {tuned.decision.picked or 'nothing'}: {tuned.decision.reason}", markup=False)
    if tuned.profile is not None:
        where = tuned.written or f"catalog/profiles/ (runs/{tuned.record.id}/{tuning.CANDIDATE})"
        out.print(f"A profile for {where}:", markup=False)
        print(tuning.as_yaml(tuned.profile), end="")
    out.print(f"Page: runs/{tuned.record.id}/report.html")
    return code


def show_written(path: Path, *, as_json: bool = False) -> None:
    """The path of a file that a command wrote."""
    if as_json:
        print_json({"written": str(path)})
    else:
        print(path)


def show_nodes(nodes: Sequence[Node], *, as_json: bool = False) -> None:
    """The lab's nodes."""
    if as_json:
        import dataclasses

        print_json({"nodes": [dataclasses.asdict(node) for node in nodes]})
        return
    table(console(), ("node", "address", "state"), [(node.name, node.address, node.state) for node in nodes])


def show_executed(rows: Sequence[Mapping[str, Any]], *, as_json: bool = False) -> Exit:
    """What a command said, hosts that said the same together, lines of its stderr marked; UNREACHABLE when a host was
    not reached, else FAILED when the command failed somewhere.
    """
    from rich.text import Text

    from bringup import looking

    if as_json:
        print_json({"hosts": {row["host"]: dict(row) for row in rows}})
    else:
        out = console()
        for hosts, row in looking.grouped(rows):
            ended = f"  (exit {row['code']})" if row["reached"] else "  (not reached)"
            ended = "" if row["code"] == 0 else ended
            out.print(Text(f"{looking.named(hosts)}{ended}", "bold red" if ended else "bold"), soft_wrap=True)
            said = [("    ", line, "") for line in looking.plain_lines(row["out"])]
            said += [("  ! ", line, "yellow") for line in looking.plain_lines(row["err"])]
            # Lines stay whole: what a command prints is copied, and a terminal breaks them by itself.
            for mark, line, style in said or [("    ", "(nothing)", "dim")]:
                out.print(Text(f"{mark}{line}", style), soft_wrap=True)
    if not all(row["reached"] for row in rows):
        return Exit.UNREACHABLE
    return Exit.FAILED if any(row["code"] for row in rows) else Exit.DONE


def show_chain(problems: Sequence[Problem], count: int, *, as_json: bool = False) -> Exit:
    """Whether the chain of records holds; FAILED when it does not."""
    if as_json:
        print_json({"runs": count, "problems": [str(problem) for problem in problems]})
    else:
        for problem in problems:
            print(problem)
        if not problems:
            print(f"The chain holds: {count} runs.")
    return Exit.FAILED if problems else Exit.DONE


def show_history(
    records: Sequence[RunRecord], inventory: str | None = None, *, as_json: bool = False
) -> None:
    """The list of runs (of an inventory), newest first."""
    if as_json:
        print_json({"runs": [brief(record) for record in records]})
        return
    if not records:
        print(f"No runs of {inventory} yet." if inventory else "No runs yet.", file=sys.stderr)
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
