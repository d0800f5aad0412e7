"""Undoing roles: which, in which order, and what is refused before anything is asked or changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from bringup import undoing
from bringup.errors import Locked, UsageError
from bringup.node import stopping
from bringup.rolevars import ROLES
from plugins.action import node_files


def test_the_last_role_is_undone_first_and_preflight_never() -> None:
    assert [*reversed(undoing.ORDER)] == [role for role in ROLES if role != "preflight"]


def test_every_wrong_word_is_named_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        undoing.run("lab", ["engine_servise", "preflight"], while_serving="kill")
    said = str(caught.value)
    assert all(word in said for word in ("engine_servise", "engine_service", "preflight", "kill"))


def test_without_a_terminal_an_undo_needs_yes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    with pytest.raises(Locked, match="--yes"):
        undoing.run("lab", ["run_stamp"])


def test_a_server_that_is_up_is_named_with_what_to_do() -> None:
    said = stopping.refusal([{"name": "words", "unit": "bringup-words", "port": 8000}])
    assert "words (bringup-words, port 8000)" in said
    assert "--while-serving drain" in said


def test_servers_that_are_described_and_do_not_run_are_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "words.json").write_text('{"name": "words", "unit": "bringup-no-such-unit"}')
    (tmp_path / "broken.json").write_text("{")
    assert stopping.up(tmp_path) == []
    assert stopping.up(tmp_path / "missing") == []


def test_a_rehearsal_says_each_thing_once_and_a_changed_thing_again() -> None:
    first = [{"path": "/a", "content": "1"}, {"path": "/b", "content": "1"}]
    left, facts = node_files._unsaid(first, {})
    assert left == first
    second = [{"path": "/a", "content": "1"}, {"path": "/b", "content": "2"}]
    left, more = node_files._unsaid(second, facts)
    assert left == second[1:]
    left, _ = node_files._unsaid(first, {**facts, **more})
    assert left == first[1:]
