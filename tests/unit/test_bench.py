"""Statistics say what the numbers allow, and no more."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from bringup import bench
from bringup.yamlfile import read_yaml

CASES = Path(__file__).parents[1] / "cases" / "bench"
LOAD = bench.Load(256, 512)


def cases(name: str) -> list[Any]:
    return [pytest.param(case, id=case["why"]) for case in read_yaml(CASES / f"{name}.yml")]


def summary(data: dict[str, Any]) -> bench.Summary:
    if "values" not in data:
        return bench.Summary(**data)
    stats = bench.summarise(data["values"])
    return bench.Summary(
        stats.median, stats.count, stats.p10, stats.minimum, stats.cv, values=tuple(data["values"])
    )


def run_at(rate: float, *, cold: bool = False, error: str = "") -> bench.Run:
    took = 512 / rate
    request = bench.Request(0.0, took / 10, took, prompt_tokens=256, output_tokens=512, error=error)
    return bench.Run(took, (request,), cold)


def series(values: list[float]) -> bench.Series:
    return bench.Series(LOAD, tuple(run_at(value, cold=at == 0) for at, value in enumerate(values)))


@pytest.mark.parametrize("case", cases("compare"))
def test_a_verdict_needs_numbers_that_carry_it(case: dict[str, Any]) -> None:
    better_up = not case.get("lower_is_better", False)
    found = bench.compare(summary(case["before"]), summary(case["after"]), higher_is_better=better_up)
    assert found.verdict == case["verdict"], found


@pytest.mark.parametrize("case", cases("quality"))
def test_a_series_says_what_a_reader_must_know(case: dict[str, Any]) -> None:
    assert list(bench.quality(series(case["values"]))) == case["says"]


@pytest.mark.parametrize("case", cases("accept-length"))
def test_lengths_agree_where_rates_do_not(case: dict[str, Any]) -> None:
    got = bench.accept_length(case["rate"], case["draft_tokens"], case["engine"], case["version"])
    assert got == pytest.approx(case["length"], abs=0.01)


def test_a_lower_rate_can_be_a_longer_acceptance() -> None:
    careful = bench.accept_length(0.81, 4, "sglang", "0.5.10")
    tuned = bench.accept_length(0.66, 5, "sglang", "0.5.10")
    assert tuned > careful


def test_percentiles_interpolate_as_the_sources_do() -> None:
    eleven = [float(value) for value in range(11)]
    assert bench.percentile(eleven, 0.1) == 1.0
    assert bench.percentile(eleven, 0.9) == 9.0
    assert bench.percentile([5.0], 0.1) == 5.0
    assert bench.percentile([1.0, 2.0], 0.25) == 1.25


def test_the_same_numbers_always_give_the_same_interval() -> None:
    rng = random.Random(7)
    values = [rng.gauss(100, 5) for _ in range(11)]
    first = bench.interval(values)
    assert first == bench.interval(values)
    low, high = first
    assert low is not None
    assert high is not None
    assert low < bench.summarise(values).median < high


def test_the_interval_holds_the_true_median_about_as_often_as_it_says() -> None:
    rng = random.Random(11)
    held = 0
    for _ in range(100):
        low, high = bench.interval([rng.gauss(50, 4) for _ in range(15)])
        held += low is not None and high is not None and low <= 50 <= high
    assert 85 <= held <= 100


def test_nothing_is_concluded_from_nothing() -> None:
    with pytest.raises(ValueError, match="no run gave a value"):
        bench.summarise([])
    failed = bench.Series(LOAD, (run_at(10, error="timed out"),))
    assert "1 requests failed" in bench.quality(failed)
    assert bench.overall({}) == "cannot tell"


def test_one_worse_load_makes_the_whole_worse() -> None:
    good = bench.compare(summary({"values": [10, 10.1, 10.2]}), summary({"values": [20, 20.1, 20.2]}))
    bad = bench.compare(summary({"values": [20, 20.1, 20.2]}), summary({"values": [10, 10.1, 10.2]}))
    same = bench.compare(summary({"values": [20, 20.1, 20.2]}), summary({"values": [20, 20.1, 20.2]}))
    assert bench.overall({"a": good, "b": bad}) == "worse"
    assert bench.overall({"a": good, "b": same}) == "better"
    assert bench.overall({"a": same}) == "same"


def test_rates_and_times_of_a_request_come_from_its_own_tokens() -> None:
    request = bench.Request(1.0, 1.5, 3.5, prompt_tokens=100, output_tokens=41)
    assert request.ttft_ms == 500
    assert request.tpot_ms == 50
    assert request.tok_s == 16.4
    assert bench.Request(0, None, 1, error="refused").ttft_ms is None
    assert bench.Request(0, 0.5, 1, output_tokens=1).tpot_ms is None


def test_many_requests_count_together_and_errors_count_apart() -> None:
    ok = bench.Request(0, 0.1, 2, prompt_tokens=100, output_tokens=50)
    run = bench.Run(2.0, (ok, ok, bench.Request(0, None, 2, error="500")))
    assert run.output_tok_s == 50
    assert run.total_tok_s == 150
    assert run.errors == 1


def test_what_is_warm_of_a_summary_is_what_follows_its_first_slow_runs() -> None:
    values = (20.0, 36.0, 72.0, 74.0, 80.0, 81.0, 75.0, 82.0)
    whole = bench.Summary(
        median=74.5, runs=8, p10=31.0, minimum=20.0, cv=0.3, accept_length=3.9, values=values
    )
    got = bench.warm(whole)
    assert (got.runs, got.minimum, got.median, got.accept_length) == (6, 72.0, 77.5, 3.9)
    assert got.values == values[2:]
    assert bench.warm(got) == got
    recorded = bench.Summary(median=74.5, runs=8, p10=31.0)
    assert bench.warm(recorded) == recorded


@pytest.mark.parametrize(
    ("load", "label"),
    [
        (bench.Load(256, 512), "256->512"),
        (bench.Load(2048, 64, 4), "4x 2048->64"),
        (bench.Load(256, 128, rate=0.5, note="real prompts"), "256->128 at 0.5/s (real prompts)"),
    ],
)
def test_a_load_has_a_short_name(load: bench.Load, label: str) -> None:
    assert load.label == label
