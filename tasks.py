"""The commands: `invoke --list`. Each parses its flags, makes one call into bringup, and shows one report.

Everything heavy is imported inside a command, so that `invoke --list` stays quick.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
# Invoke turns bytecode off for itself; without it all of bringup would be compiled anew by each command.
sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in os.environ

from invoke import Collection, Context, Exit, task  # noqa: E402 (bytecode comes first)

from bringup import commandline, model_commands  # noqa: E402
from bringup import errors as _errors  # noqa: E402

commandline.install()

INVENTORY = "folder under inventories/, such as lab, or a path to one"
LIMIT = "hosts, groups, globs, !without, &both; separated by commas"
JSON = "print one JSON object on stdout"
YES = "agree to what is disruptive, for scripts"
UNLOCK = "break the locks of a run that is certainly dead; it is written to runs/audit.jsonl and on the nodes"
OUTSIDE = "why this cannot wait for the nodes' change windows; it is recorded"
RESUME = "an earlier run of the same (an id, a part of one, or last): hosts that it finished are left out"


def _end(code: int) -> None:
    """Ends the command with its exit code."""
    if code:
        raise Exit(code=int(code))


def _at_least(least: float, **given: float) -> None:
    """Raises UsageError that names every number below `least` by its flag."""
    low = [
        _errors.Problem(f"--{name.replace('_', '-')}", f"{value} is less than {least}")
        for name, value in given.items()
        if value < least
    ]
    if low:
        raise _errors.UsageError(low)


def _extra(pairs: Sequence[str]) -> dict[str, str]:
    """`KEY=VALUE` words as a mapping. Raises UsageError for every word without an equals sign."""
    wrong = [pair for pair in pairs if "=" not in pair]
    if wrong:
        raise _errors.UsageError([_errors.Problem("--extra", f'"{pair}" is not KEY=VALUE') for pair in wrong])
    return dict(pair.split("=", 1) for pair in pairs)


# ---------------------------------------------------------------- the main job


@task(
    help={
        "inventory": INVENTORY,
        "limit": LIMIT,
        "tags": "only these roles, separated by commas",
        "skip_tags": "all but these roles",
        "check": "show what would change, with diffs, and change nothing (exit 6: something would)",
        "full": "play all roles on all hosts, also those that are as they were left (--check does that anyway)",
        "extra": "a variable for the playbook, KEY=VALUE; can be repeated",
        "fail_fast": "stop on all hosts at the first that fails (default: the others go on)",
        "resume": RESUME,
        "outside_window": OUTSIDE,
        "force_unlock": UNLOCK,
        "json": JSON,
    },
    positional=["inventory"],
    iterable=["extra"],
)
def provision(
    c: Context,
    inventory: str,
    extra: Sequence[str],
    limit: str | None = None,
    tags: str | None = None,
    skip_tags: str | None = None,
    check: bool = False,
    full: bool = False,
    fail_fast: bool = False,
    resume: str = "",
    outside_window: str = "",
    force_unlock: bool = False,
    json: bool = False,
) -> None:
    """Bring every node of an inventory to its planned state."""
    from bringup import playbook, report

    record = playbook.run(
        "provision",
        inventory,
        limit=limit,
        tags=tags,
        skip_tags=skip_tags,
        check=check,
        extra={**_extra(extra), **({"runbook_max_fail": 0} if fail_fast else {})},
        force_unlock=force_unlock,
        outside_window=outside_window,
        resume=resume,
        trusting=not full,
        after=playbook.ask_servers,
    )
    _end(report.show_run(record, as_json=json, brief=not check))


@task(help={"inventory": INVENTORY, "limit": LIMIT, "json": JSON})
def check(c: Context, inventory: str, limit: str | None = None, json: bool = False) -> None:
    """Show how nodes differ from their plan, with diffs, and change nothing (exit 6: they differ)."""
    from bringup import playbook, report

    record = playbook.run("provision", inventory, name="check", limit=limit, check=True)
    _end(report.show_run(record, as_json=json))


@task(positional=[], help={"inventory": INVENTORY, "limit": LIMIT, "json": JSON})
def drift(c: Context, inventory: str, limit: str | None = None, json: bool = False) -> None:
    """Show at a glance what is not as provisioning left it, one look at each node (exit 6: something is not)."""
    from bringup import report, sealcheck

    rows = sealcheck.drift(inventory, limit)
    report.show_drift(rows, inventory, as_json=json)
    _end(sealcheck.drift_exit(rows))


@task(help={"inventory": INVENTORY, "limit": LIMIT, "json": JSON})
def preflight(c: Context, inventory: str, limit: str | None = None, json: bool = False) -> None:
    """Look at the nodes and say what is not as the plan needs it, each with its remedy."""
    from bringup import playbook, report

    record = playbook.run(
        "provision", inventory, name="preflight", limit=limit, tags="preflight", skip_tags="lock"
    )
    report.show_findings(record, as_json=json)
    _end(record.exit_code or 0)


@task(
    help={
        "inventory": INVENTORY,
        "limit": LIMIT,
        "units": "with the text of each unit",
        "json": JSON,
    }
)
def plan(
    c: Context, inventory: str, limit: str | None = None, units: bool = False, json: bool = False
) -> None:
    """Show offline what will run on each host: command line, memory arithmetic, findings."""
    from bringup import plan as plans
    from bringup import report

    report.show_plan(plans.load(inventory), limit, units=units, as_json=json)


# ---------------------------------------------------------------- the servers


@task(
    help={
        "inventory": INVENTORY,
        "limit": LIMIT,
        "service": "only this service",
        "watch": "show it again every few seconds, until Ctrl-C",
        "json": JSON,
    }
)
def status(
    c: Context,
    inventory: str,
    limit: str | None = None,
    service: str | None = None,
    watch: bool = False,
    json: bool = False,
) -> None:
    """Show every server: its unit, whether a real token comes back, model, uptime, restarts, log size."""
    from bringup import looking, report

    chosen = looking.targets(inventory, limit, service)
    if watch:
        report.watch_status(looking.watch(chosen), inventory, as_json=json)
        return
    rows = looking.status(chosen)
    report.show_status(rows, as_json=json)
    _end(looking.exit_of(rows))


@task(
    help={
        "inventory": INVENTORY,
        "limit": LIMIT,
        "service": "only this service",
        "lines": "how many lines of each log",
        "follow": "go on with new lines, through rotations, until Ctrl-C",
        "last_crash": "what the journal and the log say about the last failure",
        "json": JSON,
    }
)
def logs(
    c: Context,
    inventory: str,
    limit: str | None = None,
    service: str | None = None,
    lines: int = 50,
    follow: bool = False,
    last_crash: bool = False,
    json: bool = False,
) -> None:
    """Show the servers' logs, of many hosts at once, each line with where it is from."""
    from bringup import looking, report

    _at_least(0, lines=lines)
    if follow and last_crash:
        raise _errors.UsageError(_errors.Problem("--follow", "contradicts --last-crash, which is over"))
    chosen = looking.targets(inventory, limit, service)
    if last_crash:
        _end(report.show_crashes(looking.crashes(chosen, lines), as_json=json)[0])
    else:
        found = looking.logs(chosen, lines, follow=follow)
        _end(report.show_logs(found, as_json=json, as_it_comes=follow))


