"""What crashed servers leave is found by what the kernel says, and only that goes; watchdog and crash trail
beside it.
"""

from __future__ import annotations

import gzip
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bringup.node import common, leftovers, serve, trail, watch

USER = {os.getuid(): "someone"}


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that ignores TERM, as a hanging engine does."""
    code = "import signal as s, time; s.signal(s.SIGTERM, s.SIG_IGN); print(flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as made:
        assert made.stdout is not None
        made.stdout.readline()
        yield made
        made.kill()


def reap(process: subprocess.Popen[bytes]) -> None:
    """Let the test's child end for good while another thread kills it."""
    import threading

    threading.Thread(target=process.wait, daemon=True).start()


def test_a_process_that_ignores_term_is_killed_and_named_before(
    process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "TERM_WAIT_S", 0.3)
    found = next(
        item for item in leftovers.lost_processes(USER) if item.id.startswith(f"process:{process.pid}:")
    )
    assert "outside of every server's unit" in found.why
    reap(process)
    assert leftovers.remove(found) == ""
    assert not Path(f"/proc/{process.pid}").exists()


def test_another_process_under_the_same_number_is_left_alone(process: subprocess.Popen[bytes]) -> None:
    item = leftovers.Leftover(f"process:{process.pid}:12345", "process", "", "")
    assert leftovers.remove(item) == ""
    assert process.poll() is None


def test_a_planned_port_held_from_outside_is_found_with_its_holder() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        found = leftovers.held_ports([{"name": "words", "unit": "bringup-words", "port": port}])
    assert [item.id.split(":")[1] for item in found] == [str(os.getpid())]
    assert f"listens on port {port}" in found[0].why


def test_processes_in_a_servers_unit_are_no_leftovers() -> None:
    assert leftovers.ours("bringup-words.service")
    assert not leftovers.ours("ssh.service")
    assert not leftovers.ours("")


def test_shared_memory_counts_only_when_old_and_unused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "SHM", tmp_path)
    for name in ("left", "fresh", "used:odd name"):
        (tmp_path / name).write_text("x")
        if name != "fresh":
            os.utime(tmp_path / name, (0, 0))
    with (tmp_path / "used:odd name").open():
        found = leftovers.lost_shm(USER, time.time(), tmp_path)
    assert [item.what.split(" (")[0] for item in found] == [str(tmp_path / "left")]
    again = leftovers.lost_shm(USER, time.time(), tmp_path)
    for item in again:
        assert leftovers.remove(item) == ""
    assert [path.name for path in tmp_path.iterdir()] == ["fresh"]
    assert leftovers.lost_shm({os.getuid() + 1: "other"}, time.time() + 999, tmp_path) == []


def test_system_v_segments_without_a_process_are_found(tmp_path: Path) -> None:
    head = "key shmid perms size cpid lpid nattch uid gid cuid cgid atime dtime ctime rss swap\n"
    (tmp_path / "shm").write_text(
        head + "0 7 600 4096 1 1 0 990 990 990 990 0 0 0 0 0\n0 8 600 4096 1 1 2 990 990 990 990 0 0 0 0 0\n"
    )
    found = leftovers.lost_sysv({990: "bringup-words"}, [], tmp_path)
    assert [item.id for item in found] == ["sysv:7:4096"]


def test_system_v_semaphores_and_queues_go_when_their_user_has_no_process_left() -> None:
    made = [
        subprocess.run(["ipcmk", *words], check=True, capture_output=True, text=True).stdout.split()[-1]
        for words in (["--semaphore", "3"], ["--queue"])
    ]
    ids = {f"semaphores:{made[0]}:3", f"messages:{made[1]}:0"}

    def found(running: set[int]) -> dict[str, leftovers.Leftover]:
        return {item.id: item for item in leftovers.lost_sysv(USER, running) if item.id in ids}

    assert found({os.getuid()}) == {}
    for item in found(set()).values():
        assert leftovers.remove(item) == ""
        ids.remove(item.id)
    assert not ids


