"""Run records: what every run did, written first as "begun" and then finished, chained so that edits show.

Layout under `runs/` (the folder is private to its owner, 0700):

    <time>-<name>-<inventory>/record.json   the record
    <time>-<name>-<inventory>/events.jsonl  one line a result, secrets taken out
    <time>-<name>-<inventory>/report.html   the report
    chain.jsonl                             one line a finished run, in the order in which they finished
    audit.jsonl                             locks that were broken by hand
"""

from __future__ import annotations

import dataclasses
import fcntl
import getpass
import hashlib
import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from bringup import ROOT, __version__, redact
from bringup.errors import Exit, Problem, UsageError, did_you_mean
from bringup.events import Change, Failure, HostOutcome, Outcome, RoleOutcome, Tally

FOLDER = ROOT / "runs"
SCHEMA_VERSION = 1
GIT_TIMEOUT_S = 10
BEGUN = "begun"
LOST = "lost"
"""A run that was begun on this machine and whose process is gone: the controller was killed."""

STATUS: dict[Exit, str] = {
    Exit.DONE: "done",
    Exit.INTERNAL: "internal error",
    Exit.USAGE: "wrong usage",
    Exit.REFUSED: "refused",
    Exit.FAILED: "failed",
    Exit.UNREACHABLE: "unreachable",
    Exit.PENDING: "changes pending",
    Exit.GATE: "gate failed",
    Exit.LOCKED: "locked",
    Exit.INTERRUPTED: "interrupted",
}


@dataclass(frozen=True)
class RunRecord:
    """One run. Times are ISO 8601 in UTC; `arguments` and all texts are free of secrets.

    `digest` is the SHA-256 of everything else in the record, `previous` that of the run that finished before.
    """

    id: str
    name: str
    inventory: str
    status: str = BEGUN
    exit_code: int | None = None
    who: str = ""
    where: str = ""
    machine: str = ""
    pid: int = 0
    begun: str = ""
    finished: str = ""
    seconds: float = 0.0
    commit: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    plan_digest: str = ""
    hosts: Mapping[str, HostOutcome] = field(default_factory=dict)
    changes: tuple[Change, ...] = ()
    failures: tuple[Failure, ...] = ()
    starts: tuple[Mapping[str, Any], ...] = ()
    findings: tuple[Mapping[str, Any], ...] = ()
    errors: tuple[str, ...] = ()
    causes: tuple[Mapping[str, Any], ...] = ()
    answers: tuple[Mapping[str, Any], ...] = ()
    notes: tuple[str, ...] = ()
    previous: str = ""
    digest: str = ""
    schema_version: int = SCHEMA_VERSION

    @property
    def folder(self) -> Path:
        """Where the run's files lie."""
        return FOLDER / self.id

    @property
    def changed(self) -> int:
        """Changed results over all hosts."""
        return sum(host.changed for host in self.hosts.values())


def to_data(record: RunRecord) -> dict[str, Any]:
    """The record as JSON-able data; `hosts.<name>` has integers ok, changed, failed, skipped."""
    return dataclasses.asdict(record)


def from_data(data: Mapping[str, Any], where: str = "record") -> RunRecord:
    """The record that `to_data` made. Raises UsageError for data of another shape."""
    try:
        known = {one.name for one in dataclasses.fields(RunRecord)}
        values = {key: value for key, value in data.items() if key in known}
        values["hosts"] = {name: _host(value) for name, value in (data.get("hosts") or {}).items()}
        values["changes"] = tuple(Change(**change) for change in data.get("changes", ()))
        values["failures"] = tuple(Failure(**failure) for failure in data.get("failures", ()))
        for key in ("starts", "findings", "errors", "causes", "answers", "notes"):
            values[key] = tuple(data.get(key, ()))
        return RunRecord(**values)
    except (TypeError, AttributeError, ValueError) as error:
        raise UsageError(Problem(where, f"is no run record: {error}")) from None


