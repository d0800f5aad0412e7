"""A node knows its plan and the runs that it has seen; a second run is no change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bringup.node import files, stamp

SUMMARY = {"plan": "abc", "host": "node", "services": []}


def visit(
    folder: Path, run: str, now: float, summary: dict[str, object] | None = None, keep: int = 3
) -> dict[str, object]:
    about = {"id": run, "by": "somebody", "commit": "0123456", "plan": "abc"}
    return stamp.ensure(folder / "etc/plan.json", folder / "runs", summary or SUMMARY, about, keep, now=now)


def test_the_second_run_of_a_plan_is_recorded_and_is_no_change(tmp_path: Path) -> None:
    assert visit(tmp_path, "one", 1000.0)["changed"] is True
    before = (tmp_path / "etc/plan.json").stat().st_mtime_ns
    assert visit(tmp_path, "two", 2000.0)["changed"] is False
    assert (tmp_path / "etc/plan.json").stat().st_mtime_ns == before
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_another_plan_is_a_change_and_shows_both(tmp_path: Path) -> None:
    visit(tmp_path, "one", 1000.0)
    answer = visit(tmp_path, "two", 2000.0, {**SUMMARY, "plan": "def"})
    assert answer["changed"] is True
    assert '"abc"' in str(answer["before"])
    assert '"def"' in str(answer["after"])


def test_check_mode_writes_nothing(tmp_path: Path) -> None:
    answer = stamp.ensure(
        tmp_path / "etc/plan.json", tmp_path / "runs", SUMMARY, {"id": "x"}, 3, check_only=True
    )
    assert (answer["changed"], answer["stamp"]) == (True, "")
    assert list(tmp_path.iterdir()) == []


def test_only_the_newest_stamps_stay_and_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "notes.txt").write_text("mine")
    for number in range(5):
        visit(tmp_path, f"run-{number}", 1_700_000_000.0 + number * 60)
    left = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert [name.split("-", 1)[1] for name in left[:-1]] == ["run-2.json", "run-3.json", "run-4.json"]
    assert left[-1] == "notes.txt"


def test_a_stamp_says_who_ran_what_and_when(tmp_path: Path) -> None:
    answer = visit(tmp_path, 'odd "name"/../..', 1_700_000_000.0)
    text = json.loads(Path(str(answer["stamp"])).read_text())
    assert (text["by"], text["commit"], text["at"], text["changed_plan"]) == (
        "somebody",
        "0123456",
        1_700_000_000.0,
        True,
    )
    assert Path(str(answer["stamp"])).parent == tmp_path / "runs"


def test_a_write_that_fails_leaves_the_old_text_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    files.write_atomic(path, "old")
    with pytest.raises(UnicodeEncodeError):
        files.write_atomic(path, "new \udc80")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_lock_that_is_held_is_waited_for_and_no_longer_than_its_limit(tmp_path: Path) -> None:
    with (
        files.locked(tmp_path / "lock", 1),
        pytest.raises(TimeoutError, match="by another run"),
        files.locked(tmp_path / "lock", 0.3),
    ):
        pass
    with files.locked(tmp_path / "lock", 0.3):
        assert (tmp_path / "lock").exists()
