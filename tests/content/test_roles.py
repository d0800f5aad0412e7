"""Every role obeys the house's rules: what it declares, what it is called, and what it must not know."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from bringup import ROOT
from bringup.planned import HostPlan, ModelFile, ModelSource, Plan, PlannedEnvironment, PlannedModel
from bringup.rolevars import ROLES

FOLDERS = sorted(path for path in (ROOT / "roles").iterdir() if (path / "tasks").is_dir())
NAMES = re.compile(
    r"\b(h20|gh200|h100|h200|b200|a100|sglang|vllm|llama|xllamacpp|glm[0-9.-]*|deepseek|qwen)\b", re.I
)
PARTS = ("tasks/main.yml", "defaults/main.yml", "meta/argument_specs.yml", "meta/main.yml")
SCENARIO = ("molecule.yml", "converge.yml", "verify.yml")


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def options(role: Path) -> dict[str, dict[str, Any]]:
    declared: dict[str, dict[str, Any]] = read(role / "meta" / "argument_specs.yml")["argument_specs"][
        "main"
    ]["options"]
    return declared


def each_role(function: Any) -> Any:
    return pytest.mark.parametrize("role", FOLDERS, ids=lambda path: path.name)(function)


@each_role
def test_a_role_has_all_its_parts_and_a_scenario(role: Path) -> None:
    missing = [part for part in PARTS if not (role / part).is_file()]
    missing += [part for part in SCENARIO if not (role / "molecule" / "default" / part).is_file()]
    assert missing == []


@each_role
def test_defaults_are_those_of_the_argument_specs(role: Path) -> None:
    declared = {name: about["default"] for name, about in options(role).items() if "default" in about}
    assert (read(role / "defaults" / "main.yml") or {}) == declared


@each_role
def test_an_option_is_required_or_has_a_default_and_says_what_it_is(role: Path) -> None:
    wrong = [
        name
        for name, about in options(role).items()
        if ("default" in about) == bool(about.get("required")) or not about.get("description")
    ]
    assert wrong == []


@each_role
def test_every_public_variable_starts_with_the_roles_name(role: Path) -> None:
    assert [name for name in options(role) if not name.startswith(f"{role.name}_")] == []


@each_role
def test_a_sub_option_has_no_default_because_ansible_would_not_apply_it(role: Path) -> None:
    def below(name: str, about: dict[str, Any]) -> list[str]:
        found = []
        for key, inner in (about.get("options") or {}).items():
            found += [f"{name}.{key}"] if "default" in inner else []
            found += below(f"{name}.{key}", inner)
        return found

    assert [text for name, about in options(role).items() for text in below(name, about)] == []


@each_role
def test_every_variable_that_tasks_use_is_declared_or_internal(role: Path) -> None:
    known = set(options(role))
    texts = [
        path.read_text() for part in ("tasks", "handlers") for path in sorted((role / part).glob("*.yml"))
    ]
    used = {name for text in texts for name in re.findall(rf"(?<![\w.])({role.name}_\w+)", text)}
    modules = {path.stem for path in (ROOT / "plugins" / "modules").glob("*.py")}
    actions = {path.stem for path in (ROOT / "plugins" / "action").glob("*.py")}
    filters = {
        name
        for path in (ROOT / "plugins").glob("filter/*.py")
        for name in re.findall(r'"(\w+)":', path.read_text())
    }
    groups = {name for text in texts for name in re.findall(r"^\s+key: (\w+)$", text, re.MULTILINE)}
    assert sorted(used - known - modules - actions - filters - groups) == []


@each_role
def test_a_role_knows_no_platform_engine_or_model(role: Path) -> None:
    found = []
    for path in sorted(role.rglob("*")):
        if path.is_file() and "molecule" not in path.relative_to(role).parts and path.suffix != ".md":
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if NAMES.search(line):
                    found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert found == []


@each_role
def test_tasks_have_names_and_no_shortcuts(role: Path) -> None:
    wrong = []
    for path in sorted((role / "tasks").glob("*.yml")):
        for task in read(path) or []:
            wrong += [f"{path.name}: a task has no name"] if not task.get("name") else []
            wrong += [f"{path.name}: {task.get('name')}: ignore_errors"] if "ignore_errors" in task else []
            wrong += (
                [f"{path.name}: {task.get('name')}: set_fact"] if "ansible.builtin.set_fact" in task else []
            )
    assert wrong == []


def plan() -> tuple[HostPlan, Plan]:
    environment = PlannedEnvironment(
        "engine",
        "pip",
        "system",
        "locks/engine.txt",
        "abc",
        "/opt/bringup/envs/engine-abc",
        (("python", "-c", ""),),
    )
    model = PlannedModel(
        "words",
        "/data/words",
        "/data/words/w",
        4,
        (ModelFile("w", 4, "0" * 64),),
        (ModelSource("http", "http://h"),),
    )
    host = HostPlan("node", ("all",), "cpu", "x86_64", (), (model,), (environment,), expected={"arch": "any"})
    return host, Plan("lab", (host,), (), "digest")


@pytest.mark.parametrize("name", ROLES)
def test_what_the_plan_gives_a_role_is_declared_by_it(name: str) -> None:
    host, whole = plan()
    given = import_module(f"bringup.rolevars.{name}").variables(host, whole)
    declared = options(ROOT / "roles" / name)
    assert sorted(set(given) - set(declared)) == []
    assert all(key.startswith(f"{name}_") for key in given)


@pytest.mark.parametrize("name", ROLES)
def test_rows_that_the_plan_gives_have_exactly_the_declared_keys(name: str) -> None:
    host, whole = plan()
    given = import_module(f"bringup.rolevars.{name}").variables(host, whole)
    declared = options(ROOT / "roles" / name)
    for key, value in given.items():
        inner = declared[key].get("options")
        if inner and isinstance(value, list):
            required = {name for name, about in inner.items() if about.get("required")}
            assert [set(row) for row in value if not required <= set(row) <= set(inner)] == []


def test_every_role_of_the_playbook_exists_and_has_its_name_as_tag() -> None:
    plays = read(ROOT / "playbooks" / "provision.yml")
    tasks = [task for play in plays for block in play["tasks"] for task in block["block"]]
    imported = "ansible.builtin.import_role"
    roles = {task[imported]["name"]: task["tags"] for task in tasks if imported in task}
    assert tuple(roles) == ROLES
    assert [name for name in roles if not (ROOT / "roles" / name).is_dir()] == []
    # The last call on a node also gives it back, whatever tags a run leaves out.
    assert roles.pop(ROLES[-1]) == ["lock", "always"]
    assert [name for name, tags in roles.items() if name not in tags] == []


def test_every_role_that_changes_a_node_is_undone_the_last_one_first() -> None:
    [play] = read(ROOT / "playbooks" / "undo.yml")
    [block] = play["tasks"]
    imported = "ansible.builtin.import_role"
    undone = [(task[imported], task["tags"]) for task in block["block"] if imported in task]
    assert [role["name"] for role, _ in undone] == [name for name in reversed(ROLES) if name != "preflight"]
    assert all(role["tasks_from"] == "undo" and tags == [role["name"]] for role, tags in undone)
