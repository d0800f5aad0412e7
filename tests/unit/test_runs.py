"""Records are written whole, chained, free of secrets, and found again."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import subprocess
from pathlib import Path

import pytest

from bringup import lock, runs
from bringup.errors import Exit, Locked, UsageError
from bringup.events import Change, Failure, HostOutcome, Outcome, RoleOutcome

OUTCOME = Outcome(
    hosts={"one": HostOutcome(ok=3, changed=1, roles={"files": RoleOutcome(ok=3, changed=1, end_s=2.0)})},
    changes=(Change("one", "files", "Write", "+a"),),
    failures=(Failure("one", "files", "Break", "100% $HOME \u00fc", "rescued"),),
)


def finished(base: Path, name: str = "provision", code: Exit = Exit.DONE) -> runs.RunRecord:
    record = runs.begin(name, "lab", {"extra": {"vault_key": "s3cr3t", "port": 1}}, folder=base)
    return runs.finish(record, code, OUTCOME, folder=base, notes=("a note",))


def test_a_run_is_on_disk_as_begun_before_it_does_anything(tmp_path: Path) -> None:
    record = runs.begin("provision", "lab", {}, plan_digest="abc", folder=tmp_path)
    data = json.loads((tmp_path / record.id / "record.json").read_text())
    assert (data["status"], data["exit_code"], data["plan_digest"]) == ("begun", None, "abc")
    assert data["who"]
    assert data["begun"]
    assert data["versions"]["ansible-core"]


def test_a_finished_record_reads_back_as_it_was_written(tmp_path: Path) -> None:
    record = finished(tmp_path)
    assert runs.read(record.id, tmp_path) == record
    assert record.hosts["one"].roles["files"].seconds == 2.0
    assert record.changed == 1


def test_records_and_their_folders_are_for_their_owner_only(tmp_path: Path) -> None:
    record = finished(tmp_path / "runs")
    folder = tmp_path / "runs" / record.id
    assert folder.stat().st_mode & 0o077 == 0
    assert (folder / "record.json").stat().st_mode & 0o077 == 0


def test_arguments_lose_their_secrets(tmp_path: Path) -> None:
    record = finished(tmp_path)
    assert record.arguments["extra"] == {"vault_key": "***", "port": 1}
    assert "s3cr3t" not in (tmp_path / record.id / "record.json").read_text()


def test_two_runs_in_the_same_second_get_folders_of_their_own(tmp_path: Path) -> None:
    ids = {runs.begin("provision", "lab", {}, folder=tmp_path).id for _ in range(5)}
    assert len(ids) == 5
    assert ids == set(runs.ids(tmp_path))


def test_the_chain_of_untouched_records_holds(tmp_path: Path) -> None:
    for _ in range(4):
        finished(tmp_path)
    runs.begin("provision", "lab", {}, folder=tmp_path)
    assert runs.verify(tmp_path) == []


def change_a_record(base: Path, run_id: str) -> None:
    path = base / run_id / "record.json"
    path.write_text(path.read_text().replace('"failed": 0', '"failed": 1', 1))


def change_and_seal_again(base: Path, run_id: str) -> None:
    forged = dataclasses.replace(runs.read(run_id, base), who="somebody else")
    runs.write(dataclasses.replace(forged, digest=runs.digest_of(forged)), base)


def remove_a_record(base: Path, run_id: str) -> None:
    (base / run_id / "record.json").unlink()


def remove_a_line(base: Path, run_id: str) -> None:
    lines = (base / "chain.jsonl").read_text().splitlines(keepends=True)
    (base / "chain.jsonl").write_text("".join(line for line in lines if run_id not in line))


def tear_the_chain(base: Path, run_id: str) -> None:
    text = (base / "chain.jsonl").read_text()
    (base / "chain.jsonl").write_text(text[:-40])


@pytest.mark.parametrize(
    "damage",
    [change_a_record, change_and_seal_again, remove_a_record, remove_a_line, tear_the_chain],
    ids=lambda damage: damage.__name__,
)
def test_every_way_to_tamper_shows(tmp_path: Path, damage: object) -> None:
    records = [finished(tmp_path, f"run{number}") for number in range(3)]
    assert callable(damage)
    damage(tmp_path, records[1].id)
    assert runs.verify(tmp_path) != []


def test_a_run_whose_process_is_gone_reads_as_lost(tmp_path: Path) -> None:
    record = runs.begin("provision", "lab", {}, folder=tmp_path)
    gone = dataclasses.replace(record, pid=dead_pid())
    runs.write(gone, tmp_path)
    assert runs.read(record.id, tmp_path).status == "lost"


def test_runs_are_found_by_id_by_part_and_as_last(tmp_path: Path) -> None:
    first, last = finished(tmp_path, "aaa"), finished(tmp_path, "zzz")
    assert runs.find(first.id, tmp_path) == first
    assert runs.find("aaa", tmp_path) == first
    assert runs.find("last", tmp_path) == last
    with pytest.raises(UsageError, match="names 2 runs"):
        runs.find("lab", tmp_path)
    with pytest.raises(UsageError, match="no such run"):
        runs.find("never", tmp_path)


def test_a_damaged_record_is_named_and_hides_no_other(tmp_path: Path) -> None:
    good, bad = finished(tmp_path, "good"), finished(tmp_path, "bad")
    (tmp_path / bad.id / "record.json").write_text("{half")
    assert [record.id for record in runs.listed(folder=tmp_path)] == [good.id]
    with pytest.raises(UsageError, match=r"record.json: is no JSON"):
        runs.read(bad.id, tmp_path)


def test_the_list_is_newest_first_and_of_one_inventory(tmp_path: Path) -> None:
    finished(tmp_path, "aaa")
    runs.begin("bbb", "h20", {}, folder=tmp_path)
    finished(tmp_path, "ccc")
    assert [record.name for record in runs.listed("lab", folder=tmp_path)] == ["ccc", "aaa"]
    assert len(runs.listed(limit=1, folder=tmp_path)) == 1


def test_a_diff_names_what_differs_and_nothing_else(tmp_path: Path) -> None:
    one, other = finished(tmp_path, "aaa"), finished(tmp_path, "bbb", Exit.FAILED)
    rows = {label: (left, right) for label, left, right in runs.diff(one, other)}
    assert rows["name"] == ("aaa", "bbb")
    assert rows["status"] == ("done", "failed")
    assert "who" not in rows
    assert "hosts.one" not in rows


# ---------------------------------------------------------------- locks


def dead_pid() -> int:
    process = multiprocessing.get_context("spawn").Process(target=os.getpid)
    process.start()
    process.join()
    assert process.pid is not None
    return process.pid


def test_a_lock_says_who_holds_it_since_when_and_how_to_go_on(tmp_path: Path) -> None:
    with (
        lock.hold("lab", "provision lab", folder=tmp_path),
        pytest.raises(
            Locked, match=r"is locked by .+ since .+ \(provision lab, process \d+\).+--force-unlock"
        ),
        lock.hold("lab", "restart lab", folder=tmp_path),
    ):
        pass
    assert lock.holder("lab", tmp_path) is None


def test_another_inventory_is_not_locked(tmp_path: Path) -> None:
    with lock.hold("lab", "a", folder=tmp_path), lock.hold("h20", "b", folder=tmp_path) as notes:
        assert notes == ()


def forge(base: Path, **changes: object) -> None:
    path = base / ".locks" / "lab.json"
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, **changes}))


def test_a_dead_process_gives_its_lock_up(tmp_path: Path) -> None:
    with lock.hold("lab", "a", folder=tmp_path):
        forge(tmp_path, pid=dead_pid())
        with lock.hold("lab", "b", folder=tmp_path) as notes:
            assert "gone" in notes[0]


def test_a_process_that_ended_and_was_not_collected_gives_its_lock_up(tmp_path: Path) -> None:
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    try:
        with lock.hold("lab", "a", folder=tmp_path):
            forge(tmp_path, pid=child.pid, birth=runs.birth_of(child.pid))
            with lock.hold("lab", "b", folder=tmp_path) as notes:
                assert "gone" in notes[0]
    finally:
        child.wait()


def test_a_process_that_only_has_the_same_number_does_not_hold_the_lock(tmp_path: Path) -> None:
    with lock.hold("lab", "a", folder=tmp_path):
        forge(tmp_path, birth="1")
        with lock.hold("lab", "b", folder=tmp_path) as notes:
            assert "Took over" in notes[0]


def test_a_lock_of_another_machine_is_kept_until_it_is_broken_by_hand_and_that_is_written_down(
    tmp_path: Path,
) -> None:
    with lock.hold("lab", "a", folder=tmp_path):
        forge(tmp_path, machine="elsewhere", pid=dead_pid(), who="sre on call")
        with pytest.raises(Locked, match="sre on call"), lock.hold("lab", "b", folder=tmp_path):
            pass
        with lock.hold("lab", "b", force=True, folder=tmp_path) as notes:
            assert "--force-unlock" in notes[0]
    line = json.loads((tmp_path / "audit.jsonl").read_text())
    assert line["held"]["who"] == "sre on call"
    assert line["by"]["command"] == "b"


def test_breaking_a_lock_leaves_the_new_holder_its_lock(tmp_path: Path) -> None:
    outer = lock.hold("lab", "a", folder=tmp_path)
    outer.__enter__()
    with lock.hold("lab", "b", force=True, folder=tmp_path):
        outer.__exit__(None, None, None)
        held = lock.holder("lab", tmp_path)
        assert held is not None
        assert held.command == "b"
