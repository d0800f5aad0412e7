"""Restarts: two of a group never at once, whatever happens to the third; polite, bounded, and stopped by a
failure.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from bringup.node import common, drain, drift, lease, look, restart
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
    "port": 8000,
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


def test_the_mark_of_a_restart_ends_by_itself_and_one_by_hand_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "run", lambda command, stdin="": (0, "", ""))
    drain.mark(SERVICE, -1, tmp_path)
    assert drain.marked(["words"], tmp_path) == []
    drain.mark(SERVICE, 60, tmp_path)
    assert drain.marked(["words"], tmp_path) == ["words"]
    drain.mark(SERVICE, None, tmp_path)
    assert (tmp_path / "words").read_text() == ""
    assert drain.marked(["words"], tmp_path) == ["words"]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """One node without a group: what it does is noted instead of done."""
    seen: dict[str, Any] = {"log": [], "fails": ""}
    monkeypatch.setattr(restart, "RESTARTS", tmp_path / "restarts")
    monkeypatch.setattr(common, "DRAINING", tmp_path / "draining")
    monkeypatch.setattr(restart, "WAITING", tmp_path / "waiting")
    monkeypatch.setattr(
        drain,
        "refuse_new",
        lambda name, port, limit: seen["log"].append(f"refuse {port} for {limit or 0:g}") or "",
    )
    monkeypatch.setattr(drain, "take_new", lambda name: seen["log"].append("take"))
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
            "drift": False,
            **changes,
        }
    )


def test_a_restart_waits_drains_restarts_and_verifies_in_this_order(node: dict[str, Any]) -> None:
    assert restart.run(options()) == restart.DONE
    assert node["log"] == ["idle 1.0", "refuse 8000 for 63.3", "idle 0.3", "restart", "verify", "take"]
    kept = json.loads((node["folder"] / "restarts" / "bringup-words.json").read_text())
    assert (kept["outcome"], kept["reason"], kept["start"]["seconds"]) == ("done", "test", 1.5)
    waits = ["a quiet moment", "requests in flight", "a token of the server that it starts"]
    assert [one["for"] for one in kept["waits"]] == waits
    assert kept["refused_new"] is True
    assert not (node["folder"] / "draining" / "words").exists()


def test_a_restart_by_hand_does_not_wait_for_a_quiet_moment_but_drains(node: dict[str, Any]) -> None:
    assert restart.run(options(now=True)) == restart.DONE
    assert node["log"] == ["refuse 8000 for 63.3", "idle 0.3", "restart", "verify", "take"]


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


# ---------------------------------------------------------------- a node that somebody has drained, hours, drift


def test_a_server_that_was_out_of_rotation_stays_out_of_it(
    node: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float | None] = []

    def refuse(name: str, port: int, limit: float | None) -> str:
        limits.append(limit)
        return ""

    monkeypatch.setattr(drain, "refuse_new", refuse)
    mark = node["folder"] / "draining" / "words"
    mark.parent.mkdir()
    mark.touch()
    assert restart.run(options(now=True)) == restart.DONE
    assert mark.exists()
    assert limits == [None], "nothing ends by itself what somebody has begun by hand"
    assert "take" not in node["log"]


def test_a_node_without_a_packet_filter_restarts_all_the_same_and_says_so(
    node: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(drain, "refuse_new", lambda name, port, limit: drain.NO_NFT)
    assert restart.run(options(now=True, json=True)) == restart.DONE
    printed = capsys.readouterr()
    assert json.loads(printed.out)["refused_new"] is False
    assert "new connections are not refused meanwhile: nft is not installed" in printed.err


NOON = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)
NIGHT = "02:00-05:00"


def hours(now: datetime, **changes: Any) -> tuple[float, list[dict[str, Any]]]:
    """Seconds that a restart waits for its hours by a clock that only waiting moves, and what it waited for."""
    clock = [now]

    def pause(seconds: float) -> None:
        clock[0] += timedelta(seconds=seconds)

    waiting = restart.Waiting("words")
    restart.wait_hours({**SERVICE, **changes}, waiting, now=lambda: clock[0], pause=pause)
    return (clock[0] - now).total_seconds(), waiting.waits


def test_a_restart_waits_for_its_hours_and_not_longer_than_its_bound(node: dict[str, Any]) -> None:
    assert hours(NOON) == (0.0, [])
    assert hours(NOON, hours=["11:00-13:00"]) == (0.0, [])
    waited, waits = hours(NOON, hours=[NIGHT], hours_wait_s=15 * 3600)
    assert waited == 14 * 3600
    assert [one["for"] for one in waits] == ["the hours in which it may be restarted"]
    with pytest.raises(Refusal, match=r"it may be restarted in 14\.0 h, and waits at most 12\.0 h"):
        hours(NOON, hours=[NIGHT], hours_wait_s=12 * 3600)


def test_hours_in_which_it_must_not_happen_win(node: dict[str, Any]) -> None:
    waited, _ = hours(NOON, never=["Mon..Fri 08:00-18:00"], hours_wait_s=12 * 3600)
    assert waited == 6 * 3600
    with pytest.raises(Refusal, match="not within a week"):
        hours(NOON, hours=["10:00-14:00"], never=["09:00-15:00"], hours_wait_s=12 * 3600)


def test_waiting_for_a_quiet_moment_ends_with_the_hours(
    node: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restart, "utc_now", lambda: NOON)
    busy = {**SERVICE, "hours": ["11:00-12:10"], "postpone_s": 3600, "drain_s": 120, "hours_wait_s": 0}
    monkeypatch.setattr(common, "load", lambda name: dict(busy))
    assert restart.run(options()) == restart.DONE
    assert node["log"][0] == "idle 480.0"


def test_a_restart_by_hand_asks_for_no_hours(node: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    shut = {**SERVICE, "never": ["00:00-23:59", "23:00-01:00"], "hours_wait_s": 0}
    monkeypatch.setattr(common, "load", lambda name: dict(shut))
    assert restart.run(options(reason="schedule")) == restart.REFUSED
    assert restart.run(options(now=True)) == restart.DONE


def test_what_it_waits_for_can_be_seen_meanwhile_and_a_refusal_is_in_the_history(
    node: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []

    def idle(service: Mapping[str, Any], limit: float, key: str | None) -> int:
        seen.append(common.read_json(node["folder"] / "waiting" / "words.json"))
        return 3

    monkeypatch.setattr(restart, "wait_idle", idle)
    assert restart.run(options(reason="schedule")) == restart.DONE
    assert [one["for"] for one in seen] == ["a quiet moment", "requests in flight"]
    assert all(one["until"] > one["since"] and one["pid"] == os.getpid() for one in seen)
    assert not (node["folder"] / "waiting" / "words.json").exists()
    with restart.only_one("words"):
        assert restart.run(options(reason="schedule")) == restart.REFUSED
    rows = (node["folder"] / "restarts" / "bringup-words.history.jsonl").read_text().splitlines()
    assert [json.loads(row)["outcome"] for row in rows] == ["done", "refused"]
    assert common.read_json(node["folder"] / "restarts" / "bringup-words.json")["outcome"] == "done"


@pytest.mark.parametrize(
    ("state", "drained", "why"),
    [
        ("inactive", False, "it is inactive"),
        ("failed", False, "it is failed"),
        ("active", True, "out of rotation"),
    ],
)
def test_what_somebody_has_stopped_or_drained_is_restarted_by_hand_only(
    node: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    state: str,
    drained: bool,
    why: str,
) -> None:
    monkeypatch.setattr(common, "unit_state", lambda unit, properties: {"ActiveState": state})
    if drained:
        drain.mark(SERVICE, None)
        node["log"].clear()
    assert restart.run(options(reason="schedule")) == restart.REFUSED
    assert node["log"] == []
    assert why in capsys.readouterr().err
    assert restart.run(options(reason="invoke restart", now=True)) == restart.DONE


def test_a_server_that_is_stopped_while_its_restart_waits_stays_stopped(
    node: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    states = iter(["active", "inactive"])
    monkeypatch.setattr(
        common,
        "unit_state",
        lambda unit, properties: {"ActiveState": next(states)} if unit == "bringup-words.service" else {},
    )
    assert restart.run(options(reason="schedule")) == restart.REFUSED
    assert "restart" not in node["log"]


def test_a_restart_that_is_told_to_end_while_it_waits_has_done_nothing_and_has_not_failed(
    node: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(service: Mapping[str, Any], limit: float, key: str | None) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)
        return 0

    monkeypatch.setattr(restart, "wait_idle", wait)
    handler, mask = signal.getsignal(signal.SIGTERM), os.umask(0o022)
    try:
        assert restart.main(["words"]) == restart.DONE
    finally:
        signal.signal(signal.SIGTERM, handler)
        os.umask(mask)
    assert "restart" not in node["log"]
    assert not (node["folder"] / "waiting" / "words.json").exists()
    rows = (node["folder"] / "restarts" / "bringup-words.history.jsonl").read_text().splitlines()
    assert [json.loads(row)["why"] for row in rows] == ["it was told to end"]


DAY = "Mon 2026-11-30"


@pytest.mark.parametrize(
    ("began", "fired", "started", "made_up"),
    [
        ("18:36:46", "18:36:46", "18:36:46", True),
        ("18:36:46", "18:36:47", "18:36:47", True),
        ("18:36:46", "18:37:00", "18:37:00", False),
        ("18:36:46", "", "18:36:47", False),
        ("18:36:46", "18:36:46", "18:37:30", False),
        ("", "", "18:36:46", False),
    ],
    ids=["at once", "within a second", "at its time", "by hand", "by hand later", "no timer"],
)
def test_a_restart_that_comes_with_the_start_of_its_schedule_is_for_a_time_before(
    began: str, fired: str, started: str, made_up: bool
) -> None:
    """As systemd 252 showed it of a timer that was stopped and started after it had come up once."""
    shown = [f"{DAY} {clock} UTC" if clock else "" for clock in (began, fired, started)]
    timer = {"ActiveEnterTimestamp": shown[0], "LastTriggerUSec": shown[1]}
    assert restart.is_made_up(timer, {"InactiveExitTimestamp": shown[2]}) is made_up


def test_status_says_that_the_last_restart_came_to_nothing_until_one_is_done(
    node: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(look, "RESTARTS", node["folder"] / "restarts")
    assert look.last_restart_of("bringup-words") == ""
    node["fails"] = "no real token within 60 s"
    restart.run(options(reason="schedule"))
    said = look.last_restart_of("bringup-words")
    assert said.startswith("its last restart (schedule) failed at 20")
    assert said.endswith(": no real token within 60 s")
    with restart.only_one("words"):
        restart.run(options(reason="schedule"))
    assert "was refused" in look.last_restart_of("bringup-words")
    node["fails"] = ""
    restart.run(options(reason="schedule"))
    assert look.last_restart_of("bringup-words") == ""


def test_a_restart_for_drift_has_the_watchdogs_numbers_as_its_reason(
    node: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drift, "folder_of", lambda name: node["folder"])
    assert restart.run(options(drift=True)) == restart.REFUSED
    assert node["log"] == []
    found = {"sign": "memory", "level": 100.0, "now": 250.0, "for_s": 600.0}
    drift.ask_restart(found, node["folder"])
    assert restart.run(options(drift=True)) == restart.DONE
    kept = common.read_json(node["folder"] / "restarts" / "bringup-words.json")
    assert kept["reason"] == "drift: its memory is 250 MiB, it was 100 MiB after its warm-up, for 600 s"


def test_a_load_balancer_is_told_whether_a_server_takes_requests(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"ActiveState": "active"}
    monkeypatch.setattr(common, "unit_state", lambda unit, properties: state)
    monkeypatch.setattr(common, "DRAINING", tmp_path)

    def ready(name: str) -> tuple[int, Any]:
        service = {"address": "127.0.0.1", "port": nodes.ports["a"]}
        status, content = common.request(service, "GET", f"/v1/ready/{name}", timeout_s=30)
        return status, json.loads(content).get("why")

    assert ready("words") == (200, None)
    (tmp_path / "words").touch()
    assert ready("words") == (503, "draining")
    (tmp_path / "words").write_text(f"{time.clock_gettime(time.CLOCK_BOOTTIME) + 60:.0f}")
    assert ready("words") == (503, "draining")
    (tmp_path / "words").write_text("1")
    assert ready("words") == (200, None), "a restart that died long ago keeps no server out of rotation"
    (tmp_path / "words").unlink()
    state["ActiveState"] = "activating"
    assert ready("words") == (503, "activating")
    assert ready("other")[0] == 404
