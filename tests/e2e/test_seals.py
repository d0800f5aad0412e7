"""Seals on real ground: what somebody changes behind our back is found in one look and put back by the next run; what
nobody touched is not played.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bringup.errors import Exit
from bringup.rolevars import ROLES
from tests.e2e.site import Done, Site, answers, on, settle

MUTATIONS = {
    "a file's content and a folder's mode": (
        "echo '# by hand' >>/etc/systemd/system/bringup-watch-{name}.service; chmod 700 /var/lib/bringup/starts",
        {("engine_service", "content"), ("engine_service", "mode"), ("engine_service", "reload")},
        "! grep -q 'by hand' /etc/systemd/system/bringup-watch-{name}.service"
        " && stat -c %a /var/lib/bringup/starts | grep -qx 755",
    ),
    "a timer that is off, and a user with another shell": (
        "systemctl disable --now bringup-restart-{name}.timer; usermod --shell /bin/sh bringup-log",
        {("scheduled_restart", "on"), ("scheduled_restart", "active"), ("log_rotation", "shell")},
        "systemctl is-enabled bringup-restart-{name}.timer && systemctl is-active bringup-restart-{name}.timer"
        " && getent passwd bringup-log | grep -q nologin",
    ),
    "a log's socket whose file went and came back": (
        "cd /etc/systemd/system && mv bringup-log-{name}.socket /root/kept && systemctl daemon-reload"
        " && mv /root/kept bringup-log-{name}.socket && systemctl daemon-reload",
        {("log_rotation", "listens")},
        "ls -l /proc/1/fd | grep -q /run/bringup/log/{name} && systemctl is-active bringup-log-{name}.service"
        " && systemctl restart bringup-{name}.service",
    ),
    "a server that somebody stopped, and the plan that lies there": (
        "systemctl stop bringup-{name}.service; echo '{{}}' >/etc/bringup/plan.json",
        {("engine_service", "state"), ("run_stamp", "content")},
        "systemctl is-active bringup-{name}.service && grep -q schema_version /etc/bringup/plan.json",
    ),
}
"""What is done on one node, what of it `drift` must name (role, field) among other things, and what is true after."""


def port(pair: Site) -> int:
    return int(pair.service()["port"])


def drift(pair: Site) -> Done:
    return pair.invoke("drift", "--json")


def found(done: Done) -> dict[str, set[tuple[str, str]]]:
    return {
        row["host"]: {(one["role"], one["field"]) for one in row["differs"]} for row in done.data["hosts"]
    }


@pytest.fixture(scope="module", autouse=True)
def converged(pair: Site) -> None:
    """Both nodes are as they were left, by a run that played everything."""
    done = pair.provision("--full")
    assert done.code == Exit.DONE, done.text
    assert [note for note in done.data["notes"] if "not sealed" in note] == []


def test_where_nobody_touched_anything_nothing_differs_and_nothing_is_played(pair: Site) -> None:
    looked = drift(pair)
    assert looked.code == Exit.DONE, looked.text
    assert all(row["sealed"] == list(ROLES) for row in looked.data["hosts"])
    done = pair.provision()
    assert done.code == Exit.DONE, done.text
    for host in done.data["hosts"].values():
        assert (host["sealed"], host["roles"], host["done"]) == (list(ROLES), {}, True)
    assert all(answer["tokens"] > 0 for answer in done.data["answers"]), "the servers are asked all the same"


@pytest.mark.parametrize("what", MUTATIONS)
def test_what_is_changed_behind_our_back_is_found_on_its_node_and_put_back(pair: Site, what: str) -> None:
    touched, other = pair.names
    name = pair.service()["name"]
    act, expected, after = MUTATIONS[what]
    on(touched, act.format(name=name))
    looked = drift(pair)
    assert looked.code == Exit.PENDING, looked.text
    differs = found(looked)
    assert expected <= differs[touched], differs
    assert differs[other] == set()
    done = pair.provision()
    assert done.code == Exit.DONE, done.text
    on(touched, after.format(name=name))
    assert done.data["hosts"][other]["sealed"] == list(ROLES)
    assert "engine_env" in done.data["hosts"][touched]["sealed"], (
        "what has nothing to do with it is not played"
    )
    assert drift(pair).code == Exit.DONE
    assert answers(touched, port(pair))


GATE = "pkill -{signal} -f '[l]ib/gate.py {name}'"
"""The part of a start that waits for a token, held or let go on; the brackets keep it from finding itself."""


def test_a_server_in_its_planned_restart_is_no_difference_and_is_not_played(pair: Site) -> None:
    """Held where the new server has no token yet: it is not active, and nobody knows what it runs from."""
    node, other = pair.names
    name = pair.service()["name"]
    hold = GATE.format(signal="STOP", name=name)
    on(node, f"systemctl start --no-block bringup-restart-{name}.service")
    on(node, f"for i in $(seq 3000); do {hold} && exit 0; sleep 0.02; done; exit 1")
    try:
        assert on(node, f"systemctl is-active bringup-{name}.service", check=False) == "activating"
        looked = drift(pair)
        assert (looked.code, found(looked)) == (Exit.DONE, {node: set(), other: set()}), looked.text
        done = pair.provision()
        assert done.code == Exit.DONE, done.text
        assert [host["roles"] for host in done.data["hosts"].values()] == [{}, {}]
        assert on(node, f"systemctl is-active bringup-{name}.service", check=False) == "activating"
    finally:
        on(node, GATE.format(signal="CONT", name=name), check=False)
        settle(pair)
    assert on(node, f"systemctl show -P Result bringup-restart-{name}.service") == "success"
    assert drift(pair).code == Exit.DONE


def test_one_changed_value_plays_what_depends_on_it(pair: Site) -> None:
    def change(intent: dict[str, Any]) -> None:
        intent["scheduled_restart_port"] = 7767

    with pair.changed(change):
        done = pair.provision()
        assert done.code == Exit.DONE, done.text
        for host in done.data["hosts"].values():
            played = {role for role in host["roles"] if role in ROLES}
            assert played == {"scheduled_restart"}
    assert pair.provision().code == Exit.DONE


IMAGE = "/etc/systemd/system/service.d/10-image.conf"


def test_what_an_image_says_of_all_services_is_evidence_and_its_later_change_is_found(pair: Site) -> None:
    touched, other = pair.names
    on(touched, f"mkdir -p {Path(IMAGE).parent}; echo '[Service]' >{IMAGE}; systemctl daemon-reload")
    try:
        assert ("engine_service", "drop-ins") in found(drift(pair))[touched]
        done = pair.provision()
        assert (done.code, [note for note in done.data["notes"] if "not sealed" in note]) == (Exit.DONE, [])
        assert drift(pair).code == Exit.DONE
        on(touched, f"echo '# by hand' >>{IMAGE}")
        looked = found(drift(pair))
        assert ("engine_service", "content") in looked[touched]
        assert looked[other] == set()
        assert pair.provision().code == Exit.DONE
        assert drift(pair).code == Exit.DONE
    finally:
        on(touched, f"rm {IMAGE}; systemctl daemon-reload")
    assert pair.provision().code == Exit.DONE
    assert drift(pair).code == Exit.DONE


def test_a_drop_in_of_others_for_one_of_our_units_stays_a_difference(pair: Site) -> None:
    touched = pair.names[0]
    folder = f"/etc/systemd/system/bringup-{pair.service()['name']}.service.d"
    on(touched, f"mkdir -p {folder}; echo '[Service]' >{folder}/99-by-hand.conf; systemctl daemon-reload")
    try:
        done = pair.provision()
        assert any("role engine_service is not sealed" in note for note in done.data["notes"])
        assert drift(pair).code == Exit.PENDING
    finally:
        on(touched, f"rm {folder}/99-by-hand.conf; systemctl daemon-reload")
    assert pair.provision().code == Exit.DONE
    assert drift(pair).code == Exit.DONE
