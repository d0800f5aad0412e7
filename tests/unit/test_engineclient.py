"""An engine's own client is called with the load that is meant, and what it writes is read as it is."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bringup import bench, benching, catalog, engineclient, fleet, inventory, load, plan, suites
from bringup.node import beside as node
from bringup.planned import Service
from tests.unit import openai_server as servers

CASES = Path(__file__).parents[1] / "cases" / "bench"
RECORDED = (CASES / "vllm-bench-serve-0.32.0.json").read_text()
"""A real run: six prompts of 32 tokens, 64 tokens each, two at once, against a drafting server."""
SGLANG = sorted(CASES.glob("sglang-bench-serving-*.json"))
"""Its client of three versions, as the catalog calls it, against a stand-in of its server's endpoint: six prompts of
32 token ids, 16 tokens each, two at once."""
STEP = suites.Step(prompt_tokens=2048, output_tokens=512, concurrent=4, requests=8)


@pytest.fixture(scope="module")
def service() -> Service:
    return plan.resolve(inventory.read("h20"), catalog.lazy()).hosts[0].services[0]


# --- what it writes ----------------------------------------------------------------------------------------


def test_a_recorded_result_gives_each_request_with_its_times() -> None:
    sent = engineclient.read(RECORDED)
    assert [(one.prompt_tokens, one.output_tokens, one.error) for one in sent.requests] == [(32, 64, "")] * 6
    assert sent.wall_s == pytest.approx(1.302, abs=0.001)
    assert min(one.began for one in sent.requests) == 0
    assert all(one.began < (one.first_token or 0) < one.ended <= sent.wall_s + 0.1 for one in sent.requests)


def test_our_figures_of_it_are_the_clients_own() -> None:
    data, sent = json.loads(RECORDED), engineclient.read(RECORDED)
    run = bench.Run(sent.wall_s, sent.requests)
    assert run.output_tok_s == pytest.approx(data["output_throughput"], rel=1e-6)
    assert run.total_tok_s == pytest.approx(data["total_token_throughput"], rel=1e-6)
    series = bench.Series(bench.Load(32, 64, 2), (run,))
    assert series.values("ttft_ms")[0] == pytest.approx(data["median_ttft_ms"], rel=1e-6)
    assert series.values("tpot_ms")[0] == pytest.approx(data["median_tpot_ms"], rel=1e-6)


@pytest.mark.parametrize("path", SGLANG, ids=lambda path: path.stem)
def test_every_version_of_sglangs_client_is_read_with_its_own_figures(path: Path) -> None:
    text = path.read_text()
    data, sent = json.loads(text), engineclient.read(text)
    assert [(one.prompt_tokens, one.output_tokens, one.error) for one in sent.requests] == [(32, 16, "")] * 6
    run = bench.Run(sent.wall_s, sent.requests)
    assert run.output_tok_s == pytest.approx(data["output_throughput"], rel=1e-6)
    series = bench.Series(bench.Load(32, 16, 2), (run,))
    assert series.values("ttft_ms")[0] == pytest.approx(data["median_ttft_ms"], rel=1e-6)
    # It counts until the stream is closed, we until the last token.
    assert series.values("tpot_ms")[0] == pytest.approx(data["median_tpot_ms"], rel=0.1)
    assert series.values("tpot_ms")[0] <= data["median_tpot_ms"]


def lines(**changes: Any) -> str:
    """A result without begins, a line each, appended to, as SGLang's client writes it."""
    data = {
        "duration": 2.0,
        "input_lens": [8, 8],
        "output_lens": [4, 0],
        "ttfts": [0.5, 0.0],
        "itls": [[0.1, 0.1, 0.1], []],
        "errors": ["", "Service Unavailable"],
        **changes,
    }
    return json.dumps({"duration": 99.0}) + "\n" + json.dumps(data) + "\n"


def test_the_last_line_of_several_counts_and_a_failed_request_is_an_error() -> None:
    sent = engineclient.read(lines())
    good, bad = sent.requests
    assert sent.wall_s == 2.0
    assert (good.first_token, good.error) == (0.5, "")
    assert good.ended == pytest.approx(0.8)
    assert bad.error == "Service Unavailable"


def test_a_request_without_a_token_is_an_error_even_if_the_client_says_nothing() -> None:
    assert engineclient.read(lines(errors=["", ""])).requests[1].error == "no token came"


@pytest.mark.parametrize(
    "text", ["", "no JSON", "[]", "{}", lines(ttfts=[0.5]), lines(duration=None), lines(itls=None)]
)
def test_what_is_no_result_is_said_to_be_none(text: str) -> None:
    with pytest.raises(engineclient.NoResult, match="cannot be read"):
        engineclient.read(text)


