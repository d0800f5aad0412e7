"""Which folders of programs are in use: a process has files of them mapped, or a unit names them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from .files import read_text


def in_use(
    prefixes: Sequence[Path], proc: Path = Path("/proc"), units: Path = Path("/etc/systemd/system")
) -> set[Path]:
    """Which of the environments a process runs from (its files are mapped) or a unit names."""
    texts = [read_text(path) for path in units.glob("*.service")] if prefixes else []
    named = {prefix for prefix in prefixes if any(f"{prefix}/" in text for text in texts)}
    return named | set(users(prefixes, proc))


def users(prefixes: Sequence[Path], proc: Path = Path("/proc")) -> dict[Path, list[int]]:
    """The processes that run from each environment that has any."""
    found: dict[Path, list[int]] = {}
    for folder in proc.iterdir() if prefixes else ():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            text = read_text(folder / "cmdline").replace("\0", " ") + read_text(folder / "maps")
            for prefix in prefixes:
                if f"{prefix}/" in text:
                    found.setdefault(prefix, []).append(int(folder.name))
    return found
