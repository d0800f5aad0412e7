"""Every shipped inventory resolves to its recorded plan, and Ansible sees what the plan says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bringup import ROOT, inventory, plan, preview, rolevars
from tests.content import renew_plans

NAMES = inventory.known()
FILES = {"hosts.yml", "plan.node", "group_vars"}
TIME_LIMIT_S = 1.5

each = pytest.mark.parametrize("name", NAMES)


def test_the_promised_inventories_are_there() -> None:
    assert {"lab", "h20", "gh200", "h100"} <= set(NAMES)


@each
def test_an_inventory_is_as_it_was_recorded(name: str) -> None:
    """When this fails: python tests/content/renew_plans.py, and read the diff as the change on the nodes."""
    assert (ROOT / "tests" / "plans" / f"{name}.yml").read_text(encoding="utf-8") == renew_plans.text(name)


def test_no_record_is_left_of_an_inventory_that_is_gone() -> None:
    assert sorted(path.stem for path in (ROOT / "tests" / "plans").glob("*.yml")) == NAMES


@each
def test_an_inventory_is_three_things_and_hosts_only_say_how_to_reach_them(name: str) -> None:
    folder = ROOT / "inventories" / name
    assert {path.name for path in folder.iterdir()} <= FILES | {"host_vars", "README.md"}
    hosts = (folder / "hosts.yml").read_text()
    assert "node_" not in hosts.replace("known_hosts", "")


def bare(value: dict[str, Any]) -> Any:
    """Listings wrap a plugin's texts: Ansible never templates them, which is what nasty values need."""
    return value["__ansible_unsafe"] if set(value) == {"__ansible_unsafe"} else value


@each
def test_ansible_sees_what_the_plan_says(name: str) -> None:
    program = Path(sys.executable).parent / "ansible-inventory"
    command = [str(program), "-i", f"inventories/{name}", "--list"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    seen: dict[str, dict[str, Any]] = json.loads(done.stdout, object_hook=bare)["_meta"]["hostvars"]
    resolved = plan.load(name)
    assert sorted(seen) == sorted(host.name for host in resolved.hosts)
    for host in resolved.hosts:
        wanted = json.loads(json.dumps(rolevars.variables(host, resolved)))
        assert {key: seen[host.name][key] for key in wanted} == wanted


@each
def test_the_whole_plan_is_json_with_the_unit_of_each_service(name: str) -> None:
    data = json.loads(json.dumps(preview.as_json(plan.load(name))))
    assert data["schema_version"] == 1
    for host in data["hosts"].values():
        for service in host["services"]:
            assert "ExecStart=" in service["unit_text"]
            assert str(service["port"]) in service["argv"]


@each
def test_no_service_is_open_without_a_key_and_no_argument_is_a_secret(name: str) -> None:
    for host in plan.load(name).hosts:
        for service in host.services:
            assert service.bind == "127.0.0.1" or service.api_key
            assert not any(word.startswith("vault_") for word in service.argv)


@each
def test_a_plan_takes_less_than_its_limit(name: str) -> None:
    """CPU seconds of a new Python that loads and shows it: whatever else runs on this machine."""
    lines = (
        "import resource, sys",
        "from bringup import plan, preview, report",
        f"preview.show(plan.load({name!r}), report.console())",
        "used = resource.getrusage(resource.RUSAGE_SELF)",
        "print(used.ru_utime + used.ru_stime, file=sys.stderr)",
    )
    command = [sys.executable, "-c", "; ".join(lines)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert "service" in done.stdout
    assert float(done.stderr) < TIME_LIMIT_S
