"""The twin of one host of an inventory, for tests: brought up by the first command that asks for it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bringup import ROOT, twins
from bringup.errors import Exit
from tests.e2e import site as sites

LIMIT_S = 2400
"""Seconds that a command may take: the longest provisions an emulated twin, on a machine that does other things."""


def invoke(*words: str, program: str = "invoke") -> sites.Done:
    """A command from the checkout, to its end."""
    done = subprocess.run(
        [str(sites.INVOKE.with_name(program)), *words],
        cwd=ROOT,
        env=sites.environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    return sites.Done(done.returncode, done.stdout, done.stderr)


@dataclass(frozen=True)
class Rehearsal:
    """The twin of `host`; `how`: the option that it is asked for with."""

    inventory: str
    host: str
    how: str = "--twins"

    def invoke(self, task: str, *words: str, faults: Iterable[str] = ()) -> sites.Done:
        """`invoke TASK --json` on the twin with these faults and no others."""
        named = [word for fault in faults for word in ("--fault", f"{fault}@{self.host}")]
        place = ("--inventory", self.inventory, "--limit", self.host)
        return invoke(task, *place, self.how, "--json", *named, *words)

    def provision(self) -> Mapping[str, Any]:
        """What a run that succeeded says."""
        done = self.invoke("provision")
        assert done.code == Exit.DONE, done.text[-4000:]
        return done.data

    def codes(self, task: str, faults: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Findings by their codes, of a command that must be refused."""
        done = self.invoke(task, faults=faults)
        assert done.code == Exit.REFUSED, done.text[-4000:]
        return {found["code"]: found for found in done.data["findings"]}

    def on(self, command: str, check: bool = True, limit: float = sites.LOOK_LIMIT_S) -> str:
        """What a shell command prints on the twin, run as root from outside SSH."""
        return sites.on(self.node, command, check, limit)

    @property
    def node(self) -> str:
        """The twin's container."""
        return twins.given()[self.inventory][self.host].name

    def take_down(self) -> None:
        """No twin of this inventory is left."""
        if self.inventory in twins.given():
            twins.down(sites.quiet, self.inventory)


@dataclass(frozen=True)
class Provisioned:
    """A twin, and what its first run said."""

    twin: Rehearsal
    first: Mapping[str, Any]

    def is_as_it_should_be(self) -> None:
        """The first run changed things and ended in an answer; a second changes nothing."""
        hosts = {name: host["changed"] for name, host in self.first["hosts"].items()}
        assert list(hosts) == [self.twin.host]
        assert hosts[self.twin.host] > 0
        assert [answer["tokens"] > 0 for answer in self.first["answers"]] == [True]
        second = self.twin.provision()
        assert {name: host["changed"] for name, host in second["hosts"].items()} == {self.twin.host: 0}


def provisioned(twin: Rehearsal) -> Provisioned:
    """A twin, provisioned."""
    return Provisioned(twin, twin.provision())


def only_in_containers() -> dict[str, str]:
    """Faults that need a process or a mount, and so show on a twin that is a container only -> their codes."""
    found = {name: str(fault.code) for name, fault in twins.faults().items() if fault.run and fault.code}
    # Two of them lay a file system over the same folder.
    return {name: code for name, code in found.items() if name != "disk-full"}
