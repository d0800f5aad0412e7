"""Log text: what a regular expression must contain, and what a raw line says once it is unwrapped."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

sre: Any = importlib.import_module("re._constants")
sre_parser: Any = importlib.import_module("re._parser")
# The standard library has no public view of a parsed pattern; these two have been there since 3.11.

MIN_ANCHOR = 3
"""Bytes: shorter fixed text is in every log and would make the prefilter useless."""

EDGE = "\0"
"""Stands in a required text where a word must begin or end; no log text has it."""

MAX_LINE = 16_384
"""Characters of one line that are looked at; usage texts and dumped configurations are longer."""

# fmt: off
COMMON = frozenset((
    "error", "fail", "failed", "cuda", "nccl", "nvidia", "driver", "version", "memory", "device", "kernel",
    "model", "cache", "file", "found", "timeout", "server", "info", "warn", "warning", "torch", "rank",
    "worker", "vllm", "sglang", "python", "not_found", "timed", "engine", "process", "unknown", "load",
    "loading", "tokens", "batch", "start", "exit", "token", "gpu", "health", "request", "http",
    "accept", "tensor", "layer", "weight", "usage", "graph", "exception", "number", "size", "port",
    "running", "service", "missing", "host", "hub", "using", "with", "from", "for", "not", "the", "kv",
    "access", "wait", "all", "and", "address", "thread", "time", "run", "local", "name", "line", "set",
    "prefill", "decode", "queue", "chunk", "stream", "expert", "step", "length", "rate", "len", "no",
    "code", "client", "status", "return", "get", "head", "post", "key", "type", "value",
    "too", "to", "is", "it", "in", "on", "of", "or", "by", "be", "do", "an", "as", "at", "are", "was", "but", "out",
    "work", "support", "supported", "need", "require", "required", "installed", "available", "exist", "only", "one",
    "another", "other", "new", "full", "long", "last", "first", "session", "took", "user", "job", "node", "system",
))
# fmt: on
"""Anchors that healthy logs are full of: another literal of the pattern is better."""

_ANSI = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_JOURNAL_BYTES = re.compile(rb'"MESSAGE"\s*:\s*\[([0-9,\s]+)\]')
_PATTERN_BREAKS = frozenset('"\n\r\t')
_WORTHLESS_FIELDS = frozenset({"stream", "time", "timestamp", "ts", "level", "levelname"})

_RANK = (
    re.compile(r"\[rank\s?(\d+)\]|\bRank\s(\d+)\]"),
    re.compile(r"\b((?:DP\d+ )?(?:PP\d+ )?TP\d+(?: EP\d+)?)\b"),
    re.compile(r"\bWorker_((?:DP\d+_)?TP\d+(?:_EP\d+)?)\b|\brank=(\d+)\b"),
    re.compile(r":\d+:\d+ \[(\d+)\] "),
    re.compile(r"\bpid=(\d+)"),
)
_GPU = re.compile(
    r"\b(?:PCI:)?((?:[0-9a-f]{4,8}:)[0-9a-f]{2}:[0-9a-f]{2})\b|\b(GPU-[0-9a-f]{8}-[0-9a-f-]+)|\bGPU\s?#?(\d{1,2})\b",
    re.I,
)


def strip_ansi(chunk: bytes) -> bytes:
    """The chunk without terminal colours, titles and cursor movements."""
    return _ANSI.sub(b"", chunk) if b"\x1b" in chunk else chunk


def decode_journal_bytes(chunk: bytes) -> bytes:
    """journalctl's JSON writes a message with colours as a list of numbers; this makes text of it."""
    if b'"MESSAGE"' not in chunk:
        return chunk
    return _JOURNAL_BYTES.sub(_journal_text, chunk)


def _journal_text(match: re.Match[bytes]) -> bytes:
    numbers = [int(item) for item in match.group(1).split(b",") if item.strip()]
    text = strip_ansi(bytes(number & 255 for number in numbers)).decode("utf-8", "replace")
    return b'"MESSAGE":' + json.dumps(text, ensure_ascii=False).encode()


