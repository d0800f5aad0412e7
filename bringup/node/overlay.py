"""A grafted model as a folder of the store: made of two folders that are ready, and ready only when verified.

The stamp of the overlay is in it before it gets its name, so it is whole and ready or not there. Its files
are second names of files that the locks of base and delta vouch for; index and configuration are made here.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import contents, graft, store
from .files import locked, write_atomic

MADE = ("config.json", contents.INDEX)
NOTHING_FETCHED: dict[str, Any] = {"fetched": [], "came": {}, "send": [], "incoming": ""}


@dataclass(frozen=True)
class Overlay:
    """What is planned: the folder's name and place, the two models that it is made of, and how."""

    name: str
    folder: Path
    base: store.Model
    delta: store.Model
    wish: graft.Wish
    expects: Mapping[str, Any]
    words: Mapping[str, str]
    engines: tuple[Path, ...]

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Overlay:
        """From the row of a model that has `graft`. Raises StoreFailed."""
        row = data["graft"]
        base, delta = store.Model.of(row["base"]), store.Model.of(row["delta"])
        folder = Path(data["folder"])
        wish = graft.Wish(
            base=base.folder,
            delta=delta.folder,
            out=folder,
            layer=row.get("layer"),
            tensors=row.get("tensors"),
            dtypes=tuple(row.get("dtypes") or ()),
            config=row.get("config") or {},
        )
        engines = tuple(map(Path, row.get("engines") or ()))
        expects, words = data.get("expects") or {}, row.get("words") or {}
        return cls(str(data["name"]), folder, base, delta, wish, expects, words, engines)

    def sha256(self) -> dict[str, str]:
        """Origin -> what its lock says, for every file of base and delta."""
        return {
            str(model.folder / file.path): file.sha256
            for model in (self.base, self.delta)
            for file in model.files
        }


def unready(overlay: Overlay) -> str:
    """Why it cannot be made now, "" when both parts are ready."""
    missing = [model for model in (overlay.base, overlay.delta) if not store.is_stamped(model)]
    return "; ".join(f"{model.name} in {model.folder} is not ready" for model in missing)


def stamped(overlay: Overlay) -> store.Model:
    """The overlay as its own stamp describes it: what is there to be verified."""
    rows = store.stamp_of(overlay.folder)
    files = tuple(store.File(path, row["size"], row["sha256"]) for path, row in rows.items())
    return store.Model(overlay.name, overlay.folder, files, (), overlay.expects)


def faults(overlay: Overlay, deep: bool, read: store.Read | None = None) -> dict[str, str]:
    """Path -> what is wrong; "" stands for the overlay as a whole."""
    if reason := unready(overlay):
        return {"": reason}
    model = stamped(overlay)
    if not model.files:
        return {"": "is not there or not whole"}
    try:
        if graft.graft(overlay.wish, check_only=True)["changed"]:
            return {"": "was made of other files than base and delta have now"}
    except graft.GraftRefused as error:
        return {"": "; ".join(str(error).splitlines())}
    return store.verify(model, deep, read=read)


def lacking(overlay: Overlay) -> list[str]:
    """What the engines that are to load it do not have, as far as a word in their code tells."""
    return [
        f"the engine in {prefix} has not what the grafted model {overlay.name} needs: {what}"
        for prefix in overlay.engines
        for what in graft.missing_words(overlay.words, prefix / "lib")
    ]


def look(overlay: Overlay, deep: bool, read: store.Read | None = None) -> dict[str, Any]:
    """What `store.look` says, for an overlay."""
    found = faults(overlay, deep, read)
    return {"changed": bool(found), "ready": not found, "faults": found, **NOTHING_FETCHED}


def ensure(overlay: Overlay, deep: bool = False) -> dict[str, Any]:
    """Makes the overlay when it is not there as it must be. Raises StoreFailed; then no new one is there."""
    lock = overlay.folder.parent / f".{overlay.folder.name}.lock"
    with locked(lock, store.LOCK_LIMIT_S, keep=False):
        found = faults(overlay, deep)
        if not found:
            return {"changed": False, "ready": True, "faults": {}, **NOTHING_FETCHED}
        if reason := unready(overlay):
            raise store.StoreFailed(f"graft {overlay.name}: {reason}")
        try:
            graft.graft(overlay.wish, anew=True, seal=lambda beside, record: _seal(overlay, beside, record))
        except graft.GraftRefused as error:
            reasons = "; ".join(str(error).splitlines())
            raise store.StoreFailed(f"graft {overlay.name} refused: {reasons}") from None
        warned = {"warned": lacking(overlay)}
        return {"changed": True, "ready": True, "faults": found, **NOTHING_FETCHED, **warned}


def _seal(overlay: Overlay, beside: Path, record: Mapping[str, Any]) -> None:
    """Verifies what was built and writes its stamp. Raises GraftRefused."""
    known = overlay.sha256()
    strange = sorted(called for called, (origin, _, _) in record["files"].items() if origin not in known)
    if strange:
        raise graft.GraftRefused(f"files that no lock has: {', '.join(strange[: graft.SHOWN])}")
    rows = [store.File(called, size, known[origin]) for called, (origin, size, _) in record["files"].items()]
    rows += [
        store.File(name, (beside / name).stat().st_size, store.sha256_of(beside / name)) for name in MADE
    ]
    model = store.Model(overlay.name, beside, tuple(rows), (), overlay.expects)
    problems = contents.check_model(beside, [file.path for file in rows], overlay.expects)
    if problems:
        raise graft.GraftRefused("\n".join(problems))
    write_atomic(beside / store.READY, store.ready_text(model, time.time()))
