"""Running a suite against servers that can be reached, and what is kept of it.

Results go out as JSON (`as_json`, read back by `from_json`), CSV and a table; `against` compares two of them,
or one with the measurement behind a profile. HTML is in bringup/benchreport.py.
"""

from __future__ import annotations

import asyncio
import csv
import dataclasses
import io
import json
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from bringup import bench, engineclient, load, metrics, suites, tune
from bringup.errors import Problem, UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from bringup import catalog

SCHEMA_VERSION = 1
DEFAULT_PROMPT, DEFAULT_OUTPUT = 256, 512
"""Tokens of a tuning load that does not say how many."""
BAR, BAR_WIDTH = "\u2588", 40
"""What bars on a terminal are made of, and the longest one's columns."""
TUNNEL_SHARE = 0.05
"""Of the time to a first token: a tunnel that takes more is said to."""
SAMPLES_KEPT = 2000
"""Times of single requests that a result keeps for each load; a bigger load keeps every n-th."""
OURS = "bringup"
"""The load client of bringup.load."""
TOO_LONG = re.compile(r"HTTP 4\d\d: .*context.{0,10} (?:size|length)", re.IGNORECASE | re.DOTALL)
"""How servers say that a request does not fit."""
BUSY_LIMIT_PERCENT = 90.0
"""Of one core: an engine's client that uses more has no time of its own left."""
COLUMNS = tuple("load|runs|median tok/s|P10|P90|min|max|CV|TTFT ms|TPOT ms|accept len|note".split("|"))


@dataclass(frozen=True)
class Measured:
    """One load on one target: values of each run in order, times of single requests, and what to know about
    it.

    `values`: metric (output_tok_s, total_tok_s, ttft_ms, tpot_ms, accept_length, accept_percent) -> one a
    run. `latencies_ms` and `request_tok_s` are of single requests. `cold`: whether each run was a cold one.
    `output_tokens`: of all answers, as the server counted them. `client`: what sent the load.
    `busy_percent`: of one core, at most in a run, if it was the engine's own (ours has `lag_ms`).
    """

    load: bench.Load
    values: Mapping[str, tuple[float, ...]]
    cold: tuple[bool, ...]
    errors: int
    first_error: str
    latencies_ms: tuple[float, ...]
    request_tok_s: tuple[float, ...]
    prompt_tokens: float
    cache_hit_percent: float | None
    lag_ms: float
    notes: tuple[str, ...]
    output_tokens: int = 0
    client: str = OURS
    busy_percent: float | None = None

    @property
    def summary(self) -> bench.Summary | None:
        """The summary of output tokens a second; None when no run gave one."""
        values = self.values["output_tok_s"]
        if not values:
            return None
        stats = bench.summarise(values)
        percents, lengths = self.values["accept_percent"], self.values["accept_length"]
        return bench.Summary(
            median=stats.median,
            runs=stats.count,
            p10=stats.p10,
            minimum=stats.minimum,
            cv=stats.cv,
            accept_length=bench.summarise(lengths).median if lengths else None,
            accept_percent=bench.summarise(percents).median if percents else None,
            low_accept=sum(percent < bench.LOW_ACCEPT_PERCENT for percent in percents),
            errors=self.errors,
            values=values,
        )


@dataclass(frozen=True)
class TargetResult:
    """All loads of a suite on one target. `fingerprint`: versions, flags, profile digest - whatever the
    caller knows, as text. `beside`: what was gathered beside the loads (bringup.beside), as plain data.
    `left_out`: loads that the server cannot take, with why.
    """

    name: str
    base_url: str
    model: str
    engine: str
    engine_version: str
    measured: tuple[Measured, ...]
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    beside: Mapping[str, Any] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    @property
    def summaries(self) -> dict[str, bench.Summary]:
        """Summaries by load label, of those loads that gave one."""
        found = {item.load.label: item.summary for item in self.measured}
        return {label: summary for label, summary in found.items() if summary is not None}


