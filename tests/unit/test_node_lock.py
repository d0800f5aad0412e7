"""One run at a time on a node: who gets the lock, who is told what, and when it is over."""

from __future__ import annotations

import json
import multiprocessing
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from bringup import holding, runs
from bringup.node import nodelock

NOW = 1_000_000.0
HOST = "controller-1"


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Any]:
    return {"path": tmp_path / "run.json", "guard": tmp_path / "run.guard", "audit": tmp_path / "audit.jsonl"}


def run(token: str, **more: Any) -> dict[str, Any]:
    known = {
        "id": f"run-{token}",
        "by": "ann",
        "where": HOST,
        "machine": HOST,
        "pid": 1,
        "playbook": "provision",
    }
    return {"token": token, "since": "2026-11-30T00:00:00+00:00", **known, **more}


def test_a_free_node_is_held_and_the_same_run_renews(places: dict[str, Any]) -> None:
    assert nodelock.hold(run("a"), at=NOW, **places).how == "free"
    assert nodelock.hold(run("a", since="later"), at=NOW + 5, **places).how == "renewed"
    kept = json.loads(places["path"].read_text())
    assert (kept["renewed"], kept["since"]) == (NOW + 5, "2026-11-30T00:00:00+00:00")


def test_another_run_is_refused_and_told_who_holds_it(places: dict[str, Any]) -> None:
    nodelock.hold(run("a"), at=NOW, **places)
    taken = nodelock.hold(run("b"), at=NOW + 60, **places)
    assert (taken.held, taken.how, taken.holder["by"], taken.holder["idle_s"]) == (
        False,
        "refused",
        "ann",
        60.0,
    )
    said = holding.refusal(taken.holder)
    assert "held by ann on controller-1 since 2026-11-30" in said
    assert "run run-a" in said
    assert "--force-unlock" in said


def test_another_controller_is_told_whether_the_run_can_be_seen_and_until_when_it_holds(
    places: dict[str, Any],
) -> None:
    places["path"].write_text(json.dumps({**run("a"), "session": "", "renewed": NOW}))
    lost = nodelock.hold(run("b"), at=NOW + 600, **places).holder
    assert (lost["idle_s"], lost["left_s"]) == (600.0, nodelock.GRACE_S - 600)
    said = holding.refusal(lost)
    assert "Its SSH connection is gone, last sign of life 10 min ago" in said
    assert f"on {HOST} takes the lock over at once if it ended; here it is free in 50 min" in said
    mine = f"{os.getpid()}:{runs.birth_of(os.getpid())}"
    places["path"].write_text(json.dumps({**run("a"), "session": mine, "renewed": NOW}))
    there = nodelock.hold(run("b"), at=NOW + 600, **places).holder
    assert there["left_s"] is None
    assert "Its SSH connection is open, last renewed 10 min ago" in holding.refusal(there)


def test_a_lock_without_a_session_is_over_after_its_grace_and_not_before(places: dict[str, Any]) -> None:
    nodelock.hold(run("a"), at=NOW, **places)
    places["path"].write_text(json.dumps({**run("a"), "session": "", "renewed": NOW}))
    assert nodelock.hold(run("b"), at=NOW + nodelock.GRACE_S, **places).how == "refused"
    assert nodelock.hold(run("b"), at=NOW + nodelock.GRACE_S + 1, **places).how == "over"


def test_a_lock_whose_session_lives_is_never_over(places: dict[str, Any]) -> None:
    mine = f"{os.getpid()}:{runs.birth_of(os.getpid())}"
    places["path"].write_text(json.dumps({**run("a"), "session": mine, "renewed": NOW}))
    assert nodelock.hold(run("b"), at=NOW + 1e6, **places).how == "refused"
    places["path"].write_text(json.dumps({**run("a"), "session": f"{os.getpid()}:1", "renewed": NOW}))
    assert nodelock.hold(run("b"), at=NOW + 1e6, **places).how == "over"


def test_a_run_that_its_controller_knows_to_be_dead_is_taken_over(places: dict[str, Any]) -> None:
    nodelock.hold(run("a"), at=NOW, **places)
    assert nodelock.hold(run("b"), over="c", at=NOW, **places).how == "refused"
    assert nodelock.hold(run("b"), over="a", at=NOW, **places).how == "over"


def test_force_takes_it_from_anybody_and_is_written_down(places: dict[str, Any]) -> None:
    nodelock.hold(run("a"), at=NOW, **places)
    assert not places["audit"].exists()
    assert nodelock.hold(run("b", by="bob"), force=True, at=NOW, **places).how == "forced"
    [line] = places["audit"].read_text().splitlines()
    entry = json.loads(line)
    assert (entry["what"], entry["by"]["by"], entry["held"]["by"]) == ("force-unlock", "bob", "ann")
    assert places["audit"].stat().st_mode & 0o077 == 0


