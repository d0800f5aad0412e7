"""What the programs on a node share: the service's description, one request, metrics, systemd's answers.

Standard library only, Python 3.9 and up: it runs under the node's own interpreter, before anything is
installed.
"""

from __future__ import annotations

import calendar
import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SERVICES = Path("/etc/bringup/services")
STARTS = Path("/var/lib/bringup/starts")
RUN = Path("/run/bringup")
DRAINING = RUN / "draining"
PROC = Path("/proc")
RESPONSE_BYTES = 8 * 1024 * 1024
COMMAND_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 5.0
CLOCK_STEP_S = 1.0
"""A process's start is only known to the kernel's clock tick, and records have milliseconds."""


class Refusal(Exception):
    """Something that must not go on; the text says what, and what to do. `name` is stable for programs."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        super().__init__(text)


class NoAnswer(Exception):
    """The server gave no (right) answer; the text says why."""


@dataclass(frozen=True)
class Answer:
    """One completion: its text, the model's name as the server gives it, output tokens (>= 1), seconds."""

    text: str
    model: str
    tokens: int
    seconds: float


def say(text: str) -> None:
    """One line to the journal or the service's log."""
    print(f"bringup: {text}", file=sys.stderr, flush=True)


def load(name: str, folder: Path | None = None) -> dict[str, Any]:
    """The description of service `name` (JSON written by the role). Raises Refusal when there is none."""
    path = (folder or SERVICES) / f"{name}.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Refusal("unknown-service", f"no service {name} on this node ({path} is missing)") from None
    except (OSError, ValueError) as error:
        raise Refusal(
            "bad-description", f"{path} cannot be read: {error}. Provision this node again"
        ) from None
    if not isinstance(data, dict):
        raise Refusal("bad-description", f"{path} is no mapping. Provision this node again")
    return data


def read_json(path: Path) -> dict[str, Any]:
    """A JSON mapping from a file; empty when it is missing or not readable as one."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def write_json(path: Path, data: Mapping[str, Any], mode: int = 0o644) -> None:
    """Write beside, flush to disk, rename: a reader sees the old or the new, never half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(data, file, ensure_ascii=False, indent=1, sort_keys=True)
            file.write("\n")
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        Path(beside).replace(path)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise


def utc(seconds: float | None = None) -> str:
    """ISO time in UTC with milliseconds: `2026-11-29T23:11:17.042Z`."""
    now = time.time() if seconds is None else seconds
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now * 1000) % 1000:03d}Z"


def seconds_of(text: str) -> float:
    """Seconds since 1970 of a time as `utc` writes it; 0.0 when it is none."""
    try:
        whole, _, rest = text.rstrip("Z").partition(".")
        return calendar.timegm(time.strptime(whole, "%Y-%m-%dT%H:%M:%S")) + float(f"0.{rest or 0}")
    except ValueError:
        return 0.0


