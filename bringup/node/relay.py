"""Hands a model on from node to node: each serves what it has verified, the next one follows it.

A node reads from the first of its `upstreams` that lives (the node before it in the chain, then the one
before that, and so on) and serves every block as soon as its hash is right, long before the file is whole. So
a chain takes about as long as one copy. The head (no `upstreams`) has the files, or waits for them while it
serves. Whole files are compared with the lock on arrival, and the folder gets its stamp.

    python relay.py SPEC.json
    {"model": ..., "listen": [ADDRESS, PORT], "upstreams": [URL, ...], "idle_s": N, "allowed": [ADDRESS, ...],
     "bytes_s": CAP or 0, "seconds": N or 0}

With `seconds` everything ends then, in the middle of a file if need be; the next run goes on there. Ends with
0 when the folder is ready and nobody has asked for `idle_s` seconds, with 1 when it cannot be had.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import socketserver
import struct
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __package__:
    from . import store
    from .download import HOURS_OVER, partial_of
else:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from bringup.node import store
    from bringup.node.download import HOURS_OVER, partial_of

HEAD_BYTES = 16 * 1024
"""The most that a request's or an answer's headers may have."""

WAKE_BYTES = 256 * 1024
"""Bytes that must have come before a follower is woken, unless its block needs fewer."""

SMALLEST_BLOCK = 256 * 1024
LARGEST_BLOCK = 16 * 1024 * 1024
BLOCKS_A_MODEL = 1024
"""About how many blocks a model has: few enough to list, enough that one block a hop is no delay."""

AT_ONCE = 4
"""Files that are on their way at the same time: one connection each."""

STALL_LIMIT_S = 10
"""Seconds without a byte before we ask whether the node that we follow still lives."""

ALIVE_LIMIT_S = 3
PATIENCE_S = 300
"""Seconds without a byte from a node that lives (its own source may be slow) before another one is tried."""

ROUNDS = 5
"""How often the whole list of upstreams is tried without one new block before we give up."""

PAUSE_S = 0.5
START_LIMIT_S = 20
"""Seconds that the node before us has to come up: going around it at once would make a star of the chain."""

WATCH_S = 0.05
HEAD_LIMIT_S = 24 * 3600
"""How long a head waits for its own files."""


class RelayFailed(Exception):
    """Why the model could not be had from any upstream."""


class _Lost(Exception):
    """This upstream is of no use now."""


def block_size(total: int) -> int:
    """Bytes of a block: a power of two that gives about BLOCKS_A_MODEL blocks, within bounds."""
    wanted = SMALLEST_BLOCK
    while wanted < LARGEST_BLOCK and wanted * BLOCKS_A_MODEL < total:
        wanted *= 2
    return wanted


@dataclass
class Item:
    """One file on its way: its marks (None: not known yet), how many bytes are verified, and their hash.

    A mark is the sha256 of the file from its start to the end of a block, so that one pass over the bytes
    verifies each block and the whole file: the last mark is the file's own sha256, which the lock has.
    """

    file: store.File
    target: Path
    changed: threading.Condition = field(default_factory=threading.Condition)
    marks: list[str] | None = None
    verified: int = 0
    digest: Any = field(default_factory=hashlib.sha256)

    def tell(self, marks: list[str] | None, verified: int) -> None:
        """Notes news and wakes whoever waits for it."""
        with self.changed:
            self.marks, self.verified = marks, verified
            self.changed.notify_all()


class Relay:
    """The state of one model on one node. `until` (of the monotonic clock) is when the hours for models end."""

    def __init__(
        self,
        model: store.Model,
        upstreams: Sequence[str] = (),
        bytes_s: float = 0,
        until: float = float("inf"),
    ) -> None:
        self.until = until
        self.model = model
        self.upstreams = list(upstreams)
        self.bytes_s = bytes_s / AT_ONCE
        self.block = block_size(sum(file.size for file in model.files))
        self.items = {file.path: Item(file, model.folder / file.path) for file in model.files}
        self.asked = time.monotonic()
        self.stop = threading.Event()
        self.problem = ""

    # --- getting --------------------------------------------------------------------------------------------

    def get_all(self) -> None:
        """Every file, some at a time, and the stamp. Raises RelayFailed or StoreFailed."""
        end = time.monotonic() + START_LIMIT_S
        while self.upstreams and time.monotonic() < end and not alive(self.upstreams[0]):
            self.stop.wait(WATCH_S)
        waiting = list(self.items.values())
        failed: list[BaseException] = []
        lock = threading.Lock()

        def work() -> None:
            while not failed:
                with lock:
                    item = waiting.pop(0) if waiting else None
                if item is None:
                    return
                try:
                    self.get(item)
                except BaseException as error:
                    failed.append(error)

        workers = [threading.Thread(target=work, daemon=True) for _ in range(AT_ONCE)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if failed:
            raise failed[0]
        store.finish(self.model)

    def get(self, item: Item) -> None:
        """One file: what is there already, from the node before, or (at the head) when it appears."""
        if not self.upstreams:
            self._wait_for(item)
        elif not item.target.is_file() or self._take_own(item):
            self._follow(item)

    def check_hours(self) -> None:
        """Raises RelayFailed when they are over; what is here stays."""
        if time.monotonic() > self.until:
            raise RelayFailed(HOURS_OVER)

    def _wait_for(self, item: Item) -> None:
        """At the head: a file has its real name only when it is right, so it is hashed then."""
        end = time.monotonic() + HEAD_LIMIT_S
        while not (item.target.is_file() and item.target.stat().st_size == item.file.size):
            self.check_hours()
            if time.monotonic() > end or self.stop.wait(WATCH_S):
                raise RelayFailed(f"{item.file.path} did not appear within {HEAD_LIMIT_S} s")
        if fault := self._take_own(item):
            raise RelayFailed(f"{item.file.path} {fault}")

    def _take_own(self, item: Item) -> str:
        """Serves the file that is here; returns what is wrong with it instead ("": nothing)."""
        marks, digest = marks_of(item.target, self.block)
        if digest != item.file.sha256:
            return "has other bytes than the lock says (sha256 differs)"
        item.tell(marks, item.file.size)
        return ""

    def _follow(self, item: Item) -> None:
        """From the first node of the list that lives; what was verified stays, whoever it came from."""
        fruitless = 0
        why: dict[str, str] = {}
        while fruitless < ROUNDS:
            self.check_hours()
            before = item.verified
            for upstream in self.upstreams:
                reason = self._stay_with(upstream, item)
                if not reason:
                    return
                why[upstream] = reason
                if item.verified > before:
                    # It has died on the way: the list is tried from its top again.
                    break
            fruitless = 0 if item.verified > before else fruitless + 1
            if self.stop.wait(PAUSE_S * fruitless):
                break
        reasons = "; ".join(f"{upstream}: {text}" for upstream, text in why.items())
        raise RelayFailed(f"{item.file.path} could not be had from any node: {reasons}")

    def _stay_with(self, upstream: str, item: Item) -> str:
        """Reads from one node, through stalls as long as it lives. Returns "" or why it is of no use now."""
        last = time.monotonic()
        while True:
            before = item.verified
            try:
                self._read_from(upstream, item)
                return ""
            except TimeoutError:
                last = time.monotonic() if item.verified > before else last
                if time.monotonic() - last > PATIENCE_S or not alive(upstream):
                    return f"no byte for {STALL_LIMIT_S} s"
            except (_Lost, OSError) as error:
                return str(error) or type(error).__name__

    def _read_from(self, upstream: str, item: Item) -> None:
        """The rest of a file from one node. Raises _Lost, TimeoutError or OSError."""
        place = urllib.parse.quote(item.file.path)
        if item.marks is None:
            with asked(upstream, f"/marks/{place}") as body:
                self._start(item, body.json())
        if item.verified < item.file.size:
            with asked(upstream, f"/file/{place}", item.verified) as body:
                self._stream(body, item)
        self._accept(item)

    def _start(self, item: Item, about: Mapping[str, Any]) -> None:
        """Takes a node's marks, and of an earlier attempt's bytes those that fit them. Raises _Lost."""
        marks = [str(text) for text in about.get("marks", ())]
        if about.get("block") != self.block or len(marks) != -(-item.file.size // self.block):
            raise _Lost("has another list of blocks")
        if marks and marks[-1] != item.file.sha256:
            raise _Lost("has another file than the lock says")
        partial = partial_of(item.target)
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.touch()
        good, digest = 0, hashlib.sha256()
        with partial.open("rb+") as file:
            for mark in marks:
                data = file.read(min(self.block, item.file.size - good))
                after = _after(digest, data)
                if after.hexdigest() != mark:
                    break
                good, digest = good + len(data), after
            file.truncate(good)
        item.digest = digest
        item.tell(marks, good)

    def _stream(self, body: Body, item: Item) -> None:
        marks = item.marks
        assert marks is not None
        started, first = time.monotonic(), item.verified
        buffer = memoryview(bytearray(self.block))
        with partial_of(item.target).open("ab", buffering=0) as file:
            while item.verified < item.file.size:
                data = buffer[: min(self.block, item.file.size - item.verified)]
                body.fill(data)
                after = _after(item.digest, data)
                if after.hexdigest() != marks[item.verified // self.block]:
                    # Whose fault it is cannot be told: the next node's own marks judge what is here.
                    item.tell(None, item.verified)
                    raise _Lost("sent a block whose hash is wrong")
                file.write(data)
                item.digest = after
                item.tell(marks, item.verified + len(data))
                self.check_hours()
                if self.bytes_s:
                    due = (item.verified - first) / self.bytes_s
                    time.sleep(max(0.0, due - (time.monotonic() - started)))

    def _accept(self, item: Item) -> None:
        """The whole file gets its name."""
        partial = partial_of(item.target)
        if item.digest.hexdigest() != item.file.sha256:
            item.tell(None, 0)
            raise _Lost("its file is not what the lock says (sha256 differs)")
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.chmod(0o644)
        partial.replace(item.target)

    # --- giving ---------------------------------------------------------------------------------------------

    def opened(self, item: Item) -> Any:
        """The file as far as it is, under its present name."""
        try:
            return partial_of(item.target).open("rb")
        except FileNotFoundError:
            return item.target.open("rb")

    def wait(self, item: Item, beyond: int, limit_s: float) -> bool:
        """Waits until there are verified bytes beyond an offset (or, at -1, the marks)."""
        with item.changed:
            return item.changed.wait_for(
                lambda: (
                    self.stop.is_set() or (item.marks is not None and (beyond < 0 or item.verified > beyond))
                ),
                limit_s,
            )


# --- as little HTTP as this needs: the library's own takes as long to load as all of the rest ----------------


def read_head(connection: socket.socket) -> tuple[str, dict[str, str], bytes]:
    """The first line, the headers (by their names in small letters) and what has come behind them. Raises _Lost."""
    data = b""
    while b"\r\n\r\n" not in data:
        more = connection.recv(HEAD_BYTES)
        if not more:
            raise _Lost("closed the connection")
        data += more
        if len(data) > 2 * HEAD_BYTES:
            raise _Lost("speaks no HTTP")
    head, _, rest = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    rows = (line.partition(":") for line in lines)
    return first, {name.lower(): value.strip() for name, _, value in rows}, rest


@contextmanager
def asked(upstream: str, path: str, start: int = 0, limit_s: float = STALL_LIMIT_S) -> Iterator[Body]:
    """A node's answer, from byte `start`, when it has something for us. Raises _Lost, TimeoutError or OSError."""
    parts = urllib.parse.urlsplit(upstream)
    lines = [f"GET {path} HTTP/1.1", f"Host: {parts.netloc}", f"Range: bytes={start}-", "Connection: close"]
    with socket.create_connection((parts.hostname or "", parts.port or 80), limit_s) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        first, _, rest = read_head(connection)
        status = first.partition(" ")[2][:3]
        if status not in ("200", "206"):
            raise _Lost(f"answered {status}")
        yield Body(connection, rest)


