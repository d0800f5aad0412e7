"""The hosts of an inventory, picked as `--limit` picks them, and looking at many of them at once (I/O).

Ansible itself says how a host is reached (`ansible_host`, `ansible_user`, key, known hosts), so that Fabric
and Ansible cannot disagree. Nothing here changes a node.
"""

from __future__ import annotations

import fnmatch
import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from bringup import ROOT
from bringup import inventory as inventories
from bringup.errors import Problem, UsageError, unknown
from bringup.yamlfile import Vaulted

AT_ONCE = 32
"""Connections at once: enough to hide the round trips, few enough for one controller's file limits."""

T = TypeVar("T")


@dataclass(frozen=True)
class Host:
    """How a host is reached. `known_hosts` None: the user's own; `options`: what else `ssh -o` was told."""

    name: str
    address: str
    port: int = 22
    user: str | None = None
    key: str | None = None
    known_hosts: tuple[str, ...] = ()
    check_keys: bool = True
    jump: str | None = None
    local: bool = False
    options: tuple[tuple[str, str], ...] = ()


def matching(hosts: Mapping[str, Sequence[str]], pattern: str | None) -> list[str]:
    """Hosts (name -> its groups, in inventory order) that a limit pattern picks, in that order.

    A pattern is a list, separated by commas or colons, of names, groups, globs and `~regex`; `!x` takes x
    away, `&x` keeps only what is also x; the empty pattern and `all` are all. Raises UsageError for a part
    that names nothing (with a suggestion), and when nothing is left.
    """
    if not pattern:
        return list(hosts)
    parts = [part.strip() for part in re.split(r"[,:]", pattern) if part.strip()]
    chosen: set[str] = set()
    problems: list[Problem] = []
    plain = [part for part in parts if part[0] not in "!&"]
    if not plain:
        chosen = set(hosts)
    for part in [*plain, *(p for p in parts if p[0] == "&"), *(p for p in parts if p[0] == "!")]:
        found = _named(hosts, part.lstrip("!&"))
        if not found:
            names = [*hosts, *{group for groups in hosts.values() for group in groups}]
            problems.append(Problem("--limit", *unknown("host or group", part.lstrip("!&"), names)))
        chosen = chosen - found if part[0] == "!" else chosen & found if part[0] == "&" else chosen | found
    if not problems and not chosen:
        problems.append(Problem("--limit", f'"{pattern}" leaves no host of {len(hosts)}'))
    if problems:
        raise UsageError(problems)
    return [name for name in hosts if name in chosen]


def _named(hosts: Mapping[str, Sequence[str]], word: str) -> set[str]:
    if word in ("all", "*"):
        return set(hosts)
    if word.startswith("~"):
        try:
            regex = re.compile(word[1:])
        except re.error as error:
            raise UsageError(Problem("--limit", f'"{word}" is no regular expression: {error}')) from None
        return {name for name, groups in hosts.items() if any(map(regex.match, (name, *groups)))}
    return {
        name for name, groups in hosts.items() if any(fnmatch.fnmatchcase(x, word) for x in (name, *groups))
    }


def hosts_of(inventory: str, names: Iterable[str]) -> list[Host]:
    """How each of the named hosts is reached, by Ansible's own reading of the inventory's files.

    The plan is left out of it on purpose: looking at nodes must work while intent is wrong.
    """
    folder = inventories.folder_of(inventory)
    variables = _variables(folder)
    missing = [name for name in names if name not in variables]
    if missing:
        raise UsageError(
            [Problem(f"inventory {inventory}", *unknown("host", name, list(variables))) for name in missing]
        )
    return [_host(name, variables[name]) for name in names]


def groups_of(inventory: str) -> dict[str, tuple[str, ...]]:
    """Every host of an inventory and its groups (without `all` and `ungrouped`), in inventory order."""
    hosts = inventories.read(inventory).hosts
    return {host.name: tuple(g for g in host.groups if g not in ("all", "ungrouped")) for host in hosts}


def one_host(inventory: str, pattern: str) -> Host:
    """The one host that a pattern picks. Raises UsageError when it picks more."""
    names = matching(groups_of(inventory), pattern)
    if len(names) > 1:
        raise UsageError(
            Problem("--limit", f'"{pattern}" picks {len(names)} hosts ({", ".join(names[:5])}), not one')
        )
    return hosts_of(inventory, names)[0]


def _variables(folder: Path) -> dict[str, dict[str, Any]]:
    """Every host's connection variables, templated. Ansible is asked only where there is something to template or to
    decrypt: starting it takes longer than looking at a node.
    """
    return _by_ansible(folder) if is_templated(folder) else _plain(folder)


def _plain(folder: Path) -> dict[str, dict[str, Any]]:
    hosts = inventories.read(str(folder)).hosts
    return {
        host.name: {key: value for key, value in host.variables.items() if key in _WANTED} for host in hosts
    }


def is_templated(folder: Path) -> bool:
    """Does Ansible have to say how a host of this inventory is reached?"""
    values = [value for variables in _plain(folder).values() for value in variables.values()]
    return bool(inventories.closed_files(folder)) or any(
        isinstance(value, Vaulted) or "{" in str(value) for value in values
    )


