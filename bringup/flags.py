"""Checks a command line and environment against one engine version, before anything is started.

Two sources of knowledge: the version's flag table (what its parser takes) and the engine's rules (what it
does with what it took). Both are data; see docs/flags.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Literal

from bringup import flagtable
from bringup.errors import did_you_mean
from bringup.flagparse import Given, Parsed, is_variable, parse, wrong_choice, wrong_type
from bringup.flagtable import Flag, FlagTable

Severity = Literal["error", "warning", "note"]
"""error: the server does not start, or not as asked. warning: it starts and does something else, or unsafely.
note: good to know."""

CODES: dict[str, str] = {
    "FLAG_UNKNOWN": "no version of the engine that we know has this flag",
    "FLAG_OTHER_ENGINE": "the flag belongs to another engine",
    "FLAG_REMOVED": "the flag is gone in this version",
    "FLAG_TOO_NEW": "the flag came in a later version",
    "FLAG_RENAMED": "the flag or value has a new name; the old one still works or no longer does, as said",
    "FLAG_DEPRECATED": "the flag works and will go",
    "FLAG_AMBIGUOUS": "an abbreviation that fits more than one flag",
    "FLAG_PREFIX": "an abbreviation; it works until a new flag makes it ambiguous",
    "FLAG_STRAY": "a word that belongs to no flag",
    "FLAG_VALUE": "too few or too many values",
    "FLAG_TYPE": "a value of the wrong type",
    "FLAG_CHOICE": "a value the parser does not let through",
    "FLAG_REQUIRED": "a flag the engine cannot start without",
    "FLAG_REPEATED": "given more than once; the last one wins",
    "FLAG_NEVER_READ": "accepted, stored and never read",
    "FLAG_NO_EFFECT": "without effect here",
    "FLAG_ADJUSTED": "the engine silently changes the value",
    "FLAG_REFUSED_GPU": "the engine refuses this on this GPU",
    "FLAG_REFUSED": "the engine refuses this value or combination after parsing",
    "FLAG_CONFLICT": "two settings that exclude each other",
    "FLAG_NEEDS": "needs another flag that is not given",
    "FLAG_UNSAFE": "opens the server or shows a secret to others",
    "FLAG_ADVICE": "works; measured or documented to be the worse choice here",
    "ENV_UNKNOWN": "the engine claims this prefix and has no such variable",
    "ENV_OTHER_ENGINE": "the variable belongs to another engine",
    "ENV_REMOVED": "the variable is gone in this version",
    "ENV_TOO_NEW": "the variable came in a later version",
    "ENV_DEPRECATED": "the variable works and will go",
    "ENV_TYPE": "a value of the wrong type",
    "ENV_NO_EFFECT": "without effect in this version",
    "LINE_QUOTES": "typographic quotes, which a shell does not know",
    "LINE_VERSION": "the version has no flag table; the nearest one is used",
    "LINE_VARIABLE": "a shell variable whose value is not known here",
}
"""Every finding code and what it means. Codes are stable: scripts and reviews may rely on them."""

_RANK = {"error": 0, "warning": 1, "note": 2}
_TRUE_FALSE = ("1", "0", "true", "false", "yes", "no", "y", "n", "on", "off", "")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing about one flag or variable. `what` says it, `reason` why, `instead` the right form, `source`
    who says so."""

    code: str
    severity: Severity
    flag: str
    what: str
    reason: str = ""
    instead: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What rules may ask of a model; None is "not known".

    architecture: class name in config.json, such as GlmMoeDsaForCausalLM. sparse_attention: DeepSeek-style
    (DSA). quantization: method in config.json, such as fp8. mtp: the checkpoint holds a layer for multi-token
    prediction.
    """

    name: str | None = None
    architecture: str | None = None
    sparse_attention: bool | None = None
    moe: bool | None = None
    quantization: str | None = None
    mtp: bool | None = None


@dataclass(frozen=True, slots=True)
class FlagContext:
    """Where the command line will run. `sm`: compute capability times ten (H100, H200, H20, GH200: 90), None
    unknown.

    `complete`: the line is a whole launch, so required flags may be missed. `shell`: words may still hold
    shell variables, whose values are then not judged. `guarded`: the server gets an API key by other means
    than the command line, or a gateway in front asks for one.
    """

    sm: int | None = None
    platform: str | None = None
    model: ModelFacts = field(default_factory=ModelFacts)
    complete: bool = True
    shell: bool = False
    guarded: bool = False


@dataclass(frozen=True)
class Settings:
    """A parsed command line and environment, as rules see it."""

    table: FlagTable
    parsed: Parsed
    env: Mapping[str, str]
    context: FlagContext

    @property
    def version(self) -> str:
        return self.table.version

    @cached_property
    def _given(self) -> dict[str, tuple[str, tuple[str, ...]]]:
        """dest (or the spelling of an unknown flag) to how it was spelled and its last words."""
        found: dict[str, tuple[str, tuple[str, ...]]] = {}
        for item in self.parsed.given:
            if item.flag is None:
                found[item.spelled] = (item.spelled, item.words)
                continue
            for dest, words in _flat(item):
                found[dest] = (item.spelled, words)
        return found

    def _key(self, flag: str) -> str:
        head, dot, key = flag.partition(".")
        known = self.table.options.get(head)
        return flag if known is None else known.dest + dot + key

    def spelled(self, flag: str) -> str | None:
        """How a flag was given, under any of its names; None when it was not. `--no-x` does not give `--x`.

        A deprecated spelling with its own rule is told from the current one by name.
        """
        found = self._given.get(self._key(flag))
        if found is None:
            return None
        spelled, words = found
        option = self.table.options.get(flag)
        used = self.table.options.get(spelled)
        if option is not None and used is not None and option is not used and option.deprecated:
            return None
        return None if words == ("false",) and used is not None and used.kind == "bool" else spelled

    def given(self, flag: str) -> bool:
        """Whether a flag's value is on the command line, rather than its default."""
        return self._key(flag) in self._given

    def value(self, flag: str) -> tuple[str, ...] | None:
        """A flag's words: as given, else its default in this version; None when there is neither."""
        found = self._given.get(self._key(flag))
        if found is not None:
            return found[1] or ("true",)
        known = self.table.options.get(flag)
        return None if known is None or known.default is None else (_text(known.default),)

    def texts(self) -> dict[str, str]:
        """Field name to value, for the texts of rules."""
        return {key.lstrip("-").replace(".", "_"): " ".join(words) for key, (_, words) in self._given.items()}


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _flat(item: Given) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(dest, words) of an option; a JSON object also as `dest.key`: both spellings meet the same rules."""
    assert item.flag is not None
    if item.key:
        yield f"{item.flag.dest}.{item.key}", item.words
        yield item.flag.dest, item.words
        return
    yield item.flag.dest, ("false",) if item.negated else item.words
    if item.flag.kind in ("json", "json_or_str") and len(item.words) == 1:
        try:
            value = json.loads(item.words[0])
        except ValueError:
            return
        if isinstance(value, dict):
            for key, inner in value.items():
                yield f"{item.flag.dest}.{key}", (_text(inner),)


@lru_cache(maxsize=32)
def load_table(engine: str, version: str) -> FlagTable:
    """The flag table of an engine version. Raises UsageError naming the command that makes one."""
    return flagtable.load(engine, version)


def check(
    table: FlagTable, argv: Sequence[str], env: Mapping[str, str], context: FlagContext
) -> list[Finding]:
    """Everything to say about a launch, worst first. `argv`: the words after module and positional model.

    A rule that rests on a fact that is not known (GPU, model) speaks one step milder and says what it rests
    on; a note that does is left out.
    """
    from bringup import flagrules

    parsed = parse(table, argv)
    settings = Settings(table, parsed, env, context)
    ruled = flagrules.hits(flagrules.load(table.engine), table.version, settings)
    found = [_of_rule(hit) for hit in ruled if not (hit.unless and hit.rule.severity == "note")]
    spoken = {(finding.flag, finding.code) for finding in found}
    silent = {finding.flag for finding in found if finding.code in _RULE_EXPLAINS}
    found += [
        finding
        for finding in _parser_findings(table, parsed, context)
        if (finding.flag, finding.code) not in spoken
        and not (finding.flag in silent and finding.code in _RULE_REPLACES)
    ]
    found += [
        finding
        for finding in _env_findings(table, env, context)
        if finding.flag not in {hit.flag for hit in ruled}
    ]
    return sorted(found, key=lambda finding: (_RANK[finding.severity], finding.flag, finding.code))


def parser_findings(table: FlagTable, argv: Sequence[str], context: FlagContext) -> list[Finding]:
    """What the engine's parser alone would say, without rules."""
    return list(_parser_findings(table, parse(table, argv), context))


