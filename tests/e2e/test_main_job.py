"""The main job on real ground: two bare nodes to a real answer, and all that happens to them afterwards.

The tests stand in the order of one story and share its nodes; each leaves them as it found them: provisioned.
"""

from __future__ import annotations

import concurrent.futures
import functools
import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from bringup import ROOT, lab
from bringup.errors import Exit
from tests.e2e import site as sites
from tests.e2e.site import Done, Site, answers, healthy, on, tokens, until

PLAY_LIMIT_S = 1800


def port(pair: Site) -> int:
    return int(pair.service()["port"])


def unit(pair: Site) -> str:
    return f"bringup-{pair.service()['name']}"


def changes(done: Done) -> dict[str, int]:
    return {name: host["changed"] for name, host in done.data["hosts"].items()}


def check_converged(done: Done, names: tuple[str, ...]) -> None:
    """The run ended well and had nothing to do on any of the hosts."""
    assert done.code == Exit.DONE, done.text
    assert changes(done) == dict.fromkeys(names, 0), done.text


def main_pid(name: str, service: str) -> str:
    return on(name, f"systemctl show -P MainPID {service}")


def inactive(name: str, service: str) -> bool:
    return on(name, f"systemctl show -P ActiveState {service}") == "inactive"


def processes(name: str, service: str) -> list[str]:
    """Pids in the control group of a unit."""
    path = on(name, f"systemctl show -P ControlGroup {service}")
    return on(name, f"cat /sys/fs/cgroup{path}/cgroup.procs 2>/dev/null || true").split()


# ---------------------------------------------------------------- from nothing


def test_check_on_bare_nodes_fails_nowhere_and_changes_nothing(pair: Site) -> None:
    done = pair.provision("--check")
    assert done.code == Exit.PENDING, done.text
    assert all(host["failed"] == 0 and host["changed"] > 0 for host in done.data["hosts"].values())
    for name in pair.names:
        assert on(name, "ls -d /opt/bringup /etc/bringup /srv/models 2>/dev/null || true") == ""


def test_two_bare_nodes_come_to_a_real_answer(pair: Site) -> None:
    done = pair.provision()
    assert done.code == Exit.DONE, done.text
    assert all(count > 0 for count in changes(done).values())
    assert done.data["schema_version"] >= 1
    for name in pair.names:
        until(f"{name} answers", functools.partial(answers, name, port(pair)))


def test_the_report_prints_addresses_and_a_real_completion(pair: Site) -> None:
    done = pair.invoke("provision")
    assert done.code == Exit.DONE, done.text
    for name in pair.names:
        assert name in done.out
    assert f":{port(pair)}" in done.out
    asked = pair.invoke("ask", "--json")
    assert asked.code == Exit.DONE, asked.text
    assert all(answer["tokens"] > 0 for answer in asked.data["answers"])


def test_a_second_run_changes_nothing(pair: Site) -> None:
    check_converged(pair.provision(), pair.names)


def test_check_on_converged_nodes_has_nothing_to_say(pair: Site) -> None:
    check_converged(pair.provision("--check"), pair.names)


def test_plain_ansible_playbook_converges_the_same_nodes_to_nothing_changed(pair: Site) -> None:
    done = subprocess.run(
        [str(sites.INVOKE.with_name("ansible-playbook")), "-i", str(pair.folder), "playbooks/provision.yml"],
        cwd=ROOT,
        env={**sites.environment(), "ANSIBLE_STDOUT_CALLBACK": "ansible.posix.json"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PLAY_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    stats: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])["stats"]
    for name in pair.names:
        assert (stats[name]["changed"], stats[name]["failures"], stats[name]["unreachable"]) == (0, 0, 0)


def test_status_shows_every_server_answering(pair: Site) -> None:
    done = pair.invoke("status", "--json")
    assert done.code == Exit.DONE, done.text
    rows = done.data["services"]
    assert sorted(row["host"] for row in rows) == sorted(pair.names)
    assert all(row["state"] == "active" and row["healthy"] for row in rows), rows


def test_history_knows_the_runs_and_their_chain_is_whole(pair: Site) -> None:
    done = pair.invoke("history", "--json")
    assert done.code == Exit.DONE, done.text
    assert len(done.data["runs"]) >= 4


# ---------------------------------------------------------------- crashes, logs, restarts


