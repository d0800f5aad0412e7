"""Asking nodes how their seals hold: one SSH round trip a node, all at once, nothing changed (I/O)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from bringup import fleet, known, looking, remote, seal
from bringup.errors import BringupError, Exit, HostUnreachable, Problem
from bringup.known import Known
from bringup.seal import Verdict

LOOK_LIMIT_S = 120.0
"""For one node: thousands of files of an environment that nobody has looked at since the node was started."""


def inputs(plan: Known, extra: Mapping[str, Any]) -> Mapping[str, Mapping[str, str]]:
    """Host -> role -> digest of what goes into it, with variables of one run (`extra`)."""
    if not extra:
        return plan.inputs
    from bringup import inventory as inventories

    hosts = inventories.read(str(plan.folder)).hosts
    return seal.inputs(plan.variables, hosts, plan.folder, extra)


class Asked:
    """Hosts that are asked; who has not answered yet can be told at any time."""

    def __init__(self, hosts: Sequence[fleet.Host]) -> None:
        self.hosts = hosts
        self._open = {host.name: None for host in hosts}

    def answered(self, host: fleet.Host) -> None:
        """It has, or it is known why it will not."""
        self._open.pop(host.name, None)

    def __str__(self) -> str:
        return f"looking at the seals of the nodes; no answer yet from {looking.named(list(self._open))}"


def verdicts(asked: Asked, *, quick: bool = True) -> list[Verdict]:
    """What each of the hosts says of its seals; one that cannot be asked says why. `quick`: see `remote.once`."""
    hosts = asked.hosts

    def look(host: fleet.Host) -> Verdict:
        try:
            return _verdict(host, quick)
        finally:
            asked.answered(host)

    answers = fleet.each(hosts, look)
    return [
        answer if isinstance(answer, Verdict) else Verdict(host.name, why=_why(answer))
        for host, answer in zip(hosts, answers, strict=True)
    ]


def _verdict(host: fleet.Host, quick: bool) -> Verdict:
    program = looking.script({}, ("seal",))
    command = looking.AS_ROOT.format("python3 -I -S -")
    ran = remote.once(host, command, stdin=program, limit_s=LOOK_LIMIT_S, quick=quick)
    try:
        found = json.loads(ran.out)
        return Verdict(host.name, held=bool(found["held"]), seals=found["seals"])
    except (ValueError, KeyError, TypeError):
        said = (ran.err or ran.out).strip().splitlines()
        why = f"its seals could not be read (exit {ran.code}): {said[-1] if said else 'no output'}"
        raise HostUnreachable(Problem(host.name, why)) from None


def _why(error: Exception) -> str:
    return error.problems[0].what if isinstance(error, BringupError) else str(error)


def drift(inventory: str, limit: str | None) -> list[dict[str, Any]]:
    """A row a host: host, reached, why, held, sealed (roles), due (role -> why provisioning would play it), differs
    (role, what, field, expected, found). Raises UsageError when intent or catalog are wrong."""
    plan = known.load(inventory)
    wanted = inputs(plan, {})
    found = verdicts(Asked(plan.reach(fleet.matching(plan.groups, limit))))
    due = seal.due(found, wanted)
    return [_row(one, due[one.host], wanted[one.host]) for one in found]


def _row(verdict: Verdict, due: Mapping[str, list[str]], wanted: Mapping[str, str]) -> dict[str, Any]:
    differs = [
        {"role": role, **row}
        for role in wanted
        if role in verdict.seals
        for row in verdict.seals[role]["differs"]
    ]
    return {
        "host": verdict.host,
        "reached": not verdict.why,
        "why": verdict.why,
        "held": verdict.held,
        "sealed": [role for role in wanted if role not in due],
        "due": {} if verdict.why else dict(due),
        "differs": differs,
    }


def drift_exit(rows: Sequence[Mapping[str, Any]]) -> Exit:
    """UNREACHABLE when a host could not be asked, else PENDING when one differs or would be played, else DONE."""
    if any(not row["reached"] for row in rows):
        return Exit.UNREACHABLE
    return Exit.PENDING if any(row["differs"] or row["due"] for row in rows) else Exit.DONE