def records(raw: bytes) -> Iterator[str]:
    """The messages in one physical line: plain text, a JSON object's strings, or escaped line breaks."""
    text = raw.decode("utf-8", "replace").strip()
    if text.startswith("{") and text.endswith("}"):
        parsed = _json(text)
        if parsed is not None:
            for string in _strings(parsed):
                yield from _lines(string)
            return
    if "\\n" in text or '\\"' in text:
        text = text.replace('\\"', '"').replace("\\n", "\n")
        yield from _lines(text)
        return
    yield text[:MAX_LINE]


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _lines(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if line.strip():
            yield line.strip()[:MAX_LINE]


def _strings(value: Any, key: str = "") -> Iterator[str]:
    if isinstance(value, str):
        if key not in _WORTHLESS_FIELDS:
            yield value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _strings(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item, key)


_ECHO = re.compile(
    r"\b(?:ServerArgs|EngineArgs|Namespace)\(|\bnon-default args: "
    r"|\bCommand line: BOOT_IMAGE=|\bKernel command line: "
    r"|^\s*(?:usage: |\[?--[\w-]+(?:[ ,]+(?:\[|\{|[A-Z_]{3,})|\]?\s*$))"
    r"|^(?:TASK|PLAY|RUNNING HANDLER|PLAY RECAP) \[|^(?:ok|changed|skipping): \["
    r"|^(?:Install|Upgrade|Reinstall|Remove|Purge|Commandline|Requested-By): "
    r"|^(?!\w*Tasks)[A-Z][A-Za-z]+=\S*$"
    r"|^\+[^\s+]|^\d{4}-\d\d-\d\d [\d:]{8} (?:install|upgrade|remove|purge|configure|status|trigproc) "
)


def is_echo(line: str) -> bool:
    """Whether the line only repeats settings, a usage, a play's headings, a diff or what dpkg did: no evidence."""
    return _ECHO.search(line) is not None


def rank_of(line: str) -> str | None:
    """Which process of a server wrote the line (`3`, `TP3`, `TP7_EP7`), or None when it does not say."""
    for pattern in _RANK:
        found = pattern.search(line)
        if found:
            return next(group for group in found.groups() if group)
    return None


def gpu_of(line: str) -> str | None:
    """The GPU a line speaks of: PCI address, UUID or index, in lower case."""
    found = _GPU.search(line)
    return next(group for group in found.groups() if group).lower() if found else None


def alternatives(pattern: str) -> list[str]:
    """The pattern split at the bars outside of all brackets."""
    parts = [""]
    depth = 0
    inside_class = False
    letters = iter(pattern)
    for letter in letters:
        if letter == "\\":
            letter += next(letters, "")
        elif inside_class:
            inside_class = letter != "]"
        elif letter == "[":
            inside_class = True
        elif letter in "()":
            depth += 1 if letter == "(" else -1
        elif letter == "|" and not depth:
            parts.append("")
            continue
        parts[-1] += letter
    return parts


def needs_of(pattern: str) -> tuple[frozenset[bytes], ...]:
    """Sets of lower-case texts: every line that the pattern matches has one text of each. The rarest first.

    EDGE at an end of a text says that a word ends there.

    Raises ValueError when the pattern has no fixed text of MIN_ANCHOR bytes, re.error when it is not a regular
    expression. The patterns are matched without regard to case, hence lower case.
    """
    found = _required(sre_parser.parse(pattern, re.IGNORECASE | re.ASCII))
    if not found:
        raise ValueError(f"has no fixed text of {MIN_ANCHOR} letters in every alternative: {pattern}")
    ordered = sorted(dict.fromkeys(found), key=_worth, reverse=True)
    return tuple(frozenset(text.encode() for text in texts) for texts in ordered)


def _required(tree: Iterable[Any], prefix: str = "") -> list[frozenset[str]]:
    """Sets of texts, one of each of which the parsed sequence, after `prefix`, must contain."""
    found: list[frozenset[str]] = []
    run: list[str] = [*prefix]

    def close() -> None:
        found.extend(frozenset({piece}) for piece in _pieces("".join(run)))
        run.clear()

    def walk(nodes: Iterable[Any]) -> None:
        for op, value in nodes:
            if op is sre.LITERAL:
                run.append(chr(value).lower() if value < 128 else chr(value))
            elif op is sre.SUBPATTERN:
                walk(value[3])
            elif op is sre.AT:
                if value is sre.AT_BOUNDARY:
                    run.append(EDGE)
            elif op is sre.BRANCH:
                found.extend(_branches(value[1], "".join(run)))
                close()
            elif op in (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT) and value[0] >= 1:
                close()
                found.extend(_required(value[2]))
            elif op is sre.ATOMIC_GROUP:
                close()
                found.extend(_required(value))
            elif op not in (sre.ASSERT, sre.ASSERT_NOT):
                close()

    walk(tree)
    close()
    return found


def _branches(branches: Iterable[Any], prefix: str) -> list[frozenset[str]]:
    """The union of what each branch after `prefix` requires most, or nothing when one requires nothing.

    The parser takes the letters that all alternatives begin with out of them: they are the prefix.
    """
    union: frozenset[str] = frozenset()
    for branch in branches:
        required = _required(branch, prefix)
        if not required:
            return []
        best: frozenset[str] = max(required, key=_worth)
        union |= best
    return [union]


def _pieces(text: str) -> Iterator[str]:
    """Runs of the text that JSON and shells do not escape."""
    piece: list[str] = []
    for letter in [*text, "\n"]:
        if letter in _PATTERN_BREAKS:
            joined = "".join(piece)
            inner = joined.strip(EDGE).replace(EDGE, "")
            if len(inner.strip().encode()) >= MIN_ANCHOR:
                before = EDGE if joined.startswith(EDGE) else ""
                after = EDGE if joined.endswith(EDGE) else ""
                yield f"{before}{inner}{after}"
            piece.clear()
        else:
            piece.append(letter)


def _worth(texts: frozenset[str]) -> tuple[float, int]:
    """A set is as good as its worst member; long and uncommon is good, few is better."""
    return min(_rarity(text) for text in texts), -len(texts)


def _rarity(text: str) -> float:
    """How seldom the text is in a log: the letters of its words beside those of common words, and its signs. Numbers
    are everywhere.
    """
    words = re.findall(r"(?=[0-9]*[a-z])[a-z0-9]{2,}|[^\x00-\x7f]+", text)
    uncommon = sum(len(word) for word in words if word.rstrip("s") not in COMMON and word not in COMMON)
    signs = len(re.findall(r"[^\sa-z0-9\x00\x80-\U0010ffff]", text))
    return min(uncommon, 16) + min(signs, 2) + text.count(EDGE) / 2 + min(len(text), 32) / 128
