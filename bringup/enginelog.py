"""What engines say about their speed in their logs: one reading a line, for every engine we run.

Formats change with versions, so a line is taken apart by its `name: value` pairs and not by one pattern: a
field that is new is ignored, one that is gone is None. Progress bars share lines with records (`\\r`),
colours are removed, and whatever is no reading is skipped.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from bringup.bench import LOW_ACCEPT_PERCENT, percentile

MAX_LINE = 16_384
"""Characters of a line that are looked at."""

Phase = Literal["decode", "prefill", "speculation", "both"]


@dataclass(frozen=True)
class Reading:
    """One line about speed. Rates in tokens a second over the engine's own interval or request;
    `accept_percent` as this version of the engine counts it (compare lengths, not rates); `graph`: whether a
    CUDA graph was used."""

    phase: Phase
    decode_tok_s: float | None = None
    prefill_tok_s: float | None = None
    running: int | None = None
    queued: int | None = None
    accept_length: float | None = None
    accept_percent: float | None = None
    kv_percent: float | None = None
    cache_hit_percent: float | None = None
    graph: bool | None = None
    new_tokens: int | None = None
    cached_tokens: int | None = None


_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_NUMBER = r"(-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)"


def readings(text: str, log_format: str) -> Iterator[Reading]:
    """The readings of a log. `log_format` is what the engine's catalog entry calls it; a family name in front
    of a version ("sglang-0.5") is enough. An unknown format yields nothing."""
    read = next((read for family, read in _READERS.items() if log_format.startswith(family)), None)
    if read is None:
        return
    for line in lines(text):
        if found := read(line):
            yield found


def lines(text: str) -> Iterator[str]:
    """Records of a log: without colours, progress bars split off."""
    for line in re.split(r"[\r\n]+", _ANSI.sub("", text)):
        if line:
            yield line[:MAX_LINE]


def _value(line: str, name: str) -> float | None:
    """The number after a field's name; None when the field is not there."""
    found = re.search(rf"(?<![\w#]){re.escape(name)}: {_NUMBER}", line)
    return float(found[1]) if found else None


def _whole(line: str, name: str) -> int | None:
    value = _value(line, name)
    return None if value is None else int(value)


def _percent(share: float | None) -> float | None:
    return None if share is None else share * 100


# --- sglang ------------------------------------------------------------------------------------------------

_BATCH = re.compile(r"\b(Decode|Prefill) batch\b")
_GRAPH = re.compile(r"\b\w+ graph: (True|False)")


def _sglang(line: str) -> Reading | None:
    kind = _BATCH.search(line)
    if kind is None:
        return None
    graph = _GRAPH.search(line)
    usage = _value(line, "token usage")
    new, cached = _whole(line, "#new-token"), _whole(line, "#cached-token")
    return Reading(
        phase="decode" if kind[1] == "Decode" else "prefill",
        decode_tok_s=_value(line, "gen throughput (token/s)"),
        prefill_tok_s=_value(line, "input throughput (token/s)"),
        running=_whole(line, "#running-req"),
        queued=_whole(line, "#queue-req"),
        accept_length=_value(line, "accept len"),
        accept_percent=_percent(_value(line, "accept rate")),
        kv_percent=_percent(usage if usage is not None else _value(line, "full token usage")),
        cache_hit_percent=100 * cached / (new + cached) if new and cached is not None else None,
        graph=graph[1] == "True" if graph else None,
        new_tokens=new,
        cached_tokens=cached,
    )


# --- vllm --------------------------------------------------------------------------------------------------

_PERCENT = r"(-?\d+(?:\.\d+)?)%"


def _share(line: str, name: str) -> float | None:
    found = re.search(rf"{re.escape(name)}: {_PERCENT}", line)
    return float(found[1]) if found else None


