"""Measuring and tuning on real ground: the pair's servers are measured, compared with themselves, and tuned;
what tuning changed is put back.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from bringup import ROOT, suites
from bringup.errors import Exit
from tests.e2e import nodestate
from tests.e2e.site import Done, Site, settle

OUTPUT_TOKENS = 32
SMOKE = {"32->32": 6 * OUTPUT_TOKENS, "4x 32->32": 3 * 8 * OUTPUT_TOKENS}
"""The suite's loads and the tokens that their runs ask for together."""
TRIES = 4
BENCH_TRIES = 2
SCALE = 0.03
"""Of the sources' suites: their shortest answers are six tokens then, and S3 takes its rates for 16 s."""
SUITE_LIMIT_S = 1800


@pytest.fixture(autouse=True)
def at_rest(pair: Site) -> None:
    """Both servers answer and nothing restarts them; alone, this file provisions them first."""
    settle(pair)


@pytest.fixture(scope="module")
def smoke(pair: Site) -> Done:
    """The smoke suite on both servers, tried once more when it failed; its text says then how the nodes were."""
    failed = ""
    for _ in range(BENCH_TRIES):
        settle(pair)
        done = pair.invoke("bench", "--suite", "smoke", "--json")
        if done.code == Exit.DONE:
            return done
        failed += f"{done.text}\n{nodestate.of(pair)}\n"
    return Done(done.code, "", failed)


@pytest.fixture
def measured(smoke: Done) -> Done:
    """What the smoke suite said. A failure is that of each test that needs it, and costs no further bench."""
    assert smoke.code == Exit.DONE, smoke.text
    return smoke


def loads(target: dict[str, Any]) -> dict[str, int]:
    labels = ("32->32", "4x 32->32")
    return dict(zip(labels, (item["output_tokens"] for item in target["measured"]), strict=True))


def test_every_token_of_both_servers_is_counted_by_the_servers(pair: Site, measured: Done) -> None:
    data = measured.data
    assert data["schema_version"] >= 1
    assert [target["name"].split()[0] for target in data["targets"]] == list(pair.names)
    for target in data["targets"]:
        assert loads(target) == SMOKE
        assert all(item["errors"] == 0 for item in target["measured"])
        assert all(len(item["values"]["output_tok_s"]) > 0 for item in target["measured"])


def test_log_memory_versions_and_the_tunnels_cost_lie_beside_it(measured: Done) -> None:
    for target in measured.data["targets"]:
        beside = target["beside"]
        assert beside["log"]["readings"] >= len(SMOKE)
        assert beside["log"]["decode_tok_s"] > 0
        assert sum(beside["locality"]["bytes_by_node"].values()) > 0
        assert 0 <= beside["tunnel_ms"] < 1000
        assert beside["notes"] == []
        assert target["fingerprint"]["profile"] == "cpu-words-llama-server"
        assert target["fingerprint"]["all packages"]
    folder = ROOT / "runs" / measured.data["run"]
    for name in ("bench.json", "bench.csv", "report.html", "record.json"):
        assert (folder / name).stat().st_mode & 0o077 == 0, name


@pytest.mark.parametrize("name", ["S1", "S2", "S3"])
def test_the_sources_suites_run_with_every_load_run_and_token(pair: Site, name: str) -> None:
    """At a share of their lengths: the same loads, runs, requests at once and rates, in seconds."""
    done = pair.invoke(
        "bench",
        "--limit",
        pair.names[0],
        "--suite",
        name,
        "--scale",
        str(SCALE),
        "--json",
        limit=SUITE_LIMIT_S,
    )
    assert done.code == Exit.DONE, done.text
    assert done.data["suite"] == f"{name} at {SCALE:g} of its lengths"
    (target,) = done.data["targets"]
    assert target["left_out"] == []
    steps = suites.scaled(suites.load(name), SCALE).steps
    assert [item["load"] for item in target["measured"]] == [dataclasses.asdict(step.load) for step in steps]
    for step, item in zip(steps, target["measured"], strict=True):
        runs = step.cold_runs + step.warm_runs
        assert len(item["values"]["output_tok_s"]) == len(item["cold"]) == runs
        assert (item["errors"], item["output_tokens"]) == (0, runs * step.requests_a_run * step.output_tokens)


def test_a_server_against_itself_is_the_same_or_cannot_be_told(pair: Site, measured: Done) -> None:
    """Other work on the same cores may really slow one of two measurements: then they are taken again."""
    name = pair.names[0]
    verdicts = []
    for _ in range(TRIES):
        done = pair.invoke("bench", "--limit", name, "--against", measured.data["run"], "--json")
        verdicts.append(done.data["verdict"])
        compared = {label.rpartition(": ")[2] for label in done.data["against"]["comparisons"]}
        assert compared == set(SMOKE)
        assert done.code == (Exit.GATE if verdicts[-1] == "worse" else Exit.DONE), done.text
        if verdicts[-1] in ("same", "cannot tell"):
            return
        measured = done
    pytest.fail(f"the same server was {', '.join(verdicts)} than itself")


def test_a_server_that_became_slower_fails_the_gate(pair: Site, measured: Done, tmp_path: Path) -> None:
    """A hundred times slower than what the file says was measured before."""
    data = json.loads((ROOT / "runs" / measured.data["run"] / "bench.json").read_text())
    for target in data["targets"]:
        for item in target["measured"]:
            item["values"]["output_tok_s"] = [100 * value for value in item["values"]["output_tok_s"]]
    (tmp_path / "before.json").write_text(json.dumps(data))
    done = pair.invoke(
        "bench", "--limit", pair.names[0], "--against", str(tmp_path / "before.json"), "--json"
    )
    assert done.code == Exit.GATE, done.text
    assert done.data["verdict"] == "worse"
    assert done.data["failed_gates"]


def test_a_suite_or_run_that_does_not_exist_is_refused_before_anything_runs(pair: Site) -> None:
    done = pair.invoke("bench", "--suite", "smoky")
    assert done.code == Exit.USAGE
    assert 'Did you mean "smoke"' in done.text


def test_tuning_picks_a_setting_and_puts_the_server_back(pair: Site) -> None:
    done = pair.invoke("tune", "--yes", "--json")
    assert done.code == Exit.DONE, done.text
    data = done.data
    tried = [one["name"] for one in data["measured"]]
    assert tried == ["--parallel=4", "--parallel=8"]
    assert data["picked"] in tried
    folder = ROOT / "runs" / data["run"]
    assert json.loads((folder / "state.json").read_text())["measured"]
    assert (folder / "report.html").is_file()
    if data["profile"]:
        assert yaml.safe_load((folder / "candidate.yml").read_text())["based_on"] == "cpu-words-llama-server"
    again = pair.provision("--check", "--limit", pair.names[0])
    assert again.code == Exit.DONE, again.text
    assert all(host["changed"] == 0 for host in again.data["hosts"].values())
