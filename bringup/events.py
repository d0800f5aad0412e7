"""What happened in a run: ansible-runner's events folded into outcomes per host and role. No I/O.

`Tally.feed` takes one event (the dictionaries that ansible-runner hands to `event_handler`); `Tally.outcome`
gives frozen values. Secrets are taken out here, so nothing downstream ever holds one.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Literal

from bringup import redact
from bringup.errors import Exit

PREFLIGHT_ROLE = "preflight"
GATE_PREFIX = "Gate:"
"""A task whose name begins so is a measured gate: when it fails, the change was rolled back (exit 7)."""

LOCK_PREFIX = "Lock:"
"""A task whose name begins so holds a node or gives it back: when it fails, the node is someone else's now."""

REFUSE_PREFIX = "Refuse "
"""A task whose name begins so says no before anything is changed; so does a result with `bringup_refused`."""

HOLD = "Lock: hold this node for the run"
"""How the failure of any task is called that failed because the node could not be held (`bringup_locked`)."""

GIVE_BACK = "Lock: give this node back"
"""The last task of a play on a host; where it is reached without a failure, the host is done."""

DONE = "bringup_done"
"""Field of a result by which a host is done that was given back by a task of another name."""

LAST = "bringup_last"
"""Field of a result: what the last call on the host said, which went along with that task (`bringup/closing.py`)."""

STAMP_ROLE = "run_stamp"
STAMP_TASK = "Write what this node was planned to be and that a run has been here"

NO_ROLE = "play"
"""How tasks outside of any role (gathering facts, a runbook's own tasks) are called."""

DIFF_LINES_KEPT = 400
MESSAGE_CHARS_KEPT = 4000

FailureKind = Literal["failed", "unreachable", "ignored", "rescued"]


@dataclass(frozen=True)
class RoleOutcome:
    """One role on one host: numbers of results, and the seconds since the run began between which it ran."""

    ok: int = 0
    changed: int = 0
    failed: int = 0
    skipped: int = 0
    begin_s: float = 0.0
    end_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Wall time from the role's first task to its last."""
        return round(self.end_s - self.begin_s, 3)


@dataclass(frozen=True)
class HostOutcome:
    """One host: numbers of results (one that changed something is `ok` too, as Ansible counts), its roles,
    and whether it came to its end (`done`). `sealed`: roles that were found as they were left and not played.
    """

    ok: int = 0
    changed: int = 0
    failed: int = 0
    skipped: int = 0
    unreachable: bool = False
    done: bool = False
    roles: Mapping[str, RoleOutcome] = field(default_factory=dict)
    sealed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Change:
    """A task that changed something (or would, in check mode); `diff` is a unified diff, or ""."""

    host: str
    role: str
    task: str
    diff: str = ""


@dataclass(frozen=True)
class Failure:
    """A task that failed on a host. `kind` ignored/rescued: the playbook went on as it was told to. `refused`: it
    said no to what was asked for, and nothing broke."""

    host: str
    role: str
    task: str
    message: str
    kind: FailureKind = "failed"
    refused: bool = False

    @property
    def is_lock(self) -> bool:
        """Somebody else holds the node."""
        return self.task.startswith(LOCK_PREFIX)


@dataclass(frozen=True)
class Outcome:
    """All that a run's events say.

    `starts` and `findings`: what tasks returned as `bringup_starts` and `findings`, each with its `host`;
    `notes`: what they returned as `bringup_notes`, one text a note.
    """

    hosts: Mapping[str, HostOutcome] = field(default_factory=dict)
    changes: tuple[Change, ...] = ()
    failures: tuple[Failure, ...] = ()
    starts: tuple[Mapping[str, Any], ...] = ()
    findings: tuple[Mapping[str, Any], ...] = ()
    errors: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def fatal(self) -> tuple[Failure, ...]:
        """Failures that stopped a host."""
        return tuple(failure for failure in self.failures if failure.kind in ("failed", "unreachable"))

    @property
    def changed(self) -> int:
        """Changed results over all hosts."""
        return sum(host.changed for host in self.hosts.values())


@dataclass(frozen=True)
class Doing:
    """What a host is doing now: `since` is an epoch time; `note` is what a retried task waits for."""

    role: str
    task: str
    since: float
    note: str = ""


@dataclass
class _Role:
    ok: int = 0
    changed: int = 0
    skipped: int = 0
    begin: float = 0.0
    end: float = 0.0

    def seen(self, begin: float, end: float) -> None:
        self.begin = min(self.begin or begin, begin)
        self.end = max(self.end, end)