_RULE_EXPLAINS = frozenset(
    {"FLAG_REMOVED", "FLAG_RENAMED", "FLAG_OTHER_ENGINE", "FLAG_CHOICE", "FLAG_NO_EFFECT"}
)
_RULE_REPLACES = frozenset(
    {"FLAG_UNKNOWN", "FLAG_REMOVED", "FLAG_TOO_NEW", "FLAG_OTHER_ENGINE", "FLAG_DEPRECATED", "FLAG_CHOICE"}
)
"""What the parser alone would say is dropped when a rule knows better about the same flag."""


def _of_rule(hit: Any) -> Finding:
    rule = hit.rule
    what = rule.what.format_map(hit.texts)
    severity: Severity = rule.severity
    if hit.unless:
        what = f"if {' and '.join(hit.unless)}: {what}"
        severity = "warning" if severity == "error" else severity
    return Finding(
        rule.code,
        severity,
        hit.flag,
        what,
        rule.reason.format_map(hit.texts),
        rule.instead.format_map(hit.texts),
        rule.source,
    )


def _parser_findings(table: FlagTable, parsed: Parsed, context: FlagContext) -> Iterator[Finding]:
    source = f"flag table of {table.engine} {table.version}"
    for word in parsed.strays:
        yield Finding(
            "FLAG_STRAY",
            "error",
            word,
            f'"{word}" belongs to no flag',
            "the parser stops with: unrecognized arguments",
            "quote a value with spaces; write the flag before its value",
            source,
        )
    for item in parsed.given:
        if item.flag is None:
            yield _unknown(table, item, source)
        else:
            yield from _of_option(table, item, item.flag, context, source)
    yield from _repeated(parsed, source)
    if context.complete:
        yield from _missing(table, parsed, source)


