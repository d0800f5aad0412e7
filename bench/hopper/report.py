"""What a run on a GPU machine left, as raw data in docs/tuning and as tables in docs/hopper.md.

    python -m bench.hopper report OUT

OUT holds `results.tar.gz` (bench/hopper/ladder.py). Nothing is copied by hand: the tables stand between two marks in
docs/hopper.md and are made anew from all `run-*.json` there are.
"""

# ruff: noqa: E501 (rows of tables)
from __future__ import annotations

import json
import re
import statistics
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from bringup import ROOT
from bringup.bench import warm_up_runs
from bringup.errors import Problem, UsageError

PROFILE = "h200-1x-glm-tiny-fp8-mtp-sglang"
RAW = ROOT / "docs" / "tuning" / PROFILE
PAGE = ROOT / "docs" / "hopper.md"
BEGIN, END = "<!-- made by: python -m bench.hopper report -->", "<!-- end of what report makes -->"
RUNGS = {
    f"{PROFILE}-bring-up": "bring-up: Triton, no graphs",
    f"{PROFILE}-base": "base: Cutlass, graphs",
    f"{PROFILE}-mtp-careful": "MTP 3-1-4",
    PROFILE: "MTP 4-1-5",
    "h200-2x-glm-tiny-fp8-mtp-sglang": "MTP 4-1-5, two GPUs",
}
STEP_OF = dict(zip(RUNGS, ("rung-0", "rung-1", "rung-2", "rung-3", "pair"), strict=True))
"""How the ladder names a profile's steps."""
STEAL = 7
"""Which of the ticks another machine had."""
WITHIN = 0.15
"""Two runs from cold should differ by no more than this share."""
PHASES = ("distributed", "weights", "kv", "jit", "graphs", "ready", "first token", "warm-up", "drafting")
KEPT = ("load", "cold", "errors", "latencies_ms", "request_tok_s", "prompt_tokens", "output_tokens", "notes")


# --- reading -----------------------------------------------------------------------------------------------


def run(out: Path) -> int:
    """Adds what a run left to docs/tuning, makes the tables anew, and says which file it is."""
    archive = out / "results.tar.gz" if out.is_dir() else out
    if not archive.is_file():
        raise UsageError(Problem(str(out), "has no results.tar.gz", "Name the folder that `run` wrote into"))
    with tempfile.TemporaryDirectory() as place:
        with tarfile.open(archive) as packed:
            packed.extractall(place, filter="data")
        data = collected(Path(place))
    path = target(data["began"])
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    renew()
    print(path.relative_to(ROOT))
    return 0


def target(began: str) -> Path:
    """The file of the run that began then; a new number for a new one."""
    files = sorted(RAW.glob("run-*.json"))
    same = [path for path in files if json.loads(path.read_text(encoding="utf-8"))["began"] == began]
    return same[0] if same else RAW / f"run-{len(files) + 1}.json"


def collected(folder: Path) -> dict[str, Any]:
    """Everything that is worth keeping of a results folder."""
    records = sorted((folder / "runs").glob("*/record.json"))
    said = [(path.parent, json.loads(path.read_text(encoding="utf-8"))) for path in records]
    rungs: dict[str, dict[str, Any]] = {}
    start: Mapping[str, Any] = {}
    for place, record in said:
        start = next(iter(record["starts"]), start)
        if record["name"] == "bench" and (place / "bench.json").is_file():
            profile, rung = measured(place)
            rungs[profile] = {"start": kept_start(start), **rung}
    steps = json.loads((folder / "results" / "steps.json").read_text(encoding="utf-8"))
    data = {
        "began": said[0][1]["begun"] if said else "",
        "rungs": rungs,
        "starts": [
            {"inventory": record["arguments"].get("inventory", ""), **kept_start(one)}
            for _, record in said
            for one in record["starts"]
        ],
        "pace": paces(folder / "results"),
        "steps": [{key: step[key] for key in ("name", "seconds", "code", "note")} for step in steps],
    }
    return {**data, **tuned(said)}


def paces(results: Path) -> dict[str, Any]:
    """What the machine's CPUs did around each rung's bench: the loops' times, and ticks between the two looks."""
    found: dict[str, Any] = {}
    for profile, name in STEP_OF.items():
        looks = [results / f"{name}-pace-{when}.txt" for when in ("before", "after")]
        if all(look.is_file() and look.read_text(encoding="utf-8").startswith("{") for look in looks):
            before, after = (json.loads(look.read_text(encoding="utf-8")) for look in looks)
            ticks = [new - old for old, new in zip(before["ticks"], after["ticks"], strict=True)]
            found[profile] = {"loop_ms": [before["loop_ms"], after["loop_ms"]], "ticks": ticks}
    return found


