"""How runbooks are asked for, what is done when a run is taken up again, and how runs are listed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bringup import events, report, runbooks, runindex, runs
from bringup.errors import Exit, UsageError
from bringup.events import Change, Failure, HostOutcome, Outcome


@pytest.mark.parametrize(
    ("serial", "batches"), [("1", ["1"]), ("4", ["1", "4"]), ("25%", ["1", "25%"]), ("100%", ["100%"])]
)
def test_one_host_goes_first_unless_all_go_at_once(serial: str, batches: list[str]) -> None:
    assert runbooks.in_batches(serial) == batches


@pytest.mark.parametrize("serial", ["0", "-1", "101%", "many", "", "1.5", "0%"])
def test_a_serial_that_is_none_is_refused(serial: str) -> None:
    with pytest.raises(UsageError, match="is no number of hosts"):
        runbooks.in_batches(serial)


def test_how_many_may_fail_is_said_in_one_way() -> None:
    assert runbooks.failures_allowed(0, fail_fast=True, keep_going=False) == 0
    assert runbooks.failures_allowed(10, fail_fast=False, keep_going=False) == 10
    assert runbooks.failures_allowed(0, fail_fast=False, keep_going=True) == 100
    with pytest.raises(UsageError, match="contradicts"):
        runbooks.failures_allowed(0, fail_fast=True, keep_going=True)
    with pytest.raises(UsageError, match="is no percentage"):
        runbooks.failures_allowed(101, fail_fast=False, keep_going=False)


def test_the_plan_of_a_runbook_names_the_canary_and_when_it_stops() -> None:
    book = runbooks.find("restart-servers")
    text = "\n".join(runbooks.plan_of(book, ["a", "b", "c"], ["1", "2"], 10))
    assert "a first, then 2 at a time; it stops when more than 10 % failed" in text
    assert "undo: none: a restart leaves nothing to undo" in text
    assert "all at once" in "\n".join(runbooks.plan_of(book, ["a", "b"], ["100%"], 0))


def test_the_undo_of_a_runbook_is_offered_only_where_there_is_one() -> None:
    assert runbooks.undo_of("stop-servers") == "invoke run start-servers"
    assert runbooks.undo_of("restart-servers") == ""
    assert runbooks.undo_of("not-there") == ""


def result(host: str, task: str, **more: Any) -> dict[str, Any]:
    return {"event": "runner_on_ok", "event_data": {"host": host, "task": task, "res": more}}


def test_a_host_is_done_when_it_was_given_back_without_a_failure() -> None:
    tally = events.Tally()
    tally.feed(result("one", events.GIVE_BACK))
    tally.feed(result("two", "Restart"))
    tally.feed(
        {"event": "runner_on_failed", "event_data": {"host": "three", "task": "x", "res": {"msg": "no"}}}
    )
    tally.feed(result("three", events.GIVE_BACK))
    assert {name: host.done for name, host in tally.outcome().hosts.items()} == {
        "one": True,
        "two": False,
        "three": False,
    }


def test_notes_of_tasks_reach_the_record_with_their_host(tmp_path: Path) -> None:
    tally = events.Tally()
    tally.feed(result("one", "Lock", bringup_notes=["Took over the lock of ann"]))
    record = runs.begin("provision", "lab", {}, notes=("first",), folder=tmp_path)
    finished = runs.finish(record, Exit.DONE, tally.outcome(), folder=tmp_path)
    assert finished.notes == ("first", "one: Took over the lock of ann")


def test_only_a_held_node_is_locked_and_any_other_failure_outweighs_it() -> None:
    lock = Failure("one", "play", "Lock: hold this node for the run", "held by ann")
    hosts = {"one": HostOutcome(failed=1), "two": HostOutcome(ok=1)}
    assert events.exit_code(Outcome(hosts=hosts, failures=(lock,))) is Exit.LOCKED
    other = Failure("two", "files", "Write", "no")
    assert events.exit_code(Outcome(hosts=hosts, failures=(lock, other))) is Exit.FAILED


def test_what_says_no_before_it_changes_anything_is_a_refusal_and_no_failure() -> None:
    tally = events.Tally()
    no = {"msg": "this node serves", "bringup_refused": True}
    tally.feed({"event": "runner_on_failed", "event_data": {"host": "one", "task": "Undo", "res": no}})
    assert events.exit_code(tally.outcome()) is Exit.LOCKED
    asserted = {"host": "two", "task": "Refuse a node without GPUs", "res": {"msg": "no"}}
    tally.feed({"event": "runner_on_failed", "event_data": asserted})
    outcome = tally.outcome()
    assert ([failure.refused for failure in outcome.failures], events.exit_code(outcome)) == (
        [True, True],
        Exit.LOCKED,
    )
    tally.feed(
        {"event": "runner_on_failed", "event_data": {"host": "three", "task": "x", "res": {"msg": "no"}}}
    )
    assert events.exit_code(tally.outcome()) is Exit.FAILED, "a failure outweighs it"


def test_a_run_says_the_next_step_that_its_kind_has(tmp_path: Path) -> None:
    def steps(playbook: str, code: Exit, outcome: Outcome, **arguments: object) -> list[str]:
        given = {"inventory": "lab", "playbook": playbook, **arguments}
        begun = runs.begin(playbook, "lab", given, folder=tmp_path)
        return report.next_steps(runs.finish(begun, code, outcome, folder=tmp_path))

    changed = Outcome(hosts={"one": HostOutcome(changed=1)}, changes=(Change("one", "r", "t"),))
    assert steps("provision", Exit.DONE, changed) == ["invoke status --inventory lab"]
    assert steps("undo", Exit.DONE, changed, limit="one") == [
        "invoke provision --inventory lab --limit one brings it again"
    ]
    refusal = Failure("one", "log_rotation", "Undo", "engine_service stands on it", refused=True)
    refused = Outcome(hosts={"one": HostOutcome(failed=1)}, failures=(refusal,))
    assert steps("undo", Exit.LOCKED, refused, tags="log_rotation,engine_env") == [
        "do what is said above, then invoke undo --inventory lab --role log_rotation --role engine_env"
    ]
    locked = Outcome(
        hosts={"one": HostOutcome(failed=1)}, failures=(Failure("one", "", "Lock: hold", "ann"),)
    )
    assert steps("undo", Exit.LOCKED, locked)[0].startswith("wait for who holds it")


def test_a_killed_run_knows_its_finished_hosts_from_its_events(tmp_path: Path) -> None:
    record = runs.begin("burn-in", "lab", {}, folder=tmp_path)
    lines = [
        {"event": "runner_on_ok", "host": "one", "task": "Verify", "res": {}},
        {"event": "runner_on_ok", "host": "one", "task": events.GIVE_BACK, "res": {}},
        {"event": "runner_on_ok", "host": "two", "task": "Verify", "res": {}},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"event": "runner_on'
    (tmp_path / record.id / "events.jsonl").write_text(text)
    assert runs.finished_hosts(record, tmp_path) == ["one"]


def test_a_failed_runbook_offers_its_undo_and_an_interrupted_one_to_be_taken_up() -> None:
    hosts = {"one": HostOutcome(ok=1, failed=1), "two": HostOutcome(ok=1)}
    failure = Failure("one", "play", "Stop", "no")
    given = {"playbook": "runbooks/stop-servers", "inventory": "lab"}
    made = runs.RunRecord("r1", "stop-servers", "lab", hosts=hosts, failures=(failure,), arguments=given)
    failed = runs.from_data({**runs.to_data(made), "exit_code": 4, "status": "failed"})
    assert report.next_steps(failed)[-1] == (
        "invoke run start-servers --inventory lab --limit one takes it back on what failed"
    )
    cut = runs.from_data({**runs.to_data(made), "exit_code": 130, "status": "interrupted"})
    assert "--resume r1" in report.next_steps(cut)[0]


def finished(base: Path, name: str, inventory: str) -> str:
    record = runs.begin(name, inventory, {}, folder=base)
    return runs.finish(record, Exit.DONE, Outcome(hosts={"a": HostOutcome(ok=1)}), folder=base).id


def test_the_index_lists_as_the_records_do_and_follows_them(tmp_path: Path) -> None:
    first, second = finished(tmp_path, "provision", "lab"), finished(tmp_path, "restart", "h20")
    assert {record.id for record in runindex.listed(folder=tmp_path)} == {first, second}
    assert [record.id for record in runindex.listed("h20", folder=tmp_path)] == [second]
    third = finished(tmp_path, "zz", "lab")
    assert runindex.listed(folder=tmp_path) == runs.listed(folder=tmp_path)
    assert len(runindex.listed(limit=2, folder=tmp_path)) == 2
    (tmp_path / third / "record.json").unlink()
    assert third not in {record.id for record in runindex.listed(folder=tmp_path)}


def test_a_broken_index_is_made_anew(tmp_path: Path) -> None:
    one = finished(tmp_path, "provision", "lab")
    (tmp_path / runindex.NAME).write_bytes(b"no database at all, and long enough to be read as one" * 40)
    assert [record.id for record in runindex.listed(folder=tmp_path)] == [one]
    assert (tmp_path / runindex.NAME).stat().st_mode & 0o077 == 0


def test_without_runs_nothing_is_listed(tmp_path: Path) -> None:
    assert runindex.listed(folder=tmp_path / "none") == []
    assert runindex.listed(folder=tmp_path) == []