class Body:
    """An answer's bytes, straight from its connection.

    We are woken once a block and not for each packet: on a slow network that was most of a relay's CPU time.
    """

    def __init__(self, connection: socket.socket, first: bytes) -> None:
        self.first = first
        self.socket = connection

    def json(self) -> Any:
        """All of it, as data. Raises _Lost, TimeoutError or OSError."""
        text = bytearray(self.first)
        while more := self.socket.recv(HEAD_BYTES):
            text += more
        try:
            return json.loads(text)
        except ValueError:
            raise _Lost("broke off its answer, or is no relay") from None

    def fill(self, data: memoryview) -> None:
        """Fills `data`. Raises _Lost when the answer ends before, TimeoutError or OSError."""
        have = min(len(self.first), len(data))
        data[:have] = self.first[:have]
        self.first = self.first[have:]
        while have < len(data):
            enough = min(len(data) - have, WAKE_BYTES)
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, enough)
            count = self.socket.recv_into(data[have:])
            if not count:
                raise _Lost("closed the connection")
            have += count


def _after(digest: Any, data: bytes | memoryview) -> Any:
    """The hash with more bytes; the old one stays as it is."""
    after = digest.copy()
    after.update(data)
    return after


def alive(upstream: str) -> bool:
    """Does a node's relay answer?"""
    try:
        with asked(upstream, "/alive", limit_s=ALIVE_LIMIT_S):
            return True
    except (_Lost, OSError):
        return False