def _host(data: Mapping[str, Any]) -> HostOutcome:
    roles = {name: RoleOutcome(**role) for name, role in data.get("roles", {}).items()}
    return HostOutcome(**{**data, "roles": roles, "sealed": tuple(data.get("sealed", ()))})


def begin(
    name: str,
    inventory: str,
    arguments: Mapping[str, Any],
    *,
    plan_digest: str = "",
    notes: tuple[str, ...] = (),
    folder: Path | None = None,
) -> RunRecord:
    """Makes the run's folder and writes its record as begun, before anything is touched."""
    base = folder or FOLDER
    now = datetime.now(UTC)
    run_id = _make_folder(base, f"{now:%Y%m%dT%H%M%SZ}-{name}-{inventory}".replace("/", "-"))
    record = RunRecord(
        id=run_id,
        name=name,
        inventory=inventory,
        who=who(),
        where=came_from(),
        machine=socket.gethostname(),
        pid=os.getpid(),
        begun=now.isoformat(timespec="milliseconds"),
        commit=commit(),
        versions=versions(),
        arguments=redact.data(dict(arguments)),
        plan_digest=plan_digest,
        notes=notes,
    )
    write(record, base)
    return record


def finish(
    record: RunRecord,
    code: Exit,
    outcome: Outcome,
    *,
    folder: Path | None = None,
    **more: Any,
) -> RunRecord:
    """The record with its outcome and its link in the chain. `more`: causes, answers, notes."""
    base = folder or FOLDER
    now = datetime.now(UTC)
    with _chain_lock(base):
        finished = dataclasses.replace(
            record,
            status=STATUS[code],
            exit_code=int(code),
            finished=now.isoformat(timespec="milliseconds"),
            seconds=round((now - datetime.fromisoformat(record.begun)).total_seconds(), 3),
            hosts=outcome.hosts,
            changes=outcome.changes,
            failures=outcome.failures,
            starts=outcome.starts,
            findings=outcome.findings,
            errors=outcome.errors,
            previous=_last_digest(base),
            **{"notes": (*record.notes, *outcome.notes), **more},
        )
        finished = dataclasses.replace(finished, digest=digest_of(finished))
        write(finished, base)
        line = {"id": finished.id, "digest": finished.digest, "previous": finished.previous}
        append_line(base / "chain.jsonl", line)
    return finished


