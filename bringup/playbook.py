"""One playbook through ansible-runner, from the resolved plan to a finished record (I/O).

`run` is the whole way: plan, lab, lock, record, play, causes, record. `play` is the middle of it:
ansible-runner in a thread of its own, whose event handler only fills a queue, so a slow terminal never
stalls the play.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from bringup import ROOT, events, fleet, handed, known, lock, players, progress, redact, runs, seal
from bringup import inventory as inventories
from bringup.errors import BringupError, Exit, Problem, UsageError, unknown
from bringup.known import Known

PLAYBOOKS = ROOT / "playbooks"

PROMPT = "Say hello in one sentence."
PROMPT_TOKENS = 24
TICK_S = 0.2
STOP_GRACE_S = 10.0
"""After Ctrl-C: time for Ansible to end its workers before they are killed."""

OUTPUT_LINES_KEPT = 400
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


After = Callable[[Known, events.Outcome, str], tuple[Mapping[str, Any], ...]]
"""What is asked when a run succeeded: (plan, outcome, inventory as the operator named it) -> answers."""


@dataclass(frozen=True)
class Job:
    """What ansible-playbook is asked to do; paths are absolute. `trusting`: what a node finds as it was left by an
    earlier run is not played again. `plan`: what the inventory plugin need not work out again. `narrow`: leave out of
    the playbook what the tags leave out of it.
    """

    playbook: Path
    inventory: Path
    limit: str | None = None
    tags: str | None = None
    skip_tags: str | None = None
    check: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)
    forks: int | None = None
    trusting: bool = False
    plan: Known | None = None
    narrow: bool = False


@dataclass(frozen=True)
class Played:
    """How a job ended: ansible-runner's status, whether Ansible came to its end, and what it printed beside
    events.
    """

    status: str
    outcome: events.Outcome
    ended: bool
    interrupted: bool
    output: tuple[str, ...] = ()


NOTHING_PLAYED = Played("successful", events.Outcome(), ended=True, interrupted=False)


def run(
    playbook: str,
    inventory: str,
    *,
    name: str | None = None,
    limit: str | None = None,
    tags: str | None = None,
    skip_tags: str | None = None,
    check: bool = False,
    extra: Mapping[str, Any] | None = None,
    force_unlock: bool = False,
    outside_window: str = "",
    resume: str = "",
    locked: bool = False,
    trusting: bool = False,
    view: progress.Progress | None = None,
    after: After | None = None,
) -> runs.RunRecord:
    """Runs `playbooks/<playbook>.yml` on an inventory and gives its finished record.

    `name` is how the run is called (default: the playbook). `after` is called when everything succeeded and
    gives what servers answered, for the record. `locked`: the caller holds the inventory's lock.
    `outside_window`: why nodes are changed outside of their windows; `resume`: an earlier run of the same,
    whose finished hosts are left out. `trusting`: roles that a node finds as they were left are not played (never in
    check mode, which shows what Ansible itself says). Raises UsageError with every problem of intent or catalog
    (before any node is contacted) and Locked.
    """
    seen = view or progress.choose()
    path = playbook_path(playbook)
    with players.Ahead(path) as ahead:
        plan = known.load(inventory, before=ahead.begin, keep=False)
        check_limit(plan, limit)
        if playbook == "provision" and tags != "preflight":
            check_complete(plan)
        left = remaining(plan, playbook, limit, resume) if resume else limit
        more: dict[str, Any] = {"run_outside_window": outside_window} if outside_window else {}
        more |= {"run_force_unlock": True} if force_unlock else {}
        trusting = trusting and not check
        job = Job(
            path,
            plan.folder,
            left,
            tags,
            skip_tags,
            check,
            {**(extra or {}), **more},
            trusting=trusting,
            plan=plan,
        )
        name = name or playbook.removeprefix("runbooks/")
        arguments = {
            "playbook": playbook,
            "inventory": inventory,
            "limit": left,
            "tags": tags,
            "skip_tags": skip_tags,
            "check": check,
            "extra": dict(extra or {}),
            "outside_window": outside_window,
            "resume": resume,
            "full": not trusting,
        }
        try:
            with (
                signals() as caught,
                nullcontext(())
                if locked
                else lock.hold(plan.inventory, f"{name} {inventory}", force=force_unlock) as notes,
            ):
                record = runs.begin(name, plan.inventory, arguments, plan_digest=plan.digest, notes=notes)
                return _recorded(record, job, plan, seen, caught, after, ahead.player)
        finally:
            seen.close()


def _recorded(
    record: runs.RunRecord,
    job: Job,
    plan: Known,
    seen: progress.Progress,
    caught: Caught,
    after: After | None,
    begun: players.Player | None,
) -> runs.RunRecord:
    """Prepares and plays; whatever happens, the record is finished."""
    outcome, code, more = events.Outcome(), Exit.INTERNAL, dict[str, Any]()
    try:
        prepare(plan, job, seen)
        left = look_at_seals(record, job, plan, seen)
        if left.job is None:
            plan.keep()
        played = play(left.job, record.folder, seen, caught, begun) if left.job else NOTHING_PLAYED
        outcome = with_sealed(played.outcome, left)
        code = code_of(played, check=job.check) if left.job else Exit.DONE
        if code is Exit.INTERNAL and not outcome.errors:
            more["errors"] = tuple(played.output[-20:])
        try:
            more["causes"] = causes_of(played)
        except BringupError as error:
            # a wrong failure rule must not hide the failure itself
            more["errors"] = (f"causes were not looked up, catalog/failures is wrong: {error.problems[0]}",)
        if code is Exit.DONE and after is not None and not job.check:
            with progress.waiting("asking the servers for a completion", seen):
                more["answers"] = after(plan, outcome, str(record.arguments["inventory"]))
    except KeyboardInterrupt:
        code = Exit.INTERRUPTED
    except Exception as error:
        code = error.code if isinstance(error, BringupError) else Exit.INTERNAL
        caught.counting = True
        _finished(record, code, _with_errors(outcome, (redact.text(str(error)),)))
        raise
    caught.counting = True
    errors = more.pop("errors", ())
    return _finished(record, code, _with_errors(outcome, errors), **more)


def _finished(record: runs.RunRecord, code: Exit, outcome: events.Outcome, **more: Any) -> runs.RunRecord:
    from bringup import webpage

    finished = runs.finish(record, code, outcome, **more)
    for note in outcome.notes:
        if "--force-unlock" in note:
            entry = {"what": "force-unlock", "run": record.id, "by": record.who, "said": note}
            runs.append_line(runs.FOLDER / "audit.jsonl", entry)
    webpage.write(finished)
    return finished


def _with_errors(outcome: events.Outcome, errors: tuple[str, ...]) -> events.Outcome:
    return dataclasses.replace(outcome, errors=(*outcome.errors, *errors))


def ask_servers(plan: Known, outcome: events.Outcome, inventory: str) -> tuple[Mapping[str, Any], ...]:
    """A real completion from each server of the hosts that were played, for the end of the report."""
    from bringup import looking, remote

    hosts = [host for host in plan.hosts if host.name in outcome.hosts and host.services]
    reached = plan.reach([host.name for host in hosts])
    chosen = [looking.Target(host, planned.services) for host, planned in zip(reached, hosts, strict=True)]
    try:
        return tuple(looking.ask(chosen, PROMPT, PROMPT_TOKENS))
    finally:
        remote.close_all()


def playbook_path(name: str) -> Path:
    """The file of a playbook named as operators name it. Raises UsageError with a suggestion."""
    path = PLAYBOOKS / f"{name}.yml"
    if not path.is_file():
        known = [str(one.relative_to(PLAYBOOKS).with_suffix("")) for one in PLAYBOOKS.rglob("*.yml")]
        raise UsageError(Problem("playbooks", *unknown("playbook", name, known)))
    return path


def check_complete(plan: Known) -> None:
    """Raises UsageError when locks are missing: such a plan can be looked at, and that is all."""
    if plan.lacking:
        raise UsageError(plan.lacking)


def check_limit(plan: Known, limit: str | None) -> None:
    """Raises UsageError when --limit names no host of the inventory."""
    if limit:
        fleet.matching(plan.groups, limit)


def remaining(plan: Known, playbook: str, limit: str | None, resume: str) -> str:
    """The hosts of `limit` that the run `resume` did not finish, as a limit. Raises UsageError when it was
    another run, and when none is left.
    """
    before = runs.find(resume)
    where = f"--resume {before.id}"
    problems = [
        Problem(where, f"it was {what} {was}, and this is {now}")
        for what, was, now in (
            ("inventory", before.inventory, plan.inventory),
            ("playbook", before.arguments.get("playbook"), playbook),
        )
        if was != now
    ]
    if not problems and before.arguments.get("check"):
        problems.append(Problem(where, "it was a --check, which finishes no host"))
    if problems:
        raise UsageError(problems)
    asked = limit or before.arguments.get("limit")
    done = set(runs.finished_hosts(before))
    names = fleet.matching(plan.groups, asked)
    left = [name for name in names if name not in done]
    if not left:
        raise UsageError(Problem(where, f"its {len(names)} hosts are all done; nothing is left to do"))
    return ",".join(left)


def prepare(plan: Known, job: Job, seen: progress.Progress) -> None:
    """What a play needs beside it: the nodes of the lab, when that is the inventory."""
    hosts = fleet.matching(plan.groups, job.limit)
    if job.inventory == inventories.INVENTORIES / "lab":
        from bringup import lab

        lab.up(hosts, say=seen.note)


@dataclass(frozen=True)
class Left:
    """What is left of a job (None: nothing), the roles by host that were found as they were left, and what to say."""

    job: Job | None
    sealed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def look_at_seals(record: runs.RunRecord, job: Job, plan: Known, seen: progress.Progress) -> Left:
    """Asks every node how its seals hold, and leaves out of the job what need not be played.

    What the nodes are to be sealed with afterwards is put beside the record.
    """
    from bringup import sealcheck

    if job.check:
        return Left(job)
    names = fleet.matching(plan.groups, job.limit)
    if job.playbook != playbook_path("provision"):
        wanted = _wanted(job, plan, names)
        # Of a runbook's roles those are sealed that recorded something, unless it plays all of them.
        all_of_them = "import_playbook: ../provision.yml" in job.playbook.read_text(encoding="utf-8")
        seal.write_run(record.folder, wanted, wanted if all_of_them else {})
        return Left(job)
    if not job.trusting:
        wanted = _wanted(job, plan, names)
        seal.write_run(record.folder, wanted, wanted)
        return Left(_narrowed(job, wanted, {}, _idle(job, plan, names)))
    asked = sealcheck.Asked(plan.reach(names))
    with progress.waiting(asked.__str__, seen), ThreadPoolExecutor(1, thread_name_prefix="seals") as beside:
        # Where the plan is another, most likely something is played: then Ansible has these connections already.
        answers = beside.submit(sealcheck.verdicts, asked, quick=not plan.is_other)
        # Meanwhile.
        wanted, idle = _wanted(job, plan, names), _idle(job, plan, names)
        verdicts = answers.result()
    due = seal.due(verdicts, wanted)
    seal.write_run(record.folder, wanted, due)
    sealed = {host: tuple(role for role in wanted[host] if role not in due[host]) for host in names}
    return Left(_narrowed(job, due, sealed, idle), sealed, seal.notes(verdicts, due))


def _wanted(job: Job, plan: Known, names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Host -> role that the run's tags pick -> digest of what goes into it."""
    from bringup import sealcheck

    return {
        host: {role: digest for role, digest in roles.items() if _is_selected(role, job)}
        for host, roles in sealcheck.inputs(plan, job.extra).items()
        if host in names
    }


