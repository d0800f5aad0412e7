"""Measurements and what may be concluded from them.

A series is every run of one load, in order, nothing discarded. Rates are tokens a second, times milliseconds
when a name ends in `_ms`. Percentiles interpolate linearly; confidence intervals are scipy's bootstrap of the
median with a fixed seed, so the same numbers always give the same verdict. docs/bench-and-tune.md gives the
reasons for each limit.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np

RESAMPLES = 2000
CONFIDENCE = 0.95
SEED = 20260420
FEWEST_FOR_INTERVAL = 3
"""Fewer runs have a median, and nothing can be said about how sure it is."""
NOISE_LIMIT = 0.10
"""A median whose interval is wider than this share of it, to either side, is too noisy to conclude from."""
SAME_WITHIN = 0.03
"""A difference below this share is no difference to a user."""
LOW_ACCEPT_PERCENT = 60.0
"""Runs below it are the low tail of acceptance that the second source counts."""
WARM_UP_STEP = 0.05
WARM_UP_MOST = 5
FEW_VALUES = {2: 1.196, 3: 1.495, 4: 1.363, 5: 1.206, 6: 1.200, 7: 1.140, 8: 1.129, 9: 1.107}
"""How much too small the median deviation of so many values is."""
DRIFT_STEP = 0.03
DRIFT_CHANCE = 0.01
"""A trend that chance makes more often than once in a hundred series is none."""
DRIFT_FEWEST = 6

Verdict = Literal["better", "same", "worse", "cannot tell"]


@dataclass(frozen=True)
class Load:
    """One load: tokens in, tokens out, requests at once; `rate` requests a second for an open loop, else
    None."""

    prompt_tokens: int
    output_tokens: int
    concurrent: int = 1
    rate: float | None = None
    note: str = ""

    @property
    def label(self) -> str:
        """Such as "2048->512", "4x 2048->64" or "256->128 at 2/s"."""
        shape = f"{self.prompt_tokens}->{self.output_tokens}"
        shape = f"{self.concurrent}x {shape}" if self.concurrent > 1 else shape
        shape = f"{shape} at {self.rate:g}/s" if self.rate else shape
        return f"{shape} ({self.note})" if self.note else shape


@dataclass(frozen=True)
class Request:
    """One request as the client saw it. Seconds since the run began; tokens from the server's own `usage`."""

    began: float
    first_token: float | None
    ended: float
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""

    @property
    def ttft_ms(self) -> float | None:
        """Time to the first token; None when none came."""
        return None if self.first_token is None else (self.first_token - self.began) * 1000

    @property
    def tpot_ms(self) -> float | None:
        """Time for each token after the first; None when there is no second one."""
        if self.first_token is None or self.output_tokens < 2:
            return None
        return (self.ended - self.first_token) * 1000 / (self.output_tokens - 1)

    @property
    def tok_s(self) -> float:
        """Output tokens a second, from sending to the last token."""
        took = self.ended - self.began
        return self.output_tokens / took if took > 0 else 0.0


@dataclass(frozen=True)
class Run:
    """One repetition of a load. `accept_length`: tokens a verification step yields, the bonus token counted;
    `accept_percent`: drafted tokens that were accepted. None without speculation (or when not to be had)."""

    wall_s: float
    requests: tuple[Request, ...]
    cold: bool = False
    accept_length: float | None = None
    accept_percent: float | None = None

    @property
    def good(self) -> tuple[Request, ...]:
        """The requests that were answered."""
        return tuple(request for request in self.requests if not request.error)

    @property
    def errors(self) -> int:
        """How many were not."""
        return len(self.requests) - len(self.good)

    @property
    def output_tok_s(self) -> float:
        """Output tokens of all requests together, a second; of a single one, its own rate."""
        if len(self.requests) == 1 and self.good:
            return self.good[0].tok_s
        return sum(request.output_tokens for request in self.good) / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def total_tok_s(self) -> float:
        """Prompt and output tokens together, a second."""
        tokens = sum(request.prompt_tokens + request.output_tokens for request in self.good)
        return tokens / self.wall_s if self.wall_s > 0 else 0.0


