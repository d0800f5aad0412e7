"""What goes into each role on each host, and what follows when a node says how its seals hold.

A role on a host is sealed when the digest of what goes into it is the one that its seal has, and the node has
found everything as the role left it (`bringup/node/seal.py`). What goes in: the role's own files, the modules and
programs that it names with all that they import, the role's variables, and every variable of the inventory that
these name, secrets as they stand in the inventory. Digests of it leave this machine only to lie on the node that
has the same secrets.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bringup import ROOT, runs
from bringup.inventory import Host, closed_files

SHARED = ("catalog/tools/*", "playbooks/provision.yml")
"""What all roles run with, as patterns."""

CODE = ("plugins/modules", "plugins/action", "plugins/filter", "bringup/node")
"""Folders of what roles name: a file's name without suffix in a role's text or variables means that file."""

UNDO = "undo.yml"
"""Tasks that no run plays which brings a role."""

EXECUTED = re.compile(r"module_name=\"(\w+)\"")
IMPORTS = re.compile(r"^\s*from +([\w.]+) +import +([^#\n(]+|\([^)]*\))", re.MULTILINE)
ROOT_OF = re.compile(r"^ansible/module_utils/bringup_node")
"""What `bringup/node` is called on a node."""

PARTS = ("defaults", "files", "handlers", "tasks", "templates", "vars")
"""Folders of a role that decide what it does."""

FILE = "seals.json"
STAMP = "run_stamp"
PREFLIGHT = "preflight"

UNJUDGED = frozenset(("scheduled_restart", STAMP))
"""Roles that change nothing by which preflight judges a node: timers, and records."""

IDLE = (
    "system_settings",
    "nvidia_driver",
    "cuda_runtime",
    "engine_env",
    "library_fixes",
    "model_store",
)
"""Roles none of whose tasks does anything where all of their variables are the defaults (a test holds it)."""

FOLLOWS: Mapping[str, tuple[str, ...]] = {
    "cuda_runtime": ("nvidia_driver",),
    "library_fixes": ("nvidia_driver", "engine_env"),
    "engine_service": (
        "nvidia_driver",
        "cuda_runtime",
        "engine_env",
        "library_fixes",
        "model_store",
        "log_rotation",
    ),
    "scheduled_restart": ("engine_service",),
}
"""Role -> roles on whose outcome it builds: it is played after any of them was."""


@dataclass(frozen=True)
class Verdict:
    """What one node said. `why`: it could not be asked. `held`: a run holds it. `seals`: role -> inputs,
    differs, basis, run, at (`bringup/node/seal.py: verify`)."""

    host: str
    why: str = ""
    held: bool = False
    seals: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


# --- what goes in -------------------------------------------------------------------------------------------


def inputs(
    given: Mapping[str, Mapping[str, Any]], hosts: Sequence[Host], folder: Path, extra: Mapping[str, Any]
) -> dict[str, dict[str, str]]:
    """Host -> role -> digest of all that goes into it. `given`: variables of roles by host; `hosts`: the inventory's,
    with their variables; `folder`: the inventory's; `extra`: variables of this run, which win over all others."""
    from bringup import rolevars

    known = {host.name: {**host.variables, **extra} for host in hosts}
    code = {role: _files(role) for role in rolevars.ROLES}
    shared = _digest(path for pattern in SHARED for path in ROOT.glob(pattern)) + version("ansible-core")
    programs = _Programs()
    closed = [hashlib.sha256(path.read_bytes()).hexdigest() for path in closed_files(folder)]
    found: dict[str, dict[str, str]] = {}
    for host, planned in given.items():
        mine = known.get(host, {})
        found[host] = {}
        for role, (digest, words) in code.items():
            own = {name: value for name, value in planned.items() if name.startswith(f"{role}_")}
            named = words | _words(own)
            used = _used(named, mine)
            data: dict[str, Any] = {
                "code": [digest, shared, programs.digest(named)],
                "plan": own,
                "used": used,
            }
            if "hostvars" in words:
                data["peers"] = {
                    name: _used(words | {"ansible_host"}, variables) for name, variables in known.items()
                }
            if any(word.startswith("vault_") for word in named | _words(used)):
                data["closed"] = closed
            text = json.dumps(data, sort_keys=True, default=str)
            found[host][role] = hashlib.sha256(text.encode()).hexdigest()[:40]
    return found


