"""Writes a tiny GLM-5 checkpoint (`GlmMoeDsaForCausalLM`, FP8 in blocks of 128 x 128) without its draft layer,
byte for byte the same on every machine.

    python catalog/models/make/glm_tiny.py FOLDER

It is for measuring on real GPUs: attention has the sizes of one of eight ranks of the real model, and every kernel
sees random weights, but what attention and experts add is scaled to nothing. So the model knows one thing: which
token follows which, in one cycle through the vocabulary. The draft layer (`glm_tiny_draft.py`) knows it for a share
of the tokens, so the accept length is known before anything runs. Standard library only: the files must not change
with a package's version, since their lock holds their SHA-256.
"""

from __future__ import annotations

import json
import random
import string
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

VOCABULARY, HIDDEN, LAYERS = 1024, 2048, 2
HEADS, LATENT_Q, LATENT_KV, ROPE, NOPE, VALUE = 8, 2048, 512, 64, 192, 256
INDEX_HEADS, INDEX = 32, 128
EXPERTS, NARROW, WIDE = 256, 256, 2048
BLOCK = 128
CONTEXT = 8192
SHARE = 0.86
"""Share of the words whose follower the draft layer knows."""
SEED = 11
SPECIAL = (
    "<|endoftext|>", "[MASK]", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
)  # fmt: skip
"""Never produced: the cycle goes through what comes after them."""
TEMPLATE = (
    "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n<think></think>\n{% endif %}"
)
FILE = "model-00001-of-00001.safetensors"
ONE = b"\x80\x3f"
"""1.0 as bfloat16."""
SCALE, NOTHING = 0.02, 1e-6
"""Scales of a block: such that sums stay near one, and such that what is added is lost in rounding."""
MODERATE = bytes((byte & 0x9F) | 0x20 for byte in range(256))
"""Random bytes -> e4m3 numbers of either sign between 0.125 and 1.9: no NaN, nothing that overflows."""

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]
"""Name -> type, shape, values (little endian)."""


def ones(size: int) -> tuple[str, tuple[int, ...], bytes]:
    """A norm's weight."""
    return "BF16", (size,), ONE * size


def noughts(kind: str, *shape: int) -> tuple[str, tuple[int, ...], bytes]:
    """Nothing."""
    size = 4 if kind == "F32" else 2
    for length in shape:
        size *= length
    return kind, shape, bytes(size)


def sparse(rows: int, columns: int, places: Iterator[tuple[int, int]]) -> tuple[str, tuple[int, ...], bytes]:
    """A matrix of noughts with ones at (row, column)."""
    values = bytearray(2 * rows * columns)
    for row, column in places:
        at = 2 * (row * columns + column)
        values[at : at + 2] = ONE
    return "BF16", (rows, columns), bytes(values)


