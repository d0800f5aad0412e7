"""Events of real runs (tests/cases/events) are read as what they were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from bringup import events, redact
from bringup.errors import Exit

CASES = sorted((Path(__file__).resolve().parents[1] / "cases" / "events").glob("*.yml"))


def told(case: Path) -> tuple[dict[str, Any], events.Tally]:
    said = yaml.safe_load(case.read_text())
    tally = events.Tally()
    for line in case.with_suffix(".jsonl").read_text().splitlines():
        tally.feed(json.loads(line))
    return said, tally


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)
def test_a_recorded_run_is_read_as_what_it_was(case: Path) -> None:
    said, tally = told(case)
    outcome = tally.outcome()
    assert tally.ended is said.get("ended", True)
    assert events.exit_code(outcome, check=bool(said.get("check"))) is Exit(said["exit"])
    assert set(outcome.hosts) == set(said["hosts"])
    for name, expected in said["hosts"].items():
        assert {key: getattr(outcome.hosts[name], key) for key in expected} == expected, name
    for role, expected in said.get("roles", {}).items():
        assert {key: getattr(outcome.hosts["one"].roles[role], key) for key in expected} == expected
    assert sorted(failure.kind for failure in outcome.failures) == said.get("failures", [])
    if "changes" in said:
        assert len(outcome.changes) == said["changes"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)
def test_words_of_a_recorded_run_are_kept_and_its_secrets_are_not(case: Path) -> None:
    said, tally = told(case)
    outcome = tally.outcome()
    diffs = "\n".join(change.diff for change in outcome.changes)
    assert [word for word in said.get("diff_has", []) if word not in diffs] == []
    assert said.get("message_has", "") in "\n".join(failure.message for failure in outcome.failures)
    assert said.get("error_has", "") in "\n".join(outcome.errors)
    assert [word for word in said.get("never", []) if word in repr(outcome)] == []


def test_roles_of_a_host_are_timed_within_the_run_and_in_order() -> None:
    _, tally = told(CASES[0].with_stem("changed"))
    roles = tally.outcome().hosts["one"].roles
    assert list(roles) == ["preflight", "files"]
    assert 0 <= roles["preflight"].begin_s < roles["preflight"].end_s <= roles["files"].begin_s
    assert roles["files"].seconds > 0


def test_what_a_host_does_is_known_while_it_does_it() -> None:
    tally = events.Tally()
    start = {"host": "one", "task": "Wait for a token", "role": "engine_service"}
    tally.feed({"event": "runner_on_start", "event_data": start})
    assert (tally.doing["one"].role, tally.doing["one"].task) == ("engine_service", "Wait for a token")
    tally.feed(
        {"event": "runner_retry", "event_data": {**start, "res": {"attempts": 3, "retries": 20}}},
    )
    assert tally.doing["one"].note == "attempt 3 of 20"
    tally.feed({"event": "runner_on_ok", "event_data": {**start, "res": {}}})
    assert tally.doing == {}


def test_starts_and_findings_that_tasks_return_are_gathered_with_their_host() -> None:
    tally = events.Tally()
    result = {
        "bringup_starts": [{"unit": "bringup-chat", "seconds": 2.5}],
        "findings": [{"code": "disk-room", "severity": "warning", "what": "little room"}],
    }
    tally.feed({"event": "runner_on_ok", "event_data": {"host": "one", "task": "t", "res": result}})
    outcome = tally.outcome()
    assert outcome.starts == ({"host": "one", "unit": "bringup-chat", "seconds": 2.5},)
    assert outcome.findings[0]["host"] == "one"
    assert outcome.findings[0]["code"] == "disk-room"


def test_an_ignored_failure_stops_nothing() -> None:
    tally = events.Tally()
    data = {"host": "one", "task": "t", "res": {"msg": "no"}, "ignore_errors": True}
    tally.feed({"event": "runner_on_failed", "event_data": data})
    stats = {"ok": {"one": 1}, "processed": {"one": 1}, "ignored": {"one": 1}, "failures": {}}
    tally.feed({"event": "playbook_on_stats", "event_data": stats})
    outcome = tally.outcome()
    assert events.exit_code(outcome) is Exit.DONE
    assert [failure.kind for failure in outcome.failures] == ["ignored"]


def test_long_diffs_are_cut_and_say_so() -> None:
    result = {"diff": {"before": "", "after": "\n".join(str(number) for number in range(5000))}}
    lines = events.diff_of(result).splitlines()
    assert len(lines) == events.DIFF_LINES_KEPT + 1
    assert lines[-1].endswith("more lines")


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("HF_TOKEN=hf_abcdefghijklmnopqrst", "HF_TOKEN=***"),
        ("curl -H 'Authorization: Bearer abc.def-123'", "curl -H 'Authorization: Bearer ***'"),
        ("--api-key s3cr3t --port 8000", "--api-key *** --port 8000"),
        ("https://user:pa55@host/path", "https://user:***@host/path"),
        ("vault_key: 'a b'", "vault_key: ***"),
        ("max_tokens: 512, tokenizer=auto", "max_tokens: 512, tokenizer=auto"),
        ("--api-key-file /etc/bringup/key", "--api-key-file /etc/bringup/key"),
        ("-----BEGIN OPENSSH PRIVATE KEY-----\nabc\nxyz\n", "-----BEGIN OPENSSH PRIVATE KEY-----***"),
    ],
)
def test_secrets_go_and_everything_else_stays(said: str, kept: str) -> None:
    assert redact.text(said) == kept
    assert "s3cr3t" not in redact.text(said)


def test_secrets_in_data_go_by_their_name_however_deep() -> None:
    data = {"extra": {"vault_api_key": "x", "deep": [{"password": 12345, "port": 8000}]}, "max_tokens": 5}
    assert redact.data(data) == {
        "extra": {"vault_api_key": "***", "deep": [{"password": "***", "port": 8000}]},
        "max_tokens": 5,
    }


def test_a_last_call_that_went_along_counts_as_the_role_it_is() -> None:
    tally = events.Tally()
    said = {"before": "a\n", "after": "b\n", "before_header": "plan", "after_header": "plan"}
    last = {"changed": True, "diff": said, "stamp": "/var/lib/bringup/runs/x"}
    result = {"changed": True, events.DONE: True, events.LAST: last}
    data = {"host": "one", "role": "scheduled_restart", "task": "Write timers", "res": result}
    tally.feed({"event": "runner_on_ok", "event_data": data})
    unfinished = tally.outcome()
    tally.feed({"event": "playbook_on_stats", "event_data": {"ok": {"one": 1}, "changed": {"one": 1}}})
    for outcome in (unfinished, tally.outcome()):
        host = outcome.hosts["one"]
        assert (host.ok, host.changed, host.done) == (2, 2, True)
        assert {name: (role.ok, role.changed) for name, role in host.roles.items()} == {
            "scheduled_restart": (1, 1),
            "run_stamp": (1, 1),
        }
        assert [change.role for change in outcome.changes] == ["scheduled_restart", "run_stamp"]
        assert "-a" in outcome.changes[1].diff
