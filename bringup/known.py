"""What a run needs of an inventory's plan, read back while the content of all that it came from is the same (I/O).

Working a plan out costs more than looking at ten nodes, and most runs are of an inventory in which nothing has
changed. So it is kept in `.cache/plans`, under a digest of every file that it can come from: the inventory's, the
catalog's, and the code and roles of this checkout. Nothing kept is ever trusted for longer than that digest holds;
a file that cannot be read is worked out again. Role variables name secrets and hold none; the folder is its owner's.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bringup import ROOT, fleet, handed, inventory, runs
from bringup.errors import Problem

if TYPE_CHECKING:
    from bringup.inventory import Host
    from bringup.planned import Plan

FOLDER = ROOT / ".cache" / "plans"
SCHEMA_VERSION = 1
KEPT = 4
"""Plans of one inventory that stay: as it is, and as it was before somebody tried something."""

SOURCES = (
    "ansible.cfg",
    "bringup",
    "catalog",
    "playbooks/provision.yml",
    "plugins",
    "requirements.lock",
    "roles",
)
"""Files and folders of this checkout that decide what a plan says, or what goes into a role."""

LEFT_OUT = frozenset(("__pycache__", "failures", "runbooks"))
"""Folders in them that do not: bytecode, what diagnose knows, and runbooks' descriptions."""

TWINS = "twins.json"
"""An inventory with this file wears facts that are recorded elsewhere: its plan is always worked out."""


@dataclass(frozen=True)
class KnownHost:
    """A host of the plan: its name, its groups, and the names of its servers."""

    name: str
    groups: tuple[str, ...]
    services: tuple[str, ...]


@dataclass(frozen=True)
class Known:
    """An inventory's plan as a run needs it. `lacking`: why it cannot be provisioned; `reached`: how each host is
    reached (None: that must be asked each time); `head`: where it is kept (None: nowhere); `said`: what was read back
    from there; None: it was worked out now, with `worked_out` as the roles' variables; `is_other`: it is not the plan
    that the inventory had before.
    """

    inventory: str
    folder: Path
    digest: str
    hosts: tuple[KnownHost, ...]
    lacking: tuple[Problem, ...]
    reached: tuple[fleet.Host, ...] | None
    head: Path | None = None
    said: Mapping[str, Any] | None = None
    worked_out: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    is_other: bool = True

    @property
    def is_new(self) -> bool:
        """Was it worked out now?"""
        return self.said is None

    @cached_property
    def inputs(self) -> Mapping[str, Mapping[str, str]]:
        """Host -> role -> digest of what goes into it when a run adds no variables of its own. Worked out when it is
        asked for: nodes may be looked at meanwhile."""
        if self.said is not None:
            return dict(self.said["inputs"])
        from bringup import seal

        return seal.inputs(self.variables, self._intended, self.folder, {})

    @cached_property
    def idle(self) -> Mapping[str, tuple[str, ...]]:
        """Host -> roles that have nothing to do."""
        if self.said is not None:
            return {name: tuple(roles) for name, roles in self.said["idle"].items()}
        from bringup import seal

        return seal.idle(self.variables, self._intended)

    @cached_property
    def _intended(self) -> Sequence[Host]:
        return inventory.read(str(self.folder)).hosts

    @property
    def groups(self) -> dict[str, tuple[str, ...]]:
        """Host -> its groups, as `fleet.matching` takes them."""
        return {host.name: host.groups for host in self.hosts}

    @cached_property
    def variables(self) -> Mapping[str, Mapping[str, Any]]:
        """Variables of roles, by host."""
        if self.said is None or self.head is None:
            return self.worked_out
        found: Mapping[str, Mapping[str, Any]] = json.loads(_beside(self.head).read_text(encoding="utf-8"))[
            "hosts"
        ]
        return found

    def hand_over(self, path: Path) -> None:
        """Puts a file for `bringup.handed` at `path`."""
        if self.said is not None and self.head is not None:
            with suppress(OSError):
                os.link(_beside(self.head), path)
                return
        runs.write_private(path, handed.text(self.folder, self.variables))

    def keep(self) -> None:
        """Writes down what was worked out, to be read back."""
        if self.said is None and self.head is not None:
            with suppress(OSError):
                _write(self.head, self)

    def reach(self, names: Sequence[str]) -> list[fleet.Host]:
        """How each of the named hosts is reached. Raises UsageError for one that is not there."""
        if self.reached is None:
            return fleet.hosts_of(str(self.folder), names)
        by_name = {host.name: host for host in self.reached}
        return [by_name[name] for name in names]


