"""A STAND-IN for an engine, for tests only: it speaks the OpenAI API, makes no sense, and misbehaves as told.

    python misbehave.py --port 8000 --alias words --how hangs-after

It says what it is in its process title, in `/v1/models` and in its metrics (`standin:`). Ways to misbehave (`--how`):

well             does not
slow-start       listens only after 6 s
wrong-name       serves another model than the one it was asked to
lies             /health and /v1/models are right at once, no completion ever comes
crash-loop       ends with an error at each start
exits-0          ends with exit code 0 five seconds after its first start, as some engines do after a fault of the GPU
leaks-shm        leaves shared memory and a child process in a session of its own that ignores TERM and holds a port
ignores-term     does not end when asked
has-a-worker     takes a worker that ends by a signal for a crash and kills itself; asked to end, it lets the worker go
hangs-after      answers 8 requests, then none, while /health stays right
long-prefill     one prompt takes 12 s, in which only the count of computed batches moves
floods           writes 20,000 numbered lines to its log as fast as it can
grows            keeps 8 MiB of each request
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

WAYS = (
    "well slow-start wrong-name lies crash-loop exits-0 leaks-shm ignores-term has-a-worker hangs-after long-prefill"
    " floods grows"
).split()
SLOW_START_S = 6.0
GOOD_REQUESTS = 8
PREFILL_S = 12.0
PREFILL_BATCHES = 12
PREFILL_MARK = "a-very-long-prompt"
FLOOD_LINES = 20_000
LEAKED_BYTES = 8 * 1024 * 1024
DRAIN_S = 1.0
KEPT_BYTES = 8 * 1024 * 1024


class State:
    """What the server counts."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.requests = self.tokens = self.running = self.steps = 0
        self.kept: list[bytes] = []


class Handler(BaseHTTPRequestHandler):
    """The API."""

    how = "well"
    alias = "words"
    state = State()

    def do_GET(self) -> None:
        """/health, /v1/models and /metrics."""
        state = self.state
        metrics = "".join(
            f"standin:{name} {value}\n"
            for name, value in (
                ("running", state.running),
                ("tokens_total", state.tokens),
                ("steps_total", state.steps),
            )
        )
        name = "another" if self.how == "wrong-name" else self.alias
        models = {"data": [{"id": name, "owned_by": "stand-in, no engine"}]}
        pages: dict[str, Any] = {"/health": {"status": "ok"}, "/v1/models": models, "/metrics": metrics}
        self.reply(200 if self.path in pages else 404, pages.get(self.path, {}))

    def do_POST(self) -> None:
        """/v1/chat/completions."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        state = self.state
        with state.lock:
            state.requests += 1
            state.running += 1
            number = state.requests
        try:
            prompt = body["messages"][-1]["content"]
            if self.how == "lies" or (self.how == "hangs-after" and number > GOOD_REQUESTS):
                threading.Event().wait()
            if self.how == "grows":
                state.kept.append(b"x" * KEPT_BYTES)
            if self.how == "long-prefill" and PREFILL_MARK in prompt:
                prefill(state)
            while self.how == "long-prefill" and state.running > 1 and PREFILL_MARK not in prompt:
                # One batch at a time: everybody waits for the long prompt.
                time.sleep(0.05)
            with state.lock:
                state.tokens += 1
                state.steps += 1
        finally:
            with state.lock:
                state.running -= 1
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": "stand-in"},
            "finish_reason": "length",
        }
        self.reply(200, {"model": self.alias, "choices": [choice], "usage": {"completion_tokens": 1}})

    def reply(self, status: int, data: Any) -> None:
        """JSON, or text as it is."""
        content = data.encode() if isinstance(data, str) else json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def prefill(state: State) -> None:
    """One batch after another, until the whole prompt is read."""
    end = time.monotonic() + PREFILL_S
    while time.monotonic() < end:
        time.sleep(PREFILL_S / PREFILL_BATCHES)
        with state.lock:
            state.steps += 1


def leak(port: int) -> None:
    """Shared memory under a name, and a child that nothing but SIGKILL to the control group ends."""
    Path("/dev/shm/stand-in-leak").write_bytes(b"x" * LEAKED_BYTES)
    if os.fork() == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ThreadingHTTPServer(("127.0.0.1", port + 1), Handler).serve_forever()


def employ() -> None:
    """A worker that lives as long as a pipe is open; one that ends otherwise takes the server with it."""
    read, write = os.pipe()
    worker = os.fork()
    if worker == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    os.close(read)

    def asked_to_end(number: int, frame: object) -> None:
        threading.Timer(DRAIN_S, os.close, (write,)).start()

    def watch() -> None:
        _, status = os.waitpid(worker, 0)
        if os.WIFSIGNALED(status):
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(0)

    signal.signal(signal.SIGTERM, asked_to_end)
    threading.Thread(target=watch, daemon=True).start()


def first_time() -> bool:
    """True at the first start in this working folder."""
    mark = Path("stand-in-was-here")
    if mark.exists():
        return False
    mark.touch()
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description="a stand-in for an engine, for tests")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--alias", required=True)
    parser.add_argument("--how", choices=WAYS, default="well")
    options = parser.parse_args()
    # The title that `ps` shows: a stand-in says what it is.
    Path("/proc/self/comm").write_text("stand-in", encoding="ascii")
    Handler.how, Handler.alias = options.how, options.alias
    print(f"stand-in, no engine: {options.how}", flush=True)
    if options.how == "crash-loop":
        sys.exit("CUDA error: an illegal memory access was encountered (a stand-in says so)")
    if options.how == "slow-start":
        time.sleep(SLOW_START_S)
    if options.how == "leaks-shm":
        leak(options.port)
    if options.how == "has-a-worker":
        employ()
    if options.how == "ignores-term":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if options.how == "exits-0" and first_time():
        threading.Timer(5.0, os._exit, (0,)).start()
    if options.how == "floods":
        threading.Thread(target=flood, daemon=True).start()
    print("stand-in: model loaded", flush=True)
    ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()


def flood() -> None:
    """Numbered lines, as fast as the log takes them."""
    for number in range(FLOOD_LINES):
        print(f"flood {number}", flush=True)


if __name__ == "__main__":
    main()