class Tally:
    """Folds events in the order in which they come. Not thread-safe: one thread feeds and reads."""

    def __init__(self) -> None:
        self.doing: dict[str, Doing] = {}
        self.task = ""
        self.play = ""
        self._roles: dict[str, dict[str, _Role]] = {}
        self._changes: list[Change] = []
        self._failures: list[Failure] = []
        self._starts: list[Mapping[str, Any]] = []
        self._findings: list[Mapping[str, Any]] = []
        self._errors: list[str] = []
        self._notes: list[str] = []
        self._done: set[str] = set()
        self._along: dict[str, list[bool]] = {}
        self._stats: Mapping[str, Any] | None = None
        self._first: float | None = None

    def feed(self, event: Mapping[str, Any]) -> Failure | None:
        """Counts one event; returns the failure when it is one that stops a host (or may yet be rescued)."""
        kind = str(event.get("event", ""))
        data = event.get("event_data") or {}
        if self._first is None and data:
            self._first = _epoch(event.get("created"))
        if "censored" in (data.get("res") or {}):
            # A hidden result keeps nothing but its colour: whether it changed something is
            # said in the text only.
            said = str(event.get("stdout", "")).lstrip()
            data = {**data, "res": {**data["res"], "changed": said.startswith("changed:")}}
        handler = {
            "playbook_on_play_start": self._on_play,
            "playbook_on_task_start": self._on_task,
            "playbook_on_handler_task_start": self._on_task,
            "playbook_on_stats": self._on_stats,
            "runner_on_start": self._on_start,
            "runner_retry": self._on_retry,
            "runner_on_ok": self._on_ok,
            "runner_on_skipped": self._on_skipped,
        }.get(kind)
        if handler is not None:
            handler(data)
        elif kind in ("runner_on_failed", "runner_on_async_failed"):
            return self._on_failed(data)
        elif kind == "runner_on_unreachable":
            return self._on_unreachable(data)
        elif kind in ("error", "verbose"):
            self._on_text(str(event.get("stdout", "")))
        return None

    @property
    def ended(self) -> bool:
        """Did Ansible come to its end and give its final numbers?"""
        return self._stats is not None

    def outcome(self) -> Outcome:
        """Everything seen so far; Ansible's own final numbers win where the run came to its end."""
        failures = self._judged()
        hosts = {name: self._host(name, failures) for name in self._host_names()}
        return Outcome(
            hosts=hosts,
            changes=tuple(self._changes),
            failures=failures,
            starts=tuple(self._starts),
            findings=tuple(self._findings),
            errors=tuple(self._errors),
            notes=tuple(self._notes),
        )

    def _on_play(self, data: Mapping[str, Any]) -> None:
        self.play = str(data.get("name") or data.get("play") or "")

    def _on_task(self, data: Mapping[str, Any]) -> None:
        self.task = _task_name(data)

    def _on_start(self, data: Mapping[str, Any]) -> None:
        host = str(data.get("host", ""))
        self._roles.setdefault(host, {})
        self.doing[host] = Doing(_role_name(data), _task_name(data), _now())

    def _on_retry(self, data: Mapping[str, Any]) -> None:
        host = str(data.get("host", ""))
        result = data.get("res") or {}
        before = self.doing.get(host) or Doing(_role_name(data), _task_name(data), _now())
        note = f"attempt {result.get('attempts', '?')} of {result.get('retries', '?')}"
        self.doing[host] = Doing(before.role, before.task, before.since, note)

    def _on_ok(self, data: Mapping[str, Any]) -> None:
        role = self._finished(data)
        role.ok += 1
        result = data.get("res") or {}
        self._gather(data, result)
        if _task_name(data) == GIVE_BACK or result.get(DONE):
            self._done.add(str(data.get("host", "")))
        if result.get("changed"):
            role.changed += 1
            self._changes.append(
                Change(str(data.get("host", "")), _role_name(data), _task_name(data), diff_of(result))
            )
        if LAST in result:
            # Ansible's own numbers know one task.
            along = self._along.setdefault(str(data.get("host", "")), [])
            along.append(bool(result[LAST].get("changed")))
            self._on_ok({**data, "role": STAMP_ROLE, "task": STAMP_TASK, "res": result[LAST]})

    def _on_skipped(self, data: Mapping[str, Any]) -> None:
        self._finished(data).skipped += 1

    def _on_failed(self, data: Mapping[str, Any]) -> Failure | None:
        role = self._finished(data)
        result = data.get("res") or {}
        self._gather(data, result)
        if result.get("bringup_given_back"):
            # The end of a rescue: what stopped the host was said before it.
            return None
        locked = bool(result.get("bringup_locked"))
        ignored = bool(data.get("ignore_errors"))
        role.ok += ignored
        failure = Failure(
            str(data.get("host", "")),
            NO_ROLE if locked else _role_name(data),
            HOLD if locked else _task_name(data),
            message_of(result),
            "ignored" if ignored else "failed",
            bool(result.get("bringup_refused")) or _task_name(data).startswith(REFUSE_PREFIX),
        )
        self._failures.append(failure)
        return failure

    def _on_unreachable(self, data: Mapping[str, Any]) -> Failure:
        self._finished(data)
        failure = Failure(
            str(data.get("host", "")),
            _role_name(data),
            _task_name(data),
            message_of(data.get("res") or {}),
            "unreachable",
        )
        self._failures.append(failure)
        return failure

    def _on_stats(self, data: Mapping[str, Any]) -> None:
        self._stats = data
        self.doing.clear()

    def _on_text(self, line: str) -> None:
        plain = line.strip()
        if "ERROR" in plain[:20]:
            self._errors.append(redact.text(plain)[:MESSAGE_CHARS_KEPT])

    def _gather(self, data: Mapping[str, Any], result: Mapping[str, Any]) -> None:
        host = str(data.get("host", ""))
        self._notes += [f"{host}: {redact.text(str(note))}" for note in _as_list(result.get("bringup_notes"))]
        for part in (result, *_item_results(result)):
            kinds = (("bringup_starts", self._starts), ("findings", self._findings))
            for key, found in (*kinds, ("preflight_findings", self._findings)):
                found.extend(
                    {"host": host, **redact.data(item)}
                    for item in _as_list(part.get(key))
                    if isinstance(item, Mapping)
                )

    def _finished(self, data: Mapping[str, Any]) -> _Role:
        self.doing.pop(str(data.get("host", "")), None)
        return self._role(data)

    def _role(self, data: Mapping[str, Any]) -> _Role:
        roles = self._roles.setdefault(str(data.get("host", "")), {})
        role = roles.setdefault(_role_name(data), _Role())
        begin = _epoch(data.get("start")) or _now()
        role.seen(begin, _epoch(data.get("end")) or begin)
        return role

    def _judged(self) -> tuple[Failure, ...]:
        """Failures in order. Of a host's failures the last `stats.failures[host]` stopped it; the rest were
        rescued.
        """
        if self._stats is None:
            return tuple(self._failures)
        left = dict(self._stats.get("failures") or {})
        result = []
        for failure in reversed(self._failures):
            kind = failure.kind
            if kind == "failed":
                left[failure.host] = int(left.get(failure.host, 0)) - 1
                kind = "failed" if left[failure.host] >= 0 else "rescued"
            result.append(replace(failure, kind=kind))
        return tuple(reversed(result))

    def _host_names(self) -> list[str]:
        names = dict.fromkeys(self._roles)
        names.update(dict.fromkeys((self._stats or {}).get("processed") or {}))
        return list(names)

    def _host(self, name: str, failures: Iterable[Failure]) -> HostOutcome:
        first = self._first or 0.0
        mine = [failure for failure in failures if failure.host == name]
        roles = {
            role: RoleOutcome(
                one.ok,
                one.changed,
                sum(f.kind == "failed" for f in mine if f.role == role),
                one.skipped,
                round(max(0.0, one.begin - first), 3),
                round(max(0.0, one.end - first), 3),
            )
            for role, one in self._roles.get(name, {}).items()
        }
        along = self._along.get(name, []) if self._stats is not None else []
        return HostOutcome(
            ok=self._stat("ok", name, sum(role.ok for role in roles.values())) + len(along),
            changed=self._stat("changed", name, sum(role.changed for role in roles.values())) + sum(along),
            failed=self._stat("failures", name, sum(failure.kind == "failed" for failure in mine)),
            skipped=self._stat("skipped", name, sum(role.skipped for role in roles.values())),
            unreachable=any(failure.kind == "unreachable" for failure in mine),
            done=name in self._done and not any(f.kind in ("failed", "unreachable") for f in mine),
            roles=roles,
        )

    def _stat(self, key: str, host: str, counted: int) -> int:
        if self._stats is None:
            return counted
        return int((self._stats.get(key) or {}).get(host, 0))


