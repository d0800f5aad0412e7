"""A load client for OpenAI-compatible servers: few parts, no dependencies, fast enough not to be what is
measured.

Tokens are counted by the server (`usage`), never from text. Prompts begin with a nonce, so that a prefix
cache cannot answer for the model. A closed loop keeps a number of requests in flight; an open loop sends at a
rate whether or not answers come, and its times run from when a request was due. docs/bench-and-tune.md has
the client's figures.
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import ssl
import statistics
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from bringup.bench import Request, percentile
from bringup.errors import Problem, UsageError

CONNECT_S = 10.0
"""Seconds until a connection must stand."""
CLOSE_S = 1.0
"""Seconds that a closing connection is waited for."""
ANSWER_S = 600.0
"""Seconds until an answer must be complete, if the caller says nothing else."""
MOST_IN_FLIGHT = 2048
"""Requests of an open loop at once; beyond it the server has lost, and more measures this machine."""
LINE_LIMIT = 4 * 1024 * 1024
"""Bytes of one line of an answer."""
LAG_EVERY_S = 0.01
LAG_LIMIT_MS = 5.0
"""The client's own delay (99th percentile) above which its times cannot be trusted."""
PROBE_WORDS = (64, 320)
"""Words of the two prompts that tell how many tokens a word is."""
ERROR_TEXT = 200
"""Characters of a server's error that are kept."""


@dataclass(frozen=True)
class Target:
    """A server: base address ("http://127.0.0.1:8000"), the model's served name, its key if it wants one.

    `metrics_names`: our names of metrics to the engine's (bringup.metrics). `context`: tokens of prompt and
    answer together that it takes; None: not known.
    """

    base_url: str
    model: str
    api_key: str = field(default="", repr=False)
    name: str = ""
    completions: str = "/v1/completions"
    chat: str = "/v1/chat/completions"
    metrics: str | None = "/metrics"
    metrics_names: Mapping[str, str] = field(default_factory=dict)
    engine: str = ""
    engine_version: str = ""
    context: int | None = None
    timeout_s: float = ANSWER_S

    @property
    def address(self) -> tuple[str, int, bool]:
        """Host, port, and whether it is TLS. Raises UsageError for an address that is none."""
        try:
            parts = urlsplit(self.base_url)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            what = f'"{self.base_url}" is no address of a server'
            raise UsageError(Problem("target", what, "Such as http://127.0.0.1:8000."))
        tls = parts.scheme == "https"
        return parts.hostname, port or (443 if tls else 80), tls

    @property
    def prefix(self) -> str:
        """The path in front of every endpoint, when the server lies behind one."""
        return urlsplit(self.base_url).path.rstrip("/")


class ServerError(Exception):
    """A server's answer that is none; its text says what came instead."""


# --- one connection ----------------------------------------------------------------------------------------