def _used(words: Iterable[str], variables: Mapping[str, Any]) -> dict[str, Any]:
    """The variables that some words name, and those that their values name in turn."""
    found: dict[str, Any] = {}
    todo = set(words) & set(variables)
    while todo:
        name = todo.pop()
        found[name] = variables[name]
        todo |= (_words(variables[name]) & set(variables)) - set(found)
    return found


def _words(value: Any) -> set[str]:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return set(re.findall(r"\w+", text))


def _files(role: str) -> tuple[str, set[str]]:
    """Digest of a role's files, and the words in them."""
    folder = ROOT / "roles" / role
    files = [path for part in PARTS for path in (folder / part).rglob("*")]
    files = [path for path in files if path.is_file() and path.name != UNDO]
    words = {word for path in files for word in _words(path.read_text(encoding="utf-8", errors="replace"))}
    return _digest(files), words


def _digest(files: Iterable[Path]) -> str:
    total = hashlib.sha256()
    for path in sorted(files):
        if path.is_file():
            total.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return total.hexdigest()


class _Programs:
    """Modules and programs of the node by their names, with all that they import of this checkout."""

    def __init__(self) -> None:
        self._named: dict[str, list[Path]] = {}
        self._imports: dict[Path, set[Path]] = {}
        self._digests: dict[frozenset[str], str] = {}
        for folder in CODE:
            for path in (ROOT / folder).glob("*.py"):
                self._named.setdefault(path.stem, []).append(path)

    def digest(self, words: Iterable[str]) -> str:
        """Of all files that some words name, and of what these import."""
        names = frozenset(set(words) & set(self._named))
        if names not in self._digests:
            self._digests[names] = _digest(
                self._reached(path for name in names for path in self._named[name])
            )
        return self._digests[names]

    def _reached(self, files: Iterable[Path]) -> set[Path]:
        found: set[Path] = set()
        todo = set(files)
        while todo:
            path = todo.pop()
            found.add(path)
            if path not in self._imports:
                self._imports[path] = _imported(path)
            todo |= self._imports[path] - found
        return found


def _imported(path: Path) -> set[Path]:
    """Files of this checkout that a Python file imports, at its top or later. In strings: a Path for each that may be
    there takes longer than all else."""
    text = path.read_text(encoding="utf-8")
    root = f"{ROOT}/"
    found = {f"{root}plugins/modules/{name}.py" for name in EXECUTED.findall(text)}
    for module, names in IMPORTS.findall(text):
        words = module.lstrip(".").replace(".", "/")
        inside = f"{path.parent}/{words}".rstrip("/")
        folder = inside if module.startswith(".") else root + ROOT_OF.sub("bringup/node", words)
        found.add(f"{folder}.py")
        found.add(f"{folder}/__init__.py")
        found |= {f"{folder}/{name}.py" for name in re.findall(r"\w+", names)}
    return {Path(one) for one in found if one.startswith(root) and os.path.isfile(one)}  # noqa: PTH113


# --- what follows -------------------------------------------------------------------------------------------


def due(
    verdicts: Iterable[Verdict], wanted: Mapping[str, Mapping[str, str]]
) -> dict[str, dict[str, list[str]]]:
    """Host -> role -> why it must be played; a host that needs nothing has no roles.

    A host that could not be asked, or that a run holds, needs everything. A model that a node lacks is brought from
    the others, so that role is played on all of them.
    """
    asked = list(verdicts)
    found = {one.host: _due(one, wanted[one.host]) for one in asked}
    lacking = sorted(one.host for one in asked if not one.why and "model_store" in found[one.host])
    for host, roles in found.items():
        if lacking and "model_store" not in roles and "model_store" in wanted[host]:
            roles["model_store"] = [f"{lacking[0]} needs what this node has"]
    return {host: _ordered(_followed(roles, wanted[host]), wanted[host]) for host, roles in found.items()}


def _due(verdict: Verdict, wanted: Mapping[str, str]) -> dict[str, list[str]]:
    if verdict.why or verdict.held:
        return {role: [verdict.why or "a run holds this node"] for role in wanted}
    found: dict[str, list[str]] = {}
    for role, digest in wanted.items():
        seal = verdict.seals.get(role)
        if seal is None:
            found[role] = ["it has no seal"]
        elif seal["differs"] or seal["basis"]:
            found[role] = [line(row) for row in (*seal["differs"], *seal["basis"])]
        elif seal["inputs"] != digest:
            found[role] = ["what goes into it has changed"]
    return found