def exit_code(outcome: Outcome, *, check: bool = False) -> Exit:
    """What an outcome means: failed, else gate, else unreachable, else refused by preflight, else locked or refused
    by something else, else changes pending, else done.

    A run in which no host was played is never a success: INTERNAL (the caller knows better when it does).
    """
    fatal = outcome.fatal
    failed = [failure for failure in fatal if failure.kind == "failed"]
    refused = [failure for failure in failed if failure.role == PREFLIGHT_ROLE]
    gates = [failure for failure in failed if failure.task.startswith(GATE_PREFIX)]
    locks = [
        failure
        for failure in failed
        if (failure.is_lock or failure.refused) and failure not in (*refused, *gates)
    ]
    if not outcome.hosts:
        return Exit.INTERNAL
    if len(failed) > len(refused) + len(gates) + len(locks) or (
        not failed and any(host.failed for host in outcome.hosts.values())
    ):
        return Exit.FAILED
    if gates:
        return Exit.GATE
    if any(failure.kind == "unreachable" for failure in fatal):
        return Exit.UNREACHABLE
    if refused:
        return Exit.REFUSED
    if locks:
        return Exit.LOCKED
    return Exit.PENDING if check and outcome.changed else Exit.DONE


def message_of(result: Mapping[str, Any]) -> str:
    """The words of a failed result: its message, then what a command wrote, then the items that failed."""
    if "censored" in result:
        return "The result is hidden (no_log)."
    parts = [str(result.get("msg") or "")]
    for key in ("stderr", "module_stderr", "stdout", "module_stdout", "reason"):
        said = result.get(key)
        if isinstance(said, str) and said.strip() and said.strip() not in parts[0]:
            parts.append(said.strip())
    for item in _item_results(result):
        if item.get("failed") or item.get("unreachable"):
            parts.append(f"{_item_label(item)}: {message_of(item)}")
    words = "\n".join(part for part in parts if part) or json.dumps(dict(result), default=str)
    return redact.text(words)[:MESSAGE_CHARS_KEPT]