@dataclass(frozen=True)
class BenchResult:
    """A suite on one or more targets. `started`: UTC, ISO 8601. `broken_off`: why it has fewer loads than its
    suite, such as "interrupted"; empty for a whole one."""

    suite: str
    started: str
    took_s: float
    targets: tuple[TargetResult, ...]
    broken_off: str = ""

    @property
    def loads(self) -> int:
        """How many loads were measured, on all targets together."""
        return sum(len(target.measured) for target in self.targets)

    @property
    def ok(self) -> bool:
        """Whether every request of every load was answered."""
        return all(item.errors == 0 for target in self.targets for item in target.measured)

    def as_json(self) -> dict[str, Any]:
        """The result as plain data with its schema version; `from_json` turns it back."""
        return {"schema_version": SCHEMA_VERSION, **dataclasses.asdict(self)}


# --- running -----------------------------------------------------------------------------------------------


def run_suite(
    suite: suites.Suite,
    targets: Sequence[load.Target],
    *,
    name: str = "",
    fingerprints: Mapping[str, Mapping[str, str]] | None = None,
    say: Callable[[str], None] = lambda line: None,
    client: engineclient.Client | None = None,
    keep: Callable[[BenchResult], None] = lambda result: None,
) -> BenchResult:
    """Runs every load of a suite on each target in turn. `say` gets a line when a load begins. `client`: the
    engine's own client, for suites that want it; when it gives nothing, ours goes on and the result says so.
    `keep` gets all that has been measured so far, after each load.

    Raises UsageError when a target does not answer at all; failing requests later are counted, not raised.
    """
    started, clock = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    known = fingerprints or {}
    own = client if suite.client == "engine" else None
    results: list[TargetResult] = []

    def so_far(*current: TargetResult) -> BenchResult:
        took = round(time.monotonic() - clock, 3)
        return BenchResult(name or suite.title, started, took, (*results, *current))

    for target in targets:
        prints = known.get(target.name, {})
        one = asyncio.run(_target(suite, target, prints, say, own, lambda current: keep(so_far(current))))
        results.append(one)
    return so_far()


async def _target(
    suite: suites.Suite,
    target: load.Target,
    fingerprint: Mapping[str, str],
    say: Callable[[str], None],
    client: engineclient.Client | None,
    keep: Callable[[TargetResult], None],
) -> TargetResult:
    tokens = await load.calibrate(target)
    measured: list[Measured] = []
    given_up = ""
    left_out = [why for step in suite.steps if (why := _too_long(step, target.context))]
    for why in left_out:
        say(f"{target.name or target.base_url}: {why}")
    for step in suite.steps:
        if _too_long(step, target.context):
            continue
        say(f"{target.name or target.base_url}: {step.load.label}, {step.cold_runs + step.warm_runs} runs")
        found = None
        if client is not None and not given_up and engineclient.fits(step):
            try:
                found = await _measure(step, target, _by_engine(client, step), client.name)
            except engineclient.NoResult as error:
                given_up = f"{client.name}: {error}; so {OURS}'s client measured"
                say(given_up)
        if found is None:
            found = await _measure(step, target, _by_us(target, tokens, step), OURS)
            found = dataclasses.replace(found, notes=(*found.notes, given_up)) if given_up else found
        if why := _refused(found):
            say(why)
            left_out.append(why)
        else:
            measured.append(found)
            keep(_target_result(target, measured, fingerprint, left_out))
    return _target_result(target, measured, fingerprint, left_out)


def _target_result(
    target: load.Target,
    measured: Sequence[Measured],
    fingerprint: Mapping[str, str],
    left_out: Sequence[str],
) -> TargetResult:
    return TargetResult(
        target.name or target.base_url,
        target.base_url,
        target.model,
        target.engine,
        target.engine_version,
        tuple(measured),
        dict(fingerprint),
        left_out=tuple(left_out),
    )


def _too_long(step: suites.Step, context: int | None) -> str:
    """Why a server of this context cannot be sent a load; empty when it can."""
    tokens = step.prompt_tokens + step.output_tokens
    if context is None or tokens <= context:
        return ""
    return f"{step.load.label} is left out: it needs {tokens:,} tokens of context, the server has {context:,}"


def _refused(found: Measured) -> str:
    """Why a server took no request of a load, if it says that it is too long: slots may share a context, which
    a plan does not know. Empty for any other error."""
    if found.output_tokens or not TOO_LONG.match(found.first_error):
        return ""
    return f"{found.load.label} is left out, the server refuses it as too long: {found.first_error}"


Send = Callable[[int], Awaitable[load.Outcome]]
"""Sends the run of this number."""