def marks_of(path: Path, block: int) -> tuple[list[str], str]:
    """The sha256 of a file up to the end of each of its blocks, and of all of it. Raises OSError."""
    found = []
    digest = hashlib.sha256()
    buffer = bytearray(block)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            have = count
            while have < block and (count := file.readinto(view[have:])):
                have += count
            digest.update(view[:have])
            found.append(digest.copy().hexdigest())
    return found, digest.hexdigest()


class Handler(socketserver.BaseRequestHandler):
    """One request a connection: /alive, /marks/PATH (when they are known), /file/PATH (with Range, as it comes)."""

    server: Server
    request: socket.socket

    def handle(self) -> None:
        """Answers the request."""
        self.request.settimeout(PATIENCE_S)
        line, headers, _ = read_head(self.request)
        allowed = self.server.allowed
        if allowed and self.client_address[0].removeprefix("::ffff:") not in allowed:
            self._answer(403)
            return
        kind, _, name = urllib.parse.unquote(line.split(" ")[1]).lstrip("/").partition("/")
        item = self.server.relay.items.get(name)
        if kind == "alive":
            self._answer(200)
        elif item is None or kind not in ("marks", "file"):
            self._answer(404)
        else:
            self.server.relay.asked = time.monotonic()
            self._marks(item) if kind == "marks" else self._file(item, headers.get("range", ""))

    def _answer(self, status: int, body: bytes = b"", length: int | None = None) -> None:
        """The head of an answer (the reason's text may be empty), and its body when it is at hand."""
        size = len(body) if length is None else length
        head = f"HTTP/1.1 {status} \r\nContent-Length: {size}\r\nConnection: close\r\n\r\n"
        self.request.sendall(head.encode() + body)

    def _marks(self, item: Item) -> None:
        relay = self.server.relay
        if not relay.wait(item, -1, PATIENCE_S) or (marks := item.marks) is None:
            self._answer(503)
            return
        self._answer(200, json.dumps({"block": relay.block, "marks": marks}).encode())

    def _file(self, item: Item, wanted: str) -> None:
        relay = self.server.relay
        match = re.fullmatch(r"bytes=(\d+)-", wanted)
        start = int(match.group(1)) if match else 0
        if start >= item.file.size and item.file.size:
            self._answer(416)
            return
        self._answer(206 if start else 200, length=item.file.size - start)
        at = start
        # The kernel does the waiting: `socket.sendfile` would wake us for every few packets that have gone.
        self.request.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", PATIENCE_S, 0))
        self.request.settimeout(None)
        if not relay.wait(item, at, PATIENCE_S):
            return
        with relay.opened(item) as file:
            while at < item.file.size and relay.wait(item, at, PATIENCE_S):
                count = item.verified - at
                if count <= 0:
                    return
                sent = os.sendfile(self.request.fileno(), file.fileno(), at, count)
                if not sent:
                    return
                at += sent
                relay.asked = time.monotonic()


