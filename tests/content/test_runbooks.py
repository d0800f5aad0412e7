"""Every runbook says what it is, and plays the way the runner promises."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from bringup import ROOT, runbooks
from bringup.errors import UsageError

FILES = sorted(runbooks.FOLDER.glob("*.yml"))
GOOD = """---
# when: always
# effect: does
#   nothing
# disruptive: no
# undo: none: nothing happens
# verify: looks
# owner: sre
# duration: 1 s
- hosts: all
"""


def plays(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load(path.read_text())
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_runbook_has_a_whole_header_and_a_name_of_verb_and_thing(path: Path) -> None:
    book = runbooks.read(path)
    assert re.fullmatch(r"[a-z]+(-[a-z0-9]+)+", book.name)
    assert not book.undo.startswith("none:") or len(book.undo) > 15
    assert not book.verify.startswith("none")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_undo_of_a_runbook_is_a_runbook_or_a_command(path: Path) -> None:
    undo = runbooks.read(path).undo
    named = re.match(r"invoke run ([\w-]+)", undo)
    assert undo.startswith(("none:", "invoke "))
    assert named is None or runbooks.find(named[1]).name == named[1]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_runbook_takes_hosts_a_few_at_a_time_and_stops_as_it_is_told(path: Path) -> None:
    for play in plays(path):
        assert "runbook_serial" in str(play["serial"])
        assert "runbook_max_fail" in str(play["max_fail_percentage"])
        if runbooks.read(path).disruptive:
            assert play["serial"] == "{{ runbook_serial | default(1) }}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_commands_of_a_runbook_say_what_they_change(path: Path) -> None:
    tasks = [task for play in plays(path) for task in play.get("tasks", [])]
    commands = [task for task in tasks if {"ansible.builtin.command", "ansible.builtin.shell"} & set(task)]
    assert [task["name"] for task in commands if "changed_when" not in task] == []
    assert [task for task in tasks if "ignore_errors" in task] == []


def test_every_runbook_is_listed() -> None:
    assert [book.name for book in runbooks.listed()] == [path.stem for path in FILES]
    assert len(FILES) >= 5


def test_runbooks_that_other_files_name_are_there() -> None:
    known = {path.stem for path in FILES}
    named = {
        (path.name, match)
        for folder in ("catalog/failures",)
        for path in (ROOT / folder).glob("*.yml")
        for match in re.findall(r"^runbook: ([\w-]+)", path.read_text(), re.MULTILINE)
    }
    assert [(name, match) for name, match in sorted(named) if match not in known] == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("# when: always\n", ""), 'lacks "when:"'),
        (("# undo: none: nothing happens", "# undo: none"), "should say why there is none"),
        (("# disruptive: no", "# disruptive: maybe"), "should be yes or no"),
        (("# owner: sre", "# ownr: sre"), 'unknown header key "ownr". Did you mean "owner"?'),
    ],
)
def test_a_header_that_lacks_something_is_refused(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    path = tmp_path / "do-nothing.yml"
    path.write_text(GOOD.replace(*change))
    with pytest.raises(UsageError) as caught:
        runbooks.read(path)
    assert said in str(caught.value)


def test_a_good_header_is_read_with_its_long_lines(tmp_path: Path) -> None:
    path = tmp_path / "do-nothing.yml"
    path.write_text(GOOD)
    book = runbooks.read(path)
    assert (book.effect, book.disruptive, book.undo) == ("does nothing", False, "none: nothing happens")