def _by_us(target: load.Target, tokens: load.Tokens, step: suites.Step) -> Send:
    prompts = load.Prompts(tokens, fresh=step.cache == "defeat")

    async def send(number: int) -> load.Outcome:
        asks = _asks(step, prompts, number)
        if step.rate:
            return await load.open_loop(target, asks, step.rate, seed=number + 1)
        return await load.closed_loop(target, asks, step.concurrent)

    return send


def _by_engine(client: engineclient.Client, step: suites.Step) -> Send:
    async def send(number: int) -> load.Outcome:
        sent = await asyncio.to_thread(client.run, step, number)
        return load.Outcome(sent.requests, sent.wall_s, 0.0, sent.busy_percent)

    return send


async def _measure(step: suites.Step, target: load.Target, send: Send, client: str) -> Measured:
    runs: list[bench.Run] = []
    lags: list[float] = []
    busy: list[float] = []
    first = before = await _reading(target)
    for number in range(step.cold_runs + step.warm_runs):
        outcome = await send(number)
        after = await _reading(target)
        seen = metrics.between(before, after)
        before = after
        lags.append(outcome.lag_ms)
        busy += [outcome.busy_percent] if outcome.busy_percent is not None else []
        cold = number < step.cold_runs
        runs.append(
            bench.Run(outcome.wall_s, outcome.requests, cold, seen.accept_length, seen.accept_percent)
        )
    hits = metrics.between(first, before).cache_hit_percent
    series = bench.Series(step.load, tuple(runs))
    return measured_of(series, max(lags, default=0.0), hits, client, max(busy, default=None))


def _asks(step: suites.Step, prompts: load.Prompts, number: int) -> list[load.Ask]:
    if step.prompts == "real":
        known = suites.real_prompts()
        at = number * step.requests_a_run
        texts = [known[(at + offset) % len(known)] for offset in range(step.requests_a_run)]
        return [load.Ask(text, step.output_tokens, chat=True) for text in texts]
    return [
        load.Ask(prompts.make(step.prompt_tokens), step.output_tokens) for _ in range(step.requests_a_run)
    ]


async def _reading(target: load.Target) -> dict[str, float]:
    """The target's metrics under our names; {} when it has none or does not answer: a load is no worse for
    it.
    """
    if not target.metrics or not target.metrics_names:
        return {}
    try:
        return metrics.parse(await load.fetch(target, target.metrics)).named(target.metrics_names)
    except (OSError, load.ServerError, asyncio.IncompleteReadError, ValueError):
        return {}


METRICS = ("output_tok_s", "total_tok_s", "ttft_ms", "tpot_ms", "accept_length", "accept_percent")


def measured_of(
    series: bench.Series,
    lag_ms: float = 0.0,
    cache_hit_percent: float | None = None,
    client: str = OURS,
    busy_percent: float | None = None,
) -> Measured:
    """What is kept of a series."""
    good = [request for run in series.runs for request in run.good]
    failed = [request.error for run in series.runs for request in run.requests if request.error]
    notes = list(bench.quality(series))
    if lag_ms > load.LAG_LIMIT_MS:
        notes.append("this client was late: times cannot be trusted")
    if busy_percent is not None and busy_percent > BUSY_LIMIT_PERCENT:
        notes.append(f"the client used {busy_percent:.0f} % of a core: it may be what was measured")
    return Measured(
        load=series.load,
        values={metric: series.values(metric) for metric in METRICS},
        cold=tuple(run.cold for run in series.runs),
        errors=len(failed),
        first_error=failed[0] if failed else "",
        latencies_ms=_thinned([(request.ended - request.began) * 1000 for request in good]),
        request_tok_s=_thinned([request.tok_s for request in good]),
        prompt_tokens=sum(request.prompt_tokens for request in good) / len(good) if good else 0.0,
        cache_hit_percent=cache_hit_percent,
        lag_ms=round(lag_ms, 3),
        notes=tuple(notes),
        output_tokens=sum(request.output_tokens for request in good),
        client=client,
        busy_percent=busy_percent,
    )


