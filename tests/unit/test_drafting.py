"""A server that drafts is asked after its warm-up what it accepts: by its own counters, against its profile's floor."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from bringup import ROOT, catalog, metrics, plan
from bringup.node import common, drafting, gate
from bringup.planned import Drafting
from bringup.rolevars import engine_service
from tests.unit import test_gate
from tests.unit.test_gate import Engine, chat

engine, node = test_gate.engine, test_gate.node
"""Fixtures: an HTTP server in place of an engine, and a node whose service it is."""

CASES = sorted((ROOT / "tests" / "cases" / "drafting").glob("*.yml"))


def named(engine: str, text: str) -> dict[str, float]:
    """A page by our names, as a node reads it."""
    names = catalog.lazy().engine(engine).metrics
    averaged = {theirs for ours, theirs in names.items() if ours in common.AVERAGED}
    raw = common.parse_metrics(text, averaged)
    return {ours: raw[theirs] for ours, theirs in names.items() if theirs in raw}


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_a_real_page_says_what_is_accepted_and_the_floor_judges_it(path: Path) -> None:
    case = yaml.safe_load(path.read_text())
    before, after = named(case["engine"], case.get("before", "")), named(case["engine"], case["page"])
    length = drafting.accept_length(before, after)
    assert length == (
        None if case["accept_length"] is None else pytest.approx(case["accept_length"], abs=1e-3)
    )
    steps = drafting.grown(before, after, "drafts_total")
    said = drafting.verdict(
        length, None if steps is None else int(steps), 256, Drafting().accept_length_at_least
    )
    assert said["code"] == case["code"]
    assert bool(said["text"]) == bool(case["code"])
    page = metrics.parse(case["page"]).named(catalog.lazy().engine(case["engine"]).metrics)
    assert metrics.between(before, page).accept_length == length, "benches read it in the same way"


def test_every_outcome_has_a_real_or_written_page() -> None:
    assert {yaml.safe_load(path.read_text())["code"] for path in CASES} == {
        "",
        drafting.LOW,
        drafting.UNKNOWN,
    }


WISH: dict[str, Any] = {"accept_length_at_least": 1.2, "strict": False}
NAMES = {"drafts_total": "d", "accepted_tokens_total": "a", "generation_tokens_total": "g"}


class Drafter:
    """Makes the test's engine one that accepts `accepts` tokens a step, and ends an answer after `most`."""

    def __init__(self, engine: Engine, accepts: float, most: int = 10_000) -> None:
        self.accepts, self.most, self.written, self.steps = accepts, most, 0, 0
        self.engine = engine
        engine.answer, engine.page = self.answer, self.page

    def answer(self, body: dict[str, Any]) -> tuple[int, Any]:
        tokens = min(body["max_tokens"], self.most)
        self.written += tokens
        self.steps += int((tokens - 1) / (1 + self.accepts))
        return 200, chat("hello", tokens)

    def page(self) -> str:
        return f"d {self.steps}\na {self.steps * self.accepts}\ng {self.written}\n"

    @property
    def service(self) -> dict[str, Any]:
        made = self.engine.service
        ends = {**made["endpoints"], "metrics": "/metrics"}
        return {**made, "endpoints": ends, "metrics_names": NAMES, "drafting": WISH}


@pytest.mark.parametrize(
    ("accepts", "code"), [(0.0, "ACCEPT_LOW"), (0.15, "ACCEPT_LOW"), (0.25, ""), (2.2, "")]
)
def test_one_answer_is_enough_and_only_what_it_made_counts(engine: Engine, accepts: float, code: str) -> None:
    drafter = Drafter(engine, 5.0)
    drafter.answer({"max_tokens": 50_000})
    drafter.written, drafter.steps, drafter.accepts = 0, 0, accepts
    found = drafting.check(drafter.service, None)
    assert (found["code"], found["accept_length"]) == (code, pytest.approx(1 + accepts, abs=1e-3))
    assert (found["at_least"], found["tokens"]) == (1.2, drafting.TOKENS)
    (body,) = engine.requests
    assert (body["max_tokens"], body["ignore_eos"], body["temperature"]) == (drafting.TOKENS, True, 0)


