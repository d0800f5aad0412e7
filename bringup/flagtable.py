"""The flags and environment variables of one engine version, as data.

A table is made once from a wheel (`generate`, which never imports the engine), kept in
`catalog/flags/<engine>-<version>.json`, and read on every check: JSON and dataclasses, a few milliseconds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bringup import ROOT
from bringup.errors import Problem, UsageError, did_you_mean

if TYPE_CHECKING:
    from packaging.version import Version

FOLDER = ROOT / "catalog" / "flags"
SCHEMA_VERSION = 1
HELP_LIMIT = 160
"""Characters of a flag's help that a table keeps: enough to recognise it, small enough to load fast."""

KINDS = ("bool", "int", "float", "str", "name", "json", "json_or_str", "human_int", "human_int_or_auto")
"""What a value is. bool: no value. name: compared in lower case, "-" read as "_". human_int: also 8k, 8K."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One option of an engine's command line.

    `nargs` is argparse's: None (one value), 0, a number, "?", "*" or "+". `open_choices` says that `choices`
    are the known values but others are let through by the parser. `optional`: "None" and "" mean unset.
    `keys` are the fields of a JSON value, when no others are let through. `refused` is the parser's own
    refusal; `use` its pointer to a replacement.
    """

    names: tuple[str, ...]
    dest: str
    kind: str = "str"
    nargs: int | str | None = None
    choices: tuple[Any, ...] | None = None
    open_choices: bool = False
    optional: bool = False
    default: Any = None
    required: bool = False
    repeat: bool = False
    negatives: tuple[str, ...] = ()
    deprecated: bool = False
    keys: tuple[str, ...] = ()
    refused: str = ""
    use: str = ""
    help: str = ""

    @property
    def name(self) -> str:
        """The first long name, which messages use."""
        return next((name for name in self.names if name.startswith("--")), self.names[0])


@dataclass(frozen=True, slots=True)
class EnvVar:
    """One environment variable that an engine declares. `use` names what replaced it, when it says so."""

    name: str
    kind: str = "str"
    default: Any = None
    deprecated: bool = False
    use: str = ""


@dataclass(frozen=True)
class FlagTable:
    """Everything one engine version accepts.

    `prefixes`: argparse's abbreviation of long options is on. `underscores`: `--a_b` is read as `--a-b`.
    `dotted`: `--json-flag.key value` is accepted. `env_prefixes`: names the engine claims, so an undeclared
    one is a mistake.
    """

    engine: str
    version: str
    source: str
    flags: tuple[Flag, ...]
    env: tuple[EnvVar, ...] = ()
    prefixes: bool = True
    underscores: bool = False
    dotted: bool = False
    env_prefixes: tuple[str, ...] = ()
    where: str = field(default="", compare=False)

    @cached_property
    def options(self) -> dict[str, Flag]:
        """Every spelling, negative ones too, to its flag."""
        return {name: flag for flag in self.flags for name in (*flag.names, *flag.negatives)}

    @cached_property
    def variables(self) -> dict[str, EnvVar]:
        return {variable.name: variable for variable in self.env}

    @cached_property
    def by_dest(self) -> dict[str, Flag]:
        """The flag that stores a field; a deprecated spelling never hides the current one."""
        found: dict[str, Flag] = {}
        for flag in sorted(self.flags, key=lambda item: item.deprecated):
            found.setdefault(flag.dest, flag)
        return found


def version_key(text: str) -> Version:
    """A version for ordering; one that is not a PEP 440 version sorts first."""
    from packaging.version import InvalidVersion, Version

    try:
        return Version(text)
    except InvalidVersion:
        return Version("0")


def path_of(engine: str, version: str, folder: Path | None = None) -> Path:
    """Where the table of an engine version lies."""
    return (folder or FOLDER) / f"{engine}-{version}.json"


def tables(folder: Path | None = None) -> dict[str, list[str]]:
    """Engine to the versions with a table, oldest first."""
    found: dict[str, list[str]] = {}
    for path in (folder or FOLDER).glob("*.json"):
        engine, version = split_name(path.stem)
        found.setdefault(engine, []).append(version)
    return {engine: sorted(found[engine], key=version_key) for engine in sorted(found)}


def split_name(stem: str) -> tuple[str, str]:
    """`llama-server-2026.10` is engine `llama-server`: the version starts at the first part with a digit."""
    parts = stem.split("-")
    cut = next((i for i, part in enumerate(parts) if part[:1].isdigit()), len(parts))
    return "-".join(parts[:cut]), "-".join(parts[cut:])


def load(engine: str, version: str, folder: Path | None = None) -> FlagTable:
    """The table of an engine version. Raises UsageError that names the command which makes one."""
    path = path_of(engine, version, folder)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(_no_table(engine, version, folder)) from None
    except (OSError, ValueError) as error:
        raise UsageError(
            Problem(str(path), f"not a readable flag table: {error}", _make(engine, version))
        ) from None
    return from_json(data, str(path))


def _make(engine: str, version: str) -> str:
    return f"Make it with: invoke flags.table --engine {engine} --version {version} --wheel WHEEL"