def _unknown(table: FlagTable, item: Given, source: str) -> Finding:
    elsewhere = _elsewhere(table, item.spelled)
    if item.matches and elsewhere is None:
        listed = ", ".join(item.matches[:6])
        return Finding(
            "FLAG_AMBIGUOUS",
            "error",
            item.spelled,
            f"could be any of {listed}",
            "the parser stops with: ambiguous option",
            "write the flag in full",
            source,
        )
    return elsewhere or Finding(
        "FLAG_UNKNOWN",
        "error",
        item.spelled,
        f"{table.engine} {table.version} has no such flag",
        "the parser stops with: unrecognized arguments",
        did_you_mean(item.spelled, [name for name in table.options if name.startswith("--")]),
        source,
    )


def _elsewhere(table: FlagTable, name: str) -> Finding | None:
    """A flag this version lacks, looked for in the engine's other versions and then in other engines."""
    known = flagtable.tables()
    own = [v for v in known.get(table.engine, []) if v != table.version]
    having = [v for v in own if name in load_table(table.engine, v).options]
    if having:
        return _other_version(table, name, having)
    for engine in known:
        if engine == table.engine:
            continue
        version = known[engine][-1]
        if name in load_table(engine, version).options:
            return Finding(
                "FLAG_OTHER_ENGINE",
                "error",
                name,
                f"is a flag of {engine}; {table.engine} {table.version} has none of this name",
                "the parser stops with: unrecognized arguments",
                did_you_mean(name, [n for n in table.options if n.startswith("--")]) or "leave it out",
                f"flag tables of {table.engine} {table.version} and {engine} {version}",
            )
    return None


def _other_version(table: FlagTable, name: str, having: list[str]) -> Finding:
    key = flagtable.version_key
    older = [v for v in having if key(v) < key(table.version)]
    if older:
        flag = load_table(table.engine, older[-1]).options[name]
        use = flag.use or _successor(table, flag)
        return Finding(
            "FLAG_REMOVED",
            "error",
            name,
            f"was in {table.engine} {older[-1]} and is gone in {table.version}",
            "the parser stops with: unrecognized arguments",
            f"use {use}" if use else "leave it out",
            f"flag tables of {table.engine} {older[-1]} and {table.version}",
        )
    return Finding(
        "FLAG_TOO_NEW",
        "error",
        name,
        f"{table.engine} {table.version} does not have it yet; {having[0]} does",
        "the parser stops with: unrecognized arguments",
        f"use {table.engine} {having[0]} or leave it out",
        f"flag tables of {table.engine} {table.version} and {having[0]}",
    )


