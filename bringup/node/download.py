"""One file over http: resumed, verified while it streams, and patient only where patience helps.

`fetch` ends with the whole file in place or raises DownloadFailed with the cause in one line.
"""

from __future__ import annotations

import hashlib
import os
import time
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import http.client

CHUNK_BYTES = 1024 * 1024
STALL_LIMIT_S = 30
"""Seconds without one byte before a connection is given up (and resumed)."""

SLOWEST_BYTES_S = 16 * 1024
"""A connection slower than this over SLOW_WINDOW_S is given up: a new one is often fast."""

SLOW_WINDOW_S = 60
TRIES_WITHOUT_PROGRESS = 5
"""Attempts in a row that brought next to nothing; one that brought bytes at a bearable rate ends the row."""

BACK_OFF_S = 1.0
BACK_OFF_LONGEST_S = 60
REASONS_SHOWN = 2
RETRY_AFTER_LONGEST_S = 900
"""A server that asks for more patience than this is not waited for: the next source is tried."""

HOPELESS = {
    401: "is not authorised (401): is the token there and right?",
    403: "is forbidden (403): has the licence been accepted with this token?",
    404: "is not there (404): is the revision right?",
    410: "is gone (410)",
}


HOURS_OVER = "the hours in which models may be fetched are over; the next run goes on where this one was"


class DownloadFailed(Exception):
    """Why a file could not be had. `cause` is a stable word: status, wrong_bytes, unreachable, slow, disk, hours,
    address."""

    def __init__(self, message: str, cause: str) -> None:
        super().__init__(message)
        self.cause = cause


class Hash(Protocol):
    """What hashlib gives."""

    def update(self, data: Any, /) -> None: ...
    def hexdigest(self) -> str: ...


@dataclass(frozen=True)
class Limits:
    """What bounds a download; tests make it impatient. `bytes_s` 0: no cap on the rate. `until`: when the hours
    for downloads end, of the monotonic clock."""

    stall_s: float = STALL_LIMIT_S
    slowest_bytes_s: float = SLOWEST_BYTES_S
    slow_window_s: float = SLOW_WINDOW_S
    tries: int = TRIES_WITHOUT_PROGRESS
    back_off_s: float = BACK_OFF_S
    back_off_longest_s: float = BACK_OFF_LONGEST_S
    retry_after_longest_s: float = RETRY_AFTER_LONGEST_S
    bytes_s: float = 0
    until: float = float("inf")

    def is_over(self) -> bool:
        """Have the hours for downloads ended?"""
        return time.monotonic() > self.until


@dataclass(frozen=True)
class Wanted:
    """One file: where it is, where it goes, and what it must be."""

    address: str
    target: Path
    size: int
    sha256: str
    headers: Mapping[str, str] = field(default_factory=dict)


Progress = Callable[[int], None]


class Retry(Exception):
    """This attempt is over; another may help, after `wait_s` when the server said how long."""

    def __init__(self, why: str, wait_s: float | None = None, cause: str = "unreachable") -> None:
        super().__init__(why)
        self.wait_s = wait_s
        self.cause = cause


def partial_of(target: Path) -> Path:
    """Where a file lies until it is whole."""
    return target.with_name(f"{target.name}.partial")


def fetch(wanted: Wanted, limits: Limits, progress: Progress = lambda done: None) -> None:
    """Brings one file to its place. What an earlier attempt left in `.partial` is used, if it proves right.

    Raises DownloadFailed; a `.partial` that may help the next time stays.
    """
    partial = partial_of(wanted.target)
    partial.parent.mkdir(parents=True, exist_ok=True)
    fruitless, wrong, best = 0, 0, 0
    reasons: dict[str, None] = {}
    while True:
        if limits.is_over():
            raise DownloadFailed(HOURS_OVER, "hours")
        digest, have = _resume(partial, wanted.size)
        progress(have)
        best = max(best, have)
        started = time.monotonic()
        try:
            _attempt(wanted, partial, digest, have, limits, progress)
            _accept(wanted, partial, digest)
            return
        except Retry as retry:
            got = partial.stat().st_size if partial.exists() else 0
            wrong += retry.cause == "wrong_bytes"
            reasons[str(retry)] = None
            # Against the best of all attempts, and at a bearable rate: a server that makes us start anew
            # each time, or drips, must not keep us for ever.
            least = limits.slowest_bytes_s * (time.monotonic() - started)
            fruitless = 0 if got - best > least else fruitless + 1
            if fruitless >= limits.tries or wrong > 1:
                text = ", then ".join(list(reasons)[-REASONS_SHOWN:])
                raise DownloadFailed(f"{brief(wanted.address)}: {text}", retry.cause) from None
            time.sleep(_wait(retry, fruitless, limits))
        except OSError as error:
            raise DownloadFailed(f"{partial}: {error.strerror or error}", "disk") from None


