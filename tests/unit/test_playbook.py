"""Real Ansible on this machine: what a played job says, and what is left of one that is interrupted."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from bringup import ROOT, events, playbook, players, progress
from bringup.errors import Exit, Problem, UsageError
from bringup.known import Known, KnownHost
from bringup.playbook import Played

PLAYS = ROOT / "tests" / "cases" / "plays"
START_LIMIT_S = 120
SECONDS = f"45.{os.getpid()}"
"""Of the long task: of this process alone, so that two checkouts can run this file at once."""

LONG_TASK = f"sleep {SECONDS}"
END_LIMIT_S = 4 * (playbook.STOP_GRACE_S + players.JOIN_LIMIT_S)
CANARY = "canary-of-the-environment"


PROGRAM = textwrap.dedent(
    """
    import json, sys
    from pathlib import Path
    from bringup import playbook, progress
    plays, folder, made, limit, extra = sys.argv[1:]
    job = playbook.Job(
        Path(plays) / "play.yml", Path(plays) / "hosts.yml", limit=limit,
        extra={"folder": made, **json.loads(extra)},
    )
    with playbook.signals() as caught:
        played = playbook.play(job, Path(folder), progress.Plain(sys.stderr), caught)
    print(json.dumps({"ended": played.ended, "output": played.output}))
    sys.exit(playbook.code_of(played))
    """
)


def start(folder: Path, limit: str, **extra: Any) -> subprocess.Popen[str]:
    """A play in a process of its own, as a command is; it writes into `folder`/made."""
    (folder / "made").mkdir()
    (folder / "run").mkdir()
    words = (
        str(PLAYS),
        str(folder / "run"),
        str(folder / "made"),
        limit,
        json.dumps({"seconds": SECONDS, **extra}),
    )
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *words],
        cwd=ROOT,
        env={**os.environ, "NO_COLOR": "1", "HF_TOKEN": CANARY},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_play_that_breaks_tells_its_failure_and_keeps_no_secret(tmp_path: Path) -> None:
    process = start(tmp_path, "one", broken=True, vault_key="madeup-s3cr3t")
    out, err = process.communicate(timeout=START_LIMIT_S)
    assert process.returncode == Exit.FAILED, err
    assert json.loads(out)["ended"] is True
    # The rest of the sentence is Ansible's, and each of its versions has its own.
    assert re.search(r"one  files: Break for good: .*non-zero return code", err), err
    assert (tmp_path / "made" / "settings-one").read_text().startswith("api_key: sk-madeup")
    left = tmp_path / "run"
    assert sorted(path.name for path in left.iterdir()) == ["events.jsonl"]
    text = (left / "events.jsonl").read_text()
    assert "madeup" not in text
    assert [json.loads(line)["event"] for line in text.splitlines()][-1] == "playbook_on_stats"


def test_the_environment_is_nowhere_on_disk_while_a_play_runs(tmp_path: Path) -> None:
    process = start(tmp_path, "one", long=True)
    wait_for_the_long_task(process)
    held = [
        path for path in tmp_path.rglob("*") if path.is_file() and CANARY in path.read_text(errors="replace")
    ]
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=END_LIMIT_S)
    assert held == []


def test_a_play_of_nobody_is_no_success(tmp_path: Path) -> None:
    process = start(tmp_path, "nobody")
    out, _ = process.communicate(timeout=START_LIMIT_S)
    assert process.returncode == Exit.INTERNAL
    assert any("no hosts to target" in line for line in json.loads(out)["output"])


def outcome(**hosts: events.HostOutcome) -> events.Outcome:
    return events.Outcome(hosts=hosts)


@pytest.mark.parametrize(
    ("status", "ended", "interrupted", "code"),
    [
        ("successful", True, False, Exit.DONE),
        ("successful", False, False, Exit.INTERNAL),
        ("failed", False, False, Exit.INTERNAL),
        ("failed", True, False, Exit.INTERNAL),
        ("timeout", False, False, Exit.FAILED),
        ("failed", False, True, Exit.INTERRUPTED),
    ],
)
def test_only_a_play_that_came_to_its_end_is_done(
    status: str, ended: bool, interrupted: bool, code: Exit
) -> None:
    played = Played(status, outcome(one=events.HostOutcome(ok=1)), ended, interrupted)
    assert playbook.code_of(played) is code


def running(words: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if words in line and "pytest" not in line:
            found.append(line)
    return found


def wait_for_the_long_task(process: subprocess.Popen[str], hosts: int = 1) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while sum(line.startswith(LONG_TASK) for line in running(LONG_TASK)) < hosts:
        assert process.poll() is None
        assert time.monotonic() < deadline, "the long task never began"
        time.sleep(0.1)


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name
)
def test_a_signal_ends_the_play_and_every_process_of_it(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path, "one,two", long=True)
    wait_for_the_long_task(process, hosts=2)
    # Long enough for progress to say what is waited for, also when it has just said what was waited for before.
    time.sleep(progress.PLAIN_EVERY_S + progress.QUIET_S)
    process.send_signal(number)
    _, said = process.communicate(timeout=END_LIMIT_S)
    assert process.returncode == Exit.INTERRUPTED
    assert "one, two  " in said
    assert "Traceback" not in said
    wait_until_gone(LONG_TASK, str(tmp_path))


def wait_until_gone(*words: str) -> None:
    """The kernel takes a moment to clear what was killed."""
    deadline = time.monotonic() + END_LIMIT_S
    while left := [line for word in words for line in running(word)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_a_killed_controller_takes_its_play_with_it(tmp_path: Path) -> None:
    process = start(tmp_path, "one", long=True)
    wait_for_the_long_task(process)
    process.kill()
    process.communicate(timeout=END_LIMIT_S)
    wait_until_gone(str(tmp_path), LONG_TASK)
    assert not (tmp_path / "run" / "report.html").exists()


def test_descendants_are_found_through_their_parents() -> None:
    process = subprocess.Popen(["sh", "-c", "sleep 31.5; true"])
    try:
        time.sleep(0.2)
        assert process.pid in playbook.children(os.getpid())
        assert len(playbook.descendants(os.getpid()) - playbook.children(os.getpid())) >= 1
    finally:
        for pid in playbook.descendants(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait()


def test_an_unknown_playbook_is_named_with_the_nearest_known_one() -> None:
    with pytest.raises(UsageError, match='Did you mean "provision"'):
        playbook.playbook_path("provison")


def test_a_limit_that_names_nothing_is_refused_before_anything_runs() -> None:
    host = KnownHost("h20-01", ("gpu",), ())
    plan = Known("h20", Path("h20"), "digest", (host,), (), None)
    playbook.check_limit(plan, "gpu")
    with pytest.raises(UsageError) as caught:
        playbook.check_limit(plan, "h20-1")
    assert caught.value.problems == (
        Problem("--limit", 'unknown host or group "h20-1"', 'Did you mean "h20-01"?'),
    )


def test_causes_are_told_once_with_all_their_hosts() -> None:
    message = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity"
    )
    failures = tuple(events.Failure(host, "engine_service", "Start", message) for host in ("one", "two"))
    played = Played("failed", events.Outcome(failures=failures), True, False)
    causes = playbook.causes_of(played)
    assert [cause["hosts"] for cause in causes] in ([], [["one", "two"]])
    assert playbook.causes_of(Played("successful", events.Outcome(), True, False)) == ()


def test_an_ansible_that_is_told_nothing_ends_and_leaves_nothing(tmp_path: Path) -> None:
    with players.Ahead(PLAYS / "play.yml") as ahead:
        ahead.begin(PLAYS / "hosts.yml")
        assert ahead.player is not None
        private = ahead.player.private
        assert private.stat().st_mode & 0o077 == 0
    assert not private.exists()
    assert not ahead.player.thread.is_alive()
    assert str(ahead.player.runner.status) == "successful"


def test_what_a_killed_controller_left_goes_with_the_next_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(players, "FOLDER", tmp_path)
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    left, ours = tmp_path / f"{gone.pid}-x", tmp_path / f"{os.getpid()}-y"
    for path in (left, ours):
        path.mkdir()
    players._tidy()
    assert (left.exists(), ours.exists()) == (False, True)
