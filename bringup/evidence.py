"""What the rules read: files, standard input, archives and texts, as chunks of whole lines; and their hits.

One pass, in chunks of CHUNK bytes: memory does not grow with the log.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import re
import tarfile
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from bringup import bursts, failures, logtext
from bringup.errors import Problem, UsageError

CHUNK = 1 << 20
"""Bytes read at a time."""

FIRST_KEPT = 60
LAST_KEPT = 20
"""Matching lines of one pattern that are kept with their text; the others are only counted."""

KINDS = 50_000
"""Kinds of lines that are remembered; then forgotten, so that memory stays flat."""

MAX_MEMBERS = 10_000
"""Files of one archive."""


@dataclass(frozen=True)
class Hit:
    """One line that a pattern matched; `number` counts from 1 in its source."""

    source: str
    number: int
    order: int
    text: str

    @cached_property
    def rank(self) -> str | None:
        """Which process of a server wrote it."""
        return logtext.rank_of(self.text)

    @cached_property
    def gpu(self) -> str | None:
        """The GPU it speaks of."""
        return logtext.gpu_of(self.text)


@dataclass
class Hits:
    """The lines one pattern matched: how many, the first and the last of them."""

    count: int = 0
    first: list[Hit] = field(default_factory=list)
    last: deque[Hit] = field(default_factory=lambda: deque(maxlen=LAST_KEPT))

    def add(self, hit: Hit) -> None:
        self.count += 1
        (self.first if len(self.first) < FIRST_KEPT else self.last).append(hit)

    def kept(self) -> list[Hit]:
        """In the order of the evidence."""
        return [*self.first, *self.last]


@dataclass
class Reading:
    """All that one pass found: hits by pattern text, lines and bytes read, the first text for guesses."""

    hits: dict[str, Hits] = field(default_factory=dict)
    lines: int = 0
    size: int = 0
    head: str = ""
    sources: list[str] = field(default_factory=list)
    order: int = 0
    dense: bool = False


Source = tuple[str, BinaryIO]


def read(sources: Iterable[Source], library: failures.Library) -> Reading:
    """One pass over every source."""
    reading = Reading()
    tables = library.tables
    kinds: dict[int, _Kind] = {}
    for name, stream in sources:
        number = 1
        reading.sources.append(name)
        for chunk, is_last in _with_last(_chunks(stream)):
            if len(reading.head) < CHUNK // 16:
                reading.head += chunk[: CHUNK // 16].decode("utf-8", "replace")
            number = _scan(reading, tables, kinds, name, chunk, number, is_last)
        reading.lines += number - 1
    return reading


@dataclass(slots=True)
class _Kind:
    """How often lines of one kind were seen, and what those that were read in full matched."""

    seen: int = 0
    hits: dict[str, Hits] = field(default_factory=dict)

    def repeat(self, times: int) -> None:
        """Count lines that were not read in full."""
        for found in self.hits.values():
            found.count += times


def _scan(
    reading: Reading,
    tables: failures.Tables,
    kinds: dict[int, _Kind],
    name: str,
    chunk: bytes,
    number: int,
    is_last: bool,
) -> int:
    """Match one chunk of whole lines that begins with line `number`; returns the next chunk's number."""
    reading.size += len(chunk)
    end = number + chunk.count(b"\n")
    thinned = None
    if reading.dense and b"\r" not in chunk:
        unseen = _Kind()
        thinned = bursts.thin(
            chunk, tables, lambda identity: kinds.get(identity, unseen).seen, LAST_KEPT if is_last else 0
        )
        chunk = thinned.chunk
    lowered = chunk.lower()
    split = b"\r" in chunk
    candidates = counted = line_number = 0
    hits = iter(tables.finder.find(lowered))
    start, anchor = next(hits, _NONE)
    while anchor >= 0:
        line_start, line_end = _bounds(chunk, start, split)
        line = lowered[line_start:line_end]
        leads = []
        while start < line_end and anchor >= 0:
            leads.append((start - line_start, anchor))
            start, anchor = next(hits, _NONE)
        candidates += 1
        identity = bursts.kind_of(line, leads, tables)
        kind = kinds.get(identity)
        if kind is None:
            if len(kinds) >= KINDS:
                kinds.clear()
            kind = kinds[identity] = _Kind()
        kind.seen += 1
        if kind.seen > bursts.ALIKE and not (is_last and kind.hits):
            kind.repeat(1)
            continue
        wanted = dict.fromkeys(piece for _, index in leads for piece in tables.pieces[index])
        pieces = [piece for piece in wanted if piece.may_match(line)]
        if pieces:
            line_number += chunk.count(b"\n", counted, line_start)
            counted = line_start
            at = number + (thinned.numbers[line_number] if thinned else line_number)
            kind.hits.update(_match(reading, pieces, name, chunk[line_start:line_end], at))
    for identity, times in thinned.bursts if thinned else ():
        candidates += times
        if identity in kinds:
            kinds[identity].repeat(times)
    reading.dense = candidates > bursts.DENSE
    return end


_NONE = (-1, -1)


def _bounds(chunk: bytes, at: int, split: bool) -> tuple[int, int]:
    """The line around a place; a carriage return ends a line too (progress bars), but is not counted."""
    start = chunk.rfind(b"\n", 0, at) + 1
    end = chunk.find(b"\n", at)
    end = len(chunk) if end < 0 else end
    if split:
        start = max(start, chunk.rfind(b"\r", start, at) + 1)
        carriage = chunk.find(b"\r", at, end)
        end = end if carriage < 0 else carriage
    return start, max(end, at + 1)


