"""Draining, snapshots, answers and bundles of a node, on real files and real sockets."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from bringup.node import answers, bundle, common, drain, snapshot
from bringup.node.snapshot import NoSnapshot


def kept(base: Path, *paths: Path, now: float = 0.0) -> str:
    return snapshot.keep([str(path) for path in paths], base / "good", now)[0]


def test_a_snapshot_brings_back_text_mode_link_and_absence(tmp_path: Path) -> None:
    text, link, gone = tmp_path / "a b.unit", tmp_path / "link", tmp_path / "new"
    text.write_bytes(b'100% $HOME "\xff"\n')
    text.chmod(0o640)
    link.symlink_to("old")
    name = kept(tmp_path, text, link, gone)
    text.write_text("other")
    text.chmod(0o600)
    link.unlink()
    link.symlink_to("newer")
    gone.write_text("x")
    files = snapshot.read(snapshot.choose(name, tmp_path / "good"))
    assert snapshot.restore(files) == sorted(map(str, (text, gone, link)))
    assert text.read_bytes() == b'100% $HOME "\xff"\n'
    assert text.stat().st_mode & 0o777 == 0o640
    assert str(link.readlink()) == "old"
    assert not gone.exists()
    assert snapshot.restore(files) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a b.unit", "good", "link"]


def test_the_same_state_is_kept_once_and_five_states_at_most(tmp_path: Path) -> None:
    file = tmp_path / "unit"
    names = []
    for number in range(snapshot.KEPT + 2):
        file.write_text(str(number))
        names += [kept(tmp_path, file, now=number), kept(tmp_path, file, now=number + 0.5)]
    assert len(set(names)) == snapshot.KEPT + 2
    assert [path.stem for path in snapshot.kept(tmp_path / "good")] == list(dict.fromkeys(names))[2:]


def test_without_a_name_the_newest_that_differs_is_taken(tmp_path: Path) -> None:
    file = tmp_path / "unit"
    names = {}
    for number, text in enumerate(("one", "two", "three")):
        file.write_text(text)
        names[text] = kept(tmp_path, file, now=number)
    assert snapshot.choose(folder=tmp_path / "good").stem == names["two"]
    file.write_text("broken")
    assert snapshot.choose(folder=tmp_path / "good").stem == names["three"]


def test_a_later_snapshot_also_watches_over_what_an_earlier_one_had(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("served")
    first = kept(tmp_path, old)
    old.unlink()
    new.write_text("serves")
    kept(tmp_path, new, now=1)
    snapshot.restore(snapshot.read(snapshot.choose(first, tmp_path / "good")))
    assert old.read_text() == "served"


def test_nothing_to_go_back_to_is_said(tmp_path: Path) -> None:
    with pytest.raises(NoSnapshot, match="holds nothing else"):
        snapshot.choose(folder=tmp_path)
    file = tmp_path / "unit"
    kept(tmp_path, file)
    with pytest.raises(NoSnapshot, match="holds nothing else"):
        snapshot.choose(folder=tmp_path / "good")
    with pytest.raises(NoSnapshot, match="no snapshot elsewhere"):
        snapshot.choose("elsewhere", tmp_path / "good")


def test_snapshots_are_roots_only(tmp_path: Path) -> None:
    file = tmp_path / "unit"
    file.write_text("x")
    name = kept(tmp_path, file)
    assert (tmp_path / "good").stat().st_mode & 0o077 == 0
    assert (tmp_path / "good" / f"{name}.json").stat().st_mode & 0o077 == 0


def test_a_drain_marks_first_and_a_service_that_is_not_there_is_idle(tmp_path: Path) -> None:
    assert drain.drain(["nowhere"], 5, folder=tmp_path) == ({"nowhere": 0}, {})
    assert drain.marked(["nowhere", "other"], tmp_path) == ["nowhere"]
    drain.put_back(["nowhere", "other"], tmp_path)
    assert drain.marked(["nowhere", "other"], tmp_path) == []


def test_a_drain_says_where_new_connections_are_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "load", lambda name: {"name": name, "port": 8000})
    monkeypatch.setattr(common, "run", lambda command, stdin="": (127 if command[0] == "nft" else 0, "", ""))
    left, not_refused = drain.drain(["words"], 5, look=lambda service: 0, folder=tmp_path)
    assert (left, not_refused) == ({"words": 0}, {"words": drain.NO_NFT})


def test_a_bundle_holds_commands_and_files_and_what_is_missing_says_so(tmp_path: Path) -> None:
    log = tmp_path / "var/log/bringup/words/engine.log"
    log.parent.mkdir(parents=True)
    log.write_text("first\nlast\n")
    found = bundle.gather(tmp_path)
    assert found["files/var/log/bringup/words/engine.log"] == "first\nlast\n"
    assert "Linux" in found["system/uname"]
    assert set(bundle.COMMANDS) <= set(found)


def test_a_long_file_is_cut_at_a_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("".join(f"line {number}\n" for number in range(1000)))
    cut = bundle.tail(path, 100)
    assert cut.startswith("line ")
    assert cut.endswith("line 999\n")
    assert len(cut) <= 100


def test_load_that_nobody_waits_for_any_more_is_known_by_its_closed_output(tmp_path: Path) -> None:
    """What sshd gives a command as its output: a pipe or a socket, which it closes when the connection is lost."""
    reader, writer = os.pipe()
    ours, theirs = socket.socketpair()
    with ours, (tmp_path / "out").open("w") as file:
        kept = (writer, ours.fileno(), file.fileno())
        assert [answers.abandoned(descriptor) for descriptor in kept] == [False, False, False]
        os.close(reader)
        theirs.close()
        assert [answers.abandoned(descriptor) for descriptor in kept] == [True, True, False]
    os.close(writer)