def test_a_killed_engine_comes_back_by_itself_and_leaves_nothing(pair: Site) -> None:
    name = pair.names[0]
    before = processes(name, unit(pair))
    killed = main_pid(name, unit(pair))
    on(name, f"kill -9 {killed}")
    until("the engine is another process", lambda: main_pid(name, unit(pair)) not in (killed, "0"))
    until("the engine answers again", lambda: answers(name, port(pair)))
    left = [pid for pid in before if on(name, f"test -d /proc/{pid} && echo left || true")]
    assert left == []
    check_converged(pair.provision(), pair.names)


def test_twenty_rotations_under_load_lose_no_line_and_double_none(pair: Site) -> None:
    name, service = pair.names[0], pair.service()["name"]
    folder = f"/var/log/bringup/{service}"
    old = f"find {folder} -type f -name '*.gz' -exec zcat {{}} +"
    new = f"find {folder} -type f ! -name '*.gz' -exec cat {{}} +"
    newest = f"readlink {folder}/engine.log"
    ended = f"{{ {old}; {new}; }} | grep -o 'task [0-9]* | stop processing'"
    stop, sent = threading.Event(), []

    def client() -> None:
        while not stop.is_set():
            if tokens(name, port(pair), limit=200):
                sent.append(1)

    def moved_on(file: str) -> bool:
        # Asked each time: signals that come faster than they are taken are one, and an empty file is not cut.
        on(name, f"systemctl reload bringup-log-{service}")
        return on(name, newest) != file

    # The watchdog asks for tokens too: without it every request is ours.
    on(name, f"systemctl stop bringup-watch-{service}")
    before = len(on(name, ended).splitlines())
    try:
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            workers = [pool.submit(client) for _ in range(3)]
            try:
                for _ in range(20):
                    file = on(name, newest)
                    until("the log goes on in another file", functools.partial(moved_on, file))
                until("20 requests have ended", lambda: len(sent) >= 20)
            finally:
                stop.set()
            for worker in workers:
                worker.result()
    finally:
        stop.set()
        on(name, f"systemctl start bringup-watch-{service}")
    assert len(sent) >= 20
    until(
        f"{len(sent)} more lines",
        lambda: len(on(name, ended).splitlines()) - before >= len(sent),
        limit=120,
    )
    lines = on(name, ended).splitlines()
    assert len(lines) - before == len(sent)
    assert len(on(name, f"ls {folder}").splitlines()) >= 15, "old logs are kept, compressed"


def test_scheduled_restarts_never_take_both_nodes_down(pair: Site) -> None:
    service = pair.service()["name"]
    pids = {name: main_pid(name, unit(pair)) for name in pair.names}
    both_down: list[float] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            down = [name for name in pair.names if not healthy(name, port(pair))]
            if len(down) == len(pair.names):
                both_down.append(time.time())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for name in pair.names:
            on(name, f"systemctl start --no-block bringup-restart-{service}.service")
        until(
            "both servers are new processes",
            lambda: all(main_pid(name, unit(pair)) not in (pids[name], "0") for name in pair.names),
            limit=720,
        )
        for name in pair.names:
            until(
                f"the restart on {name} has ended",
                functools.partial(inactive, name, f"bringup-restart-{service}.service"),
                limit=480,
            )
    finally:
        stop.set()
        watcher.join()
    assert both_down == []
    for name in pair.names:
        assert on(name, f"systemctl show -P Result bringup-restart-{service}.service") == "success"
        assert answers(name, port(pair))


def test_rolling_restart_by_hand_is_the_same_code(pair: Site) -> None:
    pids = {name: main_pid(name, unit(pair)) for name in pair.names}
    done = pair.invoke("restart", "--yes")
    assert done.code == Exit.DONE, done.text
    assert all(main_pid(name, unit(pair)) != pids[name] for name in pair.names)
    assert all(answers(name, port(pair)) for name in pair.names)


def test_a_rebooted_node_serves_again_without_help(pair: Site) -> None:
    name = pair.names[1]
    lab.reboot(name, say=sites.quiet)
    until(f"{name} answers after its reboot", lambda: answers(name, port(pair)), limit=480)
    check_converged(pair.provision(), pair.names)


# ---------------------------------------------------------------- changed intent


def test_another_port_changes_only_what_depends_on_it(pair: Site) -> None:
    old, new = port(pair), port(pair) + 7

    def change(intent: dict[str, Any]) -> None:
        intent["node_services"][0]["port"] = new

    with pair.changed(change):
        done = pair.provision()
        assert done.code == Exit.DONE, done.text
        for name in pair.names:
            roles = done.data["hosts"][name]["roles"]
            changed = {role for role, outcome in roles.items() if outcome["changed"]}
            assert {"engine_env", "model_store"} & changed == set(), changed
            assert "engine_service" in changed
            assert answers(name, new)
            assert not answers(name, old)
    done = pair.provision()
    assert done.code == Exit.DONE, done.text
    assert all(answers(name, old) for name in pair.names)