def _match(
    reading: Reading, pieces: Iterable[failures.Piece], name: str, raw: bytes, number: int
) -> dict[str, Hits]:
    """Add a hit for each pattern of which a piece matches a record of the line; returns those patterns' hits."""
    matched: dict[str, Hits] = {}
    for text in logtext.records(raw):
        found = dict.fromkeys(piece.pattern for piece in pieces if piece.regex.search(text))
        if found and not logtext.is_echo(text):
            reading.order += 1
            hit = Hit(name, number, reading.order, text)
            for pattern in found:
                hits = matched[pattern] = reading.hits.setdefault(pattern, Hits())
                hits.add(hit)
    return matched


def _chunks(stream: BinaryIO) -> Iterator[bytes]:
    """Cleaned chunks that end with a line; a line longer than a chunk is cut."""
    rest = b""
    first = True
    codec = ""
    while True:
        block = stream.read(CHUNK)
        if first:
            codec = _codec(block)
            first = False
        if codec and block:
            block = block.decode(codec, "replace").encode()
        if not block:
            break
        block = rest + block
        cut = block.rfind(b"\n") + 1 or (len(block) if len(block) > 4 * CHUNK else 0)
        rest = block[cut:]
        if cut:
            yield _clean(block[:cut])
    if rest:
        yield _clean(rest)


_HOLE = re.compile(rb"\0{64,}")
"""The hole that a truncated log keeps when its writer does not append: evidence, so it becomes words."""


def _clean(chunk: bytes) -> bytes:
    if b"\0" in chunk:
        chunk = _HOLE.sub(b" null bytes ", chunk).replace(b"\0", b"")
    return logtext.decode_journal_bytes(logtext.strip_ansi(chunk).replace(b"\r\n", b"\n"))


def _codec(block: bytes) -> str:
    """UTF-16 by its byte order mark (a Windows shell's redirection), else nothing to decode."""
    return {b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}.get(block[:2], "")


def _with_last(chunks: Iterator[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Each chunk, and whether it is the last."""
    previous: bytes | None = None
    for chunk in chunks:
        if previous is not None:
            yield previous, False
        previous = chunk
    if previous is not None:
        yield previous, True


def of_text(name: str, text: str) -> Source:
    """A text as a source."""
    return name, io.BytesIO(text.encode("utf-8", "replace"))


def open_paths(paths: Iterable[str], stdin: BinaryIO | None = None) -> Iterator[Source]:
    """Each path's content (`-` is standard input; a folder's files; an archive's members), opened in turn.

    Raises UsageError with every path that cannot be read, before anything is read.
    """
    files: list[Path | None] = []
    problems: list[Problem] = []
    for path in paths:
        if path == "-":
            files.append(None)
            continue
        try:
            files.extend(_files(Path(path)))
        except OSError as error:
            problems.append(
                Problem(path, f"cannot be read: {error.strerror}", "Give a log, an archive or -.")
            )
    if problems:
        raise UsageError(problems)
    return _opened(files, stdin)


def _files(path: Path) -> list[Path | None]:
    """The path itself, or the regular files below a folder; each is opened once to see that it can be."""
    found: list[Path | None] = []
    for file in sorted(item for item in path.rglob("*") if item.is_file()) if path.is_dir() else [path]:
        with file.open("rb"):
            found.append(file)
    return found


def _opened(files: list[Path | None], stdin: BinaryIO | None) -> Iterator[Source]:
    for file in files:
        if file is None:
            yield from _unpacked("stdin", io.BufferedReader(cast(io.RawIOBase, stdin), CHUNK))
            continue
        with file.open("rb") as stream:
            yield from _unpacked(str(file), stream)


_PACKED = ((b"\x1f\x8b", gzip.open), (b"BZh", bz2.open), (b"\xfd7zXZ\0", lzma.open))


def _unpacked(name: str, stream: io.BufferedReader) -> Iterator[Source]:
    """The stream, what it holds compressed, or the members of the archive it is."""
    head = stream.peek(512)
    opener = next((opener for magic, opener in _PACKED if head.startswith(magic)), None)
    try:
        if opener is None:
            yield from _members(name, stream) if _is_tar(head) else [(name, stream)]
            return
        inner = io.BufferedReader(cast(io.RawIOBase, opener(stream)), CHUNK)
        yield from _members(name, inner) if _is_tar(inner.peek(512)) else [(name, inner)]
    except (OSError, EOFError, lzma.LZMAError, tarfile.TarError) as error:
        raise UsageError(Problem(name, f"is damaged: {error}", "Copy or pack it again.")) from None


def _is_tar(head: bytes) -> bool:
    return head[257:262] == b"ustar"


def _members(name: str, stream: IO[bytes]) -> Iterator[Source]:
    """The regular files of a tar archive, in its order."""
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for count, member in enumerate(archive):
            if count >= MAX_MEMBERS:
                return
            content = archive.extractfile(member) if member.isfile() else None
            if content is not None:
                buffered = io.BufferedReader(cast(io.RawIOBase, content), CHUNK)
                yield from _plain_member(f"{name}:{member.name}", buffered)


def _plain_member(name: str, stream: io.BufferedReader[Any]) -> Iterator[Source]:
    """A member, decompressed when it is a compressed log."""
    head = stream.peek(8)
    opener = next((opener for magic, opener in _PACKED if head.startswith(magic)), None)
    yield name, cast(BinaryIO, opener(stream) if opener else stream)
