"""Files that are whole or not there: written beside their place, to the disk, and renamed."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def read_text(path: Path) -> str:
    """A file's text with odd bytes replaced; "" when it is not there or may not be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def write_atomic(path: Path, text: str, mode: int = 0o644) -> None:
    """Replaces a file's text; whoever reads sees the old text or the new one. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.chmod(mode)
        beside.replace(path)
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise


def sweep(path: Path) -> None:
    """Removes what writers of this file left beside it when they were killed; what lives is left alone."""
    for beside in path.parent.glob(f".{path.name}.*.tmp"):
        writer = beside.name.split(".")[-2]
        if not Path("/proc", writer).exists():
            beside.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Puts renames in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(path: Path, limit_s: float, keep: bool = True) -> Iterator[None]:
    """Holds a lock file; without `keep` it is gone afterwards.

    Raises TimeoutError when somebody else holds it longer than `limit_s` seconds.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + limit_s
    while True:
        with path.open("w", encoding="utf-8") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError:
                    if time.monotonic() > end:
                        raise TimeoutError(f"{path} has been held for {limit_s:g} s by another run") from None
                    time.sleep(0.2)
            if not _is_at(file.fileno(), path):
                continue  # whoever held it has removed it: what we hold is nobody's lock any more
            try:
                yield
            finally:
                if not keep:
                    path.unlink(missing_ok=True)
            return


def _is_at(descriptor: int, path: Path) -> bool:
    """Is an open file still the one of that name?"""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
