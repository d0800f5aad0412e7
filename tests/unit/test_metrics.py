"""A metrics page gives the few figures we know by name, and never an error."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bringup import catalog, metrics

CASES = Path(__file__).parents[1] / "cases" / "metrics"
SGLANG = {**catalog.lazy().engine("sglang-0.5.15.post1").metrics, "not there": "sglang:no_such_metric"}
LLAMA = catalog.lazy().engine("llama-server-2026.10.11549").metrics


def test_a_real_page_is_read_under_our_names() -> None:
    page = metrics.parse((CASES / "sglang-0.5.15.txt").read_text())
    got = page.named(SGLANG)
    assert got["running"] == 8
    assert got["kv_usage"] == 0.02
    assert "not there" not in got
    assert metrics.between({}, got).accept_length == pytest.approx(3.705, abs=0.001)


def test_the_lab_engines_page_counts_drafts_and_cached_tokens() -> None:
    """Three requests of five tokens and 400 each, of which two found four tokens cached; its log said 3.00."""
    got = metrics.parse((CASES / "llama-server-2026.10.txt").read_text()).named(LLAMA)
    between = metrics.between({}, got)
    assert between.generation_tokens == 1200
    assert between.accept_length == 3.0
    assert between.accept_percent == pytest.approx(67.0, abs=0.05)
    assert between.cache_hit_percent == pytest.approx(100 * 8 / 15)


def test_gauges_of_ranks_are_averaged_and_counters_added() -> None:
    page = metrics.parse('u{rank="0"} 0.2\nu{rank="1"} 0.4\nc{rank="0"} 3\nc{rank="1"} 4\n')
    got = page.named({"kv_usage": "u", "generation_tokens_total": "c"})
    assert got == {"kv_usage": pytest.approx(0.3), "generation_tokens_total": 7}
    assert page.values("c", rank="1") == (4,)


def test_acceptance_between_two_pages_is_exact_and_survives_a_restart() -> None:
    before = {"drafts_total": 100.0, "drafted_tokens_total": 300.0, "accepted_tokens_total": 200.0}
    after = {"drafts_total": 200.0, "drafted_tokens_total": 600.0, "accepted_tokens_total": 443.0}
    got = metrics.between(before, after)
    assert got.accept_length == pytest.approx(3.43)
    assert got.accept_percent == pytest.approx(81)
    restarted = metrics.between(after, {"drafts_total": 10.0, "accepted_tokens_total": 5.0})
    assert restarted.accept_length == 1.5
    assert metrics.between(after, after).accept_length is None


def test_acceptance_without_a_count_of_accepted_tokens_comes_from_steps() -> None:
    after = {"drafts_total": 10.0, "generation_tokens_total": 33.0, "draft_tokens": 5.0}
    got = metrics.between({}, after)
    assert got.accept_length == 3.3
    assert got.accept_percent == pytest.approx(57.5)


def test_an_engine_without_counters_is_read_by_its_gauge_when_it_did_something() -> None:
    page = {"accept_length": 3.3, "draft_tokens": 5.0, "generation_tokens_total": 100.0}
    assert metrics.between({}, page).accept_percent == pytest.approx(57.5)
    assert metrics.between(page, page).accept_length is None


@pytest.mark.parametrize(
    ("after", "percent"),
    [
        ({"cache_hits_total": 30.0, "cache_queries_total": 120.0}, 25),
        ({"cached_tokens_total": 64.0, "prompt_tokens_total": 512.0}, 12.5),
        ({"cached_tokens_total": 64.0, "uncached_tokens_total": 192.0}, 25),
        ({"prompt_tokens_total": 512.0}, None),
    ],
)
def test_cache_hits_come_from_whichever_counters_there_are(
    after: dict[str, float], percent: float | None
) -> None:
    assert metrics.between({}, after).cache_hit_percent == percent


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("a 1", 1.0),
        ("a 1.5e3 1700000000000", 1500.0),
        ('a{x="say \\"hi\\", {ok}"} 2', 2.0),
        ('a{} 3 # {trace="x"} 0.5', 3.0),
        ("a +Inf", float("inf")),
    ],
)
def test_every_form_of_a_sample_is_read(line: str, value: float) -> None:
    assert metrics.parse(line).values("a") == (value,)


@pytest.mark.parametrize("line", ["# HELP a b", "a", "a NaN", "a one", "{} 1", "a{x=1", "", "a b c d"])
def test_what_is_no_sample_is_left_out(line: str) -> None:
    assert metrics.parse(line).samples == ()


def test_labels_are_unescaped() -> None:
    sample = metrics.parse('a{path="C:\\\\x",text="one\\ntwo"} 1').samples[0]
    assert sample.labels == {"path": "C:\\x", "text": "one\ntwo"}


@given(st.text())
def test_no_page_breaks_the_parser(text: str) -> None:
    assert all(sample.name in text for sample in metrics.parse(text).samples)