def _successor(table: FlagTable, flag: Flag) -> str:
    """The flag that stores the same field now, when there is one."""
    now = table.by_dest.get(flag.dest)
    return now.name if now is not None else ""


def _of_option(
    table: FlagTable, item: Given, flag: Flag, context: FlagContext, source: str
) -> Iterator[Finding]:
    if flag.refused:
        yield Finding(
            "FLAG_REMOVED",
            "error",
            item.spelled,
            "is refused by the parser",
            flag.refused,
            _use(flag),
            source,
        )
    elif flag.deprecated:
        what = "is deprecated and will be removed"
        yield Finding(
            "FLAG_DEPRECATED", "warning", item.spelled, what, flag.help if "eprecat" in flag.help else "",
            _use(flag), source,
        )  # fmt: skip
    if _abbreviated(table, item):
        yield Finding(
            "FLAG_PREFIX",
            "note",
            item.spelled,
            f"is an abbreviation of {item.option}",
            "it works until a new flag makes it ambiguous",
            f"write {item.option}",
            source,
        )
    yield from _of_values(item, flag, context, source)


def _use(flag: Flag) -> str:
    return f"use {flag.use}" if flag.use else ""


def _abbreviated(table: FlagTable, item: Given) -> bool:
    name = item.spelled.split(".", 1)[0]
    if table.underscores and name.startswith("--"):
        name = name.replace("_", "-")
    return item.option.startswith("--") and name != item.option


def _of_values(item: Given, flag: Flag, context: FlagContext, source: str) -> Iterator[Finding]:
    problem = "" if item.key else _count_problem(item, flag)
    if problem:
        yield Finding("FLAG_VALUE", "error", item.spelled, problem, "", _form(flag), source)
        return
    if item.negated:
        return
    yield from _of_keys(item, flag, source)
    if item.key:
        return
    for word in item.words:
        if context.shell and is_variable(word):
            what = f'"{word}" is a shell variable; its value is not judged'
            yield Finding("LINE_VARIABLE", "note", item.spelled, what, "", "", source)
            continue
        wanted = wrong_type(flag, word)
        if wanted:
            what = f'"{word}" is not {wanted}'
            yield Finding("FLAG_TYPE", "error", item.spelled, what, _help(flag), "", source)
        elif wrong_choice(flag, word):
            yield _bad_choice(item, flag, word, source)


def _of_keys(item: Given, flag: Flag, source: str) -> Iterator[Finding]:
    """Keys of a JSON value or of a dotted flag that its configuration does not have."""
    if not flag.keys:
        return
    keys = [item.key.split(".")[0]] if item.key else [key for word in item.words for key in _json_keys(word)]
    for key in keys:
        if key not in flag.keys:
            what = f'has no key "{key}"'
            hint = did_you_mean(key, flag.keys) or f"Keys: {', '.join(flag.keys)}."
            yield Finding("FLAG_VALUE", "error", item.spelled, what, "the value is refused", hint, source)


def _json_keys(word: str) -> list[str]:
    try:
        value = json.loads(word)
    except ValueError:
        return []
    return list(value) if isinstance(value, dict) else []


def _count_problem(item: Given, flag: Flag) -> str:
    nargs = 0 if item.negated else flag.nargs
    count = len(item.words)
    if nargs == 0:
        return f'takes no value, "{item.words[0]}" is given' if count else ""
    if count == 0 and nargs in (None, "+"):
        return "needs a value"
    if isinstance(nargs, int) and count != nargs:
        return f"needs {nargs} values, {count} given"
    return ""


def _form(flag: Flag) -> str:
    if flag.nargs == 0:
        off = next(iter(flag.negatives), "")
        return f"{flag.name} (on){f', {off} (off)' if off else ', or leave it out (off)'}"
    if flag.choices:
        return f"{flag.name} {{{','.join(str(choice) for choice in flag.choices[:12])}}}"
    return f"{flag.name} {flag.kind.upper()}"


def _help(flag: Flag) -> str:
    return flag.help


def _bad_choice(item: Given, flag: Flag, word: str, source: str) -> Finding:
    choices = [str(choice) for choice in flag.choices or ()]
    listed = ", ".join(choices) if len(choices) <= 24 else f"{', '.join(choices[:24])}, ..."
    return Finding(
        "FLAG_CHOICE",
        "error",
        item.spelled,
        f'"{word}" is not one of {listed}',
        "the parser stops with: invalid choice",
        did_you_mean(word, choices),
        source,
    )


