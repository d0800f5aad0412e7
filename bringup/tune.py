"""Picking a setting like a careful engineer, and climbing to it with few runs.

The rule: settings that break a constraint (head-room, stability, errors) are out; of the rest the best lower
tail wins; among tails that are nearly as good the steadiest; among equally steady ones the highest median;
then the one that came first, which is the simpler. So 5 % more speed never pays for lost head-room or a bad
tail. What is judged of a load is what follows its warm-up: a setting that is started anew compiles for its first
batches, and that says nothing of how it serves.

The climb walks one knob at a time and stops when a step makes things worse.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bringup.bench import Summary, warm
from bringup.errors import Problem, UsageError

if TYPE_CHECKING:
    from bringup import catalog

TAIL_WITHIN = 0.05
"""Lower tails that differ by less are as good as each other."""
STEADY_WITHIN = 0.03
STEADY_RATIO = 1.4
"""So are coefficients of variation unless they differ by more than both: of eleven runs they are not known
better."""
FLAT_STEPS = 1
"""Steps that neither win nor clearly lose, after which one more is still tried."""
STATE_VERSION = 1


@dataclass(frozen=True)
class Constraints:
    """What a setting must keep: GiB free on each GPU, and at most this share of runs with low acceptance."""

    keep_free_gib: float = 10.0
    low_accept_share: float = 0.25


@dataclass(frozen=True)
class Setting:
    """A change to a profile: flags and environment variables by name; no change at all is the profile
    itself."""

    flags: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Such as "--speculative-num-steps=3"; "as it is" for no change. The same change has the same
        name."""
        changes = [*sorted(self.flags.items()), *sorted(self.environment.items())]
        return " ".join(f"{name}={_word(value)}" for name, value in changes) or "as it is"

    def with_(self, other: Setting) -> Setting:
        """Both changes; the other's wins where they name the same thing."""
        return Setting({**self.flags, **other.flags}, {**self.environment, **other.environment})


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


@dataclass(frozen=True)
class Candidate:
    """A setting with what was measured of it. `failed` says why it could not be (it did not start, it
    died)."""

    name: str
    loads: Mapping[str, Summary] = field(default_factory=dict)
    free_gib: float | None = None
    failed: str = ""

    @property
    def warm(self) -> Candidate:
        """Without the runs that were warm-up."""
        return replace(self, loads={label: warm(summary) for label, summary in self.loads.items()})

    @property
    def left_out(self) -> list[str]:
        """What to say of those runs: a line a load."""
        counts = {
            label: (len(one.values) - len(warm(one).values), len(one.values))
            for label, one in self.loads.items()
        }
        return [
            f"{self.name}: the first {first} of {count} runs at {label} were warm-up and do not count"
            for label, (first, count) in counts.items()
            if first
        ]


@dataclass(frozen=True)
class Decision:
    """What was picked and why; `rejected`: name -> the constraint it broke; None: every candidate broke
    one."""

    picked: str | None
    reason: str
    rejected: Mapping[str, str]


# --- the rule ----------------------------------------------------------------------------------------------


def broken(candidate: Candidate, constraints: Constraints) -> str:
    """The constraint that a candidate breaks, in words; empty when it breaks none."""
    if candidate.failed:
        return candidate.failed
    if not candidate.loads:
        return "nothing was measured"
    if candidate.free_gib is not None and candidate.free_gib < constraints.keep_free_gib:
        return f"leaves {candidate.free_gib:g} GiB free a GPU, less than {constraints.keep_free_gib:g}"
    for label, summary in candidate.loads.items():
        if summary.errors:
            return f"{summary.errors} requests failed at {label}"
        if summary.low_accept > constraints.low_accept_share * summary.runs:
            return f"unstable at {label}: {summary.low_accept} of {summary.runs} runs with low acceptance"
    return ""


def pick(candidates: Sequence[Candidate], constraints: Constraints | None = None) -> Decision:
    """The candidate to use. Order matters only among equals: the first is the simpler one."""
    limits = constraints or Constraints()
    rejected = {item.name: why for item in candidates if (why := broken(item, limits))}
    left = [item.warm for item in candidates if item.name not in rejected]
    labels = _common_loads(left)
    if not left or not labels:
        why = "no candidate keeps the constraints" if not left else "the candidates have no load in common"
        return Decision(None, why, rejected)
    tails = {item.name: _mean(item, labels, lambda summary: summary.tail) for item in left}
    best_tail = max(tails.values())
    near = [item for item in left if tails[item.name] >= best_tail * (1 - TAIL_WITHIN)]
    if len(near) == 1:
        return Decision(near[0].name, f"best lower tail ({_figure(tails[near[0].name])})", rejected)
    steady = _steadiest(near, labels)
    if len(steady) == 1:
        return Decision(steady[0].name, "steadiest of those with as good a lower tail", rejected)
    medians = {item.name: _mean(item, labels, lambda summary: summary.median) for item in steady}
    winner = max(steady, key=lambda item: medians[item.name])
    reason = f"highest median ({_figure(medians[winner.name])}) of those with as good a tail and as steady"
    return Decision(winner.name, reason, rejected)


