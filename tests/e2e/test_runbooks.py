"""Every runbook is played on real nodes, and its undo; then two operators, dead controllers and reboots in the middle.

The tests stand in the order of one story and share its nodes; each leaves them serving.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tarfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bringup import ROOT, lab, runs
from bringup.errors import Exit
from tests.e2e import site as sites
from tests.e2e.site import Done, Site, answers, on, until

QUICK = (
    "pause-schedules",
    "resume-schedules",
    "drain-node",
    "return-node",
    "rotate-logs",
    "warm-caches",
    "verify-models",
    "fix-libstdcxx-preload",
    "remove-libstdcxx-preload",
    "clean-up-leftovers",
    "stop-servers",
    "start-servers",
    "restart-servers",
    "burn-in",
)
"""Played one after the other by one plain ansible-playbook; of pairs the second undoes the first."""

LOCK = "/run/bringup/run.json"
NODE_AUDIT = "/var/lib/bringup/audit.jsonl"
PLAY_LIMIT_S = 1800
END_LIMIT_S = 300
"""What ends within seconds when the machine is quiet."""

WATCH_LIMIT_S = 80
"""For a look of the watchdog and its next start, and less than three looks."""

BURNS_S = 900
"""Longer than anything that is done meanwhile; it ends when its run does."""

OF_THE_CHECKOUT = ("bringup", "catalog", "playbooks", "plugins", "roles", "ansible.cfg")
"""What a project in AWX has of this checkout, as far as plays need it."""

STEP_S = 0.3
KEY = "a-key-that-is-long-enough"


def port(pair: Site) -> int:
    return int(pair.service()["port"])


def run(pair: Site, name: str, *words: str) -> Done:
    return pair.invoke("run", name, "--yes", "--json", *words)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout at another place, as AWX makes one for a project; keys of the nodes are where the inventory says."""
    folder = tmp_path_factory.mktemp("awx") / "project"
    folder.mkdir()
    for name in OF_THE_CHECKOUT:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, folder / name)
    (folder / ".lab").symlink_to(lab.LAB)
    return folder