@task(
    positional=[],
    help={
        "inventory": INVENTORY,
        "limit": LIMIT,
        "service": "only this service",
        "prompt": "what to say",
        "tokens": "how many tokens the answer may have",
        "json": JSON,
    },
)
def ask(
    c: Context,
    inventory: str,
    limit: str | None = None,
    service: str | None = None,
    prompt: str = "Say hello in one sentence.",
    tokens: int = 32,
    json: bool = False,
) -> None:
    """Ask every server for a chat completion over its own API, and print the answers."""
    from bringup import looking, report

    rows = looking.ask(looking.targets(inventory, limit, service), prompt, tokens)
    report.show_answers(rows, as_json=json)
    _end(looking.answers_exit(rows))


@task(
    help={
        "inventory": INVENTORY,
        "limit": LIMIT,
        "service": "only this service",
        "rolling": "--no-rolling: all hosts at once, without asking each other",
        "check": "show what would be restarted and restart nothing",
        "yes": YES,
        "outside_window": OUTSIDE,
        "force_unlock": UNLOCK,
        "json": JSON,
    }
)
def restart(
    c: Context,
    inventory: str,
    limit: str | None = None,
    service: str | None = None,
    rolling: bool = True,
    check: bool = False,
    yes: bool = False,
    outside_window: str = "",
    force_unlock: bool = False,
    json: bool = False,
) -> None:
    """Restart servers, one host after the other, each drained before and verified by a real token after."""
    from bringup import report
    from bringup import runbooks as books

    record = books.run(
        "restart-servers",
        inventory,
        limit=limit,
        serial="1" if rolling else "100%",
        check=check,
        yes=yes,
        extra=books.restart_variables(service, rolling=rolling),
        force_unlock=force_unlock,
        outside_window=outside_window,
    )
    _end(report.show_run(record, as_json=json, brief=True))