def _common_loads(candidates: Sequence[Candidate]) -> list[str]:
    if not candidates:
        return []
    return [label for label in candidates[0].loads if all(label in item.loads for item in candidates)]


def _mean(candidate: Candidate, labels: Sequence[str], value: Callable[[Summary], float]) -> float:
    """Geometric mean over loads, so that a slow load weighs as much as a fast one."""
    values = [max(value(candidate.loads[label]), 1e-9) for label in labels]
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def _steadiest(candidates: Sequence[Candidate], labels: Sequence[str]) -> list[Candidate]:
    """Those with the least variation; all of them when it was not recorded for some."""
    spread: dict[str, float] = {}
    for item in candidates:
        known = [cv for label in labels if (cv := item.loads[label].cv) is not None]
        if len(known) < len(labels):
            return list(candidates)
        spread[item.name] = sum(known) / len(known)
    least = min(spread.values())
    most = max(least + STEADY_WITHIN, least * STEADY_RATIO)
    return [item for item in candidates if spread[item.name] <= most]


def _figure(value: float) -> str:
    return f"{value:.2f} tok/s"


# --- the climb ---------------------------------------------------------------------------------------------


def next_step(order: Sequence[str], measured: Mapping[str, Candidate], limits: Constraints) -> str | None:
    """The next setting of a knob to measure, in walking order; None when the climb is over.

    It is over after a step that breaks a constraint or is clearly worse in its tail than the best so far,
    after two steps in a row that win nothing, and at the end. What lies beyond is never started.
    """
    best: Candidate | None = None
    flat = 0
    for name in order:
        here = measured.get(name)
        if here is None:
            return name
        if best is None:
            best = None if broken(here, limits) else here
            continue
        if pick([best, here], limits).picked == here.name:
            best, flat = here, 0
            continue
        flat += 1
        if flat > FLAT_STEPS or _clearly_worse(best, here, limits):
            return None
    return None


def _clearly_worse(best: Candidate, here: Candidate, limits: Constraints) -> bool:
    if broken(here, limits):
        return True
    best, here = best.warm, here.warm
    labels = _common_loads([best, here])
    tail = _mean(here, labels, lambda summary: summary.tail) if labels else 0.0
    return tail < _mean(best, labels, lambda summary: summary.tail) * (1 - TAIL_WITHIN) if labels else True


def constraints_of(wish: catalog.Tune) -> Constraints:
    """What a profile's `tune:` section asks to keep."""
    return Constraints(keep_free_gib=wish.keep_free_gib)


def settings_of(axis: catalog.Axis) -> tuple[Setting, ...]:
    """The settings of a profile's tuning axis in walking order, each with what is set along with it."""
    return tuple(_setting(axis, at) for at in range(len(axis.values)))


def _setting(axis: catalog.Axis, at: int) -> Setting:
    along = {name: values[at] for name, values in axis.along.items()}
    flags = {name: value for name, value in along.items() if name.startswith("--")}
    environment = {name: str(value) for name, value in along.items() if not name.startswith("--")}
    if axis.flag:
        return Setting({axis.flag: axis.values[at], **flags}, environment)
    return Setting(flags, {str(axis.environment): str(axis.values[at]), **environment})


def _walk(base: Setting, axis: Sequence[Setting]) -> dict[str, Setting]:
    """A knob's settings on top of `base`, by name, in walking order."""
    settings = [base.with_(step) for step in axis]
    return {setting.name: setting for setting in settings}


def steps(
    axes: Sequence[Sequence[Setting]], measured: Mapping[str, Candidate], limits: Constraints
) -> Iterator[Setting]:
    """Settings to measure, one knob after another, each knob on top of what the ones before it picked.

    Put each result into `measured` (under the setting's name) before asking for the next."""
    base = Setting()
    for axis in axes:
        walk = _walk(base, axis)
        while (name := next_step(list(walk), measured, limits)) is not None:
            yield walk[name]
            if name not in measured:
                raise ValueError(f"{name} was to be measured and was not")
        picked = pick([measured[name] for name in walk if name in measured], limits).picked
        base = walk[picked] if picked else base


