"""What preflight speaks in: what a plan expects of a node, and one verdict on it. Plain data, no I/O."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

GIB = 1024**3

Severity = Literal["error", "warning", "note"]

LISTS = (
    "numa",
    "units",
    "sets",
    "settings",
    "addresses",
    "caches",
    "models",
    "linking",
    "logs",
    "devices",
    "clocks_mhz",
)
"""Parts of an expectation that are lists in plain data."""


@dataclass(frozen=True)
class Finding:
    """One verdict: stable `code`, how bad, what is wrong, what was seen, and the step that helps.

    `mended_by`: the role of this run that will do away with it; such a finding refuses nobody.
    """

    code: str
    severity: Severity
    what: str
    evidence: str = ""
    remedy: str = ""
    mended_by: str = ""

    def __str__(self) -> str:
        seen = f" ({self.evidence})" if self.evidence else ""
        return f"{self.code}: {self.what}{seen}" + (f". {self.remedy}" if self.remedy else "")


@dataclass(frozen=True)
class Port:
    """A port that a service will listen on; `unit` without suffix."""

    port: int
    bind: str
    unit: str
    service: str


@dataclass(frozen=True)
class Room:
    """Bytes that must fit at a path in the end (what is there already counts), and what for."""

    path: str
    needed: int
    purpose: str


@dataclass(frozen=True)
class Expected:
    """What a host's plan needs of it. The mappings are parts of the platform's catalog entry, as data.

    `units` (with suffix) and the least `limits` they need (`open_files`, `tasks`); `sets`: environment variables that
    every one of them sets itself; `settings`: what role system_settings sets (name, path, value); `addresses`: what a
    download needs (host, port, purpose, and `unless`: a path that makes it needless); `caches`: folders (path, user);
    `models`: name, folder, files (path, size), stamp, `expects` and `mtp` (prefix, services that draft); `linking`:
    what engines link at run time (services, libraries, and the profile's own compiler and folders); `logs`: files that
    servers write; `devices`: who opens GPUs (service, user, gpus by index); `mends`: code of a finding -> the
    role that mends it.
    """

    arch: str = "any"
    platform: str = ""
    gpus: Mapping[str, Any] | None = None
    driver: Mapping[str, Any] | None = None
    links: Mapping[str, Any] = field(default_factory=dict)
    thresholds: Mapping[str, Any] = field(default_factory=dict)
    ports: tuple[Port, ...] = ()
    rooms: tuple[Room, ...] = ()
    memory: int = 0
    now: float | None = None
    numa: tuple[Mapping[str, Any], ...] = ()
    units: tuple[str, ...] = ()
    limits: Mapping[str, int] = field(default_factory=dict)
    sets: tuple[str, ...] = ()
    settings: tuple[Mapping[str, Any], ...] = ()
    addresses: tuple[Mapping[str, Any], ...] = ()
    caches: tuple[Mapping[str, str], ...] = ()
    models: tuple[Mapping[str, Any], ...] = ()
    linking: tuple[Mapping[str, Any], ...] = ()
    logs: tuple[str, ...] = ()
    devices: tuple[Mapping[str, Any], ...] = ()
    memory_nodes: str = ""
    clocks_mhz: tuple[int, ...] = ()
    power_w: int = 0
    mends: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Expected:
        """From plain data, such as role variables. Raises TypeError for an unknown key."""
        return cls(
            **{
                **data,
                "ports": tuple(Port(**port) for port in data.get("ports", ())),
                "rooms": tuple(Room(**room) for room in data.get("rooms", ())),
                **{name: tuple(data.get(name, ())) for name in LISTS},
            }
        )

    def threshold(self, name: str, default: float) -> float:
        """A limit of the platform, or the default."""
        return float(self.thresholds.get(name, default))


Facts = Mapping[str, Any]
Check = Callable[[Facts, Expected], Iterable[Finding]]


def numbers(text: str | None) -> tuple[int, ...]:
    """ "580.105.08" -> (580, 105, 8), for comparing."""
    return tuple(int(part) for part in re.findall(r"\d+", text or ""))


def size(number: float) -> str:
    """Bytes for people: "12.3 GiB", "4 MiB"."""
    return f"{number / GIB:.1f} GiB" if number >= GIB else f"{number / 1024**2:.0f} MiB"
