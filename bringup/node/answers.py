"""Whether this node's servers answer, once or under load for a while, and whether anything went wrong meanwhile
(module `server_answers`).
"""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from . import common
from .common import NoAnswer, Refusal

PROMPT = "Say one word."
FEW_TOKENS = 4
REQUEST_LIMIT_S = 120.0
LOAD_TOKENS = 64
ERRORS_KEPT = 5
XID = "NVRM: Xid"


class NotAnswering(Exception):
    """What did not answer as it should, one line a server."""


def check(
    names: Iterable[str], *, seconds: float = 0.0, at_once: int = 1, warm: bool = False, locked: bool = False
) -> list[dict[str, Any]]:
    """A row a server: name, requests, tokens, slowest answer in seconds, tokens a second.

    `seconds` 0: one request each; else load for so long, `at_once` requests at a time. `warm`: the warm-up
    set instead. `locked`: a server with a key must refuse who has none. Raises NotAnswering.
    """
    rows, wrong = [], []
    faults = len(gpu_faults())
    for name in names:
        try:
            rows.append(_one(name, seconds, at_once, warm, locked))
        except (NoAnswer, Refusal) as error:
            wrong.append(f"{name}: {error}")
    new = gpu_faults()[faults:]
    wrong += [f"the kernel has reported a GPU fault meanwhile: {line}" for line in new[:ERRORS_KEPT]]
    if wrong:
        raise NotAnswering("\n".join(wrong))
    return rows


def gpu_faults() -> list[str]:
    """The kernel's lines about GPU faults since boot."""
    _, out, _ = common.run(
        ["journalctl", "--dmesg", "--boot", "--grep", XID, "--output=cat", "--quiet", "--no-pager"]
    )
    return out.splitlines()


def _one(name: str, seconds: float, at_once: int, warm: bool, locked: bool) -> dict[str, Any]:
    service = common.load(name)
    key = common.key_of(service)
    unit = f"{service['unit']}.service"
    before = common.unit_state(unit, ("NRestarts", "InvocationID"))
    if locked and key:
        _refuses_strangers(service)
    began = time.monotonic()
    answers = _answers(service, key, seconds, at_once, warm)
    spent = max(time.monotonic() - began, 0.001)
    if seconds and common.unit_state(unit, ("NRestarts", "InvocationID")) != before:
        raise NoAnswer("it was started again under the load")
    tokens = sum(answer.tokens for answer in answers)
    return {
        "service": name,
        "requests": len(answers),
        "tokens": tokens,
        "slowest_s": round(max(answer.seconds for answer in answers), 3),
        "tokens_per_s": round(tokens / spent, 1),
    }


def _answers(
    service: Mapping[str, Any], key: str | None, seconds: float, at_once: int, warm: bool
) -> list[common.Answer]:
    if warm:
        steps = [step for step in service["warm_up"] for _ in range(int(step["concurrent"]))]
        jobs = [
            (words(int(step["prompt_tokens"]), n), int(step["output_tokens"])) for n, step in enumerate(steps)
        ]
        width = max((int(step["concurrent"]) for step in service["warm_up"]), default=1)
    else:
        jobs, width = [(PROMPT, FEW_TOKENS)], at_once
    if not seconds:
        with ThreadPoolExecutor(width) as pool:
            asked = [
                pool.submit(common.ask, service, prompt, tokens, timeout_s=REQUEST_LIMIT_S, key=key)
                for prompt, tokens in jobs or [(PROMPT, FEW_TOKENS)]
            ]
            return [job.result() for job in asked]
    with ThreadPoolExecutor(width) as pool:
        clients = [pool.submit(_client, service, key, number, seconds) for number in range(width)]
        return [answer for client in clients for answer in client.result()]


def _client(service: Mapping[str, Any], key: str | None, number: int, seconds: float) -> list[common.Answer]:
    """One client's answers: prompts of its own, one after the other, until the time is over (at least one), or
    until nobody waits for them any more.
    """
    until, found = time.monotonic() + seconds, list[common.Answer]()
    while not found or (time.monotonic() < until and not abandoned()):
        prompt = words(LOAD_TOKENS, number * 10_000 + len(found))
        found.append(common.ask(service, prompt, LOAD_TOKENS, timeout_s=REQUEST_LIMIT_S, key=key))
    return found


def abandoned(descriptor: int | None = None) -> bool:
    """Has whoever reads this process's output gone: the controller was killed, or its connection lost?"""
    poll = select.poll()
    poll.register(sys.stdout.fileno() if descriptor is None else descriptor, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def words(tokens: int, number: int) -> str:
    """About `tokens` tokens of plain words, unlike every other prompt from the first word on."""
    return " ".join([f"{number}", *(f"w{(number * 31 + at) % 97}" for at in range(max(1, tokens) - 1))])


def _refuses_strangers(service: Mapping[str, Any]) -> None:
    try:
        common.ask(service, PROMPT, FEW_TOKENS, timeout_s=REQUEST_LIMIT_S, key=None)
    except NoAnswer as error:
        if "401" in str(error) or "403" in str(error):
            return
        raise
    raise NoAnswer("it answers without a key")
