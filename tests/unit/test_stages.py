"""Which scenarios and stages run, in which order, and what their tables say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from bringup import ROOT
from tests import stages
from tests.molecule import run

ALL = [
    run.Scenario("engine_service", "default"),
    run.Scenario("gateway", "default"),
    run.Scenario("gateway", "tls"),
]


def test_every_scenario_of_every_role_is_found(tmp_path: Path) -> None:
    for name in ("gateway/molecule/tls", "gateway/molecule/default", "engine_service/molecule/default"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "molecule.yml").write_text("---\n")
    (tmp_path / "gateway/molecule/shared").mkdir()
    assert run.find(tmp_path) == ALL


@pytest.mark.parametrize(
    ("words", "titles"),
    [
        ([], ["engine_service/default", "gateway/default", "gateway/tls"]),
        (["gateway"], ["gateway/default", "gateway/tls"]),
        (["gateway/tls", "engine_service"], ["engine_service/default", "gateway/tls"]),
    ],
)
def test_scenarios_are_chosen_by_role_or_by_name(words: list[str], titles: list[str]) -> None:
    assert [item.title for item in run.select(ALL, words)] == titles


def test_a_misspelt_scenario_is_an_error_and_not_an_empty_run() -> None:
    with pytest.raises(ValueError, match="gatewya"):
        run.select(ALL, ["gateway", "gatewya"])


def test_unknown_scenarios_run_first_then_the_longest() -> None:
    seconds = {"engine_service/default": 20.0, "gateway/default": 40.0}
    ordered = [item.title for item in run.longest_first(ALL, seconds)]
    assert ordered == ["gateway/tls", "gateway/default", "engine_service/default"]


def test_a_node_of_a_scenario_has_a_valid_host_name_of_its_checkout() -> None:
    node = run.Scenario("engine_service", "no_space", Path("/home/one/bringup")).node
    assert re.fullmatch("molecule-engine-service-no-space-[0-9a-f]{8}", node)
    assert len(f"{node}-a") <= 63
    assert node == run.Scenario("engine_service", "no_space", Path("/home/one/bringup")).node
    assert node != run.Scenario("engine_service", "no_space", Path("/home/two/bringup")).node


def test_every_node_of_every_scenario_has_the_name_that_tells_its_checkout() -> None:
    given = "${BRINGUP_NODE:-molecule-node}"
    for item in run.find(ROOT / "roles"):
        written = yaml.safe_load(
            (ROOT / "roles" / item.role / "molecule" / item.name / "molecule.yml").read_text()
        )
        names = [platform["name"] for platform in written["platforms"]]
        assert names, item.title
        assert [name for name in names if not re.fullmatch(f"{re.escape(given)}(-[a-z0-9]+)?", name)] == []


def test_the_log_of_a_first_try_stays_and_is_named(tmp_path: Path) -> None:
    log = tmp_path / "molecule-gateway-tls.log"
    log.write_text("fatal: the first try\n")
    first = run.put_aside(run.Result(ALL[2], 2, 31.0, log))
    log.write_text("the second try\n")
    assert first.log == tmp_path / "molecule-gateway-tls.first.log"
    assert "fatal: the first try" in run.ending(first)
    assert run.unstable(first).startswith("UNSTABLE gateway/tls: ")
    assert str(first.log) in run.unstable(first)
    assert log.read_text() == "the second try\n"


def test_the_table_counts_stages_in_a_line_that_stands_alone() -> None:
    outcomes = [stages.Outcome("lint", 0, 12.4), stages.Outcome("unit", 124, 900.0)]
    lines = stages.table(outcomes, 912.4).splitlines()
    assert lines[-1] == "stages: 1 passed, 1 failed"
    assert [line.split() for line in lines[1:3]] == [
        ["lint", "passed", "12", "s"],
        ["unit", "FAILED", "900", "s"],
    ]


def test_a_command_over_its_limit_fails_and_keeps_what_it_said() -> None:
    slow = stages.Command("slow", ("python", "-c", "import time; print('began'); time.sleep(60)"), 1.0)
    outcome = stages.run(slow, keep=True)
    assert outcome.code == 124
    assert "began" in outcome.output
    assert "over its limit of 1 s" in outcome.output


def test_a_command_keeps_its_exit_code() -> None:
    assert stages.run(stages.Command("three", ("python", "-c", "raise SystemExit(3)")), keep=True).code == 3


def rehearsed(*plays: dict[str, bool]) -> list[str]:
    """Lines of a scenario in which each play changed these tasks."""
    return [
        json.dumps(
            {
                "check": check,
                "tasks": [
                    {"host": "node", "task": task, "changed": changed} for task, changed in play.items()
                ],
            }
        )
        for check, play in zip(run.REHEARSED, plays, strict=True)
    ]


def test_check_mode_that_says_what_happens_is_no_lie() -> None:
    assert run.lies(rehearsed({"a": True}, {"a": True}, {"a": False}, {"a": False})) == []


@pytest.mark.parametrize(
    ("plays", "said"),
    [
        (({"a": False}, {"a": True}, {}, {}), ["fresh node, node, a: check mode says nothing, it does [{}]"]),
        (({"a": True}, {}, {}, {}), ["fresh node, node, a: check mode says [{}], it does nothing"]),
        (({}, {}, {}, {"a": True}), ["converged node, node, a: check mode says [{}]"]),
    ],
)
def test_a_lie_of_check_mode_is_found(plays: tuple[dict[str, bool], ...], said: list[str]) -> None:
    assert run.lies(rehearsed(*plays)) == said


def test_plays_that_are_missing_are_no_proof() -> None:
    assert len(run.lies(rehearsed({}, {}, {}, {})[:3])) == 1
