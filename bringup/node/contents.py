"""Do a model's files make sense? Headers, offsets and indexes are read; weights are not loaded.

Each function returns problems as text; nothing to say is an empty list. Formats: safetensors
(https://github.com/huggingface/safetensors#format), GGUF
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), git-lfs pointers
(https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HEADER_LIMIT_BYTES = 100 * 1024 * 1024
"""The safetensors format's own limit for its header."""

GGUF_MAGIC = b"GGUF"
GGUF_VERSIONS = (2, 3)
LFS_START = b"version https://git-lfs.github.com/spec/"
INDEX = "model.safetensors.index.json"
INDEX_LIMIT_BYTES = 64 * 1024 * 1024
"""An index of 120,000 tensors, as of a model with 256 experts in 78 layers, is 12 MiB."""

LEFTOVER_SUFFIXES = (".incomplete", ".partial", ".aria2", ".lock")
SHOWN = 3

DTYPE_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
"""Bits an element; a type that is not here is not checked for its length."""


class BadFile(Exception):
    """A file that is not what its name says; the text says why."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of a safetensors file: `start` and `end` count from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def safetensors_header(path: Path) -> tuple[int, dict[str, Any]]:
    """Bytes before the first tensor, and the header. Raises BadFile."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if len(start) < 8:
            raise BadFile(f"{path.name} is {size} bytes: no safetensors file is so short")
        length = struct.unpack("<Q", start)[0]
        if length > min(size - 8, HEADER_LIMIT_BYTES):
            raise BadFile(
                f"{path.name} starts with a header length of {length}: it is cut off or no safetensors"
            )
        text = file.read(length)
    try:
        header = json.loads(text)
    except ValueError:
        raise BadFile(f"{path.name} has a header that is no JSON") from None
    if not isinstance(header, dict):
        raise BadFile(f"{path.name} has a header that is no mapping")
    return 8 + length, header


def tensors(path: Path) -> list[Tensor]:
    """The tensors of a file in the order of their bytes. Raises BadFile when the header is wrong."""
    _, header = safetensors_header(path)
    try:
        found = [
            Tensor(name, str(about["dtype"]), tuple(about["shape"]), *map(int, about["data_offsets"]))
            for name, about in header.items()
            if name != "__metadata__"
        ]
    except (KeyError, TypeError, ValueError):
        raise BadFile(f"{path.name} has a header with a malformed tensor") from None
    return sorted(found, key=lambda tensor: tensor.start)


def check_safetensors(path: Path) -> list[str]:
    """Header, offsets without gap or overlap, lengths that fit type and shape, and the file's end."""
    try:
        start, _ = safetensors_header(path)
        found = tensors(path)
    except BadFile as error:
        return [str(error)]
    problems = []
    at = 0
    for tensor in found:
        if tensor.start != at:
            problems.append(f"{path.name}: {tensor.name} starts at {tensor.start}, expected {at}")
        bits = DTYPE_BITS.get(tensor.dtype)
        if bits and (tensor.end - tensor.start) * 8 != _elements(tensor.shape) * bits:
            problems.append(
                f"{path.name}: {tensor.name} has not the length of {tensor.dtype} {list(tensor.shape)}"
            )
        at = tensor.end
    if start + at != path.stat().st_size:
        problems.append(f"{path.name} has {path.stat().st_size} bytes, its header says {start + at}")
    return problems[:SHOWN]


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for side in shape:
        count *= side
    return count


def check_index(folder: Path) -> list[str]:
    """The index names shards that are there and tensors that are in them, and no tensor is left out."""
    path = folder / INDEX
    if not path.is_file():
        return []
    try:
        weight_map: Mapping[str, str] = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        shards = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        return [f"{INDEX} is no index: it has no weight_map"]
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        return [f"{INDEX} names files that are not there: {_some(missing)}"]
    inside: dict[str, str] = {}
    try:
        for shard in shards:
            inside.update((tensor.name, shard) for tensor in tensors(folder / shard))
    except BadFile as error:
        return [str(error)]
    lost = sorted(name for name, shard in weight_map.items() if inside.get(name) != shard)
    extra = sorted(set(inside) - set(weight_map))
    problems = [f"{INDEX} names tensors that are not in their files: {_some(lost)}"] if lost else []
    return problems + ([f"files hold tensors that {INDEX} does not name: {_some(extra)}"] if extra else [])