def test_a_wrong_profile_name_ends_before_any_node_is_touched(pair: Site) -> None:
    right = pair.service()["profile"]

    def change(intent: dict[str, Any]) -> None:
        intent["node_services"][0]["profile"] = right[:-1]

    with pair.changed(change):
        done = pair.provision()
    assert done.code == Exit.USAGE
    assert f'Did you mean "{right}"' in done.text
    assert "Traceback" not in done.text


# ---------------------------------------------------------------- things go wrong


def test_a_taken_port_is_refused_with_the_name_of_who_has_it(pair: Site) -> None:
    name, taken = pair.names[0], port(pair) + 9
    on(name, f"systemd-run --unit=squatter python3 -m http.server {taken} --bind 127.0.0.1")
    until("the port is taken", lambda: f":{taken} " in on(name, "ss -ltn"), limit=120)

    def change(intent: dict[str, Any]) -> None:
        intent["node_services"][0]["port"] = taken

    try:
        with pair.changed(change):
            done = pair.provision()
        assert done.code == Exit.REFUSED, done.text
        assert str(taken) in done.text
        assert "python3" in done.text
        assert done.data["hosts"][pair.names[1]]["failed"] == 0, "one refused host does not stop the others"
        assert answers(name, port(pair)), "the server that ran before still serves"
        assert on(name, "cat /run/bringup/run.json 2>/dev/null || true") == "", "and the node is free"
    finally:
        on(name, "systemctl stop squatter")
    done = pair.provision()
    assert done.code == Exit.DONE, done.text
    assert changes(done)[name] == 0, "on the refused host nothing had been changed"
    assert all(answers(each, port(pair)) for each in pair.names)


def test_a_damaged_model_file_is_found_and_made_whole(pair: Site) -> None:
    name = pair.names[0]
    found = on(name, "find /srv/models -name '*.gguf' -type f").splitlines()
    assert len(found) == 1
    good = on(name, f"sha256sum {found[0]}")
    on(
        name,
        f"chmod u+w {found[0]}; printf damaged | dd of={found[0]} bs=1 seek=4096 conv=notrunc 2>/dev/null",
    )
    assert on(name, f"sha256sum {found[0]}") != good
    done = pair.provision()
    assert done.code == Exit.DONE, done.text
    assert on(name, f"sha256sum {found[0]}") == good
    assert answers(name, port(pair))
    check_converged(pair.provision(), pair.names)


def test_a_full_disk_is_refused_with_the_space_that_is_needed(pair: Site) -> None:
    name = pair.names[1]
    on(name, "systemctl stop 'bringup-*' && mv /srv/models /srv/kept && mkdir /srv/models")
    on(name, "mount -t tmpfs -o size=64k tmpfs /srv/models")
    try:
        done = pair.provision("--limit", name)
        assert done.code == Exit.REFUSED, done.text
        assert "/srv/models" in done.text
        assert on(name, "find /srv/models -type f") == ""
    finally:
        on(name, "umount /srv/models && rmdir /srv/models && mv /srv/kept /srv/models")
    done = pair.provision()
    assert done.code == Exit.DONE, done.text
    assert answers(name, port(pair))


def test_an_unreachable_node_hides_nothing_of_the_others(pair: Site) -> None:
    gone, there = pair.names
    lab.disconnect(gone)
    try:
        done = pair.provision()
        assert done.code == Exit.UNREACHABLE, done.text
        assert gone in done.text
        assert done.data["hosts"][there]["failed"] == 0
        assert done.data["hosts"][there]["done"]
        assert "engine_service" in done.data["hosts"][there]["sealed"], "what is as it was left is not played"
    finally:
        lab.connect(gone)
    until(
        f"{gone} answers SSH", lambda: subprocess.run(lab.ssh_argv(gone, "true"), check=False).returncode == 0
    )
    check_converged(pair.provision(), pair.names)


