"""The life of a model's files, for `invoke models.*`: lock, list, verify, space, collect garbage."""

from __future__ import annotations

import base64
import io
import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any

import yaml
from pydantic import AfterValidator, Field, NonNegativeInt

from bringup import ROOT, hubs
from bringup.catalog import Catalog, Model, lazy
from bringup.entries import Entry, build
from bringup.errors import BringupError, HostFailed, Problem, UsageError
from bringup.node import store
from bringup.node.files import write_atomic
from bringup.planned import HostPlan, ModelFile
from bringup.yamlfile import read_yaml

if TYPE_CHECKING:
    from bringup.fleet import Host

LOCKS = "catalog/models/locks"

QUICK_LIMIT_S = 120.0
SAY_EVERY_S = 2.0
"""How often a node says how much it has read."""

VERIFY_LIMIT_S = 6 * 3600.0
"""Seconds for reading every byte of every model of a node: 850 GB from a slow disk take hours."""


def _inside(path: str) -> str:
    if not store.is_inside(path):
        raise ValueError("is no relative path that stays in the model's folder")
    return path


class _File(Entry):
    path: Annotated[str, AfterValidator(_inside)]
    size: NonNegativeInt
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


def _once(files: tuple[_File, ...]) -> tuple[_File, ...]:
    if bad := store.clashes([file.path for file in files]):
        raise ValueError(f"{', '.join(bad)} is there twice, or as file and as folder")
    return files


class Lock(Entry):
    """A lock file: the commit, and every file with its size and sha256."""

    revision: str
    files: Annotated[tuple[_File, ...], Field(min_length=1), AfterValidator(_once)]


def read_lock(path: Path, where: str | None = None) -> tuple[str, tuple[ModelFile, ...]]:
    """Revision and files of a lock. Raises UsageError."""
    name = where or str(path)
    lock = build(Lock, read_yaml(path, name), name)
    return lock.revision, tuple(ModelFile(file.path, file.size, file.sha256) for file in lock.files)


def lock_text(revision: str, files: Sequence[ModelFile], origin: str) -> str:
    """The text of a lock, one line a file so that a diff shows which file changed."""
    lines = [f"# {origin}", f"revision: {json.dumps(revision)}", "files:"]
    lines += [
        f'  - {{path: {json.dumps(file.path)}, size: {file.size}, sha256: "{file.sha256}"}}' for file in files
    ]
    text = "\n".join(lines) + "\n"
    assert yaml.safe_load(text)["revision"] == revision
    return text


@dataclass(frozen=True)
class Locked:
    """What `invoke models.lock` did: the lock's path in the checkout, its size in bytes, what differs."""

    model: str
    path: str
    revision: str
    files: int
    size: int
    changed: bool
    notes: tuple[str, ...] = ()


def lock(
    name: str,
    access: Mapping[str, hubs.Hub],
    revision: str | None = None,
    catalog: Catalog | None = None,
    root: Path = ROOT,
    *,
    check: bool = False,
) -> Locked:
    """Makes the lock of a catalog model from its hubs, and writes it (unless `check`).

    With both hubs in the entry the second is compared with the first, and a file that engines load and that
    is not the same on both is an error. Raises UsageError or HostFailed.
    """
    entry = (catalog or lazy()).model(name)
    found = _listings(name, entry, access, revision)
    notes: list[str] = []
    if len(found) == 2 and (problems := hubs.differences(*found)):
        raise UsageError([Problem(f"model {name}", "the hubs do not have the same files"), *problems])
    notes += [f"the same on {found[0].hub} and {found[1].hub}"] if len(found) == 2 else []
    path = Path(entry.lock or f"{LOCKS}/{name}.yml")
    origin = ", ".join(f"{listing.hub} {listing.repository}@{listing.commit}" for listing in found)
    text = lock_text(found[0].commit, found[0].files, origin)
    target = root / path
    before = target.read_text(encoding="utf-8") if target.is_file() else ""
    if before != text and not check:
        write_atomic(target, text)
    if not entry.lock:
        notes.append(f"add to catalog/models/{name}.yml: lock: {path}")
    size = hubs.total(found[0].files)
    return Locked(name, str(path), found[0].commit, len(found[0].files), size, before != text, tuple(notes))


