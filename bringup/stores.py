"""Model files as the controller sees them: who has which, in what order they go from node to node, and how a
small lab model is made here."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from bringup import ROOT, windows
from bringup.errors import HostFailed, Problem
from bringup.node.files import locked
from bringup.node.store import File, fault

CACHE = ROOT / ".cache" / "models"

MAKE_LIMIT_S = 600
"""Seconds that a script may take to make a lab model."""


def controller_folder(model: Mapping[str, Any], paths: Iterable[str], cache: Path = CACHE) -> Path:
    """The folder here that holds `paths` of a model, each of them as the lock says.

    `model`: `name`, `files` (path, size, sha256), `sources` (kind, locator) and `made_by` (a script of this
    checkout, run as `python SCRIPT FOLDER`, or None). Raises HostFailed.
    """
    script = model.get("made_by")
    folder = make(str(model["name"]), ROOT / script, model["files"], cache) if script else _given(model)
    rows = {row["path"]: File(row["path"], int(row["size"]), row["sha256"]) for row in model["files"]}
    problems = [
        Problem(str(folder / path), f"{text}, and the lock of model {model['name']} says otherwise")
        for path in paths
        if (text := fault(folder / path, rows[path]))
    ]
    if problems:
        raise HostFailed(problems)
    return folder


def _given(model: Mapping[str, Any]) -> Path:
    for source in model.get("sources", ()):
        if source["kind"] == "controller":
            return ROOT / str(source["locator"])
    raise HostFailed(Problem(f"model {model['name']}", "no source of it is on the controller"))


def make(name: str, script: Path, files: Iterable[Mapping[str, Any]], cache: Path = CACHE) -> Path:
    """The folder of a model that a script makes; made when it is not there as the lock says.

    Two runs at once make it once. The script's own text is part of the folder's name, so that a new script
    makes a new folder. Raises HostFailed.
    """
    text = script.read_bytes() if script.is_file() else b""
    folder = cache / f"{name}-{hashlib.sha256(text).hexdigest()[:12]}"
    rows = [File(row["path"], int(row["size"]), row["sha256"]) for row in files]
    with locked(cache / f".{name}.lock", MAKE_LIMIT_S):
        if any(fault(folder / row.path, row) for row in rows):
            _run(script, folder)
    return folder


def _run(script: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    try:
        done = subprocess.run(
            [sys.executable, str(script), str(folder)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=MAKE_LIMIT_S,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise HostFailed(Problem(str(script), f"took longer than {MAKE_LIMIT_S} s")) from None
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no output"]
        raise HostFailed(Problem(str(script), f"ended with {done.returncode}: {last[0]}"))


# --- hours --------------------------------------------------------------------------------------------------

GIB = 1024**3


@dataclass(frozen=True)
class Hours:
    """When models may be fetched: ranges of the week (none: always), for models of so many bytes and more."""

    ranges: tuple[str, ...]
    from_bytes: float
    wait_limit_s: float


def missing_bytes(model: Mapping[str, Any], faults: Iterable[str]) -> int:
    """Bytes of the files that are not right."""
    wrong = set(faults)
    return sum(int(row["size"]) for row in model["files"] if row["path"] in wrong)


def delay(hours: Hours, name: str, missing: int, now: datetime) -> tuple[float, float]:
    """Seconds to wait before fetching so many bytes, and seconds that fetching may take (0: no end).

    Raises HostFailed when the hours begin later than anybody waits for.
    """
    if not hours.ranges or missing < hours.from_bytes:
        return 0.0, 0.0
    change = windows.until_change(hours.ranges, now)
    if windows.is_open(hours.ranges, now):
        return 0.0, change or 0.0
    if change is None or change > hours.wait_limit_s:
        begin = "begin in " + told(change) if change else "never begin"
        raise HostFailed(
            Problem(
                f"model {name}",
                f"{missing / GIB:.1f} GiB may only be fetched within {', '.join(hours.ranges)}; these hours {begin}, "
                f"and more than {told(hours.wait_limit_s)} is not waited for (model_store_hours_wait_s)",
                "Run it again then; what is there already stays. To fetch now: node_download_hours: []",
            )
        )
    length = windows.until_change(hours.ranges, now + timedelta(seconds=change))
    return change, length or 0.0


def told(seconds: float) -> str:
    """Seconds as people say them."""
    minutes = max(1, round(seconds / 60))
    return f"{minutes // 60} h {minutes % 60:02} min" if minutes >= 60 else f"{minutes} min"


# --- from node to node --------------------------------------------------------------------------------------

READY_SERVERS = 2
"""Nodes of a rack that have the model already and serve it to those that lack it."""


def readiness(
    model: Mapping[str, Any], host: str, hostvars: Mapping[str, Any], playing: Sequence[str], seen: str
) -> dict[str, bool]:
    """Host -> has it the model? For the hosts of the model's chain that play and were looked at.

    `seen`: the variable that holds the results of looking, one a model. A model without a chain has only
    `host` itself in it.
    """
    found = {}
    for name in model.get("chain") or (host,):
        if name in playing:
            for row in (hostvars[name].get(seen) or {}).get("results", ()):
                if row["item"]["name"] == model["name"] and "ready" in row:
                    found[name] = bool(row["ready"])
    return found


def place(host: str, ready: Mapping[str, bool], hostvars: Mapping[str, Any]) -> dict[str, list[str]] | None:
    """A host's place in the chain: `before` (addresses to follow, nearest first) and `allowed`.

    Those that lack the model come one after the other, in the order of `ready` (rack by rack). In each rack
    (`node_rack`) the first of them follows one of the same rack that has it, if there is one, and only else
    the last of the racks before; who is near comes first also when a node dies. A host that has the model and is
    not needed as a server has no place (None).
    """
    if host not in ready:
        return {"before": [], "allowed": []}
    racks = {name: hostvars[name].get("node_rack") for name in ready}
    lacking = [name for name, has in ready.items() if not has]
    serving = _serving([name for name, has in ready.items() if has], lacking, racks)
    if host not in (*lacking, *serving):
        return None
    before = _before(host, lacking, serving, racks) if host in lacking else []
    addresses = {name: str(hostvars[name].get("ansible_host") or name) for name in (*serving, *lacking)}
    return {"before": [addresses[name] for name in before], "allowed": list(addresses.values())}


def _serving(having: Sequence[str], lacking: Sequence[str], racks: Mapping[str, Any]) -> list[str]:
    """Of the hosts that have a model those that serve it: some in each rack where it is lacking, or some of all."""
    near = [
        name
        for rack in dict.fromkeys(racks[host] for host in lacking)
        for name in [one for one in having if racks[one] == rack][:READY_SERVERS]
    ]
    if len(near) < READY_SERVERS and lacking:
        near += [name for name in having if name not in near][: READY_SERVERS - len(near)]
    return near


def _before(host: str, lacking: Sequence[str], serving: Sequence[str], racks: Mapping[str, Any]) -> list[str]:
    """Whom a host follows, nearest first: its own rack's chain and servers, then the others'."""
    earlier = lacking[: list(lacking).index(host)][::-1]
    own = [name for group in (earlier, serving[::-1]) for name in group if racks[name] == racks[host]]
    return own + [name for name in (*earlier, *serving[::-1]) if name not in own]
