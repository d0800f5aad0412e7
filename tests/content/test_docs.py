"""The documents say what the code does: every command, every exit code, every link."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bringup import ROOT, runbookdocs, runs
from bringup.errors import EXIT_MEANING, Exit

COMMANDS = ROOT / "docs" / "commands.md"
RUNS = ROOT / "docs" / "runs.md"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHOWN = r"(?:^\./inv|`(?:\./inv|invoke)) ((?:[a-z]+[. ]?)+)"
LINK = re.compile(r"\]\((?!https?://|#)(?P<target>[^)#]+)")


def tasks() -> dict[str, dict[str, Any]]:
    """Every command by its dotted name, as `invoke --list` knows them."""
    invoke = Path(sys.executable).parent / "invoke"
    done = subprocess.run(
        [str(invoke), "--list", "--list-format=json"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    listed = json.loads(done.stdout)
    found = {task["name"]: task for task in listed["tasks"]}
    for group in listed["collections"]:
        for task in group["tasks"]:
            name = group["name"] if task["name"] == group["default"] else f"{group['name']}.{task['name']}"
            found[name] = task
    return found


def documented(text: str) -> set[str]:
    """Commands that have a heading of their own: ### `invoke NAME ...`."""
    return {
        match.replace(" ", ".")
        for match in re.findall(r"^### `invoke ([\w. ]+?)(?: [^a-z`].*)?`", text, re.M)
    }


def test_every_command_is_documented_and_every_documented_command_is_there() -> None:
    assert documented(COMMANDS.read_text()) == set(tasks())


def flags(name: str) -> set[str]:
    """Long flags of a command, from its own help."""
    invoke = Path(sys.executable).parent / "invoke"
    done = subprocess.run([str(invoke), "--help", name], cwd=ROOT, capture_output=True, text=True, check=True)
    options = done.stdout.partition("Options:")[2]
    return set(
        re.findall(
            r"(--(?:\[no-\])?[a-z][\w-]*)",
            "\n".join(line for line in options.splitlines() if line.strip().startswith("-")),
        )
    )


@pytest.mark.parametrize("name", sorted(tasks()))
def test_every_flag_of_a_command_stands_under_its_heading(name: str) -> None:
    text = COMMANDS.read_text()
    title = name.replace(".", "[. ]")
    section = re.search(rf"^### `invoke {title}(?: [^a-z`][^\n]*)?`\n(.*?)(?=^##|\Z)", text, re.M | re.S)
    assert section is not None
    said = section[0]
    missing = {flag for flag in flags(name) if flag.replace("[no-]", "no-") not in said and flag not in said}
    assert missing == set()


def test_the_table_of_exit_codes_is_the_codes_own() -> None:
    rows = dict(re.findall(r"^\| (\d+) \| ([^|]+?) \|", COMMANDS.read_text(), re.M))
    assert {int(code): meaning for code, meaning in rows.items()} == {
        int(code): EXIT_MEANING[code] for code in Exit
    }


def test_every_runbook_is_in_the_document() -> None:
    """When this fails: python -m bringup.runbookdocs."""
    assert (ROOT / "docs" / "runbooks.md").read_text() == runbookdocs.text()


def test_every_key_of_a_record_is_described() -> None:
    text = RUNS.read_text()
    keys = runs.to_data(runs.RunRecord("id", "name", "inventory"))
    assert [key for key in keys if f"`{key}`" not in text] == []


def test_every_command_that_a_document_shows_is_there() -> None:
    known = tasks()
    wrong = []
    for path in DOCUMENTS:
        for line in re.findall(SHOWN, path.read_text(), re.M):
            words = line.split()
            if words and not ({words[0], ".".join(words[:2])} & set(known)):
                wrong.append((path.name, line))
    assert wrong == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_inside_the_checkout_leads_somewhere(path: Path) -> None:
    lost = [
        target for target in LINK.findall(path.read_text()) if not (path.parent / target).resolve().exists()
    ]
    assert lost == []