def run(command: list[str], timeout_s: float = COMMAND_TIMEOUT_S, stdin: str = "") -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command; 127 when it is not there, 124 when it took too long."""
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=timeout_s, check=False, input=stdin.encode()
        )
    except (FileNotFoundError, PermissionError) as error:
        return 127, "", str(error)
    except subprocess.TimeoutExpired:
        return 124, "", f"{command[0]} took longer than {timeout_s:g} s"
    return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")


def unit_state(unit: str, properties: Iterable[str]) -> dict[str, str]:
    """Properties of a unit as systemd gives them (`unit` with its suffix); missing ones are empty."""
    names = list(properties)
    _, out, _ = run(["systemctl", "show", unit, "--property", ",".join(names)])
    found = dict(line.split("=", 1) for line in out.splitlines() if "=" in line)
    return {name: found.get(name, "") for name in names}


def why_not_started(unit: str, since: float) -> str:
    """Why a start of `unit` (without its suffix) since then (seconds since 1970) came to nothing, as its check or its
    gate has kept it; empty when neither has: what is kept may be of an earlier start.
    """
    kept = read_json(STARTS / f"{unit}.json")
    return str(kept.get("why") or "") if seconds_of(str(kept.get("at"))) >= since - CLOCK_STEP_S else ""


def journal_of(service: Mapping[str, Any]) -> list[str]:
    """`journalctl` for what a server in journal mode has logged: a journal of its own, without what journald
    says of itself.
    """
    namespace = service.get("log_namespace") or service["unit"]
    chosen = [f"--namespace={namespace}", f"--identifier={service['unit']}"]
    return ["journalctl", *chosen, "--no-pager", "--quiet"]


def drained(name: str, folder: Path | None = None) -> bool:
    """Is a service out of rotation? Its mark is a file, with the seconds since boot at which it ends by itself
    in it; an empty one ends when somebody takes it away.
    """
    try:
        until = ((folder or DRAINING) / name).read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return False
    return not until or time.clock_gettime(time.CLOCK_BOOTTIME) < float(until)


def request(
    service: Mapping[str, Any],
    method: str,
    path: str,
    body: Mapping[str, Any] | None = None,
    *,
    timeout_s: float,
    key: str | None = None,
) -> tuple[int, bytes]:
    """One HTTP request to the service itself, never through a proxy. Raises NoAnswer."""
    limit = max(0.1, timeout_s)
    connection = http.client.HTTPConnection(
        service["address"], int(service["port"]), timeout=min(limit, CONNECT_TIMEOUT_S)
    )
    headers = {"Connection": "close"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    payload = None
    if body is not None:
        payload = json.dumps(body).encode()
        headers["Content-Type"] = "application/json"
    try:
        connection.connect()
        if connection.sock is not None:
            connection.sock.settimeout(limit)
        connection.request(method, path, payload, headers)
        response = connection.getresponse()
        return response.status, response.read(RESPONSE_BYTES)
    except TimeoutError:
        raise NoAnswer(f"{method} {path}: nothing within {limit:.0f} s") from None
    except ConnectionRefusedError:
        raise NoAnswer(f"{method} {path}: nothing listens on port {service['port']}") from None
    except (OSError, http.client.HTTPException) as error:
        raise NoAnswer(f"{method} {path}: {str(error) or type(error).__name__}") from None
    finally:
        connection.close()


def json_answer(
    service: Mapping[str, Any],
    method: str,
    path: str,
    body: Mapping[str, Any] | None = None,
    *,
    timeout_s: float,
    key: str | None = None,
) -> dict[str, Any]:
    """The JSON mapping that a request with status 200 gives. Raises NoAnswer with status and first bytes
    otherwise.
    """
    status, content = request(service, method, path, body, timeout_s=timeout_s, key=key)
    if status != 200:
        raise NoAnswer(
            f"{method} {path}: status {status}, {content[:160].decode(errors='replace').strip()!r}"
        )
    try:
        data = json.loads(content)
    except ValueError:
        raise NoAnswer(f"{method} {path}: not JSON: {content[:80].decode(errors='replace')!r}") from None
    if not isinstance(data, dict):
        raise NoAnswer(f"{method} {path}: JSON, but no mapping")
    return data


def models(service: Mapping[str, Any], *, timeout_s: float, key: str | None = None) -> list[dict[str, Any]]:
    """The models that the server says it has."""
    data = json_answer(service, "GET", service["endpoints"]["models"], timeout_s=timeout_s, key=key)
    listed = data.get("data")
    return [item for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []


def ask(
    service: Mapping[str, Any],
    prompt: str,
    output_tokens: int,
    *,
    timeout_s: float,
    key: str | None = None,
    more: Mapping[str, Any] | None = None,
) -> Answer:
    """One chat completion with at least one real token; `more`: other fields of the request. Raises NoAnswer.

    Reasoning models may put all their tokens into `reasoning_content`: those count as well.
    """
    started = time.monotonic()
    body = {
        "model": service["served_name"],
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": output_tokens,
        "temperature": 0,
        "stream": False,
        **(more or {}),
    }
    data = json_answer(service, "POST", service["endpoints"]["chat"], body, timeout_s=timeout_s, key=key)
    text = answer_text(data)
    usage = data.get("usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    count = tokens if isinstance(tokens, int) else (1 if text else 0)
    if count < 1:
        raise NoAnswer("the answer holds no token")
    return Answer(text, str(data.get("model", "")), count, time.monotonic() - started)


def answer_text(data: Mapping[str, Any]) -> str:
    """The text of a chat completion: content, else what the model thought aloud."""
    choices = data.get("choices")
    message = (
        choices[0].get("message")
        if isinstance(choices, list) and choices and isinstance(choices[0], dict)
        else None
    )
    if not isinstance(message, dict):
        return ""
    for name in ("content", "reasoning_content", "reasoning"):
        if isinstance(message.get(name), str) and message[name]:
            return str(message[name])
    return ""


def key_of(service: Mapping[str, Any]) -> str | None:
    """The service's API key: from the unit's credentials, else (as root) from the file itself; None: it has
    none.
    """
    source = service.get("key_file")
    if not source:
        return None
    folder = os.environ.get("CREDENTIALS_DIRECTORY")
    for path in ([Path(folder) / "api_key"] if folder else []) + [Path(source)]:
        try:
            return path.read_text(encoding="utf-8").strip()
        except OSError:
            continue
    raise Refusal(
        "no-key", f"the API key {source} cannot be read. Set the vault variable and provision again"
    )


_SAMPLE = re.compile(r"^([A-Za-z_:][A-Za-z0-9_:]*)(?:\{.*\})?\s+(\S+)", re.MULTILINE)


AVERAGED = frozenset({"kv_usage", "cache_hit_rate", "accept_length", "draft_tokens"})
"""Our names whose samples (one for each rank or engine) are averaged; of all others they are added up."""


def parse_metrics(text: str, averaged: Collection[str] = ()) -> dict[str, float]:
    """Metric name -> sum over its label sets (`averaged`: their mean), from the Prometheus text format."""
    totals: dict[str, float] = {}
    counts: dict[str, int] = {}
    for name, value in _SAMPLE.findall(text):
        try:
            number = float(value)
        except ValueError:
            continue
        if number == number:
            totals[name] = totals.get(name, 0.0) + number
            counts[name] = counts.get(name, 0) + 1
    return {name: total / (counts[name] if name in averaged else 1) for name, total in totals.items()}


def metrics(service: Mapping[str, Any], *, timeout_s: float, key: str | None = None) -> dict[str, float]:
    """The engine's metrics under our names (running, waiting, generation_tokens_total, ...); empty: it has
    none.

    Raises NoAnswer when the engine should have metrics and does not give them.
    """
    path = service["endpoints"].get("metrics")
    if not path:
        return {}
    status, content = request(service, "GET", path, timeout_s=timeout_s, key=key)
    if status != 200:
        raise NoAnswer(f"GET {path}: status {status}")
    names = service.get("metrics_names", {})
    averaged = {theirs for ours, theirs in names.items() if ours in AVERAGED}
    raw = parse_metrics(content.decode(errors="replace"), averaged)
    return {ours: raw[theirs] for ours, theirs in names.items() if theirs in raw}


ESTABLISHED, LISTENING = "01", "0A"


def sockets(
    port: int, state: str, tables: Iterable[Path] = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
) -> list[int]:
    """Inodes of TCP sockets on this node whose local port is `port`, in a state of the kernel's table."""
    found: list[int] = []
    for table in tables:
        try:
            rows = table.read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            fields = row.split()
            if len(fields) > 9 and fields[3] == state and int(fields[1].rsplit(":", 1)[1], 16) == port:
                found.append(int(fields[9]))
    return found