def measured(place: Path) -> tuple[str, dict[str, Any]]:
    """The profile of a bench, and its rows with what was beside them and what it was judged against."""
    (one,) = json.loads((place / "bench.json").read_text(encoding="utf-8"))["targets"]
    rows = [
        {**{key: row[key] for key in KEPT}, "accept_length": row["values"].get("accept_length") or []}
        for row in one["measured"]
    ]
    compared = place / "against.json"
    against = json.loads(compared.read_text(encoding="utf-8")) if compared.is_file() else None
    beside = {key: one["beside"].get(key) for key in ("gpus", "log", "tunnel_ms", "notes")}
    return one["fingerprint"]["profile"], {
        "rows": rows,
        "beside": beside,
        "against": against,
        "fingerprint": one["fingerprint"],
    }


def kept_start(start: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds of a start, whole and by phase, and what it said of its drafts."""
    return {
        key: start[key] for key in ("seconds", "phases", "outcome", "drafting", "warnings") if key in start
    }


def tuned(said: Sequence[tuple[Path, Mapping[str, Any]]]) -> dict[str, Any]:
    """What tune measured and picked; nothing when it did not end."""
    for place, record in reversed(said):
        if record["name"] == "tune" and (place / "state.json").is_file():
            state = json.loads((place / "state.json").read_text(encoding="utf-8"))
            candidate = place / "candidate.yml"
            flags = (
                yaml.safe_load(candidate.read_text(encoding="utf-8"))["flags"] if candidate.is_file() else {}
            )
            picked = " ".join(f"{name}={value}" for name, value in flags.items()) or "the profile itself"
            said_of_it = {"status": record["status"], "notes": record["notes"], "picked": picked}
            return {"tune": {**said_of_it, "state": state}}
    return {}


def median(values: Iterable[float]) -> float:
    """The median, as a plain number."""
    return float(statistics.median(values))


# --- figures -----------------------------------------------------------------------------------------------


def speed(rung: Mapping[str, Any], concurrent: int) -> float | None:
    """Output tokens a second: median of warm requests, or of what the requests at once gave together."""
    row = next((row for row in rung["rows"] if row["load"]["concurrent"] == concurrent), None)
    if row is None:
        return None
    if concurrent == 1:
        return warm(value for value, cold in zip(row["request_tok_s"], row["cold"], strict=True) if not cold)
    batches = [
        max(row["latencies_ms"][at : at + concurrent])
        for at in range(0, len(row["latencies_ms"]), concurrent)
    ]
    each = concurrent * row["load"]["output_tokens"]
    return warm(each / took * 1000 for took in batches)


def warm(values: Iterable[float]) -> float:
    """The median of what follows the runs that are warm-up by the client's own rule."""
    series = list(values)
    return median(series[warm_up_runs(series) :])


def pace(one: Mapping[str, Any], profile: str) -> float | None:
    """How long the same work took a CPU around a rung's bench, ms: the median."""
    found = one.get("pace", {}).get(profile)
    return median(value for look in found["loop_ms"] for value in look) if found else None


def accepted(rung: Mapping[str, Any], concurrent: int) -> float | None:
    """Median accept length of a load's runs; None where nothing is drafted."""
    for row in rung["rows"]:
        if row["load"]["concurrent"] == concurrent and row["accept_length"]:
            return median(row["accept_length"])
    return None


def memory(rung: Mapping[str, Any]) -> float | None:
    """GiB in use on the fullest GPU."""
    used: list[float] = [gpu["used_gib_most"] for gpu in rung["beside"]["gpus"] or ()]
    return max(used, default=None)


def phase(rung: Mapping[str, Any], name: str) -> float | None:
    """Seconds of a phase of the start."""
    found: list[float] = [one["seconds"] for one in rung["start"].get("phases", ()) if one["name"] == name]
    return sum(found) if found else None


# --- tables ------------------------------------------------------------------------------------------------


def renew() -> None:
    """Writes the tables into docs/hopper.md."""
    text = PAGE.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise UsageError(
            Problem("docs/hopper.md", "has not one place for the tables", f"Add {BEGIN} and {END}")
        )
    before, _, rest = text.partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{tables()}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


def runs() -> list[Mapping[str, Any]]:
    """All runs, the first one first."""
    files = sorted(RAW.glob("run-*.json"), key=lambda path: int(re.findall(r"\d+", path.stem)[-1]))
    return [json.loads(path.read_text(encoding="utf-8")) for path in files]


def tables() -> str:
    """Speeds, then starts, of every rung and run; then what differs between runs, and what tune measured."""
    return "\n".join([*speeds(), "", *starts(), "", *differences(), "", *settings()])


def every() -> Iterator[tuple[str, str, int, Mapping[str, Any]]]:
    """Profile, title, number of the run, rung: rung by rung."""
    for profile, title in RUNGS.items():
        for number, one in enumerate(runs(), 1):
            if profile in one["rungs"]:
                yield profile, title, number, one["rungs"][profile]


def speeds() -> Iterator[str]:
    """The table of speeds."""
    yield "| rung | run | alone, tok/s | eight at once, tok/s | accept length alone / eight | GPU memory | judged against the one before |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for _, title, number, rung in every():
        lengths = [figure(accepted(rung, concurrent), 2) for concurrent in (1, 8)]
        verdict = verdict_of(rung.get("against"))
        yield (
            f"| {title} | {number} | {figure(speed(rung, 1))} | {figure(speed(rung, 8))} | {' / '.join(lengths)} "
            f"| {figure(memory(rung), 2)} GiB | {verdict} |"
        )


def verdict_of(against: Mapping[str, Any] | None) -> str:
    """What `bench --against` said, load by load."""
    if not against:
        return "-"
    each = [
        f"{label} {one['median']:+.0%}{between(one)}"
        for label, one in against["comparisons"].items()
        if one.get("median") is not None
    ]
    return f"{against['verdict']}: {', '.join(each)}"


def between(one: Mapping[str, Any]) -> str:
    """The interval of a comparison; nothing where there were too few runs for one."""
    return f" ({one['low']:+.0%} to {one['high']:+.0%})" if one.get("low") is not None else ""


def starts() -> Iterator[str]:
    """The table of starts by phase."""
    yield f"| start, seconds | run | whole | {' | '.join(PHASES)} |"
    yield f"| --- | --- | --- |{' --- |' * len(PHASES)}"
    for _, title, number, rung in every():
        cells = [figure(phase(rung, name), 1) for name in PHASES]
        yield f"| {title} | {number} | {figure(rung['start'].get('seconds'), 1)} | {' | '.join(cells)} |"


def differences() -> Iterator[str]:
    """By how much each run of a rung differs from the one before it, whether that is within the bar, and by how much the
    machine's CPUs differed."""
    yield f"| rung | runs | alone | eight at once | start | within {WITHIN:.0%} | the same work of one CPU, ms | of the CPUs' time for others |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    last: dict[str, tuple[int, Mapping[str, Any]]] = {}
    said = runs()
    for profile, title, number, rung in every():
        if profile in last:
            before, old = last[profile]
            pairs = [
                (speed(old, 1), speed(rung, 1)),
                (speed(old, 8), speed(rung, 8)),
                (old["start"].get("seconds"), rung["start"].get("seconds")),
            ]
            changes = [new / was - 1 if was and new else None for was, new in pairs]
            good = all(abs(change) <= WITHIN for change in changes if change is not None)
            cells = " | ".join("-" if change is None else f"{change:+.0%}" for change in changes)
            both = [said[before - 1], said[number - 1]]
            loops = turned(figure(pace(one, profile), 1) for one in both)
            others = turned(stolen(one, profile) for one in both)
            yield f"| {title} | {number} against {before} | {cells} | {'yes' if good else 'no'} | {loops} | {others} |"
        last[profile] = number, rung


def turned(cells: Iterable[str]) -> str:
    """What was and what is; a dash when neither is known."""
    both = list(cells)
    return " -> ".join(both) if set(both) != {"-"} else "-"


def stolen(one: Mapping[str, Any], profile: str) -> str:
    """Which share of the machine's CPU time others had during a rung's bench."""
    found = one.get("pace", {}).get(profile)
    return f"{found['ticks'][STEAL] / sum(found['ticks']):.1%}" if found else "-"


def settings() -> Iterator[str]:
    """What tune measured of each setting; the one that it picked is said below."""
    yield "| tune | run | alone: median, P10, CV | accept length | eight at once: median, P10, CV | accept length |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for number, one in enumerate(runs(), 1):
        for setting in one.get("tune", {}).get("state", {}).get("measured", ()):
            cells = [
                f"{figure(load['median'])}, {figure(load['p10'])}, {load['cv']:.0%} | {figure(load['accept_length'], 2)}"
                for load in setting["loads"].values()
            ]
            yield f"| `{setting['name']}` | {number} | {' | '.join(cells)} |"
        if "tune" in one:
            yield f"| picked | {number} | {one['tune'].get('picked', '')}: {'; '.join(one['tune']['notes'])} | | | |"


def figure(value: float | None, digits: int = 0) -> str:
    """A number for a table; a dash for none."""
    return "-" if value is None else f"{value:,.{digits}f}"
