"""Suites are data, and a wrong one is refused with its key."""

from __future__ import annotations

from pathlib import Path

import pytest

from bringup import suites
from bringup.errors import UsageError

NAMES = suites.names()


def test_the_sources_suites_are_there() -> None:
    assert {"S1", "S2", "S3", "smoke"} <= set(NAMES)
    assert suites.PROMPTS not in NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_suite_is_read(name: str) -> None:
    suite = suites.load(name)
    assert suite.title
    assert all(step.requests_a_run >= step.concurrent for step in suite.steps if step.rate is None)


def test_the_second_sources_discipline_is_kept() -> None:
    decode = [step for step in suites.load("S2").steps if step.concurrent == 1 and not step.note]
    assert [step.load.label for step in decode] == ["256->512", "2048->512", "4096->512", "8192->512"]
    assert {(step.cold_runs, step.warm_runs) for step in decode} == {(1, 10)}
    assert "4x 2048->64 (prefill-heavy)" in [step.load.label for step in suites.load("S2").steps]


def test_the_first_sources_loads_are_there() -> None:
    labels = [step.load.label for step in suites.load("S1").steps]
    assert {"256->200", "256->500", "256->800", "32x 256->500"} <= set(labels)


def test_an_unknown_suite_gets_a_suggestion() -> None:
    with pytest.raises(UsageError, match=r'unknown suite "smok"\. Did you mean "smoke"\?'):
        suites.load("smok")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("title: x\nsteps: []\n", "at least 1 item"),
        ("title: x\nsteps: [{prompt_tokens: 1, output_tokens: 1, warm_runs: 0}]\n", "at least one run"),
        ("title: x\nsteps: [{prompt_tokens: 1, output_token: 1}]\n", 'Did you mean "output_tokens"'),
        (
            "title: x\nsteps: [{prompt_tokens: 1, output_tokens: 1}, {prompt_tokens: 1, output_tokens: 1}]\n",
            "there twice",
        ),
    ],
)
def test_a_wrong_suite_says_where_and_what(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "mine.yml").write_text(text)
    with pytest.raises(UsageError, match=says):
        suites.load("mine", tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_a_scaled_suite_is_shorter_and_its_loads_say_so(name: str) -> None:
    whole, small = suites.load(name), suites.scaled(suites.load(name), 0.25)
    assert [one.load.label for one in small.steps] != [one.load.label for one in whole.steps]
    for before, after in zip(whole.steps, small.steps, strict=True):
        assert after.prompt_tokens == round(before.prompt_tokens / 4)
        assert after.output_tokens == round(before.output_tokens / 4)
        kept = ("concurrent", "rate", "cold_runs", "warm_runs", "prompts", "cache", "note")
        assert all(getattr(after, key) == getattr(before, key) for key in kept)
        assert after.requests_a_run == (before.requests_a_run // 4 if before.rate else before.requests_a_run)
    assert suites.scaled(whole, 1).steps == whole.steps


@pytest.mark.parametrize(
    ("scale", "says"), [(0, "not above 0"), (1.5, "at most 1"), (-1, "not above 0"), (0.001, "there twice")]
)
def test_a_scale_that_cannot_be_is_refused(scale: float, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        suites.scaled(suites.load("S1"), scale)


def test_an_open_loop_without_a_count_lasts_half_a_minute() -> None:
    step = suites.Step(prompt_tokens=1, output_tokens=1, rate=2.5)
    assert step.requests_a_run == 75
    assert step.load.label == "1->1 at 2.5/s"


def test_real_prompts_differ() -> None:
    prompts = suites.real_prompts()
    assert len(set(prompts)) == len(prompts) >= 10
