"""Takes GPU code out of a library that will not run where the library goes.

A library made by nvcc keeps its GPU code in the section `.nv_fatbin`: containers, each with one entry an architecture
and source file. Payloads that are not kept become noughts (which compress to nothing); headers and all else stay, so
the library loads as before, and only a kernel that was taken out fails, when it is called.
"""

from __future__ import annotations

import mmap
import re
import struct
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SECTION = ".nv_fatbin"
CONTAINER = 0xBA55ED50
CONTAINER_HEADER = struct.Struct("<IHHQ")
"""Magic, version, bytes of this header, bytes of the entries."""
ENTRY_HEADER = struct.Struct("<HHIQIIHHIIIQ")
"""Kind, -, bytes of this header, bytes of the payload, ..., architecture (9th), ..., flags (12th)."""
ZSTANDARD = 0x8000
MARK, SOURCE, NAME_LIMIT = b"_cu_", re.compile(rb"\d_([a-z][a-z0-9_]*)$"), 100
"""The compiler names internal symbols after the source file: ..._36_flash_fwd_hdim256_bf16_sm90_cu_512dde63."""
UNPACK_LIMIT_S = 60


@dataclass(frozen=True)
class Piece:
    """GPU code of one architecture and source file: where its payload is in the file."""

    start: int
    size: int
    arch: int
    packed: bool


def section(view: mmap.mmap, name: str) -> tuple[int, int]:
    """Offset and size of a section of a 64-bit ELF file. Raises ValueError when it has none of that name."""
    table, width, count, names = (
        struct.unpack_from("<Q", view, 40)[0],
        *struct.unpack_from("<HHH", view, 58),
    )
    rows = [struct.unpack_from("<IIQQQQ", view, table + number * width) for number in range(count)]
    texts = rows[names]
    for row in rows:
        at = texts[4] + row[0]
        if view[at : view.find(b"\0", at)].decode() == name:
            return row[4], row[5]
    raise ValueError(f"no section {name}")


def pieces(view: mmap.mmap) -> Iterator[Piece]:
    """Every piece of GPU code."""
    at, size = section(view, SECTION)
    end = at + size
    while at < end - CONTAINER_HEADER.size:
        magic, _, header, length = CONTAINER_HEADER.unpack_from(view, at)
        if magic != CONTAINER:
            at += 8
            continue
        entry, at = at + header, at + header + length
        while entry < at:
            row = ENTRY_HEADER.unpack_from(view, entry)
            yield Piece(entry + row[2], row[3], row[8], bool(row[11] & ZSTANDARD))
            entry += row[2] + row[3]
        at = -(-at // 8) * 8


def source(view: mmap.mmap, piece: Piece) -> str:
    """The source file that a piece was made of, as its first internal symbol says; empty when none does."""
    data = view[piece.start : piece.start + piece.size]
    if piece.packed:
        done = subprocess.run(
            ["zstd", "-dcq"], input=data, capture_output=True, timeout=UNPACK_LIMIT_S, check=False
        )
        # What follows the frame is padding, of which zstd complains after it has written everything.
        data = done.stdout
    at = data.find(MARK)
    while at >= 0:
        if found := SOURCE.search(data[max(0, at - NAME_LIMIT) : at]):
            return found[1].decode()
        at = data.find(MARK, at + 1)
    return ""


def prune(path: Path, arch: int, keep: Sequence[str] = ()) -> tuple[int, int]:
    """Empties every piece of another architecture and, when `keep` holds patterns, those none of whose source files
    match one of them. Returns bytes that stay and bytes that went."""
    wanted = [re.compile(pattern) for pattern in keep]
    stays = went = 0
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as view:
        for piece in list(pieces(view)):
            good = piece.arch == arch and (
                not wanted or any(one.search(source(view, piece)) for one in wanted)
            )
            if good:
                stays += piece.size
            else:
                view[piece.start : piece.start + piece.size] = bytes(piece.size)
                went += piece.size
        view.flush()
    return stays, went
