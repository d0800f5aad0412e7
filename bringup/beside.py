"""What is gathered beside a load: the engine's log, its GPUs, where its memory lies, what it is, and the way
to it (I/O).

Nothing here may spoil a measurement: the node is asked before the load and after it, and only the GPUs are
watched during it (one `nvidia-smi` a second, on the node). What cannot be had is said, and the load goes on.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from bringup import ROOT, enginelog, fleet, gpusamples, looking, placement, remote
from bringup.errors import BringupError, HostUnreachable, Problem
from bringup.planned import HostPlan, Service

LOOK_LIMIT_S = 90.0
SAMPLE_LIMIT_S = 4 * 3600.0
FIRST_NAMED = ("torch", "transformers", "triton", "flashinfer-python", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
"""Packages whose versions decide speed, beside the engine's own."""
DIGEST = 12


@dataclass
class Beside:
    """What was seen beside a load. `log`, `gpus` and `locality` are plain data (see docs/bench-and-tune.md);
    `notes`: what could not be had, and what differs from the plan."""

    fingerprint: dict[str, str] = field(default_factory=dict)
    log: dict[str, Any] = field(default_factory=dict)
    gpus: list[dict[str, Any]] = field(default_factory=list)
    locality: dict[str, Any] = field(default_factory=dict)
    tunnel_ms: float | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def free_gib(self) -> float | None:
        """GiB left on the fullest GPU at its fullest moment; None when no GPU was watched."""
        return min((use["free_gib"] for use in self.gpus if use.get("free_gib") is not None), default=None)

    def as_json(self) -> dict[str, Any]:
        """As plain data, without the fingerprint, which a result has of its own."""
        data = dataclasses.asdict(self)
        del data["fingerprint"]
        return data


@contextmanager
def watched(host: fleet.Host, planned: HostPlan, service: Service, log_format: str) -> Iterator[Beside]:
    """Gathers for as long as the block lasts; the fingerprint is there at once, the rest when it ends."""
    found = Beside()
    begun = _told(found, lambda: look(host, {"what": "begin", "service": service.name}))
    found.fingerprint = fingerprint(planned, service, begun.get("facts") or {}, found.notes)
    with gpu_samples(host, service.gpus) as uses:
        yield found
    found.gpus = [dataclasses.asdict(use) for use in uses()]
    if "mark" not in begun:
        return
    ask = {"what": "end", "service": service.name, "mark": begun["mark"]}
    ended = _told(found, lambda: look(host, ask))
    if ended:
        found.log = log_of(str(ended["log"]), log_format)
        found.locality = locality_of(ended["maps"], int(ended["processes"]), service)


