"""Where any of thousands of short texts occur in a large chunk: one pass of a kept Aho-Corasick automaton."""

from __future__ import annotations

from collections.abc import Iterable

from ahocorasick_rs import BytesAhoCorasick, Implementation

EDGE = b"\0"
"""Marks an end of a text at which a word ends."""

_LETTERS = frozenset(b"abcdefghijklmnopqrstuvwxyz")


class Finder:
    """Finds lower-case texts in lower-case chunks, overlapping ones too; one with EDGE only where no letter follows
    there.
    """

    def __init__(self, texts: Iterable[bytes]) -> None:
        marked = tuple(texts)
        self._begins = frozenset(index for index, text in enumerate(marked) if text.startswith(EDGE))
        self._ends = frozenset(index for index, text in enumerate(marked) if text.endswith(EDGE))
        # The fastest kind and the largest; a few MB for thousands of texts.
        self._automaton = BytesAhoCorasick(
            [text.strip(EDGE) for text in marked], implementation=Implementation.DFA
        )

    def find(self, lowered: bytes) -> list[tuple[int, int]]:
        """(start, index of the text) of each occurrence, in order of the starts."""
        size = len(lowered)
        hits = [
            (start, index)
            for index, start, end in self._automaton.find_matches_as_indexes(lowered, overlapping=True)
            if not (index in self._begins and start and lowered[start - 1] in _LETTERS)
            and not (index in self._ends and end < size and lowered[end] in _LETTERS)
        ]
        hits.sort()
        return hits