def _by_ansible(folder: Path) -> dict[str, dict[str, Any]]:
    from ansible.template import Templar
    from ansible.vars.manager import VariableManager

    manager, loader = _manager(folder)
    reader = VariableManager(loader=loader, inventory=manager)
    result: dict[str, dict[str, Any]] = {}
    for host in manager.get_hosts():
        known = reader.get_vars(host=host, include_hostvars=False)
        templar = Templar(loader=loader, variables=known)
        wanted = {key: value for key, value in known.items() if key.startswith("ansible_") and key in _WANTED}
        result[host.name] = {key: templar.template(value) for key, value in wanted.items()}
    return result


@cache
def _start_ansible() -> None:
    """Once a process: Ansible's plugin loader, without our inventory plugin, which would resolve the plan."""
    from ansible import constants
    from ansible.plugins.loader import init_plugin_loader

    constants.INVENTORY_ENABLED = ["yaml", "ini", "host_list"]
    init_plugin_loader()


@cache
def _manager(folder: Path) -> tuple[Any, Any]:
    """Ansible's inventory of the folder's host files, and the loader that read them."""
    config = ROOT / "ansible.cfg"
    if config.is_file():
        os.environ.setdefault("ANSIBLE_CONFIG", str(config))
    from ansible.inventory.manager import InventoryManager
    from ansible.parsing.dataloader import DataLoader

    _start_ansible()
    loader = DataLoader()
    loader.set_basedir(str(ROOT))
    files = [str(folder / name) for name in inventories.HOSTS_FILES if (folder / name).is_file()]
    return InventoryManager(loader=loader, sources=files), loader


_WANTED = frozenset(
    {
        "ansible_host",
        "ansible_port",
        "ansible_ssh_port",
        "ansible_user",
        "ansible_ssh_user",
        "ansible_connection",
        "ansible_ssh_private_key_file",
        "ansible_private_key_file",
        "ansible_ssh_args",
        "ansible_ssh_common_args",
        "ansible_ssh_extra_args",
        "ansible_host_key_checking",
        "ansible_ssh_host_key_checking",
    }
)


def _host(name: str, known: Mapping[str, Any]) -> Host:
    options = ssh_options(
        " ".join(str(known.get(f"ansible_ssh_{kind}", "")) for kind in ("args", "common_args", "extra_args"))
    )
    strict = options.pop("stricthostkeychecking", "yes").lower()
    checking = known.get("ansible_ssh_host_key_checking", known.get("ansible_host_key_checking", True))
    key = known.get("ansible_ssh_private_key_file") or known.get("ansible_private_key_file")
    key = key or options.pop("identityfile", None)
    files = options.pop("userknownhostsfile", "")
    return Host(
        name=name,
        address=str(options.pop("hostname", known.get("ansible_host", name))),
        port=int(str(known.get("ansible_port") or known.get("ansible_ssh_port") or options.pop("port", 22))),
        user=_text(known.get("ansible_user") or known.get("ansible_ssh_user") or options.pop("user", None)),
        key=_path(key),
        known_hosts=tuple(filter(None, map(_path, shlex.split(files)))),
        check_keys=strict not in ("no", "off") and str(checking).lower() not in ("false", "no", "0"),
        jump=options.pop("proxyjump", None),
        local=known.get("ansible_connection") == "local",
        options=tuple(options.items()),
    )


def of_data(data: Mapping[str, Any]) -> Host:
    """The host that `dataclasses.asdict` and JSON made data of."""
    options = tuple((key, value) for key, value in data["options"])
    return Host(**{**data, "known_hosts": tuple(data["known_hosts"]), "options": options})


def ssh_options(text: str) -> dict[str, str]:
    """`-o Key=value`, `-i file`, `-p port`, `-J jump` of an ssh command line, keys in lower case; the first
    wins.
    """
    found: dict[str, str] = {}
    words = shlex.split(text)
    letters = {"-i": "identityfile", "-p": "port", "-l": "user", "-J": "proxyjump"}
    for number, word in enumerate(words):
        following = words[number + 1] if number + 1 < len(words) else ""
        if word in letters:
            found.setdefault(letters[word], following)
        elif word.startswith("-o"):
            key, _, value = (word[2:] or following).strip().replace(" ", "=", 1).partition("=")
            found.setdefault(key.strip().lower(), value.strip().strip('"'))
    return found


def _text(value: Any) -> str | None:
    return None if value in (None, "") else str(value)


def _path(value: Any) -> str | None:
    return None if value in (None, "") else str((ROOT / Path(str(value)).expanduser()).resolve())


def each(hosts: Sequence[Host], look: Callable[[Host], T], at_once: int = AT_ONCE) -> list[T | Exception]:
    """`look` at every host, in parallel, in the order of `hosts`; what failed is the exception it failed
    with.
    """

    def careful(host: Host) -> T | Exception:
        try:
            return look(host)
        except Exception as error:
            return error

    if not hosts:
        return []
    with ThreadPoolExecutor(min(at_once, len(hosts)), thread_name_prefix="look") as pool:
        return list(pool.map(careful, hosts))
