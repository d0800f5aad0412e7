"""Puts the draft layer of one checkpoint onto another, as a folder of its own; both stay as they are.

The overlay holds a second name (a hard link, or a symbolic link across file systems) for each file of the
base and of the delta, a new index over all tensors, and a patched configuration. It is built beside its
place and renamed when it is whole; `undo` removes it and touches nothing else.

    python graft.py BASE DELTA OUT [--tensors N] [--layer L] [--dtypes BF16,F32] [--config JSON] [--check]
    python graft.py --undo OUT
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __package__:
    from . import contents
    from .files import sync_folder, write_atomic
else:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from bringup.node import contents
    from bringup.node.files import sync_folder, write_atomic

SCHEMA_VERSION = 1
RECORD = ".bringup/graft.json"
SHOWN = 3


class GraftRefused(Exception):
    """Why two checkpoints do not go together; every reason, one a line."""


@dataclass(frozen=True)
class Wish:
    """What is grafted onto what.

    `layer`: the index of the draft layer, None for the base's own number of layers (where it belongs);
    `tensors`: how many the delta must bring, None for any; `dtypes`: which types they may have (empty: any);
    `config`: keys of config.json to set, dotted.
    """

    base: Path
    delta: Path
    out: Path
    layer: int | None = None
    tensors: int | None = None
    dtypes: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """A folder of safetensors: the tensors of each file."""

    folder: Path
    files: Mapping[str, tuple[contents.Tensor, ...]]

    @property
    def where(self) -> dict[str, str]:
        """Tensor -> file."""
        return {tensor.name: name for name, tensors in self.files.items() for tensor in tensors}

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.end - tensor.start for tensors in self.files.values() for tensor in tensors)


def checkpoint(folder: Path) -> Checkpoint:
    """The tensors of every safetensors file of a folder. Raises GraftRefused."""
    files = {}
    try:
        for path in sorted(folder.glob("*.safetensors")):
            files[path.name] = tuple(contents.tensors(path))
    except contents.BadFile as error:
        raise GraftRefused(f"{folder}: {error}") from None
    if not files:
        raise GraftRefused(f"{folder} has no safetensors files")
    return Checkpoint(folder, files)


def config_of(folder: Path) -> dict[str, Any]:
    """A checkpoint's config.json. Raises GraftRefused."""
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise GraftRefused(f"{folder}/config.json: {error}") from None
    return config


def layer_of(config: Mapping[str, Any], wish: Wish) -> int:
    """The draft layer's index: the one after the last. Raises GraftRefused when the base does not say it."""
    layers = contents.config_value(config, "num_hidden_layers")
    if wish.layer is not None:
        return wish.layer
    if not isinstance(layers, int):
        raise GraftRefused(f"{wish.base}/config.json has no num_hidden_layers; say the layer")
    return layers


def reasons(wish: Wish, base: Checkpoint, delta: Checkpoint, config: Mapping[str, Any]) -> list[str]:
    """Everything that speaks against it."""
    layer = layer_of(config, wish)
    prefix = f"model.layers.{layer}."
    last = contents.config_value(config, "num_hidden_layers")
    found = []
    if isinstance(last, int) and layer != last:
        found.append(f"wrong layer: the base has {last} layers, so its draft layer is {last} and not {layer}")
    have = sorted(name for name in base.where if name.startswith(prefix))
    if have:
        found.append(f"the base has {len(have)} tensors of layer {layer} already: {_some(have)}")
    strange = sorted(name for name in delta.where if not name.startswith(prefix))
    if strange:
        found.append(
            f"wrong layer: the delta brings tensors that do not start with {prefix}: {_some(strange)}"
        )
    count = len(delta.where) - len(strange)
    if wish.tensors is not None and count != wish.tensors:
        found.append(
            f"wrong count: the delta brings {count} tensors of layer {layer}, expected {wish.tensors}"
        )
    return found + _dtype_reasons(wish, delta) + _shape_reasons(delta, config)