def test_only_the_holder_gives_it_back(places: dict[str, Any]) -> None:
    where = {name: places[name] for name in ("path", "guard")}
    nodelock.hold(run("a"), at=NOW, **places)
    assert nodelock.give_back("b", **where) is False
    assert nodelock.give_back("a", **where) is True
    assert nodelock.give_back("a", **where) is False
    assert nodelock.hold(run("b"), at=NOW, **places).how == "free"


@pytest.mark.parametrize("text", ["", "nonsense", "[]", "{}", '{"token": ""}', "\0"])
def test_a_broken_lock_file_holds_nothing(places: dict[str, Any], text: str) -> None:
    places["path"].write_text(text)
    assert nodelock.hold(run("a"), at=NOW, **places).how == "free"


def _race(token: str, base: str, found: Any) -> None:
    places: dict[str, Any] = {name: Path(base) / f"run.{name}" for name in ("path", "guard", "audit")}
    found.put(nodelock.hold(run(token), **places).held)


def test_of_many_that_come_at_once_one_gets_it(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    found = context.Queue()
    racers = [context.Process(target=_race, args=(str(n), str(tmp_path), found)) for n in range(6)]
    for racer in racers:
        racer.start()
    won = [found.get(timeout=240) for _ in racers]
    for racer in racers:
        racer.join(60)
    assert sum(won) == 1


def test_a_session_is_the_sshd_above_this_process(tmp_path: Path) -> None:
    for pid, name, parent in (
        (50, "python3", 40),
        (40, "sudo (x", 30),
        (30, "sshd-session", 1),
        (7, "bash", 1),
    ):
        (tmp_path / str(pid)).mkdir()
        fields = ["S", str(parent), *["0"] * 17, str(pid * 100)]
        (tmp_path / str(pid) / "stat").write_text(f"{pid} ({name}) {' '.join(fields)} 0\n")
    assert nodelock.session(50, tmp_path) == "30:3000"
    assert nodelock.session(7, tmp_path) == ""
    assert nodelock.session_lives("30:3000", tmp_path)
    assert not nodelock.session_lives("30:9", tmp_path)
    assert not nodelock.session_lives("", tmp_path)
    dead = (tmp_path / "30" / "stat").read_text().replace(") S ", ") Z ")
    (tmp_path / "30" / "stat").write_text(dead)
    assert not nodelock.session_lives("30:3000", tmp_path)


def test_stamps_are_written_and_the_oldest_go(tmp_path: Path) -> None:
    for number in range(nodelock.STAMPS_KEPT + 3):
        nodelock.stamp({"id": f"r{number}", "playbook": "rotate-logs"}, tmp_path, at=NOW + number)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert len(left) == nodelock.STAMPS_KEPT
    assert json.loads((tmp_path / left[-1]).read_text())["playbook"] == "rotate-logs"


def test_a_run_of_this_machine_is_gone_when_its_process_is(tmp_path: Path) -> None:
    me = holding.identity(os.getpid(), "x/provision.yml:7")
    assert not holding.is_gone(me, me["machine"])
    assert not holding.is_gone({**me, "pid": 2**22 + 7}, "another-machine")
    assert holding.is_gone({**me, "pid": 2**22 + 7}, me["machine"])
    assert holding.is_gone({**me, "birth": "1"}, me["machine"])


def test_notes_say_what_became_of_another_run_and_why_it_could_not_wait() -> None:
    other = run("a")
    assert holding.notes({"how": "free"}, "") == []
    assert holding.notes({"how": "over", "other": other}, "")[0].startswith(
        "Took over the lock of ann (provision"
    )
    assert "Broke the lock of ann" in holding.notes({"how": "forced", "other": other}, "fire")[0]
    assert holding.notes({"how": "free"}, "fire") == ["Outside of its change window: fire"]


def test_a_closed_window_says_when_it_opens_and_what_to_do() -> None:
    now = datetime(2026, 11, 30, 8, 0, tzinfo=UTC)
    assert holding.closed(["Mon 07:00-09:00"], now) == ""
    said = holding.closed(["Tue 07:00-09:00"], now)
    assert "It is Mon 08:00 UTC" in said
    assert "Tue 07:00-09:00" in said
    assert "--outside-window" in said


def test_two_playbooks_of_one_run_that_end_within_a_second_leave_a_stamp_each(tmp_path: Path) -> None:
    names = ("pause-schedules", "resume-schedules", "rotate-logs")
    for name in names:
        nodelock.stamp({"id": "r", "playbook": name}, tmp_path, at=1_000_000.0)
    kept = [json.loads(path.read_text())["playbook"] for path in tmp_path.iterdir()]
    assert sorted(kept) == sorted(names)
