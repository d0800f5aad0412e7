"""A server that stands in for sglang or vLLM on a twin: the real command line, log lines and metric names,
and words out of a list instead of a model.

It refuses what the real version refuses: flags and values by the version's own table, and a few combinations
that were seen to fail. It says what it is in its process name, its first log line and its metrics page.
Standard library only.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any

from bringup_stand_in import ENGINE, VERSION

WORDS = "a stand in says what it is and answers in plain words so that a plan can be tried before a node is".split()
LOAD_S = 1.0
"""Seconds that loading takes, in all."""

STEP_TOKENS = 3
"""Tokens that a verification step yields where drafts are accepted."""

TOKEN_S = 0.002
DRAIN_LIMIT_S = 30.0
LOG_EVERY_S = 10.0
LISTEN_QUEUE = 256
EXIT_PORT = 3
DEFAULT_TOKENS = 64
KV_TOKENS = 262_144
PR_SET_NAME, PR_SET_PDEATHSIG = 15, 1
MIB_OF_A_GPU = 120_000

Options = dict[str, Any]


# --- the command line ---------------------------------------------------------------------------------------


def table() -> dict[str, Any]:
    """The version's flags, as its own parser has them."""
    text = resources.files("bringup_stand_in").joinpath("flags.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def parser(flags: dict[str, Any]) -> argparse.ArgumentParser:
    """A parser with the version's flags: it refuses, in argparse's words, what the real one refuses."""
    made = argparse.ArgumentParser(
        prog=f"{ENGINE} serve", allow_abbrev=bool(flags["prefixes"]), add_help=False, argument_default=None
    )
    for flag in flags["flags"]:
        made.add_argument(*flag["names"], **_argument(flag))
        for name in flag.get("negatives", ()):
            made.add_argument(name, dest=flag["dest"], action="store_false", default=None)
    if ENGINE == "vllm":
        made.add_argument("model_tag", nargs="?")
    return made


def _argument(flag: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {"dest": flag["dest"], "default": flag.get("default")}
    if flag.get("nargs") == 0:
        return {**made, "action": "store_true"}
    kinds: dict[str, Callable[[str], Any]] = {"int": int, "float": float}
    made["type"] = kinds.get(flag.get("kind", "str"), str)
    if flag.get("nargs") is not None:
        made["nargs"] = flag["nargs"]
    if flag.get("choices") and not flag.get("open_choices"):
        made["choices"] = [value for value in flag["choices"] if value is not None]
        made["metavar"] = flag["dest"].upper()
    return {**made, "required": bool(flag.get("required"))}


def spelled(words: Sequence[str], flags: dict[str, Any]) -> list[str]:
    """The words as the engine's own parser sees them: underscores in flags, and `--config.key value`."""
    made = []
    skip = False
    for number, word in enumerate(words):
        if skip:
            skip = False
            continue
        name, equals, value = word.partition("=")
        if name.startswith("--") and flags["underscores"]:
            name = name.replace("_", "-")
        if name.startswith("--") and "." in name and flags["dotted"]:
            # A key of a JSON flag: the value follows, and the whole is merged, which no answer depends on.
            skip = not equals and number + 1 < len(words)
            continue
        made.append(name + equals + value)
    return made


class Fatal(Exception):
    """The engine ends: what it writes, and how (a number, or "killed" as sglang ends itself)."""

    def __init__(self, text: str, code: int | str = 1) -> None:
        super().__init__(text)
        self.code = code


def refuse(given: Options) -> None:
    """What was seen to fail after parsing. Raises Fatal in the engine's own words."""
    steps, topk = given.get("speculative_num_steps"), given.get("speculative_eagle_topk")
    if ENGINE == "sglang" and steps is not None and topk is None:
        raise Fatal("TypeError: '>' not supported between instances of 'NoneType' and 'int'")
    if ENGINE == "sglang" and str(given.get("kv_cache_dtype")) == "fp8_e5m2":
        raise Fatal("AssertionError: DeepSeek DSA only supports bf16/bfloat16 or fp8_e4m3 kv_cache_dtype")
    if ENGINE == "sglang" and given.get("enable_single_batch_overlap") and _version() >= (0, 5, 13):
        raise Fatal(
            "ValueError: SBO (single batch overlap) is not supported on SM90 GPUs with latest sgl-deep-gemm wheel.",
            "killed",
        )


def _version() -> tuple[int, ...]:
    return tuple(int(part) for part in VERSION.split(".")[:3])


def check_model(folder: str) -> dict[str, Any]:
    """config.json of the model. Raises Fatal when there is none, as the real loaders do."""
    path = Path(folder)
    if path.suffix == ".gguf" and path.is_file():
        return {"architectures": ["gguf"]}
    try:
        config: dict[str, Any] = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Fatal(f"OSError: {folder} does not appear to have a file named config.json: {error}") from None
    index = path / "model.safetensors.index.json"
    if index.is_file():
        for shard in sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())):
            if not (path / shard).is_file():
                raise Fatal(f"FileNotFoundError: No such file or directory: {path / shard}")
    return config


