"""llama.cpp's own HTTP server, started from the `xllamacpp` package: the program that a unit runs.

    python llama_serve.py --model words.gguf --alias words --host 127.0.0.1 --port 8000

It runs on the node with the standard library and xllamacpp alone. Flags are named as llama-server names them.
The server logs to stderr: for each request one line with "processing task" and one with "stop processing",
both with the request's number ("task 17").
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

EXIT_USAGE = 2
EXIT_PORT = 3
DRAIN_S = 5.0
"""Seconds that requests get to end after SIGTERM."""
DRAIN_POLL_S = 0.1
BUSY = re.compile(r"llamacpp:requests_processing ([0-9.e+]+)")
LOG_LEVEL = 3
"""llama.cpp's level for one line a step of a request (4 adds dozens a request)."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="llama_serve", description=__doc__, allow_abbrev=False)
    made.add_argument("--model", required=True, type=Path, help="GGUF file")
    made.add_argument("--alias", default="", help="model name that clients use")
    made.add_argument("--host", default="127.0.0.1", help="address to listen on")
    made.add_argument("--port", type=int, default=8080, help="port to listen on")
    made.add_argument("--ctx-size", type=int, default=4096, help="tokens of context, shared by the slots")
    made.add_argument("--parallel", type=int, default=4, help="slots: requests served at once")
    made.add_argument("--threads", type=int, default=0, help="threads for computing; 0: as many as CPUs")
    made.add_argument(
        "--threads-http", type=int, default=-1, help="threads for HTTP; -1: the engine's choice"
    )
    made.add_argument(
        "--predict", type=int, default=-1, help="tokens made when a request sets no limit; -1: no limit"
    )
    made.add_argument(
        "--numa", choices=("distribute", "isolate", "numactl"), help="llama.cpp's NUMA strategy"
    )
    made.add_argument("--metrics", action="store_true", help="serve /metrics")
    made.add_argument("--slots", action="store_true", help="serve /slots")
    made.add_argument("--api-key-file", type=Path, help="file with one API key a line")
    made.add_argument("--verbosity", type=int, default=LOG_LEVEL, help="llama.cpp's log level")
    return made


def complaints(options: argparse.Namespace) -> list[str]:
    """What is wrong with the command line, before anything is loaded."""
    found = []
    if not options.model.is_file():
        found.append(f"--model: there is no file {options.model}")
    if not 0 < options.port < 65536:
        found.append(f"--port: {options.port} is not between 1 and 65535")
    for name in ("ctx_size", "parallel"):
        if getattr(options, name) < 1:
            found.append(f"--{name.replace('_', '-')}: must be at least 1")
    if options.api_key_file and not keys(options.api_key_file):
        found.append(f"--api-key-file: {options.api_key_file} cannot be read or holds no key")
    return found


def keys(path: Path) -> list[str]:
    """The API keys of a file, one a line; none when it cannot be read."""
    try:
        return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError):
        return []


def port_taken(host: str, port: int) -> str | None:
    """Why the port cannot be had, or None. The engine itself finds out only after it has loaded the model."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return error.strerror or str(error)
    return None


def parameters(xllamacpp: Any, options: argparse.Namespace) -> Any:
    """The engine's parameters for these options."""
    made = xllamacpp.CommonParams()
    made.model.path = str(options.model)
    if options.alias:
        made.model_alias = {options.alias}
    made.hostnames, made.port = [options.host], options.port
    made.n_ctx, made.n_parallel, made.n_predict = options.ctx_size, options.parallel, options.predict
    made.n_threads_http = options.threads_http
    made.cpuparams.n_threads = options.threads or os.cpu_count() or 1
    made.endpoint_metrics, made.endpoint_slots, made.endpoint_props = options.metrics, options.slots, False
    made.verbosity = options.verbosity
    if options.numa:
        made.numa = getattr(xllamacpp.ggml_numa_strategy, f"GGML_NUMA_STRATEGY_{options.numa.upper()}")
    if options.api_key_file:
        made.api_keys = keys(options.api_key_file)
    return made


def main(arguments: list[str] | None = None) -> int:
    """Serves until SIGTERM or SIGINT. Returns the exit status."""
    options = parser().parse_args(arguments)
    if found := complaints(options):
        print("\n".join(f"llama_serve: {line}" for line in found), file=sys.stderr)
        return EXIT_USAGE
    if reason := port_taken(options.host, options.port):
        print(f"llama_serve: cannot listen on {options.host}:{options.port}: {reason}", file=sys.stderr)
        return EXIT_PORT
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    import xllamacpp

    server = xllamacpp.Server(parameters(xllamacpp, options))
    print(f"llama_serve: listening on {server.listening_address}", file=sys.stderr, flush=True)
    stop.wait()
    print("llama_serve: stopping", file=sys.stderr, flush=True)
    drain(server)
    sys.stderr.flush()
    # Not through the engine's destructor: it waits for ever for a request still being answered (seen).
    os._exit(0)


def drain(server: Any) -> None:
    """Waits until no request is being answered, DRAIN_S at most (without --metrics nobody can know, so
    not at all)."""
    end = time.monotonic() + DRAIN_S
    while time.monotonic() < end:
        busy = BUSY.search(str(server.handle_metrics()))
        if busy is None or float(busy[1]) == 0:
            return
        time.sleep(DRAIN_POLL_S)


if __name__ == "__main__":
    sys.exit(main())