def test_a_lock_that_a_killed_build_left_is_found_and_one_that_is_held_is_not(tmp_path: Path) -> None:
    for name in ("left", "held"):
        (tmp_path / ".cache/torch_extensions/py312_cu128" / name).mkdir(parents=True)
        (tmp_path / ".cache/torch_extensions/py312_cu128" / name / "lock").touch()
    other = tmp_path / ".cache/torch_extensions/py312_cu128/left/build.ninja"
    other.touch()
    lock = other.with_name("lock")
    service = {"writable": [str(tmp_path)]}
    with (tmp_path / ".cache/torch_extensions/py312_cu128/held/lock").open():
        (found,) = leftovers.lost_locks([service])
        assert found.what == f"lock {lock}"
        assert leftovers.remove(found) == ""
        assert (lock.exists(), other.exists()) == (False, True)
        lock.touch()
        assert serve.sweep_locks(service) == [str(lock)]
        assert serve.sweep_locks(service) == []


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        ("0::/system.slice/bringup-words.service\n", "bringup-words.service"),
        ("0::/system.slice/bringup\\x2dwords.service/sub\n", "bringup-words.service"),
        ("0::/user.slice/user-0.slice/session-1.scope\n", "session-1.scope"),
        ("1:name=systemd:/\n", ""),
    ],
)
def test_the_unit_of_a_process_is_read_from_its_control_group(
    text: str, unit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cgroup").write_text(text)
    monkeypatch.setattr(common, "PROC", tmp_path)
    assert common.unit_of(7) == unit


# ---------------------------------------------------------------- watchdog


def test_a_server_that_answers_is_left_alone_for_ever() -> None:
    seen = watch.Watch()
    assert [seen.judge("", {"generation_tokens_total": 5.0}, now) for now in range(1, 9)] == [""] * 8


IDLE = {"running": 0.0, "waiting": 0.0, "generation_tokens_total": 5.0}
FROZEN = {**IDLE, "running": 1.0}


def looks(why: str, seen: Iterable[dict[str, float] | None], **options: Any) -> list[bool]:
    """At which of the looks, 30 s apart, the server counts as hung."""
    made = watch.Watch(failures=3, **options)
    return [bool(made.judge(why, one, 30.0 * number)) for number, one in enumerate(seen, 1)]


def test_an_idle_server_that_gives_no_token_hangs_after_three_looks() -> None:
    assert looks("nothing within 10 s", [IDLE] * 4) == [False, False, True, True]


def test_our_own_unanswered_requests_do_not_make_it_busy() -> None:
    assert looks("nothing within 10 s", [IDLE, FROZEN, {**FROZEN, "running": 2.0}]) == [False, False, True]


def test_a_server_without_metrics_hangs_after_three_looks_as_well() -> None:
    assert looks("nothing within 10 s", [None] * 3) == [False, False, True]


def test_a_server_that_makes_tokens_for_others_is_busy_and_does_not_hang() -> None:
    rows = [{**FROZEN, "generation_tokens_total": 5.0 + number} for number in range(20)]
    assert looks("slow", rows) == [False] * 20


def test_a_long_prefill_is_waited_for_but_not_without_end() -> None:
    said = looks("slow", [FROZEN] * 40, prefill_s=900)
    assert said.index(True) == 30, "900 s after the first look"


def test_a_hang_with_others_in_flight_is_noticed_sooner_where_a_prefill_moves_a_counter() -> None:
    still = [{**FROZEN, "kv_usage": 0.4}] * 40
    assert looks("slow", still, stall_s=300).index(True) == 10, "300 s after the first look"
    reads = [{**FROZEN, "steps_total": float(number)} for number in range(40)]
    assert looks("slow", reads, stall_s=300) == [False] * 40, "a prefill that goes on is no hang"
    stops = [*reads[:20], *[reads[19]] * 20]
    assert looks("slow", stops, stall_s=300).index(True) == 29, "300 s after its last batch"


def test_one_good_answer_forgets_all_failures() -> None:
    seen = watch.Watch(failures=2)
    said = [bool(seen.judge(why, None, float(now))) for now, why in enumerate(["x", "", "x", "x"], 1)]
    assert said == [False, False, False, True]


def test_the_watchdog_ends_the_process_that_hangs_and_only_while_it_is_the_same() -> None:
    ended: list[int] = []
    states = iter(
        [{"ActiveState": "activating", "MainPID": "9", "InvocationID": "a"}]
        + [{"ActiveState": "active", "MainPID": "10", "InvocationID": "b"}] * 5
    )

    def state(unit: str, properties: Any) -> dict[str, str]:
        return next(states)

    service = {
        "unit": "bringup-words",
        "probe_timeout_s": 0.2,
        "address": "127.0.0.1",
        "port": 9,
        "served_name": "w",
    }
    service["endpoints"] = {"chat": "/v1/chat/completions", "metrics": None}
    with pytest.raises(StopIteration):
        watch.watch(service, None, state=state, end=ended.append, pause=lambda seconds: None)
    assert ended == [10]


@pytest.mark.parametrize(
    ("port", "invocations"), [(9, "aab"), (10, "a")], ids=["started anew", "another port"]
)
def test_a_server_that_is_another_now_is_not_taken_for_one_that_hangs(port: int, invocations: str) -> None:
    """A roll-back brought the port before back: asked at the one after, a healthy server was killed every 90 s."""
    ended: list[int] = []
    states = ({"ActiveState": "active", "MainPID": "10", "InvocationID": one} for one in invocations)
    service = {"unit": "u", "probe_timeout_s": 0.2, "address": "127.0.0.1", "port": 9, "served_name": "w"}
    service["endpoints"] = {"chat": "/v1/chat/completions", "metrics": None}
    watch.watch(
        service,
        None,
        state=lambda unit, properties: next(states),
        end=ended.append,
        pause=lambda seconds: None,
        described=lambda: {**service, "port": port},
    )
    assert ended == []
    assert next(states, None) is None


# ---------------------------------------------------------------- the trail of a crash


@pytest.mark.parametrize(
    ("result", "job", "crash"),
    [
        ("success", "", True),
        ("success", "start", True),
        ("success", "stop", False),
        ("success", "restart", False),
        ("signal", "", True),
        ("signal", "start", True),
        ("signal", "stop", False),
        ("signal", "restart", False),
        ("timeout", "stop", True),
        ("core-dump", "stop", True),
        ("exit-code", "", True),
    ],
)
def test_an_end_that_nobody_asked_for_is_a_crash_also_with_exit_code_0(
    result: str, job: str, crash: bool
) -> None:
    assert trail.crashed("bringup-words", {"SERVICE_RESULT": result}, job) is crash


def test_the_last_lines_are_kept_across_a_rotation_and_only_so_many_crashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trail, "KEEP", 2)
    logs = tmp_path / "log"
    logs.mkdir()
    (logs / "engine-000001-20260101T000000Z.log.gz").write_bytes(gzip.compress(b"first\nsecond\n"))
    (logs / "engine-000002-20260101T000001Z.log").write_text("third\n")
    (logs / "engine.log").symlink_to("engine-000002-20260101T000001Z.log")
    service = {"unit": "bringup-words", "log_path": str(logs / "engine.log")}
    for number in range(4):
        environment = {
            "SERVICE_RESULT": "signal",
            "EXIT_CODE": "killed",
            "EXIT_STATUS": "KILL",
            "INVOCATION_ID": f"{number}",
        }
        path = trail.keep(service, environment, tmp_path / "crashes")
    lines = path.read_text().splitlines()
    assert lines[0].endswith("signal, killed KILL")
    assert lines[1:] == ["first", "second", "third"]
    assert len(list((tmp_path / "crashes/bringup-words").iterdir())) == 2


def test_what_is_found_is_one_json_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(common, "SERVICES", tmp_path)
    assert leftovers.main(["--remove", "process:1:1"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "schema_version": 1,
        "leftovers": [],
        "removed": [],
        "failed": {},
        "missing": ["process:1:1"],
    }


def test_a_crash_that_cannot_be_shown_is_a_failure_and_one_that_cannot_be_kept_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(common, "SERVICES", tmp_path)
    assert trail.main(["nobody", "--show"]) == 1
    assert "cannot be shown: no service nobody on this node" in capsys.readouterr().err
    assert trail.main(["nobody"]) == 0
    assert "cannot be kept: no service nobody on this node" in capsys.readouterr().err
