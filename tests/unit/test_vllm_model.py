"""The model that vLLM is held against is what it says: one cycle, a known share, a length known beforehand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bringup.node import graft
from tests.vllm import model


def test_one_cycle_goes_through_every_word() -> None:
    after = model.followers()
    token, seen = after[0], set()
    while token not in seen:
        seen.add(token)
        token = after[token]
    assert seen == set(range(len(model.SPECIAL), model.VOCABULARY))


@pytest.mark.parametrize(("share", "length"), [(0.0, 1.0), (1.0, 4.0)])
def test_a_draft_that_knows_nothing_or_everything_yields_one_token_or_all(
    share: float, length: float
) -> None:
    assert model.expected_length(share, 3) == pytest.approx(length)


def test_the_expected_length_is_near_the_textbooks() -> None:
    """1 + p + p^2 + p^3 holds for chance alone; on a fixed cycle it is near."""
    for share in (0.5, 0.7, 0.9):
        textbook = sum(share**power for power in range(4))
        assert model.expected_length(share, 3) == pytest.approx(textbook, rel=0.05)


def test_the_draft_layer_knows_exactly_the_share_it_was_made_for() -> None:
    words = model.VOCABULARY - len(model.SPECIAL)
    assert len(model.known_to_draft(0.9)) == round(0.9 * words)
    joined = model.draft_tensors(0.9)[f"model.layers.{model.LAYERS}.eh_proj.weight"].ones
    assert sum(row != column for row, column in joined) == words - round(0.9 * words)


def test_our_graft_takes_it_and_its_vocabulary_is_whole(tmp_path: Path) -> None:
    base = model.write(tmp_path / "base", model.main_tensors())
    delta = model.write(tmp_path / "delta", model.draft_tensors(0.5))
    graft.graft(graft.Wish(base, delta, tmp_path / "out", dtypes=("BF16",)))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert f"model.layers.{model.LAYERS}.eh_proj.weight" in index["weight_map"]
    assert "lm_head.weight" in index["weight_map"]
    words = list(model.words())
    assert len(set(words)) == len(words) == model.VOCABULARY