@task(
    help={
        "inventory": INVENTORY,
        "limit": LIMIT,
        "check": "show what is left and remove nothing (exit 6: something is)",
        "yes": YES,
        "json": JSON,
    }
)
def cleanup(
    c: Context,
    inventory: str,
    limit: str | None = None,
    check: bool = False,
    yes: bool = False,
    json: bool = False,
) -> None:
    """Remove what crashed servers left: processes outside of units, shared memory, taken ports and GPUs."""
    from bringup import report
    from bringup import runbooks as books

    record = books.run("clean-up-leftovers", inventory, limit=limit, check=check, yes=yes)
    _end(report.show_run(record, as_json=json))


@task(
    positional=[],
    iterable=["role"],
    help={
        "inventory": INVENTORY,
        "limit": LIMIT,
        "role": "only this role; can be repeated (without it: all, the last first)",
        "while_serving": "`drain`: let requests end and stop servers that are up; else they are refused",
        "check": "show what would be brought back and change nothing",
        "yes": YES,
        "outside_window": OUTSIDE,
        "force_unlock": UNLOCK,
        "json": JSON,
    },
)
def undo(
    c: Context,
    inventory: str,
    role: Sequence[str],
    limit: str | None = None,
    while_serving: str = "refuse",
    check: bool = False,
    yes: bool = False,
    outside_window: str = "",
    force_unlock: bool = False,
    json: bool = False,
) -> None:
    """Bring nodes back to what they were before provisioning, or take back what single roles changed."""
    from bringup import report, undoing

    record = undoing.run(
        inventory,
        role,
        limit=limit,
        while_serving=while_serving,
        check=check,
        yes=yes,
        force_unlock=force_unlock,
        outside_window=outside_window,
    )
    _end(report.show_run(record, as_json=json))


@task(positional=[], help={"inventory": INVENTORY, "limit": LIMIT})
def ssh(c: Context, inventory: str, limit: str) -> None:
    """Open a shell on a node, as Ansible reaches it."""
    from bringup import fleet, remote

    _end(remote.shell(fleet.one_host(inventory, limit)))


@task(
    name="exec",
    help={
        "inventory": INVENTORY,
        "limit": LIMIT,
        "at_once": "how many hosts at the same time",
        "seconds": "how long the command may take on a host",
        "yes": YES,
        "json": JSON,
    },
)
def execute(
    c: Context,
    inventory: str,
    limit: str | None = None,
    at_once: int = 16,
    seconds: int = 60,
    yes: bool = False,
    json: bool = False,
) -> None:
    """Run a command on many hosts (`invoke exec --inventory X -- uptime`); equal output is shown once."""
    from bringup import confirm, fleet, looking, report
    from bringup import inventory as inventories

    command = commandline.remainder()
    if not command:
        raise _errors.UsageError("exec: nothing to run. Put the command after --, as in: -- uptime")
    _at_least(1, at_once=at_once, seconds=seconds)
    names = fleet.matching(fleet.groups_of(inventory), limit)
    confirm.disruptive(f"exec {command}", inventories.folder_of(inventory).name, names, yes=yes)
    rows = looking.execute(fleet.hosts_of(inventory, names), command, at_once, seconds)
    _end(report.show_executed(rows, as_json=json))


