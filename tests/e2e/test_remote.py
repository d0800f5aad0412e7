"""Questions over OpenSSH's own client, to a real node: one connection for several, and why a host cannot be asked."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path

import pytest

from bringup import fleet, remote
from bringup.errors import HostUnreachable
from bringup.fleet import Host
from tests.e2e.site import Site


@pytest.fixture
def node(pair: Site) -> Host:
    return fleet.hosts_of(str(pair.folder), [pair.names[0]])[0]


def test_a_question_is_asked_over_a_connection_that_the_next_one_uses(node: Host) -> None:
    first = remote.once(node, "cat; echo to the side >&2; echo $PPID; exit 3", stdin="told\n")
    assert (first.code, first.out.splitlines()[0], first.err) == (3, "told", "to the side\n")
    assert remote.once(node, "echo $PPID").out.split() == first.out.split()[1:]
    # A quick one is not that of Ansible.
    quick = remote.once(node, "echo $PPID", quick=True).out
    assert quick != first.out.splitlines()[1]
    assert remote.once(node, "echo $PPID", quick=True).out == quick
    assert remote.once(node, "sleep 20", limit_s=0.5).code == 124


def test_why_a_host_cannot_be_asked_is_said_in_words(
    node: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a connection that is open already."""
    monkeypatch.setattr(remote, "ASKING", ("ControlPath=none", *remote.ASKING))
    for name in ("key", "server"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)]
        subprocess.run(words, check=True, timeout=60)
    none, other = tmp_path / "none", tmp_path / "other"
    none.write_text("")
    place = node.address if node.port == 22 else f"[{node.address}]:{node.port}"
    other.write_text(f"{place} {(tmp_path / 'server.pub').read_text()}")
    for host, said in (
        (dataclasses.replace(node, known_hosts=(str(none),)), f"its host key is not in {none}"),
        (dataclasses.replace(node, known_hosts=(str(other),)), remote.CHANGED_KEY),
        (dataclasses.replace(node, key=str(tmp_path / "key")), "may not log in with"),
        (dataclasses.replace(node, port=1), f"nothing listens on {node.address}:1"),
    ):
        with pytest.raises(HostUnreachable) as caught:
            remote.once(host, "true")
        assert said in caught.value.problems[0].what
    # Who checks no keys meets a stranger without a question.
    stranger = dataclasses.replace(node, known_hosts=(str(none),), check_keys=False)
    assert remote.once(stranger, "echo in").out == "in\n"
