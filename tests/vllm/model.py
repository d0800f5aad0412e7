"""A real, very small GLM-4-MoE checkpoint whose draft layer is right for a chosen share of the tokens.

The main model knows one thing: which token follows which, in one cycle through the whole vocabulary. Its
attention and experts run and add nothing. The draft layer (index = number of layers, where GLM keeps it)
predicts the same follower for a share of the tokens and a wrong one for the rest, so the tokens that a
verification step yields are known beforehand. Standard library only; every tensor is noughts and ones.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bringup.load import WORDS

VOCABULARY = 1024
"""Also the width: every token has a column of its own."""
SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>")
LAYERS = 2
HEADS, KV_HEADS, HEAD = 4, 2, 64
EXPERTS, NARROW = 4, 64
ONE = b"\x80\x3f"
"""1.0 as bfloat16."""
FILE = "model-00001-of-00001.safetensors"
CONTEXT = 4096
SEED = 7


@dataclass(frozen=True)
class Tensor:
    """Rows, columns (0: a vector), and where its ones are, as (row, column)."""

    rows: int
    columns: int = 0
    ones: tuple[tuple[int, int], ...] = ()

    @property
    def shape(self) -> list[int]:
        """As safetensors write it."""
        return [self.rows, self.columns] if self.columns else [self.rows]

    @property
    def data(self) -> bytes:
        """Its values as bfloat16, little endian."""
        wide = self.columns or 1
        values = bytearray(2 * self.rows * wide)
        for row, column in self.ones:
            at = 2 * (row * wide + column)
            values[at : at + 2] = ONE
        return bytes(values)


def vector_of_ones(size: int) -> Tensor:
    """A norm's weight."""
    return Tensor(size, 0, tuple((row, 0) for row in range(size)))


def followers(seed: int = SEED) -> dict[int, int]:
    """Token -> the token after it: one cycle through all words; special tokens lead into it."""
    order = list(range(len(SPECIAL), VOCABULARY))
    random.Random(seed).shuffle(order)
    found = {order[at - 1]: order[at] for at in range(len(order))}
    return found | dict.fromkeys(range(len(SPECIAL)), order[0])


def known_to_draft(share: float, seed: int = SEED) -> frozenset[int]:
    """The tokens whose follower the draft layer knows: exactly this share of the words."""
    words = range(len(SPECIAL), VOCABULARY)
    return frozenset(random.Random(seed + 1).sample(words, round(share * len(words))))


def expected_length(share: float, draft_tokens: int, seed: int = SEED) -> float:
    """Mean tokens a verification step yields on a walk around the whole cycle, the bonus token counted.

    A step ends at the first token whose follower the draft does not know, or when all drafts were right."""
    after, known = followers(seed), known_to_draft(share, seed)
    token, steps = after[0], 0
    made = 0
    while made < 8 * VOCABULARY:
        # The main model gives one token for sure; each draft is right while the draft layer knows the way.
        length = 1
        token = after[token]
        while length <= draft_tokens and token in known:
            token = after[token]
            length += 1
        made, steps = made + length, steps + 1
    return made / steps


def layer(index: int, *, experts: bool) -> dict[str, Tensor]:
    """A decoder layer that adds nothing."""
    prefix = f"model.layers.{index}."
    wide = VOCABULARY
    tensors = {
        "input_layernorm.weight": vector_of_ones(wide),
        "post_attention_layernorm.weight": vector_of_ones(wide),
        "self_attn.q_proj.weight": Tensor(HEADS * HEAD, wide),
        "self_attn.k_proj.weight": Tensor(KV_HEADS * HEAD, wide),
        "self_attn.v_proj.weight": Tensor(KV_HEADS * HEAD, wide),
        "self_attn.o_proj.weight": Tensor(wide, HEADS * HEAD),
    }
    parts = [f"mlp.experts.{number}" for number in range(EXPERTS)] + ["mlp.shared_experts"]
    for part in parts if experts else ["mlp"]:
        tensors[f"{part}.gate_proj.weight"] = Tensor(NARROW, wide)
        tensors[f"{part}.up_proj.weight"] = Tensor(NARROW, wide)
        tensors[f"{part}.down_proj.weight"] = Tensor(wide, NARROW)
    if experts:
        tensors["mlp.gate.weight"] = Tensor(EXPERTS, wide)
        tensors["mlp.gate.e_score_correction_bias"] = Tensor(EXPERTS)
    return {prefix + name: tensor for name, tensor in tensors.items()}


