"""Broken inventories and catalogs end in a message, never in a traceback."""

from __future__ import annotations

from tests import fuzz_loaders

TRIES = 300
SEED = 20


def test_whatever_is_broken_is_refused_in_words_or_still_makes_a_plan() -> None:
    assert fuzz_loaders.run(TRIES, SEED) == []
