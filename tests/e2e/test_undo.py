"""An undo on real ground: refused where it would end something, rehearsed without a change, and byte for byte."""

from __future__ import annotations

import pytest

from bringup.errors import Exit
from tests.e2e.site import Done, Site, answers, on

ROLE = "scheduled_restart"
"""Nothing stands on it, and a server goes on serving without it."""

TREE = """
cd /
skip='^/?(etc/(hosts|ld\\.so\\.cache|mtab|machine-id|(passwd|shadow|group|gshadow)-)( |$)|.*/__pycache__)'
find etc usr/local usr/lib/systemd opt srv -xdev \\( -type f -o -type l -o -type d \\) -printf '%p %y %m %U:%G %l\\n' |
  grep -Ev "$skip" | sort
find etc usr/local usr/lib/systemd opt srv -xdev -type f -size -1024k -print0 | grep -zEv "$skip" | sort -z |
  xargs -0 b2sum
systemctl list-units --all --plain --no-legend 'bringup-*' | awk '{print $1, $3}' | sort
"""
"""Every file, link and folder where roles bring things, with owner, mode and content, and the units that are there.
Not the copies that the tools for users keep of how it was before their last change."""


def tree(name: str) -> str:
    return on(name, TREE)


def undo(pair: Site, *words: str) -> Done:
    return pair.invoke("undo", "--json", "--yes", "--limit", pair.names[0], *words)


@pytest.fixture(scope="module", autouse=True)
def provisioned(pair: Site) -> None:
    done = pair.provision()
    assert done.code == Exit.DONE, done.text[-3000:]


@pytest.mark.parametrize(
    ("role", "says"),
    [("engine_service", "this node serves"), ("log_rotation", "engine_service works only with log_rotation")],
)
def test_an_undo_that_would_end_something_is_refused_and_changes_nothing(
    pair: Site, role: str, says: str
) -> None:
    name = pair.names[0]
    before = tree(name)
    done = undo(pair, "--role", role)
    assert done.code == Exit.LOCKED, done.text[-3000:]
    assert says in done.data["failures"][-1]["message"]
    assert done.data["hosts"][name]["changed"] == 0
    assert tree(name) == before
    assert answers(name, int(pair.service()["port"]))


def test_one_role_is_undone_byte_for_byte_while_the_node_serves(pair: Site) -> None:
    name, port = pair.names[0], int(pair.service()["port"])
    with_it = tree(name)
    rehearsed = undo(pair, "--role", ROLE, "--check")
    assert rehearsed.code == Exit.PENDING, rehearsed.text[-3000:]
    assert tree(name) == with_it, "a rehearsal changes nothing"

    done = undo(pair, "--role", ROLE)
    assert done.code == Exit.DONE, done.text[-3000:]
    without = tree(name)
    timer = f"bringup-restart-{pair.service()['name']}.timer"
    assert timer in with_it
    assert timer not in without

    done = pair.provision("--tags", ROLE, "--limit", name)
    assert (done.code, tree(name)) == (Exit.DONE, with_it), done.text[-3000:]
    done = undo(pair, "--role", ROLE)
    assert (done.code, tree(name)) == (Exit.DONE, without), done.text[-3000:]
    assert answers(name, port)
    done = pair.provision("--tags", ROLE, "--limit", name)
    assert (done.code, tree(name)) == (Exit.DONE, with_it), done.text[-3000:]
