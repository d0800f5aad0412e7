"""Reads `inventories/<name>/` as Ansible merges it, without Ansible: fast, offline, all problems at once.

Read are `hosts.yml` (groups, children, vars, host ranges such as `node[01:08]`), `group_vars/` and
`host_vars/` (a file or a folder of files). Values encrypted by vault stay closed (`yamlfile.Vaulted`), and
files that are encrypted whole are left out: what they hold is named `vault_*` and no plan needs it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bringup import ROOT
from bringup.errors import Problem, UsageError, unknown
from bringup.yamlfile import parse_yaml, read_text

INVENTORIES = ROOT / "inventories"
HOSTS_FILES = ("hosts.yml", "hosts.yaml")
SUFFIXES = (".yml", ".yaml", ".json", "")
VAULT_HEADER = "$ANSIBLE_VAULT;"
GROUP_KEYS = ("hosts", "children", "vars")
HOSTS_LIMIT = 10_000
"""More hosts than this from one range is a typing mistake."""

_RANGE = re.compile(r"\[(?P<first>\d+):(?P<last>\d+)(?::(?P<step>\d+))?\]")


@dataclass(frozen=True)
class Host:
    """One host: its name, the groups it is in (outermost first) and its merged variables."""

    name: str
    groups: tuple[str, ...]
    variables: Mapping[str, Any]


@dataclass(frozen=True)
class Inventory:
    """An inventory's hosts in the order of `hosts.yml`; `name` is what messages call it."""

    name: str
    folder: Path
    hosts: tuple[Host, ...]


@dataclass
class _Group:
    """A group while it is read: variables of `hosts.yml`, members, children."""

    inline: dict[str, Any] = field(default_factory=dict)
    hosts: dict[str, dict[str, Any]] = field(default_factory=dict)
    children: list[str] = field(default_factory=list)


def folder_of(name: str) -> Path:
    """The folder of an inventory given by name or by path. Raises UsageError for one that is not there."""
    path = Path(name)
    found = path if path.is_dir() and (len(path.parts) > 1 or path.is_absolute()) else INVENTORIES / name
    if found.is_dir() and any((found / file).is_file() for file in HOSTS_FILES):
        return found.resolve()
    if found.is_dir():
        raise UsageError(
            Problem(
                str(found),
                "no hosts.yml",
                "Write one: hosts and how to reach them (see inventories/lab).",
            )
        )
    what, remedy = unknown("inventory", name, known())
    raise UsageError(Problem("--inventory", what, remedy))


def known() -> list[str]:
    """Names of the inventories of this checkout."""
    if not INVENTORIES.is_dir():
        return []
    return sorted(path.name for path in INVENTORIES.iterdir() if path.is_dir())


def read(name: str) -> Inventory:
    """The inventory of that name or path, merged. Raises UsageError with every problem found."""
    folder = folder_of(name)
    problems: list[Problem] = []
    groups = _read_groups(folder, problems)
    files = {
        kind: _read_folder(folder / kind, f"{folder.name}/{kind}", problems)
        for kind in ("group_vars", "host_vars")
    }
    members = _members(groups)
    problems += _strangers(files, groups, members, folder.name)
    if not members and not problems:
        problems.append(Problem(f"{folder.name}/hosts.yml", "names no host", "Add one under all.hosts."))
    if problems:
        raise UsageError(problems)
    hosts = tuple(_merge(host, groups, files) for host in members)
    return Inventory(folder.name, folder, hosts)


def _read_groups(folder: Path, problems: list[Problem]) -> dict[str, _Group]:
    path = next(folder / file for file in HOSTS_FILES if (folder / file).is_file())
    where = f"{folder.name}/{path.name}"
    groups: dict[str, _Group] = {"all": _Group()}
    try:
        data = parse_yaml(read_text(path, where), where)
    except UsageError as error:
        problems.extend(error.problems)
        return groups
    if not isinstance(data, dict):
        problems.append(Problem(where, "should be a mapping with the group `all`"))
        return groups
    for name, body in data.items():
        _add_group(str(name), body, where, groups, problems, ())
    return groups


def _add_group(
    name: str,
    body: Any,
    where: str,
    groups: dict[str, _Group],
    problems: list[Problem],
    above: tuple[str, ...],
) -> None:
    here = f"{where}: {name}"
    if name in above:
        problems.append(Problem(here, f"is a child of itself ({' > '.join((*above, name))})"))
        return
    group = groups.setdefault(name, _Group())
    if body is None:
        return
    if not isinstance(body, dict):
        problems.append(Problem(here, f"should be a mapping, is a {type(body).__name__}"))
        return
    for key in body:
        if key not in GROUP_KEYS:
            what, remedy = unknown("key", str(key), GROUP_KEYS)
            problems.append(Problem(here, what, remedy))
    group.inline.update(_mapping(body.get("vars"), f"{here}.vars", problems))
    for pattern, variables in _mapping(body.get("hosts"), f"{here}.hosts", problems).items():
        for host in _expand(str(pattern), here, problems):
            group.hosts.setdefault(host, {}).update(_mapping(variables, f"{here}.hosts.{pattern}", problems))
    for child, child_body in _mapping(body.get("children"), f"{here}.children", problems).items():
        if str(child) not in group.children:
            group.children.append(str(child))
        _add_group(str(child), child_body, where, groups, problems, (*above, name))