def digest_of(record: RunRecord) -> str:
    """SHA-256 (hex) of the record without its own digest, as canonical JSON."""
    data = {key: value for key, value in to_data(record).items() if key != "digest"}
    text = json.dumps(data, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def write(record: RunRecord, base: Path) -> None:
    """Writes record.json beside, syncs and renames it: a reader sees the old or the new one, never a half."""
    text = json.dumps(to_data(record), indent=1, ensure_ascii=False, default=str)
    write_private(base / record.id / "record.json", text + "\n")


def write_private(path: Path, text: str) -> None:
    """An atomic write of a file that only its owner may read."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    beside.replace(path)


def append_line(path: Path, data: Mapping[str, Any]) -> None:
    """Appends one JSON line in one write and syncs it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(descriptor, (json.dumps(data, ensure_ascii=False, default=str) + "\n").encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(run_id: str, folder: Path | None = None) -> RunRecord:
    """One record. Raises UsageError for an unknown id (with a suggestion) or an unreadable record."""
    base = folder or FOLDER
    path = base / run_id / "record.json"
    where = f"runs/{run_id}/record.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        hint = did_you_mean(run_id, ids(base)) or "`invoke history` lists the runs."
        raise UsageError(Problem(f"runs/{run_id}", "there is no such run", hint)) from None
    except ValueError as error:
        raise UsageError(Problem(where, f"is no JSON: {error}")) from None
    return _alive(from_data(data, where))


def ids(folder: Path | None = None) -> list[str]:
    """Ids of all runs, oldest first."""
    base = folder or FOLDER
    return sorted(path.parent.name for path in base.glob("*/record.json")) if base.is_dir() else []


def find(name: str, folder: Path | None = None) -> RunRecord:
    """The run of this id, of a unique part of an id, or `last`. Raises UsageError otherwise."""
    known = ids(folder)
    if name == "last" and known:
        return read(known[-1], folder)
    matches = [one for one in known if one == name] or [one for one in known if name in one]
    if len(matches) > 1:
        raise UsageError(Problem(f'run "{name}"', f"names {len(matches)} runs: {', '.join(matches[:5])}"))
    return read(matches[0] if matches else name, folder)


def listed(inventory: str | None = None, limit: int = 20, folder: Path | None = None) -> list[RunRecord]:
    """The newest `limit` records, newest first; an unreadable one is left out (verify names it)."""
    result: list[RunRecord] = []
    for run_id in reversed(ids(folder)):
        try:
            record = read(run_id, folder)
        except UsageError:
            continue
        if inventory is None or record.inventory == inventory:
            result.append(record)
        if len(result) == limit:
            break
    return result


def verify(folder: Path | None = None) -> list[Problem]:
    """Everything wrong with the chain: changed, missing, reordered or unlisted records. Empty: it holds."""
    base = folder or FOLDER
    problems: list[Problem] = []
    previous, seen = "", set()
    for number, line in enumerate(_chain(base), start=1):
        where = f"runs/chain.jsonl:{number}"
        if not isinstance(line, dict) or not {"id", "digest", "previous"} <= set(line):
            problems.append(Problem(where, "is no line of the chain"))
            continue
        if line["previous"] != previous:
            problems.append(Problem(where, "does not follow the line before: a line was removed or moved"))
        previous = line["digest"]
        seen.add(line["id"])
        problems.extend(_verify_record(str(line["id"]), line, base))
    for run_id in ids(base):
        if run_id not in seen and _finished_on_disk(run_id, base):
            problems.append(Problem(f"runs/{run_id}", "is finished and not in the chain"))
    return problems


def _verify_record(run_id: str, line: Mapping[str, Any], base: Path) -> Iterator[Problem]:
    where = f"runs/{run_id}"
    try:
        record = read(run_id, base)
    except UsageError as error:
        yield Problem(where, f"is in the chain and cannot be read ({error.problems[0].what})")
        return
    if digest_of(record) != record.digest or record.digest != line["digest"]:
        yield Problem(where, "was changed after it was written")
    elif record.previous != line["previous"]:
        yield Problem(where, "names another run before it than the chain does")


def _finished_on_disk(run_id: str, base: Path) -> bool:
    try:
        return read(run_id, base).exit_code is not None
    except UsageError:
        return False


def diff(first: RunRecord, second: RunRecord) -> list[tuple[str, str, str]]:
    """What differs between two runs: (what, in the first, in the second)."""
    rows: list[tuple[str, str, str]] = []

    def row(label: str, left: Any, right: Any) -> None:
        if left != right:
            rows.append((label, str(left), str(right)))

    for name in ("name", "inventory", "status", "who", "where", "commit", "plan_digest", "seconds"):
        row(name, getattr(first, name), getattr(second, name))
    for mapping in ("versions", "arguments"):
        left, right = getattr(first, mapping), getattr(second, mapping)
        for key in sorted({*left, *right}):
            row(f"{mapping}.{key}", left.get(key, "-"), right.get(key, "-"))
    for host in sorted({*first.hosts, *second.hosts}):
        row(f"hosts.{host}", _words(first.hosts.get(host)), _words(second.hosts.get(host)))
    return rows


def _words(host: HostOutcome | None) -> str:
    if host is None:
        return "not there"
    if host.unreachable:
        return "unreachable"
    return f"{host.ok} ok, {host.changed} changed, {host.failed} failed"


def who() -> str:
    """The person behind the run: the user, and the one behind sudo."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    behind = os.environ.get("SUDO_USER", "")
    return f"{user} (sudo by {behind})" if behind and behind != user else user


def came_from() -> str:
    """This machine, and the address of the SSH client when the operator came by SSH."""
    client = os.environ.get("SSH_CLIENT", "").split(" ")[0]
    return f"{socket.gethostname()} (from {client})" if client else socket.gethostname()


@cache
def commit() -> str:
    """The checkout's commit when this command first asked, `+changes` when files differ from it; "" outside of a
    checkout."""
    head = _git("rev-parse", "--short=12", "HEAD")
    if not head:
        return ""
    return f"{head}+changes" if _git("status", "--porcelain", "--untracked-files=no") else head


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments],
            capture_output=True,
            text=True,
            timeout=GIT_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def versions() -> dict[str, str]:
    """Versions of what makes the run."""
    from importlib.metadata import PackageNotFoundError, version

    # `platform.platform` starts a program to ask for the processor.
    result = {"bringup": __version__, "python": platform.python_version(), "system": system()}
    for package in ("ansible", "ansible-core", "ansible-runner"):
        try:
            result[package] = version(package)
        except PackageNotFoundError:
            result[package] = "missing"
    return result


def system() -> str:
    """Kernel, its release and machine: `Linux-6.1.0-x86_64`."""
    about = os.uname()
    return f"{about.sysname}-{about.release}-{about.machine}"


def pid_alive(pid: int) -> bool:
    """Does a process of this number run on this machine? One that has ended counts as gone, also while nobody
    has collected its exit status: where init collects none (a container's may not), that can stay so for ever.
    """
    if _stat(pid)[:1] in (["Z"], ["X"]):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def birth_of(pid: int) -> str:
    """The kernel's start time of a process, which tells it from a later one of the same number; "" where
    there is no /proc.
    """
    fields = _stat(pid)
    return fields[19] if len(fields) > 19 else ""


def _stat(pid: int) -> list[str]:
    """Fields of /proc/<pid>/stat after the name, state first; empty where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def finished_hosts(record: RunRecord, folder: Path | None = None) -> list[str]:
    """Hosts that came to their end in a run, also in one whose controller was killed before it could say so."""
    hosts = record.hosts or _played(record, folder or FOLDER).hosts
    return [name for name, host in hosts.items() if host.done]


def _played(record: RunRecord, base: Path) -> Outcome:
    """What the events of a run say that has no result."""
    tally = Tally()
    try:
        lines = (base / record.id / "events.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError:
        return tally.outcome()
    for line in map(_json_or_none, lines):
        if isinstance(line, dict):
            tally.feed({"event": line.get("event"), "created": line.get("created"), "event_data": line})
    return tally.outcome()


def _alive(record: RunRecord) -> RunRecord:
    """A begun record whose process is gone reads as lost."""
    here = record.machine == socket.gethostname()
    if record.status == BEGUN and here and not pid_alive(record.pid):
        return dataclasses.replace(record, status=LOST)
    return record


def _make_folder(base: Path, name: str) -> str:
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    for number in range(1, sys.maxsize):
        run_id = name if number == 1 else f"{name}-{number}"
        try:
            (base / run_id).mkdir(mode=0o700)
        except FileExistsError:
            continue
        return run_id
    raise AssertionError("unreachable")


@contextmanager
def _chain_lock(base: Path) -> Iterator[None]:
    """One run at a time adds to the chain; the kernel drops the lock when its holder dies."""
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(base / ".chain.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _chain(base: Path) -> list[Any]:
    try:
        lines = (base / "chain.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return [_json_or_none(line) for line in lines if line.strip()]


def _json_or_none(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _last_digest(base: Path) -> str:
    chain = [line for line in _chain(base) if isinstance(line, dict) and "digest" in line]
    return str(chain[-1]["digest"]) if chain else ""
