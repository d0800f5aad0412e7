"""Our modules against Ansible's own, on real nodes: where ours have been a twin of stock modules finds nothing to
change, and ours find nothing where it has been.

What is compared is all that the plan gives of users, files, folders, links and units: a role's new file is in it by
itself.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from bringup import ROOT, lab, plan, rolevars
from bringup.errors import Exit
from bringup.rolevars import scheduled_restart
from tests.e2e import site as sites
from tests.e2e.site import Site, on

TWIN = ROOT / "tests" / "e2e" / "stock.yml"
PLAYBOOK = Path(sys.executable).parent / "ansible-playbook"
LIMIT_S = 1200
ROLES = ("system_settings", "log_rotation", "scheduled_restart")
"""Roles that come to their end on a node on which no other has been."""

LATER = ("engine_service",)
"""Roles that need others first: their things are compared where all have been."""

SETTINGS: Mapping[str, Any] = {
    "system_settings_files": [
        {"path": "/etc/security/limits.d/60-e2e.conf", "content": '* hard nofile 1048576 # 100% $HOME "ü"\n'},
        {"path": "/etc/sysctl.d/60-e2e.conf", "content": "vm.max_map_count = 262144\n", "mode": "0640"},
        {
            "path": "/srv/e2e folder",
            "state": "directory",
            "owner": "bringup-log",
            "group": "adm",
            "mode": "2750",
        },
        {"path": "/srv/e2e-link", "state": "link", "target": "e2e folder"},
        {"path": "/srv/e2e-gone", "state": "absent"},
    ],
}
"""Things of each state with nasty names, beside those of the plan."""

SYSTEM_USERS = {"log_rotation": ["bringup-log"], "scheduled_restart": ["bringup-lease"]}


def things(site: Site, roles: tuple[str, ...]) -> dict[str, Any]:
    """Host -> users, units and things by their state, as the stock twin takes them, each once."""
    planned = plan.load(str(site.folder))
    found = {}
    for host in planned.hosts:
        given = {**rolevars.variables(host, planned), **settings_of(site, host.name)}
        users = [*(given["engine_service_users"] if "engine_service" in roles else ())]
        users += [name for role in roles for name in SYSTEM_USERS.get(role, ())]
        rows = {row["path"]: whole(row) for role in roles for row in given[f"{role}_files"]}
        if "scheduled_restart" in roles:
            # Ours makes the folder on the way; a stock module is told.
            rows["/etc/bringup"] = whole({"path": "/etc/bringup", "state": "directory", "mode": "0755"})
            rows["/etc/bringup/lease.json"] = lease(site, given["scheduled_restart_groups"], host.name)
        units = [row for role in roles if role != "system_settings" for row in given[f"{role}_units"]]
        found[host.name] = {
            "users": users,
            "units": units,
            "started": [row for row in units if row["started"]],
            **{state: [row for row in rows.values() if row["state"] == state] for state in STATES},
        }
    return found


STATES = ("directory", "file", "link", "absent")


def settings_of(site: Site, host: str) -> dict[str, Any]:
    file = site.folder / "host_vars" / f"{host}.yml"
    return dict(yaml.safe_load(file.read_text())) if file.is_file() else {}


def whole(row: Mapping[str, Any]) -> dict[str, Any]:
    """An entry with its defaults, and a program's text."""
    made = {"state": "file", "owner": "root", "group": "root", "mode": "0644", "content": "", **row}
    if "program" in row:
        made["content"] = (ROOT / "bringup" / "node" / str(row["program"])).read_text()
    return made


def lease(site: Site, groups: list[dict[str, Any]], host: str) -> dict[str, Any]:
    """The one file that the role's own template makes."""
    if not groups:
        return {"path": "/etc/bringup/lease.json", "state": "absent"}
    addresses = {name: lab.address(name)[0] for name in site.names}
    data = scheduled_restart.lease_settings(groups, addresses, host, 7766)
    text = json.dumps(data, indent=4, sort_keys=True, ensure_ascii=False) + "\n"
    return whole({"path": "/etc/bringup/lease.json", "content": text})


def stock(site: Site, folder: Path, roles: tuple[str, ...], *words: str) -> dict[str, int]:
    """Host -> what the stock twin changed, or would change; fails with its output."""
    variables = folder / "things.json"
    found = things(site, roles)
    for number, row in enumerate(row for host in found.values() for row in host["file"]):
        # Beside the variables, in which Ansible would take a text with braces for a template.
        source = folder / f"{number}.txt"
        source.write_text(row.pop("content"))
        row["source"] = str(source)
    variables.write_text(json.dumps({"stock": found}))
    done = subprocess.run(
        [str(PLAYBOOK), "-i", str(site.folder), str(TWIN), "-e", f"@{variables}", "--diff", *words],
        cwd=ROOT,
        env={**os.environ, "ANSIBLE_NOCOLOR": "1", "COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    recap = re.findall(r"^(\S+)\s+: ok=\d+\s+changed=(\d+)", done.stdout, re.MULTILINE)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    changed = {name: int(count) for name, count in recap}
    assert set(changed) == set(site.names), done.stdout[-4000:]
    print(done.stdout[-4000:])
    return changed


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Two nodes on which nothing has been."""
    made = sites.make(tmp_path_factory.mktemp("inventories") / "stock", ("e2e-11", "e2e-12"))
    (made.folder / "host_vars").mkdir(exist_ok=True)
    for name in made.names:
        (made.folder / "host_vars" / f"{name}.yml").write_text(
            yaml.safe_dump(dict(SETTINGS), allow_unicode=True)
        )
    yield made
    lab.down(list(made.names), say=sites.quiet)


def ours(site: Site, *words: str) -> dict[str, Any]:
    """The run's data; only the roles that both can do."""
    done = site.provision("--tags", ",".join(ROLES), *words)
    assert done.code in (Exit.DONE, Exit.PENDING), done.text
    return done.data


def test_ours_find_nothing_to_change_where_stock_modules_have_been(bare: Site, tmp_path: Path) -> None:
    assert all(stock(bare, tmp_path, ROLES).values()), "there was something to do"
    data = ours(bare, "--check")
    assert [(change["task"], change["diff"]) for change in data["changes"]] == []


def test_stock_modules_find_nothing_to_change_where_ours_have_been(bare: Site, tmp_path: Path) -> None:
    """What somebody changed is brought back by ours before: else the stock twin would only see its own work."""
    for name in bare.names:
        on(
            name,
            "systemctl disable --now bringup-lease.service; systemctl stop 'bringup-*.timer'"
            " && rm -r /etc/systemd/system/bringup-* /opt/bringup /etc/bringup '/srv/e2e folder' /srv/e2e-link"
            " && rm /etc/security/limits.d/60-e2e.conf && chmod 600 /etc/sysctl.d/60-e2e.conf && touch /srv/e2e-gone"
            " && systemctl daemon-reload",
        )
    data = ours(bare)
    assert all(host["changed"] for host in data["hosts"].values()), "it was ours that brought it back"
    assert stock(bare, tmp_path, ROLES, "--check") == dict.fromkeys(bare.names, 0)


def test_stock_modules_find_nothing_to_change_on_nodes_that_serve(pair: Site, tmp_path: Path) -> None:
    done = pair.provision()
    assert done.code == Exit.DONE, done.text
    assert stock(pair, tmp_path, (*ROLES, *LATER), "--check") == dict.fromkeys(pair.names, 0)
