"""Does a server that drafts accept what it drafts? Asked once after its warm-up, of its own counters.

A server whose draft layer is missing, wrongly quantised or another model's starts, answers health with 200 and rightly,
and only its speed says that every draft is thrown away (on a real H200 271 instead of 724 tokens a second, and no line
in its log). So it is made to write enough, and the tokens that a verification step yields are counted.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from bringup.node import common
from bringup.node.common import NoAnswer

LOW, UNKNOWN = "ACCEPT_LOW", "ACCEPT_UNKNOWN"

TOKENS = 256
"""Tokens of one answer. Gauges are renewed every 40 steps (SGLang), which take 200 tokens at five tokens a step."""

LEAST_DRAFTS = 24
"""Verification steps below which a figure says nothing; more is asked for then."""

PROMPTS = (
    "Count from one to one hundred in words, one number after the other.",
    "Write the alphabet, one letter a line, then again from the end to the beginning.",
    "Explain in plain words how a bicycle is built and how its parts work together.",
)
"""Plain text that any draft guesses now and then; each is sent when the ones before made too few steps."""

LIMIT_S = 180.0
"""Seconds that all of it may take: 256 tokens at 5 tokens a second are 51."""

SETTLE_S = 5.0
"""How long counters may take to show an answer that has been given: they are gathered by another process."""

POLL_S = 0.25
REQUEST_LIMIT_S = 10.0


def grown(before: Mapping[str, float], after: Mapping[str, float], name: str) -> float | None:
    """What a counter grew by; one that fell (the server was restarted) counts from nought, None: there is none."""
    if name not in after:
        return None
    more = after[name] - before.get(name, 0.0)
    return more if more >= 0 else after[name]


def accept_length(before: Mapping[str, float], after: Mapping[str, float]) -> float | None:
    """Tokens that a verification step yielded between two readings (the model's own counted: 1.0 is nothing accepted),
    from what the engine counts, by our names. None: nothing was drafted, or it does not say.

    Accepted tokens and drafts are exact; so are generated tokens and steps, less each request's first token, which
    the prefill makes. A gauge shows the last log interval only and is taken where there is no counter.
    """
    drafts = grown(before, after, "drafts_total")
    generated = grown(before, after, "generation_tokens_total")
    if drafts:
        accepted = grown(before, after, "accepted_tokens_total")
        if accepted is not None:
            return 1 + accepted / drafts
        by_prefill = grown(before, after, "requests_total") or 0.0
        return (generated - by_prefill) / drafts if generated else None
    if generated and "drafts_total" not in after:
        return after.get("accept_length") or None
    return None


def counted(names: Mapping[str, str]) -> bool:
    """Can an engine with these metrics say what it accepts?"""
    by_steps = "drafts_total" in names and (
        "accepted_tokens_total" in names or "generation_tokens_total" in names
    )
    return by_steps or ("accept_length" in names and "generation_tokens_total" in names)


def check(service: Mapping[str, Any], key: str | None) -> dict[str, Any]:
    """What became of it: `accept_length`, `drafts` and `tokens` that it is from, `at_least`, `code` ("" when all is
    well) and `text` for people. It never raises: whether the start counts is not for it to say."""
    wish = service["drafting"]
    found: dict[str, Any] = {"code": "", "text": "", "at_least": wish["accept_length_at_least"]}
    try:
        length, drafts, tokens = measure(service, key)
    except NoAnswer as error:
        return {**found, "accept_length": None, "code": UNKNOWN, "text": f"not known: {error}"}
    found.update(accept_length=None if length is None else round(length, 3), drafts=drafts, tokens=tokens)
    return {**found, **verdict(length, drafts, tokens, float(wish["accept_length_at_least"]))}


def verdict(length: float | None, drafts: int | None, tokens: int, at_least: float) -> dict[str, str]:
    """`code` and `text` of a measurement; empty when enough is accepted."""
    if length is None:
        said = "it drafts nothing at all" if drafts == 0 else "its metrics do not say what it accepts"
        return {"code": LOW if drafts == 0 else UNKNOWN, "text": f"{said} ({tokens} tokens written)"}
    if length < at_least:
        steps = f" in {drafts} steps" if drafts else ""
        return {
            "code": LOW,
            "text": f"a step yields {length:.2f} tokens{steps}, at least {at_least:g} are expected: what it drafts is "
            "thrown away, and it is slower than without. Look at the draft layer in the model's index (invoke "
            "preflight, invoke models.verify) and its quantisation; invoke diagnose knows mtp-acceptance-zero",
        }
    return {"code": "", "text": ""}


def measure(service: Mapping[str, Any], key: str | None) -> tuple[float | None, int | None, int]:
    """(tokens a step, steps counted or None, tokens written). Raises NoAnswer."""
    until = time.monotonic() + min(LIMIT_S, float(service["start_timeout_s"]))
    before = read(service, key)
    # A prompt has room as well.
    most = min(TOKENS, int(service.get("context_tokens") or TOKENS * 2) // 2)
    tokens, after = 0, before
    for prompt in PROMPTS:
        left = until - time.monotonic()
        if left <= 0:
            break
        answer = common.ask(service, prompt, most, timeout_s=left, key=key, more={"ignore_eos": True})
        tokens += answer.tokens
        after = settled(service, key, before, tokens)
        drafts = grown(before, after, "drafts_total")
        if (drafts or 0) >= LEAST_DRAFTS or (drafts is None and tokens >= TOKENS):
            break
    steps = grown(before, after, "drafts_total")
    return accept_length(before, after), None if steps is None else int(steps), tokens


def settled(
    service: Mapping[str, Any], key: str | None, before: Mapping[str, float], tokens: int
) -> dict[str, float]:
    """The counters once they hold what was written, or after SETTLE_S."""
    until = time.monotonic() + SETTLE_S
    while True:
        after = read(service, key)
        if (grown(before, after, "generation_tokens_total") or 0) >= tokens or time.monotonic() >= until:
            return after
        time.sleep(POLL_S)


def read(service: Mapping[str, Any], key: str | None) -> dict[str, float]:
    """The engine's metrics by our names. Raises NoAnswer."""
    return common.metrics(service, timeout_s=REQUEST_LIMIT_S, key=key)