def _dtype_reasons(wish: Wish, delta: Checkpoint) -> list[str]:
    tensors = [tensor for tensors in delta.files.values() for tensor in tensors]
    odd = sorted({tensor.dtype for tensor in tensors} - set(wish.dtypes)) if wish.dtypes else []
    if not odd:
        return []
    which = sorted(tensor.name for tensor in tensors if tensor.dtype in odd)
    allowed = ", ".join(wish.dtypes)
    return [f"dtype surprise: {', '.join(odd)} where {allowed} is expected: {_some(which)}"]


def _shape_reasons(delta: Checkpoint, config: Mapping[str, Any]) -> list[str]:
    """The delta's norms are as wide as the base's hidden state, or the two are of different models."""
    hidden = contents.config_value(config, "hidden_size")
    wrong = [
        tensor.name
        for tensors in delta.files.values()
        for tensor in tensors
        if tensor.name.endswith(("hnorm.weight", "enorm.weight")) and list(tensor.shape) != [hidden]
    ]
    return (
        [f"another width: {_some(sorted(wrong))} do not fit hidden_size {hidden}"] if hidden and wrong else []
    )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


# --- making -------------------------------------------------------------------------------------------------


Seal = Callable[[Path, Mapping[str, Any]], None]
"""Called with the folder beside its place and the record, before the folder gets its name."""


def graft(
    wish: Wish, check_only: bool = False, anew: bool = False, seal: Seal | None = None
) -> dict[str, Any]:
    """Makes the overlay. Returns `changed`, `layer`, `tensors` (brought), `files` (of the overlay).

    An overlay that was made of the same is left alone, unless it is wanted `anew`. Raises GraftRefused; then
    there is no overlay, or the old one still.
    """
    base, delta, config = checkpoint(wish.base), checkpoint(wish.delta), config_of(wish.base)
    against = reasons(wish, base, delta, config)
    if against:
        raise GraftRefused("\n".join(against))
    if wish.out.exists() and not (wish.out / RECORD).is_file():
        raise GraftRefused(f"{wish.out} is there and was not made by a graft")
    record = _record(wish, base, delta, layer_of(config, wish))
    answer = {"layer": record["layer"], "tensors": len(delta.where), "files": len(record["files"])}
    if _recorded(wish.out) == record and not anew:
        return {"changed": False, **answer}
    if not check_only:
        _build(wish, base, delta, config, record, seal)
    return {"changed": True, **answer}


def _names(base: Checkpoint, delta: Checkpoint) -> dict[str, str]:
    """The delta's files under the name that they get in the overlay: never one that the base has."""
    return {name: name if name not in base.files else f"draft-{name}" for name in delta.files}


def _record(wish: Wish, base: Checkpoint, delta: Checkpoint, layer: int) -> dict[str, Any]:
    """What the overlay is made of; the same when nothing has changed."""
    rows = {}
    for origin, names in (
        (base.folder, {name: name for name in _linked(base.folder)}),
        (delta.folder, _names(base, delta)),
    ):
        for name, called in names.items():
            status = (origin / name).stat()
            rows[called] = [str(origin / name), status.st_size, status.st_mtime_ns]
    return {
        "schema_version": SCHEMA_VERSION,
        "base": str(wish.base),
        "delta": str(wish.delta),
        "layer": layer,
        "config": dict(wish.config),
        "files": rows,
    }


def _recorded(out: Path) -> Any:
    with suppress(OSError, ValueError):
        return json.loads((out / RECORD).read_text(encoding="utf-8"))
    return None


def _linked(folder: Path) -> list[str]:
    """The base's files that the overlay takes as they are."""
    made = {"config.json", contents.INDEX}
    return sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and path.name not in made and ".bringup" not in path.relative_to(folder).parts
    )