# --- how busy it was ---------------------------------------------------------------------------------------

IMPORTS = [[100.0, 0.0], [104.0, 4.0]]
"""Four seconds of imports at a whole core, before anything is sent."""


@pytest.mark.parametrize(
    ("load", "began", "wall_s", "percent"),
    [
        ([[114.0, 5.0], [115.0, 6.0]], 104.0, 10.0, 10.0),
        ([[109.0, 9.0], [114.0, 14.0]], 104.0, 10.0, 100.0),
        ([[114.0, 5.0]], None, 10.0, 10.0),
        ([[114.0, 5.0]], 3.0, 10.0, 10.0),
        ([[104.1, 4.1]], 104.0, 0.1, None),
    ],
    ids=["idle", "at its limit", "no begin", "a begin of another clock", "too short to say"],
)
def test_only_the_time_of_the_load_counts(
    load: list[list[float]], began: float | None, wall_s: float, percent: float | None
) -> None:
    assert engineclient.busy_percent([*IMPORTS, *load], began, wall_s) == percent


def test_a_client_that_had_no_time_left_is_said_to_be_the_limit() -> None:
    sent = engineclient.read(RECORDED)
    series = bench.Series(bench.Load(32, 64, 2), (bench.Run(sent.wall_s, sent.requests),))
    tired = benching.measured_of(series, busy_percent=97.0)
    assert "the client used 97 % of a core: it may be what was measured" in tired.notes
    assert not [note for note in benching.measured_of(series, busy_percent=40.0).notes if "core" in note]


SPINS = (
    "import json, sys, time; began = time.perf_counter()\n"
    "while time.perf_counter() < began + 2: pass\n"
    "json.dump({'duration': 2.0, 'start_times': [began], 'input_lens': [1], 'output_lens': [2], 'ttfts': [0.1],"
    " 'itls': [[1.9]], 'errors': ['']}, open(sys.argv[1], 'w'))"
)


def test_how_much_cpu_a_client_had_is_seen_on_the_node() -> None:
    """A loop without a pause uses what the machine gives it, as its own process time says; a sleep nothing."""
    answer = node.client(request([sys.executable, "-c", SPINS, "{result}"]))
    sent = engineclient.read(answer["result"], answer["cpu"])
    assert sent.busy_percent is not None
    assert 0 < sent.busy_percent <= 101
    sleeps = SPINS.replace("while time.perf_counter() < began + 2: pass", "time.sleep(2)")
    rested = node.client(request([sys.executable, "-c", sleeps, "{result}"]))
    calm = engineclient.read(rested["result"], rested["cpu"]).busy_percent
    assert calm is not None
    assert calm < sent.busy_percent


# --- how it is called --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in catalog.lazy().names("engines") if "llama" not in name])
def test_every_gpu_engine_names_its_client_and_every_word_is_filled(name: str, service: Service) -> None:
    engine = catalog.lazy().engine(name)
    assert engine.bench is not None
    for step in (STEP, suites.Step(prompt_tokens=1024, output_tokens=256, rate=2, requests=64)):
        line = engineclient.words(engine.bench, service, "/srv/models/glm", step, 3)
        assert [word for word in line if "{" in word] == [word for word in line if word.endswith("{result}")]
        assert "--num-prompts=" + str(step.requests_a_run) in line
        assert f"--model={service.served_name}" in line
        assert "--tokenizer=/srv/models/glm" in line
        assert (f"--request-rate={step.rate}" in line) == (step.rate is not None)


def test_two_runs_never_send_the_same_text(service: Service) -> None:
    how = catalog.lazy().engine("vllm-0.33.0").bench
    assert how is not None
    other = replace_step(STEP, concurrent=8)
    seeds = [
        next(word for word in engineclient.words(how, service, "/m", step, number) if "--seed" in word)
        for step in (STEP, other)
        for number in range(8)
    ]
    assert len(set(seeds)) == len(seeds)


def test_a_second_suite_does_not_send_what_the_first_left_in_the_cache(service: Service) -> None:
    how = catalog.lazy().engine("vllm-0.33.0").bench
    assert how is not None
    host = fleet.Host("h", "127.0.0.1")
    clients = [engineclient.Client(host, service, how, "/m") for _ in range(2)]
    lines = [engineclient.words(how, service, "/m", STEP, 0, one.seed) for one in clients]
    assert lines[0] != lines[1]
    highest = engineclient.words(how, service, "/m", STEP, 0, engineclient.SEEDS - 1)
    assert all(int(word.partition("=")[2]) < 2**32 for word in highest if word.startswith("--seed"))


