"""Flag tables and rules in the catalog are well formed, and every rule does what it says."""

from __future__ import annotations

import json

import pytest

from bringup import ROOT, flagrules, flags, flagtable
from bringup.flagcheck import PROGRAMS, check_line
from bringup.flags import CODES
from bringup.flagtable import KINDS, FlagTable

TABLES = [(engine, version) for engine, versions in flagtable.tables().items() for version in versions]
ENGINES = sorted(path.stem for path in flagrules.FOLDER.glob("[a-z]*.yml"))
RULES = [(engine, rule) for engine in ENGINES for rule in flagrules.load(engine)]

tables = pytest.mark.parametrize(("engine", "version"), TABLES, ids=[f"{e}-{v}" for e, v in TABLES])
rules = pytest.mark.parametrize(("engine", "rule"), RULES, ids=[f"{e}:{r.name}" for e, r in RULES])


def table_of(engine: str, version: str) -> FlagTable:
    return flags.load_table(engine, version)


def test_the_wanted_versions_have_tables() -> None:
    assert set(TABLES) >= {
        ("sglang", "0.5.10.post1"),
        ("sglang", "0.5.15.post1"),
        ("sglang", "0.5.23"),
        ("vllm", "0.23.0"),
        ("vllm", "0.33.0"),
    }
    assert any(engine == "llama-server" for engine, _ in TABLES)


@tables
def test_a_table_is_written_as_the_program_would_write_it(engine: str, version: str) -> None:
    text = flagtable.path_of(engine, version).read_text(encoding="utf-8")
    assert text == flagtable.render(table_of(engine, version))
    assert json.loads(text)["schema_version"] == flagtable.SCHEMA_VERSION


def test_the_tables_of_our_own_programs_are_up_to_date() -> None:
    for engine, program in PROGRAMS.items():
        version = flagtable.tables()[engine][-1]
        assert flagtable.generate(program, engine, version) == table_of(engine, version)


@tables
def test_flags_of_a_table_make_sense(engine: str, version: str) -> None:
    table = table_of(engine, version)
    names = [name for flag in table.flags for name in (*flag.names, *flag.negatives)]
    assert len(names) == len(set(names))
    for flag in table.flags:
        assert flag.names
        assert all(name.startswith("-") for name in flag.names)
        assert flag.kind in KINDS
        assert flag.nargs is None or flag.nargs in ("?", "*", "+") or isinstance(flag.nargs, int)
        assert (flag.kind == "bool") == (flag.nargs == 0) or flag.deprecated
        plain = flag.nargs is None and not flag.open_choices and not flag.deprecated
        if plain and flag.choices and flag.default is not None:
            assert str(flag.default) in map(str, flag.choices), flag.name


@rules
def test_a_rule_speaks_in_its_example(engine: str, rule: flagrules.Rule) -> None:
    report = check_line(rule.example.line, engine, rule.example.version, rule.example.gpu)
    mine = [item for item in report.findings if item.code == rule.code and item.source == rule.source]
    assert mine, report.findings
    assert all(item.severity == rule.severity for item in mine)
    assert not any("{" in item.what and "}" in item.what for item in mine)


@pytest.mark.parametrize(
    ("engine", "rule"),
    [(e, r) for e, r in RULES if r.example.silent],
    ids=[f"{e}:{r.name}" for e, r in RULES if r.example.silent],
)
def test_a_rule_is_silent_where_it_does_not_hold(engine: str, rule: flagrules.Rule) -> None:
    assert rule.example.silent is not None
    report = check_line(rule.example.silent, engine, rule.example.version, rule.example.gpu)
    said = flagrules.load(engine)
    alike = [other for other in said if other.code == rule.code and other.source == rule.source]
    whats = [item.what for item in report.findings if (item.code, item.source) == (rule.code, rule.source)]
    assert not whats or len(alike) > 1


@rules
def test_a_rule_names_flags_that_some_version_of_the_engine_has_or_had(
    engine: str, rule: flagrules.Rule
) -> None:
    known = {name for version in flagtable.tables()[engine] for name in table_of(engine, version).options}
    used = {
        flag.split(".")[0]
        for group in (rule.when.values, rule.when.other_values, rule.when.given, rule.when.absent)
        for flag in group
    }
    assert used <= known
    if rule.code not in ("FLAG_REMOVED", "FLAG_RENAMED", "FLAG_OTHER_ENGINE"):
        assert set(rule.flags) <= known


@rules
def test_a_rule_gives_its_reason_and_its_source(engine: str, rule: flagrules.Rule) -> None:
    assert rule.code in CODES
    assert len(rule.reason) > 10
    assert rule.source.startswith(("https://", "docs/", "published "))


def test_every_code_is_documented() -> None:
    text = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")
    assert [code for code in CODES if f"`{code}`" not in text] == []
