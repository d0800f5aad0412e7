"""Every runbook says what it is, and plays the way the runner promises."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.playbook.task import Task

from bringup import ROOT, events, runbooks
from bringup.errors import UsageError

FILES = sorted(runbooks.FOLDER.glob("*.yml"))
PLAYED_IN = ("test_runbooks.py", "test_twins_runbooks.py")
"""End-to-end tests that play runbooks: on nodes of the lab, and those for GPUs on twins."""

HOLD = events.HOLD
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
    """A runbook's own plays; playbooks that it imports are held to their own rules."""
    found: list[dict[str, Any]] = yaml.safe_load(path.read_text())
    return [play for play in found if "ansible.builtin.import_playbook" not in play]


def tasks_of(play: dict[str, Any]) -> list[dict[str, Any]]:
    """All tasks of a play, those inside blocks with them."""
    found: list[dict[str, Any]] = []
    waiting = [*play.get("pre_tasks", []), *play.get("tasks", []), *play.get("post_tasks", [])]
    while waiting:
        task = waiting.pop(0)
        inner = [one for part in ("block", "rescue", "always") for one in task.get(part, [])]
        waiting = [*inner, *waiting]
        found += [] if inner else [task]
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
    tasks = [task for play in plays(path) for task in tasks_of(play)]
    commands = [task for task in tasks if {"ansible.builtin.command", "ansible.builtin.shell"} & set(task)]
    assert [task["name"] for task in commands if "changed_when" not in task] == []
    assert [task for task in tasks if "ignore_errors" in task] == []


def test_every_runbook_is_listed() -> None:
    assert [book.name for book in runbooks.listed()] == [path.stem for path in FILES]
    assert len(FILES) >= 26


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_runbook_holds_the_node_first_and_gives_it_back_whatever_happens(path: Path) -> None:
    for play in plays(path):
        first, [block] = play["pre_tasks"][0], play["tasks"]
        assert (first["name"], first["node_lock"]) == (HOLD, {"state": "held"})
        assert (block["always"][-1]["name"], block["always"][-1]["node_lock"]) == (
            events.GIVE_BACK,
            {"state": "released"},
        )


def test_an_undo_holds_the_nodes_first_and_gives_them_back_whatever_happens() -> None:
    [play] = yaml.safe_load((ROOT / "playbooks" / "undo.yml").read_text())
    first, [block] = play["pre_tasks"][0], play["tasks"]
    assert (first["name"], first["node_lock"]) == (HOLD, {"state": "held"})
    assert (block["always"][-1]["name"], block["always"][-1]["node_lock"]["state"]) == (
        events.GIVE_BACK,
        "released",
    )
    assert all("always" in task["tags"] for task in (first, block["always"][-1]))


AT_THE_CONTROLLER = {
    "ansible.builtin.group_by",
    "ansible.builtin.import_role",
    "ansible.builtin.include_role",
    "ansible.builtin.include_tasks",
    "role_variables",
}
"""What provisioning plays that asks the node nothing."""


def test_provisioning_holds_nodes_by_every_call_and_gives_them_back_last_and_where_they_fail() -> None:
    whole = yaml.safe_load((ROOT / "playbooks" / "provision.yml").read_text())
    assert all(play["vars"]["node_lock_along"] == "provision" for play in whole)
    for play in whole:
        [block] = play["tasks"]
        [back] = block["rescue"]
        assert back["node_lock"]["state"] == "failed"
        picked = {tag for task in block["block"] for tag in task["tags"]}
        assert picked <= set(back["tags"]), "whatever is played, it is played when that fails"
    [last] = whole[-1]["tasks"][0]["block"]
    assert (last["ansible.builtin.import_role"]["name"], last["tags"]) == ("run_stamp", ["lock", "always"])


def test_whatever_provisioning_asks_a_node_is_asked_by_a_module_that_holds_it() -> None:
    ours = {path.stem for path in (ROOT / "plugins" / "action").glob("*.py")}
    files = [ROOT / "playbooks" / "provision.yml", *(ROOT / "roles").glob("*/tasks/*.yml")]
    named = {
        (str(path.relative_to(ROOT)), word)
        for path in files
        if path.name != "undo.yml"
        for task in every_task(yaml.safe_load(path.read_text()))
        for word in task
    }
    # A boot comes after the node was drained, which held it.
    known = ours | AT_THE_CONTROLLER | {"ansible.builtin.reboot"} | set(Task.fattributes)
    assert [(path, word) for path, word in sorted(named) if word not in known] == []


def every_task(rows: Any) -> Iterator[dict[str, Any]]:
    """Tasks of a file of tasks or plays, those in blocks too."""
    for row in rows or ():
        inner = [row[key] for key in ("pre_tasks", "tasks", "block", "rescue", "always") if key in row]
        for part in inner:
            yield from every_task(part)
        if not inner:
            yield row


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_runbook_verifies_what_it_did(path: Path) -> None:
    tasks = [task for play in plays(path) for task in tasks_of(play)]
    assert [task for task in tasks if task["name"].startswith(("Verify: ", events.GATE_PREFIX))]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_runbook_is_played_by_the_end_to_end_tests_and_its_undo_too(path: Path) -> None:
    played = "".join((ROOT / "tests" / "e2e" / name).read_text() for name in PLAYED_IN)
    assert f'"{path.stem}"' in played
    undo = re.match(r"invoke run ([\w-]+)", runbooks.read(path).undo)
    assert undo is None or f'"{undo[1]}"' in played


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