def linear(name: str, rows: int, columns: int, dice: random.Random, scale: float = SCALE) -> Tensors:
    """A block-FP8 matrix of random numbers and the scales of its blocks."""
    blocks = (-(-rows // BLOCK), -(-columns // BLOCK))
    return {
        f"{name}.weight": ("F8_E4M3", (rows, columns), dice.randbytes(rows * columns).translate(MODERATE)),
        f"{name}.weight_scale_inv": ("F32", blocks, struct.pack("<f", scale) * (blocks[0] * blocks[1])),
    }


def small(rows: int, columns: int, dice: random.Random) -> tuple[str, tuple[int, ...], bytes]:
    """A bfloat16 matrix of small random numbers: the high byte says +-2^-7, the low one the rest."""
    data = bytearray(dice.randbytes(2 * rows * columns))
    data[1::2] = bytes(0x3C | (byte & 0x80) for byte in data[1::2])
    return "BF16", (rows, columns), bytes(data)


def layer(number: int, *, experts: bool) -> Tensors:
    """A decoder layer that adds nothing."""
    dice = random.Random(SEED + number)
    at = f"model.layers.{number}."
    attention = f"{at}self_attn."
    found: Tensors = {
        f"{at}input_layernorm.weight": ones(HIDDEN),
        f"{at}post_attention_layernorm.weight": ones(HIDDEN),
        f"{attention}q_a_layernorm.weight": ones(LATENT_Q),
        f"{attention}kv_a_layernorm.weight": ones(LATENT_KV),
        f"{attention}indexer.k_norm.weight": ("F32", (INDEX,), struct.pack("<f", 1.0) * INDEX),
        f"{attention}indexer.k_norm.bias": noughts("F32", INDEX),
        f"{attention}indexer.weights_proj.weight": small(INDEX_HEADS, HIDDEN, dice),
        **linear(f"{attention}q_a_proj", LATENT_Q, HIDDEN, dice),
        **linear(f"{attention}q_b_proj", HEADS * (NOPE + ROPE), LATENT_Q, dice),
        **linear(f"{attention}kv_a_proj_with_mqa", LATENT_KV + ROPE, HIDDEN, dice),
        **linear(f"{attention}kv_b_proj", HEADS * (NOPE + VALUE), LATENT_KV, dice),
        **linear(f"{attention}o_proj", HIDDEN, HEADS * VALUE, dice, NOTHING),
        **linear(f"{attention}indexer.wq_b", INDEX_HEADS * INDEX, LATENT_Q, dice),
        **linear(f"{attention}indexer.wk", INDEX, HIDDEN, dice),
    }
    if not experts:
        return {**found, **feed_forward(f"{at}mlp", WIDE, dice)}
    found[f"{at}mlp.gate.weight"] = small(EXPERTS, HIDDEN, dice)
    found[f"{at}mlp.gate.e_score_correction_bias"] = noughts("F32", EXPERTS)
    for part in (*(f"experts.{expert}" for expert in range(EXPERTS)), "shared_experts"):
        found |= feed_forward(f"{at}mlp.{part}", NARROW, dice)
    return found


def feed_forward(name: str, width: int, dice: random.Random) -> Tensors:
    """Gate, up and down."""
    return {
        **linear(f"{name}.gate_proj", width, HIDDEN, dice),
        **linear(f"{name}.up_proj", width, HIDDEN, dice),
        **linear(f"{name}.down_proj", HIDDEN, width, dice, NOTHING),
    }


def followers() -> dict[int, int]:
    """Token -> the token after it: one cycle through all words; special tokens lead into it."""
    order = list(range(len(SPECIAL), VOCABULARY))
    random.Random(SEED).shuffle(order)
    return {order[at - 1]: order[at] for at in range(len(order))} | dict.fromkeys(
        range(len(SPECIAL)), order[0]
    )


def embedding() -> tuple[str, tuple[int, ...], bytes]:
    """Token -> its own column."""
    return sparse(VOCABULARY, HIDDEN, ((token, token) for token in range(VOCABULARY)))


def head() -> tuple[str, tuple[int, ...], bytes]:
    """Column of a token -> row of the token after it."""
    return sparse(VOCABULARY, HIDDEN, ((after, token) for token, after in followers().items()))


def known_to_draft() -> frozenset[int]:
    """The words whose follower the draft layer knows: exactly `SHARE` of them."""
    words = range(len(SPECIAL), VOCABULARY)
    return frozenset(random.Random(SEED + 1).sample(words, round(SHARE * len(words))))


def expected_length(draft_tokens: int) -> float:
    """Mean tokens a verification step yields on walks around the whole cycle from each of its tokens, the
    bonus token counted. `draft_tokens`: tokens that the draft layer proposes in one step."""
    after, known = followers(), known_to_draft()
    made = steps = 0
    token = after[0]
    while made < 64 * VOCABULARY:
        length, token = 1, after[token]
        # The first draft comes from the token that is certain; each further one from the draft before it.
        while length <= draft_tokens and token in known:
            length, token = length + 1, after[token]
        made, steps = made + length, steps + 1
    return made / steps


CONFIG: Mapping[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": [0],
    "pad_token_id": 0,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "head_dim": ROPE,
    "hidden_size": HIDDEN,
    "index_head_dim": INDEX,
    "index_n_heads": INDEX_HEADS,
    "index_topk": 2048,
    "indexer_rope_interleave": True,
    "initializer_range": 0.02,
    "intermediate_size": WIDE,
    "kv_lora_rank": LATENT_KV,
    "max_position_embeddings": CONTEXT,
    "moe_intermediate_size": NARROW,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": HEADS,
    "num_experts_per_tok": 8,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": HEADS,
    "num_nextn_predict_layers": 1,
    "pretraining_tp": 1,
    "q_lora_rank": LATENT_Q,
    "qk_head_dim": NOPE + ROPE,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "rms_norm_eps": 1e-5,
    "rope_interleave": True,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "use_cache": True,
    "v_head_dim": VALUE,
    "vocab_size": VOCABULARY,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": [
            "lm_head",
            "model.embed_tokens",
            *(
                f"model.layers.{number}.{part}"
                for number in range(LAYERS + 1)
                for part in (
                    "input_layernorm",
                    "post_attention_layernorm",
                    "mlp.gate",
                    "self_attn.indexer.weights_proj",
                )
            ),
            f"model.layers.{LAYERS}.eh_proj",
        ],
    },
}