def test_a_node_with_another_host_key_is_not_entered(pair: Site, tmp_path: Path) -> None:
    name, keys = pair.names[0], "/etc/ssh/ssh_host_*"
    on(
        name,
        f"mkdir /root/keys && cp -p {keys} /root/keys/ && rm {keys} && ssh-keygen -A && systemctl restart ssh",
    )
    try:
        # No connection that was opened before may be used.
        done = pair.invoke("provision", "--json", variables={"ANSIBLE_SSH_CONTROL_PATH_DIR": str(tmp_path)})
        assert done.code == Exit.UNREACHABLE, done.text
        assert "host key" in done.text.lower()
    finally:
        on(name, f"rm {keys} && cp -p /root/keys/* /etc/ssh/ && rm -r /root/keys && systemctl restart ssh")


def test_ctrl_c_leaves_a_record_and_no_processes(pair: Site) -> None:
    known = set(ROOT.glob("runs/*"))
    process = pair.start("provision", "--full", "--json")

    def plays() -> bool:
        """Whether the first results of this run have come."""
        assert process.poll() is None
        return any(
            pair.folder.name in path.parent.name and path.stat().st_size > 0
            for path in ROOT.glob("runs/*/events.jsonl")
            if path.parent not in known
        )

    until("it plays", plays)
    done = sites.end(process, signal.SIGINT)
    assert done.code == Exit.INTERRUPTED, done.text
    assert "Traceback" not in done.text
    until("its processes are gone", lambda: players(pair) == "")
    record = newest_record(pair.folder)
    assert record["exit_code"] == Exit.INTERRUPTED
    check_converged(pair.provision(), pair.names)


def players(pair: Site) -> str:
    """Processes of this machine that name the site's inventory."""
    return subprocess.run(
        ["pgrep", "-fa", str(pair.folder)], capture_output=True, text=True, check=False
    ).stdout


def newest_record(inventory: Path) -> dict[str, Any]:
    """The record of the last run of an inventory."""
    records = [json.loads(path.read_text()) for path in ROOT.glob("runs/*/record.json")]
    mine = [record for record in records if record["inventory"] in (str(inventory), inventory.name)]
    newest: dict[str, Any] = max(mine, key=lambda record: str(record["begun"]))
    return newest


def test_no_secret_of_the_environment_reaches_a_run_folder(pair: Site) -> None:
    """Runs of this file had a token in their environment: it stands in no file that they left."""
    canary = f"canary-{os.getpid()}-token"
    check_converged(pair.invoke("provision", "--json", variables={"HF_TOKEN": canary}), pair.names)
    found = subprocess.run(
        ["grep", "-rlF", canary, str(ROOT / "runs")], capture_output=True, text=True, check=False
    )
    assert found.stdout == ""


def test_an_api_key_is_asked_for_and_stands_nowhere_but_in_its_file(pair: Site) -> None:
    name, key = pair.names[0], f"canary-key-{os.getpid()}-of-the-test"

    def change(intent: dict[str, Any]) -> None:
        intent["node_services"][0]["api_key"] = "vault_words_api_key"
        intent["vault_words_api_key"] = key

    with pair.changed(change):
        done = pair.provision("--limit", name)
        assert done.code == Exit.DONE, done.text
        assert not answers(name, port(pair)), "without the key there is no answer"
        asked = pair.invoke("ask", "--json", "--limit", name)
        assert asked.code == Exit.DONE, asked.text
        assert all(answer["tokens"] > 0 for answer in asked.data["answers"])
        assert key not in done.text + asked.text
        seen = on(
            name,
            "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n'; ps axeww; "
            "journalctl -o cat --namespace='*'; cat /var/lib/bringup/starts/* /var/lib/bringup/restarts/*",
        )
        assert key not in seen
        pid = main_pid(name, unit(pair))
        no_core = on(name, f"grep 'Max core' /proc/{pid}/limits; cat /proc/{pid}/coredump_filter").split()
        assert no_core[4:6] == ["0", "0"], "no core, which would hold the key"
        assert no_core[-1] == "00000000", "and nothing in it for a handler that takes one all the same"
        report = pair.invoke("status", "--json").text + pair.invoke("history", "--json").text
        assert key not in report
        held = on(name, f"grep -rlF {key} /etc /var /opt /run /tmp /home 2>/dev/null || true").splitlines()
        assert held, "the key is on the node"
        for path in held:
            mode, owner = on(name, f"stat -c '%a %U' {path}").split()
            assert mode in ("400", "600"), path
            # The server's own user, and that of its log, which takes the key out of what is written.
            assert owner in ("root", "bringup", "bringup-log"), path
        written = subprocess.run(
            ["grep", "-rlF", key, str(ROOT / "runs")], capture_output=True, text=True, check=False
        )
        assert written.stdout == ""
    done = pair.provision()
    assert done.code == Exit.DONE, done.text
    assert answers(name, port(pair))