# ---------------------------------------------------------------- runbooks


@task(positional=[], help={"json": JSON})
def runbooks(c: Context, json: bool = False) -> None:
    """List the runbooks: when to use each, what it does, whether it disrupts, how long it takes."""
    from bringup import report
    from bringup import runbooks as books

    report.show_runbooks(books.listed(), as_json=json)


@task(
    positional=["name", "inventory"],
    iterable=["extra"],
    help={
        "name": "a runbook, as `invoke runbooks` lists them",
        "inventory": INVENTORY,
        "extra": "a variable for the runbook, KEY=VALUE; can be repeated",
        "limit": LIMIT,
        "serial": "hosts at a time (a number or a percentage), after the first, the canary; 100%: all at once",
        "max_fail": "percent of hosts that may fail before the rest is left alone (--fail-fast is 0)",
        "fail_fast": "stop at the first host that fails, which is the default",
        "keep_going": "go on with the other hosts whatever fails (--max-fail 100)",
        "check": "show what would change and change nothing",
        "resume": RESUME,
        "yes": YES,
        "outside_window": OUTSIDE,
        "force_unlock": UNLOCK,
        "json": JSON,
    },
)
def run(
    c: Context,
    name: str,
    inventory: str,
    extra: Sequence[str],
    limit: str | None = None,
    serial: str = "1",
    max_fail: int = 0,
    fail_fast: bool = False,
    keep_going: bool = False,
    check: bool = False,
    resume: str = "",
    yes: bool = False,
    outside_window: str = "",
    force_unlock: bool = False,
    json: bool = False,
) -> None:
    """Run a runbook on an inventory: one host at a time, confirmed, locked and recorded."""
    from bringup import report
    from bringup import runbooks as books

    record = books.run(
        name,
        inventory,
        limit=limit,
        serial=serial,
        max_fail=books.failures_allowed(max_fail, fail_fast=fail_fast, keep_going=keep_going),
        check=check,
        yes=yes,
        extra=_extra(extra),
        force_unlock=force_unlock,
        outside_window=outside_window,
        resume=resume,
    )
    _end(report.show_run(record, as_json=json, brief=not check))


# ---------------------------------------------------------------- why it failed


@task(
    positional=["log"],
    help={
        "log": "a log, a folder, an archive, or - for standard input (which is read too when it is a pipe)",
        "inventory": "look at the nodes of this inventory instead: journals, logs of the last failure, kernel",
        "limit": LIMIT,
        "explain": "all that is known about a cause, by its name",
        "json": JSON,
    },
)
def diagnose(
    c: Context,
    log: str | None = None,
    inventory: str | None = None,
    limit: str | None = None,
    explain: str | None = None,
    json: bool = False,
) -> None:
    """Find the known causes in a log or on live nodes, and what to do (exit 4: one was found)."""
    from bringup import diagnose as diagnosis
    from bringup import looking, report

    if explain:
        report.show_cause(diagnosis.explain(explain), as_json=json)
    elif inventory:
        rows = looking.evidence(looking.targets(inventory, limit), looking.CRASH_LINES)
        code, found = report.show_crashes(
            rows, contexts=looking.contexts(inventory), shown=looking.LINES_SHOWN, as_json=json
        )
        _end(_errors.Exit.FAILED if found else code)
    elif log or commandline.piped():
        _end(report.show_diagnosis(diagnosis.of_paths([log or "-"]), as_json=json))
    else:
        raise _errors.UsageError("diagnose: name a log, or --inventory, or --explain CAUSE")