def _build(
    wish: Wish,
    base: Checkpoint,
    delta: Checkpoint,
    config: Mapping[str, Any],
    record: Mapping[str, Any],
    seal: Seal | None,
) -> None:
    beside = wish.out.with_name(f".{wish.out.name}.building")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        for called, (origin, _, _) in record["files"].items():
            link(Path(origin), beside / called)
        write_atomic(beside / contents.INDEX, json.dumps(index_of(base, delta), indent=1) + "\n")
        patched = patch(config, {"num_nextn_predict_layers": 1, **wish.config})
        write_atomic(beside / "config.json", json.dumps(patched, indent=1) + "\n")
        write_atomic(beside / RECORD, json.dumps(record, indent=1) + "\n")
        problems = contents.check_index(beside)
        if problems:
            raise GraftRefused("\n".join(problems))
        if seal:
            seal(beside, record)
        old = wish.out.with_name(f".{wish.out.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if wish.out.exists():
            wish.out.rename(old)
        beside.rename(wish.out)
        shutil.rmtree(old, ignore_errors=True)
        sync_folder(wish.out.parent)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def link(origin: Path, target: Path) -> None:
    """A second name for a file: a hard link keeps the bytes when the base goes; else a symbolic one."""
    target.parent.mkdir(parents=True, exist_ok=True)
    real = origin.resolve()
    try:
        os.link(real, target)
    except OSError:
        target.symlink_to(real)


def index_of(base: Checkpoint, delta: Checkpoint) -> dict[str, Any]:
    """The index over both, sorted by tensor."""
    names = _names(base, delta)
    where = {**base.where, **{tensor: names[file] for tensor, file in delta.where.items()}}
    return {"metadata": {"total_size": base.bytes + delta.bytes}, "weight_map": dict(sorted(where.items()))}


def patch(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with dotted keys set; the original is left alone."""
    patched: dict[str, Any] = json.loads(json.dumps(config))
    for dotted, value in changes.items():
        here = patched
        *folders, last = dotted.split(".")
        for name in folders:
            here = here.setdefault(name, {})
        here[last] = value
    return patched


def undo(out: Path) -> bool:
    """Removes an overlay; base and delta stay. False when there is none. Raises GraftRefused."""
    if not out.exists():
        return False
    if not (out / RECORD).is_file():
        raise GraftRefused(f"{out} was not made by a graft")
    gone = out.with_name(f".{out.name}.undone")
    shutil.rmtree(gone, ignore_errors=True)
    out.rename(gone)
    shutil.rmtree(gone)
    return True


def missing_words(needs: Mapping[str, str], packages: Path) -> list[str]:
    """Which needed patches an engine does not have. `needs`: what it is -> a word that its code holds."""
    left = dict(needs)
    for path in packages.rglob("*.py") if left else ():
        text = path.read_text(encoding="utf-8", errors="replace")
        left = {what: word for what, word in left.items() if word not in text}
        if not left:
            break
    return sorted(left)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: the overlay is there (or gone), 2: refused; the answer is JSON on stdout."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--tensors", type=int)
    parser.add_argument("--layer", type=int)
    parser.add_argument("--dtypes", default="")
    parser.add_argument("--config", type=json.loads, default={})
    parser.add_argument("--check", action="store_true", help="say what would be done and do nothing")
    parser.add_argument("--undo", action="store_true")
    given = parser.parse_args(arguments)
    if len(given.folders) != (1 if given.undo else 3):
        parser.error("BASE DELTA OUT, or --undo OUT")
    try:
        if given.undo:
            answer: dict[str, Any] = {"changed": undo(given.folders[0])}
        else:
            dtypes = tuple(word for word in given.dtypes.split(",") if word)
            base, delta, out = given.folders
            wish = Wish(base, delta, out, given.layer, given.tensors, dtypes, given.config)
            answer = graft(wish, given.check)
    except GraftRefused as error:
        print(f"refused: {error}", file=sys.stderr)
        return 2
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
