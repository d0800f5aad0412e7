"""An engine's `/metrics` page: its samples, and the few of them that we know under our own names.

The engine's catalog entry maps our names to its own (`Engine.metrics`). A page is never refused: lines that
are no samples are left out, so a new engine version costs a name, not a measurement.

Our names: `running`, `waiting`, `kv_usage`, `generation_tokens_per_second`, `prompt_tokens_total`,
`generation_tokens_total`, `requests_total` (answered), `steps_total` (batches computed, those of prefills
too), `cached_tokens_total`, `uncached_tokens_total` (where prompt tokens leave cached ones out),
`cache_queries_total`, `cache_hits_total`, `cache_hit_rate`, `accept_length`, `drafts_total` (verification steps),
`drafted_tokens_total`, `accepted_tokens_total`, `draft_tokens` (a step's tokens, the verified root among
them).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from bringup.node.common import AVERAGED
from bringup.node.drafting import accept_length, grown

MAX_LINE = 16_384
"""Characters of a line that are looked at."""
_SAMPLE = re.compile(
    r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)"
    r'(?:\{(?P<labels>(?:[^"{}]|"(?:[^"\\]|\\.)*")*)\})?'
    r"\s+(?P<value>[^\s#]+)(?:\s+-?\d+(?:\.\d+)?)?\s*(?:#.*)?"
)
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(r"\\(.)")


@dataclass(frozen=True)
class Sample:
    """One line of a page: name, labels, value (never NaN)."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class Page:
    """A parsed page."""

    samples: tuple[Sample, ...] = ()
    by_name: Mapping[str, tuple[Sample, ...]] = field(default_factory=dict)

    def values(self, name: str, **labels: str) -> tuple[float, ...]:
        """Values of a metric's samples that have these labels."""
        found = self.by_name.get(name, ())
        return tuple(s.value for s in found if all(s.labels.get(key) == want for key, want in labels.items()))

    def named(self, names: Mapping[str, str]) -> dict[str, float]:
        """Values under our names; a name that the page does not have is left out."""
        result: dict[str, float] = {}
        for ours, theirs in names.items():
            values = self.values(theirs)
            if values:
                result[ours] = sum(values) / (len(values) if ours in AVERAGED else 1)
        return result


def parse(text: str) -> Page:
    """The samples of a page in the Prometheus text format (or OpenMetrics)."""
    samples = [sample for line in text.splitlines() if (sample := _sample(line[:MAX_LINE].strip()))]
    by_name: dict[str, list[Sample]] = {}
    for sample in samples:
        by_name.setdefault(sample.name, []).append(sample)
    return Page(tuple(samples), {name: tuple(found) for name, found in by_name.items()})


def _sample(line: str) -> Sample | None:
    found = _SAMPLE.fullmatch(line) if line and not line.startswith("#") else None
    if found is None:
        return None
    try:
        value = float(found["value"])
    except ValueError:
        return None
    if math.isnan(value):
        return None
    labels = {name: _ESCAPE.sub(_unescape, text) for name, text in _LABEL.findall(found["labels"] or "")}
    return Sample(found["name"], labels, value)


def _unescape(found: re.Match[str]) -> str:
    return {"n": "\n"}.get(found[1], found[1])


# --- what happened between two pages -----------------------------------------------------------------------


@dataclass(frozen=True)
class Between:
    """What an engine counted between two readings of its page. None: it does not say, or nothing happened."""

    prompt_tokens: float | None = None
    generation_tokens: float | None = None
    accept_length: float | None = None
    accept_percent: float | None = None
    cache_hit_percent: float | None = None


def between(before: Mapping[str, float], after: Mapping[str, float]) -> Between:
    """From two readings under our names. A counter that fell (the server was restarted) counts from nought.

    Acceptance comes from counters, so it is exact for what lies between; a gauge shows the last log interval
    only.
    """
    drafted = grown(before, after, "drafted_tokens_total")
    accepted = grown(before, after, "accepted_tokens_total")
    generated = grown(before, after, "generation_tokens_total")
    length = accept_length(before, after)
    percent = 100 * accepted / drafted if drafted and accepted is not None else None
    if percent is None and length is not None and after.get("draft_tokens", 0) > 1:
        percent = 100 * (length - 1) / (after["draft_tokens"] - 1)
    return Between(
        prompt_tokens=grown(before, after, "prompt_tokens_total"),
        generation_tokens=generated,
        accept_length=length,
        accept_percent=percent,
        cache_hit_percent=_cache_hits(before, after),
    )


def _cache_hits(before: Mapping[str, float], after: Mapping[str, float]) -> float | None:
    hits, queries = grown(before, after, "cache_hits_total"), grown(before, after, "cache_queries_total")
    if hits is not None and queries:
        return 100 * hits / queries
    cached, fresh = (
        grown(before, after, "cached_tokens_total"),
        grown(before, after, "uncached_tokens_total"),
    )
    prompt = grown(before, after, "prompt_tokens_total") if fresh is None else fresh + (cached or 0.0)
    return 100 * cached / prompt if cached is not None and prompt else None