def _listings(
    name: str, entry: Model, access: Mapping[str, hubs.Hub], revision: str | None
) -> list[hubs.Listing]:
    hub = entry.graft.delta if entry.graft else entry.hub
    repositories = {"huggingface": hub.huggingface, "modelscope": hub.modelscope}
    known = {kind: place for kind, place in repositories.items() if place}
    places = {kind: place for kind, place in known.items() if kind in access}
    where = f"catalog/models/{name}.yml"
    if not known and entry.made_by:
        what = f"is made here by {entry.made_by}, and its lock is the record of what that makes"
        raise UsageError(Problem(where, what, "There is no hub to ask"))
    if not known:
        raise UsageError(
            Problem(where, "is on no hub, so there is nothing to lock", "Give it hub.huggingface")
        )
    if not places:
        raise UsageError(Problem(f"model {name}", f"has no hub left to ask: {', '.join(known)} left out"))
    found: list[hubs.Listing] = []
    for kind, place in places.items():
        default = "main" if kind == "huggingface" else hub.modelscope_revision or "master"
        # A commit is known to the hub that made it only; the other one is asked for its own, or its newest.
        wanted = (revision or hub.revision) if not found else None
        found.append(hubs.listing(access[kind], place, wanted or default, hub.include))
    return found


# --- on nodes -----------------------------------------------------------------------------------------------


Seen = dict[str, tuple[int, int]]
"""Host -> bytes that it has read, and of how many."""


def verify(
    inventory: str, limit: str | None = None, *, deep: bool = False, seen: Seen | None = None
) -> list[dict[str, Any]]:
    """One row a host and planned model: host, model, folder, ready, faults, problems, bytes (or `error`).

    Quick looks at sizes and times and reads what somebody has touched; deep reads everything, and `seen` is filled
    meanwhile.
    """

    def request(host: HostPlan) -> Mapping[str, Any]:
        return {"what": "verify", "models": _models(host), "deep": deep, "say_every_s": SAY_EVERY_S}

    return _ask(inventory, limit, request, VERIFY_LIMIT_S if deep else QUICK_LIMIT_S, seen)


def told(seen: Seen) -> str:
    """How far hosts are, the slowest first: `h20-01 120.0 of 703.7 GiB, h20-02 ...`; "" before they say anything."""
    from bringup.progress import HOSTS_NAMED
    from bringup.stores import GIB

    slowest = sorted(dict(seen).items(), key=lambda item: (item[1][0] / max(item[1][1], 1), item[0]))
    parts = [
        f"{host} {read / GIB:.1f} of {total / GIB:.1f} GiB" for host, (read, total) in slowest[:HOSTS_NAMED]
    ]
    more = len(slowest) - HOSTS_NAMED
    return ", ".join(parts) + (f" and {more} more" if more > 0 else "")


def space(inventory: str, limit: str | None = None) -> list[dict[str, Any]]:
    """One row a host and folder of models: bytes on disk, ready, planned, pids that have it open, units."""
    return _ask(inventory, limit, lambda host: {"what": "space", **_root(host)}, QUICK_LIMIT_S)


def garbage(inventory: str, limit: str | None = None, *, remove: bool = False) -> list[dict[str, Any]]:
    """The folders that nobody plans, has open or names; with `remove` they are gone when this returns."""
    return _ask(inventory, limit, lambda host: {"what": "gc", **_root(host), "remove": remove}, QUICK_LIMIT_S)


def grafts(inventory: str, limit: str | None = None, *, undo: str = "") -> list[dict[str, Any]]:
    """One row a host and overlay that is there: model, folder, base, delta, layer, ready. With `undo` (a model's
    name) its overlay is gone when this returns, or the row has `refused`: it is in use."""
    return _ask(inventory, limit, lambda host: {"what": "graft", **_root(host), "undo": undo}, QUICK_LIMIT_S)


def listed(catalog: Catalog | None = None) -> list[dict[str, Any]]:
    """Every model of the catalog: name, title, format, where from, locked revision, files, bytes."""
    known = catalog or lazy()
    return [_listed(name, known.model(name)) for name in known.names("models")]


