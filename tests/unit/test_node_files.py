"""Files of a role: all validated before any is changed, whole or not there, and check mode tells no lies."""

from __future__ import annotations

import getpass
import grp
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from bringup.node import place, seal, units

USER = getpass.getuser()
GROUP = grp.getgrgid(os.getgid()).gr_name


def entry(path: Path, **fields: Any) -> dict[str, Any]:
    return {"path": str(path), "owner": USER, "group": GROUP, **fields}


@pytest.fixture
def entries(tmp_path: Path) -> list[dict[str, Any]]:
    """In an odd order: the link first, the folder last."""
    return [
        entry(tmp_path / "etc/link", state="link", target="file"),
        entry(tmp_path / "etc/file", content="100% $HOME ü\n", mode="0640"),
        entry(tmp_path / "etc/gone", state="absent"),
        entry(tmp_path / "etc", state="directory", mode="0750"),
    ]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_folders_files_and_links_come_with_their_rights_and_then_stay(
    tmp_path: Path, entries: list[dict[str, Any]]
) -> None:
    done = place.apply(entries)
    assert (tmp_path / "etc/file").read_text() == "100% $HOME ü\n"
    assert (mode(tmp_path / "etc"), mode(tmp_path / "etc/file")) == (0o750, 0o640)
    assert (tmp_path / "etc/link").readlink() == Path("file")
    assert done["changed_paths"] == [str(tmp_path / name) for name in ("etc", "etc/file", "etc/link")]
    assert place.apply(entries) == {"changed": False, "changed_paths": [], "diff": []}
    assert sorted(path.name for path in (tmp_path / "etc").iterdir()) == ["file", "link"]


def test_check_mode_tells_the_same_and_changes_nothing(tmp_path: Path, entries: list[dict[str, Any]]) -> None:
    told = place.apply(entries, check_only=True)
    assert list(tmp_path.iterdir()) == []
    assert place.apply(entries) == told


def test_only_rights_that_differ_are_set_and_the_file_stays_the_same_one(tmp_path: Path) -> None:
    one = [entry(tmp_path / "file", content="x", mode="0644")]
    place.apply(one)
    before = (tmp_path / "file").stat().st_ino
    done = place.apply([{**one[0], "mode": "0600"}])
    assert done["changed"]
    assert ((tmp_path / "file").stat().st_ino, mode(tmp_path / "file")) == (before, 0o600)


def test_one_bad_file_keeps_all_files_as_they_were(tmp_path: Path) -> None:
    good = entry(tmp_path / "good", content="new", validate=["grep", "-q", "new", "%s"])
    bad = entry(tmp_path / "bad", content="wrong", validate=["grep", "new", "%s"])
    with pytest.raises(place.PlaceFailed, match="bad: grep refuses it"):
        place.apply([good, bad])
    assert list(tmp_path.iterdir()) == []


def test_files_that_name_each_other_are_validated_side_by_side(tmp_path: Path) -> None:
    see = ["sh", "-c", 'test -f "$(dirname "%s")/other"']
    place.apply(
        [
            entry(tmp_path / "one", content="1", validate=see),
            entry(tmp_path / "other", content="2", validate=["true"]),
        ]
    )
    assert (tmp_path / "one").read_text() == "1"


def test_systemd_refuses_a_unit_that_it_does_not_understand(tmp_path: Path) -> None:
    verify = ["systemd-analyze", "verify", "--man=no", "%s"]
    with pytest.raises(place.PlaceFailed, match="systemd-analyze refuses it"):
        place.apply(
            [entry(tmp_path / "x.service", content="[Service]\nExecStart=/nonexistent\n", validate=verify)]
        )


def test_a_secret_is_in_no_difference(tmp_path: Path) -> None:
    told = place.apply([entry(tmp_path / "key", content="sesame", mode="0600", secret=True)])
    told_again = place.apply([entry(tmp_path / "key", content="open", mode="0600", secret=True)])
    assert (tmp_path / "key").read_text() == "open"
    for outcome in (told, told_again):
        assert outcome["changed"]
        assert "sesame" not in str(outcome["diff"])
        assert "open" not in str(outcome["diff"])
        assert outcome["diff"][0]["before"] != outcome["diff"][0]["after"]