def _no_table(engine: str, version: str, folder: Path | None) -> Problem:
    known = tables(folder)
    if engine not in known:
        hint = did_you_mean(engine, known) or f"Engines with tables: {', '.join(known) or 'none'}."
        return Problem(f"{engine} {version}", "there is no flag table of this engine", hint)
    listed = ", ".join(known[engine])
    return Problem(
        f"{engine} {version}",
        f"there is no flag table of this version (there are: {listed})",
        _make(engine, version),
    )


_FLAG_FIELDS = {item.name: item for item in fields(Flag)}
_TUPLES = ("names", "choices", "negatives", "keys")


def from_json(data: Mapping[str, Any], where: str = "") -> FlagTable:
    """A table from its JSON value. Raises UsageError when the file is of another schema."""
    if data.get("schema_version") != SCHEMA_VERSION:
        raise UsageError(
            Problem(
                where,
                f"flag table of schema {data.get('schema_version')}, this program reads {SCHEMA_VERSION}",
                _make(str(data.get("engine")), str(data.get("version"))),
            )
        )
    try:
        return FlagTable(
            engine=data["engine"],
            version=data["version"],
            source=data["source"],
            flags=tuple(_flag(item) for item in data["flags"]),
            env=tuple(EnvVar(**item) for item in data["env"]),
            prefixes=data["prefixes"],
            underscores=data["underscores"],
            dotted=data["dotted"],
            env_prefixes=tuple(data["env_prefixes"]),
            where=where,
        )
    except (KeyError, TypeError) as error:
        raise UsageError(Problem(where, f"not a flag table: {error!r}")) from None


def _flag(item: dict[str, Any]) -> Flag:
    for key in _TUPLES:
        if item.get(key) is not None:
            item[key] = tuple(item[key])
    return Flag(**item)


def to_json(table: FlagTable) -> dict[str, Any]:
    """The JSON value of a table: only what differs from the default of each field."""
    return {
        "schema_version": SCHEMA_VERSION,
        "engine": table.engine,
        "version": table.version,
        "source": table.source,
        "prefixes": table.prefixes,
        "underscores": table.underscores,
        "dotted": table.dotted,
        "env_prefixes": list(table.env_prefixes),
        "flags": [_sparse(flag) for flag in table.flags],
        "env": [_sparse(variable) for variable in table.env],
    }


def _sparse(item: Flag | EnvVar) -> dict[str, Any]:
    pairs = ((f.name, getattr(item, f.name), f.default) for f in fields(item))
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value, default in pairs
        if value != default or type(value) is not type(default)
    }


def render(table: FlagTable) -> str:
    """The file's text: one flag or variable a line, so that a new version's change is a readable diff."""
    data = to_json(table)
    lines = []
    for key, value in data.items():
        if key in ("flags", "env"):
            items = ",\n".join("  " + json.dumps(item, ensure_ascii=False) for item in value)
            lines.append(f' "{key}": [\n{items}\n ]' if items else f' "{key}": []')
        else:
            lines.append(f' "{key}": {json.dumps(value)}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def write(table: FlagTable, folder: Path | None = None) -> Path:
    """Write a table beside its place, then move it there: a reader never sees half of one."""
    path = path_of(table.engine, table.version, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with part.open("w", encoding="utf-8") as stream:
            stream.write(render(table))
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path


def generate(wheel: Path, engine: str, version: str | None = None) -> FlagTable:
    """Read an engine's flags from a wheel or an unpacked tree; nothing of it is imported or run.

    Raises UsageError when the file is not such a wheel or its layout is not understood.
    """
    from bringup.flagread import read

    return read(wheel, engine, version)


@dataclass(frozen=True)
class TableDiff:
    """What changed from one version to another, names sorted."""

    added: tuple[str, ...]
    removed: tuple[str, ...]
    deprecated: tuple[str, ...]
    choices: tuple[tuple[str, tuple[Any, ...], tuple[Any, ...]], ...]
    """(flag, choices gained, choices lost)"""
    defaults: tuple[tuple[str, Any, Any], ...]
    env_added: tuple[str, ...]
    env_removed: tuple[str, ...]


def diff(old: FlagTable, new: FlagTable) -> TableDiff:
    """What an upgrade from `old` to `new` adds, takes away and changes."""
    before, after = old.options, new.options
    both = sorted(before.keys() & after.keys())
    return TableDiff(
        added=tuple(sorted(after.keys() - before.keys())),
        removed=tuple(sorted(before.keys() - after.keys())),
        deprecated=tuple(n for n in both if after[n].deprecated and not before[n].deprecated),
        choices=tuple(_choice_changes(both, before, after)),
        defaults=tuple(
            (n, before[n].default, after[n].default) for n in both if before[n].default != after[n].default
        ),
        env_added=tuple(sorted(new.variables.keys() - old.variables.keys())),
        env_removed=tuple(sorted(old.variables.keys() - new.variables.keys())),
    )


def _choice_changes(
    names: Iterable[str], before: Mapping[str, Flag], after: Mapping[str, Flag]
) -> Iterable[tuple[str, tuple[Any, ...], tuple[Any, ...]]]:
    for name in names:
        was, now = before[name].choices or (), after[name].choices or ()
        gained = tuple(choice for choice in now if choice not in was)
        lost = tuple(choice for choice in was if choice not in now)
        if was and now and (gained or lost):
            yield name, gained, lost