def plain(
    project: Path, pair: Site, *names: str, host: str, **variables: Any
) -> subprocess.CompletedProcess[str]:
    """Runbooks by ansible-playbook alone, as AWX does it: in a project's folder, with a home and an environment that
    know nothing of us, and extra variables.
    """
    program = [str(sites.INVOKE.with_name("ansible-playbook"))]
    books = [f"playbooks/runbooks/{name}.yml" for name in names]
    return subprocess.run(
        [*program, "-i", str(pair.folder), *books, "--limit", host, "-e", json.dumps(variables)],
        cwd=project,
        env={
            "PATH": os.defpath,
            "HOME": str(project.parent),
            "LANG": "C.UTF-8",
            "ANSIBLE_STDOUT_CALLBACK": "ansible.posix.json",
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PLAY_LIMIT_S,
        check=False,
    )


def held(name: str) -> bool:
    return on(name, f"cat {LOCK} 2>/dev/null || true") != ""


def events_of(record: Path) -> list[dict[str, Any]]:
    """What a run has told so far."""
    path = record / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def newest_run(pair: Site, name: str) -> Path | None:
    found = sorted((ROOT / "runs").glob(f"*-{name}-{pair.folder.name}*"))
    return found[-1] if found else None


@contextmanager
def burning(pair: Site, name: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A run that is in the middle of its work on node `name`, for as long as it is let, and its folder."""
    before = newest_run(pair, "burn-in")
    seconds = f"{{{{ {BURNS_S} if inventory_hostname == '{name}' else 1 }}}}"
    process = pair.start("run", "burn-in", "--yes", "--json", "--extra", f"runbook_seconds={seconds}")

    def begun() -> bool:
        folder = newest_run(pair, "burn-in")
        return folder not in (None, before) and held(name)

    try:
        until(f"burn-in holds {name}", begun, limit=END_LIMIT_S)
        until(f"{name} is under load", lambda: loaded(pair, name), limit=END_LIMIT_S)
        folder = newest_run(pair, "burn-in")
        assert folder is not None
        yield process, folder
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        until(f"the load on {name} has ended too", lambda: not loaded(pair, name), limit=END_LIMIT_S)


def loaded(pair: Site, name: str) -> bool:
    """Whether somebody asks the server something."""
    return on(name, f"ss -Htn state established '( sport = :{port(pair)} )'") != ""


@pytest.fixture(scope="module", autouse=True)
def serving(pair: Site) -> None:
    """The nodes serve; alone, this file provisions them first."""
    sites.settle(pair)


# ---------------------------------------------------------------- every runbook


def test_runbooks_by_plain_ansible_and_their_undo_leave_the_node_serving(project: Path, pair: Site) -> None:
    name = pair.names[0]
    done = plain(project, pair, *QUICK, host=name, runbook_seconds=2, runbook_clients=2)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    assert done.stdout.count('"plays": [') == len(QUICK)
    assert not held(name)
    assert answers(name, port(pair))
    assert on(name, "ls /run/bringup/draining") == ""
    assert on(name, f"systemctl is-active bringup-restart-{pair.service()['name']}.timer") == "active"
    stamps = on(name, "cat /var/lib/bringup/runs/*.json")
    assert all(f'"playbook": "{book}"' in stamps for book in ("pause-schedules", "burn-in"))


def test_a_check_of_a_runbook_changes_nothing_and_takes_no_lock(pair: Site) -> None:
    done = run(pair, "stop-servers", "--check", "--limit", pair.names[0])
    assert done.code == Exit.PENDING, done.text
    assert answers(pair.names[0], port(pair))


def test_a_support_bundle_comes_to_the_controller_without_secrets(pair: Site) -> None:
    secret = "hf_" + "a" * 30
    on(
        pair.names[0],
        f"logger -t bringup-words 'token={secret}'; echo 'x {secret}' >/var/log/bringup/environments/x.log",
    )
    done = run(pair, "collect-support-bundle")
    assert done.code == Exit.DONE, done.text
    for name in pair.names:
        with tarfile.open(ROOT / "runs" / done.data["id"] / f"support-{name}.tar.gz") as archive:
            texts = {member.name: archive.extractfile(member) for member in archive.getmembers()}
            data = b"".join(file.read() for file in texts.values() if file is not None)
        assert f"support-{name}/units/journal" in texts
        assert any(path.endswith("/engine.log") for path in texts)
        assert secret.encode() not in data


def test_rotated_keys_open_the_servers_and_no_key_does_not(pair: Site) -> None:
    name = pair.names[0]

    def change(intent: dict[str, Any]) -> None:
        intent["node_services"][0]["api_key"] = "vault_words_key"

    with pair.changed(change):
        done = run(pair, "rotate-api-keys", "--limit", name, "--extra", f"vault_words_key={KEY}")
        assert done.code == Exit.DONE, done.text
        assert not answers(name, port(pair)), "without the key it says nothing"
        assert KEY not in done.text
    assert KEY not in (ROOT / "runs" / done.data["id"] / "record.json").read_text()


def test_a_definition_that_does_not_serve_is_rolled_back_and_ends_in_its_own_code(pair: Site) -> None:
    name = pair.names[1]

    def change(intent: dict[str, Any]) -> None:
        intent["node_services"][0]["environment"] = {"PYTHONHOME": "/nowhere"}

    with pair.changed(change):
        done = run(pair, "change-profile", "--limit", name)
    assert done.code == Exit.GATE, done.text
    assert "the old one does again" in done.text
    assert answers(name, port(pair))
    assert not held(name)


def test_an_upgraded_engine_serves_and_roll_back_brings_back_what_served_before(pair: Site) -> None:
    name, other = pair.names[1], port(pair) + 7

    def change(intent: dict[str, Any]) -> None:
        intent["node_services"][0]["port"] = other

    with pair.changed(change):
        done = run(pair, "upgrade-engine", "--limit", name)
        assert done.code == Exit.DONE, done.text
        assert answers(name, other)
    watch = f"systemctl show -P InvocationID bringup-watch-{pair.service()['name']}.service"
    watches_other = on(name, watch)
    done = run(pair, "roll-back", "--limit", name)
    assert done.code == Exit.DONE, done.text
    assert answers(name, port(pair))
    # One that went on asking at the other port would kill the server after three times.
    until(
        "its watchdog has begun anew", lambda: on(name, watch) not in ("", watches_other), limit=WATCH_LIMIT_S
    )
    assert answers(name, port(pair))


def test_a_replaced_node_is_provisioned_and_put_under_load(pair: Site) -> None:
    """It also takes the key of the test before last away from the first node."""
    done = run(pair, "replace-node", "--limit", pair.names[0], "--extra", "runbook_seconds=2")
    assert done.code == Exit.DONE, done.text
    assert answers(pair.names[0], port(pair))
    assert done.data["hosts"][pair.names[0]]["done"]


def test_a_reboot_is_seen_to_have_happened_and_the_node_serves_again(pair: Site) -> None:
    name = pair.names[0]
    boot = on(name, "cat /proc/sys/kernel/random/boot_id")
    stop = threading.Event()
    power = threading.Thread(target=_keep_powered, args=(name, stop))
    power.start()
    try:
        done = run(pair, "reboot-node", "--limit", name)
    finally:
        stop.set()
        power.join()
    assert done.code == Exit.DONE, done.text
    assert on(name, "cat /proc/sys/kernel/random/boot_id") != boot
    assert answers(name, port(pair))
    assert not held(name)


def _keep_powered(name: str, stop: threading.Event) -> None:
    """A container that reboots only ends: somebody must switch it on again, as a machine does by itself."""
    engine = lab.find_engine()
    assert engine is not None
    while not stop.wait(STEP_S):
        engine.tries("start", name)


# ---------------------------------------------------------------- two operators, dead controllers, reboots


def test_a_second_operator_is_told_who_holds_what_however_he_comes(project: Path, pair: Site) -> None:
    name = pair.names[0]
    with burning(pair, name) as (process, folder):
        second = run(pair, "rotate-logs")
        assert second.code == Exit.LOCKED, second.text
        assert runs.who() in second.text
        other = plain(project, pair, "rotate-logs", host=name)
        assert other.returncode != 0
        assert "This node is held by" in other.stdout
        assert folder.name in other.stdout
        os.killpg(process.pid, signal.SIGINT)
        out, _ = process.communicate(timeout=END_LIMIT_S)
    assert process.returncode == Exit.INTERRUPTED, out
    assert plain(project, pair, "rotate-logs", host=name).returncode == 0, "its lock is taken over at once"
    assert not held(name)


def test_a_killed_controller_leaves_a_lost_run_that_goes_on_where_it_was(pair: Site) -> None:
    first, second = pair.names
    with burning(pair, second) as (process, folder):
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    assert runs.read(folder.name).status == runs.LOST
    assert runs.finished_hosts(runs.read(folder.name)) == [first]
    until("Ansible has ended too", lambda: _players(pair) == "", limit=END_LIMIT_S)
    done = run(pair, "burn-in", "--resume", folder.name, "--extra", "runbook_seconds=1")
    assert done.code == Exit.DONE, done.text
    assert list(done.data["hosts"]) == [second]
    assert any("Took over the lock" in note for note in done.data["notes"]), done.data["notes"]
    assert not held(second)
    again = run(pair, "burn-in", "--resume", done.data["id"])
    assert again.code == Exit.USAGE
    assert "nothing is left to do" in again.text


def _players(pair: Site) -> str:
    return subprocess.run(
        ["pgrep", "-fa", f"ansible-playbook.*{pair.folder}"], capture_output=True, text=True, check=False
    ).stdout


def test_ssh_lost_in_the_middle_is_recorded_and_others_are_told_until_when_the_node_is_held(
    project: Path, pair: Site
) -> None:
    name = pair.names[0]
    with burning(pair, name) as (process, folder):
        on(name, "pkill -KILL -f '^sshd.*(\\[priv\\]|@)'")
        out, _ = process.communicate(timeout=END_LIMIT_S)
    assert process.returncode == Exit.UNREACHABLE, out
    record = runs.read(folder.name)
    assert (record.exit_code, list(record.hosts)) == (Exit.UNREACHABLE, [name]), (
        "the other node was left alone"
    )
    assert record.hosts[name].unreachable
    assert [problem for problem in runs.verify() if folder.name in str(problem)] == []
    assert held(name), "nobody could give it back"
    # To another controller this run may still live, and work on other nodes.
    on(name, f'sed -i \'s/"machine": "[^"]*"/"machine": "elsewhere"/\' {LOCK}')
    other = plain(project, pair, "rotate-logs", host=name)
    assert other.returncode != 0
    assert "Its SSH connection is gone" in other.stdout
    assert "here it is free in" in other.stdout
    done = run(pair, "rotate-logs", "--force-unlock")
    assert done.code == Exit.DONE, done.text
    assert any("Broke the lock" in note for note in done.data["notes"]), done.data["notes"]
    assert folder.name in on(name, f"tail -n 1 {NODE_AUDIT}")
    assert done.data["id"] in (ROOT / "runs" / "audit.jsonl").read_text()
    assert not held(name)
    assert answers(name, port(pair))


def test_a_node_that_boots_in_the_middle_fails_alone_and_is_free_again(pair: Site) -> None:
    name = pair.names[0]
    with burning(pair, name) as (process, folder):
        lab.reboot(name, say=sites.quiet)
        process.communicate(timeout=END_LIMIT_S)
    assert process.returncode in (Exit.FAILED, Exit.UNREACHABLE)
    record = runs.read(folder.name)
    assert record.exit_code == process.returncode
    assert not held(name)
    assert [problem for problem in runs.verify() if folder.name in str(problem)] == []
    until(f"{name} answers", lambda: answers(name, port(pair)), limit=END_LIMIT_S)


def test_outside_of_its_windows_a_node_is_changed_only_with_a_reason(pair: Site) -> None:
    hour = (time.gmtime().tm_hour + 12) % 24

    def change(intent: dict[str, Any]) -> None:
        intent["node_change_windows"] = [f"{hour:02}:00-{hour:02}:59"]

    with pair.changed(change):
        refused = run(pair, "pause-schedules", "--limit", pair.names[0])
        assert refused.code == Exit.LOCKED, refused.text
        assert "--outside-window" in refused.text
        done = run(pair, "resume-schedules", "--limit", pair.names[0], "--outside-window", "incident 7")
        assert done.code == Exit.DONE, done.text
        assert any("incident 7" in note for note in done.data["notes"])


def test_a_run_is_played_again_from_its_record(pair: Site) -> None:
    done = _replayed(pair)
    assert done.code == Exit.DONE, done.text
    assert done.data["name"] == "resume-schedules"


def _replayed(pair: Site) -> Done:
    before = run(pair, "resume-schedules", "--limit", pair.names[0])
    finished = subprocess.run(
        [str(sites.INVOKE), "history.replay", "--run", str(before.data["id"]), "--yes", "--json"],
        cwd=ROOT,
        env=sites.environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PLAY_LIMIT_S,
        check=False,
    )
    return Done(finished.returncode, finished.stdout, finished.stderr)