# --- logs ---------------------------------------------------------------------------------------------------


def say(text: str) -> None:
    """A line as the engine writes it."""
    now = time.localtime()
    if ENGINE == "vllm":
        line = f"(APIServer pid={os.getpid()}) INFO {time.strftime('%m-%d %H:%M:%S', now)} [stand_in.py:1] {text}"
    else:
        line = f"[{time.strftime('%Y-%m-%d %H:%M:%S', now)}] {text}"
    print(line, flush=True)


def load(given: Options, config: dict[str, Any]) -> None:
    """Takes its time, and writes what the real engine writes while it loads."""
    kind = (config.get("architectures") or ["unknown"])[0]
    tokens = context(given, config)
    steps = list((vllm_lines if ENGINE == "vllm" else sglang_lines)(given, kind, tokens))
    for line in steps:
        say(line)
        time.sleep(LOAD_S / len(steps))


def sglang_lines(given: Options, kind: str, tokens: int) -> Iterator[str]:
    """Lines of sglang 0.5, without ranks."""
    yield f"server_args=ServerArgs(model_path='{given.get('model_path')}', port={given.get('port')}) # stand-in"
    yield "Init torch distributed begin."
    yield "Init torch distributed ends. elapsed=0.01 s, mem usage=0.00 GB"
    yield "Load weight begin. avail mem=138.00 GB"
    yield f"Load weight end. elapsed=0.10 s, type={kind}, quant=fp8, fmt=e4m3, avail mem=60.00 GB, mem usage=78.00 GB."
    yield f"KV Cache is allocated. dtype: torch.bfloat16, #tokens: {KV_TOKENS}, KV size: 40.00 GB"
    yield "Memory pool end. avail mem=20.00 GB"
    if not (given.get("disable_cuda_graph") or given.get("disable_cuda_graphs")):
        yield "Capture cuda graph begin. This can take up to several minutes. avail mem=20.00 GB"
        yield "Capture cuda graph end. elapsed=0.10 s, mem usage=0.20 GB, avail mem=19.80 GB."
        yield "Capture target verify CUDA graph end. elapsed=0.10 s, mem usage=0.22 GB, avail mem=19.60 GB."
    yield f"max_total_num_tokens={KV_TOKENS}, context_len={tokens}, available_gpu_mem=19.60 GB"


def vllm_lines(given: Options, kind: str, tokens: int) -> Iterator[str]:
    """Lines of vLLM's V1 engine."""
    yield f"version {VERSION} (stand-in)"
    yield f"Resolved architecture: {kind}"
    yield f"Using max model len {tokens}"
    yield "Loading weights took 0.10 seconds"
    yield "Model loading took 78.00 GiB memory and 0.20 seconds"
    yield "Available KV cache memory: 40.00 GiB"
    yield f"GPU KV cache size: {KV_TOKENS:,} tokens, Maximum concurrency for {tokens:,} tokens per request: 8.00x"
    if not given.get("enforce_eager"):
        yield "Graph capturing finished in 1 secs, took 0.50 GiB"
    yield "init engine (profile, create kv cache, warmup model) took 0.50 s"