def outcome(
    axes: Sequence[Sequence[Setting]], measured: Mapping[str, Candidate], limits: Constraints
) -> Decision:
    """The decision once every knob has been climbed: the last knob's pick, with all rejections."""
    base, last = Setting(), Decision(None, "nothing was measured", {})
    rejected: dict[str, str] = {}
    for axis in axes:
        walk = _walk(base, axis)
        last = pick([measured[name] for name in walk if name in measured], limits)
        rejected |= last.rejected
        base = walk[last.picked] if last.picked else base
    return Decision(last.picked, last.reason, rejected)


def climb(
    axes: Sequence[Sequence[Setting]],
    measure: Callable[[Setting], Candidate],
    limits: Constraints,
    state: Path,
    key: str,
    restore: Callable[[], None],
) -> Decision:
    """Measures what the climb asks for and picks; `restore` brings the node back, whatever happens.

    Every result is in `state` before the next is made, so an interrupted climb goes on where it was. `key`
    names what is tuned (profile, engine, place); a state of something else is refused rather than mixed in.
    """
    measured = load_state(state, key)
    try:
        for setting in steps(axes, measured, limits):
            found = measure(setting)
            measured[setting.name] = Candidate(setting.name, found.loads, found.free_gib, found.failed)
            save_state(state, key, measured)
    finally:
        restore()
    return outcome(axes, measured, limits)


# --- state -------------------------------------------------------------------------------------------------


def save_state(path: Path, key: str, measured: Mapping[str, Candidate]) -> None:
    """Writes beside, syncs, renames: a reader sees the old state or the new one."""
    data = {
        "schema_version": STATE_VERSION,
        "key": key,
        "measured": [asdict(item) for item in measured.values()],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.touch(mode=0o600)
        with beside.open("w", encoding="utf-8") as stream:
            json.dump(data, stream, indent=1)
            stream.flush()
            os.fsync(stream.fileno())
        beside.replace(path)
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise


def load_state(path: Path, key: str) -> dict[str, Candidate]:
    """What was measured before; {} when nothing was. Raises UsageError for a state that is not ours to go on
    with."""
    if not path.exists():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["schema_version"] != STATE_VERSION:
            raise ValueError(f"schema version {data['schema_version']}")
        found = {item["name"]: _candidate(item) for item in data["measured"]}
        theirs = data["key"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        remedy = "Move it away to start over."
        raise UsageError(Problem(str(path), f"not a tuning state: {error}", remedy)) from None
    if theirs != key:
        remedy = "Move it away to start over, or give another file."
        raise UsageError(Problem(str(path), f'belongs to "{theirs}", not to "{key}"', remedy))
    return found


def _candidate(data: Mapping[str, Any]) -> Candidate:
    loads = {
        label: Summary(**{**summary, "values": tuple(summary.get("values", ()))})
        for label, summary in data["loads"].items()
    }
    return Candidate(data["name"], loads, data.get("free_gib"), data.get("failed", ""))


# --- the candidate profile ---------------------------------------------------------------------------------


def as_profile(
    base: str,
    title: str,
    setting: Setting,
    chosen: Candidate,
    loads: Mapping[str, Mapping[str, Any]],
    source: str,
) -> dict[str, Any]:
    """A catalog profile for a picked setting, as plain data: the change on top of `base`, with its evidence.

    `loads`: load label -> the workload as the catalog writes it (prompt_tokens, output_tokens, concurrent).
    """
    expectations = [
        _expectation(summary, loads[label], source)
        for label, summary in chosen.warm.loads.items()
        if label in loads
    ]
    entry: dict[str, Any] = {"title": title, "based_on": base}
    if setting.flags:
        entry["flags"] = dict(setting.flags)
    if setting.environment:
        entry["environment"] = dict(setting.environment)
    return {**entry, "expectations": expectations}


def _expectation(summary: Summary, workload: Mapping[str, Any], source: str) -> dict[str, Any]:
    measured = {
        "value": round(summary.median, 2),
        "p10": None if summary.p10 is None else round(summary.p10, 2),
        "cv": None if summary.cv is None else round(summary.cv, 3),
        "accept_percent": None if summary.accept_percent is None else round(summary.accept_percent, 2),
        "runs_below_60": summary.low_accept or None,
    }
    kept = {key: value for key, value in measured.items() if value is not None}
    return {
        "workload": {**workload, "runs": summary.runs},
        "metric": "output_tok_s",
        **kept,
        "source": source,
    }