def in_flight(
    service: Mapping[str, Any], *, timeout_s: float = CONNECT_TIMEOUT_S, key: str | None = None
) -> int:
    """Requests running and waiting, from the engine's metrics, else open connections to its port."""
    try:
        found = metrics(service, timeout_s=timeout_s, key=key)
    except NoAnswer:
        found = {}
    known = [found[name] for name in ("running", "waiting") if name in found]
    if known:
        return int(sum(known))
    return len(sockets(int(service["port"]), ESTABLISHED))


def processes() -> list[int]:
    """All process ids of this node."""
    return sorted(int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit())


def command_line(pid: int) -> str:
    """The command of a process, cut to 120 characters; `?` when it is gone or hidden."""
    try:
        words = (PROC / str(pid) / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return "?"
    return b" ".join(words).decode(errors="replace")[:120] or "?"


def open_files(pid: int) -> set[str]:
    """What a process has open, as the kernel names it (`/path`, `socket:[123]`); empty when it may not be
    seen.
    """
    found: set[str] = set()
    try:
        for entry in (PROC / str(pid) / "fd").iterdir():
            with suppress(OSError):
                found.add(str(entry.readlink()))
    except OSError:
        return found
    return found


def holders(inodes: Iterable[int]) -> list[int]:
    """Processes that have one of these socket inodes open (those that this user may look into)."""
    wanted = {f"socket:[{inode}]" for inode in inodes}
    return [pid for pid in processes() if open_files(pid) & wanted] if wanted else []


def unit_of(pid: int) -> str:
    """The systemd unit whose control group a process lies in; empty: none."""
    try:
        text = (PROC / str(pid) / "cgroup").read_text(encoding="utf-8")
    except OSError:
        return ""
    found: list[str] = re.findall(r"([^/\n]+\.(?:service|scope))(?=/|\n|$)", text)
    return found[-1].replace("\\x2d", "-") if found else ""


def gpu_holders(gpus: Iterable[int]) -> list[tuple[int, int]]:
    """(gpu index, pid) of processes that compute on these GPUs, asked from nvidia-smi; empty without it."""
    wanted = set(gpus)
    code, out, _ = run(["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"])
    if code != 0 or not wanted:
        return []
    index = {
        parts[1].strip(): int(parts[0])
        for parts in (row.split(",") for row in out.splitlines())
        if len(parts) == 2
    }
    _, out, _ = run(["nvidia-smi", "--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader"])
    pairs = [row.split(",") for row in out.splitlines()]
    return sorted(
        (index[parts[0].strip()], int(parts[1]))
        for parts in pairs
        if len(parts) == 2 and parts[1].strip().isdigit() and index.get(parts[0].strip(), -1) in wanted
    )


def gpu_memory(gpus: Iterable[int], nodes: Path = Path("/sys/devices/system/node")) -> dict[int, int]:
    """GPU index -> MiB in use, asked from nvidia-smi; empty without it, and where GPU memory is memory of the system
    too (NUMA nodes without CPUs): there the kernel keeps its cache of files in it.
    """
    try:
        both = [(nodes / name).read_text(encoding="ascii").strip() for name in ("has_memory", "has_cpu")]
    except OSError:
        both = ["", ""]
    code, out, _ = run(["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits"])
    if code != 0 or both[0] != both[1]:
        return {}
    wanted, rows = set(gpus), [row.split(",") for row in out.splitlines()]
    pairs = {int(row[0]): int(row[1]) for row in rows if len(row) == 2 and row[1].strip().isdigit()}
    return {gpu: used for gpu, used in pairs.items() if gpu in wanted}