def _idle(job: Job, plan: Known, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Host -> roles that have nothing to do there; none where variables of this run may say otherwise."""
    if any(name.startswith(tuple(f"{role}_" for role in seal.IDLE)) for name in job.extra):
        return {}
    return {name: plan.idle[name] for name in names}


def _is_selected(role: str, job: Job) -> bool:
    """Do the run's tags pick this role?"""
    only, without = (set(filter(None, (text or "").split(","))) for text in (job.tags, job.skip_tags))
    return (not only or bool(only & {role, "all"})) and role not in without


def _narrowed(
    job: Job,
    due: Mapping[str, Any],
    sealed: Mapping[str, Sequence[str]],
    idle: Mapping[str, Sequence[str]],
) -> Job | None:
    """The job for hosts and roles that are due only; None when none is. A role that is due and has nothing to do is
    sealed at the end and not played."""
    hosts = [host for host, roles in due.items() if roles]
    if not hosts:
        return None
    left_out = {host: {*sealed.get(host, ()), *idle.get(host, ())} for host in hosts}
    played = dict.fromkeys(role for host in hosts for role in due[host] if role not in left_out[host])
    spared: dict[str, list[str]] = {}
    for host in hosts:
        for role in sorted(left_out[host]):
            spared.setdefault(role, []).append(host)
    limit = job.limit if len(hosts) == len(due) else ",".join(hosts)
    tags = ",".join(played or ("lock",)) if spared else job.tags
    extra = {**job.extra, "provision_sealed": spared}
    return dataclasses.replace(job, limit=limit, tags=tags, extra=extra, narrow=bool(spared))


def with_sealed(outcome: events.Outcome, left: Left) -> events.Outcome:
    """The outcome with what was found sealed; a host on which nothing was played is done."""
    hosts = {}
    for name, sealed in left.sealed.items():
        host = outcome.hosts.get(name, events.HostOutcome(done=True))
        # Ansible tells of their skipped tasks all the same.
        played = {role: one for role, one in host.roles.items() if role not in sealed}
        hosts[name] = dataclasses.replace(host, sealed=sealed, roles=played)
    notes = (*left.notes, *outcome.notes)
    return dataclasses.replace(outcome, hosts={**outcome.hosts, **hosts}, notes=notes)


def play(
    job: Job,
    folder: Path,
    seen: progress.Progress,
    caught: Caught | None = None,
    begun: players.Player | None = None,
) -> Played:
    """Plays one job; results go to `folder`/events.jsonl without secrets. Ctrl-C ends it and all its
    processes. `begun`: an Ansible that has been started for it.
    """
    caught = caught or Caught()
    player = begun or players.begin(job.playbook, job.inventory)
    thread, inbox, private = player.thread, player.inbox, player.private
    player.told(_argv(job, private), _environment(job, folder.name, private))
    if job.plan is not None:
        # Ansible is on its way.
        job.plan.keep()
    tally = events.Tally()
    output: list[str] = []
    stop = _Stop(caught)
    caught.counting = True
    descriptor = os.open(folder / "events.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    # Line by line: what a controller had seen before it was killed is what a resumed run goes by.
    with os.fdopen(descriptor, "a", buffering=1, encoding="utf-8") as log:
        while thread.is_alive() or not inbox.empty():
            for event in _waiting(inbox):
                if not event:
                    thread.join(TICK_S)
                failure = tally.feed(event)
                if failure is not None and failure.kind != "ignored":
                    seen.failed(failure)
                _keep(event, log, output)
            seen.update(tally)
            if not stop.tick():
                break
    player.close()
    caught.counting = False
    return Played(
        status=str(player.runner.status),
        outcome=tally.outcome(),
        ended=tally.ended,
        interrupted=stop.begun,
        output=tuple(output[-OUTPUT_LINES_KEPT:]),
    )


def code_of(played: Played, *, check: bool = False) -> Exit:
    """The exit code of a played job. A job that never started, or died in the middle, is never a success."""
    if played.interrupted:
        return Exit.INTERRUPTED
    code = events.exit_code(played.outcome, check=check)
    if code in (Exit.DONE, Exit.PENDING) and not (played.ended and played.status == "successful"):
        return Exit.FAILED if played.status == "timeout" else Exit.INTERNAL
    return code


def causes_of(played: Played) -> tuple[Mapping[str, Any], ...]:
    """Known causes found in the words of the failures, each once: what is known about it, and on which
    hosts.
    """
    fatal = played.outcome.fatal
    if not fatal:
        return ()
    from bringup import diagnose

    found: dict[str, dict[str, Any]] = {}
    for failure in fatal:
        cause = diagnose.of_text(failure.message).first
        if cause is not None:
            entry = found.setdefault(cause.cause, {**_cause(cause), "hosts": []})
            if failure.host not in entry["hosts"]:
                entry["hosts"].append(failure.host)
    return tuple(found.values())


def _cause(cause: Any) -> dict[str, Any]:
    names = ("cause", "title", "meaning", "check", "remedy", "runbook", "confidence")
    return {name: getattr(cause, name) for name in names}


@dataclass
class Caught:
    """Signals seen since the handlers were installed. While `counting`, they wait for the play to end
    itself.
    """

    count: int = 0
    counting: bool = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if not self.counting:
            raise KeyboardInterrupt


@contextmanager
def signals() -> Iterator[Caught]:
    """Makes Ctrl-C, TERM and HUP the same, so that the record gets written."""
    caught = Caught()
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    before = {number: signal.signal(number, caught) for number in SIGNALS}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Stop:
    """Ends the play's processes after a signal: INT to Ansible, which ends its workers, then KILL for all."""

    def __init__(self, caught: Caught) -> None:
        self._caught = caught
        self._asked_at = 0.0
        self._known: set[int] = set()
        self.begun = False

    def tick(self) -> bool:
        """False when everything was killed and there is nothing to wait for."""
        if not self._caught.count:
            return True
        if not self.begun:
            self.begun = True
            self._asked_at = time.monotonic()
            self._known = descendants(os.getpid())
            _signal(children(os.getpid()), signal.SIGINT)
            return True
        self._known |= descendants(os.getpid())
        if self._caught.count > 1 or time.monotonic() - self._asked_at > STOP_GRACE_S:
            _signal(self._known, signal.SIGKILL)
            return False
        return True


def _signal(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue


def children(pid: int) -> set[int]:
    """Process numbers of a process's children."""
    return {child for child, parent in _parents().items() if parent == pid}


def descendants(pid: int) -> set[int]:
    """Process numbers of everything that a process started and what those started."""
    parents = _parents()
    found: set[int] = set()
    new = {pid}
    while new:
        new = {child for child, parent in parents.items() if parent in new} - found
        found |= new
    return found


def _parents() -> dict[int, int]:
    """Process -> parent, of every process that can be seen."""
    if Path("/proc/self/stat").exists():
        return dict(filter(None, map(_parent_of, Path("/proc").glob("[0-9]*/stat"))))
    listed = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=False, timeout=STOP_GRACE_S
    )
    return {int(pid): int(parent) for pid, parent in (line.split() for line in listed.stdout.splitlines())}


def _parent_of(stat: Path) -> tuple[int, int] | None:
    try:
        return int(stat.parent.name), int(stat.read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return None


def _argv(job: Job, private: Path) -> list[str]:
    """Ansible's command line; what may be secret goes into files of the run's own."""
    given = {"--limit": job.limit, "--tags": job.tags, "--skip-tags": job.skip_tags, "--forks": job.forks}
    argv = ["ansible-playbook", "--diff", "-i", str(job.inventory)]
    argv += [word for option, value in given.items() if value for word in (option, str(value))]
    if job.check:
        argv.append("--check")
    if job.extra:
        extra = private / "extra.json"
        runs.write_private(extra, json.dumps(dict(job.extra)))
        argv += ["-e", f"@{extra}"]
    return [*argv, str(_written(job, private))]


def _written(job: Job, private: Path) -> Path:
    """The playbook that Ansible is given."""
    if not (job.narrow and job.tags):
        return job.playbook
    from bringup import narrowing, yamlfile

    plays = yamlfile.read_yaml(job.playbook)
    path = private / job.playbook.name
    # JSON is YAML, and its writer is quick.
    left = narrowing.narrowed(
        plays,
        job.tags.split(","),
        lambda role, part: yamlfile.read_yaml(ROOT / "roles" / role / part / "main.yml"),
    )
    runs.write_private(path, json.dumps(left))
    return path


def _environment(job: Job, run_id: str, private: Path) -> dict[str, str]:
    """What this run adds to Ansible's environment; the BRINGUP_ ones go into locks and stamps on nodes."""
    found = {"BRINGUP_RUN_ID": run_id, "BRINGUP_BY": runs.who(), "BRINGUP_COMMIT": runs.commit()}
    if job.plan is not None:
        handed_file = private / "variables.json"
        job.plan.hand_over(handed_file)
        found[handed.FILE] = str(handed_file)
    return found


def _waiting(inbox: queue.SimpleQueue[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """The events that are there, after at most one tick of waiting."""
    try:
        yield inbox.get(timeout=TICK_S)
        while True:
            yield inbox.get_nowait()
    except queue.Empty:
        return


_KEPT = (
    "runner_on_ok",
    "runner_on_failed",
    "runner_on_unreachable",
    "runner_on_skipped",
    "playbook_on_stats",
)


def _keep(event: Mapping[str, Any], log: Any, output: list[str]) -> None:
    """Results go to events.jsonl; text that belongs to no event is kept for runs that never started."""
    kind = event.get("event")
    if kind in _KEPT:
        line = {"event": kind, "created": event.get("created"), **redact.data(event.get("event_data") or {})}
        log.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")
    elif kind in ("error", "verbose", "warning", "deprecated") and event.get("stdout"):
        output.append(redact.text(str(event["stdout"])))
