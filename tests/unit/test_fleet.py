"""Hosts are picked as --limit picks them, and reached as Ansible reaches them."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from ansible.plugins.connection.ssh import Connection

from bringup import ROOT, fleet, looking, remote
from bringup.errors import Exit, UsageError
from bringup.fleet import Host

HOSTS = {
    "h20-01": ("gpu", "rack_a"),
    "h20-02": ("gpu", "rack_b"),
    "h20-10": ("gpu", "rack_b"),
    "gw-01": ("gateway", "rack_a"),
}


@pytest.mark.parametrize(
    ("pattern", "picked"),
    [
        (None, ["h20-01", "h20-02", "h20-10", "gw-01"]),
        ("all", ["h20-01", "h20-02", "h20-10", "gw-01"]),
        ("h20-10,h20-01", ["h20-01", "h20-10"]),
        ("rack_b:gw-01", ["h20-02", "h20-10", "gw-01"]),
        ("h20-0*", ["h20-01", "h20-02"]),
        ("rack_*,!gw-*", ["h20-01", "h20-02", "h20-10"]),
        ("!rack_a", ["h20-02", "h20-10"]),
        ("gpu,&rack_a", ["h20-01"]),
        ("&rack_a,gpu,!h20-02", ["h20-01"]),
        ("~h20-(01|10)", ["h20-01", "h20-10"]),
    ],
)
def test_patterns_pick_hosts_in_inventory_order(pattern: str | None, picked: list[str]) -> None:
    assert fleet.matching(HOSTS, pattern) == picked


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("h20_02", 'unknown host or group "h20_02". Did you mean "h20-02"?'),
        ("gpu,!gatewy", 'unknown host or group "gatewy". Did you mean "gateway"?'),
        ("gateway,&rack_b", '"gateway,&rack_b" leaves no host of 4'),
        ("~h20-(", "is no regular expression"),
    ],
)
def test_patterns_that_pick_nothing_are_refused_with_a_hint(pattern: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        fleet.matching(HOSTS, pattern)
    assert said in str(caught.value)


def test_every_wrong_part_of_a_pattern_is_named_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        fleet.matching(HOSTS, "nope,gpu,never")
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize(
    ("said", "read"),
    [
        (
            "-o ConnectTimeout=5 -i /keys/id -p 2222",
            {"connecttimeout": "5", "identityfile": "/keys/id", "port": "2222"},
        ),
        ("-oUserKnownHostsFile=/a", {"userknownhostsfile": "/a"}),
        ('-o "UserKnownHostsFile /a b"', {"userknownhostsfile": "/a b"}),
        ("-o Port=1 -o Port=2 -J gw", {"port": "1", "proxyjump": "gw"}),
        ("", {}),
    ],
)
def test_ssh_arguments_are_read_as_ssh_reads_them(said: str, read: dict[str, str]) -> None:
    assert fleet.ssh_options(said) == read


INVENTORY = """
all:
  vars:
    ansible_user: sre
    ansible_ssh_private_key_file: "{{ inventory_dir }}/id"
    ansible_ssh_common_args: -o UserKnownHostsFile={{ inventory_dir }}/known_hosts -o ConnectTimeout=3
  children:
    gpu:
      hosts:
        h20-01: {ansible_host: 10.0.0.1}
        h20-02: {ansible_host: 10.0.0.2, ansible_port: 2222, ansible_user: root}
    here:
      hosts:
        me: {ansible_connection: local, ansible_host_key_checking: false}
