"""Writes `words.gguf`: a real, very small language model for the lab, byte for byte the same on every
machine.

    python catalog/models/make/words.py FOLDER

It is a bigram model in the shape of a one-layer Llama: attention and feed-forward weigh nothing, so the
next word depends on the last one, by counts taken from the sentences below. Standard library only: the
file must not change with a package's version, since its lock holds its SHA-256.
"""

from __future__ import annotations

import itertools
import os
import struct
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, cast

TEXT = (
    "hello from a small model in the lab .",
    "every word here comes from a real engine on a real node .",
    "the engine reads the model and the node keeps the engine alive .",
    "a request goes in and words come out until the caller has enough .",
    "when the engine stops the node starts it again and the words come back .",
    "the log keeps one line for every request and nothing is lost .",
    "at night one node rests while the other answers every caller .",
    "then the rested node answers and the other node rests .",
    "a plan says what runs on a node and a seal says that it is still so .",
    "so the model goes on from word to word and never tires of it .",
)
FILE = "words.gguf"
WIDTH = 512
"""At least the size of the vocabulary: every token has a column of its own, which makes the counts exact."""
HEADS = 4
FEED_FORWARD = 64
CONTEXT = 65536
SHARPNESS, SPREAD = 24.0, 3.0
"""Logit of a word that may follow, and how much more the most frequent one gets: nothing else is ever
drawn."""

UNKNOWN, BEGIN, END = 0, 1, 2
NORMAL, UNKNOWN_TYPE, CONTROL, BYTE = 1, 2, 3, 6
F32, F16 = 0, 1
U32, FLOAT, BOOL, STRING, ARRAY, INT32 = 4, 6, 7, 8, 9, 5
ALIGNMENT = 32
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)

Value = tuple[int, object]


