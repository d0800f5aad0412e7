"""The lab's pure parts: names, addresses, what a node image depends on, what is written for ssh."""

from __future__ import annotations

import json
import tarfile
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bringup import lab


def test_nodes_are_numbered_from_one() -> None:
    assert lab.node_names(3) == ["lab-01", "lab-02", "lab-03"]


@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("lab-01", "198.18.5.11"),
        ("lab-30", "198.18.5.40"),
        ("e2e-01", "198.18.5.51"),
        ("twin-01", "198.18.5.141"),
    ],
)
def test_a_node_has_the_address_of_its_name(name: str, address: str) -> None:
    assert lab.address_of(name) == address


def test_no_two_nodes_share_an_address_or_a_port() -> None:
    names = [name for kind in lab.ADDRESS_BASE for name in lab.node_names(lab.room(kind), kind)]
    addresses = [lab.address_of(name) for name in names]
    assert len(set(addresses)) == len(names)
    assert len({lab.published_port(address) for address in addresses}) == len(names)


@pytest.mark.parametrize("count", [0, -1, 41])
def test_a_count_without_room_is_refused_with_the_room_there_is(count: int) -> None:
    with pytest.raises(lab.LabError, match="1 to 40"):
        lab.node_names(count)


@pytest.mark.parametrize("name", ["lab", "lab-00", "lab-41", "lab-one", "lap-01", "", "lab-²"])
def test_a_wrong_name_is_refused_before_docker_sees_it(name: str) -> None:
    with pytest.raises(lab.LabError):
        lab.address_of(name)


def test_a_misspelt_kind_gets_a_suggestion() -> None:
    with pytest.raises(lab.LabError, match='Did you mean "lab"'):
        lab.address_of("lap-01")


def test_an_image_tag_changes_with_every_input() -> None:
    files = {"node-init": b"one", "setup.sh": b"two"}
    digests = {
        lab.recipe_digest(files, "amd64", "bookworm"),
        lab.recipe_digest(files, "arm64", "bookworm"),
        lab.recipe_digest(files, "amd64", "trixie"),
        lab.recipe_digest({**files, "setup.sh": b"two "}, "amd64", "bookworm"),
        lab.recipe_digest({**files, "machine/ca.crt": b""}, "amd64", "bookworm"),
        lab.recipe_digest({"node-init": b"onesetup.sh", "setup.sh": b""}, "amd64", "bookworm"),
    }
    assert len(digests) == 6


@given(st.dictionaries(st.text(min_size=1), st.binary()))
def test_an_image_tag_does_not_depend_on_the_order_of_files(files: dict[str, bytes]) -> None:
    backwards = dict(reversed(files.items()))
    assert lab.recipe_digest(files, "amd64", "bookworm") == lab.recipe_digest(backwards, "amd64", "bookworm")


def test_the_recipe_names_packages_one_a_line_and_no_package_twice() -> None:
    packages = lab.package_list((lab.RECIPE / "packages.txt").read_text())
    assert "openssh-server" in packages
    assert packages == sorted(set(packages))
    assert not [word for word in packages if set(word) & set(" ,#")]


def test_a_node_takes_over_addresses_and_nothing_that_lies_on_this_machine() -> None:
    listed = "\n".join(
        (
            "global.index-url='https://packages.example/simple'",
            "global.extra-index-url='file:///srv/simple https://more.example/simple'",
            "global.find-links='/srv/wheels'",
            "global.constraint='/etc/constraints.txt'",
            ":env:.cert='/somewhere/else.crt'",
            ":env:.default-timeout='60'",
            "global.trusted-host='packages.example'",
        )
    )
    assert lab.pip_conf(listed).splitlines() == [
        "[global]",
        "cert = /etc/ssl/certs/ca-certificates.crt",
        "extra-index-url = https://more.example/simple",
        "index-url = https://packages.example/simple",
        "timeout = 60",
        "trusted-host = packages.example",
    ]


def test_a_machine_without_pip_settings_gives_only_the_certificates() -> None:
    assert lab.pip_conf("") == "[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n"


@pytest.mark.parametrize(
    ("port", "expected"),
    [(22, "lab-01,198.18.5.11 ssh-ed25519 AAAA"), (2211, "lab-01,[198.18.5.11]:2211 ssh-ed25519 AAAA")],
)
def test_a_known_hosts_line_has_both_names_and_no_comment(port: int, expected: str) -> None:
    assert lab.known_hosts_line("lab-01", "198.18.5.11", port, "ssh-ed25519 AAAA root@lab-01") == expected


def test_a_checkout_that_shares_the_labs_folder_keeps_what_is_known_of_the_others_nodes() -> None:
    before = "lab-01,198.18.5.11 old\nbench-01,198.18.5.101 theirs\ntwin-09,198.18.5.149 gone\n\n# no line\n"
    lines = lab.known_hosts(before, {"lab-01": "lab-01,198.18.5.11 new"}, {"bench-01", "e2e-01"})
    assert lines == {"bench-01": "bench-01,198.18.5.101 theirs", "lab-01": "lab-01,198.18.5.11 new"}