def addresses_of(name: str) -> list[str]:
    """The addresses behind a name (an address is its own); none when it cannot be resolved."""
    try:
        return sorted({str(row[4][0]) for row in socket.getaddrinfo(name, None)})
    except OSError:
        return []


class Server(socketserver.ThreadingTCPServer):
    """Serves one relay; `allowed` are the addresses that may ask (empty: all)."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], relay: Relay, allowed: Sequence[str] = ()) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, Handler)
        self.relay = relay
        self.allowed = frozenset(number for name in allowed for number in addresses_of(name))

    def handle_error(self, request: object, client_address: object) -> None:
        """A follower that goes away is its own affair."""


def run(spec: Mapping[str, Any]) -> int:
    """Gets, serves, and ends when nobody needs us any more. Returns the exit code."""
    model = store.Model.of(spec["model"])
    seconds = float(spec.get("seconds", 0))
    until = time.monotonic() + seconds if seconds else float("inf")
    relay = Relay(model, spec.get("upstreams", ()), float(spec.get("bytes_s", 0)), until)
    address, port = spec["listen"]
    server = Server((address, int(port)), relay, spec.get("allowed", ()))
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True).start()
    try:
        relay.get_all()
        relay.asked = time.monotonic()
        while time.monotonic() - relay.asked < float(spec["idle_s"]) and time.monotonic() < until:
            time.sleep(WATCH_S)
        return 0
    except (RelayFailed, store.StoreFailed, OSError) as error:
        print(f"relay: {error}", file=sys.stderr)
        return 1
    finally:
        relay.stop.set()
        server.shutdown()
        server.server_close()


if __name__ == "__main__":
    sys.exit(run(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
