"""Every engine's log lines about speed are read, whatever else a version prints on them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bringup import enginelog
from bringup.yamlfile import read_yaml

CASES = Path(__file__).parents[1] / "cases" / "enginelog"


def lines() -> list[Any]:
    files = [read_yaml(path) for path in sorted(CASES.glob("*.yml"))]
    return [
        pytest.param(file["format"], case, id=f"{file['format']}: {case['why']}")
        for file in files
        for case in file["lines"]
    ]


@pytest.mark.parametrize(("log_format", "case"), lines())
def test_a_line_is_read(log_format: str, case: dict[str, Any]) -> None:
    found = list(enginelog.readings(case["line"] + "\n", log_format))
    if case["reading"] is None:
        assert found == []
        return
    got = {key: value for key, value in asdict(found[0]).items() if value is not None}
    assert got == pytest.approx(case["reading"])


def test_a_version_in_the_formats_name_does_not_matter() -> None:
    line = read_yaml(CASES / "sglang.yml")["lines"][0]["line"]
    assert list(enginelog.readings(line, "sglang-0.5")) == list(enginelog.readings(line, "sglang"))
    assert list(enginelog.readings(line, "something else")) == []


def test_a_summary_counts_what_ran_and_the_low_tail() -> None:
    readings = [
        enginelog.Reading("decode", decode_tok_s=100, accept_percent=90, accept_length=3.7, graph=True),
        enginelog.Reading("decode", decode_tok_s=50, accept_percent=40, accept_length=2.2, graph=False),
        enginelog.Reading("decode", decode_tok_s=0.0),
        enginelog.Reading("prefill", prefill_tok_s=900, new_tokens=300, cached_tokens=100, queued=5),
    ]
    got = enginelog.summarise(readings)
    assert (got.decode_tok_s, got.decode_p10, got.prefill_tok_s) == (75, 55, 900)
    assert (got.low_accept, got.graph_percent, got.cache_hit_percent, got.queued_most) == (1, 50, 25, 5)
    assert enginelog.summarise([]).decode_tok_s is None


@given(st.text(), st.sampled_from(["sglang", "vllm", "llama-server"]))
def test_no_text_breaks_a_parser(text: str, log_format: str) -> None:
    marks = ("Decode batch", "Avg generation throughput:", "eval time = 1 ms / 1 tokens (")
    for mark in marks:
        for reading in enginelog.readings(mark + text, log_format):
            assert reading.phase in ("decode", "prefill", "speculation", "both")