def _told(found: Beside, look_once: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return look_once()
    except BringupError as error:
        found.notes.append(f"not gathered: {error.problems[0].what}")
        return {}


def look(host: fleet.Host, request: Mapping[str, Any], limit_s: float = LOOK_LIMIT_S) -> dict[str, Any]:
    """Runs bringup/node/beside.py on the node. Raises HostUnreachable with what it said instead of an
    answer."""
    command = looking.AS_ROOT.format("python3 -I -")
    ran = remote.run(host, command, stdin=program(request), limit_s=limit_s)
    try:
        found = json.loads(ran.out)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        said = (ran.err or ran.out).strip().splitlines()
        what = f"looking failed (exit {ran.code}): {said[-1] if said else 'no output'}"
        raise HostUnreachable(Problem(host.name, what))
    return found


def program(request: Mapping[str, Any]) -> str:
    """What a node's Python runs: it needs nothing there."""
    source = (ROOT / "bringup" / "node" / "beside.py").read_text(encoding="utf-8")
    return f"{source}\nmain(json.loads({json.dumps(dict(request))!r}))\n"


# --- pure --------------------------------------------------------------------------------------------------


def fingerprint(
    planned: HostPlan, service: Service, facts: Mapping[str, Any], notes: list[str]
) -> dict[str, str]:
    """What a result must name to be comparable, as text; `notes` gets what runs otherwise than planned."""
    installed: Mapping[str, str] = facts.get("packages") or {}
    wanted = [name for name in (service.engine, *FIRST_NAMED) if name in installed]
    environment = next((one.digest for one in planned.environments if one.name == service.env_name), "")
    gpus = [line.split(", ") for line in facts.get("gpus") or ()]
    running, argv = list(facts.get("argv") or ()), list(service.argv)
    if running and running != argv:
        notes.append(f"runs otherwise than planned: {_difference(argv, running)}")
    known = {
        "platform": planned.platform,
        "profile": service.profile,
        "flags": _digest([running or argv, dict(service.environment)]),
        "environment": environment[:DIGEST],
        "packages": ", ".join(f"{name} {installed[name]}" for name in wanted),
        "all packages": _digest(installed) if installed else "",
        "driver": gpus[0][1] if gpus and len(gpus[0]) > 1 else "",
        "GPUs": f"{len(gpus)} x {gpus[0][0]}" if gpus else "",
        "power limit": gpus[0][2] if gpus and len(gpus[0]) > 2 else "",
        "cpu": f"{facts['cpus']} x {facts['cpu']}" if facts.get("cpu") else "",
        "kernel": str(facts.get("kernel", "")),
    }
    return {name: value for name, value in known.items() if value}


def _difference(planned: Sequence[str], running: Sequence[str]) -> str:
    more = [word for word in running if word not in planned]
    less = [word for word in planned if word not in running]
    return f"has {' '.join(more[:4]) or 'nothing more'}, lacks {' '.join(less[:4]) or 'nothing'}"


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST]


def log_of(text: str, log_format: str) -> dict[str, Any]:
    """The summary of a log's readings as plain data; {} when there was none."""
    summary = enginelog.summarise(enginelog.readings(text, log_format))
    return dataclasses.asdict(summary) if summary.readings else {}


def locality_of(maps: Mapping[str, str], processes: int, service: Service) -> dict[str, Any]:
    """Where the memory of a service's processes lies: bytes by node, and the share on the planned nodes
    (None: no nodes were planned). A node that hides its maps gives {}."""
    if not maps:
        return {}
    by_node: dict[int, int] = {}
    for text in maps.values():
        for node, size in placement.pages_by_node(text).items():
            by_node[node] = by_node.get(node, 0) + size
    total = sum(by_node.values())
    nodes = service.placement.memory_nodes
    local = sum(by_node.get(node, 0) for node in placement.numbers(nodes)) if nodes else None
    return {
        "processes": processes,
        "bytes_by_node": {str(node): size for node, size in sorted(by_node.items())},
        "planned_nodes": nodes,
        "local_percent": round(100 * local / total, 2) if local is not None and total else None,
    }


# --- the GPUs ----------------------------------------------------------------------------------------------


@contextmanager
def gpu_samples(host: fleet.Host, gpus: Sequence[int]) -> Iterator[Callable[[], list[gpusamples.GpuUse]]]:
    """Samples the named GPUs once a second for as long as the block lasts; gives what they did so far."""
    if not gpus:
        yield list
        return
    kept: list[str] = []
    ids = ",".join(map(str, gpus))
    stop = threading.Event()
    command = (
        f"timeout {SAMPLE_LIMIT_S:.0f} nvidia-smi -i {ids} --query-gpu={gpusamples.QUERY} --format=csv -l 1"
    )

    def watch() -> None:
        try:
            remote.run(host, command, limit_s=SAMPLE_LIMIT_S, on_output=kept.append, stop=stop)
        except BringupError as error:
            kept.append(f"\nnot sampled: {error.problems[0].what}\n")

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()

    try:
        yield lambda: gpusamples.summarise(gpusamples.parse("".join(kept)))
    finally:
        stop.set()
        thread.join()
