"""The playbook of stock modules, one task a thing, made from `things/things.yml`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from bench.provision.compare import workload
from bench.provision.compare.workload import Thing

BUILTIN = "ansible.builtin."


def playbook(data: Mapping[str, Any], digests: Mapping[str, str]) -> list[dict[str, Any]]:
    """One play with the facts of each host and a task for each thing. Contents of templates are left to Ansible."""
    tasks = [task for thing in workload.things(data, digests, "") for task in _tasks(thing)]
    variables = {**data["values"], "node": "{{ inventory_hostname }}"}
    return [{"name": "Bring everything about", "hosts": "all", "vars": variables, "tasks": tasks}]


def write(folder: Path, data: Mapping[str, Any], digests: Mapping[str, str]) -> Path:
    """Writes `site.yml` and its templates into a folder."""
    (folder / "templates").mkdir(parents=True, exist_ok=True)
    for path in workload.TEMPLATES.iterdir():
        (folder / "templates" / path.name).write_bytes(path.read_bytes())
    site = folder / "site.yml"
    site.write_text(yaml.safe_dump(playbook(data, digests), sort_keys=False, allow_unicode=True))
    return site


def _tasks(thing: Thing) -> list[dict[str, Any]]:
    name = f"{thing.kind} {thing.line or thing.path}"
    rights = {"owner": thing.owner, "group": thing.group, "mode": thing.mode}
    if thing.kind == "account":
        group = {"name": f"group {thing.path}", f"{BUILTIN}group": {"name": thing.path, "system": True}}
        user = {
            "name": thing.path,
            "group": thing.path,
            "system": True,
            "create_home": False,
            "home": "/nonexistent",
            "shell": "/usr/sbin/nologin",
        }
        return [group, {"name": f"user {thing.path}", f"{BUILTIN}user": user}]
    if thing.kind == "weight":
        look = {
            "path": thing.path,
            "checksum_algorithm": "sha256",
            "get_mime": False,
            "get_attributes": False,
        }
        task = {"name": name, f"{BUILTIN}stat": look, "register": "found"}
        return [{**task, "failed_when": f"found.stat.checksum != '{thing.sha256}'"}]
    return [{"name": name, **_module(thing, rights)}]


def _module(thing: Thing, rights: Mapping[str, str]) -> dict[str, Any]:
    if thing.kind == "folder":
        return {f"{BUILTIN}file": {"path": thing.path, "state": "directory", **rights}}
    if thing.kind == "link":
        # Two of the targets are there only after the link, or on other machines.
        link = {"path": thing.path, "src": thing.target, "state": "link", "force": True}
        return {f"{BUILTIN}file": link}
    if thing.kind == "absent":
        return {f"{BUILTIN}file": {"path": thing.path, "state": "absent"}}
    if thing.kind == "line":
        line = {"path": thing.path, "regexp": f"^{re.escape(thing.key)}", "line": thing.line, "create": True}
        return {f"{BUILTIN}lineinfile": {**line, **rights}}
    if thing.source:
        return {f"{BUILTIN}template": {"src": thing.source, "dest": thing.path, **rights}}
    return {f"{BUILTIN}copy": {"content": thing.content, "dest": thing.path, **rights}}