def load(name_or_path: str, before: Callable[[Path], None] | None = None, *, keep: bool = True) -> Known:
    """The plan of an inventory, by name or folder. `before` is called with its folder when the plan is another than the
    last one; `keep`: one that must be worked out is kept (else `Known.keep` does). Raises UsageError with every problem
    of intent and catalog."""
    folder = inventory.folder_of(name_or_path)
    if (folder / TWINS).is_file():
        return _worked_out(folder, None)
    head = FOLDER / f"{_slug(folder)}-{digest_of(folder)}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = _read(head, folder, is_other=head != _last(folder))
        if found.is_other:
            os.utime(head)
            if before is not None:
                before(folder)
        return found
    if before is not None:
        before(folder)
    found = _worked_out(folder, head)
    if keep:
        found.keep()
    return found


def digest_of(folder: Path) -> str:
    """Of the names and contents of everything that the plan of an inventory's folder can come from."""
    about = (SCHEMA_VERSION, sys.version, version("ansible-core"), Path.home(), folder)
    total = hashlib.sha256(" ".join(map(str, about)).encode())
    for root in (folder, *(ROOT / source for source in SOURCES)):
        for path in _files(str(root)):
            total.update(f"\0{path}\0".encode("utf-8", "surrogateescape"))
            with open(path, "rb", buffering=0) as file:  # noqa: PTH123 (a thousand of them: a Path each is half the time)
                total.update(file.read())
    return total.hexdigest()[:40]


def _files(root: str) -> Iterator[str]:
    """A file, or all files below a folder, in order."""
    if not os.path.isdir(root):  # noqa: PTH112 (as above)
        if os.path.isfile(root):  # noqa: PTH113
            yield root
        return
    with os.scandir(root) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        if entry.is_dir():
            if entry.name not in LEFT_OUT:
                yield from _files(entry.path)
        elif entry.is_file():
            yield entry.path


def _slug(folder: Path) -> str:
    return f"{folder.name}-{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}"


def _worked_out(folder: Path, head: Path | None) -> Known:
    from bringup import plan as plans
    from bringup import rolevars

    plan = plans.load(str(folder))
    return Known(
        inventory=plan.inventory,
        folder=folder,
        digest=plan.digest,
        hosts=_hosts(plan),
        lacking=tuple(plans.unprovisionable(plan)),
        reached=None
        if fleet.is_templated(folder)
        else tuple(fleet.hosts_of(str(folder), [host.name for host in plan.hosts])),
        head=head,
        worked_out=rolevars.of_plan(plan),
    )


def _hosts(plan: Plan) -> tuple[KnownHost, ...]:
    return tuple(
        KnownHost(host.name, tuple(host.groups), tuple(one.name for one in host.services))
        for host in plan.hosts
    )


# --- on the disk --------------------------------------------------------------------------------------------


def _beside(head: Path) -> Path:
    return head.with_suffix(".variables.json")


def _write(head: Path, found: Known) -> None:
    """The variables first: a head that is there has them beside it."""
    FOLDER.mkdir(mode=0o700, parents=True, exist_ok=True)
    runs.write_private(_beside(head), handed.text(found.folder, found.variables))
    data = {
        "schema_version": SCHEMA_VERSION,
        **{name: getattr(found, name) for name in ("inventory", "digest", "inputs", "idle")},
        "hosts": [dataclasses.asdict(host) for host in found.hosts],
        "lacking": [dataclasses.asdict(one) for one in found.lacking],
        "reached": None if found.reached is None else [dataclasses.asdict(one) for one in found.reached],
    }
    runs.write_private(head, json.dumps(data))
    for old in _heads(found.folder)[:-KEPT]:
        old.unlink(missing_ok=True)
        _beside(old).unlink(missing_ok=True)


def _heads(folder: Path) -> list[Path]:
    """Plans of an inventory that are kept, the one used last at the end."""
    found = (
        path for path in FOLDER.glob(f"{_slug(folder)}-*.json") if not path.name.endswith(".variables.json")
    )
    return sorted(found, key=lambda path: path.stat().st_mtime_ns)


def _last(folder: Path) -> Path | None:
    found = _heads(folder)
    return found[-1] if found else None


def _read(head: Path, folder: Path, is_other: bool) -> Known:
    data = json.loads(head.read_text(encoding="utf-8"))
    if data["schema_version"] != SCHEMA_VERSION or not _beside(head).is_file():
        raise ValueError(head)
    reached = data["reached"]
    return Known(
        inventory=data["inventory"],
        folder=folder,
        digest=data["digest"],
        hosts=tuple(_host(one) for one in data["hosts"]),
        lacking=tuple(Problem(**one) for one in data["lacking"]),
        reached=None if reached is None else tuple(map(fleet.of_data, reached)),
        head=head,
        said={name: dict(data[name]) for name in ("inputs", "idle")},
        is_other=is_other,
    )


def _host(data: Mapping[str, Any]) -> KnownHost:
    return KnownHost(data["name"], tuple(data["groups"]), tuple(data["services"]))