def _listed(name: str, entry: Model) -> dict[str, Any]:
    revision, files = read_lock(ROOT / entry.lock, entry.lock) if entry.lock else ("", ())
    places = {
        "huggingface": entry.hub.huggingface,
        "modelscope": entry.hub.modelscope,
        "made by": entry.made_by,
        "graft onto": entry.graft.base if entry.graft else None,
    }
    return {
        "model": name,
        "title": entry.title,
        "format": entry.format,
        "from": [f"{kind} {place}" for kind, place in places.items() if place],
        "revision": revision,
        "files": len(files),
        "bytes": hubs.total(files),
    }


def failed(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Is any row of `verify` not ready, or a host without an answer?"""
    return any(row.get("error") or not row.get("ready", True) for row in rows)


def _models(host: HostPlan) -> list[dict[str, Any]]:
    from bringup.rolevars.model_store import row

    return [row(model, host) for model in host.models]


def _root(host: HostPlan) -> dict[str, Any]:
    folders = [model.folder for model in host.models]
    roots = sorted({str(PurePosixPath(folder).parent) for folder in folders})
    return {"root": roots[0] if roots else "/srv/models", "planned": folders}


def _ask(
    inventory: str,
    limit: str | None,
    request: Callable[[HostPlan], Mapping[str, Any]],
    limit_s: float,
    seen: Seen | None = None,
) -> list[dict[str, Any]]:
    """Runs the node's program on every host at once; a host without an answer is a row with `error`."""
    from bringup import fleet, plan

    resolved = plan.load(inventory)
    hosts = fleet.hosts_of(inventory, fleet.matching(fleet.groups_of(inventory), limit))
    answers = fleet.each(
        hosts,
        lambda host: _look(host, request(resolved.host(host.name)), limit_s, {} if seen is None else seen),
    )
    rows: list[dict[str, Any]] = []
    for host, found in zip(hosts, answers, strict=True):
        if isinstance(found, Exception):
            why = found.problems[0].what if isinstance(found, BringupError) else str(found)
            rows.append({"host": host.name, "error": why})
        else:
            rows += [{"host": host.name, **row} for row in found]
    return rows


class Hearing:
    """What a node's program prints, as it comes: whole lines, of which those about how far it is go into `seen`."""

    def __init__(self, host: str, seen: Seen) -> None:
        self.last, self._begun = "", ""
        self._host, self._seen = host, seen

    def __call__(self, text: str) -> None:
        """More of it has come."""
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            self.last = line
            with suppress(ValueError, KeyError, TypeError):
                about = json.loads(line)
                self._seen[self._host] = (int(about["read"]), int(about["of"]))


def _look(host: Host, request: Mapping[str, Any], limit_s: float, seen: Seen) -> list[dict[str, Any]]:
    from bringup import remote
    from bringup.looking import AS_ROOT

    hearing = Hearing(host.name, seen)
    ran = remote.run(
        host, AS_ROOT.format("python3 -I -"), stdin=program(request), limit_s=limit_s, on_output=hearing
    )
    seen.pop(host.name, None)
    try:
        rows: list[dict[str, Any]] = json.loads(hearing.last)["rows"]
    except (ValueError, KeyError, TypeError):
        said = (ran.err or hearing.last).strip().splitlines()
        why = f"took longer than {limit_s:g} s" if ran.code == 124 else (said[-1] if said else "no output")
        raise HostFailed(Problem(host.name, f"looking at its models failed: {why}")) from None
    return rows


def program(request: Mapping[str, Any]) -> str:
    """One Python program that needs nothing on the node: our modules in a zip, and the request."""
    folder = ROOT / "bringup" / "node"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in (
            "__init__",
            "contents",
            "download",
            "fetch",
            "files",
            "graft",
            "overlay",
            "shelf",
            "store",
        ):
            archive.write(folder / f"{name}.py", f"bringup_node/{name}.py")
    packed = base64.b64encode(buffer.getvalue()).decode()
    return (
        "import base64, json, sys, tempfile\n"
        "with tempfile.NamedTemporaryFile(suffix='.zip') as file:\n"
        f"    file.write(base64.b64decode({packed!r}))\n"
        "    file.flush()\n"
        "    sys.path.insert(0, file.name)\n"
        "    from bringup_node import shelf\n"
        f"    shelf.main(json.loads({json.dumps(request)!r}))\n"
    )