@dataclass(frozen=True)
class Series:
    """All runs of one load, in the order they were made."""

    load: Load
    runs: tuple[Run, ...]

    def values(self, metric: str = "output_tok_s", *, warm_only: bool = False) -> tuple[float, ...]:
        """A metric of each run: `output_tok_s`, `total_tok_s`, or the median of its requests'
        `ttft_ms`/`tpot_ms`."""
        runs = [run for run in self.runs if not (warm_only and run.cold)]
        found = (_metric(run, metric) for run in runs)
        return tuple(value for value in found if value is not None)


def _metric(run: Run, metric: str) -> float | None:
    if metric in ("ttft_ms", "tpot_ms"):
        values = [value for request in run.good if (value := getattr(request, metric)) is not None]
        return statistics.median(values) if values else None
    value = getattr(run, metric)
    return None if value is None else float(value)


# --- statistics --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Statistics:
    """What a list of values says. `low`/`high`: 95 % interval of the median, None below three values."""

    count: int
    median: float
    mean: float
    minimum: float
    maximum: float
    p10: float
    p90: float
    cv: float
    low: float | None
    high: float | None

    @property
    def conclusive(self) -> bool:
        """Whether the median is known well enough to compare it with something."""
        if self.low is None or self.high is None or not self.median:
            return False
        return max(self.high - self.median, self.median - self.low) <= NOISE_LIMIT * abs(self.median)


def percentile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between the two nearest of the sorted values; `share` from 0 to 1."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def variation(values: Sequence[float]) -> float:
    """Standard deviation (of the population) as a share of the mean."""
    mean = statistics.fmean(values)
    return statistics.pstdev(values) / mean if mean else 0.0


def summarise(values: Sequence[float]) -> Statistics:
    """Statistics of one or more values. Raises ValueError for none."""
    if not values:
        raise ValueError("no run gave a value")
    low, high = interval(values)
    return Statistics(
        count=len(values),
        median=statistics.median(values),
        mean=statistics.fmean(values),
        minimum=min(values),
        maximum=max(values),
        p10=percentile(values, 0.1),
        p90=percentile(values, 0.9),
        cv=variation(values),
        low=low,
        high=high,
    )


def interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    """The 95 % bootstrap interval of the median."""
    if len(values) < FEWEST_FOR_INTERVAL:
        return None, None

    def median(sample: np.ndarray, axis: int = -1) -> Any:
        import numpy as np

        return np.median(sample, axis=axis)

    return _bootstrap([values], median)


def _bootstrap(samples: Sequence[Sequence[float]], statistic: Callable[..., Any]) -> tuple[float, float]:
    """Ends of the 95 % percentile interval of a statistic of one or more samples, each resampled."""
    import numpy as np
    from scipy import stats

    found = stats.bootstrap(
        tuple(np.asarray(sample, dtype=float) for sample in samples),
        statistic,
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(SEED),
    ).confidence_interval
    return float(found.low), float(found.high)