@task(
    name="add",
    positional=["cause"],
    iterable=["line"],
    help={
        "cause": "a name for it, such as cuda-out-of-memory",
        "line": "a line of the log that shows it; can be repeated",
        "title": "one line for people",
        "area": "what it is about; a wrong one lists them all",
        "meaning": "what happened",
        "check": "how to make sure",
        "remedy": "what to do",
        "source": "where this is known from: an address",
        "json": JSON,
    },
)
def failures_add(
    c: Context,
    cause: str,
    line: Sequence[str],
    title: str = "",
    area: str = "",
    meaning: str = "",
    check: str = "",
    remedy: str = "",
    source: str = "",
    json: bool = False,
) -> None:
    """Write a known failure into the catalog, from lines of a log."""
    from bringup import failures, report

    answers = {
        "title": title,
        "area": area,
        "meaning": meaning,
        "check": check,
        "remedy": remedy,
        "source": source,
    }
    if sys.stdin.isatty():
        answers = failures.asked(answers)
    report.show_written(failures.add(cause, list(line), answers), as_json=json)


@task(name="docs", positional=[], help={"json": JSON})
def failures_docs(c: Context, json: bool = False) -> None:
    """Write the page of all known failures from the catalog."""
    from bringup import failuredocs, report

    report.show_written(failuredocs.write(), as_json=json)


@task(
    name="lock",
    positional=["engine"],
    help={
        "engine": "an engine version of the catalog, such as vllm-0.33.0",
        "arch": "x86_64 or aarch64",
        "json": JSON,
    },
)
def envs_lock(c: Context, engine: str, arch: str = "x86_64", json: bool = False) -> None:
    """Resolve an engine's environment and write its lock, every file with its hash (needs uv)."""
    from bringup import envlock, report

    path, _ = envlock.lock(engine, arch)
    report.show_written(path, as_json=json)


# ---------------------------------------------------------------- measuring


@task(
    help={
        "inventory": INVENTORY,
        "limit": LIMIT,
        "service": "only this service",
        "suite": "a suite of catalog/suites",
        "scale": "prompts and answers at this share of their length, such as 0.1 (for slow servers; named so)",
        "against": "compare with: profile (its own measurement) or a profile, an earlier bench run (last: the "
        "newest that measured these servers), or a file",
        "json": JSON,
    }
)
def bench(
    c: Context,
    inventory: str,
    limit: str | None = None,
    service: str | None = None,
    suite: str = "smoke",
    scale: float = 1.0,
    against: str | None = None,
    json: bool = False,
) -> None:
    """Measure servers under a suite of loads and judge against a measurement (exit 7: a gate failed)."""
    from bringup import measuring, report

    record, result, compared = measuring.run(
        inventory, suite, limit=limit, service=service, against=against, scale=scale, say=report.say
    )
    _end(report.show_bench(record, result, compared, as_json=json))


@task(
    help={
        "inventory": INVENTORY,
        "limit": "the one host on which settings are tried (default: the first that has the service)",
        "service": "which service, when the host has more than one",
        "resume": "go on with an interrupted run, by its id, a part of it, or `last`",
        "write": "write the picked profile into the catalog as well",
        "yes": YES,
        "json": JSON,
    },
)
def tune(
    c: Context,
    inventory: str,
    limit: str | None = None,
    service: str | None = None,
    resume: str | None = None,
    write: bool = False,
    yes: bool = False,
    json: bool = False,
) -> None:
    """Try a profile's tuning settings on one server, pick one by measurement, and put the server back."""
    from bringup import report, tuning

    tuned = tuning.run(inventory, limit, service=service, resume=resume, write=write, yes=yes, say=report.say)
    _end(report.show_tuned(tuned, as_json=json))


# ---------------------------------------------------------------- flags


