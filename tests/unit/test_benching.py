"""A suite is run, kept, read back, compared and shown, whatever the servers do."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

from bringup import bench, benching, benchreport, catalog, load, suites, tune
from bringup.entries import build
from bringup.errors import UsageError


def _module(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


servers = _module("openai_server_for_benching", Path(__file__).with_name("openai_server.py"))

SUITE = suites.Suite(
    title="a suite",
    steps=(
        suites.Step(prompt_tokens=40, output_tokens=8, cold_runs=1, warm_runs=3),
        suites.Step(prompt_tokens=40, output_tokens=8, concurrent=2, requests=4, warm_runs=3),
        suites.Step(prompt_tokens=40, output_tokens=8, concurrent=4, requests=8, warm_runs=3),
        suites.Step(prompt_tokens=40, output_tokens=8, rate=200, requests=10),
        suites.Step(prompt_tokens=40, output_tokens=8, prompts="real", note="real"),
    ),
)
NAMES = {"drafts_total": "v:drafts", "drafted_tokens_total": "v:drafted", "accepted_tokens_total": "v:ok"}


@pytest.fixture(scope="module")
def result() -> benching.BenchResult:
    with servers.serving(servers.Behaviour(delay_s=0.002)) as address:
        target = load.Target(address, "glm", name="<lab> & co", engine="llama-server", engine_version="1")
        return benching.run_suite(
            SUITE, [target], name="smoke", fingerprints={"<lab> & co": {"driver": "580.105.08"}}
        )


def test_every_load_is_measured_with_the_servers_tokens(result: benching.BenchResult) -> None:
    assert result.ok
    first, *_, real = result.targets[0].measured
    assert first.cold == (True, False, False, False)
    assert len(first.values["output_tok_s"]) == 4
    assert first.prompt_tokens == pytest.approx(40, abs=3)
    assert len(result.targets[0].measured[2].latencies_ms) == 24
    assert real.load.note == "real"
    assert real.summary is not None


def test_a_result_comes_back_from_json_as_it_was(result: benching.BenchResult) -> None:
    text = json.dumps(result.as_json())
    assert json.loads(text)["schema_version"] == benching.SCHEMA_VERSION
    assert benching.read_result(text, "here") == result


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema_version": 99}', '{"schema_version": 1}'])
def test_what_is_no_result_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"result\.json"):
        benching.read_result(text, "result.json")


def test_csv_has_a_line_for_each_run(result: benching.BenchResult) -> None:
    lines = benching.as_csv(result).splitlines()
    assert lines[0].startswith("suite,target,model,load,run,cold,output_tok_s")
    assert len(lines) == 1 + 4 + 3 + 3 + 1 + 1
    assert lines[1].startswith("smoke,<lab> & co,glm,40->8,0,1,")


def test_the_terminal_shows_every_load(result: benching.BenchResult) -> None:
    shown = io.StringIO()
    console = Console(width=200, file=shown)
    for table in benching.tables(result):
        console.print(table)
    console.print(benching.verdict_table(benching.against(*[result.targets[0].summaries] * 2)))
    text = shown.getvalue()
    for step in SUITE.steps:
        assert step.load.label in text
    assert "verdict:" in text


def test_failures_are_counted_and_shown_with_the_first_reason() -> None:
    mode = servers.Behaviour()
    with servers.serving(mode) as address:
        target = load.Target(address, "m")

        def breaks(line: str) -> None:
            mode.how = "refuses"

        suite = suites.Suite(title="t", steps=(SUITE.steps[0],))
        found = benching.run_suite(suite, [target], say=breaks)
    assert not found.ok
    measured = found.targets[0].measured[0]
    assert measured.errors == 4
    assert measured.summary is not None
    assert "HTTP 503: loading" in benching.rows(found.targets[0])[0][-1]


def test_a_load_beyond_the_servers_context_is_left_out_and_said() -> None:
    with servers.serving(servers.Behaviour()) as address:
        target = load.Target(address, "glm", name="lab-01 words", context=60)
        suite = suites.Suite(
            title="t",
            steps=(
                suites.Step(prompt_tokens=40, output_tokens=8),
                suites.Step(prompt_tokens=53, output_tokens=8, note="long"),
            ),
        )
        found = benching.run_suite(suite, [target])
    (one,) = found.targets
    assert [item.load.label for item in one.measured] == ["40->8"]
    assert one.left_out == ("53->8 (long) is left out: it needs 61 tokens of context, the server has 60",)
    assert one.left_out[0] in benching.beside_lines(one)
    assert benching.from_json(json.loads(json.dumps(found.as_json()))) == found
    assert not benching.gates(found, None)


def test_a_load_that_the_server_refuses_as_too_long_is_left_out_in_its_words() -> None:
    with servers.serving(servers.Behaviour(how="is short")) as address:
        suite = suites.Suite(
            title="t",
            steps=(
                suites.Step(prompt_tokens=1000, output_tokens=8, note="long"),
                suites.Step(prompt_tokens=40, output_tokens=8),
            ),
        )
        found = benching.run_suite(suite, [load.Target(address, "glm")])
    (one,) = found.targets
    assert [item.load.label for item in one.measured] == ["40->8"]
    assert "1000->8 (long) is left out, the server refuses it as too long" in one.left_out[0]
    assert "exceeds the available context size" in one.left_out[0]
    assert not benching.gates(found, None)


@pytest.mark.parametrize(
    ("error", "too_long"),
    [
        ("HTTP 400: This model's maximum context length is 2048 tokens. However, you requested 4096", True),
        ("HTTP 400: Requested token count exceeds the model's maximum context length of 8192 tokens", True),
        ("HTTP 500: context size", False),
        ("HTTP 400: you must provide a chat template", False),
        ("no whole answer within 600 s", False),
    ],
)
def test_only_a_refusal_for_its_length_leaves_a_load_out(error: str, too_long: bool) -> None:
    assert bool(benching.TOO_LONG.match(error)) == too_long


def test_acceptance_is_read_from_the_servers_counters() -> None:
    def counters(requests: int) -> str:
        return f"v:drafts {100 * requests}\nv:drafted {300 * requests}\nv:ok {243 * requests}\n"

    with servers.serving(servers.Behaviour(metrics=counters)) as address:
        target = load.Target(address, "m", metrics_names=NAMES)
        suite = suites.Suite(title="t", steps=(SUITE.steps[0],))
        summary = benching.run_suite(suite, [target]).targets[0].measured[0].summary
    assert summary is not None
    assert summary.accept_length == pytest.approx(3.43)
    assert summary.accept_percent == pytest.approx(81)
    assert summary.low_accept == 0


def test_a_slower_server_is_worse_and_a_failing_one_too() -> None:
    fast = {"a": bench.Summary(10.1, 3, values=(10.0, 10.1, 10.2))}
    slow = {"a": bench.Summary(5.1, 3, values=(5.0, 5.1, 5.2))}
    assert benching.against(fast, slow).verdict == "worse"
    assert benching.against(slow, fast).verdict == "better"
    failing = {"a": dataclasses.replace(fast["a"], errors=2)}
    found = benching.against(fast, failing)
    assert found.verdict == "worse"
    assert found.comparisons["a"].reason == "2 requests failed, 0 before"
    assert benching.against({**fast, "b": fast["a"]}, fast).missing == ("b",)
    assert benching.against({}, fast).verdict == "cannot tell"


def test_a_profiles_measurement_is_something_to_be_held_against() -> None:
    work = {"prompt_tokens": 256, "output_tokens": 512, "runs": 11}
    entries = [
        {"workload": work, "value": 47.27, "p10": 36.35, "cv": 0.136, "runs_below_60": 1, "source": "s"},
        {"workload": {**work, "concurrent": 4}, "low": 50, "high": 60, "source": "s"},
        {"workload": work, "metric": "ttft_ms", "value": 500, "source": "s"},
        {"workload": {"note": "8 at once"}, "value": 128, "source": "s"},
    ]
    found = benching.of_profile(build(catalog.Expectation, entry, "e") for entry in entries)
    assert set(found) == {"256->512", "4x 256->512"}
    assert found["256->512"].low_accept == 1
    assert found["4x 256->512"].median == 55
    ours = {"256->512": bench.Summary(30, 5, values=(29.0, 30.0, 30.5, 30.2, 29.9))}
    assert benching.against(found, ours).verdict == "worse"


def test_a_profiles_tuning_loads_are_a_suite_and_its_result_a_candidate(
    result: benching.BenchResult,
) -> None:
    axis = {"flag": "--spec-tokens", "values": [1, 2]}
    work = [{"prompt_tokens": 2048, "output_tokens": 512}, {"concurrent": 4}]
    wish = build(catalog.Tune, {"axes": [axis], "workloads": work, "warm_runs": 10}, "tune")
    suite = benching.suite_of(wish)
    assert [step.load.label for step in suite.steps] == ["2048->512", "4x 256->512"]
    assert {(step.cold_runs, step.warm_runs) for step in suite.steps} == {(1, 10)}
    assert tune.constraints_of(wish).keep_free_gib == 10
    candidate = benching.as_candidate("one", result.targets[0], 12.5)
    assert tune.pick([candidate]).picked == "one"
    silent = dataclasses.replace(result.targets[0].measured[0], values=dict.fromkeys(benching.METRICS, ()))
    broken = dataclasses.replace(result.targets[0], measured=(silent,))
    assert benching.as_candidate("two", broken).failed == "no run gave a value at 40->8"


# --- the page ----------------------------------------------------------------------------------------------


def svgs(page: str) -> list[ET.Element]:
    pieces = page.split("<svg")[1:]
    return [ET.fromstring("<svg" + piece.split("</svg>")[0] + "</svg>") for piece in pieces]


def test_the_page_is_whole_self_contained_and_escaped(result: benching.BenchResult) -> None:
    found = benching.against(result.targets[0].summaries, result.targets[0].summaries)
    ladder = [("bring-up", 2.3), ("graphs", 31.0), ("<mtp>", 122.0), ("back", 90.0)]
    page = benchreport.page(result, against=found, ladder=ladder)
    assert "&lt;lab&gt; &amp; co" in page
    assert "<lab>" not in page
    assert "http://" not in page.replace(result.targets[0].base_url, "")
    assert "<script" not in page
    titles = [svg.get("aria-label") for svg in svgs(page)]
    assert titles == [
        "Output against concurrency, P10 to P90",
        "One user against all (Pareto)",
        "Time to the whole answer",
        "What each step added",
    ]


def test_charts_keep_every_point_inside(result: benching.BenchResult) -> None:
    for svg in svgs(benchreport.page(result)):
        for circle in svg.iter("circle"):
            assert 0 <= float(circle.get("cx", "nan")) <= benchreport.WIDTH
            assert 0 <= float(circle.get("cy", "nan")) <= benchreport.HEIGHT


def test_throughput_is_drawn_over_concurrency(result: benching.BenchResult) -> None:
    (line,) = benchreport.by_concurrency(result)
    assert [at_once for at_once, _ in line.points] == [1, 2, 4]
    assert all(
        low <= middle <= high for (_, middle), (low, high) in zip(line.points, line.spans, strict=True)
    )


def test_the_frontier_joins_what_no_load_beats_in_both() -> None:
    points = [(40.0, 40.0), (30.0, 120.0), (20.0, 110.0), (10.0, 200.0), (10.0, 150.0)]
    assert benchreport.frontier(points) == ((10.0, 200.0), (30.0, 120.0), (40.0, 40.0))
    assert benchreport.frontier([]) == ()


def test_a_note_stands_once_with_the_loads_that_it_is_about(result: benching.BenchResult) -> None:
    noted = [
        dataclasses.replace(item, notes=("late", "twice") if number == 1 else ("late",))
        for number, item in enumerate(result.targets[0].measured)
    ]
    target = dataclasses.replace(result.targets[0], measured=tuple(noted))
    assert benchreport.load_notes(target) == ["all loads: late", "2x 40->8: twice"]


@pytest.mark.parametrize(
    ("most", "last"), [(122, 125), (1355, 1500), (0.9, 1.0), (10, 10), (0, 1), (float("nan"), 1)]
)
def test_axes_end_at_round_numbers(most: float, last: float) -> None:
    marks = benchreport.ticks(most)
    assert marks[0] == 0
    assert marks[-1] == pytest.approx(last)


def test_nothing_to_draw_is_no_chart() -> None:
    assert benchreport.chart("t", "x", "y", []) == ""
    assert benchreport.waterfall("t", []) == ""


# --- gates and what lies beside ----------------------------------------------------------------------------

BESIDE = {
    "log": {"readings": 3, "decode_tok_s": 1234.5, "decode_p10": 900.0, "graph_percent": 100.0},
    "gpus": [
        {"index": 0, "used_gib_most": 131.2, "free_gib": 9.7, "power_w": 512.4, "throttled_percent": 0.0}
    ],
    "locality": {
        "processes": 3,
        "bytes_by_node": {"0": 2**30},
        "planned_nodes": "0",
        "local_percent": 98.7,
    },
    "tunnel_ms": 5000.0,
    "notes": ["runs otherwise than planned: has --x, lacks nothing"],
}


def test_what_was_seen_beside_a_load_is_shown_and_kept(result: benching.BenchResult) -> None:
    whole = benching.with_beside(result, BESIDE)
    lines = benching.beside_lines(whole.targets[0])
    assert lines[0] == "engine log: 3 readings, decode 1,234 tok/s, P10 900 tok/s, graphs 100 %"
    assert lines[1] == "GPU 0: 131.2 GiB at most, 9.7 GiB free, 512 W, throttled 0 % of the time"
    assert lines[2] == "memory of 3 processes: node 0 1,024 MiB; 98.7 % on the planned nodes 0"
    assert lines[3].startswith("our client: late by ")
    assert "tunnel: adds 5000.00 ms to a round trip, " in lines[4]
    assert lines[5].startswith("runs otherwise than planned")
    assert benching.read_result(json.dumps(whole.as_json()), "here") == whole
    assert "98.7 % on the planned nodes" in benchreport.page(whole)
    assert benching.beside_lines(result.targets[0]) == [lines[3]]


def test_a_result_without_failures_passes_its_gates(result: benching.BenchResult) -> None:
    assert benching.gates(result, None) == ()
    same = benching.against(*[result.targets[0].summaries] * 2)
    assert benching.gates(result, same) == ()


def test_failing_requests_and_a_worse_verdict_fail_a_gate(result: benching.BenchResult) -> None:
    first = dataclasses.replace(result.targets[0].measured[0], errors=2, first_error="HTTP 503")
    target = dataclasses.replace(result.targets[0], measured=(first,))
    broken = dataclasses.replace(result, targets=(target,))
    label = first.load.label
    fast = bench.Summary(median=9e9, runs=9, p10=9e9, cv=0.01)
    worse = benching.against({label: fast}, target.summaries)
    failed = benching.gates(broken, worse)
    assert failed[0].endswith(f"2 requests failed at {label}: HTTP 503")
    assert failed[1] == f"worse than before at {label}"


def test_results_of_several_targets_become_one(result: benching.BenchResult) -> None:
    both = benching.joined([result, result])
    assert len(both.targets) == 2
    assert both.took_s == pytest.approx(2 * result.took_s)
    with pytest.raises(ValueError, match="no results"):
        benching.joined([])


def test_tokens_are_the_servers_own_count(result: benching.BenchResult) -> None:
    assert result.targets[0].measured[0].output_tokens == 4 * 8


def test_bars_are_as_long_as_the_rates_they_stand_for(result: benching.BenchResult) -> None:
    target = result.targets[0]
    lines = benching.bars(target)
    medians = {label: summary.median for label, summary in target.summaries.items()}
    assert [line.split(benching.BAR)[0].strip() for line in lines] == list(medians)
    lengths = {label: line.count(benching.BAR) for label, line in zip(medians, lines, strict=True)}
    assert lengths[max(medians, key=lambda label: medians[label])] == benching.BAR_WIDTH
    assert all(length >= 1 for length in lengths.values())
    assert benching.bars(dataclasses.replace(target, measured=target.measured[:1])) == []