def _wait(retry: Retry, fruitless: int, limits: Limits) -> float:
    if retry.wait_s is not None:
        return retry.wait_s
    return min(limits.back_off_s * float(2 ** max(fruitless - 1, 0)), limits.back_off_longest_s)


def _resume(partial: Path, size: int) -> tuple[Hash, int]:
    """A hash over what is there already, and its length; a `.partial` that is too long is started anew."""
    digest = hashlib.sha256()
    if not partial.exists() or partial.stat().st_size > size:
        partial.unlink(missing_ok=True)
        return digest, 0
    have = 0
    buffer = bytearray(CHUNK_BYTES)
    view = memoryview(buffer)
    with partial.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
            have += count
    return digest, have


def _attempt(
    wanted: Wanted, partial: Path, digest: Hash, have: int, limits: Limits, progress: Progress
) -> None:
    """One connection, from byte `have` to the end. Raises Retry or DownloadFailed."""
    if have == wanted.size:
        return
    headers = {"User-Agent": "bringup", "Accept-Encoding": "identity", **wanted.headers}
    if have:
        headers["Range"] = f"bytes={have}-"
    # Not at the top: TLS and the library of mail headers come with it, and a relay, which never comes here, would
    # load them at its start.
    from . import web

    with web.answer(wanted, headers, limits) as answer:
        if have and answer.status != 206:
            partial.unlink()
            raise Retry("the server cannot resume, so the file is started anew", 0)
        _check_length(answer, wanted, have)
        _stream(answer, wanted, partial, digest, have, limits, progress)


def _check_length(answer: http.client.HTTPResponse, wanted: Wanted, have: int) -> None:
    length = answer.headers.get("Content-Length")
    if length is not None and have + int(length) > wanted.size:
        raise DownloadFailed(
            f"{brief(wanted.address)} has {have + int(length)} bytes, the lock says {wanted.size}",
            "wrong_bytes",
        )


def _stream(
    answer: http.client.HTTPResponse,
    wanted: Wanted,
    partial: Path,
    digest: Hash,
    have: int,
    limits: Limits,
    progress: Progress,
) -> None:
    """Bytes from the connection to the disk and through the hash."""
    started = window = time.monotonic()
    window_have, first = have, have
    with partial.open("ab") as file:
        while have < wanted.size:
            chunk = answer.read1(min(CHUNK_BYTES, wanted.size - have))
            if not chunk:
                raise Retry(f"the connection ended after {have} of {wanted.size} bytes")
            file.write(chunk)
            digest.update(chunk)
            have += len(chunk)
            progress(have)
            now = time.monotonic()
            if now > limits.until:
                raise DownloadFailed(HOURS_OVER, "hours")
            if now - window >= limits.slow_window_s:
                if (have - window_have) / (now - window) < limits.slowest_bytes_s:
                    raise Retry(f"fewer than {limits.slowest_bytes_s:g} bytes a second", cause="slow")
                window, window_have = now, have
            if limits.bytes_s:
                time.sleep(max(0.0, (have - first) / limits.bytes_s - (now - started)))


def _accept(wanted: Wanted, partial: Path, digest: Hash) -> None:
    """The whole file, if it is the right one, goes to its place."""
    if not partial.exists():
        partial.touch()
    if digest.hexdigest() != wanted.sha256:
        partial.unlink()
        raise Retry("the bytes are not what the lock says (sha256 differs)", cause="wrong_bytes")
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.chmod(0o644)
    partial.replace(wanted.target)


def brief(address: str) -> str:
    """An address without what may be secret in it: user, password and query."""
    parts = urllib.parse.urlsplit(address)
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}"