class Connection:
    """One HTTP/1.1 connection that is kept open between requests."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        host, port, _ = target.address
        key = f"Authorization: Bearer {target.api_key}\r\n" if target.api_key else ""
        self._headers = f"Host: {host}:{port}\r\nAccept: */*\r\n{key}"

    async def send(
        self, method: str, path: str, body: bytes = b""
    ) -> tuple[int, AsyncGenerator[bytes, None]]:
        """Sends a request; gives the status and the body's pieces as they arrive. A kept connection that
        the server has closed in the meantime is opened anew, once."""
        head = (
            f"{method} {self._target.prefix}{path} HTTP/1.1\r\n{self._headers}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        data = head.encode() + body
        kept = self._writer is not None
        try:
            return await self._exchange(data)
        except (ConnectionError, asyncio.IncompleteReadError):
            await self.close()
            if not kept:
                raise
        return await self._exchange(data)

    async def _exchange(self, data: bytes) -> tuple[int, AsyncGenerator[bytes, None]]:
        reader, writer = await self._open()
        writer.write(data)
        status, headers = _head(await reader.readuntil(b"\r\n\r\n"))
        return status, self._body(reader, headers)

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._reader is None or self._writer is None or self._writer.is_closing():
            host, port, tls = self._target.address
            context = ssl.create_default_context() if tls else None
            async with asyncio.timeout(CONNECT_S):
                self._reader, self._writer = await asyncio.open_connection(
                    host, port, ssl=context, limit=LINE_LIMIT
                )
        return self._reader, self._writer

    async def _body(
        self, reader: asyncio.StreamReader, headers: Mapping[str, str]
    ) -> AsyncGenerator[bytes, None]:
        try:
            if "chunked" in headers.get("transfer-encoding", ""):
                async for piece in _chunks(reader):
                    yield piece
            elif "content-length" in headers:
                yield await reader.readexactly(int(headers["content-length"]))
            else:
                while piece := await reader.read(65_536):
                    yield piece
                await self.close()
        except BaseException:
            await self.close()
            raise
        if headers.get("connection", "").lower() == "close":
            await self.close()

    async def close(self) -> None:
        """Closes the connection; the next request opens another."""
        writer, self._reader, self._writer = self._writer, None, None
        if writer is not None:
            writer.close()
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await writer.wait_closed()


def _head(data: bytes) -> tuple[int, dict[str, str]]:
    first, *rest = data.decode("latin-1").split("\r\n")
    words = first.split(" ", 2)
    if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdigit():
        raise ServerError(f"not an HTTP answer: {first[:ERROR_TEXT]}")
    pairs = (line.partition(":") for line in rest)
    return int(words[1]), {name.strip().lower(): value.strip() for name, _, value in pairs}


async def _chunks(reader: asyncio.StreamReader) -> AsyncGenerator[bytes, None]:
    while size := int((await _line(reader)).split(b";")[0], 16):
        data = await reader.readexactly(size + 2)
        yield data[:-2]
    while (await _line(reader)).strip():
        pass


async def _line(reader: asyncio.StreamReader) -> bytes:
    """A line; a connection that ends instead is an error, since a chunked body says when it is over."""
    line = await reader.readline()
    if not line:
        raise ConnectionResetError("the server closed it within an answer")
    return line


# --- one request -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ask:
    """One request: a prompt (text, or chat when `chat`), and how many tokens to make."""

    prompt: str
    output_tokens: int
    chat: bool = False

    def body(self, model: str) -> bytes:
        """The request as JSON. The end of text is ignored, so that every answer has the length asked for."""
        text: dict[str, Any] = {"prompt": self.prompt}
        if self.chat:
            text = {"messages": [{"role": "user", "content": self.prompt}]}
        return json.dumps(
            {
                "model": model,
                **text,
                "max_tokens": self.output_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()


async def ask(
    connection: Connection, target: Target, what: Ask, zero: float, due: float | None = None
) -> Request:
    """One streamed request. Times are seconds since `zero` (`time.perf_counter()`); `due`: when it was to be
    sent. Never raises for what a server or network does: the Request then carries the error."""
    began = due if due is not None else time.perf_counter()
    marks: list[float] = []
    usage: dict[str, Any] = {}
    error = ""
    try:
        async with asyncio.timeout(target.timeout_s):
            path = target.chat if what.chat else target.completions
            status, pieces = await connection.send("POST", path, what.body(target.model))
            await _read_answer(status, pieces, marks, usage)
    except TimeoutError:
        error = f"no whole answer within {target.timeout_s:g} s"
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as reason:
        error = f"connection lost: {reason}"
    except (ServerError, ValueError) as reason:
        error = str(reason)
    if error:
        await connection.close()
    elif not usage:
        error = "the server reports no usage, so its tokens cannot be counted"
    details = usage.get("prompt_tokens_details") or {}
    return Request(
        began=began - zero,
        first_token=marks[0] - zero if marks else None,
        ended=(time.perf_counter() if error or len(marks) < 2 else marks[1]) - zero,
        prompt_tokens=int(usage.get("prompt_tokens") or 0),
        output_tokens=int(usage.get("completion_tokens") or 0),
        cached_tokens=int(details.get("cached_tokens") or 0),
        error=error,
    )


async def _read_answer(
    status: int, pieces: AsyncGenerator[bytes, None], marks: list[float], usage: dict[str, Any]
) -> None:
    """Reads an event stream: `marks` gets the times of the first and the last token, `usage` the counts."""
    if status != 200:
        text = b"".join([piece async for piece in pieces]).decode(errors="replace")
        raise ServerError(f"HTTP {status}: {text[:ERROR_TEXT]}")
    rest = b""
    # Closed at once when an event raises, so that nothing is read from a connection that is given up.
    async with aclosing(pieces) as open_pieces:
        async for piece in open_pieces:
            now = time.perf_counter()
            *events, rest = (rest + piece).split(b"\n")
            for event in events:
                if event.startswith(b"data:") and b"[DONE]" not in event[:16]:
                    _take(json.loads(event[5:]), now, marks, usage)


def _take(event: Any, now: float, marks: list[float], usage: dict[str, Any]) -> None:
    if not isinstance(event, dict):
        raise ServerError(f"not an event: {str(event)[:ERROR_TEXT]}")
    if event.get("error"):
        raise ServerError(f"error in the stream: {str(event['error'])[:ERROR_TEXT]}")
    usage.update(event.get("usage") or {})
    if any(_has_text(choice) for choice in event.get("choices") or ()):
        marks[1:] = [now] if marks else []
        if not marks:
            marks.append(now)


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or choice
    return any(delta.get(key) for key in ("content", "reasoning_content", "reasoning", "text"))


# --- prompts -----------------------------------------------------------------------------------------------

WORDS = (
    "the of and to in is that it was for on are with as his they be at one have this from or had by hot "
    "word but what some we can out other were all there when up use your how said an each she which do "
    "their time if will way about many then them write would like so these her long make thing see him "
    "two has look more day could go come did number sound no most people my over know water than call "
    "first who may down side been now find any new work part take get place made live where after back "
    "little only round man year came show every good me give our under name "
).split()


@dataclass(frozen=True)
class Tokens:
    """How many tokens a prompt of so many words has on a server: `a_word` each, and `base` for what is
    around.
    """

    a_word: float = 1.0
    base: float = 0.0

    def words(self, tokens: int) -> int:
        """Words that make about `tokens` tokens."""
        return max(1, round((tokens - self.base) / self.a_word))


class Prompts:
    """Prompts of a wanted length: a nonce first, then words that the seed decides.

    Without the nonce (`fresh` false) every prompt of a length is the same, which is what a prefix cache is
    for.
    """

    def __init__(self, tokens: Tokens, seed: int = 1, *, fresh: bool = True) -> None:
        self._tokens, self._seed, self._fresh, self._made = tokens, seed, fresh, 0

    def make(self, tokens: int) -> str:
        """A prompt of about `tokens` tokens; how many they were is in the answer's usage."""
        return self.of_words(self._tokens.words(tokens))

    def of_words(self, words: int) -> str:
        """A prompt of so many words, the nonce not counted."""
        self._made += self._fresh
        rng = random.Random(f"{self._seed}-{self._made}")
        text = " ".join(rng.choices(WORDS, k=words))
        return f"{secrets.token_hex(6)} {text}" if self._fresh else text