def _mapping(value: Any, where: str, problems: list[Problem]) -> dict[str, Any]:
    if value is None:
        return {}
    if isinstance(value, dict):
        return {str(key): item for key, item in value.items()}
    problems.append(Problem(where, f"should be a mapping, is a {type(value).__name__}"))
    return {}


def _expand(pattern: str, where: str, problems: list[Problem]) -> Iterator[str]:
    """`node[01:03]` -> node01, node02, node03 (leading zeros give the width), as Ansible does."""
    found = _RANGE.search(pattern)
    if not found:
        yield pattern
        return
    first, last, step = found["first"], int(found["last"]), int(found["step"] or 1)
    count = (last - int(first)) // step + 1 if step else 0
    if not 0 < count <= HOSTS_LIMIT:
        problems.append(Problem(f"{where}.hosts.{pattern}", "is an empty or endless range"))
        return
    width = len(first) if first.startswith("0") else 0
    for number in range(int(first), last + 1, step):
        middle = str(number).zfill(width)
        yield from _expand(pattern[: found.start()] + middle + pattern[found.end() :], where, problems)


def _read_folder(folder: Path, where: str, problems: list[Problem]) -> dict[str, dict[str, Any]]:
    """Variables by group or host name: `NAME.yml`, or every file of the folder `NAME/` in order."""
    found: dict[str, dict[str, Any]] = {}
    if not folder.is_dir():
        return found
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name.endswith("~"):
            continue
        if path.is_dir():
            for inner in sorted(path.rglob("*")):
                if inner.is_file() and inner.suffix in SUFFIXES and not inner.name.startswith("."):
                    found.setdefault(path.name, {}).update(_read_variables(inner, where, problems))
        elif path.suffix in SUFFIXES:
            found.setdefault(path.stem, {}).update(_read_variables(path, where, problems))
    return found


def _read_variables(path: Path, where: str, problems: list[Problem]) -> dict[str, Any]:
    name = f"{where}/{path.name}"
    try:
        text = read_text(path, name)
        value = None if text.startswith(VAULT_HEADER) else parse_yaml(text, name)
    except UsageError as error:
        problems.extend(error.problems)
        return {}
    return _mapping(value, name, problems)


def closed_files(folder: Path) -> list[Path]:
    """Files of variables that are encrypted whole: what they hold is not known here."""
    files = [path for kind in ("group_vars", "host_vars") for path in sorted((folder / kind).rglob("*"))]
    mark = VAULT_HEADER.encode()
    return [path for path in files if path.is_file() and path.read_bytes().startswith(mark)]


def _members(groups: Mapping[str, _Group]) -> list[str]:
    """Every host, in the order in which `hosts.yml` first names it."""
    names: dict[str, None] = {}
    for group in groups.values():
        names.update(dict.fromkeys(group.hosts))
    return list(names)


def _strangers(
    files: Mapping[str, Mapping[str, Any]], groups: Mapping[str, _Group], hosts: Iterable[str], name: str
) -> list[Problem]:
    """Files of variables for a group or host that does not exist: Ansible ignores them without a word."""
    problems = []
    there = {"group_vars": ("group", [*groups, "ungrouped"]), "host_vars": ("host", list(hosts))}
    for kind, (word, names) in there.items():
        for stranger in sorted(set(files[kind]) - set(names)):
            what, remedy = unknown(word, stranger, names)
            problems.append(Problem(f"{name}/{kind}/{stranger}", what, remedy))
    return problems


def _merge(
    host: str, groups: Mapping[str, _Group], files: Mapping[str, Mapping[str, dict[str, Any]]]
) -> Host:
    """Ansible's order: groups of hosts.yml, group_vars/all, other group_vars, hosts.yml's host, host_vars."""
    chain = _chain(host, groups)
    merged: dict[str, Any] = {}
    for group in chain:
        merged.update(groups[group].inline)
    for group in chain:
        merged.update(files["group_vars"].get(group, {}))
    for member_of in groups.values():
        merged.update(member_of.hosts.get(host, {}))
    merged.update(files["host_vars"].get(host, {}))
    return Host(host, tuple(name for name in chain if name != "all"), merged)


def _chain(host: str, groups: Mapping[str, _Group]) -> list[str]:
    """The groups of a host, outermost first: by depth, then by name."""
    parents: dict[str, set[str]] = {}
    for name, group in groups.items():
        for child in group.children:
            parents.setdefault(child, set()).add(name)
    found = {name for name, group in groups.items() if host in group.hosts} | {"all"}
    todo = list(found)
    while todo:
        for parent in parents.get(todo.pop(), set()) - found:
            found.add(parent)
            todo.append(parent)
    return sorted(found, key=lambda name: (_depth(name, parents), name))


def _depth(name: str, parents: Mapping[str, set[str]]) -> int:
    if name == "all":
        return 0
    return 1 + max((_depth(parent, parents) for parent in parents.get(name, ())), default=0)