def main_tensors(seed: int = SEED) -> dict[str, Tensor]:
    """The main model's tensors by name."""
    return {
        "model.embed_tokens.weight": identity(),
        "lm_head.weight": head(seed),
        "model.norm.weight": vector_of_ones(VOCABULARY),
        **layer(0, experts=False),
        **layer(1, experts=True),
    }


def draft_tensors(share: float, seed: int = SEED) -> dict[str, Tensor]:
    """The draft layer's tensors by name."""
    prefix = f"model.layers.{LAYERS}."
    known = known_to_draft(share, seed)
    # A token that the draft does not know is taken for its neighbour: a wrong guess, and a valid token.
    joined = tuple(
        (token if token in known or token < len(SPECIAL) else (token + 1) % VOCABULARY, token)
        for token in range(VOCABULARY)
    )
    return {
        **layer(LAYERS, experts=True),
        f"{prefix}embed_tokens.weight": identity(),
        f"{prefix}enorm.weight": vector_of_ones(VOCABULARY),
        f"{prefix}hnorm.weight": vector_of_ones(VOCABULARY),
        f"{prefix}eh_proj.weight": Tensor(VOCABULARY, 2 * VOCABULARY, joined),
        f"{prefix}shared_head.norm.weight": vector_of_ones(VOCABULARY),
        f"{prefix}shared_head.head.weight": head(seed),
    }


def identity() -> Tensor:
    """Token -> its own column."""
    return Tensor(VOCABULARY, VOCABULARY, tuple((token, token) for token in range(VOCABULARY)))


def head(seed: int) -> Tensor:
    """Column of a token -> row of the token after it."""
    return Tensor(VOCABULARY, VOCABULARY, tuple((after, token) for token, after in followers(seed).items()))


CONFIG: Mapping[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "vocab_size": VOCABULARY,
    "hidden_size": VOCABULARY,
    "intermediate_size": NARROW,
    "moe_intermediate_size": NARROW,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "attention_bias": False,
    "use_qk_norm": False,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 1,
    "num_nextn_predict_layers": 1,
    "torch_dtype": "bfloat16",
}


def words() -> Iterable[str]:
    """The vocabulary: special tokens, the load client's words, and filling."""
    named = [*SPECIAL, *dict.fromkeys(WORDS)]
    return [*named, *(f"word{number}" for number in range(VOCABULARY - len(named)))]


def tokenizer() -> dict[str, Any]:
    """A tokenizer of one token a word, as tokenizer.json."""
    vocabulary = {word: number for number, word in enumerate(words())}
    added = [
        {
            "id": number,
            "content": word,
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for number, word in enumerate(SPECIAL)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in sorted(tensors.items()):
        size = 2 * tensor.rows * (tensor.columns or 1)
        header[name] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in sorted(tensors.items()):
            stream.write(tensor.data)


def write(folder: Path, tensors: Mapping[str, Tensor]) -> Path:
    """A checkpoint's folder: tensors, index, configuration, tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / FILE, tensors)
    size = sum(2 * one.rows * (one.columns or 1) for one in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict.fromkeys(sorted(tensors), FILE)}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "model_max_length": CONTEXT,
        "chat_template": "{% for message in messages %}{{ message['content'] }} {% endfor %}",
    }
    for name, data in (
        ("model.safetensors.index.json", index),
        ("config.json", CONFIG),
        ("tokenizer.json", tokenizer()),
        ("tokenizer_config.json", settings),
    ):
        (folder / name).write_text(json.dumps(data, indent=1), encoding="utf-8")
    return folder