"""

READ = """
import dataclasses, json, sys
from bringup import fleet
hosts = fleet.hosts_of(sys.argv[1], ["h20-01", "h20-02", "me"])
print(json.dumps([fleet.groups_of(sys.argv[1]), [dataclasses.asdict(host) for host in hosts]]))
"""


def test_how_a_host_is_reached_is_ansibles_own_reading(tmp_path: Path) -> None:
    (tmp_path / "hosts.yml").write_text(INVENTORY)
    done = subprocess.run(
        [sys.executable, "-c", READ, str(tmp_path)], capture_output=True, text=True, check=True, timeout=60
    )
    groups, (first, second, local) = json.loads(done.stdout)
    assert groups == {"h20-01": ["gpu"], "h20-02": ["gpu"], "me": ["here"]}
    assert (first["address"], first["port"], first["user"]) == ("10.0.0.1", 22, "sre")
    assert (first["key"], first["known_hosts"]) == (f"{tmp_path}/id", [f"{tmp_path}/known_hosts"])
    assert first["check_keys"] is True
    assert (second["port"], second["user"]) == (2222, "root")
    assert (local["local"], local["check_keys"]) == (True, False)
    assert done.stderr == ""


def test_the_ssh_command_line_checks_host_keys_as_the_inventory_says() -> None:
    host = Host(
        "a", "10.0.0.1", 2222, "sre", "/k/id", ("/k/known hosts",), options=(("connecttimeout", "3"),)
    )
    argv = remote.ssh_argv(host)
    assert argv[:3] == ["ssh", "-p", "2222"]
    assert "UserKnownHostsFile='/k/known hosts'" in argv
    assert argv[-1] == "sre@10.0.0.1"
    assert not any("StrictHostKeyChecking" in word for word in argv)
    assert "connecttimeout=3" in argv


HERE = Host("here", "127.0.0.1", local=True)


def test_a_command_that_takes_too_long_is_given_up() -> None:
    assert remote.run(HERE, "sleep 20", limit_s=0.3).code == 124


@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        (["a"], "a"),
        (["h20-01", "h20-02", "b"], "h20-01, h20-02, b"),
        ([f"h20-{n:02}" for n in (*range(8, 13), 14)], "h20-08..h20-12, h20-14 (6 hosts)"),
        (["n8", "n9", "n10", "m11", "n11"], "n8..n10, m11, n11 (5 hosts)"),
        (["10.0.0.9", "10.0.0.10", "x", "y", "z"], "10.0.0.9..10.0.0.10, x, y, z (5 hosts)"),
    ],
)
def test_hosts_that_said_the_same_are_named_briefly(hosts: list[str], said: str) -> None:
    assert looking.named(hosts) == said


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", []),
        ("one\n\ntwo\n", ["one", "", "two"]),
        ("no end", ["no end"]),
        ("\x1b[31mred\x1b[0m \x1b]0;title\x07[bold]x[/] \x1b[2Jü\x00\n", ["red [bold]x[/] ü"]),
        ("10 %\r50 %\rdone\nnext\r\n", ["done", "next"]),
        ("a\tb\n", ["a       b"]),
    ],
)
def test_what_a_node_says_steers_no_terminal(text: str, lines: list[str]) -> None:
    assert looking.plain_lines(text) == lines


def test_looking_at_many_hosts_keeps_their_order_and_their_failures_apart() -> None:
    hosts = [Host(str(number), "x") for number in range(6)]

    def look(host: Host) -> int:
        if host.name == "3":
            raise RuntimeError("gone")
        return int(host.name)

    found = fleet.each(hosts, look)
    assert [value for value in found if isinstance(value, int)] == [0, 1, 2, 4, 5]
    assert isinstance(found[3], RuntimeError)


def test_the_look_program_runs_on_a_machine_without_bringup_and_names_a_missing_service() -> None:
    program = looking.script({"what": "status", "services": ["never-there", 'b "100% $HOME"']})
    done = subprocess.run(
        [sys.executable, "-I", "-"],
        input=program,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["services"]
    assert [row["service"] for row in rows] == ["never-there", 'b "100% $HOME"']
    assert {row["state"] for row in rows} == {"missing"}
    assert "is missing" in rows[0]["why"]


def test_a_host_that_is_not_there_is_a_row_that_says_why() -> None:
    gone = Host("gone", "127.0.0.1", port=1, user="nobody")
    rows = looking.status([looking.Target(gone, ("chat",))])
    assert [(row["host"], row["service"], row["state"], row["healthy"]) for row in rows] == [
        ("gone", "chat", "unreachable", False)
    ]
    assert "nothing listens on 127.0.0.1:1" in rows[0]["why"]
    assert looking.exit_of(rows) is Exit.UNREACHABLE


def test_equal_output_of_many_hosts_is_shown_once() -> None:
    rows = [
        {"host": name, "code": code, "out": out, "err": ""}
        for name, code, out in (("a", 0, "x"), ("b", 1, "x"), ("c", 0, "x"), ("d", 0, "y"))
    ]
    assert [hosts for hosts, _ in looking.grouped(rows)] == [["a", "c"], ["b"], ["d"]]


def test_log_lines_come_whole_with_where_they_are_from() -> None:
    target = looking.Target(HERE, ("never-there",))
    assert [(host, service) for host, service, _ in looking.logs([target], 3)] == [("here", "!")]


def test_connections_that_a_look_opens_are_those_that_ansible_looks_for() -> None:
    """By the same name, in the same folder, and as long."""
    for address, port, user in (("10.0.0.1", None, "root"), ("fe80::1", 2222, "sre"), ("h20-01", None, None)):
        theirs = Connection._create_control_path(address, port, user)
        host = Host("any", address, port or remote.SSH_PORT, user)
        assert theirs == f"%(directory)s/{remote.control_name(host)}"
    done = subprocess.run(
        [str(Path(sys.executable).parent / "ansible-config"), "dump", "-t", "connection"],
        cwd=ROOT,
        env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    said = dict(re.findall(r"^(control_path|control_path_dir|ssh_args)\(.*?\) = (.*)$", done.stdout, re.M))
    assert (said["control_path"], said["control_path_dir"]) == ("None", str(remote.CONTROL_FOLDER))
    assert set(shlex.split(said["ssh_args"])) - {"-o"} <= {*remote.ASKING, *remote.SHARED}