def test_the_ssh_config_reaches_a_node_by_name_and_address_and_checks_its_key() -> None:
    text = lab.ssh_config([("lab-01", "198.18.5.11", "127.0.0.1", 2211)], Path("/a b"))
    assert "Host lab-01 198.18.5.11\n  HostName 127.0.0.1\n  Port 2211\n" in text
    assert '  UserKnownHostsFile "/a b/known_hosts"\n' in text
    assert "  StrictHostKeyChecking yes\n" in text


def test_no_node_is_privileged_and_its_address_is_its_own() -> None:
    arguments = lab.docker_run_arguments("lab-02", "image", "key", published=False, extra=("--memory", "1g"))
    assert not [word for word in arguments if "privileged" in word]
    assert arguments[arguments.index("--ip") + 1] == "198.18.5.12"
    assert arguments[-3:] == ["--memory", "1g", "image"]
    assert "-p" not in arguments


def test_ports_are_published_on_loopback_only() -> None:
    arguments = lab.docker_run_arguments("lab-02", "image", "key", published=True)
    assert arguments[arguments.index("-p") + 1] == "127.0.0.1:2212:22"


@pytest.mark.parametrize(("arch", "suite"), [("riscv64", "bookworm"), ("amd64", "bookwurm")])
def test_an_unknown_image_is_refused_without_an_engine(arch: str, suite: str) -> None:
    with pytest.raises(lab.LabError, match="unknown"):
        lab.ensure_image(arch, suite)


def test_a_root_file_system_becomes_an_image_with_the_stop_signal_of_systemd(tmp_path: Path) -> None:
    root = tmp_path / "root.tar"
    with tarfile.open(root, "w"):
        pass
    lab.wrap_image(root, "node:one", tmp_path / "image.tar")
    with tarfile.open(tmp_path / "image.tar") as archive:
        manifest = json.load(archive.extractfile("manifest.json") or pytest.fail("no manifest"))[0]
        config = json.load(archive.extractfile(manifest["Config"]) or pytest.fail("no config"))
        assert manifest["RepoTags"] == ["node:one"]
        assert archive.getmember(manifest["Layers"][0]).size == root.stat().st_size
    assert config["config"]["StopSignal"] == "SIGRTMIN+3"
    assert "container=docker" in config["config"]["Env"]


def test_a_socket_path_is_never_longer_than_the_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "LAB", Path("/" + "deep/" * 40) / ".lab")
    assert len(str(lab.socket_path())) <= lab.SOCKET_PATH_LIMIT


def test_a_command_that_fails_says_what_it_said(tmp_path: Path) -> None:
    lines: list[str] = []
    with pytest.raises(lab.LabError, match=r"making it: failed \(3\): no space left"):
        lab._long(["sh", "-c", "echo no space left; exit 3"], "making it", 10, tmp_path / "log", lines.append)
    assert lines == []


def test_a_command_over_its_limit_is_ended_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lab, "HEARTBEAT_S", 0.1)
    lines: list[str] = []
    child = tmp_path / "child"
    script = f"sleep 60 & echo $! > '{child}'; wait"
    with pytest.raises(lab.LabError, match="not done after"):
        lab._long(["sh", "-c", script], "waiting", 0.3, tmp_path / "log", lines.append)
    assert lines
    command = Path("/proc", child.read_text().strip(), "cmdline")
    end = time.monotonic() + ENDS_LIMIT_S
    while runs(command) and time.monotonic() < end:
        time.sleep(0.02)
    assert not runs(command)


ENDS_LIMIT_S = 10
"""Within which a process that was killed is gone, on a machine with much to do."""


def runs(command: Path) -> bool:
    """Has a process still a command line? One that has ended and is not collected has none."""
    try:
        return command.read_bytes() != b""
    except OSError:
        return False


def test_a_stale_pid_file_is_not_taken_for_an_engine(tmp_path: Path) -> None:
    pid_file = tmp_path / "docker.pid"
    pid_file.write_text("1")
    assert not lab._runs(pid_file, "dockerd")
    assert not lab._runs(tmp_path / "none", "dockerd")


def test_rules_of_a_killed_engine_are_known_by_their_bridge() -> None:
    listed = """\
-P POSTROUTING ACCEPT
-N DOCKER
-A POSTROUTING -s 198.18.5.0/24 ! -o br-c725319fb472 -j MASQUERADE
-A POSTROUTING -s 198.18.5.0/24 ! -o br-430b8ae89402 -j MASQUERADE
-A POSTROUTING -s 172.18.0.0/16 ! -o br-aaaabbbbcccc -j MASQUERADE
-A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE
-A PREROUTING -d 198.18.5.51/32 ! -i br-430b8ae89402 -j DROP
"""
    assert [" ".join(rule) for rule in lab.stale_rules(listed, ["lo", "br-c725319fb472"])] == [
        "POSTROUTING -s 198.18.5.0/24 ! -o br-430b8ae89402 -j MASQUERADE",
        "PREROUTING -d 198.18.5.51/32 ! -i br-430b8ae89402 -j DROP",
    ]
