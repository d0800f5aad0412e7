"""An engine's own benchmark client, run on the node out of the engine's environment, as the sender of a load.

How it is called is data (`bench:` of the engine's catalog entry); what it writes is read here, one process a
run, so that each run has an acceptance of its own. It runs beside the server, without a tunnel and with the
server's own tokenizer. Prompts that must be real text or the same each time are sent by our own client.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from bringup import systemd
from bringup.bench import Request
from bringup.planned import HostPlan, Service

if TYPE_CHECKING:
    from bringup import catalog, fleet, suites

LIMIT_S = 3600.0
MARGIN_S = 60.0
SAID = 300
"""Characters of a failed client's last words that are kept."""
SEEDS = 2**31
"""Seeds are below it; every client takes that many."""
SHORTEST_S = 0.5
"""Of a shorter run it cannot be said how busy the client was: its CPU time is read four times a second."""


class NoResult(Exception):
    """The engine's client gave no result; the text says why."""


@dataclass(frozen=True)
class Sent:
    """One run: the seconds it took, its requests, and the share of one core that the client used meanwhile
    (None: too short a run to say)."""

    wall_s: float
    requests: tuple[Request, ...]
    busy_percent: float | None = None


@dataclass(frozen=True)
class Client:
    """The client of one server. `seed`: another one for each suite that is run, or the second one would send
    what the first has left in the prefix cache."""

    host: fleet.Host
    service: Service
    how: catalog.EngineBench
    folder: str
    seed: int = field(default_factory=lambda: secrets.randbelow(SEEDS))

    @property
    def name(self) -> str:
        """How a result names it."""
        return f"{self.service.engine} {self.service.engine_version} {self.how.name}"

    def run(self, step: suites.Step, number: int) -> Sent:
        """One run of a load. Raises NoResult, and HostUnreachable when the connection is lost."""
        from bringup import beside

        request = {
            "what": "client",
            "service": self.service.name,
            "argv": words(self.how, self.service, self.folder, step, number, self.seed),
            "environment": dict(self.service.environment),
            "key": self.how.key,
            "key_file": systemd.key_file(self.service) or "",
            "user": self.service.user,
            "limit_s": LIMIT_S,
        }
        answer = beside.look(self.host, request, limit_s=LIMIT_S + MARGIN_S)
        if answer.get("code") != 0:
            said = " ".join(str(answer.get("said", "")).split())[-SAID:]
            raise NoResult(f"ended with {answer.get('code')}: {said or 'no words'}")
        return read(str(answer.get("result", "")), answer.get("cpu") or ())


def of(host: fleet.Host, planned: HostPlan, service: Service, engine: catalog.Engine) -> Client | None:
    """The client of a server; None when its engine has none."""
    model = next((one for one in planned.models if one.name == service.model), None)
    if engine.bench is None or model is None:
        return None
    return Client(host, service, engine.bench, model.folder)


def fits(step: suites.Step) -> bool:
    """Whether an engine's client can send this load."""
    return step.prompts == "synthetic" and step.cache == "defeat"


# --- pure --------------------------------------------------------------------------------------------------


def words(
    how: catalog.EngineBench, service: Service, folder: str, step: suites.Step, number: int, seed: int = 0
) -> list[str]:
    """The command line of one run; `{result}` is left for the node to fill in."""
    address = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(service.bind, service.bind)
    values = {
        "prefix": str(PurePosixPath(service.argv[0]).parent.parent),
        "base_url": f"http://{address}:{service.port}",
        "served_name": service.served_name,
        "model": folder,
        "prompt_tokens": step.prompt_tokens,
        "output_tokens": step.output_tokens,
        "requests": step.requests_a_run,
        "concurrent": step.concurrent,
        "rate": step.rate,
        # Another seed is another text: a prefix cache has nothing to answer with.
        "seed": (seed + number + 1 + 1000 * step.prompt_tokens + 10 * step.concurrent) % SEEDS,
    }
    line = [*how.argv, *(how.open if step.rate else how.closed)]
    return [_filled(word, values) for word in line]


def _filled(word: str, values: Mapping[str, Any]) -> str:
    for name, value in values.items():
        word = word.replace("{" + name + "}", str(value))
    return word


def read(text: str, cpu: Sequence[Sequence[float]] = ()) -> Sent:
    """What `vllm bench serve --save-detailed` or `sglang.bench_serving --output-details` wrote. `cpu`: times
    of the node's clock, with the client's CPU seconds until then. Raises NoResult for anything else.

    Both write the seconds in all, and for each request prompt tokens, output tokens, time to the first token,
    the times between those after it, and its error; vLLM also when it began.
    """
    try:
        data = _last_object(text)
        lists = [data[key] for key in ("input_lens", "output_lens", "ttfts", "itls")]
        count = len(lists[0])
        begins = data.get("start_times") or [0.0] * count
        errors = data.get("errors") or [""] * count
        zero = min(begins, default=0.0)
        requests = tuple(
            _request(prompt, output, ttft, itl, began - zero, error)
            for prompt, output, ttft, itl, began, error in zip(*lists, begins, errors, strict=True)
        )
        wall_s = float(data["duration"])
        return Sent(wall_s, requests, busy_percent(cpu, zero or None, wall_s))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise NoResult(f"its result cannot be read: {error!r}") from None


def busy_percent(cpu: Sequence[Sequence[float]], began: float | None, wall_s: float) -> float | None:
    """The share of one core that a client used while it sent; None when it cannot be said. A client that does
    not say when it began is taken to have ended with its load."""
    if len(cpu) < 2 or wall_s < SHORTEST_S:
        return None
    last = float(cpu[-1][0])
    known = began is not None and cpu[0][0] <= began and began + wall_s <= last + 1
    start = began if began is not None and known else last - wall_s
    return round(100 * (_used_at(cpu, start + wall_s) - _used_at(cpu, start)) / wall_s, 1)


def _used_at(cpu: Sequence[Sequence[float]], moment: float) -> float:
    """CPU seconds until a moment, between the two samples around it."""
    for (before, used), (after, more) in pairwise(cpu):
        if moment <= after:
            share = (moment - before) / (after - before) if after > before else 0.0
            return float(used + (more - used) * min(max(share, 0.0), 1.0))
    return float(cpu[-1][1])


def _last_object(text: str) -> Any:
    lines = [line for line in text.splitlines() if line.strip()]
    try:
        return json.loads(text)
    except ValueError:
        return json.loads(lines[-1] if lines else "")


def _request(prompt: int, output: int, ttft: float, itl: list[float], began: float, error: Any) -> Request:
    if error or not output:
        return Request(began, None, began, error=str(error or "no token came")[:SAID])
    return Request(began, began + ttft, began + ttft + sum(itl), int(prompt), int(output))
