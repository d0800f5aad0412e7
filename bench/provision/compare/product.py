"""Ours in the comparison: a checkout with four roles of the comparison's own in place of the GPU node's.

What is measured is `invoke provision`, whole and unchanged: the commit that is checked out, its playbook with other
roles between looking at the node and stamping it, and for each role a module of `bringup/rolevars`, as the README says
of adding a role. Nothing of the controller's or the nodes' code is replaced.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from bench.provision.compare import workload
from bringup import ROOT
from bringup.planned import HostPlan, Plan

KEPT = ("preflight", "run_stamp")
ROLES = tuple(f"work_{part}" for part in workload.PARTS)
PLACE = "engine_service"
"""The role of the playbook whose place ours take."""

HERE = Path(__file__).resolve().parent
THINGS = Path("catalog/settings/compared.yml")
DIGESTS = Path("catalog/settings/compared-digests.json")
GIT_LIMIT_S = 60

ROLEVARS = '''"""Plan -> variables of role `{role}`, which is there for a comparison."""

from __future__ import annotations

from typing import Any

from bench.provision.compare import product
from bringup.planned import HostPlan, Plan


def variables(host: HostPlan, plan: Plan) -> dict[str, Any]:
    """What the role brings about."""
    return product.variables("{part}", host, plan)
'''


# --- in the copy: role variables ----------------------------------------------------------------------------


def variables(part: str, host: HostPlan, plan: Plan) -> dict[str, Any]:
    """The variables of one of the comparison's roles."""
    data, _ = _read()
    found = [one for one in _things(host.name) if one.part == part]
    if part == "weights":
        return {"work_weights_models": [_model(data["values"]["weights"], found)]}
    users = [one.path for one in found if one.kind == "account"]
    entries = [_entry(one) for one in found if one.kind != "account"]
    return {**({"work_service_users": users} if users else {}), f"work_{part}_entries": entries}


@cache
def _read() -> tuple[dict[str, Any], dict[str, str]]:
    digests: dict[str, str] = json.loads((ROOT / DIGESTS).read_text(encoding="utf-8"))
    return workload.read(ROOT / THINGS), digests


@cache
def _things(host: str) -> tuple[workload.Thing, ...]:
    return tuple(workload.by_lines(workload.things(*_read(), host)))


def _entry(thing: workload.Thing) -> dict[str, Any]:
    if thing.kind == "link":
        return {"path": thing.path, "state": "link", "target": thing.target}
    if thing.kind == "absent":
        return {"path": thing.path, "state": "absent"}
    rights = {"owner": thing.owner, "group": thing.group, "mode": thing.mode}
    if thing.kind == "folder":
        return {"path": thing.path, "state": "directory", **rights}
    return {"path": thing.path, "state": "file", "content": thing.content, **rights}


def _model(folder: str, found: Sequence[workload.Thing]) -> dict[str, Any]:
    """The files as a model whose lock they are, as `rolevars/model_store.py` has it."""
    files = [{"path": Path(one.path).name, "size": 1024 * 1024, "sha256": one.sha256} for one in found]
    about = {
        "name": "compared",
        "folder": folder,
        "files": files,
        "sources": [],
        "made_by": "",
        "expects": {},
    }
    return {**about, "graft": {}, "chain": []}


# --- making the copy ----------------------------------------------------------------------------------------


