"""A chunk of a log in which few kinds of lines repeat: what must be read of it, and how often the rest repeats.

Lines are of one kind when they have the same letters apart from numbers and identifiers, are led to by the same
words, and, where a pattern asks for numbers, have the same numbers there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from bringup.failures import Numeric, Tables

ALIKE = 5
"""Lines of one kind that are read in full; further ones are only counted, except at the end of the log."""

BURST = 50
"""Lines with the same letters in one chunk that are worth looking at as a group."""

DENSE = 2_000
"""Candidate lines in one chunk, after which bursts are taken out of the next one before it is searched."""

REACH = 40
"""Bytes after the word that led to a line in which a number tells one kind from another."""

_VARYING = b"0123456789abcdef"
"""Letters of numbers, addresses and identifiers: lines that differ in these alone are of one kind."""


@dataclass(frozen=True)
class Thinned:
    """The lines that are left, where each was (from 0), and (kind, how many more lines there were of it)."""

    chunk: bytes
    numbers: Sequence[int]
    bursts: tuple[tuple[int, int], ...] = ()


def kind_of(line: bytes, hits: Iterable[tuple[int, int]], tables: Tables) -> int:
    """The kind of a lower-case line; `hits` are (start in the line, anchor)."""
    key: list[int | bytes] = [line.translate(None, _VARYING)]
    anchors = []
    for start, anchor in hits:
        anchors.append(anchor)
        numeric = tables.numeric[anchor]
        if numeric:
            key.append(line[start : start + REACH] if numeric == Numeric.AFTER else line)
    return hash((*key, *anchors))


def thin(chunk: bytes, tables: Tables, seen: Callable[[int], int], keep_last: int = 0) -> Thinned:
    """The chunk without the lines of a kind after the first ALIKE and before the last `keep_last` of them.

    `seen` says how many of a kind were read in full before. A line with a text that has a number stays.
    """
    lowered = chunk.lower()
    lines = lowered.split(b"\n")
    letters = lowered.translate(None, _VARYING).split(b"\n")
    frequent = {text for text, times in Counter(letters).items() if times > BURST}
    kept = _with_numbers(lowered, lines, tables)
    groups: dict[bytes, list[int]] = defaultdict(list)
    for index, text in enumerate(letters):
        if text in frequent and index not in kept:
            groups[text].append(index)
        else:
            kept.add(index)
    bursts: list[tuple[int, int]] = []
    for members in groups.values():
        hits = tables.finder.find(lines[members[0]])
        for same in _kinds(members, hits, lines, tables):
            kind = _kind(lines[same[0]], hits, tables)
            first = max(0, ALIKE - seen(kind))
            left_out = len(same) - first - keep_last
            if left_out <= 0:
                kept.update(same)
                continue
            kept.update(same[:first])
            kept.update(same[len(same) - keep_last :])
            bursts.append((kind, left_out))
    numbers = sorted(kept)
    raw = chunk.split(b"\n")
    return Thinned(b"\n".join(raw[index] for index in numbers), numbers, tuple(bursts))


def _kinds(
    members: list[int], hits: Sequence[tuple[int, int]], lines: list[bytes], tables: Tables
) -> Iterable[list[int]]:
    """The lines of a group by kind; none for lines that nothing leads to."""
    if not hits:
        return ()
    numeric = {tables.numeric[anchor] for _, anchor in hits}
    if Numeric.ANYWHERE in numeric:
        return ([index] for index in members)
    texts = [tables.texts[anchor] for _, anchor in hits if tables.numeric[anchor] == Numeric.AFTER]
    if not texts:
        return (members,)
    by_number: dict[bytes, list[int]] = defaultdict(list)
    if len(texts) == 1:
        for index in members:
            line = lines[index]
            start = line.find(texts[0])
            by_number[line[start : start + REACH]].append(index)
    else:
        for index in members:
            by_number[b"\n".join(_windows(lines[index], texts))].append(index)
    return by_number.values()


def _windows(line: bytes, texts: Iterable[bytes]) -> Iterable[bytes]:
    """What follows each text in the line."""
    for text in texts:
        start = line.find(text)
        yield line[start : start + REACH]


def _kind(line: bytes, hits: Sequence[tuple[int, int]], tables: Tables) -> int:
    """kind_of a line of a group, from what leads to another line of it."""
    anchors = [anchor for _, anchor in hits]
    if len(set(anchors)) < len(anchors):
        return kind_of(line, tables.finder.find(line), tables)
    return kind_of(line, [(line.find(tables.texts[anchor]), anchor) for anchor in anchors], tables)


def _with_numbers(lowered: bytes, lines: list[bytes], tables: Tables) -> set[int]:
    """The lines in which an anchor that has digits, or few other letters, occurs."""
    places = [start for start, _ in tables.numbered.find(lowered)]
    if not places:
        return set()
    begins = [0, *accumulate(len(line) + 1 for line in lines)]
    return {bisect_right(begins, place) - 1 for place in places}