def _thinned(values: Sequence[float]) -> tuple[float, ...]:
    every = -(-len(values) // SAMPLES_KEPT) or 1
    return tuple(round(value, 3) for value in values[::every])


# --- reading back ------------------------------------------------------------------------------------------


def from_json(data: Any, where: str = "result") -> BenchResult:
    """A result from `as_json`'s data. Raises UsageError for anything else."""
    try:
        if data["schema_version"] != SCHEMA_VERSION:
            what = f"schema version {data['schema_version']}, and this program reads {SCHEMA_VERSION}"
            raise UsageError(Problem(where, what))
        targets = tuple(_target_from(item) for item in data["targets"])
        broken_off = str(data.get("broken_off", ""))
        return BenchResult(data["suite"], data["started"], data["took_s"], targets, broken_off)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UsageError(Problem(where, f"not a bench result: {error!r}")) from None


def read_result(text: str, where: str) -> BenchResult:
    """A result from a file's text. Raises UsageError."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise UsageError(Problem(where, f"not JSON: {error}")) from None
    return from_json(data, where)


def _target_from(data: Mapping[str, Any]) -> TargetResult:
    measured = tuple(_measured_from(item) for item in data["measured"])
    return TargetResult(**{**data, "measured": measured, "left_out": tuple(data.get("left_out", ()))})


def _measured_from(data: Mapping[str, Any]) -> Measured:
    values = {metric: tuple(data["values"].get(metric, ())) for metric in METRICS}
    lists = {key: tuple(data[key]) for key in ("cold", "latencies_ms", "request_tok_s", "notes")}
    return Measured(**{**data, **lists, "values": values, "load": bench.Load(**data["load"])})


# --- verdict -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Against:
    """A result held against another: a comparison for each load that both have, and one verdict over all.
    `missing`: loads that were not measured again. `unmatched`: loads that were not measured before."""

    verdict: bench.Verdict
    comparisons: Mapping[str, bench.Comparison]
    missing: tuple[str, ...]
    unmatched: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """As plain data with its schema version."""
        return {"schema_version": SCHEMA_VERSION, **dataclasses.asdict(self)}


def against(before: Mapping[str, bench.Summary], after: Mapping[str, bench.Summary]) -> Against:
    """Compares summaries by load label."""
    found = {label: _compared(before[label], after[label]) for label in before if label in after}
    missing = tuple(label for label in before if label not in after)
    return Against(
        bench.overall(found), found, missing, tuple(label for label in after if label not in before)
    )


def _compared(before: bench.Summary, after: bench.Summary) -> bench.Comparison:
    """Failing requests where there were none make a load worse, whatever its speed."""
    found = bench.compare(before, after)
    if after.errors > before.errors:
        reason = f"{after.errors} requests failed, {before.errors} before"
        return dataclasses.replace(found, verdict="worse", reason=reason)
    return found


def of_profile(expectations: Iterable[catalog.Expectation]) -> dict[str, bench.Summary]:
    """A profile's recorded measurements of output tokens a second as summaries by load label."""
    found: dict[str, bench.Summary] = {}
    for item in expectations:
        work = item.workload
        if item.metric != "output_tok_s" or not work.prompt_tokens or not work.output_tokens:
            continue
        low, high = item.low or 0.0, item.high or 0.0
        found[bench.Load(work.prompt_tokens, work.output_tokens, work.concurrent).label] = bench.Summary(
            median=item.value if item.value is not None else (low + high) / 2,
            runs=work.runs or 1,
            p10=item.p10,
            minimum=item.low,
            cv=item.cv,
            accept_percent=item.accept_percent,
            low_accept=item.runs_below_60 or 0,
        )
    return found


def gates(result: BenchResult, compared: Against | None) -> tuple[str, ...]:
    """The gates that a result does not pass, in words: every request is answered, every load gives a value,
    and nothing is worse than what it is compared with."""
    failed = []
    for target in result.targets:
        for item in target.measured:
            if item.errors:
                said = f"{item.errors} requests failed at {item.load.label}: {item.first_error}"
                failed.append(f"{target.name}: {said}")
            elif item.summary is None:
                failed.append(f"{target.name}: no run gave a value at {item.load.label}")
    if compared is not None and compared.verdict == "worse":
        worse = [label for label, one in compared.comparisons.items() if one.verdict == "worse"]
        failed.append(f"worse than before at {', '.join(worse)}")
    return tuple(failed)


def joined(parts: Sequence[BenchResult]) -> BenchResult:
    """Whole results of the same suite on several targets, one after the other, as one. Raises ValueError for
    none."""
    if not parts:
        raise ValueError("no results to join")
    targets = tuple(target for part in parts for target in part.targets)
    took = round(sum(part.took_s for part in parts), 3)
    return BenchResult(parts[0].suite, parts[0].started, took, targets)


def with_beside(result: BenchResult, beside: Mapping[str, Any]) -> BenchResult:
    """A result of one target with what was gathered beside it."""
    targets = tuple(dataclasses.replace(target, beside=dict(beside)) for target in result.targets)
    return dataclasses.replace(result, targets=targets)


# --- for tuning --------------------------------------------------------------------------------------------


def suite_of(wish: catalog.Tune) -> suites.Suite:
    """A profile's tuning loads as a suite: one cold run and as many warm ones as it says."""
    steps = [
        suites.Step(
            prompt_tokens=work.prompt_tokens or DEFAULT_PROMPT,
            output_tokens=work.output_tokens or DEFAULT_OUTPUT,
            concurrent=work.concurrent,
            cold_runs=1,
            warm_runs=wish.warm_runs,
        )
        for work in wish.workloads
    ]
    return suites.Suite(title="tuning", steps=tuple(steps))


def as_candidate(name: str, result: TargetResult, free_gib: float | None = None) -> tune.Candidate:
    """A setting's measurement for `tune.pick`. `free_gib`: left on the fullest GPU at its fullest moment."""
    silent = [item.load.label for item in result.measured if item.summary is None]
    failed = f"no run gave a value at {', '.join(silent)}" if silent else ""
    return tune.Candidate(name, result.summaries, free_gib, failed)


# --- showing -----------------------------------------------------------------------------------------------


def rows(target: TargetResult) -> list[tuple[str, ...]]:
    """A target's loads as text, one tuple of COLUMNS each."""
    return [_row(item) for item in target.measured]


def _row(item: Measured) -> tuple[str, ...]:
    summary = item.summary
    if summary is None:
        return (item.load.label, "0", *["-"] * (len(COLUMNS) - 3), item.first_error or "no run gave a value")
    stats = bench.summarise(summary.values)
    figures = (stats.median, stats.p10, stats.p90, stats.minimum, stats.maximum)
    note = "; ".join(item.notes)
    return (
        item.load.label,
        str(stats.count),
        *(f"{value:.2f}" for value in figures),
        f"{stats.cv:.3f}",
        _middle(item.values["ttft_ms"]),
        _middle(item.values["tpot_ms"]),
        f"{summary.accept_length:.2f}" if summary.accept_length is not None else "-",
        f"{note}: {item.first_error}" if item.first_error else note,
    )


def _middle(values: Sequence[float]) -> str:
    return f"{bench.summarise(values).median:.1f}" if values else "-"


def tables(result: BenchResult) -> list[Table]:
    """A table a target, for the terminal."""
    from rich.table import Table

    made = []
    for target in result.targets:
        table = Table(title=f"{target.name}: {result.suite}", title_justify="left")
        for column in COLUMNS:
            table.add_column(column, justify="left" if column in ("load", "note") else "right")
        for row in rows(target):
            table.add_row(*row)
        made.append(table)
    return made


def beside_lines(target: TargetResult) -> list[str]:
    """What was gathered beside the loads, a line each, for people."""
    seen = target.beside
    lines = [_log_line(seen["log"])] if seen.get("log") else []
    lines += [_gpu_line(use) for use in seen.get("gpus") or ()]
    if seen.get("locality"):
        lines.append(_locality_line(seen["locality"]))
    if senders := sorted({item.client for item in target.measured} - {OURS}):
        count = sum(item.client in senders for item in target.measured)
        sent = f"{count} of {len(target.measured)} loads sent on the node by {', '.join(senders)}"
        busy = [item.busy_percent for item in target.measured if item.busy_percent is not None]
        lines.append(f"{sent}, which used {max(busy):.0f} % of a core at most" if busy else sent)
    if lags := [item.lag_ms for item in target.measured if item.client == OURS]:
        lines.append(f"our client: late by {max(lags):.1f} ms at most (99th percentile of a run)")
    if (way := seen.get("tunnel_ms")) is not None:
        lines.append(f"tunnel: adds {way:.2f} ms to a round trip{_weight(way, target.measured)}")
    return [*lines, *target.left_out, *(seen.get("notes") or ())]


def _weight(way_ms: float, measured: Sequence[Measured]) -> str:
    """How much of the shortest time to a first token the tunnel is, where that is much."""
    firsts = [bench.summarise(item.values["ttft_ms"]).median for item in measured if item.values["ttft_ms"]]
    share = way_ms / min(firsts) if firsts and min(firsts) > 0 else 0.0
    return f", {share:.0%} of the shortest time to a first token" if share > TUNNEL_SHARE else ""


def _log_line(log: Mapping[str, Any]) -> str:
    named = (
        ("decode", "decode_tok_s", " tok/s"),
        ("P10", "decode_p10", " tok/s"),
        ("prefill", "prefill_tok_s", " tok/s"),
        ("accept length", "accept_length", ""),
        ("accepted", "accept_percent", " %"),
        ("graphs", "graph_percent", " %"),
        ("cache hits", "cache_hit_percent", " %"),
        ("KV cache", "kv_percent_most", " % full at most"),
    )
    said = [f"{word} {log[key]:,.4g}{unit}" for word, key, unit in named if log.get(key) is not None]
    return f"engine log: {log['readings']} readings, {', '.join(said)}"


def _gpu_line(use: Mapping[str, Any]) -> str:
    named = (
        ("used_gib_most", "{:.1f} GiB at most"),
        ("free_gib", "{:.1f} GiB free"),
        ("power_w", "{:.0f} W"),
        ("temperature_c_most", "{:.0f} C at most"),
        ("clock_mhz_p10", "clock P10 {:.0f} MHz"),
        ("throttled_percent", "throttled {:.0f} % of the time"),
    )
    said = [form.format(use[key]) for key, form in named if use.get(key) is not None]
    return f"GPU {use['index']}: {', '.join(said)}"


def _locality_line(where: Mapping[str, Any]) -> str:
    nodes = ", ".join(f"node {node} {size / 2**20:,.0f} MiB" for node, size in where["bytes_by_node"].items())
    local = where.get("local_percent")
    planned = f"; {local:.1f} % on the planned nodes {where['planned_nodes']}" if local is not None else ""
    return f"memory of {where['processes']} processes: {nodes}{planned}"


def bars(target: TargetResult) -> list[str]:
    """Loads with their median rates as bars, for the terminal; nothing for a single load."""
    medians = {label: summary.median for label, summary in target.summaries.items()}
    most = max(medians.values(), default=0.0)
    if len(medians) < 2 or most <= 0:
        return []
    wide = max(map(len, medians))
    return [
        f"{label:>{wide}} {BAR * max(1, round(BAR_WIDTH * value / most))} {value:,.1f} tok/s"
        for label, value in medians.items()
    ]


def verdict_table(found: Against) -> Table:
    """The comparison of two results, for the terminal."""
    from rich.table import Table

    table = Table(title=f"verdict: {found.verdict}", title_justify="left")
    for column in ("load", "verdict", "median", "95 %", "tail", "reason"):
        table.add_column(column)
    for label, item in found.comparisons.items():
        span = (
            f"{item.low:+.1%} to {item.high:+.1%}" if item.low is not None and item.high is not None else "-"
        )
        table.add_row(label, item.verdict, f"{item.median:+.1%}", span, f"{item.tail:+.1%}", item.reason)
    for label in found.missing:
        table.add_row(label, "-", "-", "-", "-", "not measured this time")
    for label in found.unmatched:
        table.add_row(label, "-", "-", "-", "-", "not measured before")
    return table


def as_csv(result: BenchResult) -> str:
    """One line for each run of each load, with a header; for spreadsheets and plotting."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("suite", "target", "model", "load", "run", "cold", *METRICS))
    for target in result.targets:
        for item in target.measured:
            for number, cold in enumerate(item.cold):
                figures = [_nth(item.values[metric], number, len(item.cold)) for metric in METRICS]
                writer.writerow(
                    (result.suite, target.name, target.model, item.load.label, number, int(cold), *figures)
                )
    return out.getvalue()


def _nth(values: Sequence[float], number: int, runs: int) -> str:
    """A run's value; empty when some run gave none, since then it is not known whose the others are."""
    return f"{values[number]:.3f}" if len(values) == runs else ""