def test_a_user_that_is_not_there_is_named_before_anything_changes(tmp_path: Path) -> None:
    rows = [
        entry(tmp_path / "a", content="x"),
        {**entry(tmp_path / "b", content="x"), "owner": "no-such-user"},
    ]
    with pytest.raises(place.PlaceFailed, match="no user no-such-user on this node"):
        place.apply(rows)
    assert list(tmp_path.iterdir()) == []
    assert place.apply(rows, check_only=True)["changed"], "in check mode the role would have made the user"


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([{"path": "relative"}], "not an absolute path"),
        ([{"path": "/tmp/x"}, {"path": "/tmp/x"}], "given twice"),
        ([{"path": "/tmp/x", "state": "present"}], "state present"),
        ([{"path": "/tmp", "content": "x"}], "is a folder, a file was planned"),
    ],
)
def test_entries_that_make_no_sense_are_refused(rows: list[dict[str, Any]], why: str) -> None:
    with pytest.raises(place.PlaceFailed, match=why):
        place.apply(rows)


def test_a_link_is_replaced_in_one_step_and_a_file_in_its_place_too(tmp_path: Path) -> None:
    (tmp_path / "link").write_text("a file")
    place.apply([entry(tmp_path / "link", state="link", target="a")])
    place.apply([entry(tmp_path / "link", state="link", target="b")])
    assert (tmp_path / "link").readlink() == Path("b")


def test_a_file_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("keep")
    (tmp_path / "file").symlink_to("precious")
    place.apply([entry(tmp_path / "file", content="new")])
    assert (tmp_path / "precious").read_text() == "keep"
    assert not (tmp_path / "file").is_symlink()


RUNNING = {
    "LoadState": "loaded",
    "ActiveState": "active",
    "UnitFileState": "enabled",
    "NeedDaemonReload": "no",
    "Listen": "",
}
ABSENT = {**RUNNING, "LoadState": "not-found", "ActiveState": "inactive", "UnitFileState": ""}


@pytest.mark.parametrize(
    ("unit", "state", "changed", "steps"),
    [
        (units.Unit("a.service"), ABSENT, [], ["enable", "start"]),
        (units.Unit("a.service"), RUNNING, [], []),
        (units.Unit("a.service", restart_on=("/x",)), RUNNING, ["/x"], ["restart"]),
        (units.Unit("a.service", restart_on=("/x",)), RUNNING, ["/y"], []),
        (units.Unit("a.service", started=None), {**RUNNING, "ActiveState": "failed"}, [], []),
        (units.Unit("a.service", enabled=False, started=False), RUNNING, [], ["disable", "stop"]),
        (units.Unit("a.service"), {**RUNNING, "ActiveState": "activating"}, [], []),
    ],
)
def test_a_unit_gets_only_the_steps_that_it_needs(
    unit: units.Unit, state: dict[str, str], changed: list[str], steps: list[str]
) -> None:
    assert units.steps(unit, state, changed) == steps


def test_a_socket_that_systemd_let_go_of_is_restarted_and_what_is_written_meanwhile_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fifo, manager = tmp_path / "log", tmp_path / "fd"
    os.mkfifo(fifo)
    manager.mkdir()
    (manager / "3").symlink_to(fifo)
    (manager / "4").symlink_to(tmp_path / "gone")
    monkeypatch.setattr(seal, "MANAGER_FILES", manager)
    unit, listen = units.Unit("bringup-log-a.socket"), f"/nowhere (Stream) {fifo} (FIFO)"
    state, row = {**RUNNING, "Listen": listen}, seal.unit_row("bringup-log-a.socket", on=True, active=True)
    shown = seal.Shown()
    shown.units = {unit.name: state}
    assert units.steps(unit, state, []) == []
    assert seal.differences(row, seal.observe(row, shown)) == []
    (manager / "3").unlink()
    assert units.steps(unit, state, []) == ["restart"]
    (told,) = seal.differences(row, seal.observe(row, shown))
    assert (told["what"], told["field"], told["found"]) == ("unit bringup-log-a.socket", "listens", False)
    with units.kept_open(listen):
        writer = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
        os.write(writer, b"said meanwhile")
        reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    assert os.read(reader, 100) == b"said meanwhile"
    for handle in (writer, reader):
        os.close(handle)


def test_a_property_with_several_lines_keeps_all_of_them() -> None:
    assert seal.properties("Listen=/a (FIFO)\nListen=/b (FIFO)\nNames=x=y") == {
        "Listen": "/a (FIFO) /b (FIFO)",
        "Names": "x=y",
    }
