"""A trivial completions server to measure the load client against: it makes no tokens, it only says so.

Every answer is one precomputed event stream. With `--delay MS` each request waits that long first, and the
microseconds that the server itself took are given as its cached tokens, so that a client's own error can be
told.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
USAGE = {"prompt_tokens": 16, "completion_tokens": 8, "total_tokens": 24}


def chunk(data: bytes) -> bytes:
    """One piece of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(value: object) -> bytes:
    """One event of a stream."""
    return b"data: " + json.dumps(value).encode() + b"\n\n"


FIRST = chunk(event({"choices": [{"index": 0, "text": "one"}]}))
LAST = chunk(event({"choices": [{"index": 0, "text": "two"}]}) + event({"choices": [], "usage": USAGE}))
END = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
WHOLE = HEAD + FIRST + LAST + END


class Answer(asyncio.Protocol):
    """Answers each request of a connection, after a delay when there is one."""

    def __init__(self, delay_s: float, spread_s: float) -> None:
        self._delay_s, self._spread_s, self._seen = delay_s, spread_s, b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keeps the transport to answer on."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Answers once a head and its body are complete."""
        self._seen += data
        while self._next() is not None:
            if not self._delay_s:
                self._write(WHOLE)
                continue
            began = time.perf_counter()
            delay = self._delay_s + random.uniform(0, self._spread_s)
            asyncio.get_running_loop().call_later(delay, self._late, began)

    def _next(self) -> bytes | None:
        head, mark, rest = self._seen.partition(b"\r\n\r\n")
        length = next(
            (int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0
        )
        if not mark or len(rest) < length:
            return None
        self._seen = rest[length:]
        return rest[:length]

    def _late(self, began: float) -> None:
        took = (time.perf_counter() - began) * 1000
        usage = {
            "choices": [],
            "usage": {**USAGE, "prompt_tokens_details": {"cached_tokens": round(took * 1000)}},
        }
        self._write(HEAD + FIRST + LAST + chunk(event(usage)) + END)

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)


async def serve(port: int, delay_s: float, spread_s: float) -> None:
    """Serves until ended; prints its address first."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Answer(delay_s, spread_s), "127.0.0.1", port)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


def main() -> None:
    """Reads the flags and serves."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--delay", type=float, default=0.0, help="milliseconds before each answer")
    parser.add_argument("--spread", type=float, default=0.0, help="milliseconds more, at random")
    options = parser.parse_args()
    asyncio.run(serve(options.port, options.delay / 1000, options.spread / 1000))


if __name__ == "__main__":
    main()
