"""A depot on the controller: models fetched once from the hubs, verified, and served to nodes that reach no hub."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bringup import ROOT, models, progress, stores
from bringup.catalog import Catalog, Hub, lazy
from bringup.errors import HostFailed, Problem, UsageError
from bringup.node import depot, store
from bringup.plan import DELTA

PORT = 7421


def shelves(folder: Path, catalog: Catalog | None = None, root: Path = ROOT) -> list[dict[str, Any]]:
    """Every locked model of the catalog that has a hub, as `folder` holds it or will; a grafted model is its
    delta. Rows as `bringup/node/depot.py` takes them, with `sources`, `ready` and `catalog` (the entry's name)."""
    known = catalog or lazy()
    rows = []
    for name in known.names("models"):
        entry = known.model(name)
        hub = entry.graft.delta if entry.graft else entry.hub
        places = [place for place in (hub.huggingface, hub.modelscope) if place]
        if entry.lock and places:
            rows.append(
                _shelf(name, f"{name}{DELTA}" if entry.graft else name, root / entry.lock, hub, folder)
            )
    return rows


def _shelf(name: str, called: str, lock: Path, hub: Hub, folder: Path) -> dict[str, Any]:
    commit, files = models.read_lock(lock)
    row: dict[str, Any] = {
        "catalog": name,
        "name": called,
        "folder": str(folder / called),
        "files": [asdict(file) for file in files],
        "commit": commit,
        "repositories": [place for place in (hub.huggingface, hub.modelscope) if place],
        "sources": [
            {"kind": kind, "locator": f"{place}@{revision}"}
            for kind, place, revision in (
                ("huggingface", hub.huggingface, commit),
                ("modelscope", hub.modelscope, hub.modelscope_revision or "master"),
            )
            if place
        ],
    }
    return {**row, "ready": store.is_stamped(store.Model.of(row))}


def fill(
    folder: Path,
    names: Iterable[str],
    access: store.Access,
    catalog: Catalog | None = None,
    root: Path = ROOT,
) -> list[dict[str, Any]]:
    """Brings models (and what grafted ones are made of) into the depot, verified; returns all rows.

    Raises UsageError for a name that cannot be served, and HostFailed with every model that cannot be had.
    """
    known = catalog or lazy()
    problems = []
    for row in wanted(folder, names, known, root):
        try:
            _bring(row, access)
        except (store.StoreFailed, OSError) as error:
            problems.append(Problem(f"depot {folder}", str(error)))
    if problems:
        raise HostFailed(problems)
    return shelves(folder, known, root)


def wanted(
    folder: Path, names: Iterable[str], catalog: Catalog | None = None, root: Path = ROOT
) -> list[dict[str, Any]]:
    """The rows of these models and of what grafted ones are made of. Raises UsageError for what cannot be served."""
    known = catalog or lazy()
    rows = {row["catalog"]: row for row in shelves(folder, known, root)}
    asked = list(dict.fromkeys(part for name in names for part in _parts(name, known)))
    missing = [name for name in asked if name not in rows]
    if missing:
        raise UsageError(_unserved(name, known) for name in missing)
    return [rows[name] for name in asked]


def _bring(row: Mapping[str, Any], access: store.Access) -> None:
    """One model, with a line on stderr now and then. Raises StoreFailed or OSError."""
    with tempfile.TemporaryDirectory() as place:
        seen = Path(place) / "progress.json"
        said = progress.waiting(lambda: told(str(row["name"]), seen), progress.choose())
        with said:
            store.ensure(store.Model.of(row), replace(access, progress=seen))


def told(name: str, seen: Path) -> str:
    """How far a model is, from what `store.Progress` wrote: `glm: 12.0 of 703.7 GiB, 240 MiB/s, 49 m 10 s left`."""
    try:
        about = json.loads(seen.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return f"{name}: looking at what is there"
    left = "" if about["left_s"] is None else f", {progress.elapsed(about['left_s'])} left"
    done = f"{about['done'] / stores.GIB:.1f} of {about['total'] / stores.GIB:.1f} GiB"
    return f"{name}: {done}, {about['bytes_s'] / 1024**2:.0f} MiB/s{left}"


def access(huggingface: str, modelscope: str, tokens: Mapping[str, str]) -> store.Access:
    """How hubs are reached from here; an address of "" leaves its hub out."""
    return store.Access(
        huggingface=huggingface,
        modelscope=modelscope,
        huggingface_token=tokens["huggingface"],
        modelscope_token=tokens["modelscope"],
    )


def doors(allowed: Sequence[str], token: str) -> depot.Doors:
    """Who may ask. Raises UsageError for what is neither an address nor a network."""
    try:
        return depot.Doors.of(allowed, token)
    except ValueError as error:
        raise UsageError(f"models.depot: --allow: {error}") from None


def _unserved(name: str, known: Catalog) -> Problem:
    if known.model(name).made_by:
        return Problem(
            f"model {name}", "is made on the controller and goes to nodes from there, not from a depot"
        )
    return Problem(
        f"model {name}",
        "has no lock yet, and a depot gives away only what a lock vouches for",
        f"invoke models.lock {name}",
    )


def _parts(name: str, known: Catalog) -> list[str]:
    graft = known.model(name).graft
    return [graft.base, name] if graft else [name]


def ready(rows: Sequence[Mapping[str, Any]]) -> list[depot.Shelf]:
    """The models that can be served. Raises UsageError when there is none."""
    shelves = [depot.Shelf.of(row) for row in rows if row["ready"]]
    if not rows:
        raise UsageError("models.depot: no model on a hub has a lock yet. Make one: invoke models.lock MODEL")
    if not shelves:
        raise UsageError("models.depot: no model is ready in this folder; name some with --models")
    return shelves


def serve(shelves: Sequence[depot.Shelf], address: str, port: int, who: depot.Doors | None = None) -> None:
    """Serves until it is interrupted. Raises UsageError when the port is taken."""
    try:
        depot.serve((address, port), shelves, who)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"models.depot: cannot listen on {address}:{port}: {why}") from None
