"""Where any of thousands of short texts occur in a large chunk: one pass over its words, then few searches."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

KNOWN_WORDS = 200_000
"""Words of the log that are remembered; then forgotten, so that memory stays flat."""

SHORTEST = 3
"""Letters of a run that is worth a place in the tree."""

RARE = b"%^\\@<>|~`;!?&*{}$#+"
"""Signs that most chunks do not have: a text with one is searched for only where the sign is."""

SHORT = 6
"""Letters of a text that is slow to search for in a large chunk."""

FEW = 3
"""Words that are searched for in place of a short text."""

EDGE = b"\0"
"""Marks an end of a text at which a word ends."""

_RUN = re.compile(rb"[a-z\x80-\xff]{%d,}" % SHORTEST)
_LETTERS = bytes(code if 97 <= code <= 122 or code > 127 else 32 for code in range(256))


class Finder:
    """Finds lower-case texts in lower-case chunks, overlapping ones too.

    A chunk has far fewer distinct words than bytes, even when no two lines are alike. A text is searched for
    only where each of its runs of letters is in some word of the chunk, and where the text has something else
    beside the run (or EDGE), at that end of the word. Words seen before cost a set operation; new ones go
    through one regular expression that is a tree of all runs.
    """

    def __init__(self, texts: Iterable[bytes]) -> None:
        marked = tuple(texts)
        self._texts = tuple(text.strip(EDGE) for text in marked)
        self._needs = tuple(frozenset(_runs(text)) for text in marked)
        self._by_need: dict[bytes, list[int]] = {}
        for index, needs in enumerate(self._needs):
            for need in needs:
                self._by_need.setdefault(need, []).append(index)
        self._signs = tuple(next((sign for sign in text if sign in RARE), -1) for text in self._texts)
        self._always = [index for index, needs in enumerate(self._needs) if not needs]
        runs = sorted({need.strip(EDGE) for need in self._by_need})
        self._prefixes = {run: tuple(_prefixes(run, frozenset(runs))) for run in runs}
        self._tree = re.compile(b"(?=(" + _tree(runs) + b"))") if runs else None
        self._dull: set[bytes] = set()
        self._telling: dict[bytes, frozenset[bytes]] = {}

    def find(self, lowered: bytes) -> list[tuple[int, int]]:
        """(start, index of the text) of each occurrence, in order of the starts."""
        if len(self._dull) + len(self._telling) > KNOWN_WORDS:
            self._dull.clear()
            self._telling.clear()
        words = set(lowered.translate(_LETTERS).split())
        words -= self._dull
        self._learn(words - self._telling.keys())
        holders: dict[bytes, list[bytes]] = {}
        for word in words & self._telling.keys():
            for need in self._telling[word]:
                holders.setdefault(need, []).append(word)
        there = holders.keys()
        wanted = {index for need in there for index in self._by_need[need] if self._needs[index] <= there}
        hits: list[tuple[int, int]] = []
        signs = {-1: True}
        for index in wanted.union(self._always):
            text = self._texts[index]
            sign = self._signs[index]
            if not signs.setdefault(sign, sign in signs or sign in lowered):
                continue
            few = self._few_words(index, holders)
            if few:
                hits.extend((start, index) for start in _beside(lowered, text, few))
                continue
            start = lowered.find(text)
            while start >= 0:
                hits.append((start, index))
                start = lowered.find(text, start + 1)
        hits.sort()
        return hits

    def _few_words(self, index: int, holders: Mapping[bytes, list[bytes]]) -> list[bytes]:
        """The words of the chunk that can hold a short text, when they are few and longer: found much faster."""
        if len(self._texts[index]) > SHORT or not self._needs[index]:
            return []
        words = min((holders[need] for need in self._needs[index]), key=len)
        return words if len(words) <= FEW and all(len(word) > SHORT for word in words) else []

    def _learn(self, new: set[bytes]) -> None:
        """Note which runs each new word contains, begins and ends with."""
        if not new or self._tree is None:
            return
        joined = b" ".join(new) + b" "
        telling: dict[bytes, set[bytes]] = {}
        for match in self._tree.finditer(joined):
            at = match.start()
            begin = joined.rfind(b" ", 0, at) + 1
            word = joined[begin : joined.find(b" ", at)]
            for run in self._prefixes[match.group(1)]:
                before = EDGE if at == begin else b""
                after = EDGE if at - begin + len(run) == len(word) else b""
                found = (run, before + run, run + after, before + run + after)
                telling.setdefault(word, set()).update(need for need in found if need in self._by_need)
        self._telling.update((word, frozenset(needs)) for word, needs in telling.items() if needs)
        self._dull |= new - self._telling.keys()


def _beside(lowered: bytes, text: bytes, words: Iterable[bytes]) -> set[int]:
    """Where the text is in or around an occurrence of one of the words."""
    places: set[int] = set()
    for word in words:
        at = lowered.find(word)
        while at >= 0:
            end = at + len(word) + len(text)
            start = lowered.find(text, max(0, at - len(text)), end)
            while start >= 0:
                places.add(start)
                start = lowered.find(text, start + 1, end)
            at = lowered.find(word, at + 1)
    return places


def _runs(text: bytes) -> Iterable[bytes]:
    """The text's runs of letters, each with EDGE where something else is beside it."""
    for match in _RUN.finditer(text):
        before = EDGE if match.start() else b""
        after = EDGE if match.end() < len(text) else b""
        yield before + match.group() + after


def _prefixes(run: bytes, runs: frozenset[bytes]) -> Iterable[bytes]:
    """The runs that this one begins with, itself included: where it matches, they do."""
    return (run[:end] for end in range(SHORTEST, len(run) + 1) if run[:end] in runs)


def _tree(runs: Iterable[bytes]) -> bytes:
    """A regular expression for the longest of the runs at a place, with common beginnings taken out."""
    children: dict[int, list[bytes]] = {}
    ends = False
    for run in runs:
        if run:
            children.setdefault(run[0], []).append(run[1:])
        else:
            ends = True
    parts = [bytes([letter]) + _tree(rest) for letter, rest in sorted(children.items())]
    if not parts:
        return b""
    body = parts[0] if len(parts) == 1 else b"(?:" + b"|".join(parts) + b")"
    if not ends:
        return body
    return b"(?:" + body + b")?"
