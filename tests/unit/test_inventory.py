"""Inventories are read as Ansible merges them, and refused with every mistake at once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bringup import ROOT, inventory
from bringup.errors import UsageError
from bringup.yamlfile import Vaulted

FILES = {
    "hosts.yml": """
all:
  vars: {where: all inline, deep: {a: 1}}
  hosts:
    alone: {own: inline}
  children:
    west:
      vars: {where: west inline}
      hosts:
        node[01:03]:
        node02: {own: "100% $HOME"}
      children:
        inner:
          hosts: {"node03": }
    east:
      hosts: {node09: {where: inline host}}
""",
    "group_vars/all.yml": "where: all file\nplain: all\n",
    "group_vars/west/a.yml": "plain: west a\nwhere: west file\n",
    "group_vars/west/b.yml": "plain: west b\n",
    "group_vars/inner.yml": "deep: {b: 2}\n",
    "group_vars/east.yml": "plain: east\nwhere: east file\n",
    "host_vars/node01.yml": "own: file\n",
}


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def messages(folder: Path) -> str:
    with pytest.raises(UsageError) as error:
        inventory.read(str(folder))
    return str(error.value)


def by_ansible(folder: Path) -> dict[str, dict[str, Any]]:
    """Each host's variables as Ansible itself merges them."""
    program = Path(sys.executable).parent / "ansible-inventory"
    command = [str(program), "-i", str(folder / "hosts.yml"), "--list"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=True)
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)["_meta"]["hostvars"]
    return {
        host: {name: value for name, value in row.items() if name != "ansible_local"}
        for host, row in found.items()
    }


def test_every_host_has_the_variables_that_ansible_gives_it(tmp_path: Path) -> None:
    write(tmp_path, FILES)
    read = {host.name: dict(host.variables) for host in inventory.read(str(tmp_path)).hosts}
    assert read == by_ansible(tmp_path)
    assert read["node02"]["own"] == "100% $HOME"


def test_hosts_come_in_the_order_of_the_file_with_their_groups(tmp_path: Path) -> None:
    write(tmp_path, FILES)
    hosts = inventory.read(str(tmp_path)).hosts
    assert [host.name for host in hosts] == ["alone", "node01", "node02", "node03", "node09"]
    assert hosts[3].groups == ("west", "inner")


def test_secrets_stay_closed(tmp_path: Path) -> None:
    secret = "vault_key: !vault |\n  $ANSIBLE_VAULT;1.1;AES256\n  3361\n"
    write(tmp_path, FILES | {"group_vars/all/vault.yml": "$ANSIBLE_VAULT;1.1;AES256\n6162\n"})
    write(tmp_path, {"host_vars/alone.yml": secret})
    host = inventory.read(str(tmp_path)).hosts[0]
    assert isinstance(host.variables["vault_key"], Vaulted)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"hosts.yml": "all: [\n"}, "not valid YAML"),
        ({"hosts.yml": "[]"}, "should be a mapping with the group `all`"),
        ({"hosts.yml": "all: {}"}, "names no host"),
        ({"hosts.yml": "all: {hosts: {a: }, vras: {}}"}, 'unknown key "vras". Did you mean "vars"?'),
        ({"hosts.yml": "all: {hosts: [a]}"}, "should be a mapping, is a list"),
        ({"hosts.yml": "all: {hosts: {'a[01:99999999]': }}"}, "empty or endless range"),
        (
            {"hosts.yml": "all: {children: {b: {children: {b: {hosts: {a: }}}}}}"},
            "is a child of itself (all > b > b)",
        ),
        (
            {"hosts.yml": "all: {hosts: {a: }}", "group_vars/al.yml": "b: 1"},
            'unknown group "al". Did you mean "all"?',
        ),
        ({"hosts.yml": "all: {hosts: {lab-01: }}", "host_vars/lab-1.yml": "b: 1"}, 'Did you mean "lab-01"?'),
        ({"hosts.yml": "all: {hosts: {a: }}", "group_vars/all.yml": "- 1"}, "should be a mapping, is a list"),
        ({"hosts.yml": "all: {hosts: {a: }}", "group_vars/all.yml": "b: 1\nb: 2"}, 'key "b" is given twice'),
    ],
)
def test_a_wrong_inventory_is_refused(tmp_path: Path, files: dict[str, str], said: str) -> None:
    assert said in messages(write(tmp_path, files))


def test_problems_of_all_files_come_at_once(tmp_path: Path) -> None:
    files = {"hosts.yml": "all: {hosts: {a: }, x: 1}", "group_vars/all.yml": "[", "host_vars/b.yml": "c: 1"}
    found = messages(write(tmp_path, files))
    assert all(word in found for word in ('unknown key "x"', "not valid YAML", 'unknown host "b"'))


def test_an_inventory_that_is_not_there_is_named_with_a_suggestion() -> None:
    with pytest.raises(UsageError, match=r'unknown inventory "h2O"\. Did you mean "h20"'):
        inventory.read("h2O")


def test_a_folder_without_hosts_is_no_inventory(tmp_path: Path) -> None:
    assert "no hosts.yml" in messages(tmp_path)
