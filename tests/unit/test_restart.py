"""Restarts: two of a group never at once, whatever happens to the third; polite, bounded, and stopped by a
failure.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from bringup.node import common, lease, restart
from bringup.node.common import Refusal

GROUP = "lab/words"
NAMES = ("a", "b", "c")


class Nodes:
    """Real lease listeners on loopback, one a node, each with a port of its own; `down` and `objections` by
    name.
    """

    def __init__(self, folder: Path, names: tuple[str, ...]) -> None:
        self.folder, self.names, self.objections = folder, names, dict.fromkeys(names, "")
        self.servers: dict[str, lease.Server] = {}
        self.ports: dict[str, int] = {}
        for name in names:
            self.start(name)

    def settings(self, name: str) -> dict[str, Any]:
        peers = {node: f"127.0.0.1:{node}" for node in self.names}
        group = {"name": "words", "unit": "bringup-words", "peers": peers}
        return {"name": name, "bind": "127.0.0.1", "port": self.ports.get(name, 0), "groups": {GROUP: group}}

    def start(self, name: str) -> None:
        server = lease.serve(self.settings(name), self.folder / f"{name}.json")
        node: lease.Node = server.RequestHandlerClass.node  # type: ignore[attr-defined]
        node.object_to = lambda service: self.objections[name]
        self.ports[name], self.servers[name] = server.server_address[1], server
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def stop(self, name: str) -> None:
        self.servers[name].shutdown()
        self.servers.pop(name).server_close()

    def call(self, address: str, port: int, path: str, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        host, _, name = address.partition(":")
        service = {"address": host, "port": self.ports[name]}
        status, content = common.request(service, "POST", path, body, timeout_s=5)
        return status, json.loads(content)

    def lease(self, name: str, ttl_s: float = 60) -> restart.Lease:
        return restart.Lease(self.settings(name), GROUP, ttl_s)


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    monkeypatch.setattr(lease, "CALLS_A_SECOND", 10_000)
    made = Nodes(tmp_path, NAMES)
    monkeypatch.setattr(restart, "call", made.call)
    monkeypatch.setattr(restart, "LEASE_POLL_S", 0.02)
    monkeypatch.setattr(restart, "UNANSWERED_LIMIT_S", 0.3)
    yield made
    for name in list(made.servers):
        made.stop(name)


def test_one_of_a_group_at_a_time_though_all_begin_at_once(nodes: Nodes) -> None:
    inside, most, rounds = [0], [0], 6

    def node(name: str) -> None:
        for _ in range(rounds):
            held = nodes.lease(name)
            held.take(30, led=False)
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            time.sleep(0.01)
            inside[0] -= 1
            held.release()

    threads = [threading.Thread(target=node, args=(name,)) for name in NAMES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert most == [1]


def test_with_one_of_three_nodes_dead_the_others_still_restart_one_at_a_time(nodes: Nodes) -> None:
    nodes.stop("a")
    first = nodes.lease("b")
    first.take(5, led=False)
    with pytest.raises(Refusal, match="b has been restarting"):
        nodes.lease("c").take(0.2, led=False)
    first.release()
    nodes.lease("c").take(5, led=False)


def test_too_few_answers_end_in_a_refusal_after_a_bounded_wait(nodes: Nodes) -> None:
    nodes.stop("a")
    nodes.stop("c")
    began = time.monotonic()
    with pytest.raises(Refusal, match="2 of 3 nodes must agree, and these do not answer: a: "):
        nodes.lease("b").take(600, led=False)
    assert time.monotonic() - began < 120


def test_a_led_restart_goes_on_without_silent_nodes_but_not_against_a_no(nodes: Nodes) -> None:
    nodes.stop("a")
    nodes.stop("c")
    nodes.lease("b").take(0.1, led=True)
    nodes.start("a")
    nodes.objections["a"] = "its own server is failed"
    with pytest.raises(Refusal, match="a says no: its own server is failed"):
        nodes.lease("b").take(0.1, led=True)


def test_a_node_whose_server_is_down_stops_the_whole_group_but_not_itself(nodes: Nodes) -> None:
    nodes.objections["c"] = "its own last restart failed"
    with pytest.raises(Refusal, match="c says no"):
        nodes.lease("a").take(0.1, led=False)
    nodes.lease("c").take(0.1, led=False)


def test_a_grant_outlives_a_restart_of_the_listener(nodes: Nodes) -> None:
    nodes.lease("a").take(1, led=False)
    for name in NAMES:
        nodes.stop(name)
    for name in NAMES:
        nodes.start(name)
    with pytest.raises(Refusal, match="a has been restarting"):
        nodes.lease("b").take(0.1, led=False)


def test_a_grant_of_a_holder_that_died_runs_out(nodes: Nodes) -> None:
    nodes.lease("a", ttl_s=1).take(1, led=False)
    nodes.lease("b").take(5, led=False)
    with pytest.raises(Refusal, match="b has been restarting"):
        nodes.lease("c").take(0.1, led=False)


def test_another_listener_at_a_nodes_address_does_not_count_as_that_node(nodes: Nodes) -> None:
    nodes.ports["c"] = nodes.ports["b"]
    votes = nodes.lease("a").round()
    assert [(vote.node, vote.granted) for vote in votes] == [("a", True), ("b", True), ("c", None)]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"group": "other", "holder": "a", "token": "t"}, 404),
        ({"group": GROUP, "holder": "stranger", "token": "t"}, 403),
        ({"group": GROUP, "holder": "a", "token": ""}, 403),
        ({"group": GROUP, "holder": "a", "token": "t", "ttl_s": "x"}, 400),
        ({"group": GROUP, "holder": "a", "token": "t" * 5000}, 413),
    ],
)
def test_odd_calls_are_refused(nodes: Nodes, body: dict[str, Any], status: int) -> None:
    assert nodes.call("127.0.0.1:a", 0, "/v1/lease", body)[0] == status
    assert nodes.servers["a"].RequestHandlerClass.node.leases.held == {}  # type: ignore[attr-defined]


def test_so_many_calls_in_a_second_and_no_more() -> None:
    rate = lease.Rate(3)
    assert [rate.allows(10.0 + step / 10) for step in range(5)] == [True, True, True, False, False]
    assert rate.allows(11.0)


def test_only_peers_may_call_when_all_peers_are_addresses() -> None:
    group = {"name": "w", "unit": "u", "peers": {"a": "10.0.0.1", "b": "10.0.0.2"}}
    assert lease.allowed({"groups": {"g": group}}) == {"127.0.0.1", "::1", "10.0.0.1", "10.0.0.2"}
    assert lease.allowed({"groups": {"g": {**group, "peers": {"a": "name.example"}}}}) == set()


SERVICE = {
    "name": "words",
    "unit": "bringup-words",
    "postpone_s": 1,
    "drain_s": 0.3,
    "start_timeout_s": 1,
    "stop_timeout_s": 1,
}


def test_a_busy_server_is_waited_for_within_a_bound_and_the_rest_is_counted() -> None:
    left = iter([3, 2, 0, 1, 0, 0])
    assert restart.wait_idle(SERVICE, 60, None, look=lambda service, key: next(left)) == 0
    assert next(left, None) is None
    assert restart.wait_idle(SERVICE, 0, None, look=lambda service, key: 5) == 5


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """One node without a group: what it does is noted instead of done."""
    seen: dict[str, Any] = {"log": [], "fails": ""}
    monkeypatch.setattr(restart, "RESTARTS", tmp_path / "restarts")
    monkeypatch.setattr(restart, "DRAINING", tmp_path / "draining")
    monkeypatch.setattr(restart, "SETTINGS", tmp_path / "none.json")
    monkeypatch.setattr(common, "RUN", tmp_path / "run")
    monkeypatch.setattr(common, "load", lambda name: dict(SERVICE))
    monkeypatch.setattr(common, "unit_state", lambda unit, properties: {"ActiveState": "active"})
    monkeypatch.setattr(
        restart, "wait_idle", lambda service, limit, key: seen["log"].append(f"idle {limit}") or 0
    )

    def act(service: Mapping[str, Any]) -> None:
        assert (tmp_path / "draining" / "words").exists()
        seen["log"].append("restart")
        if seen["fails"]:
            raise common.NoAnswer(seen["fails"])

    monkeypatch.setattr(restart, "restart_unit", act)
    monkeypatch.setattr(
        restart, "verify", lambda service, key: seen["log"].append("verify") or {"seconds": 1.5}
    )
    seen["folder"] = tmp_path
    return seen


def options(**changes: Any) -> argparse.Namespace:
    return argparse.Namespace(
        **{
            "name": "words",
            "now": False,
            "alone": False,
            "led": False,
            "wait_s": None,
            "reason": "test",
            "json": False,
            **changes,
        }
    )


def test_a_restart_waits_drains_restarts_and_verifies_in_this_order(node: dict[str, Any]) -> None:
    assert restart.run(options()) == restart.DONE
    assert node["log"] == ["idle 1.0", "idle 0.3", "restart", "verify"]
    kept = json.loads((node["folder"] / "restarts" / "bringup-words.json").read_text())
    assert (kept["outcome"], kept["reason"], kept["start"]["seconds"]) == ("done", "test", 1.5)
    assert not (node["folder"] / "draining" / "words").exists()


def test_a_restart_by_hand_does_not_wait_for_a_quiet_moment_but_drains(node: dict[str, Any]) -> None:
    assert restart.run(options(now=True)) == restart.DONE
    assert node["log"] == ["idle 0.3", "restart", "verify"]


def test_a_failed_restart_is_kept_with_its_reason_and_the_mark_goes(
    node: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    node["fails"] = "no real token within 60 s"
    assert restart.run(options(json=True)) == restart.FAILED
    printed = json.loads(capsys.readouterr().out)
    assert (printed["outcome"], printed["why"]) == ("failed", "no real token within 60 s")
    assert not (node["folder"] / "draining" / "words").exists()
    assert "no real token" in lease_objection(node["folder"], at="2026-01-01T00:00:00.000Z")
    assert lease_objection(node["folder"], at="2099-01-01T00:00:00.000Z") == ""


def lease_objection(folder: Path, at: str) -> str:
    """What the node says to others when its last good start was at `at`."""
    starts = folder / "starts"
    common.write_json(starts / "bringup-words.json", {"outcome": "ready", "at": at})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "STARTS", starts)
        return lease.objection(SERVICE, restarts=folder / "restarts")


def test_a_second_restart_of_the_same_server_is_refused_meanwhile(node: dict[str, Any]) -> None:
    with restart.only_one("words"):
        assert restart.run(options()) == restart.REFUSED
    assert node["log"] == []
    assert restart.run(options()) == restart.DONE


def test_the_history_of_restarts_is_short(node: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart, "HISTORY_LINES", 3)
    for _ in range(5):
        restart.run(options())
    rows = (node["folder"] / "restarts" / "bringup-words.history.jsonl").read_text().splitlines()
    assert len(rows) == 3