@pytest.mark.parametrize("name", [name for name in catalog.lazy().names("engines") if "sglang" in name])
def test_sglangs_client_speaks_the_endpoint_that_counts_tokens(name: str) -> None:
    """Its OpenAI backends take the length that was asked for as the length that came."""
    how = catalog.lazy().engine(name).bench
    assert how is not None
    assert {"--backend=sglang", "--tokenize-prompt"} <= set(how.argv)


def replace_step(step: suites.Step, **changes: Any) -> suites.Step:
    return step.model_copy(update=changes)


def test_real_prompts_and_repeated_ones_are_not_for_it() -> None:
    assert engineclient.fits(STEP)
    assert not engineclient.fits(replace_step(STEP, prompts="real"))
    assert not engineclient.fits(replace_step(STEP, cache="keep"))


def test_no_key_is_in_its_command_line(service: Service) -> None:
    how = catalog.lazy().engine("vllm-0.33.0").bench
    assert how is not None
    assert how.key == "OPENAI_API_KEY"
    assert not [word for word in engineclient.words(how, service, "/m", STEP, 0) if "key" in word.lower()]


# --- on the node -------------------------------------------------------------------------------------------

SHOWS = "import json, os, sys; open(sys.argv[1], 'w').write(json.dumps(dict(os.environ)))"


def request(argv: list[str], **changes: Any) -> dict[str, Any]:
    given = {"environment": {"A": "100% $HOME"}, "key": "", "key_file": "", "user": "", "limit_s": 30}
    return {"argv": argv, **given, **changes}


def test_its_key_comes_from_the_nodes_file_and_its_folder_is_gone_afterwards(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("a-key\n")
    answer = node.client(
        request([sys.executable, "-c", SHOWS, "{result}"], key="K", key_file=str(tmp_path / "key"))
    )
    seen = json.loads(answer["result"])
    assert answer["code"] == 0
    assert (seen["A"], seen["K"]) == ("100% $HOME", "a-key")
    assert not Path(seen["HOME"]).exists()
    assert set(seen) <= {"A", "K", "PATH", "HOME", "LC_ALL", "LC_CTYPE"}, (
        "nothing of the caller's environment"
    )


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        ([sys.executable, "-c", "import sys; print('no such model'); sys.exit(3)"], 3, "no such model"),
        (["/no/such/program"], 127, "No such file"),
        ([sys.executable, "-c", "import time; time.sleep(30)"], 124, "took longer than 0.5 s"),
    ],
)
def test_a_client_that_fails_says_why(argv: list[str], code: int, says: str) -> None:
    answer = node.client(request(argv, limit_s=0.5 if code == 124 else 30))
    assert answer["code"] == code
    assert says in answer["said"]
    assert answer["result"] == ""


# --- within a suite ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Given:
    """Stands where the engine's client does: gives a result, or none."""

    text: str
    name: str = "an engine 1 bench"

    def run(self, step: suites.Step, number: int) -> engineclient.Sent:
        return engineclient.read(self.text)


SUITE = suites.Suite(
    title="t",
    client="engine",
    steps=(
        suites.Step(prompt_tokens=32, output_tokens=64, concurrent=2, requests=6, warm_runs=2),
        suites.Step(prompt_tokens=40, output_tokens=8, prompts="real", note="real"),
    ),
)


def measured(text: str, suite: suites.Suite = SUITE) -> Mapping[str, benching.Measured]:
    with servers.serving(servers.Behaviour()) as address:
        found = benching.run_suite(suite, [load.Target(address, "m")], client=Given(text))  # type: ignore[arg-type]
    return {item.load.label: item for item in found.targets[0].measured}


def test_a_suite_that_wants_it_sends_what_it_can_with_it() -> None:
    found = measured(RECORDED)
    assert found["2x 32->64"].client == "an engine 1 bench"
    assert found["2x 32->64"].output_tokens == 2 * 6 * 64
    assert found["40->8 (real)"].client == benching.OURS
    target = benching.TargetResult("t", "http://x", "m", "e", "1", tuple(found.values()))
    sent, late = benching.beside_lines(target)
    assert sent == "1 of 2 loads sent on the node by an engine 1 bench"
    assert late.startswith("our client: late by ")


def test_where_it_gives_nothing_ours_measures_and_the_result_says_so() -> None:
    found = measured("no JSON")["2x 32->64"]
    assert found.client == benching.OURS
    assert found.output_tokens == 2 * 6 * 64
    assert "an engine 1 bench: its result cannot be read" in found.notes[-1]


def test_other_suites_are_always_sent_by_ours() -> None:
    found = measured(RECORDED, SUITE.model_copy(update={"client": "bringup"}))
    assert {item.client for item in found.values()} == {benching.OURS}
    assert suites.load("smoke").client == "bringup"
    assert {suites.load(name).client for name in ("S1", "S2", "S3")} == {"engine"}