def _vllm(line: str) -> Reading | None:
    if "Mean acceptance length:" in line:
        return Reading(
            phase="speculation",
            accept_length=_value(line, "Mean acceptance length"),
            accept_percent=_share(line, "Avg Draft acceptance rate"),
        )
    if "Avg generation throughput:" not in line:
        return None
    return Reading(
        phase="both",
        decode_tok_s=_value(line, "Avg generation throughput"),
        prefill_tok_s=_value(line, "Avg prompt throughput"),
        running=_whole(line, "Running"),
        queued=_whole(line, "Waiting"),
        kv_percent=_share(line, "KV cache usage"),
        cache_hit_percent=_share(line, " Prefix cache hit rate"),
    )


# --- llama-server ------------------------------------------------------------------------------------------

_TIMING = re.compile(
    rf"(?P<prompt>prompt )?eval time =\s*{_NUMBER} ms /\s*(?P<tokens>\d+) tokens \(.*?,\s*(?P<rate>{_NUMBER})"
    r" tokens per second\)"
)
_DRAFTED = re.compile(r"draft acceptance(?: rate)? = (\d+\.\d+)(?:.*?mean len = +(\d+\.\d+))?")


def _llama(line: str) -> Reading | None:
    drafted = _DRAFTED.search(line)
    if drafted:
        length = float(drafted[2]) if drafted[2] else None
        return Reading(phase="speculation", accept_length=length, accept_percent=float(drafted[1]) * 100)
    found = _TIMING.search(line)
    if found is None:
        return None
    rate = float(found["rate"])
    if found["prompt"]:
        return Reading(phase="prefill", prefill_tok_s=rate, new_tokens=int(found["tokens"]))
    return Reading(phase="decode", decode_tok_s=rate)


_READERS: dict[str, Callable[[str], Reading | None]] = {
    "sglang": _sglang,
    "vllm": _vllm,
    "llama": _llama,
}


# --- a whole log -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LogSummary:
    """What a log says altogether: medians over readings in which something ran, and how often graphs were
    used.

    `low_accept`: readings with an acceptance below 60 %, as the engine counts it."""

    readings: int
    decode_tok_s: float | None
    decode_p10: float | None
    prefill_tok_s: float | None
    accept_length: float | None
    accept_percent: float | None
    low_accept: int
    graph_percent: float | None
    cache_hit_percent: float | None
    queued_most: int
    kv_percent_most: float | None = None


def summarise(found: Iterable[Reading]) -> LogSummary:
    """A summary of readings; all None and nought for none."""
    every = list(found)
    decode = _known(
        item.decode_tok_s for item in every if item.phase in ("decode", "both") and item.decode_tok_s
    )
    graphs = [item.graph for item in every if item.graph is not None and item.phase == "decode"]
    percents = _known(item.accept_percent for item in every)
    return LogSummary(
        readings=len(every),
        decode_tok_s=_median(decode),
        decode_p10=percentile(decode, 0.1) if decode else None,
        prefill_tok_s=_median(_known(item.prefill_tok_s for item in every if item.prefill_tok_s)),
        accept_length=_median(_known(item.accept_length for item in every)),
        accept_percent=_median(percents),
        low_accept=sum(percent < LOW_ACCEPT_PERCENT for percent in percents),
        graph_percent=100 * sum(graphs) / len(graphs) if graphs else None,
        cache_hit_percent=_cache(every),
        queued_most=max((item.queued or 0 for item in every), default=0),
        kv_percent_most=max(_known(item.kv_percent for item in every), default=None),
    )


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def _cache(every: list[Reading]) -> float | None:
    """Cached share of all prompt tokens where a log counts them, else the engine's last own figure."""
    new = sum(item.new_tokens or 0 for item in every)
    cached = [item.cached_tokens for item in every if item.cached_tokens is not None]
    if cached and new + sum(cached):
        return 100 * sum(cached) / (new + sum(cached))
    stated = _known(item.cache_hit_percent for item in every)
    return stated[-1] if stated else None
