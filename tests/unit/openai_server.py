"""A small server that speaks the completions protocol in good and bad ways: what a load is tested against."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

TOKENS = ("one", " two", " three")


@dataclass
class Behaviour:
    """What the server does: `how` it answers, seconds `delay_s` between tokens, what it has seen; `metrics`
    makes its page from the number of requests so far."""

    how: str = "well"
    delay_s: float = 0.0
    bodies: list[dict[str, object]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    connections: int = 0
    metrics: Callable[[int], str] = lambda requests: ""


def _event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _plain(status: str, text: str) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode()


def _usage(body: dict[str, object]) -> dict[str, object]:
    asked = body.get("prompt") or str(body.get("messages"))
    return {
        "prompt_tokens": 3 + 2 * len(str(asked).split()),
        "completion_tokens": body["max_tokens"],
        "prompt_tokens_details": {"cached_tokens": 1},
    }


async def _stream(writer: asyncio.StreamWriter, body: dict[str, object], mode: Behaviour) -> None:
    key = "delta" if "messages" in body else None
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    for number, token in enumerate(TOKENS):
        await asyncio.sleep(mode.delay_s)
        choice = {"delta": {"reasoning_content": token}} if key else {"text": token}
        whole = _chunk(_event({"choices": [choice]}))
        # One event in two pieces: an event need not be a chunk, nor a chunk a read.
        writer.write(whole if number else _chunk(b'data: {"choices"') + _chunk(b': [{"text": "one"}]}\n\n'))
        await writer.drain()
        if mode.how == "breaks off" and number == 1:
            writer.close()
            return
    if mode.how == "error in stream":
        writer.write(_chunk(_event({"error": {"message": "engine died"}})))
    if mode.how != "no usage":
        writer.write(_chunk(_event({"choices": [], "usage": _usage(body)})))
    writer.write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


def _handler(mode: Behaviour) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        mode.connections += 1
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                while not writer.is_closing():
                    head = (await reader.readuntil(b"\r\n\r\n")).decode()
                    found = [line for line in head.split("\r\n") if line.startswith("Content-Length:")]
                    raw = await reader.readexactly(int(found[0][15:]) if found else 0)
                    mode.heads.append(head)
                    await _answer(head, json.loads(raw) if raw else {}, writer, mode)
                    await writer.drain()
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    return handle


async def _answer(head: str, body: dict[str, object], writer: asyncio.StreamWriter, mode: Behaviour) -> None:
    if "GET /metrics" in head:
        writer.write(_plain("200 OK", mode.metrics(len(mode.bodies))))
        return
    mode.bodies.append(body)
    if mode.how == "refuses":
        writer.write(_plain("503 Service Unavailable", "loading"))
    elif mode.how == "is short" and len(str(body.get("prompt")).split()) > 400:
        said = "request (16403 tokens) exceeds the available context size (16384 tokens), try increasing it"
        writer.write(_plain("400 Bad Request", json.dumps({"error": {"code": 400, "message": said}})))
    elif mode.how == "not http":
        writer.write(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")
    elif mode.how == "bad json":
        writer.write(_plain("200 OK", "data: {oops\n\n"))
    elif mode.how == "not an event":
        writer.write(_plain("200 OK", "data: [1]\n\n"))
    elif mode.how == "without length":
        text = _event({"choices": [{"text": "one"}]}) + _event({"choices": [], "usage": _usage(body)})
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + text)
        writer.close()
    elif mode.how == "never":
        await asyncio.sleep(30)
    elif mode.how == "closes after each":
        await _stream(writer, body, mode)
        await writer.drain()
        writer.close()
    else:
        await _stream(writer, body, mode)


@contextlib.contextmanager
def serving(mode: Behaviour) -> Iterator[str]:
    """The server in a thread of its own; gives its address."""
    ready = threading.Event()
    loop = asyncio.new_event_loop()
    address: list[str] = []
    stop = asyncio.Event()

    async def run() -> None:
        server = await asyncio.start_server(_handler(mode), "127.0.0.1", 0)
        address.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        ready.set()
        await stop.wait()
        server.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def work() -> None:
        loop.run_until_complete(run())
        # Transports close in the turn after the one that asked for it.
        loop.run_until_complete(asyncio.sleep(0))
        loop.run_until_complete(loop.shutdown_asyncgens())

    thread = threading.Thread(target=work)
    thread.start()
    assert ready.wait(120)
    try:
        yield address[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()