@task(
    name="check",
    default=True,
    positional=[],
    help={
        "engine": "the engine (default: read from the line)",
        "version": "its version (default: read from the line, else the newest known)",
        "gpu": "a GPU or platform, such as h20, gh200-2x or sm90",
        "json": JSON,
    },
)
def flags_check(
    c: Context,
    engine: str | None = None,
    version: str | None = None,
    gpu: str | None = None,
    json: bool = False,
) -> None:
    """Check a launch line from anywhere: `invoke flags --engine NAME -- LINE` (exit 2: it is wrong)."""
    from bringup import flagcheck, report

    line = commandline.remainder() or ("" if sys.stdin.isatty() else sys.stdin.read())
    if not line.strip():
        raise _errors.UsageError("flags: no launch line. Put it after --, or on standard input")
    checked = flagcheck.check_line(line, engine, version, gpu)
    if json:
        report.print_json(checked.as_json())
    else:
        checked.show(report.console())
    _end(checked.exit)


@task(
    name="table",
    positional=["engine"],
    help={
        "engine": "the engine",
        "version": "its version",
        "wheel": "its wheel (default: downloaded)",
        "json": JSON,
    },
)
def flags_table(
    c: Context, engine: str, version: str | None = None, wheel: str | None = None, json: bool = False
) -> None:
    """Make or renew the table of an engine version's flags, from its wheel."""
    from bringup import flagcheck, report

    path = flagcheck.renew(engine, version, Path(wheel) if wheel else None)
    report.show_written(path, as_json=json)


# ---------------------------------------------------------------- records


@task(
    name="list",
    default=True,
    positional=[],
    help={
        "inventory": "only runs of this inventory",
        "number": "how many of the newest",
        "verify": "check the chain of records instead: was one changed, removed or moved?",
        "json": JSON,
    },
)
def history_list(
    c: Context, inventory: str | None = None, number: int = 20, verify: bool = False, json: bool = False
) -> None:
    """List the runs: who did what where, how it ended, how long it took."""
    from bringup import report, runindex, runs

    _at_least(1, number=number)
    if verify:
        _end(report.show_chain(runs.verify(), len(runs.ids()), as_json=json))
    else:
        # By the folder's name, also when the folder is gone: records outlive inventories.
        name = Path(inventory).name if inventory else None
        report.show_history(runindex.listed(name, number), name, as_json=json)


@task(
    name="show",
    help={"run": "a run's id, a part of one that is unique, or `last`", "diffs": "with diffs", "json": JSON},
)
def history_show(c: Context, run: str, diffs: bool = False, json: bool = False) -> None:
    """Show one run again: its table, failures, causes and answers."""
    from bringup import report, runs

    report.show_run(runs.find(run), as_json=json, brief=not diffs)


@task(name="diff", help={"first": "a run", "second": "another run", "json": JSON})
def history_diff(c: Context, first: str, second: str, json: bool = False) -> None:
    """Show what differs between two runs."""
    from bringup import report, runs

    one, other = runs.find(first), runs.find(second)
    report.show_diff(runs.diff(one, other), one.id, other.id, as_json=json)


@task(
    name="replay",
    help={"run": "a run's id, a part of one that is unique, or `last`", "yes": YES, "json": JSON},
)
def history_replay(c: Context, run: str, yes: bool = False, json: bool = False) -> None:
    """Run an earlier run again, with the same arguments, after showing them and asking."""
    from bringup import replay, report

    record = replay.run(run, yes=yes)
    _end(report.show_run(record, as_json=json, brief=True))


# ---------------------------------------------------------------- the lab


@task(positional=[], help={"nodes": "how many (lab-01, lab-02, ...)", "json": JSON})
def up(c: Context, nodes: int = 2, json: bool = False) -> None:
    """Boot lab nodes: systemd in containers, reached over SSH (makes engine and image on first use)."""
    from bringup import lab, report

    report.show_nodes(lab.up(nodes), as_json=json)


@task(positional=[], help={"everything": "also stop the engine and remove what the lab keeps", "json": JSON})
def down(c: Context, everything: bool = False, json: bool = False) -> None:
    """Remove the lab's nodes."""
    from bringup import lab, report

    gone = lab.down(everything=everything)
    if json:
        report.print_json({"removed": gone})