def test_answers_that_end_early_are_asked_for_again(engine: Engine) -> None:
    drafter = Drafter(engine, 1.0, most=20)
    found = drafting.check(drafter.service, None)
    assert (found["code"], found["drafts"], len(engine.requests)) == ("", 27, 3)
    assert len({body["messages"][0]["content"] for body in engine.requests}) == 3


def test_a_small_context_is_not_overrun(engine: Engine) -> None:
    drafter = Drafter(engine, 1.0)
    drafting.check({**drafter.service, "context_tokens": 128}, None)
    assert {body["max_tokens"] for body in engine.requests} == {64}


def test_an_engine_that_does_not_answer_then_is_no_verdict(engine: Engine) -> None:
    drafter = Drafter(engine, 0.0)
    engine.answer = lambda body: (500, {})
    found = drafting.check(drafter.service, None)
    assert (found["code"], found["accept_length"]) == ("ACCEPT_UNKNOWN", None)
    assert "status 500" in found["text"]


def started(node: dict[str, Any], drafter: Drafter, strict: bool) -> tuple[int, dict[str, Any]]:
    """Exit code of a whole gate, its child with it, and what it kept."""
    given = {
        **json.loads((node["folder"] / "words.json").read_text()),
        **{name: drafter.service[name] for name in ("endpoints", "metrics_names")},
        "drafting": {**WISH, "strict": strict},
    }
    (node["folder"] / "words.json").write_text(json.dumps(given))
    code = gate.gate("words", os.getpid())
    return code, json.loads((node["folder"] / "starts/bringup-words.json").read_text())


def test_a_start_whose_drafts_are_thrown_away_counts_with_a_warning(
    node: dict[str, Any], engine: Engine
) -> None:
    code, kept = started(node, Drafter(engine, 0.0), strict=False)
    assert (code, kept["outcome"], kept["drafting"]["accept_length"]) == (0, "ready", 1.0)
    (warning,) = kept["warnings"]
    assert warning.startswith("ACCEPT_LOW: a step yields 1.00 tokens in ")
    assert [phase["name"] for phase in kept["phases"]] == ["first token", "warm-up", "drafting"]


def test_a_strict_service_does_not_start_so(node: dict[str, Any], engine: Engine) -> None:
    code, kept = started(node, Drafter(engine, 0.0), strict=True)
    assert (code, kept["outcome"], kept["warnings"]) == (1, "failed", [])
    assert kept["why"].startswith("ACCEPT_LOW: a step yields 1.00 tokens")


@pytest.mark.parametrize("strict", [False, True])
def test_a_start_whose_drafts_are_accepted_says_nothing(
    strict: bool, node: dict[str, Any], engine: Engine
) -> None:
    code, kept = started(node, Drafter(engine, 2.1), strict)
    assert (code, kept["outcome"], kept["warnings"]) == (0, "ready", [])
    assert (kept["drafting"]["code"], kept["drafting"]["accept_length"]) == ("", pytest.approx(3.1, abs=0.01))


def test_only_services_that_draft_are_asked_and_the_service_decides_over_its_profile() -> None:
    whole = plan.load("h20")
    service = whole.hosts[0].services[0]
    assert service.drafts == "mtp"
    assert engine_service.drafting(service) == WISH
    assert engine_service.drafting(replace(service, drafts="")) == {}
    assert engine_service.drafting(replace(service, drafting=Drafting(0))) == {}
    assert engine_service.drafting(replace(service, metrics_names={"running": "r"})) == {}
    strict = replace(service, drafting=Drafting(2.5, strict=True))
    assert engine_service.drafting(strict) == {"accept_length_at_least": 2.5, "strict": True}
    assert plan.load("lab").hosts[0].services[0].drafts == ""