def make(
    folder: Path, things: Path, digests: Mapping[str, str], hosts: Mapping[str, str], reach: Mapping[str, str]
) -> str:
    """Writes the checkout and its inventory `compared` (hosts: name -> address); the commit it is made from."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    commit = _git("rev-parse", "--short=12", "HEAD").decode().strip()
    with tarfile.open(fileobj=io.BytesIO(_git("archive", commit))) as archive:
        archive.extractall(folder, filter="data")
    # The comparison is not always committed yet.
    shutil.copytree(HERE, folder / HERE.relative_to(ROOT), dirs_exist_ok=True)
    _roles(folder)
    (folder / THINGS).write_bytes(things.read_bytes())
    (folder / DIGESTS).write_text(json.dumps(digests))
    inventory(folder, hosts, reach)
    return commit


def inventory(folder: Path, hosts: Mapping[str, str], reach: Mapping[str, str]) -> None:
    """Writes the inventory `compared`."""
    place = folder / "inventories" / "compared"
    (place / "group_vars").mkdir(parents=True, exist_ok=True)
    rows = {name: {"ansible_host": address} for name, address in hosts.items()}
    (place / "hosts.yml").write_text(yaml.safe_dump({"all": {"vars": dict(reach), "hosts": rows}}))
    (place / "group_vars" / "all.yml").write_text(yaml.safe_dump({"node_platform": "cpu"}))
    (place / "plan.node").write_text("plugin: plan\n")


def _git(*words: str) -> bytes:
    return subprocess.run(
        ["git", *words], cwd=ROOT, stdout=subprocess.PIPE, timeout=GIT_LIMIT_S, check=True
    ).stdout


def _roles(folder: Path) -> None:
    """Puts the roles in, their variables, and both into the orders of playing."""
    for part, role in zip(workload.PARTS, ROLES, strict=True):
        shutil.copytree(workload.FOLDER / "roles" / role, folder / "roles" / role)
        text = ROLEVARS.format(role=role, part=part)
        (folder / "bringup" / "rolevars" / f"{role}.py").write_text(text)
    order = folder / "bringup" / "rolevars" / "__init__.py"
    names = json.dumps([KEPT[0], *ROLES, KEPT[1]])
    text, count = re.subn(
        r"^ROLES = \(.*?^\)", f"ROLES = tuple({names})", order.read_text(), flags=re.M | re.S
    )
    if count != 1:
        raise SystemExit(f"{order}: its list of roles is not where it was")
    order.write_text(text)
    # The schedule's role stands where the product's own does among those that preflight need not judge.
    judged = folder / "bringup" / "seal.py"
    judged.write_text(
        judged.read_text().replace('frozenset(("scheduled_restart"', 'frozenset(("work_schedule"')
    )
    playbook = folder / "playbooks" / "provision.yml"
    plays = [_play(play) for play in yaml.safe_load(playbook.read_text())]
    if sum(len(_names(play)) for play in plays) != len(KEPT) + len(ROLES):
        raise SystemExit(f"{playbook}: its roles are not where they were")
    playbook.write_text(yaml.safe_dump(plays, sort_keys=False))


def _play(play: dict[str, Any]) -> dict[str, Any]:
    """The play as it is, with our roles for PLACE and without the other roles of a GPU node."""
    for task in play["tasks"]:
        rows: list[dict[str, Any]] = []
        for row in task.get("block", ()):
            role = _role(row)
            if role == PLACE and "import_role" in json.dumps(row):
                rows += [_brings(row, name) for name in ROLES]
            elif role is None or role in KEPT or "include_role" in json.dumps(row):
                rows.append(row)
        for row in task.get("rescue", ()):
            # What is done when any of the roles fails is done when ours do.
            if PLACE in row.get("tags", ()):
                row["tags"] = [*row["tags"], *ROLES]
        for row in rows:
            # There are no servers, so nothing of them is kept.
            row.get("vars", {}).pop("run_stamp_kept", None)
        if "block" in task:
            task["block"] = rows or [
                {"name": "Nothing of this is in the comparison", "ansible.builtin.meta": "noop"}
            ]
    return play


def _role(row: Mapping[str, Any]) -> str | None:
    for name in ("ansible.builtin.import_role", "ansible.builtin.include_role"):
        if name in row:
            return str(row[name]["name"])
    return None


def _brings(row: Mapping[str, Any], role: str) -> dict[str, Any]:
    """The task that brings PLACE, for another role."""
    rest = {name: value for name, value in row.items() if name != "vars"}
    copy: dict[str, Any] = json.loads(json.dumps(rest).replace(PLACE, role))
    return {**copy, "name": f"Bring {role}"}


def _names(play: Mapping[str, Any]) -> list[str]:
    rows = [row for task in play["tasks"] for row in task.get("block", ())]
    return [role for row in rows if "ansible.builtin.import_role" in row and (role := _role(row))]
