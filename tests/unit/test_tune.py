"""The rule picks what careful engineers picked from the same numbers; the climb finds it in few runs."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bringup import bench, catalog, tune
from bringup.entries import build
from bringup.errors import UsageError
from bringup.yamlfile import read_yaml

CASES = Path(__file__).parents[1] / "cases" / "tune"
NAMES = sorted(path.stem for path in CASES.glob("*.yml"))


def summary(data: dict[str, Any]) -> bench.Summary:
    values = tuple(data.get("values", ()))
    if not values:
        return bench.Summary(**data)
    stats = bench.summarise(values)
    measured = {"median": stats.median, "minimum": stats.minimum, "cv": stats.cv, "runs": stats.count}
    return bench.Summary(**{**data, **measured, "values": values})


def candidates(case: dict[str, Any]) -> dict[str, tune.Candidate]:
    return {
        name: tune.Candidate(
            name,
            {label: summary(load) for label, load in data.get("loads", {}).items()},
            data.get("free_gib"),
            data.get("failed", ""),
        )
        for name, data in case["candidates"].items()
    }


@pytest.mark.parametrize("name", NAMES)
def test_recorded_tables_give_the_recorded_decisions(name: str) -> None:
    case = read_yaml(CASES / f"{name}.yml")
    recorded, limits, expect = candidates(case), tune.Constraints(**case["constraints"]), case["expect"]
    measured: dict[str, tune.Candidate] = {}
    while (step := tune.next_step(list(recorded), measured, limits)) is not None:
        measured[step] = recorded[step]
    assert list(measured) == expect["measured"]
    decision = tune.pick(list(measured.values()), limits)
    assert decision.picked == expect["picked"]
    for rejected, why in expect.get("rejected", {}).items():
        assert decision.rejected[rejected].startswith(why)
    assert set(decision.rejected) == set(expect.get("rejected", {}))


def test_the_order_of_candidates_decides_only_between_equals() -> None:
    case = read_yaml(CASES / "int4-prefers-the-steady-depth.yml")
    everyone = list(candidates(case).values())
    assert tune.pick(everyone[::-1]).picked == tune.pick(everyone).picked
    twin = replace(everyone[0], name="twin")
    assert tune.pick([twin, everyone[0]]).picked == "twin"


def test_candidates_without_a_common_load_are_not_compared() -> None:
    one = tune.Candidate("one", {"a": bench.Summary(1.0)})
    two = tune.Candidate("two", {"b": bench.Summary(2.0)})
    decision = tune.pick([one, two])
    assert decision.picked is None
    assert "no load in common" in decision.reason


# --- the climb on a surface that is known ------------------------------------------------------------------

SURFACE = {0: 25.0, 1: 37.0, 2: 42.0, 3: 46.0, 4: 44.0, 5: 39.0, 6: 33.0, 7: 27.0}
BEST = 3
NOISE = 0.03
RUNS = 11
WITHOUT_WASTE = 1.5
"""Runs a climb may cost, as a multiple of those up to the first setting past the best."""

AXIS = {"flag": "--depth", "values": list(SURFACE)}


def stand_in(seed: int, seen: list[str]) -> Callable[[tune.Setting], tune.Candidate]:
    """A server whose speed is known, with noise."""
    rng = random.Random(seed)

    def measure(setting: tune.Setting) -> tune.Candidate:
        seen.append(setting.name)
        middle = SURFACE[setting.flags["--depth"]]
        values = tuple(rng.gauss(middle, NOISE * middle) for _ in range(RUNS))
        stats = bench.summarise(values)
        load = bench.Summary(stats.median, RUNS, stats.p10, stats.minimum, stats.cv, values=values)
        return tune.Candidate("measured", {"256->512": load}, free_gib=20)

    return measure


@pytest.mark.parametrize("seed", range(20))
def test_the_best_depth_is_found_under_noise_without_wasting_runs(seed: int, tmp_path: Path) -> None:
    axes = [tune.settings_of(build(catalog.Axis, AXIS, "axis"))]
    seen: list[str] = []
    limits = tune.Constraints()
    decision = tune.climb(axes, stand_in(seed, seen), limits, tmp_path / "s.json", "k", lambda: None)
    assert decision.picked == f"--depth={BEST}"
    assert len(seen) <= WITHOUT_WASTE * (BEST + 2)


def test_an_interrupted_climb_goes_on_where_it_was_and_the_node_is_brought_back(tmp_path: Path) -> None:
    axes = [tune.settings_of(build(catalog.Axis, AXIS, "axis"))]
    state, seen, restored = tmp_path / "state.json", list[str](), list[str]()
    measure = stand_in(1, seen)

    def dies_at_the_third(setting: tune.Setting) -> tune.Candidate:
        if len(seen) == 2:
            raise KeyboardInterrupt
        return measure(setting)

    with pytest.raises(KeyboardInterrupt):
        tune.climb(axes, dies_at_the_third, tune.Constraints(), state, "k", lambda: restored.append("first"))
    decision = tune.climb(axes, measure, tune.Constraints(), state, "k", lambda: restored.append("second"))
    assert decision.picked == f"--depth={BEST}"
    assert len(seen) == len(set(seen)), "nothing was measured twice"
    assert restored == ["first", "second"]


def test_a_state_of_something_else_is_never_mixed_in(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    tune.save_state(state, "this", {"a": tune.Candidate("a", {"x": bench.Summary(1.0, values=(1.0, 2.0))})})
    assert tune.load_state(state, "this")["a"].loads["x"].values == (1.0, 2.0)
    with pytest.raises(UsageError, match='belongs to "this", not to "that"'):
        tune.load_state(state, "that")
    for damaged in ("{", "[]", json.dumps({"schema_version": 99})):
        state.write_text(damaged)
        with pytest.raises(UsageError, match="not a tuning state"):
            tune.load_state(state, "this")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state.json"]


def test_a_second_knob_climbs_on_top_of_the_first() -> None:
    first = [tune.Setting({"--depth": depth}) for depth in (1, 2)]
    second = [tune.Setting({}, {"MODE": mode}) for mode in ("plain", "fast")]
    speed = {"--depth=1": 10.0, "--depth=2": 20.0}
    measured: dict[str, tune.Candidate] = {}
    for setting in tune.steps([first, second], measured, tune.Constraints()):
        value = speed[f"--depth={setting.flags['--depth']}"]
        value *= {"plain": 1.0, "fast": 1.5}[setting.environment.get("MODE", "plain")]
        measured[setting.name] = tune.Candidate(setting.name, {"load": bench.Summary(value)})
    assert list(measured)[-1] == "--depth=2 MODE=fast"
    decision = tune.outcome([first, second], measured, tune.Constraints())
    assert decision.picked == "--depth=2 MODE=fast"


def test_what_is_set_along_goes_with_its_value() -> None:
    entry = {
        "flag": "--steps",
        "values": [3, 4],
        "along": {"--draft-tokens": [4, 5], "SPEC": ["a", "b"]},
    }
    settings = tune.settings_of(build(catalog.Axis, entry, "axis"))
    assert settings[1] == tune.Setting({"--steps": 4, "--draft-tokens": 5}, {"SPEC": "b"})


def test_a_picked_setting_becomes_a_profile_with_its_evidence() -> None:
    load = bench.Summary(47.27, 11, 36.35, 34.5, 0.136, accept_percent=92.16, low_accept=1)
    chosen = tune.Candidate("x", {"256->512": load, "other": load})
    workload = {"prompt_tokens": 256, "output_tokens": 512}
    entry = tune.as_profile(
        "base", "Three drafts", tune.Setting({"--spec-tokens": 3}), chosen, {"256->512": workload}, "a run"
    )
    assert entry["based_on"] == "base"
    merged = {"platforms": ["p"], "model": "m", "engine": "vllm-0.33.0", **entry}
    profile = build(catalog.Profile, merged, "profile")
    assert profile.expectations[0].p10 == 36.35
    assert profile.expectations[0].runs_below_60 == 1
