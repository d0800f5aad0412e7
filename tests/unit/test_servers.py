"""Which servers a run starts, restarts, only names as due, or retires; and who is asked before a restart."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bringup.errors import UsageError
from bringup.node import servers
from bringup.rolevars.scheduled_restart import lease_settings

SERVICE = {
    "name": "words",
    "unit": "bringup-words",
    "definition": ["/etc/x"],
    "start_timeout_s": 1,
    "stop_timeout_s": 1,
}


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A node with folders of the test, a `systemctl` that only notes what it was asked, and a state to set."""
    seen: dict[str, Any] = {"state": {"active": True, "due": False, "why": ""}, "log": [], "folder": tmp_path}
    tool = tmp_path / "systemctl"
    tool.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name in ("SERVICES", "CREDENTIALS", "UNITS"):
        monkeypatch.setattr(servers, name, tmp_path / name.lower())
        (tmp_path / name.lower()).mkdir()
    monkeypatch.setattr(servers, "current", lambda service: seen["state"])

    def act(what: str, service: Mapping[str, Any]) -> dict[str, Any]:
        seen["log"].append(what)
        if seen.get("fails"):
            raise servers.ServersFailed(f"{service['name']}: {seen['fails']}")
        return {"unit": service["unit"]}

    monkeypatch.setattr(servers, "start", lambda service: act("start", service))
    monkeypatch.setattr(servers, "restart", lambda service: act("restart", service))
    return seen


DUE = {"active": True, "due": True, "why": "its definition changed"}
DOWN = {"active": False, "due": True, "why": "it is inactive"}


@pytest.mark.parametrize(
    ("state", "mode", "check", "log", "changed", "due"),
    [
        ({"active": True, "due": False, "why": ""}, "now", False, [], False, []),
        (DOWN, "now", False, ["start"], True, []),
        (DOWN, "later", False, ["start"], True, []),
        (DOWN, "later", True, [], True, []),
        (DUE, "now", False, ["restart"], True, ["words"]),
        (DUE, "now", True, [], True, ["words"]),
        (DUE, "later", False, [], False, ["words"]),
    ],
)
def test_a_server_is_started_restarted_or_named(
    node: dict[str, Any],
    state: dict[str, Any],
    mode: str,
    check: bool,
    log: list[str],
    changed: bool,
    due: list[str],
) -> None:
    node["state"] = state
    outcome = servers.apply([SERVICE], mode, [], check)
    assert (node["log"], outcome["changed"], outcome["due"]) == (log, changed, due)
    assert len(outcome["bringup_starts"]) == len(log)


def test_check_mode_knows_that_files_that_would_change_make_a_server_due(node: dict[str, Any]) -> None:
    assert servers.apply([SERVICE], "now", ["/etc/x"], check_only=True)["changed"]
    assert not servers.apply([SERVICE], "now", ["/etc/y"], check_only=True)["changed"]


def test_every_server_that_does_not_come_up_is_named(node: dict[str, Any]) -> None:
    node.update(state=DOWN, fails="no token")
    with pytest.raises(servers.ServersFailed, match="words: no token\nother: no token"):
        servers.apply([SERVICE, {**SERVICE, "name": "other"}], "now", [], check_only=False)


def test_a_server_that_is_planned_no_more_is_stopped_and_its_units_go(node: dict[str, Any]) -> None:
    folder = node["folder"]
    old = {"name": "old", "unit": "bringup-old", "start_timeout_s": 1, "stop_timeout_s": 1}
    for name in ("old", "words"):
        (folder / f"services/{name}.json").write_text(
            json.dumps({**old, "name": name, "unit": f"bringup-{name}"})
        )
        (folder / f"units/bringup-{name}.service").touch()
    (folder / "units/bringup-watch-old.service").touch()
    (folder / "credentials/old").mkdir()
    assert servers.apply([SERVICE], "now", [], check_only=True)["changed"]
    assert (folder / "services/old.json").exists(), "check mode changes nothing"
    assert servers.apply([SERVICE], "now", [], check_only=False)["changed"]
    assert [path.name for path in (folder / "services").iterdir()] == ["words.json"]
    assert [path.name for path in (folder / "units").iterdir()] == ["bringup-words.service"]
    assert list((folder / "credentials").iterdir()) == []
    asked = (folder / "asked").read_text().splitlines()
    assert asked == ["disable --now bringup-watch-old.service bringup-old.service", "daemon-reload"]
    assert not servers.apply([SERVICE], "now", [], check_only=False)["changed"]


GROUP = {"name": "lab/words", "service": "words", "unit": "bringup-words", "nodes": ["a", "b"]}


def test_each_node_knows_its_peers_by_their_addresses() -> None:
    made = lease_settings([GROUP], {"a": "10.0.0.1", "b": "10.0.0.2"}, "b", 7766)
    assert (made["name"], made["bind"], made["port"]) == ("b", "10.0.0.2", 7766)
    assert made["groups"]["lab/words"]["peers"] == {"a": "10.0.0.1", "b": "10.0.0.2"}


def test_two_nodes_behind_one_address_are_refused_with_what_to_do() -> None:
    with pytest.raises(
        UsageError, match=r"b: is reached at 127\.0\.0\.1, as a is\. Set scheduled_restart_address"
    ):
        lease_settings([GROUP], {"a": "127.0.0.1", "b": "127.0.0.1"}, "a", 7766)
