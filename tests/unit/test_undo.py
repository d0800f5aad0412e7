"""A journal brings back what was there: bytes, rights, links, folders, values."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bringup.node import place, undo
from bringup.node.undo import Journal


def tree(folder: Path) -> dict[str, Any]:
    """All that is below a folder, as the journal sees it."""
    return {str(path.relative_to(folder)): undo.look(path) for path in sorted(folder.rglob("*"))}


@pytest.fixture(autouse=True)
def _quiet_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(undo, "FOLDER", tmp_path / "state" / "undo")
    monkeypatch.setattr(undo, "run", lambda argv, limit_s=0: (0, ""))


@pytest.fixture
def node(tmp_path: Path) -> Path:
    folder = tmp_path / "node"
    (folder / "etc").mkdir(parents=True)
    (folder / "etc" / "settings.conf").write_bytes(b'old = "100% $HOME"\n\xff\x00')
    (folder / "etc" / "settings.conf").chmod(0o640)
    (folder / "etc" / "link").symlink_to("settings.conf")
    return folder


def entries(node: Path) -> list[dict[str, Any]]:
    owner = {"owner": str(os.getuid()), "group": str(os.getgid())} if os.getuid() else {}
    return [
        {"path": str(node / "etc/settings.conf"), "content": "new\n", **owner},
        {"path": str(node / "etc/deep/er/new.conf"), "content": "new\n", **owner},
        {"path": str(node / "etc/link"), "state": "link", "target": "/elsewhere"},
        {"path": str(node / "etc/gone"), "state": "absent"},
    ]


def test_files_links_and_folders_come_back_byte_for_byte(node: Path) -> None:
    before = tree(node)
    assert place.apply(entries(node), undo="demo")["changed"]
    assert tree(node) != before
    done = Journal("demo").restore()
    assert tree(node) == before
    assert any(line.startswith("remove") and line.endswith("deep/er") for line in done)


def test_a_second_change_does_not_replace_the_first_memory(node: Path) -> None:
    before = tree(node)
    place.apply(entries(node), undo="demo")
    again = [{**row, "content": "newer\n"} if "content" in row else row for row in entries(node)]
    place.apply(again, undo="demo")
    Journal("demo").restore()
    assert tree(node) == before


def test_a_folder_that_somebody_filled_since_stays(node: Path) -> None:
    place.apply(entries(node), undo="demo")
    (node / "etc/deep/er/theirs").write_text("theirs")
    Journal("demo").restore()
    assert (node / "etc/deep/er/theirs").read_text() == "theirs"
    assert not (node / "etc/deep/er/new.conf").exists()


def test_after_an_undo_nothing_is_left_and_another_finds_nothing_to_do(node: Path, tmp_path: Path) -> None:
    place.apply(entries(node), undo="demo")
    assert (tmp_path / "state/undo/demo.json").stat().st_mode & 0o777 == 0o600
    Journal("demo").restore()
    assert not (tmp_path / "state").exists()
    assert Journal("demo").restore() == []


def test_check_mode_says_the_same_and_changes_nothing(node: Path) -> None:
    place.apply(entries(node), undo="demo")
    before = tree(node)
    said = Journal("demo").restore(check_only=True)
    assert tree(node) == before
    assert Journal("demo").restore() == said


def test_check_mode_of_a_change_remembers_nothing(node: Path, tmp_path: Path) -> None:
    place.apply(entries(node), check_only=True, undo="demo")
    assert not (tmp_path / "state").exists()


def test_a_folder_that_was_made_and_filled_goes_whole_and_one_that_was_there_stays(node: Path) -> None:
    before = tree(node)
    journal = Journal("demo")
    journal.remember_trees([node / "opt/new/one", node / "etc"])
    (node / "opt/new/one/deep").mkdir(parents=True)
    (node / "opt/new/one/deep/file").write_text("new")
    journal.remember_trees([node / "opt/new/one"])
    said = Journal("demo").restore(check_only=True)
    assert said[0] == f"remove {node}/opt/new/one and all in it"
    assert Journal("demo").restore() == said
    assert tree(node) == before


def test_a_folder_that_a_process_runs_from_stays_and_so_does_all_else(node: Path) -> None:
    tool = node / "opt/tool/sleep"
    Journal("demo").remember_trees([tool.parent])
    place.apply(entries(node), undo="demo")
    tool.parent.mkdir(parents=True)
    shutil.copy(shutil.which("sleep") or "", tool)
    changed = tree(node)
    with subprocess.Popen([tool, "600"]) as process:
        try:
            with pytest.raises(
                undo.UndoFailed, match=rf"processes {process.pid} run from {tool.parent}\. Stop"
            ):
                Journal("demo").restore()
        finally:
            process.kill()
    assert tree(node) == changed
    Journal("demo").restore()
    assert not tool.parent.exists()


def test_the_size_of_a_file_system_in_memory_comes_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sizes = {tmp_path: 64 << 20}
    ran: list[list[str]] = []
    monkeypatch.setattr(undo, "size_of", lambda mount: sizes[mount])

    def run(argv: Sequence[str], limit_s: float = 0) -> tuple[int, str]:
        ran.append(list(argv))
        return 0, ""

    monkeypatch.setattr(undo, "run", run)
    Journal("demo").remember_size(tmp_path)
    sizes[tmp_path] = 1 << 30
    Journal("demo").remember_size(tmp_path)
    assert Journal("demo").restore() == [f"size of {tmp_path}: {64 << 20} bytes"]
    assert ["mount", "-o", f"remount,size={64 << 20}", str(tmp_path)] in ran


def test_values_come_back_as_text(node: Path) -> None:
    value = node / "swappiness"
    value.write_text("60\n")
    Journal("demo").remember_value(str(value), "60")
    value.write_text("10\n")
    Journal("demo").restore()
    assert value.read_text() == "60\n"


def test_packages_that_came_and_those_that_were_replaced_are_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states = [{"a:all": "1", "b:all": "1"}, {"a:all": "2", "b:all": "1", "c:all": "5"}]
    monkeypatch.setattr(undo, "installed", lambda which="i": states[0])
    journal = Journal("demo")
    journal.begin_install()
    monkeypatch.setattr(undo, "installed", lambda which="i": states[1])
    Journal("demo").end_install()
    assert Journal("demo").data["packages"] == {"added": ["c:all"], "replaced": {"a:all": "1"}}
    said = Journal("demo").restore(check_only=True)
    assert said == ["install a:all=1", "purge c:all"]


def test_an_install_that_was_killed_is_undone_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def run(argv: Sequence[str], limit_s: float = 0) -> tuple[int, str]:
        ran.append(list(argv))
        return 0, ""

    monkeypatch.setattr(undo, "run", run)
    monkeypatch.setattr(undo, "installed", lambda which="i": {})
    Journal("demo").begin_install()
    monkeypatch.setattr(undo, "installed", lambda which="i": {"c:all": "5"})
    assert Journal("demo").restore() == ["purge c:all"]
    assert ["dpkg", "--purge", "c:all"] in ran


def test_what_cannot_be_brought_back_is_named_and_the_journal_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(undo, "installed", lambda which="i": {})
    Journal("demo").begin_install()
    monkeypatch.setattr(undo, "installed", lambda which="i": {"c:all": "5"})
    monkeypatch.setattr(undo, "run", lambda argv, limit_s=0: (1, "c is needed by d"))
    with pytest.raises(undo.UndoFailed, match="c is needed by d"):
        Journal("demo").restore()
    assert (tmp_path / "state/undo/demo.json").exists()


def test_a_thing_of_two_roles_goes_with_the_last_of_them_whichever_that_is(node: Path) -> None:
    before = tree(node)
    shared = entries(node)[:2]
    for first, last in (("one", "two"), ("two", "one")):
        place.apply(shared, undo="one")
        made = tree(node)
        place.apply(shared, undo="two")
        Journal(first).restore()
        assert tree(node) == made
        Journal(last).restore()
        assert tree(node) == before


def test_a_folder_that_is_ours_whole_goes_with_what_programs_put_there(node: Path) -> None:
    before = tree(node)
    place.apply([{**folder, "whole": True} for folder in folders(node)], undo="one")
    place.apply([{**folder, "whole": True} for folder in folders(node)], undo="two")
    (node / "state/cache").write_text("made by a program")
    Journal("one").restore()
    assert (node / "state/cache").exists()
    Journal("two").restore()
    assert tree(node) == before


def folders(node: Path) -> list[dict[str, Any]]:
    owner = {"owner": str(os.getuid()), "group": str(os.getgid())} if os.getuid() else {}
    return [{"path": str(node / "state"), "state": "directory", "mode": "0755", **owner}]


def test_of_a_folder_with_precious_content_only_what_was_brought_goes_and_nothing_while_it_is_used(
    node: Path,
) -> None:
    shelf = node / "srv/model"
    files = [shelf / "one.bin", shelf / "deep/two.bin"]
    Journal("demo").remember_content(shelf, files, [shelf / ".ours"])
    for path in (*files, shelf / ".ours/stamp", shelf / "adapter.bin"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("weights")
    # A later run finds its own files, which makes them nobody else's.
    Journal("demo").remember_content(shelf, files, [shelf / ".ours"])
    used = Journal("demo")
    assert used.restore(used_by=lambda folder: ["process 7"]) == []
    assert used.kept == [f"{shelf}: process 7 uses it. Once nothing does, run this again"]
    assert files[1].exists()
    free = Journal("demo")
    said = Journal("demo").restore(check_only=True)
    assert free.restore() == said
    assert free.kept == [f"{shelf}: holds adapter.bin"]
    assert sorted(path.name for path in shelf.rglob("*")) == ["adapter.bin"]
    assert Journal("demo").is_empty()


def test_files_that_were_there_before_stay_and_are_named(node: Path) -> None:
    before = tree(node)
    journal = Journal("demo")
    journal.remember_content(node / "etc", [node / "etc/settings.conf", node / "etc/new"])
    (node / "etc/new").write_text("new")
    done = Journal("demo")
    assert done.restore() == [f"remove {node}/etc/new"]
    assert done.kept == [f"{node}/etc: files that were there before"]
    assert tree(node) == before


def test_an_undo_takes_the_roles_seal_away_and_no_others(node: Path, tmp_path: Path) -> None:
    seals = tmp_path / "state" / "seals"
    place.apply(entries(node), undo="demo")
    for name in ("demo", "other"):
        (seals / "claims").mkdir(parents=True, exist_ok=True)
        (seals / f"{name}.json").write_text("{}")
        (seals / "claims" / f"{name}.json").write_text("{}")
    Journal("demo").restore()
    assert sorted(path.name for path in seals.rglob("*.json")) == ["other.json", "other.json"]