def index_map(folder: Path) -> tuple[dict[str, str], int]:
    """The index's tensors with their files, and the bytes of all tensors that it names (0: it does not say). Raises
    BadFile for one that is no index, or larger than INDEX_LIMIT_BYTES; OSError for none."""
    path = folder / INDEX
    size = path.stat().st_size
    if size > INDEX_LIMIT_BYTES:
        raise BadFile(f"{INDEX} has {size} bytes, more than {INDEX_LIMIT_BYTES}: it is no index")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        names = {str(name): str(file) for name, file in data["weight_map"].items()}
        return names, int((data.get("metadata") or {}).get("total_size") or 0)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise BadFile(f"{INDEX} is no index: it has no weight_map") from None


def check_listed(folder: Path, names: Mapping[str, str], total: int) -> list[str]:
    """Are the files that an index names there, and as large as what it says is in them? Sizes only."""
    files = sorted(set(names.values()))
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        return [f"{INDEX} names files that are not there: {_some(missing)}"]
    there = sum((folder / name).stat().st_size for name in files)
    if there < total:
        return [f"{INDEX} names tensors of {total} bytes, and its files have {there}"]
    return []


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def check_gguf(path: Path) -> list[str]:
    """Magic and version."""
    with path.open("rb") as file:
        start = file.read(8)
    if start[:4] != GGUF_MAGIC:
        return [f"{path.name} does not start with GGUF"]
    version = struct.unpack("<I", start[4:8])[0] if len(start) == 8 else 0
    return [] if version in GGUF_VERSIONS else [f"{path.name} is of GGUF version {version}, known: 2 and 3"]


def is_lfs_pointer(path: Path) -> bool:
    """Is this the small text that git-lfs leaves where the file should be?"""
    with path.open("rb") as file:
        return file.read(len(LFS_START)) == LFS_START


def check_file(path: Path) -> list[str]:
    """What can be said of one file by its name and its first bytes."""
    if is_lfs_pointer(path):
        return [f"{path.name} is a git-lfs pointer and not the file"]
    if path.suffix == ".safetensors":
        return check_safetensors(path)
    if path.suffix == ".gguf":
        return check_gguf(path)
    if path.suffix == ".json":
        try:
            json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            return [f"{path.name} is no JSON"]
    return []


def leftovers(folder: Path) -> list[str]:
    """Files that a download that was broken off has left."""
    return sorted(
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.name.endswith(LEFTOVER_SUFFIXES)
    )


def config_value(config: Mapping[str, Any], dotted: str) -> Any:
    """A value in config.json by its dotted name; multimodal models keep the text model under text_config."""
    for start in (config, config.get("text_config")):
        here: Any = start
        for part in dotted.split("."):
            here = here.get(part) if isinstance(here, dict) else None
        if here is not None:
            return here
    return None


def check_config(folder: Path, expects: Mapping[str, Any], names: Iterable[str] | None = None) -> list[str]:
    """config.json against what the plan expects: `architecture`, `config` (dotted name -> value), and
    `tensors` (prefix -> how many tensors start with it; None: at least one). `names`: of all tensors, where the caller
    has read them."""
    if not expects:
        return []
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = None
    problems = []
    architecture = expects.get("architecture")
    if config is None and (architecture or expects.get("config")):
        return ["config.json is not there or no JSON"]
    if architecture and architecture not in config.get("architectures", []):
        found = ", ".join(config.get("architectures", [])) or "none"
        problems.append(f"config.json is of architecture {found}, the plan needs {architecture}")
    for name, value in (expects.get("config") or {}).items():
        if config_value(config, name) != value:
            problems.append(f"config.json says {name} = {config_value(config, name)}, the plan needs {value}")
    wanted = expects.get("tensors") or {}
    if not wanted:
        return problems
    return problems + _check_tensor_counts(list(tensor_names(folder) if names is None else names), wanted)


def _check_tensor_counts(names: list[str], wanted: Mapping[str, int | None]) -> list[str]:
    problems = []
    for prefix, count in wanted.items():
        found = sum(name.startswith(prefix) for name in names)
        if (not found) if count is None else (found != count):
            needs = "some" if count is None else count
            problems.append(f"{found} tensors start with {prefix}, the plan needs {needs}")
    return problems


def tensor_names(folder: Path) -> list[str]:
    """The names of all tensors: from the index, or from the files when there is no index."""
    path = folder / INDEX
    if path.is_file():
        try:
            return list(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
        except (ValueError, KeyError, TypeError):
            return []
    names: list[str] = []
    for file in sorted(folder.glob("*.safetensors")):
        try:
            names += [tensor.name for tensor in tensors(file)]
        except BadFile:
            continue
    return names


def check_model(folder: Path, files: Iterable[str], expects: Mapping[str, Any]) -> list[str]:
    """Everything that can be said of a model's folder without loading it."""
    problems = [problem for name in files for problem in check_file(folder / name)]
    return problems + check_index(folder) + check_config(folder, expects)
