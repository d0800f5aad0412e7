"""From matching lines to findings: which causes are there, how surely, and which one came first."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from bringup import failures
from bringup.evidence import Hit, Hits, Reading

MIN_CONFIDENCE = 0.5
"""Below this a guess is not shown as a finding."""

WEAK = 0.7
"""A root cause less sure than this comes after the surer ones."""

MESSENGER = 0.62
"""A follow-up less sure than this says only that something went wrong: it is no answer without a root beside it."""

LINES_SHOWN = 6
UNUSUAL_SHOWN = 8
SUSPECT_PROCESSES = 3
"""Processes that fault on the same GPU before the GPU rather than the software is suspected."""


@dataclass(frozen=True)
class Context:
    """What is known about where the evidence comes from; None is unknown. `facts` holds the rest."""

    platform: str | None = None
    nvswitch: bool | None = None
    engine: str | None = None
    engine_version: str | None = None
    gpu_count: int | None = None
    arch: str | None = None
    facts: Mapping[str, bool | str | int] = field(default_factory=dict)

    def fact(self, name: str) -> bool | str | int | None:
        """A fact by its name, or None when it is not known."""
        known: bool | str | int | None = getattr(self, name, None) if name != "facts" else None
        return self.facts.get(name) if known is None else known


@dataclass(frozen=True)
class Line:
    """A line that shows a cause."""

    source: str
    number: int
    text: str


@dataclass(frozen=True)
class Finding:
    """One cause found, with all that the operator needs to act on it."""

    cause: str
    title: str
    severity: str
    kind: str
    confidence: float
    count: int
    lines: tuple[Line, ...]
    meaning: str
    check: str
    remedy: str
    runbook: str | None
    preflight: str | None
    gpus: tuple[str, ...]
    hardware_suspect: bool
    sources: tuple[str, ...]


def judge(reading: Reading, library: failures.Library, context: Context) -> tuple[Finding, ...]:
    """The causes the evidence shows, most likely first: roots, then follow-ups, then what is harmless.

    A guess about lines that a surer cause accounts for is left out, and so is a vague messenger without a root.
    """
    context = _with_engine(context, reading.head)
    found = []
    orders: dict[str, set[int]] = {}
    for cause, failure in library.causes.items():
        seen = _seen(failure, reading.hits, context)
        if seen is not None:
            hits, confidence, count = seen
            orders[cause] = {hit.order for hit in hits}
            found.append(_finding(cause, failure, hits, confidence, count))
    sure = [finding.cause for finding in found if finding.confidence >= WEAK]
    known = set().union(*(orders[cause] for cause in sure))
    found = [item for item in found if item.cause in sure or not orders[item.cause] <= known]
    if not any(item.kind == "root" and item.severity != "note" for item in found):
        found = [item for item in found if item.kind == "root" or item.confidence >= MESSENGER]
    return _ranked(found, library, {cause: min(some) for cause, some in orders.items()})


def unusual(reading: Reading, findings: Iterable[Finding]) -> tuple[Line, ...]:
    """Lines that speak of trouble and that no finding shows, one of each kind, the last ones."""
    hits = reading.hits.get(failures.UNUSUAL)
    if hits is None:
        return ()
    shown = {(line.source, line.number) for finding in findings for line in finding.lines}
    kinds: dict[str, Hit] = {}
    for hit in hits.kept():
        if (hit.source, hit.number) not in shown:
            kinds[re.sub(r"\d+", "0", hit.text)] = hit
    return tuple(_line(hit) for hit in list(kinds.values())[-UNUSUAL_SHOWN:])


_ENGINES = (
    ("sglang", re.compile(r"\bsglang\b", re.I)),
    ("vllm", re.compile(r"\bvllm\b", re.I)),
    ("llama.cpp", re.compile(r"\bllama[-_.](?:server|cpp|model|context)|\bggml_", re.I)),
)


def _with_engine(context: Context, head: str) -> Context:
    """The context, with the engine that the first text names most often where none is known."""
    if context.engine:
        return context
    counts = {name: len(pattern.findall(head)) for name, pattern in _ENGINES}
    best = max(counts, key=lambda name: counts[name])
    if not counts[best]:
        return context
    return Context(
        context.platform,
        context.nvswitch,
        best,
        context.engine_version,
        context.gpu_count,
        context.arch,
        context.facts,
    )


def _seen(
    failure: failures.Failure, hits: Mapping[str, Hits], context: Context
) -> tuple[list[Hit], float, int] | None:
    """The lines that show the failure in order, how sure that is and how many lines there were; or None."""
    shown: dict[int, Hit] = {}
    confidence = 0.0
    count = 0
    for clause in failure.match:
        if not _fits(clause, context):
            continue
        lines = _clause_hits(clause, failure.look_alike, hits)
        if lines:
            shown.update({hit.order: hit for hit in lines})
            count = max(count, *(hits[pattern].count for pattern in clause.patterns))
            confidence = max(confidence, clause.confidence)
    if not shown or confidence < MIN_CONFIDENCE:
        return None
    return [shown[order] for order in sorted(shown)], confidence, max(count, len(shown))


def _fits(clause: failures.Clause, context: Context) -> bool:
    if clause.engine and context.engine and context.engine not in clause.engine:
        return False
    version = context.engine_version
    if clause.versions and version and not failures.in_range(version, clause.versions):
        return False
    if any(context.fact(name) != value for name, value in clause.needs.items()):
        return False
    return all(context.fact(name) in (None, value) for name, value in clause.when.items())


def _clause_hits(
    clause: failures.Clause, look_alike: re.Pattern[str] | None, hits: Mapping[str, Hits]
) -> list[Hit]:
    """Lines in which the clause's patterns occur together; none when something rules it out."""
    exceptions = [pattern for pattern in (look_alike, clause.exceptions) if pattern]
    per_pattern = []
    for text in clause.patterns:
        kept = hits[text].kept() if text in hits else []
        found = [hit for hit in kept if not any(pattern.search(hit.text) for pattern in exceptions)]
        if not found:
            return []
        per_pattern.append(found)
    if hits[clause.patterns[-1]].count < clause.times:
        return []
    groups = [_together(first, per_pattern[1:], clause) for first in per_pattern[0]]
    against = [hit for text in clause.none if text in hits for hit in hits[text].kept()]
    return [hit for group in groups if group and not _ruled_out(group, against, clause) for hit in group]


