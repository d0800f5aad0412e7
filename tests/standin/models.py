"""Small models for tests and benches: files as bytes, the lock that fits them, and limits that make waiting short."""

from __future__ import annotations

import hashlib
import random
import socket
from collections.abc import Mapping
from typing import Any

from bringup.node import download, store

IMPATIENT = download.Limits(
    stall_s=0.4,
    slowest_bytes_s=100_000,
    slow_window_s=0.3,
    tries=3,
    back_off_s=0.01,
    retry_after_longest_s=5,
)


def rows_of(files: Mapping[str, bytes]) -> list[dict[str, Any]]:
    """The lock of files, as plain data."""
    return [
        {"path": path, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for path, data in files.items()
    ]


def lock_of(files: Mapping[str, bytes]) -> tuple[store.File, ...]:
    """The lock of files."""
    return tuple(store.File(**row) for row in rows_of(files))


def parts(count: int, size: int, seed: int = 1) -> dict[str, bytes]:
    """So many files of so many random bytes, each with a first byte of its own."""
    data = random.Random(seed).randbytes(size)
    return {f"part-{number}.bin": bytes([number]) + data[1:] for number in range(count)}


def free_port() -> int:
    """A port that nobody has."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port