def byte_letters() -> list[str]:
    """The letter that stands for each byte in a byte-level vocabulary: itself where it can be printed, else one
    from 256 up."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(256, 512))
    return [chr(byte if byte in shown else next(hidden)) for byte in range(256)]


def tokenizer() -> dict[str, Any]:
    """A byte-level tokenizer as tokenizer.json: special tokens, bytes, and pairs of letters."""
    letters = byte_letters()
    space = letters[0x20]
    pairs = [
        (first, second)
        for second in string.ascii_lowercase
        for first in (*string.ascii_lowercase, space, *string.ascii_uppercase)
    ][: VOCABULARY - len(SPECIAL) - len(letters)]
    words = [*SPECIAL, *sorted(letters), *(first + second for first, second in pairs)]
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
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": bytes_,
        "post_processor": None,
        "decoder": bytes_,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {word: number for number, word in enumerate(words)},
            "merges": [list(pair) for pair in pairs],
        },
    }


TOKENIZER_CONFIG: Mapping[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": SPECIAL[0],
    "pad_token": SPECIAL[0],
    "model_max_length": CONTEXT,
    "chat_template": TEMPLATE,
}


def write_tensors(path: Path, tensors: Tensors) -> int:
    """A safetensors file; bytes of its tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (kind, shape, data) in sorted(tensors.items()):
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for _, (_, _, data) in sorted(tensors.items()):
            stream.write(data)
    return at


def write(folder: Path, tensors: Tensors) -> None:
    """A checkpoint: tensors, index, configuration, tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    size = write_tensors(folder / FILE, tensors)
    index = {"metadata": {"total_size": size}, "weight_map": dict.fromkeys(sorted(tensors), FILE)}
    for name, data in (
        ("model.safetensors.index.json", index),
        ("config.json", CONFIG),
        ("generation_config.json", {"eos_token_id": [0], "pad_token_id": 0}),
        ("tokenizer.json", tokenizer()),
        ("tokenizer_config.json", TOKENIZER_CONFIG),
    ):  # fmt: skip
        (folder / name).write_text(json.dumps(data, indent=1), encoding="utf-8")


def main_tensors() -> Tensors:
    """The main model."""
    return {
        "model.embed_tokens.weight": embedding(),
        "lm_head.weight": head(),
        "model.norm.weight": ones(HIDDEN),
        **layer(0, experts=False),
        **layer(1, experts=True),
    }


if __name__ == "__main__":
    write(Path(sys.argv[1]), main_tensors())
