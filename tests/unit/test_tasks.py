"""The command line as a person meets it: real processes, real exit codes."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from bringup import ROOT, commandline
from bringup.errors import Exit

INVOKE = Path(sys.executable).parent / "invoke"
LIMIT_S = 240
LOCAL = "all: {hosts: {a: {ansible_connection: local}, b: {ansible_connection: local}}}"


def invoke(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(INVOKE), *words],
        cwd=ROOT,
        env={**os.environ, "NO_COLOR": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["provison"], 'unknown command "provison". Did you mean "provision"?'),
        (["provision", "--inventry", "lab"], 'unknown flag --inventry. Did you mean "--inventory"?'),
        (["provision", "--inventory=lab", "--chek"], 'unknown flag --chek. Did you mean "--check"?'),
        (["provision"], "provision: missing inventory"),
        (["provision", "lab", "extra"], 'unexpected argument "extra"'),
        (["status", "--inventory"], "--inventory needs a value"),
        (["history", "show"], "history.show: missing run"),
        (["history", "show", "never-was"], "there is no such run"),
        (["history.list", "--number", "many"], "'many' should be a number"),
        (["provision", "--inventory", "no-such-place"], 'unknown inventory "no-such-place"'),
        (["provision", "--inventory", "lab", "--extra", "oops"], '"oops" is not KEY=VALUE'),
        (["exec", "--inventory", "lab"], "nothing to run. Put the command after --"),
        (["--lst"], "unknown flag --lst"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_command_line_is_one_message_and_exit_2(words: list[str], said: str) -> None:
    done = invoke(*words)
    assert done.returncode == Exit.USAGE, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_every_command_explains_itself() -> None:
    listed = json.loads(invoke("--list", "--list-format=json").stdout)
    tasks = list(listed["tasks"]) + [
        {**task, "name": f"{group['name']}.{task['name']}"}
        for group in listed["collections"]
        for task in group["tasks"]
    ]
    assert len(tasks) > 10
    assert [task["name"] for task in tasks if not task["help"]] == []


def test_the_help_of_a_command_explains_each_flag() -> None:
    said = invoke("--help", "provision").stdout
    assert "show what would change, with diffs" in said
    assert "folder under inventories/" in said


def test_the_list_of_commands_needs_no_heavy_module() -> None:
    """What makes it come at once; bench/ has the seconds."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", str(INVOKE), "--list"],
        cwd=ROOT,
        env={**os.environ, "NO_COLOR": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == Exit.DONE
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "invoke" in imported
    assert (
        imported & {"ansible", "ansible_runner", "fabric", "paramiko", "pydantic", "jinja2", "rich"} == set()
    )


@pytest.mark.parametrize(
    "words", [("LOG",), ("--json", "LOG"), ("LOG", "--json"), ("--log", "LOG"), ("-",), ()]
)
def test_a_log_is_diagnosed_however_it_is_given(words: tuple[str, ...], tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("INFO starting\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n")
    with log.open() as text:
        done = subprocess.run(
            [str(INVOKE), "diagnose", *(str(log) if word == "LOG" else word for word in words)],
            cwd=ROOT,
            stdin=text if "LOG" not in words else subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    assert done.returncode == Exit.FAILED, done.stderr
    assert "memory" in done.stdout


def test_words_after_the_dashes_keep_their_quotes() -> None:
    given = ("--model-path", "m", "--json-model-override-args", '{"a": 1}', "--chat-template", "a b")
    for words in (given, (shlex.join(given),)):
        done = invoke("flags", "--engine", "sglang", "--version", "0.5.10.post1", "--", *words)
        assert done.returncode == Exit.DONE, done.stdout + done.stderr


def test_a_command_of_two_words_is_the_same_as_with_a_dot() -> None:
    tasks = {"history.show", "history", "lab.up"}
    assert commandline.joined(["history", "show", "x"], tasks) == ["history.show", "x"]
    assert commandline.joined(["history", "--json"], tasks) == ["history", "--json"]
    assert commandline.joined(["lab.up"], tasks) == ["lab.up"]


def test_history_is_one_json_object() -> None:
    done = invoke("history", "--json")
    assert done.returncode == 0
    data = json.loads(done.stdout)
    assert data["schema_version"] == 1
    assert isinstance(data["runs"], list)


def test_without_a_terminal_nothing_disruptive_is_done_unasked(tmp_path: Path) -> None:
    (tmp_path / "hosts.yml").write_text(LOCAL)
    done = invoke("exec", "--inventory", str(tmp_path), "--", "touch", str(tmp_path / "touched"))
    assert done.returncode == Exit.LOCKED
    assert "Add --yes to agree" in done.stderr
    assert not (tmp_path / "touched").exists()


def test_a_command_on_many_hosts_groups_equal_output_and_keeps_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "hosts.yml").write_text(LOCAL)
    done = invoke("exec", "--inventory", str(tmp_path), "--yes", "--", "echo 100% ; exit 3")
    assert done.returncode == Exit.FAILED
    assert done.stdout.splitlines() == ["a, b  (exit 3)", "    100%"]