async def calibrate(target: Target) -> Tokens:
    """Asks the server how many tokens two prompts have. Raises UsageError when it does not answer."""
    connection, prompts = Connection(target), Prompts(Tokens())
    counts: list[int] = []
    try:
        for words in PROBE_WORDS:
            got = await ask(connection, target, Ask(prompts.of_words(words), 1), time.perf_counter())
            if got.error:
                raise UsageError(Problem(target.name or target.base_url, got.error, "Is the server ready?"))
            counts.append(got.prompt_tokens)
    finally:
        await connection.close()
    a_word = (counts[1] - counts[0]) / (PROBE_WORDS[1] - PROBE_WORDS[0])
    if a_word <= 0:
        what = f"counts {counts[0]} and {counts[1]} tokens for {PROBE_WORDS[0]} and {PROBE_WORDS[1]} words"
        raise UsageError(Problem(target.name or target.base_url, what, "Its usage cannot be used."))
    return Tokens(a_word, counts[0] - a_word * PROBE_WORDS[0])


# --- loops -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What a load did: its requests in the order they were sent, the seconds it took, and the client's own
    delay. `busy_percent`: of one core, for an engine's client, whose delay is not known.
    """

    requests: tuple[Request, ...]
    wall_s: float
    lag_ms: float
    busy_percent: float | None = None

    @property
    def trusted(self) -> bool:
        """Whether the client kept up."""
        return self.lag_ms <= LAG_LIMIT_MS


async def closed_loop(target: Target, asks: Sequence[Ask], concurrent: int) -> Outcome:
    """Keeps `concurrent` requests in flight until all are answered."""
    waiting = iter(enumerate(asks))
    done: dict[int, Request] = {}
    zero = time.perf_counter()

    async def worker() -> None:
        connection = Connection(target)
        try:
            for number, what in waiting:
                done[number] = await ask(connection, target, what, zero)
        finally:
            await connection.close()

    async def all_workers() -> None:
        await asyncio.gather(*(worker() for _ in range(min(concurrent, len(asks)))))

    return await _timed(all_workers, done, zero)


async def open_loop(target: Target, asks: Sequence[Ask], rate: float, seed: int = 1) -> Outcome:
    """Sends requests at `rate` a second on average (Poisson), whether or not answers come."""
    rng = random.Random(seed)
    idle: list[Connection] = []
    done: dict[int, Request] = {}
    zero = time.perf_counter()
    flying = 0

    async def one(number: int, what: Ask, due: float) -> None:
        nonlocal flying
        if flying >= MOST_IN_FLIGHT:
            done[number] = Request(due - zero, None, due - zero, error=f"{MOST_IN_FLIGHT} requests in flight")
            return
        flying += 1
        connection = idle.pop() if idle else Connection(target)
        done[number] = await ask(connection, target, what, zero, due)
        idle.append(connection)
        flying -= 1

    async def arrivals() -> None:
        due = zero
        async with asyncio.TaskGroup() as group:
            for number, what in enumerate(asks):
                due += rng.expovariate(rate)
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                group.create_task(one(number, what, due))
        for connection in idle:
            await connection.close()

    return await _timed(arrivals, done, zero)


async def _timed(work: Callable[[], Awaitable[None]], done: dict[int, Request], zero: float) -> Outcome:
    lags: list[float] = []
    watcher = asyncio.create_task(_watch(lags))
    try:
        await work()
    finally:
        watcher.cancel()
        with suppress(asyncio.CancelledError):
            await watcher
    lag = percentile(lags, 0.99) * 1000 if lags else 0.0
    return Outcome(tuple(done[number] for number in sorted(done)), time.perf_counter() - zero, lag)


async def _watch(lags: list[float]) -> None:
    """Notes how much later than asked for this process gets its turn."""
    while True:
        wanted = time.perf_counter() + LAG_EVERY_S
        await asyncio.sleep(LAG_EVERY_S)
        lags.append(max(0.0, time.perf_counter() - wanted))


async def fetch(target: Target, path: str) -> str:
    """The text of a GET. Raises ServerError or OSError."""
    connection = Connection(target)
    try:
        async with asyncio.timeout(CONNECT_S):
            status, pieces = await connection.send("GET", path)
            text = b"".join([piece async for piece in pieces]).decode(errors="replace")
    finally:
        await connection.close()
    if status != 200:
        raise ServerError(f"HTTP {status}: {text[:ERROR_TEXT]}")
    return text


def rate_of(outcome: Outcome) -> float:
    """Answered requests a second."""
    good = sum(not request.error for request in outcome.requests)
    return good / outcome.wall_s if outcome.wall_s else 0.0


def latency_ms(outcome: Outcome) -> float:
    """Median milliseconds from sending to the last byte. Raises ValueError when nothing was answered."""
    took = [request.ended - request.began for request in outcome.requests if not request.error]
    if not took:
        raise ValueError("no request was answered")
    return statistics.median(took) * 1000
