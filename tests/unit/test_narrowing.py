"""A narrowed playbook plays what Ansible itself would pick of the whole one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bringup import ROOT, rolevars, yamlfile
from bringup.narrowing import ALONG, NOT_YET, narrowed

PLAYBOOK = ROOT / "playbooks" / "provision.yml"
TAGS = [
    ["scheduled_restart", "run_stamp"],
    ["lock"],
    ["preflight", "engine_service", "scheduled_restart", "run_stamp"],
    ["system_settings"],
    ["preflight", "nvidia_driver", "cuda_runtime"],
    list(rolevars.ROLES),
]


def parts(role: str, part: str) -> Any:
    """What a role's main file says."""
    return yamlfile.read_yaml(ROOT / "roles" / role / part / "main.yml")


def listed(playbook: Path, tags: list[str]) -> list[str]:
    """Names of the tasks that Ansible says it would play."""
    program = str(Path(sys.executable).parent / "ansible-playbook")
    done = subprocess.run(
        [program, "-i", "localhost,", "--list-tasks", "--tags", ",".join(tags), str(playbook)],
        cwd=ROOT,
        env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return [
        line.strip()
        for line in done.stdout.splitlines()
        if re.search(r"\tTAGS: ", line) and "play #" not in line
    ]


@pytest.mark.parametrize("tags", TAGS, ids=",".join)
def test_ansible_plays_the_same_tasks_of_both(tags: list[str], tmp_path: Path) -> None:
    path = tmp_path / "provision.yml"
    plays = narrowed(yamlfile.read_yaml(PLAYBOOK), tags, parts)
    path.write_text(json.dumps(plays))
    assert listed(path, tags) == listed(PLAYBOOK, tags)
    assert [play for play in plays if not play["tasks"]] == []
    assert all(play["tasks"][0]["rescue"] for play in plays)


def test_one_role_is_two_plays_and_what_comes_first_stays_first() -> None:
    plays = narrowed(yamlfile.read_yaml(PLAYBOOK), ["scheduled_restart"], parts)
    assert [play["name"] for play in plays] == [
        "Bring each node's servers to their planned state",
        "Write down what each node is now",
    ]
    assert [["role_variables" in task for task in play.get("pre_tasks", ())] for play in plays] == [
        [True],
        [],
    ]
    assert narrowed([{"hosts": "all", "tasks": [{"name": "x", "tags": ["a"]}]}], ["b"], parts) == []


def test_the_last_call_goes_along_with_a_last_role_that_is_one_call() -> None:
    *_, before, last = narrowed(yamlfile.read_yaml(PLAYBOOK), ["cuda_runtime", "scheduled_restart"], parts)
    along = before["vars"][ALONG]
    assert along["role"] == "scheduled_restart"
    assert along["options"] == parts("run_stamp", "tasks")[0]["run_stamp"]
    assert set(along["vars"]) == {"run_stamp_plan", "run_stamp_kept"}
    assert before["vars"]["node_lock_along"] == "provision"
    assert last["hosts"] == NOT_YET


@pytest.mark.parametrize(
    "tags",
    [["engine_service", "scheduled_restart"], ["system_settings"], ["model_store"], ["lock"]],
    ids=",".join,
)
def test_it_goes_by_itself_where_something_else_may_come_between(tags: list[str]) -> None:
    """Restarts one host after another, a second look at the node, a role of several tasks, another play's role."""
    plays = narrowed(yamlfile.read_yaml(PLAYBOOK), tags, parts)
    assert [play for play in plays if ALONG in (play.get("vars") or {})] == []
    assert plays[-1]["hosts"] == "all"


def test_a_role_whose_task_is_done_again_and_again_is_not_one_call() -> None:
    plays = yamlfile.read_yaml(PLAYBOOK)
    for more in ({"loop": "{{ x }}"}, {"with_items": "{{ x }}"}, {"until": "x"}):

        def looping(role: str, part: str, more: dict[str, str] = more) -> Any:
            found = parts(role, part)
            return [{**found[0], **more}] if (role, part) == ("scheduled_restart", "tasks") else found

        assert narrowed(plays, ["scheduled_restart"], looping)[-1]["hosts"] == "all"
