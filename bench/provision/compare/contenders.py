"""How each contender is started, and how its own words say whether it changed anything."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import yaml

from bench.provision.compare import product, stock, workload
from bench.provision.compare.hosts import Hosts

HERE = Path(__file__).resolve().parent
BIN = Path(sys.executable).parent
INSTALL_LIMIT_S = 600
VALUE = "restart_hour"

NAMES = ("default", "mitogen", "pyinfra", "bringup", "floor")
LABELS: Mapping[str, str] = {
    "default": "Ansible, default settings",
    "mitogen": "Ansible with Mitogen",
    "pyinfra": "pyinfra",
    "bringup": "`invoke provision`",
    "floor": "one script, one connection",
}
USEFUL = r"node-\d+"
"""A line that names a node: that one answers, what is done there, or how it ended."""


ALWAYS_SAID: Mapping[str, int] = {"pyinfra": 4}
"""Things a host that a contender calls changed in every run: pyinfra's commands, here the four digests."""


class CannotRun(Exception):
    """A contender that this machine cannot have, in its own words."""


@dataclass(frozen=True)
class Contender:
    """A command line with its folder and environment. `changed`: its figures of changed things, which are
    added up."""

    words: tuple[str, ...]
    folder: Path
    changed: str
    environment: Mapping[str, str] = field(default_factory=dict)

    def number_changed(self, said: str) -> int:
        """How many things it says it changed, on all hosts."""
        return sum(int(number) for number in re.findall(self.changed, said, re.MULTILINE))


def environment_of(folder: Path, name: str, *more: str) -> Path:
    """The `bin` of an environment for a contender, made once. Raises CannotRun with what pip said."""
    place = folder / f"venv-{name}"
    recipe = (HERE / f"requirements-{name}.txt").read_text() + "".join(f"{line}\n" for line in more)
    mark = place / "made-from"
    if not mark.is_file() or mark.read_text() != recipe:
        given = folder / f"requirements-{name}.txt"
        given.write_text(recipe)
        for words in (
            [sys.executable, "-m", "venv", "--clear", str(place)],
            [str(place / "bin/pip"), "install", "--quiet", "--requirement", str(given)],
        ):
            done = subprocess.run(words, capture_output=True, text=True, timeout=INSTALL_LIMIT_S, check=False)
            if done.returncode:
                raise CannotRun(done.stderr.strip().splitlines()[-1])
        mark.write_text(recipe)
    return place / "bin"


class Field:
    """All contenders on one set of hosts: writes what each reads, for the values as they are and with one changed."""

    def __init__(self, folder: Path, hosts: Hosts, digests: Mapping[str, str]) -> None:
        self.folder, self.hosts, self.digests = folder, hosts, digests
        self.home = folder / "home"
        self.home.mkdir(exist_ok=True)
        self.commit = product.make(folder / "checkout", workload.THINGS, digests, {}, {})
        self.names: list[str] = []

    def set(self, number: int, net: str, changed: int = 0) -> None:
        """Which hosts, reached how, and by how much one value is another."""
        data = workload.read()
        data["values"][VALUE] += changed
        things = self.folder / "things.yml"
        things.write_text(yaml.safe_dump(data, sort_keys=False, allow_unicode=True))
        addresses = self.hosts.addresses(number, net)
        self.names = list(addresses)
        product.inventory(self.folder / "checkout", addresses, self.hosts.reach())
        (self.folder / "checkout" / product.THINGS).write_bytes(things.read_bytes())
        (self.folder / "digests.json").write_text(json.dumps(self.digests))
        (self.folder / "hosts.txt").write_text("".join(f"{name} {at}\n" for name, at in addresses.items()))
        site = self.folder / "stock"
        stock.write(site, data, self.digests)
        rows = {name: {"ansible_host": at} for name, at in addresses.items()}
        inventory = {"all": {"vars": self.hosts.reach(), "hosts": rows}}
        (site / "hosts.yml").write_text(yaml.safe_dump(inventory))
        self._pyinfra(data, addresses)

    def _pyinfra(self, data: Mapping[str, object], addresses: Mapping[str, str]) -> None:
        place = self.folder / "pyinfra"
        place.mkdir(exist_ok=True)
        (place / "deploy.py").write_bytes((workload.FOLDER / "deploy.py").read_bytes())
        rows = [thing.row() for thing in workload.things(data, self.digests, "")]
        given = {"values": data["values"], "things": rows, "templates": str(workload.TEMPLATES)}
        (place / "things.json").write_text(json.dumps(given))
        reached = [
            (name, {"ssh_hostname": at, "ssh_user": "root", "ssh_key": str(self.hosts.key),
                    "ssh_known_hosts_file": str(self.hosts.known), "ssh_strict_host_key_checking": "yes"})
            for name, at in addresses.items()
        ]  # fmt: skip
        (place / "inventory.py").write_text(f"nodes = {reached!r}\n")

    def contender(self, name: str) -> Contender:
        """One of NAMES. Raises CannotRun."""
        made: Contender = getattr(self, f"_as_{name}")()
        kept = {key: os.environ[key] for key in ("PATH", "USER", "LOGNAME", "TERM") if key in os.environ}
        more = {"HOME": str(self.home), "LANG": "C.UTF-8", "NO_COLOR": "1", **made.environment}
        return Contender(made.words, made.folder, made.changed, {**kept, **more})

    def _as_default(self) -> Contender:
        words = (str(BIN / "ansible-playbook"), "-i", "hosts.yml", "site.yml")
        # No file of settings at all: what is measured is what Ansible does by itself.
        none = self.folder / "ansible-default.cfg"
        none.write_text("[defaults]\n")
        return Contender(words, self.folder / "stock", r"changed=(\d+)", {"ANSIBLE_CONFIG": str(none)})

    def _as_mitogen(self) -> Contender:
        place = environment_of(self.folder, "mitogen", f"ansible-core=={version('ansible-core')}")
        strategy = next(place.parent.glob("lib/python*/site-packages/ansible_mitogen/plugins/strategy"), None)
        if strategy is None:
            raise CannotRun("the package has no strategy plugins")
        settings = self.folder / "ansible-mitogen.cfg"
        settings.write_text(f"[defaults]\nstrategy_plugins = {strategy}\nstrategy = mitogen_linear\n")
        words = (str(place / "ansible-playbook"), "-i", "hosts.yml", "site.yml")
        return Contender(words, self.folder / "stock", r"changed=(\d+)", {"ANSIBLE_CONFIG": str(settings)})

    def _as_pyinfra(self) -> Contender:
        place = environment_of(self.folder, "pyinfra")
        folder = self.folder / "pyinfra"
        words = (str(place / "pyinfra"), "-y", "inventory.py", "deploy.py")
        return Contender(
            words,
            folder,
            r"^ +Grand total +\d+ +(\d+)",
            {"THINGS": str(folder / "things.json")},
        )

    def _as_bringup(self) -> Contender:
        words = (str(BIN / "invoke"), "provision", "--inventory", "compared")
        checkout = self.folder / "checkout"
        return Contender(words, checkout, r"(\d+) changed", {"PYTHONPATH": str(checkout)})

    def _as_floor(self) -> Contender:
        files = [str(self.folder / name) for name in ("hosts.txt", "things.yml", "digests.json")]
        words = (sys.executable, str(HERE / "floor.py"), *files, "--", *self.hosts.ssh())
        return Contender(words, self.folder, r"changed=(\d+)")
