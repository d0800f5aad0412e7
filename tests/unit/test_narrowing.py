"""A narrowed playbook plays what Ansible itself would pick of the whole one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bringup import ROOT, rolevars, yamlfile
from bringup.narrowing import narrowed

PLAYBOOK = ROOT / "playbooks" / "provision.yml"
TAGS = [
    ["scheduled_restart", "run_stamp"],
    ["lock"],
    ["preflight", "engine_service", "scheduled_restart", "run_stamp"],
    ["system_settings"],
    ["preflight", "nvidia_driver", "cuda_runtime"],
    list(rolevars.ROLES),
]


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
    plays = narrowed(yamlfile.read_yaml(PLAYBOOK), tags)
    path.write_text(json.dumps(plays))
    assert listed(path, tags) == listed(PLAYBOOK, tags)
    assert [play for play in plays if not play["tasks"]] == []
    assert all(play["tasks"][0]["rescue"] for play in plays)


def test_one_role_is_two_plays_and_what_comes_first_stays_first() -> None:
    plays = narrowed(yamlfile.read_yaml(PLAYBOOK), ["scheduled_restart"])
    assert [play["name"] for play in plays] == [
        "Bring each node's servers to their planned state",
        "Write down what each node is now",
    ]
    assert [["role_variables" in task for task in play.get("pre_tasks", ())] for play in plays] == [
        [True],
        [],
    ]
    assert narrowed([{"hosts": "all", "tasks": [{"name": "x", "tags": ["a"]}]}], ["b"]) == []
