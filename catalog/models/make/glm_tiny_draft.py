"""Writes the draft layer (MTP) of the tiny GLM-5 checkpoint by itself, byte for byte the same on every machine:
the delta that is grafted onto what `glm_tiny.py` writes.

    python catalog/models/make/glm_tiny_draft.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from glm_tiny import (
    HIDDEN,
    LAYERS,
    SPECIAL,
    VOCABULARY,
    Tensors,
    embedding,
    head,
    known_to_draft,
    layer,
    ones,
    sparse,
    write,
)


def draft_tensors() -> Tensors:
    """A word that the draft does not know is taken for its neighbour: a wrong guess, and a valid token."""
    at, known, first = f"model.layers.{LAYERS}.", known_to_draft(), len(SPECIAL)
    words = VOCABULARY - first

    def taken_for(token: int) -> int:
        return token if token in known or token < first else first + (token - first + 1) % words

    return {
        **layer(LAYERS, experts=True),
        f"{at}embed_tokens.weight": embedding(),
        f"{at}enorm.weight": ones(HIDDEN),
        f"{at}hnorm.weight": ones(HIDDEN),
        f"{at}eh_proj.weight": sparse(
            HIDDEN,
            2 * HIDDEN,
            # Beyond the vocabulary the columns carry nothing.
            ((taken_for(column) if column < VOCABULARY else column, column) for column in range(HIDDEN)),
        ),
        f"{at}shared_head.norm.weight": ones(HIDDEN),
        f"{at}shared_head.head.weight": head(),
    }


if __name__ == "__main__":
    write(Path(sys.argv[1]), draft_tensors())
