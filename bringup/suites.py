"""Suites: what is measured, as data under `catalog/suites/`, one file a suite; the file name is its name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from bringup import ROOT
from bringup.bench import Load
from bringup.entries import Entry, build
from bringup.errors import Problem, UsageError, unknown
from bringup.yamlfile import read_yaml

FOLDER = ROOT / "catalog" / "suites"
PROMPTS = "prompts"
"""The file of real prompts, which is no suite."""
OPEN_LOOP_S = 30
"""Seconds that an open loop lasts when its step does not say how many requests it has."""

FEWEST_TOKENS = 4
FEWEST_OPEN = 4
"""Tokens of a prompt or an answer, and requests of an open loop, that a scaled suite keeps at least."""

NotNegative = Annotated[int, Field(ge=0)]


class Step(Entry):
    """One load and how often. `rate` makes it an open loop of so many requests a second; `requests` of one
    run (default: as many as run at once); `cache: keep` sends the same prompt each time.
    """

    prompt_tokens: PositiveInt
    output_tokens: PositiveInt
    concurrent: PositiveInt = 1
    rate: PositiveFloat | None = None
    requests: PositiveInt | None = None
    cold_runs: NotNegative = 0
    warm_runs: NotNegative = 1
    prompts: Literal["synthetic", "real"] = "synthetic"
    cache: Literal["defeat", "keep"] = "defeat"
    note: str = ""

    @model_validator(mode="after")
    def _runs(self) -> Step:
        if self.cold_runs + self.warm_runs == 0:
            raise ValueError("needs at least one run")
        return self

    @property
    def load(self) -> Load:
        """The load as measurements name it."""
        return Load(self.prompt_tokens, self.output_tokens, self.concurrent, self.rate, self.note)

    @property
    def requests_a_run(self) -> int:
        """Requests of one run."""
        if self.requests:
            return self.requests
        return max(self.concurrent, math.ceil(self.rate * OPEN_LOOP_S)) if self.rate else self.concurrent


class Suite(Entry):
    """A named list of loads. Two of the same name would overwrite each other in a report, so they are
    refused. `client: engine` sends what it can with the engine's own benchmark client, where it has one.
    """

    title: str
    client: Literal["bringup", "engine"] = "bringup"
    steps: tuple[Step, ...] = Field(min_length=1)
    sources: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _distinct(self) -> Suite:
        labels = [step.load.label for step in self.steps]
        if twice := sorted({label for label in labels if labels.count(label) > 1}):
            raise ValueError(f"the load {', '.join(twice)} is there twice: give one of them a note")
        return self


def scaled(suite: Suite, scale: float) -> Suite:
    """A suite with prompts and answers at a share of their length, and with as much less of an open loop; runs,
    requests at once and rates stay. Its loads are named by what they are then, so none can be taken for a
    whole one. Raises UsageError for a share outside of 0 to 1, or under which two loads become the same."""
    if not 0 < scale <= 1:
        raise UsageError(Problem("--scale", f"{scale:g} is not above 0 and at most 1"))
    steps = [
        {
            **step.model_dump(),
            "prompt_tokens": max(FEWEST_TOKENS, round(step.prompt_tokens * scale)),
            "output_tokens": max(FEWEST_TOKENS, round(step.output_tokens * scale)),
            "requests": max(FEWEST_OPEN, round(step.requests_a_run * scale)) if step.rate else step.requests,
        }
        for step in suite.steps
    ]
    return build(Suite, {**suite.model_dump(), "steps": steps}, f"--scale {scale:g}")


class RealPrompts(Entry):
    """Prompts as people send them."""

    prompts: tuple[Annotated[str, Field(min_length=1)], ...] = Field(min_length=1)


def names(folder: Path = FOLDER) -> tuple[str, ...]:
    """The names of the suites there are."""
    return tuple(sorted(path.stem for path in folder.glob("*.yml") if path.stem != PROMPTS))


def load(name: str, folder: Path = FOLDER) -> Suite:
    """A suite by name. Raises UsageError for an unknown name or a wrong file."""
    if name not in names(folder):
        raise UsageError(Problem("suite", *unknown("suite", name, names(folder))))
    where = f"catalog/suites/{name}.yml"
    return build(Suite, read_yaml(folder / f"{name}.yml", where), where)


def real_prompts(folder: Path = FOLDER) -> tuple[str, ...]:
    """The prompts for loads with `prompts: real`."""
    where = f"catalog/suites/{PROMPTS}.yml"
    return build(RealPrompts, read_yaml(folder / f"{PROMPTS}.yml", where), where).prompts