def _repeated(parsed: Parsed, source: str) -> Iterator[Finding]:
    seen: dict[str, Given] = {}
    for item in parsed.given:
        if item.flag is None or item.flag.repeat:
            continue
        key = f"{item.flag.dest}.{item.key}"
        before = seen.get(key)
        if before is not None:
            same = before.words == item.words and before.negated == item.negated
            what = "is given twice with the same value" if same else _overruled(before, item)
            yield Finding(
                "FLAG_REPEATED",
                "note" if same else "warning",
                item.spelled,
                what,
                "the parser keeps the last one",
                "keep one",
                source,
            )
        seen[key] = item


_SECRETS = ("api_key", "admin_api_key", "hf_token", "ssl_keyfile_password")
"""Flags whose values no message may repeat."""


def _overruled(before: Given, item: Given) -> str:
    assert item.flag is not None
    if item.flag.dest in _SECRETS:
        return "is given twice with different values"
    first, last = " ".join(before.words) or before.spelled, " ".join(item.words) or item.spelled
    return f'is given twice: "{first}" loses to "{last}"'


def _missing(table: FlagTable, parsed: Parsed, source: str) -> Iterator[Finding]:
    for flag in table.flags:
        if flag.required and not parsed.of(flag.dest):
            yield Finding(
                "FLAG_REQUIRED",
                "error",
                flag.name,
                "is required and not given",
                "the parser stops with: the following arguments are required",
                _form(flag),
                source,
            )


def _env_findings(table: FlagTable, env: Mapping[str, str], context: FlagContext) -> Iterator[Finding]:
    source = f"environment variables of {table.engine} {table.version}"
    for name, value in env.items():
        known = table.variables.get(name)
        if known is None:
            finding = _unknown_env(table, name, source)
            if finding is not None:
                yield finding
            continue
        if known.deprecated:
            yield Finding(
                "ENV_DEPRECATED", "warning", name, "is deprecated", "", known.use, source
            )  # fmt: skip
        if not (context.shell and is_variable(value)) and _bad_env(known.kind, value):
            wanted = {"bool": "1 or 0", "int": "a whole number", "float": "a number"}.get(
                known.kind, known.kind
            )
            yield Finding(
                "ENV_TYPE",
                "warning",
                name,
                f'"{value}" is not {wanted}',
                "the engine stops, or falls back to its default without a word",
                "",
                source,
            )


def _bad_env(kind: str, value: str) -> bool:
    if kind == "bool":
        return value.strip().lower() not in _TRUE_FALSE
    probe = Flag(names=("",), dest="", kind=kind)
    return value.strip() != "" and bool(wrong_type(probe, value))


def _unknown_env(table: FlagTable, name: str, source: str) -> Finding | None:
    known = flagtable.tables()
    if not name.startswith(table.env_prefixes or ("\0",)):
        return _env_of_other(table, name, known)
    key = flagtable.version_key
    own = [v for v in known.get(table.engine, []) if v != table.version]
    having = [v for v in own if name in load_table(table.engine, v).variables]
    older = [v for v in having if key(v) < key(table.version)]
    if older:
        what = f"was in {table.engine} {older[-1]} and is not read by {table.version}"
        return Finding("ENV_REMOVED", "warning", name, what, "", "leave it out", source)
    if having:
        what = f"{table.engine} {table.version} does not read it yet; {having[0]} does"
        return Finding("ENV_TOO_NEW", "warning", name, what, "", "", source)
    what = f"{table.engine} {table.version} declares no such variable"
    hint = did_you_mean(name, table.variables)
    return Finding("ENV_UNKNOWN", "warning", name, what, "it is silently ignored", hint, source)


def _env_of_other(table: FlagTable, name: str, known: Mapping[str, Sequence[str]]) -> Finding | None:
    for engine, versions in known.items():
        if engine == table.engine or not name.isupper():
            continue
        other = load_table(engine, versions[-1])
        if name.startswith(other.env_prefixes or ("\0",)):
            what = f"is a variable of {engine}; {table.engine} does not read it"
            source = f"environment variables of {engine} {other.version}"
            return Finding("ENV_OTHER_ENGINE", "warning", name, what, "", "leave it out", source)
    return None


def worst(findings: Iterable[Finding]) -> Severity | None:
    """The highest severity among findings, None when there is none."""
    return min((finding.severity for finding in findings), key=lambda item: _RANK[item], default=None)