def warm_up_runs(values: Sequence[float]) -> int:
    """How many runs at the start are still warm-up: clearly below all that follows.

    A run counts when it is more than 5 % and more than three robust deviations below the median of the runs
    after it. They are reported, not thrown away.
    """
    for cut in range(min(WARM_UP_MOST, len(values) // 2) + 1):
        rest = values[cut + 1 :]
        if len(rest) < FEWEST_FOR_INTERVAL:
            # Too few to judge this one by; those before it were.
            return cut
        middle, spread = statistics.median(rest), robust_deviation(rest)
        if values[cut] >= middle - max(WARM_UP_STEP * abs(middle), 3 * spread):
            return cut
    return 0


def robust_deviation(values: Sequence[float]) -> float:
    """What the standard deviation would be without outliers: from the median of what each differs from the median, with
    the correction for few values (Croux and Rousseeuw 1992, table 1)."""
    middle, count = statistics.median(values), len(values)
    correction = FEW_VALUES.get(count) or count / (count - 0.8)
    return float(1.4826 * correction * statistics.median([abs(value - middle) for value in values]))


def drift(values: Sequence[float]) -> float:
    """The share by which a series rises or falls from its first to its last run; 0.0 when that may be chance.

    Mann-Kendall decides whether there is a trend, Theil-Sen how steep it is.
    """
    count = len(values)
    middle = statistics.median(values) if values else 0.0
    if count < DRIFT_FEWEST or min(values) == max(values) or not middle:
        return 0.0
    from scipy import stats

    if stats.kendalltau(range(count), values).pvalue > DRIFT_CHANCE:
        return 0.0
    change = float(stats.theilslopes(values).slope) * (count - 1) / middle
    return change if abs(change) >= DRIFT_STEP else 0.0


# --- summaries, measured or recorded -----------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """What is kept of one load under one setting: from our own runs, or from a table that somebody recorded.

    `p10` and `cv` None: not recorded. `low_accept`: runs whose acceptance was below 60 %.
    """

    median: float
    runs: int = 1
    p10: float | None = None
    minimum: float | None = None
    cv: float | None = None
    accept_length: float | None = None
    accept_percent: float | None = None
    low_accept: int = 0
    errors: int = 0
    values: tuple[float, ...] = ()

    @property
    def tail(self) -> float:
        """The lower tail as far as it is known: P10, else the worst run, else the median itself."""
        if self.p10 is not None:
            return self.p10
        return self.minimum if self.minimum is not None else self.median


def warm(summary: Summary) -> Summary:
    """The same of what follows the runs that were warm-up; as it is where there were none, or no single run is kept."""
    left = summary.values[warm_up_runs(summary.values) :]
    if left == summary.values:
        return summary
    stats = summarise(left)
    return replace(
        summary,
        median=stats.median,
        runs=stats.count,
        p10=stats.p10,
        minimum=stats.minimum,
        cv=stats.cv,
        values=left,
    )


# --- comparing ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """A verdict on one load with its numbers: share by which the median changed, its interval, and the tail's
    change.

    Changes are signed so that more is better, also for times."""

    verdict: Verdict
    median: float
    low: float | None
    high: float | None
    tail: float
    reason: str


def compare(
    before: Summary, after: Summary, *, higher_is_better: bool = True, same_within: float = SAME_WITHIN
) -> Comparison:
    """Is `after` better than `before`?

    Better or worse needs the whole interval of the change beyond nought and its middle beyond `same_within`;
    same needs the whole interval within it. A better median with a clearly worse lower tail is not called
    better.
    """
    change, low, high = _change(before, after)
    tail = after.tail / before.tail - 1 if before.tail else 0.0
    if not higher_is_better:
        change, low, high, tail = -change, _minus(high), _minus(low), -tail
    if low is None or high is None:
        return Comparison(
            "cannot tell", change, low, high, tail, "too few runs to know how sure the median is"
        )
    known = before.p10 is not None and after.p10 is not None and higher_is_better
    if low > 0 and change >= same_within:
        if known and tail < -same_within:
            return Comparison(
                "cannot tell", change, low, high, tail, "the median rose and the lower tail fell"
            )
        return Comparison("better", change, low, high, tail, "the whole interval lies above")
    if high < 0 and change <= -same_within:
        return Comparison("worse", change, low, high, tail, "the whole interval lies below")
    if -same_within <= low and high <= same_within:
        return Comparison(
            "same", change, low, high, tail, f"the whole interval lies within {same_within:.0%}"
        )
    return Comparison("cannot tell", change, low, high, tail, "too noisy to conclude: make more runs")


def _minus(value: float | None) -> float | None:
    return None if value is None else -value


def _change(before: Summary, after: Summary) -> tuple[float, float | None, float | None]:
    """Change of the median as a share, with its 95 % interval: by bootstrap, else from recorded spreads."""
    change = after.median / before.median - 1 if before.median else 0.0
    if min(len(before.values), len(after.values)) >= FEWEST_FOR_INTERVAL:
        return change, *_bootstrap_change(before.values, after.values)
    errors = [_median_error(before), _median_error(after)]
    if None in errors or not before.median:
        return change, None, None
    width = 1.96 * math.hypot(*(error for error in errors if error is not None)) * (1 + change)
    return change, change - width, change + width


def _bootstrap_change(before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    def change(first: np.ndarray, second: np.ndarray, axis: int = -1) -> Any:
        import numpy as np

        return np.median(second, axis=axis) / np.maximum(np.median(first, axis=axis), 1e-9) - 1

    return _bootstrap([before, after], change)


def _median_error(summary: Summary) -> float | None:
    """Standard error of a median as a share of it: of normal values 1.2533 times that of the mean."""
    if len(summary.values) >= FEWEST_FOR_INTERVAL:
        return 1.2533 * variation(summary.values) / math.sqrt(len(summary.values))
    if summary.cv is None or summary.runs < FEWEST_FOR_INTERVAL:
        return None
    return 1.2533 * summary.cv / math.sqrt(summary.runs)


def overall(comparisons: Mapping[str, Comparison]) -> Verdict:
    """One verdict over all loads: worse when any is, better when some are and none is in doubt."""
    verdicts = {comparison.verdict for comparison in comparisons.values()}
    if "worse" in verdicts:
        return "worse"
    if "cannot tell" in verdicts or not verdicts:
        return "cannot tell"
    return "better" if "better" in verdicts else "same"


# --- acceptance --------------------------------------------------------------------------------------------

RATE_CHANGED_IN = (0, 5, 11)
"""The SGLang release whose logged accept rate no longer counts the bonus token."""


def accept_length(rate: float, draft_tokens: int, engine: str, version: str = "") -> float:
    """Tokens a verification step yields, from a logged accept rate (0 to 1), which each engine means
    differently.

    SGLang up to 0.5.10: length / draft tokens; from 0.5.11: (length - 1) / (draft tokens - 1), where draft
    tokens count the verified root. vLLM and llama-server: accepted / drafted, so length = 1 + rate x drafted.
    Lengths can be compared across all of them, rates cannot.
    """
    if engine != "sglang":
        return 1 + rate * draft_tokens
    if _release(version) < RATE_CHANGED_IN:
        return rate * draft_tokens
    return 1 + rate * (draft_tokens - 1)


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def quality(series: Series, metric: str = "output_tok_s") -> tuple[str, ...]:
    """What a reader must know before using a series: errors, warm-up, drift, noise; () when it is clean."""
    values = series.values(metric)
    checks: list[tuple[bool, Callable[[], str]]] = []
    errors = sum(run.errors for run in series.runs)
    checks.append((errors > 0, lambda: f"{errors} requests failed"))
    if not values:
        return tuple(text() for wrong, text in checks if wrong) or ("no run gave a value",)
    warm_up, moved = warm_up_runs(values), drift(values[warm_up_runs(values) :])
    stats = summarise(values[warm_up:])
    checks += [
        (warm_up > 0, lambda: f"the first {warm_up} of {len(values)} runs were warm-up"),
        (moved != 0, lambda: f"drifts by {moved:+.0%} over the series"),
        (
            stats.count >= FEWEST_FOR_INTERVAL and not stats.conclusive,
            lambda: "too noisy to conclude from",
        ),
        (
            stats.count < FEWEST_FOR_INTERVAL,
            lambda: f"{stats.count} of the {FEWEST_FOR_INTERVAL} runs that an interval needs",
        ),
    ]
    return tuple(text() for wrong, text in checks if wrong)