def context(given: Options, config: dict[str, Any]) -> int:
    """Tokens that a request may have: as told, else as the model says."""
    told = _number(given.get("context_length") or given.get("max_model_len"))
    return int(told or config.get("max_position_embeddings") or 131_072)


def _number(value: Any) -> float:
    """A number of the command line, also "128k" and "auto" (0)."""
    text = str(value or "").strip()
    factors = {"k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2}
    try:
        return float(text[:-1]) * factors[text[-1]] if text and text[-1] in factors else float(text or 0)
    except ValueError:
        return 0.0


# --- state and metrics --------------------------------------------------------------------------------------


class State:
    """What the server counts; every change under the lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.running = 0
        self.prompt_tokens = 0
        self.generated = 0
        self.requests = 0
        self.rate = 0.0
        self.ready = threading.Event()
        self.stopping = threading.Event()

    def step_tokens(self) -> int:
        """Tokens that a step yields: 1 on a twin whose drafts are thrown away, as by a layer of wrong weights."""
        return 1 if _hardware().get("drafts_thrown_away") else STEP_TOKENS

    def enter(self, prompt: int) -> None:
        """A request begins."""
        with self.lock:
            self.running += 1
            self.requests += 1
            self.prompt_tokens += prompt
            running = self.running
        if ENGINE == "sglang":
            say(
                f"Prefill batch, #new-seq: 1, #new-token: {prompt}, #cached-token: 0, token usage: 0.00, "
                f"#running-req: {running - 1}, #queue-req: 0, #pending-token: 0, cuda graph: False, "
                f"input throughput (token/s): {prompt / TOKEN_S / 16:.2f}"
            )

    def leave(self, tokens: int, seconds: float) -> None:
        """A request ends."""
        with self.lock:
            running = self.running
            self.running -= 1
            self.generated += tokens
            self.rate = tokens / seconds if seconds else 0.0
        if ENGINE == "sglang":
            length = self.step_tokens()
            say(
                f"Decode batch, #running-req: {running}, #token: {tokens}, token usage: 0.00, "
                f"accept len: {length:.2f}, accept rate: {(length - 1) / STEP_TOKENS:.2f}, cuda graph: True, "
                f"gen throughput (token/s): {self.rate:.2f}, #queue-req: 0"
            )


def metrics(state: State, model: str) -> str:
    """The page, in the engine's own names."""
    with state.lock:
        values = (state.running, state.prompt_tokens, state.generated, state.requests, state.rate)
    running, prompt, generated, requests, rate = values
    # Each request's first token comes from its prefill.
    length = state.step_tokens()
    drafts = max(0, generated - requests) // length
    if ENGINE == "vllm":
        rows = {
            "vllm:num_requests_running": ("gauge", running),
            "vllm:num_requests_waiting": ("gauge", 0),
            "vllm:kv_cache_usage_perc": ("gauge", 0.0),
            "vllm:prompt_tokens_total": ("counter", prompt),
            "vllm:generation_tokens_total": ("counter", generated),
            "vllm:request_success_total": ("counter", requests),
            "vllm:prefix_cache_queries_total": ("counter", prompt),
            "vllm:prefix_cache_hits_total": ("counter", 0),
            "vllm:spec_decode_num_drafts_total": ("counter", drafts),
            "vllm:spec_decode_num_draft_tokens_total": ("counter", drafts * STEP_TOKENS),
            "vllm:spec_decode_num_accepted_tokens_total": ("counter", drafts * (length - 1)),
        }
        labels = f'{{engine="0",model_name="{model}"}}'
    else:
        rows = {
            "sglang:num_running_reqs": ("gauge", running),
            "sglang:num_queue_reqs": ("gauge", 0),
            "sglang:token_usage": ("gauge", 0.0),
            "sglang:gen_throughput": ("gauge", rate),
            "sglang:cache_hit_rate": ("gauge", 0.0),
            "sglang:spec_accept_length": ("gauge", length),
            "sglang:spec_num_draft_tokens": ("gauge", STEP_TOKENS + 1),
            "sglang:spec_verify_calls_total": ("counter", drafts),
            "sglang:prompt_tokens_total": ("counter", prompt),
            "sglang:generation_tokens_total": ("counter", generated),
            "sglang:cached_tokens_total": ("counter", 0),
            "sglang:num_requests_total": ("counter", requests),
        }
        labels = f'{{engine_type="unified",model_name="{model}"}}'
    lines = [
        f"# bringup twin: stand-in of {ENGINE} {VERSION}, no GPU and no model",
        "# TYPE bringup_stand_in gauge",
    ]
    lines.append(f'bringup_stand_in{{engine="{ENGINE}",version="{VERSION}"}} 1')
    for name, (kind, value) in rows.items():
        lines += [f"# HELP {name} stand-in", f"# TYPE {name} {kind}", f"{name}{labels} {float(value)}"]
    return "\n".join(lines) + "\n"


# --- HTTP ---------------------------------------------------------------------------------------------------


class Handler(BaseHTTPRequestHandler):
    """The OpenAI API, as far as clients of ours and load generators use it."""

    protocol_version = "HTTP/1.1"
    server_version = "bringup-stand-in"
    state: State
    served: list[str]
    context: int
    key: str | None

    def log_message(self, format: str, *args: Any) -> None:
        """Access lines as uvicorn writes them."""
        if self.path not in ("/health", "/metrics"):
            print(
                f'INFO:     {self.client_address[0]}:{self.client_address[1]} - "{self.requestline}" {args[1]} OK',
                flush=True,
            )

    def do_GET(self) -> None:
        """Health, models, metrics and information."""
        if self.path == "/health":
            self._text(200 if self.state.ready.is_set() else 503, "")
        elif self.path == "/metrics":
            self._text(200, metrics(self.state, self.served[0]))
        elif not self._allowed():
            return
        elif self.path == "/v1/models":
            rows = [
                {
                    "id": name,
                    "object": "model",
                    "owned_by": "stand-in",
                    "root": name,
                    "max_model_len": self.context,
                }
                for name in self.served
            ]
            self._json(200, {"object": "list", "data": rows})
        elif self.path in ("/server_info", "/get_server_info", "/version", "/model_info"):
            self._json(200, {"version": VERSION, "stand_in": True, "model_path": self.served[0]})
        else:
            self._json(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        """Completions."""
        length = int(self.headers.get("Content-Length") or 0)
        raw = self.rfile.read(length)
        if not self._allowed():
            return
        if self.path not in ("/v1/chat/completions", "/v1/completions"):
            self._json(404, {"detail": "Not Found"})
            return
        try:
            body = json.loads(raw)
        except ValueError:
            self._json(400, {"error": {"message": "no JSON", "type": "BadRequestError", "code": 400}})
            return
        if body.get("model") and body["model"] not in self.served:
            message = f"The model `{body['model']}` does not exist."
            self._json(404, {"error": {"message": message, "type": "NotFoundError", "code": 404}})
            return
        self._complete(body, chat=self.path.endswith("chat/completions"))

    def _complete(self, body: dict[str, Any], chat: bool) -> None:
        said = (
            " ".join(str(part.get("content", "")) for part in body["messages"])
            if chat
            else str(body.get("prompt", ""))
        )
        prompt = max(1, len(said.split()))
        tokens = int(body.get("max_tokens") or body.get("max_completion_tokens") or DEFAULT_TOKENS)
        if prompt + tokens > self.context:
            message = f"This model's maximum context length is {self.context} tokens."
            self._json(400, {"error": {"message": message, "type": "BadRequestError", "code": 400}})
            return
        self.state.enter(prompt)
        started = time.monotonic()
        done = 0
        try:
            usage = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
            words = [f"{'' if number == 0 else ' '}{WORDS[number % len(WORDS)]}" for number in range(tokens)]
            if body.get("stream"):
                done = self._stream(body, words, usage, chat)
            else:
                time.sleep(TOKEN_S * tokens)
                done = tokens
                self._json(
                    200,
                    {
                        **self._head(body, chat, False),
                        "choices": [_choice("".join(words), chat)],
                        "usage": usage,
                    },
                )
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        finally:
            self.state.leave(done, time.monotonic() - started)

    def _head(self, body: dict[str, Any], chat: bool, chunk: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if chat else "text_completion"
        return {
            "id": f"stand-in-{time.monotonic_ns()}",
            "object": kind,
            "created": int(time.time()),
            "model": body.get("model") or self.served[0],
            "system_fingerprint": "bringup-stand-in",
        }

    def _stream(self, body: dict[str, Any], words: list[str], usage: dict[str, int], chat: bool) -> int:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        head = self._head(body, chat, True)
        for number, word in enumerate(words):
            time.sleep(TOKEN_S)
            end = "length" if number == len(words) - 1 else None
            part = {"index": 0, "delta": {"content": word}} if chat else {"index": 0, "text": word}
            self._event({**head, "choices": [{**part, "finish_reason": end}]})
        if (body.get("stream_options") or {}).get("include_usage"):
            self._event({**head, "choices": [], "usage": usage})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")
        return len(words)

    def _event(self, value: Any) -> None:
        self._chunk(b"data: " + json.dumps(value).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        self.wfile.flush()

    def _allowed(self) -> bool:
        if self.key and self.headers.get("Authorization") != f"Bearer {self.key}":
            self._json(401, {"error": "Unauthorized"})
            return False
        return True

    def _json(self, code: int, value: Any) -> None:
        self._text(code, json.dumps(value), "application/json")

    def _text(self, code: int, text: str, kind: str = "text/plain; charset=utf-8") -> None:
        raw = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


def _choice(text: str, chat: bool) -> dict[str, Any]:
    part = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    return {"index": 0, **part, "finish_reason": "length"}


class Server(ThreadingHTTPServer):
    """Many requests at once; none keeps the process alive."""

    daemon_threads = True
    request_queue_size = LISTEN_QUEUE
    allow_reuse_address = True


# --- processes ----------------------------------------------------------------------------------------------


def child() -> subprocess.Popen[bytes]:
    """The process that a real engine would have on its GPUs: its title says which ones, and that it is a
    stand-in (the twin's nvidia-smi reads it there). It dies with its parent."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(_gpus())))
    name = "sglang::scheduler" if ENGINE == "sglang" else "VLLM::EngineCore"
    title = f"{name} [stand-in] gpus={visible or '0'} mib={MIB_OF_A_GPU if _gpus() else 0}"

    def die_with_parent() -> None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    return subprocess.Popen([title, "infinity"], executable="/usr/bin/sleep", preexec_fn=die_with_parent)


def _hardware() -> dict[str, Any]:
    """What the twin wears; empty where there is no twin."""
    try:
        path = Path(os.environ.get("TWIN_ROOT", "/"), "var/lib/twin/hardware.json")
        worn: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return worn
    except (OSError, ValueError):
        return {}


def _gpus() -> int:
    try:
        return int(Path("/var/lib/twin/gpu-count").read_text())
    except (OSError, ValueError):
        return 0


def end(error: Fatal) -> int:
    """Ends as the real engine does; sglang's failing children make it kill itself."""
    print(f"Traceback (most recent call last):\n  (stand-in of {ENGINE} {VERSION})\n{error}", flush=True)
    if error.code == "killed":
        say("Received sigquit from a child process. It usually means the child failed.")
        os.kill(os.getpid(), signal.SIGKILL)
    return int(error.code)


def command() -> int:
    """The console script: `sglang serve ...`, `vllm serve ...`."""
    words = sys.argv[1:]
    if words[:1] == ["--version"]:
        print(f"{VERSION} (stand-in)")
        return 0
    return main(words[1:] if words[:1] == ["serve"] else words)


def main(words: Sequence[str]) -> int:
    """Serves until SIGTERM. Returns the exit code."""
    if words[:1] == ["--version"]:
        print(f"bringup stand-in of {ENGINE} {VERSION}")
        return 0
    ctypes.CDLL(None).prctl(PR_SET_NAME, f"standin-{ENGINE}".encode()[:15], 0, 0, 0)
    flags = table()
    given = vars(parser(flags).parse_args(spelled(words, flags)))
    try:
        refuse(given)
        folder = str(given.get("model_path") or given.get("model") or given.get("model_tag"))
        config = check_model(folder)
        return serve(given, config, folder)
    except Fatal as error:
        return end(error)


def serve(given: Options, config: dict[str, Any], folder: str) -> int:
    """Loads, listens, answers, drains."""
    names = given.get("served_model_name") or folder
    served = [names] if isinstance(names, str) else list(names)
    key = given.get("api_key") or os.environ.get("VLLM_API_KEY")
    key = key[0] if isinstance(key, list) else key
    host, port = (
        given.get("host") or "127.0.0.1",
        int(given.get("port") or (30000 if ENGINE == "sglang" else 8000)),
    )
    state = State()
    signal.signal(signal.SIGTERM, lambda *_: state.stopping.set())
    signal.signal(signal.SIGINT, lambda *_: state.stopping.set())
    print(f"bringup twin: stand-in of {ENGINE} {VERSION}; no GPU and no model are here", flush=True)
    helper = child()
    try:
        load(given, config)
        handler = type(
            "Bound",
            (Handler,),
            {"state": state, "served": served, "context": context(given, config), "key": key},
        )
        try:
            server = Server((host, port), handler)
        except OSError as error:
            print(
                f"ERROR:    [Errno {error.errno}] error while attempting to bind on address ('{host}', {port}): "
                f"{error.strerror}",
                flush=True,
            )
            return EXIT_PORT
        threading.Thread(target=server.serve_forever, daemon=True).start()
        state.ready.set()
        if ENGINE == "sglang":
            say("The server is fired up and ready to roll!")
        print("INFO:     Application startup complete.", flush=True)
        print(f"INFO:     Uvicorn running on http://{host}:{port} (Press CTRL+C to quit)", flush=True)
        wait(state)
    finally:
        helper.kill()
        helper.wait()
    return 0


def wait(state: State) -> None:
    """Until told to stop; then until no request is being answered. vLLM writes its speed meanwhile."""
    before = (0, 0)
    while not state.stopping.wait(LOG_EVERY_S):
        if ENGINE == "vllm":
            now = (state.prompt_tokens, state.generated)
            prompt, generated = ((new - old) / LOG_EVERY_S for new, old in zip(now, before, strict=True))
            before = now
            say(
                f"Engine 000: Avg prompt throughput: {prompt:.1f} tokens/s, Avg generation throughput: "
                f"{generated:.1f} tokens/s, Running: {state.running} reqs, Waiting: 0 reqs, "
                "GPU KV cache usage: 0.0%, Prefix cache hit rate: 0.0%"
            )
    say("SIGTERM received. signum=None frame=None. Draining requests and shutting down...")
    until = time.monotonic() + DRAIN_LIMIT_S
    while state.running and time.monotonic() < until:
        time.sleep(0.05)
    say(f"Gracefully exiting... Remaining number of requests {state.running}.")