def diff_of(result: Mapping[str, Any]) -> str:
    """A unified diff of all that a result says it changed; "" when it says nothing or must not."""
    if "censored" in result:
        return ""
    diffs = [one for part in (result, *_item_results(result)) for one in _as_list(part.get("diff"))]
    text = "\n".join(filter(None, (_one_diff(one) for one in diffs if isinstance(one, Mapping))))
    lines = redact.text(text).splitlines()
    if len(lines) > DIFF_LINES_KEPT:
        lines = [*lines[:DIFF_LINES_KEPT], f"... {len(lines) - DIFF_LINES_KEPT} more lines"]
    return "\n".join(lines)


def _one_diff(diff: Mapping[str, Any]) -> str:
    if diff.get("prepared"):
        return str(diff["prepared"]).strip()
    before, after = _diff_side(diff.get("before")), _diff_side(diff.get("after"))
    if before == after:
        return ""
    old = str(diff.get("before_header") or "before")
    new = str(diff.get("after_header") or "after")
    return "\n".join(difflib.unified_diff(before, after, old, new, lineterm=""))


def _diff_side(value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, str):
        return value.splitlines()
    return json.dumps(redact.data(value), indent=2, sort_keys=True, default=str).splitlines()


def _item_results(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [item for item in _as_list(result.get("results")) if isinstance(item, Mapping)]


def _item_label(item: Mapping[str, Any]) -> str:
    label = item.get("_ansible_item_label", item.get("item", "item"))
    return str(label.get("name", "item")) if isinstance(label, Mapping) else str(label)


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _task_name(data: Mapping[str, Any]) -> str:
    name = str(data.get("task") or data.get("name") or "")
    role = str(data.get("role") or "")
    return redact.text(name.removeprefix(f"{role} : ") if role else name)


def _role_name(data: Mapping[str, Any]) -> str:
    return str(data.get("role") or NO_ROLE).rsplit(".", 1)[-1]


def _epoch(value: Any) -> float:
    """Epoch seconds of one of ansible-runner's times (ISO; UTC when it names no zone); 0.0 for none."""
    if not isinstance(value, str) or not value:
        return 0.0
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        return 0.0
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _now() -> float:
    return datetime.now(UTC).timestamp()