def _together(first: Hit, others: list[list[Hit]], clause: failures.Clause) -> list[Hit]:
    """`first` and a line for each other pattern that is near enough and of the same rank or GPU."""
    group = [first]
    for candidates in others:
        partner = next((hit for hit in candidates if _near(first, hit, clause)), None)
        if partner is None:
            return []
        group.append(partner)
    return group


def _near(one: Hit, other: Hit, clause: failures.Clause) -> bool:
    if clause.within and (one.source != other.source or abs(one.number - other.number) > clause.within):
        return False
    if clause.same == "source":
        return one.source == other.source
    if clause.same == "rank":
        return one.rank is None or other.rank is None or one.rank == other.rank
    if clause.same == "gpu":
        return one.gpu is None or other.gpu is None or one.gpu == other.gpu
    return True


def _ruled_out(group: list[Hit], against: list[Hit], clause: failures.Clause) -> bool:
    if not clause.within:
        return bool(against)
    return any(_near(group[0], hit, clause) for hit in against)


_PID = re.compile(r"\bpid='?(\d+)")


def _finding(
    cause: str, failure: failures.Failure, hits: list[Hit], confidence: float, count: int
) -> Finding:
    gpus: dict[str, set[str]] = {}
    for hit in hits:
        if hit.gpu:
            pid = _PID.search(hit.text)
            gpus.setdefault(hit.gpu, set()).add(pid.group(1) if pid else "")
    suspect = failure.area == "engine" and any(len(pids) >= SUSPECT_PROCESSES for pids in gpus.values())
    check = failure.check
    if suspect:
        check += " The same GPU faulted under several processes: suspect the GPU and run its diagnostics."
    return Finding(
        cause,
        failure.title,
        failure.severity,
        failure.kind,
        round(confidence, 2),
        count,
        _collapsed(hits),
        failure.meaning,
        check,
        failure.remedy,
        failure.runbook,
        failure.preflight,
        tuple(gpus),
        suspect,
        failure.sources,
    )


def _collapsed(hits: list[Hit]) -> tuple[Line, ...]:
    """The first line of each kind (numbers aside): a burst is one line."""
    kinds: dict[str, Hit] = {}
    for hit in hits:
        kinds.setdefault(re.sub(r"0x[0-9a-fA-F]+|\d+", "0", hit.text), hit)
    return tuple(_line(hit) for hit in list(kinds.values())[:LINES_SHOWN])


def _line(hit: Hit) -> Line:
    return Line(hit.source, hit.number, hit.text)


def _ranked(
    found: list[Finding], library: failures.Library, orders: Mapping[str, int]
) -> tuple[Finding, ...]:
    """Most likely first; whatever explains another finding, no less surely, comes before it."""
    explained_by = {
        finding.cause: {
            other.cause
            for other in found
            if finding.cause in library.causes[other.cause].explains and _tier(other) <= _tier(finding)
        }
        for finding in found
    }

    def key(finding: Finding) -> tuple[int, int, float, int]:
        area = failures.AREAS.index(library.causes[finding.cause].area)
        return _tier(finding), area, -finding.confidence, orders[finding.cause]

    waiting = sorted(found, key=key)
    ranked: list[Finding] = []
    while waiting:
        left = {finding.cause for finding in waiting}
        free = next((item for item in waiting if not explained_by[item.cause] & left), waiting[0])
        waiting.remove(free)
        ranked.append(free)
    return tuple(ranked)


def _tier(finding: Finding) -> int:
    """0 a sure root, 1 a likely one, 2 a follow-up, 3 harmless."""
    if finding.severity == "note":
        return 3
    if finding.kind == "follow-up":
        return 2
    return 0 if finding.confidence >= WEAK else 1
