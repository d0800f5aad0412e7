"""Known failures: one YAML file a cause, its patterns compiled to one fast prefilter."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from bringup import ROOT, entries, logtext, multifind, yamlfile
from bringup.errors import Problem, UsageError

FOLDER = ROOT / "catalog" / "failures"
RUNBOOKS = ROOT / "playbooks" / "runbooks"

Severity = Literal["error", "warning", "note"]
Kind = Literal["root", "follow-up"]
AREAS = (
    "hardware",
    "driver",
    "fabric",
    "system",
    "container",
    "network",
    "environment",
    "download",
    "model",
    "configuration",
    "engine",
)
"""Where a cause lives, from the metal up: of two causes in one log the lower one is looked at first."""


class Clause(entries.Entry):
    """One way to see a cause: patterns that must all be there, others that must not, and the context."""

    all: tuple[str, ...] = Field(default=(), description="regular expressions, each matched within one line")
    line: str | None = Field(default=None, description="short for `all` with one pattern")
    xid: tuple[int, ...] = Field(default=(), description="short for the GPU error codes of the NVIDIA driver")
    trouble: str | None = Field(
        default=None, description="short for a subject (an expression) beside a word of trouble"
    )
    both: tuple[str, ...] = Field(
        default=(), description="short for two expressions in one line, in either order"
    )
    unless: tuple[str, ...] = Field(default=(), description="not a line that matches one of these too")
    none: tuple[str, ...] = Field(
        default=(), description="another line that matches one of these rules it out"
    )
    within: int = Field(
        default=0, ge=0, description="lines between the patterns; 0: anywhere in the evidence"
    )
    same: Literal["rank", "gpu", "source"] | None = None
    times: int = Field(default=1, ge=1, description="matching lines needed of the last pattern")
    engine: tuple[str, ...] = Field(default=(), description="only for these engines (unknown passes)")
    versions: str = Field(default="", description="engine versions such as `>=0.5.13,<0.6` (unknown passes)")
    when: dict[str, bool | str | int] = Field(default={}, description="facts; an unknown fact passes")
    needs: dict[str, bool | str | int] = Field(default={}, description="facts that must be known to be so")
    confidence: float = Field(default=0.9, gt=0, le=1)

    @model_validator(mode="after")
    def _has_pattern(self) -> Clause:
        if not self.patterns:
            raise ValueError("needs `line`, `xid`, `trouble`, `both` or `all`")
        return self

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns that must match, `line` first."""
        xid = (xid_pattern(self.xid),) if self.xid else ()
        trouble = (trouble_pattern(self.trouble),) if self.trouble else ()
        both = (both_pattern(*self.both),) if self.both else ()
        return ((self.line,) if self.line else ()) + xid + trouble + both + self.all

    @cached_property
    def exceptions(self) -> re.Pattern[str] | None:
        """What a line that matches must not match too; a notice is no trouble."""
        return any_of((*self.unless, NOTICE) if self.trouble or self.both else self.unless)

    @field_validator("unless")
    @classmethod
    def _expressions(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return _checked(value)

    @field_validator("both")
    @classmethod
    def _usable_pair(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if value:
            if len(value) != 2:
                raise ValueError("needs two expressions")
            _checked(value)
            _usable_pattern(both_pattern(*value))
        return value

    @field_validator("trouble")
    @classmethod
    def _usable_subject(cls, value: str | None) -> str | None:
        if value:
            _checked((value,))
            _usable_pattern(value)
        return value

    @field_validator("line", "all", "none")
    @classmethod
    def _usable(cls, value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        for pattern in (value,) if isinstance(value, str) else value or ():
            try:
                _usable_pattern(pattern)
            except re.error as error:
                raise ValueError(f"not a regular expression: {error}: {pattern}") from None
        return value


def xid_pattern(codes: Sequence[int]) -> str:
    """Any of these Xid codes, as the kernel, monitoring agents, DCGM metrics and people write them.

    Source: https://docs.nvidia.com/deploy/xid-errors/
    """
    listed = "|".join(str(code) for code in codes)
    between = (
        r"(?:[\s:=#>`'\"(-]|pci:[\w:.]+|gpu-c?i:\d+|[0-9a-f]{4,8}:[\w:.]+|\)"
        r"|errors?\b|codes?\b|events?\b|number\b){0,8}"
    )
    return rf"\bxids?\b{between}(?<!\w)(?:{listed})(?![\w.:])|xid_errors?\{{[^}}]*\}}\s+(?:{listed})\b"


TROUBLE = (
    r"(?:(?:fail(?:ed|s|ure|ing)?|errors?)\b|\b(?:unable|cannot|missing|denied|refused|invalid|unavailable|broken|rejected"
    r"|corrupt\w*|mismatch\w*|incompatible|unsupported|abort\w*|crash\w*|hang|hangs|hung|stuck|dead|died|lost"
    r"|conflict\w*|exceeded|exhausted|insufficient|unexpected|exception|panic|wrong|bad|non-zero)\b"
    r"|\bcould(?:n.t| not)\b|\bcan.t\b|\bdoes(?:n.t| not)\b|\btime(?:d ?)?-?out\b|\bno such\b"
    r"|\bnot (?:be )?(?:found|available|supported|allowed|permitted|loaded|running|configured|detected|installed"
    r"|working|accessible|reachable|ready|initiali[sz]ed|enough|match\w*|valid|exist|writable)\b"
    r"|\btoo (?:small|low|many|old|few)\b)"
)
"""What programs say when something is wrong, whatever it is."""

NOTICE = (
    r"\b(?:INFO|DEBUG|TRACE)\b|level=(?:info|debug)|<(?:info|debug)>|\b(?:no|0|without|zero) errors?\b"
    r"|errors?\s*[:=]\s*0\b|deprecat|will be ignored|can be ignored|safely ignore|fall\w* back|disabling|skipping"
    r"|ignoring|successful|succeeded|recovered|retrying|non-?fatal"
)
"""What a line says that only mentions trouble."""


def trouble_pattern(subject: str) -> str:
    """The subject beside a word of trouble, in either order."""
    return rf"(?:{subject}).{{0,80}}?{TROUBLE}|{TROUBLE}.{{0,60}}?(?:{subject})"


def both_pattern(one: str, other: str) -> str:
    """Both expressions within a sentence of each other, in either order."""
    return rf"(?:{one}).{{0,120}}?(?:{other})|(?:{other}).{{0,120}}?(?:{one})"


def _checked(patterns: tuple[str, ...]) -> tuple[str, ...]:
    """The patterns. Raises ValueError when one is not a regular expression."""
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}: {pattern}") from None
    return patterns


def any_of(patterns: Sequence[str]) -> re.Pattern[str] | None:
    """One expression for any of the patterns, None for none."""
    joined = "|".join(f"(?:{pattern})" for pattern in patterns)
    return re.compile(joined, re.IGNORECASE | re.ASCII) if joined else None


def _usable_pattern(pattern: str) -> None:
    """Raises ValueError or re.error when the pattern cannot be used as a rule."""
    for text in logtext.alternatives(pattern):
        logtext.needs_of(text)


class Failure(entries.Entry):
    """One cause: how it shows, what it means, how to be sure, what to do."""

    title: str
    area: Literal[
        "hardware",
        "driver",
        "fabric",
        "system",
        "container",
        "network",
        "environment",
        "download",
        "model",
        "configuration",
        "engine",
    ]
    kind: Kind = "root"
    severity: Severity = "error"
    match: tuple[Clause, ...]
    benign: tuple[str, ...] = Field(default=(), description="look-alike lines that are not this cause")
    explains: tuple[str, ...] = Field(default=(), description="causes that follow from this one")
    meaning: str
    check: str
    remedy: str
    runbook: str | None = None
    preflight: str | None = Field(
        default=None, description="what to check before a start so that it is not met"
    )
    samples: tuple[str, ...] = Field(min_length=1, description="texts in which the rule must find its cause")
    sources: tuple[str, ...] = Field(min_length=1)

    @cached_property
    def look_alike(self) -> re.Pattern[str] | None:
        """Lines that match this are not evidence."""
        return any_of(self.benign)

    @field_validator("benign")
    @classmethod
    def _expressions(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return _checked(value)


_TIMES = re.compile(r"\{\d*,?\d*\}")
_NUMBER = re.compile(r"\\d|\d")
_HAS_DIGIT = re.compile(rb"\d")
_LETTER = re.compile(rb"[g-z\x80-\xff]")
_OPENING = re.compile(r"^(?:\\b|\(\?:|\^|\\s\*)+")


@dataclass(frozen=True, eq=False)
class Piece:
    """One alternative of a clause's pattern: the texts a line must contain, cheapest first, and the rest.

    `pattern` is the whole pattern as the clause has it. `needs`: of each set at least one text is in the line.
    """

    pattern: str
    text: str
    needs: tuple[frozenset[bytes], ...]

    @cached_property
    def regex(self) -> re.Pattern[str]:
        """Compiled when first needed: a log touches few of the rules."""
        return re.compile(self.text, re.IGNORECASE | re.ASCII)

    @cached_property
    def others(self) -> tuple[tuple[bytes, ...], ...]:
        """What the line must contain beside the text that led to it."""
        edge = logtext.EDGE.encode()
        return tuple(tuple(text.strip(edge) for text in texts) for texts in self.needs[1:])

    def numeric(self, anchor: bytes) -> Numeric:
        """Where numbers decide whether it matches: after the anchor when the pattern begins with it."""
        if not _NUMBER.search(_TIMES.sub("", self.text)):
            return Numeric.NOWHERE
        begin = _OPENING.sub("", self.text).lower().encode()
        return Numeric.AFTER if begin.startswith(anchor.strip(multifind.EDGE)) else Numeric.ANYWHERE

    def may_match(self, lowered: bytes) -> bool:
        """Whether the lower-case line has all it must contain."""
        return all(any(text in lowered for text in texts) for texts in self.others)


class Numeric(IntEnum):
    """Where the numbers stand that the patterns of an anchor ask for."""

    NOWHERE = 0
    AFTER = 1
    ANYWHERE = 2


@dataclass(frozen=True)
class Tables:
    """The anchors by number: what finds them, their texts, the pieces of each, where its numbers count (Numeric).

    `numbered` finds the texts that have digits, or no letter beyond those of numbers.
    """

    finder: multifind.Finder
    texts: tuple[bytes, ...]
    numbered: multifind.Finder
    pieces: tuple[tuple[Piece, ...], ...]
    numeric: tuple[int, ...]


@dataclass(frozen=True)
class Library:
    """All causes by name, all their patterns, and what finds candidate lines quickly."""

    causes: Mapping[str, Failure]
    by_anchor: Mapping[bytes, tuple[Piece, ...]] = field(repr=False)

    @cached_property
    def tables(self) -> Tables:
        """Ready for reading."""
        texts = tuple(anchor.strip(multifind.EDGE) for anchor in self.by_anchor)
        return Tables(
            multifind.Finder(self.by_anchor),
            texts,
            multifind.Finder({text for text in texts if _HAS_DIGIT.search(text) or not _LETTER.search(text)}),
            tuple(self.by_anchor.values()),
            tuple(
                int(max(piece.numeric(anchor) for piece in pieces))
                for anchor, pieces in self.by_anchor.items()
            ),
        )


UNUSUAL = (
    r"\b(?:error|fatal|critical|exception|panic(?:ked)?|segfault|segmentation fault|core dumped|aborted|"
    r"traceback|killed|unable to|cannot|failed)\b"
)
"""Lines worth showing when no cause is known."""


def library(folder: Path = FOLDER) -> Library:
    """Every failure of the folder, compiled; the same object while no file has changed.

    Raises UsageError with the problems of every file.
    """
    return _library(*stamped(folder))


def stamped(folder: Path) -> tuple[Path, tuple[tuple[str, int], ...]]:
    """The folder and its files with the times of their last change."""
    return folder, tuple((path.name, path.stat().st_mtime_ns) for path in sorted(folder.glob("*.yml")))


@lru_cache(maxsize=4)
def _library(folder: Path, stamp: tuple[tuple[str, int], ...]) -> Library:
    return compile_library(load(folder))


def load(folder: Path = FOLDER) -> dict[str, Failure]:
    """Failures by cause (the file's name). Raises UsageError with every problem of every file."""
    causes: dict[str, Failure] = {}
    problems: list[Problem] = []
    for path in sorted(folder.glob("*.yml")):
        try:
            causes[path.stem] = entries.build(Failure, yamlfile.read_yaml(path, path.name), path.name)
        except UsageError as error:
            problems.extend(error.problems)
    for cause, failure in causes.items():
        problems.extend(
            Problem(f"{cause}.yml: explains", f'names "{other}", which has no file')
            for other in failure.explains
            if other not in causes
        )
    if problems:
        raise UsageError(problems)
    return causes


def compile_library(causes: Mapping[str, Failure]) -> Library:
    """The library of these causes."""
    by_anchor: dict[bytes, list[Piece]] = {}
    for pattern in _texts(causes.values()):
        for text in logtext.alternatives(pattern):
            piece = Piece(pattern, text, logtext.needs_of(text))
            for anchor in piece.needs[0]:
                by_anchor.setdefault(anchor, []).append(piece)
    return Library(causes, {key: tuple(value) for key, value in by_anchor.items()})


def _texts(causes: Iterable[Failure]) -> list[str]:
    """Every distinct pattern text."""
    texts: dict[str, None] = {UNUSUAL: None}
    for failure in causes:
        for clause in failure.match:
            texts.update(dict.fromkeys([*clause.patterns, *clause.none]))
    return list(texts)


def runbook_exists(name: str, folder: Path = RUNBOOKS) -> bool:
    """Whether playbooks/runbooks has it."""
    return (folder / f"{name}.yml").is_file()


def in_range(version: str, wanted: str) -> bool:
    """Whether an engine version such as `0.5.15.post1` satisfies `>=0.5.13,<0.6`."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        return Version(version) in SpecifierSet(wanted, prereleases=True)
    except InvalidVersion:
        return True


QUESTIONS = {
    "title": "One line for people",
    "area": f"Where it lives ({', '.join(AREAS)})",
    "meaning": "What happened",
    "check": "How to make sure",
    "remedy": "What to do",
    "source": "Where this is known from (an address)",
}


def asked(answers: Mapping[str, str], ask: Callable[[str], str] | None = None) -> dict[str, str]:
    """The answers, with those that are missing asked for one by one; an empty one stays missing."""
    return {key: answers.get(key) or (ask or _ask)(f"{text}: ").strip() for key, text in QUESTIONS.items()}


def _ask(question: str) -> str:
    print(question, end="", file=sys.stderr, flush=True)
    try:
        return input()
    except EOFError:
        return ""


def add(cause: str, lines: Sequence[str], answers: Mapping[str, str], folder: Path = FOLDER) -> Path:
    """Write catalog/failures/<cause>.yml from lines of a log and the operator's answers.

    `answers` has title, area, meaning, check, remedy, source. The pattern is made of the line's words with
    its numbers, addresses and paths left open. Raises UsageError (bad name, exists, no usable pattern, or
    another cause already says so) and then writes nothing.
    """
    path = folder / f"{cause}.yml"
    problems = []
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", cause):
        problems.append(Problem(cause, "is not a name", "Use small letters, digits and hyphens."))
    elif path.exists():
        problems.append(Problem(path.name, "exists", "Add the line to its samples and a pattern to it."))
    missing = [key for key in QUESTIONS if not answers.get(key)]
    problems.extend(Problem(key, "needs an answer") for key in missing)
    if not any(line.strip() for line in lines):
        problems.append(Problem("lines", "none given", "Give at least one line of the log."))
    if problems:
        raise UsageError(problems)
    kept = [line.strip() for line in lines if line.strip()]
    sample = "\n".join(kept)
    known = _known_as(sample, folder)
    if known:
        what = f'is already known as "{known}"'
        raise UsageError(Problem("lines", what, f"Add the lines to the samples of {known}.yml."))
    entry = {
        "title": answers["title"],
        "area": answers["area"],
        "kind": answers.get("kind") or "root",
        "severity": answers.get("severity") or "error",
        "match": [{"all": [open_pattern(line) for line in kept]}],
        "meaning": answers["meaning"],
        "check": answers["check"],
        "remedy": answers["remedy"],
        "samples": [sample],
        "sources": [answers["source"]],
    }
    entries.build(Failure, entry, path.name)
    _write(path, entry)
    return path


def _known_as(text: str, folder: Path) -> str | None:
    """The cause that the folder's rules already see in the text; guesses, notes and follow-ups aside."""
    from bringup import evidence, verdicts

    known = library(folder)
    found = verdicts.judge(evidence.read([evidence.of_text("", text)], known), known, verdicts.Context())
    known_roots = (item for item in found if item.severity != "note" and item.kind == "root")
    first = next((item for item in known_roots if item.confidence >= verdicts.WEAK), None)
    return first.cause if first else None


_OPEN = re.compile(
    r"(?P<path>(?:/[\w.@+-]+){2,})|(?P<hex>\b0x[0-9a-fA-F]+\b|\b[0-9a-f]{8,}\b)|(?P<number>\d+(?:[.:]\d+)*)"
)
_PREFIX = re.compile(
    r"^(?:\[[^\]]*\]\s*|(?:ERROR|WARNING|WARN|INFO|FATAL|CRITICAL)[:\s]+|\([^)]*\)\s*"
    r"|[A-Z]+ +\d\d-\d\d [\d:.]+ +|\d{4}-\d\d-\d\d[ T][\d:.,+Z-]+\s*)+"
)


def open_pattern(line: str) -> str:
    """A pattern of one log line: its words stay, numbers, addresses and paths are left open."""
    text = _PREFIX.sub("", line.strip())[:400]
    parts: list[str] = []
    end = 0
    for found in _OPEN.finditer(text):
        parts.append(_fixed(text[end : found.start()]))
        parts.append({"path": r"\S+", "hex": r"\w+", "number": r"[\d.:]+"}[str(found.lastgroup)])
        end = found.end()
    parts.append(_fixed(text[end:]))
    return "".join(parts)


def _fixed(text: str) -> str:
    """Escaped, with any run of blanks matching any other; re.escape's needless escapes are left out."""
    return re.sub(r"\s+", r"\\s+", re.sub(r"([\\.^$*+?{}\[\]|()])", r"\\\1", text))


def _write(path: Path, entry: Mapping[str, object]) -> None:
    """Beside, synced, renamed: never half a file."""
    import os

    import yaml

    text = yaml.safe_dump(entry, sort_keys=False, allow_unicode=True, width=100)
    beside = path.with_suffix(".yml.new")
    with beside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