def _followed(roles: dict[str, list[str]], wanted: Mapping[str, str]) -> dict[str, list[str]]:
    """With the roles that build on those, and the look at the node before them."""
    found = dict(roles)
    for role in wanted:
        before = [one for one in FOLLOWS.get(role, ()) if one in found]
        if before and role not in found:
            found[role] = [f"{before[0]} is played"]
    if set(found) - {PREFLIGHT} - UNJUDGED and PREFLIGHT in wanted:
        found.setdefault(PREFLIGHT, ["the node is changed"])
    return found


def _ordered(roles: Mapping[str, list[str]], wanted: Mapping[str, str]) -> dict[str, list[str]]:
    return {role: roles[role] for role in wanted if role in roles}


def line(row: Mapping[str, Any]) -> str:
    """`path /etc/x: mode is 0o600, expected 0o644`."""
    return f"{row['what']}: {row['field']} is {_short(row['found'])}, expected {_short(row['expected'])}"


def _short(value: Any) -> str:
    text = ", ".join(map(str, value)) or "nothing" if isinstance(value, list) else str(value)
    return text if text else "nothing"


def told(role: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """The note of a run that could not seal a role."""
    more = f" (and {len(rows) - 1} more)" if len(rows) > 1 else ""
    return f"role {role} is not sealed and will be played again: {line(rows[0])}{more}"


def for_node(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """What a node is told to seal: `seals` (role -> digest of what went in) and `played`. `wanted`: of `of_run`."""
    return {"seals": wanted.get("inputs", {}), "played": wanted.get("played", [])}


def notes_of(answer: Mapping[str, Any]) -> list[str]:
    """What to say of a node's answer to that: a line a role that is not sealed."""
    return [told(role, rows) for role, rows in (answer.get("unsealed") or {}).items()]


def notes(verdicts: Iterable[Verdict], due: Mapping[str, Mapping[str, Sequence[str]]]) -> tuple[str, ...]:
    """What to say of what was not as it was left: a line a role, and one for a node that could not be asked."""
    found = []
    for one in verdicts:
        if one.why:
            found.append(f"{one.host}: its seals are not known, so all is played: {one.why}")
            continue
        for role in due[one.host]:
            rows = one.seals.get(role, {}).get("differs", ())
            if rows:
                more = f" (and {len(rows) - 1} more)" if len(rows) > 1 else ""
                found.append(f"{one.host}: role {role} was not as it was left: {line(rows[0])}{more}")
    return tuple(found)


# --- roles that have nothing to do ---------------------------------------------------------------------------


def idle(variables: Mapping[str, Mapping[str, Any]], hosts: Sequence[Host]) -> dict[str, tuple[str, ...]]:
    """Host -> roles of IDLE that need not be played there: the plan gives them nothing but what they have by default,
    and the inventory says nothing to them. `variables`: of roles, by host."""
    known = {host.name: host.variables for host in hosts}
    defaults = {role: _defaults(role) for role in IDLE}
    found = {}
    for host, given in variables.items():
        found[host] = tuple(
            role
            for role in IDLE
            if not any(name.startswith(f"{role}_") for name in known.get(host, {}))
            and all(
                defaults[role].get(name) == value
                for name, value in given.items()
                if name.startswith(f"{role}_")
            )
        )
    return found


def _defaults(role: str) -> dict[str, Any]:
    import yaml

    text = (ROOT / "roles" / role / "defaults" / "main.yml").read_text(encoding="utf-8")
    return dict(yaml.safe_load(text))


# --- from the run to its nodes ------------------------------------------------------------------------------


def write_run(
    folder: Path, wanted: Mapping[str, Mapping[str, str]], played: Mapping[str, Iterable[str]]
) -> None:
    """Puts beside a run's record what its nodes are to be sealed with: host -> inputs (role -> digest), played."""
    data = {
        host: {"inputs": dict(roles), "played": list(played.get(host, ()))} for host, roles in wanted.items()
    }
    runs.write_private(folder / FILE, json.dumps(data))


def of_run(run: str) -> dict[str, Any]:
    """What `write_run` put there; nothing for a run that is none of ours."""
    try:
        found = json.loads((runs.FOLDER / run / FILE).read_text(encoding="utf-8")) if run else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