@task(name="ssh", help={"node": "such as lab-01"})
def lab_ssh(c: Context, node: str) -> None:
    """Open a shell on a lab node."""
    from bringup import lab

    _end(lab.ssh(node))


# ---------------------------------------------------------------- twins


@task(name="up", help={"inventory": INVENTORY, "limit": LIMIT, "json": JSON})
def twins_up(c: Context, inventory: str, limit: str | None = None, json: bool = False) -> None:
    """Boot twins of an inventory's hosts: containers that wear their hardware. `--twins` does it by itself."""
    from bringup import report, twins

    folder = twins.dress(inventory, limit=limit)
    if json:
        report.print_json({"inventory": str(folder)})
    else:
        print(folder)


@task(
    name="down",
    positional=[],
    help={"inventory": "only the twins of this inventory (default: all)", "json": JSON},
)
def twins_down(c: Context, inventory: str = "", json: bool = False) -> None:
    """Remove every twin, or those of one inventory."""
    from bringup import report, twins

    gone = twins.down(inventory=inventory)
    if json:
        report.print_json({"removed": gone})


@task(name="faults", positional=[], help={"json": JSON})
def twins_faults(c: Context, json: bool = False) -> None:
    """List the faults that `--twins --fault NAME` can put in, and what preflight says of each."""
    from bringup import report, twins

    rows = [
        {"name": one.name, "code": one.code or "", "title": one.title, "needs": one.needs}
        for one in twins.faults().values()
    ]
    if json:
        report.print_json({"faults": rows})
        return
    names = ("name", "code", "title")
    report.table(report.console(), names, [[row[name] for name in names] for row in rows])


@task(
    name="record",
    help={
        "inventory": INVENTORY,
        "limit": "one host",
        "folder": "where to write (default: tests/facts/<host>)",
        "json": JSON,
    },
)
def twins_record(
    c: Context, inventory: str, limit: str, folder: str | None = None, json: bool = False
) -> None:
    """Record a real node's hardware, so that twins can wear it; what identifies the machine is blanked."""
    from bringup import fleet, plan, report, twins

    host = fleet.one_host(inventory, limit)
    to = Path(folder) if folder else twins.FACTS / plan.load(inventory).host(host.name).platform
    made = twins.record(host, to)
    if json:
        report.print_json({"folder": str(made)})
    else:
        print(made)


# ---------------------------------------------------------------- this checkout


@task(positional=[], help={"json": JSON})
def lint(c: Context, json: bool = False) -> None:
    """Run every linter, as CI does."""
    from bringup import checking

    _end(checking.stages(("lint",), as_json=json))


@task(name="test", positional=[], iterable=["only"], help={"only": "a stage; can be repeated", "json": JSON})
def check_all(c: Context, only: Sequence[str], json: bool = False) -> None:
    """Run everything that CI runs: lint, unit and content tests, role scenarios, end to end."""
    from bringup import checking

    _end(checking.stages(tuple(only), as_json=json))


def _collection(name: str, *tasks: Any) -> Collection:
    made = Collection(name)
    for one in tasks:
        made.add_task(one)
    return made


ns = Collection(
    provision,
    check,
    drift,
    preflight,
    plan,
    status,
    logs,
    ask,
    restart,
    cleanup,
    undo,
    ssh,
    execute,
    runbooks,
    run,
    diagnose,
    bench,
    tune,
    lint,
    check_all,
)
ns.add_collection(_collection("envs", envs_lock))
ns.add_collection(_collection("failures", failures_add, failures_docs))
ns.add_collection(_collection("flags", flags_check, flags_table))
ns.add_collection(_collection("history", history_list, history_show, history_diff, history_replay))
ns.add_collection(_collection("lab", up, down, lab_ssh))
ns.add_collection(_collection("twins", twins_up, twins_down, twins_faults, twins_record))
ns.add_collection(model_commands.collection())
