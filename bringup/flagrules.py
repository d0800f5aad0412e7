"""What an engine does with flags beyond its parser: renames, dead flags, adjustments, refusals.

Rules are data, one file an engine, `catalog/rules/<engine>.yml`; this module reads and judges them.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from bringup import ROOT
from bringup.entries import Entry, build
from bringup.flags import CODES, ModelFacts, Settings, Severity
from bringup.yamlfile import read_yaml

FOLDER = ROOT / "catalog" / "rules"

_COMPARE = re.compile(
    r"(?P<left>--\S+) (?P<op>==|!=|<=|>=|<|>) (?P<right>--\S+|-?[\d.]+)(?: \+ (?P<plus>\d+))?"
)
_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


class When(Entry):
    """All of these must hold. A fact that is not known (GPU, model) makes the verdict conditional.

    `platform`: any whole word of the platform's name, such as h20 of h20-141gb (not known: does not hold).
    `values`: flag (dotted for JSON keys) to the values meant, given or default. `env`: variable to values (an
    empty list: any). `model`: fact of `ModelFacts` to its value. `unguarded`: nothing but the command line
    could ask clients for a key.
    """

    version: str = ""
    platform: list[str] = Field(default_factory=list)
    sm: list[int] = Field(default_factory=list)
    values: dict[str, list[str]] = Field(default_factory=dict)
    other_values: dict[str, list[str]] = Field(default_factory=dict)
    given: list[str] = Field(default_factory=list)
    absent: list[str] = Field(default_factory=list)
    env: dict[str, list[str]] = Field(default_factory=dict)
    env_absent: list[str] = Field(default_factory=list)
    model: dict[str, bool | str | list[str]] = Field(default_factory=dict)
    unguarded: bool = False
    compare: list[str] = Field(default_factory=list)

    @field_validator("version")
    @classmethod
    def _specifier(cls, text: str) -> str:
        from packaging.specifiers import InvalidSpecifier, SpecifierSet

        try:
            SpecifierSet(text)
        except InvalidSpecifier:
            raise ValueError(f'"{text}" is not a version range such as ">=0.5.13,<0.5.16"') from None
        return text

    @field_validator("compare")
    @classmethod
    def _comparison(cls, lines: list[str]) -> list[str]:
        for line in lines:
            if not _COMPARE.fullmatch(line):
                raise ValueError(f'"{line}" is not a comparison such as "--a != --b + 1"')
        return lines


class Example(Entry):
    """A launch line in which the rule speaks, on a version with a table; `silent`: one where it does not."""

    line: str
    version: str
    gpu: str | None = None
    silent: str | None = None


class Rule(Entry):
    """One known behaviour. It speaks when one of `flags` or `env` is given (or, with neither, always) and
    `when` holds.

    `evidence`: "run" (seen happening), "read" (in the engine's source) or "published" (documented).
    Texts may use {value}, {flag} and the fields of other flags, such as {speculative_num_steps}.
    """

    name: str
    code: str
    severity: Severity
    flags: list[str] = Field(default_factory=list)
    env: list[str] = Field(default_factory=list)
    when: When = Field(default_factory=When)
    what: str
    reason: str
    instead: str = ""
    source: str
    evidence: Literal["run", "read", "published"]
    example: Example

    @model_validator(mode="after")
    def _complete(self) -> Rule:
        unknown = sorted(self.when.model.keys() - set(ModelFacts.__dataclass_fields__))
        if unknown:
            raise ValueError(f"when.model knows no fact called {', '.join(unknown)}")
        if self.code not in CODES:
            raise ValueError(f'"{self.code}" is not a finding code')
        if not (self.flags or self.env or self.when.given or self.when.absent):
            raise ValueError(
                "needs flags, env, when.given or when.absent, or it would speak about every line"
            )
        return self


class RuleFile(Entry):
    """catalog/rules/<engine>.yml"""

    engine: str
    rules: list[Rule]

    @model_validator(mode="after")
    def _unique(self) -> RuleFile:
        names = [rule.name for rule in self.rules]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"rule names given twice: {', '.join(twice)}")
        return self


@lru_cache(maxsize=16)
def load(engine: str, folder: Path | None = None) -> tuple[Rule, ...]:
    """An engine's rules (none when it has no file). Raises UsageError with every problem of the file."""
    path = (folder or FOLDER) / f"{engine}.yml"
    if not path.exists():
        return ()
    where = f"catalog/rules/{engine}.yml"
    return tuple(build(RuleFile, read_yaml(path, where), where).rules)


@dataclass(frozen=True, slots=True)
class Hit:
    """A rule that speaks: the flag or variable as given, the text values, and what would have to be known."""

    rule: Rule
    flag: str
    texts: Mapping[str, str]
    unless: tuple[str, ...]


def hits(rules: Iterable[Rule], version: str, settings: Settings) -> list[Hit]:
    """Every rule that speaks about these settings."""
    return [hit for rule in rules for hit in _judge(rule, version, settings)]


def _judge(rule: Rule, version: str, settings: Settings) -> list[Hit]:
    found = _triggers(rule, settings)
    if not found or not _in_version(rule.when.version, version):
        return []
    unknown: list[str] = []
    if not _holds(rule.when, settings, unknown):
        return []
    return [
        Hit(rule, spelled, _texts(rule, spelled, flag, settings), tuple(dict.fromkeys(unknown)))
        for spelled, flag in found.items()
    ]


def _triggers(rule: Rule, settings: Settings) -> dict[str, str]:
    """As spelled to as the rule calls it: what the rule speaks about; empty when it has nothing to say."""
    if not rule.flags and not rule.env:
        if rule.when.given:
            return {rule.when.given[0]: rule.when.given[0]}
        return {rule.when.absent[0]: rule.when.absent[0]} if settings.context.complete else {}
    found = {settings.spelled(flag): flag for flag in rule.flags}
    named = {spelled: flag for spelled, flag in found.items() if spelled is not None}
    return named or {name: name for name in rule.env if name in settings.env}


@lru_cache(maxsize=512)
def _in_version(specifier: str, version: str) -> bool:
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion

    if not specifier:
        return True
    try:
        return SpecifierSet(specifier).contains(version, prereleases=True)
    except InvalidVersion:
        return False


def _holds(when: When, settings: Settings, unknown: list[str]) -> bool:
    return (
        _gpu(when, settings, unknown)
        and _platform(when, settings)
        and not (when.unguarded and settings.context.guarded)
        and all(_valued(settings, flag, wanted, unknown) for flag, wanted in when.values.items())
        and not any(_value_in(settings, flag, wanted) for flag, wanted in when.other_values.items())
        and all(settings.spelled(flag) is not None for flag in when.given)
        and all(settings.spelled(flag) is None for flag in when.absent)
        and all(_env_in(settings, name, wanted) for name, wanted in when.env.items())
        and all(name not in settings.env for name in when.env_absent)
        and all(_compared(line, settings) for line in when.compare)
        and _model(when, settings, unknown)
    )


def _gpu(when: When, settings: Settings, unknown: list[str]) -> bool:
    if not when.sm:
        return True
    if settings.context.sm is None:
        unknown.append("the GPU is SM" + " or SM".join(str(sm) for sm in when.sm))
        return True
    return settings.context.sm in when.sm


def _platform(when: When, settings: Settings) -> bool:
    if not when.platform:
        return True
    words = re.split(r"[^a-z0-9]+", (settings.context.platform or "").lower())
    return any(word in words for word in when.platform)


def _model(when: When, settings: Settings, unknown: list[str]) -> bool:
    for fact, wanted in when.model.items():
        known = getattr(settings.context.model, fact)
        if known is None:
            unknown.append(f"the model's {fact.replace('_', ' ')} is {_words(wanted)}")
        elif not (known in wanted if isinstance(wanted, list) else known == wanted):
            return False
    return True


def _words(wanted: bool | str | list[str]) -> str:
    return " or ".join(wanted) if isinstance(wanted, list) else str(wanted).lower()


def _value_in(settings: Settings, flag: str, wanted: list[str]) -> bool:
    value = settings.value(flag)
    return value is not None and (not wanted or any(word in wanted for word in value))


def _valued(settings: Settings, flag: str, wanted: list[str], unknown: list[str]) -> bool:
    """Whether a flag has one of the values. In a mere list of flags, its default is only likely."""
    if not _value_in(settings, flag, wanted):
        return False
    if not settings.context.complete and not settings.given(flag):
        unknown.append(f"{flag} is {' or '.join(wanted)}")
    return True


def _env_in(settings: Settings, name: str, wanted: list[str]) -> bool:
    return name in settings.env and (not wanted or settings.env[name].lower() in wanted)


def _operands(line: str, settings: Settings) -> tuple[float | None, str, float | None]:
    found = _COMPARE.fullmatch(line)
    assert found is not None
    right = _number(found["right"], settings)
    if right is not None:
        right += float(found["plus"] or 0)
    return _number(found["left"], settings), found["op"], right


def _number(word: str, settings: Settings) -> float | None:
    words: tuple[str, ...] | None = settings.value(word) if word.startswith("--") else (word,)
    try:
        return float(words[0]) if words else None
    except ValueError:
        return None


def _compared(line: str, settings: Settings) -> bool:
    left, sign, right = _operands(line, settings)
    return left is not None and right is not None and _OPERATORS[sign](left, right)


def _texts(rule: Rule, about: str, flag: str, settings: Settings) -> Mapping[str, str]:
    words = settings.value(flag) or ()
    texts = {
        **settings.texts(),
        "flag": about,
        "value": settings.env.get(about, " ".join(words)),
        "version": settings.version,
    }
    for line in rule.when.compare:
        right = _operands(line, settings)[2]
        texts["right"] = f"{right:g}" if right is not None else "?"
    return _Lenient(texts)


class _Lenient(dict[str, str]):
    """A flag that is not given reads as "(not set)" in a text."""

    def __missing__(self, key: str) -> str:
        return "(not set)"
