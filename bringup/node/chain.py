"""Starts a node's relay as a unit of its own, and waits for what it brings (see relay.py).

The unit is transient: it outlives the module that started it, ends by itself when nobody has asked for a
while, and is gone after a reboot.
"""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import contents, download, fetch, files, relay, store

if TYPE_CHECKING:
    from .undo import Journal

PROGRAM = Path("/opt/bringup/lib/relay")
SPECS = Path("/run/bringup/relay")
IDLE_S = 600
"""Seconds that a relay stays without being asked: a batch of nodes that starts later still finds it."""

ARRIVAL_LIMIT_S = 24 * 3600
ASK_EVERY_S = 1.0
COMMAND_LIMIT_S = 60


@dataclass(frozen=True)
class Chain:
    """A node's place: the addresses of the nodes before it (nearest first), and of all that may ask it."""

    before: tuple[str, ...]
    allowed: tuple[str, ...]
    port: int
    bytes_s: float = 0


def unit_of(model: str) -> str:
    """The relay's unit."""
    return f"bringup-relay-{model}"


def spec_of(model: Mapping[str, Any], chain: Chain, until: float = float("inf")) -> dict[str, Any]:
    """What the relay is told. `until`: when it must end (of the monotonic clock)."""
    return {
        "model": {name: model[name] for name in ("name", "folder", "files", "expects") if name in model},
        "listen": ["::" if any(":" in address for address in chain.allowed) else "0.0.0.0", chain.port],
        "upstreams": [f"http://{_bracketed(address)}:{chain.port}" for address in chain.before],
        "allowed": list(chain.allowed),
        "idle_s": IDLE_S,
        "bytes_s": chain.bytes_s,
        "seconds": max(1.0, until - time.monotonic()) if until < float("inf") else 0,
    }


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def remember(model: store.Model, journal: Journal) -> None:
    """Keeps in a role's journal that the relay's program and unit come."""
    journal.remember_trees([PROGRAM])
    journal.remember_unit(f"{unit_of(model.name)}.service", "", False)


def start(model: Mapping[str, Any], chain: Chain, until: float = float("inf")) -> None:
    """Starts the relay of a model, a new one if one runs already. Raises store.StoreFailed."""
    name = str(model["name"])
    texts = {
        f"bringup/node/{Path(str(part.__file__)).name}": inspect.getsource(part)
        for part in (contents, download, fetch, files, relay, store)
    }
    for place, text in {**texts, "bringup/__init__.py": "", "bringup/node/__init__.py": ""}.items():
        # A file that is right stays: Python has compiled it already.
        target = PROGRAM / place
        if not target.is_file() or files.read_text(target) != text:
            files.write_atomic(target, text)
    spec = SPECS / f"{name}.json"
    files.write_atomic(spec, json.dumps(spec_of(model, chain, until)))
    unit = unit_of(name)
    _systemctl("stop", unit)
    _systemctl("reset-failed", unit)
    properties = ["Nice=10", "ProtectHome=yes", "PrivateTmp=yes", "NoNewPrivileges=yes"]
    argv = ["systemd-run", "--quiet", "--collect", "--unit", unit, f"--working-directory={PROGRAM}"]
    argv += [f"--property={text}" for text in properties]
    argv += [sys.executable, "-m", "bringup.node.relay", str(spec)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=COMMAND_LIMIT_S, check=False)
    if done.returncode:
        raise store.StoreFailed(f"relay of model {name}: {done.stderr.strip() or done.returncode}")


def _systemctl(verb: str, unit: str) -> str:
    argv = ["systemctl", verb, unit]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=COMMAND_LIMIT_S, check=False)
    return done.stdout.strip()


def await_arrival(model: store.Model, limit_s: float = ARRIVAL_LIMIT_S) -> bool:
    """Waits until the folder is ready; False when the relay has ended without that."""
    end = time.monotonic() + limit_s
    unit = unit_of(model.name)
    while time.monotonic() < end:
        if (model.folder / store.READY).is_file():
            return True
        if _systemctl("is-active", unit) not in ("active", "activating"):
            return (model.folder / store.READY).is_file()
        time.sleep(ASK_EVERY_S)
    return False


def ensure(
    model: store.Model,
    data: Mapping[str, Any],
    chain: Chain,
    access: store.Access,
    deep: bool,
    owner: int | None,
) -> dict[str, Any]:
    """What `store.ensure` does, along a chain: the head fetches, the others follow, and all serve.

    A node that is ready already only serves. A node whose chain fails it fetches by itself.
    """
    before = store.look(model, deep)
    if before["ready"]:
        start(data, chain, access.limits.until)
        return before
    (model.folder / store.READY).unlink(missing_ok=True)
    wanted: Sequence[store.File] = [file for file in model.files if file.path in before["faults"]]
    if problem := store.room_problem(model, wanted):
        raise store.StoreFailed(problem)
    for path in before["faults"]:
        (model.folder / path).unlink(missing_ok=True)
    start(data, chain, access.limits.until)
    left = min(ARRIVAL_LIMIT_S, access.limits.until - time.monotonic())
    arrived = bool(chain.before) and await_arrival(model, left)
    try:
        answer = store.ensure(model, access, False, owner)
    except BaseException:
        # Whoever follows us must not wait for what does not come.
        _systemctl("stop", unit_of(model.name))
        raise
    if arrived:
        answer["fetched"] = sorted({*answer["fetched"], *before["faults"]})
    return {**answer, "changed": True, "faults": before["faults"]}