def vocabulary() -> list[tuple[str, float, int]]:
    """Tokens as (text, score, type): specials, the 256 bytes, then every beginning of every word (the
    tokenizer joins letters to the longest beginning that it knows, so a whole word is one token)."""
    tokens = [("<unk>", 0.0, UNKNOWN_TYPE), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
    tokens += [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
    letters = [*sorted(set("".join(TEXT)) - {" "}), "▁"]
    tokens += [(letter, -1000.0, NORMAL) for letter in letters]
    beginnings = {f"▁{word[:size]}" for word in words() for size in range(1, len(word) + 1)}
    return tokens + [(text, float(len(text)) - 100.0, NORMAL) for text in sorted(beginnings)]


def words() -> list[str]:
    """The words of the text, each once."""
    return sorted({word for line in TEXT for word in line.split()})


def one_hot(token: int, height: float) -> list[float]:
    """A row that is `height` in the token's own column: normalised, it is sqrt(WIDTH) there and zero
    elsewhere."""
    return [height if column == token else 0.0 for column in range(WIDTH)]


def followers(index: dict[str, int]) -> dict[int, dict[int, float]]:
    """For each token the tokens that follow it, with their share. What is no whole word is followed by a
    beginning."""
    text = [index[f"▁{word}"] for line in TEXT for word in line.split()]
    pairs = [*itertools.pairwise(text), (text[-1], text[0])]
    counts: dict[int, dict[int, float]] = {}
    for first, second in pairs:
        row = counts.setdefault(first, {})
        row[second] = row.get(second, 0.0) + 1.0
    start = {index[f"▁{line.split()[0]}"]: 1.0 for line in TEXT}
    rows = {token: counts.get(token, start) for token in range(len(index))}
    return {
        token: {to: count / max(row.values()) for to, count in row.items()} for token, row in rows.items()
    }


def output_rows(index: dict[str, int]) -> list[list[float]]:
    """The output matrix, a row a token: what it follows gives it a logit near SHARPNESS, all else none."""
    rows = [[0.0] * WIDTH for _ in index]
    for token, row in followers(index).items():
        for to, share in row.items():
            rows[to][token] = (SHARPNESS + SPREAD * share) / WIDTH**0.5
    return rows


def half(values: Iterable[float]) -> bytes:
    """Numbers as 16-bit floats, little-endian."""
    row = list(values)
    return struct.pack(f"<{len(row)}e", *row)


def tensors() -> list[tuple[str, tuple[int, ...], int, bytes]]:
    """Every tensor: name, dimensions (GGUF's order, fastest first), type and bytes."""
    index = {text: at for at, (text, _, _) in enumerate(vocabulary())}
    size = len(index)
    ones = struct.pack(f"<{WIDTH}f", *[1.0] * WIDTH)

    def nothing(rows: int, columns: int) -> bytes:
        return bytes(2 * rows * columns)

    square = (WIDTH, WIDTH)
    return [
        (
            "token_embd.weight",
            (WIDTH, size),
            F16,
            b"".join(half(one_hot(token, 1.0)) for token in range(size)),
        ),
        ("blk.0.attn_norm.weight", (WIDTH,), F32, ones),
        *((f"blk.0.attn_{part}.weight", square, F16, nothing(*square)) for part in ("q", "k", "v", "output")),
        ("blk.0.ffn_norm.weight", (WIDTH,), F32, ones),
        *(
            (f"blk.0.ffn_{part}.weight", (WIDTH, FEED_FORWARD), F16, nothing(WIDTH, FEED_FORWARD))
            for part in ("gate", "up")
        ),
        ("blk.0.ffn_down.weight", (FEED_FORWARD, WIDTH), F16, nothing(FEED_FORWARD, WIDTH)),
        ("output_norm.weight", (WIDTH,), F32, ones),
        ("output.weight", (WIDTH, size), F16, b"".join(half(row) for row in output_rows(index))),
    ]


def settings() -> dict[str, Value]:
    """The metadata that an engine needs to run the model."""
    tokens = vocabulary()
    return {
        "general.architecture": (STRING, "llama"),
        "general.name": (STRING, "words"),
        "general.alignment": (U32, ALIGNMENT),
        "general.file_type": (U32, 1),
        "llama.context_length": (U32, CONTEXT),
        "llama.embedding_length": (U32, WIDTH),
        "llama.block_count": (U32, 1),
        "llama.feed_forward_length": (U32, FEED_FORWARD),
        "llama.attention.head_count": (U32, HEADS),
        "llama.attention.head_count_kv": (U32, HEADS),
        "llama.attention.layer_norm_rms_epsilon": (FLOAT, 1e-5),
        "llama.rope.dimension_count": (U32, WIDTH // HEADS),
        "llama.rope.freq_base": (FLOAT, 10000.0),
        "llama.vocab_size": (U32, len(tokens)),
        "tokenizer.ggml.model": (STRING, "llama"),
        "tokenizer.ggml.pre": (STRING, "default"),
        "tokenizer.ggml.tokens": (ARRAY, (STRING, [text for text, _, _ in tokens])),
        "tokenizer.ggml.scores": (ARRAY, (FLOAT, [score for _, score, _ in tokens])),
        "tokenizer.ggml.token_type": (ARRAY, (INT32, [kind for _, _, kind in tokens])),
        "tokenizer.ggml.bos_token_id": (U32, BEGIN),
        "tokenizer.ggml.eos_token_id": (U32, END),
        "tokenizer.ggml.unknown_token_id": (U32, UNKNOWN),
        "tokenizer.ggml.add_bos_token": (BOOL, True),
        "tokenizer.ggml.add_space_prefix": (BOOL, True),
        "tokenizer.chat_template": (STRING, TEMPLATE),
    }


def text_bytes(text: str) -> bytes:
    """A GGUF string."""
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def value_bytes(kind: int, value: object) -> bytes:
    """A GGUF value without its type."""
    if kind == STRING:
        return text_bytes(str(value))
    if kind == ARRAY:
        inner, items = cast(tuple[int, list[object]], value)
        return struct.pack("<IQ", inner, len(items)) + b"".join(value_bytes(inner, item) for item in items)
    return struct.pack({U32: "<I", INT32: "<i", FLOAT: "<f", BOOL: "<?"}[kind], value)


def padded(size: int) -> int:
    """`size` rounded up to the alignment."""
    return -size % ALIGNMENT + size


def write(target: BinaryIO) -> None:
    """The whole file: header, metadata, tensor directory, tensors."""
    parts, held = tensors(), settings()
    head = b"GGUF" + struct.pack("<IQQ", 3, len(parts), len(held))
    for key, (kind, value) in held.items():
        head += text_bytes(key) + struct.pack("<I", kind) + value_bytes(kind, value)
    offset = 0
    for name, dimensions, kind, data in parts:
        head += text_bytes(name) + struct.pack("<I", len(dimensions))
        head += struct.pack(f"<{len(dimensions)}Q", *dimensions) + struct.pack("<IQ", kind, offset)
        offset += padded(len(data))
    target.write(head.ljust(padded(len(head)), b"\0"))
    for _, _, _, data in parts:
        target.write(data.ljust(padded(len(data)), b"\0"))


def make(folder: Path) -> Path:
    """Writes the model into `folder` (beside, then renamed) and returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    beside = folder / f".{FILE}.{os.getpid()}"
    try:
        with beside.open("wb") as target:
            write(target)
            target.flush()
            os.fsync(target.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    return path


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: words.py FOLDER")
    print(make(Path(sys.argv[1])))
