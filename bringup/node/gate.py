"""`gate.py NAME`, run by systemd after the engine's process is there: the unit is up only when a real token
is.

It waits, within the service's start timeout, until the right model answers with a real token, sends the
warm-up set, looks what a server that drafts accepts of it, and keeps the phases of this start (from the
engine's log) in /var/lib/bringup/starts/<unit>.json. It ends at once, with a reason, when the engine's
process ends. It runs as root to read the log; its requests are sent by a child (`gate.py NAME --ask`) that
is the service's own user.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from bringup.node import common, drafting
from bringup.node.common import Answer, NoAnswer, Refusal, say

PROMPT = "Say one word."
FIRST_TOKENS = 4
POLL_FIRST_S = 0.1
POLL_MOST_S = 2.0
STEPS = ("first token", "warm-up", "drafting")
"""What the asking child reports; each is a phase of the start."""

SAY_EVERY_S = 30.0
NEVER_ASKED = "it was never asked"
CHILD_MARGIN_S = 10.0

MARKER_WAIT_S = 10.0
"""How long lines that the engine has written may take to reach the log that we read."""

LOG_POLL_S = 0.05
"""A line of a log file is seen up to this much after it was written."""
READ_BYTES = 1 << 16
ANSWER_CHARACTERS = 200
LAST_LINES = 3
LINE_CHARACTERS = 300

LAST_WORDS_S = 1.0
"""How long the last lines of an engine that has just ended may take to reach the log that we read."""


class EngineGone(Exception):
    """The engine's process ended while we waited."""


@dataclass
class Phases:
    """When each phase's marker was first seen: name -> seconds since 1970."""

    markers: Mapping[str, str]
    seen: dict[str, float] = field(default_factory=dict)
    last: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))

    def __post_init__(self) -> None:
        self.patterns = {name: re.compile(text) for name, text in self.markers.items()}

    def line(self, text: str, at: float) -> None:
        """Take one line of the log, written (or read) at `at`."""
        if text.strip():
            self.last.append(text.strip()[:LINE_CHARACTERS])
        for name, pattern in self.patterns.items():
            if name not in self.seen and pattern.search(text):
                self.seen[name] = at

    @property
    def complete(self) -> bool:
        """Has every marker been seen?"""
        return len(self.seen) == len(self.patterns)

    def table(self, started: float, marks: Mapping[str, float]) -> list[dict[str, Any]]:
        """Phases in the order of their end, each with its own seconds: the log's markers and our marks."""
        first = min(marks.values(), default=0.0)
        # A line written before the first token may be seen just after it.
        seen = {name: first if first < at <= first + 2 * LOG_POLL_S else at for name, at in self.seen.items()}
        result, before = [], started
        for name, end in sorted([*seen.items(), *marks.items()], key=lambda item: item[1]):
            result.append({"name": name, "seconds": round(max(0.0, end - before), 3)})
            before = max(before, end)
        return result


def right_model(service: Mapping[str, Any], listed: list[dict[str, Any]]) -> None:
    """The served name is among the models, with at least the planned context. Raises NoAnswer."""
    names = [str(item.get("id")) for item in listed]
    if service["served_name"] not in names:
        raise NoAnswer(f"it serves {', '.join(names) or 'nothing'}, not {service['served_name']}")
    entry = listed[names.index(service["served_name"])]
    planned, has = service.get("context_tokens"), entry.get("max_model_len")
    if planned and isinstance(has, int) and has < planned:
        raise NoAnswer(f"its context is {has} tokens, {planned} were planned")


def wait_for_token(
    service: Mapping[str, Any], until: float, key: str | None, alive: Callable[[], bool] = lambda: True
) -> Answer:
    """The first real answer. Raises NoAnswer (with the last reason) at `until` (monotonic), EngineGone when
    not alive.
    """
    pause, said, why = POLL_FIRST_S, time.monotonic(), NEVER_ASKED
    while True:
        if not alive():
            raise EngineGone(why)
        left = until - time.monotonic()
        if left <= 0:
            raise NoAnswer(why)
        limit = min(left, float(service["probe_timeout_s"]))
        try:
            right_model(service, common.models(service, timeout_s=limit, key=key))
            return common.ask(
                service,
                PROMPT,
                FIRST_TOKENS,
                timeout_s=min(max(0.1, until - time.monotonic()), limit),
                key=key,
            )
        except NoAnswer as error:
            # The last try of all may have had no time: what was said before tells more.
            why = str(error) if limit >= 1 or why == NEVER_ASKED else why
        if time.monotonic() - said >= SAY_EVERY_S:
            said = time.monotonic()
            say(f"waiting for a first token, {until - said:.0f} s left: {why}")
        time.sleep(max(0.0, min(pause, until - time.monotonic())))
        pause = min(POLL_MOST_S, pause * 1.5)


def warm_up_prompt(tokens: int, number: int) -> str:
    """About `tokens` tokens of plain words, unlike every other prompt from its first word on (no prefix is
    shared).
    """
    words = [f"{number}", *(f"w{(number * 31 + position) % 97}" for position in range(max(1, tokens) - 1))]
    return " ".join(words)


def warm_up(service: Mapping[str, Any], until: float, key: str | None) -> int:
    """Send the warm-up set; how many were answered. Raises NoAnswer when one is not, or time is up."""
    sent = 0
    for step in service["warm_up"]:
        count = int(step["concurrent"])
        prompts = [warm_up_prompt(int(step["prompt_tokens"]), sent + number) for number in range(count)]
        left = until - time.monotonic()
        if left <= 0:
            raise NoAnswer("no time was left for the warm-up")
        with ThreadPoolExecutor(count) as pool:
            jobs = [
                pool.submit(common.ask, service, prompt, int(step["output_tokens"]), timeout_s=left, key=key)
                for prompt in prompts
            ]
            for job in jobs:
                job.result()
        sent += count
    return sent


def lines_of(path: Path, mark: Mapping[str, int]) -> Iterator[str | None]:
    """Lines that a rotated log file gets after `mark`, for ever; None whenever there is nothing new.

    `path` may be a link that is swung to a new file, or a file that is renamed: the old one is read to its
    end first.
    """
    file, rest = None, b""
    try:
        while True:
            if file is None:
                file = _opened(path, mark)
            chunk = file.read(READ_BYTES) if file else b""
            if not chunk and file and _moved(path, file):
                # What was written between the last look and the rotation.
                chunk = file.read(READ_BYTES)
                if not chunk:
                    file.close()
                    file = None
                    continue
            if not chunk:
                yield None
            *whole, rest = (rest + chunk).split(b"\n")
            yield from (line.decode(errors="replace") for line in whole)
    finally:
        if file:
            file.close()


def _opened(path: Path, mark: Mapping[str, int]) -> BinaryIO | None:
    try:
        file = path.open("rb")
    except OSError:
        return None
    if os.fstat(file.fileno()).st_ino == mark.get("inode"):
        file.seek(mark.get("offset", 0))
    return file


def _moved(path: Path, file: BinaryIO) -> bool:
    try:
        return path.stat().st_ino != os.fstat(file.fileno()).st_ino
    except OSError:
        return False


def follow_file(path: Path, mark: Mapping[str, int], phases: Phases, stop: threading.Event) -> None:
    """Feed a log file's new lines to `phases` until all markers are there, or `stop`, and then once more."""
    last = False
    for line in lines_of(path, mark):
        if line is not None:
            phases.line(line, time.time())
        elif phases.complete or last:
            return
        else:
            last = stop.wait(LOG_POLL_S)


def read_journal(service: Mapping[str, Any], since: float, phases: Phases) -> None:
    """Feed what the server's journal has since then (seconds since 1970) to `phases`, with the journal's own
    times.
    """
    query = [*common.journal_of(service), "--output=json", "--all", f"--since=@{since:.3f}"]
    _, out, _ = common.run(query)
    for row in out.splitlines():
        try:
            entry = json.loads(row)
            at = int(entry["__REALTIME_TIMESTAMP"]) / 1e6
        except (ValueError, KeyError):
            continue
        message = entry.get("MESSAGE")
        text = bytes(message).decode(errors="replace") if isinstance(message, list) else str(message)
        phases.line(text, at)


def journal_phases(
    service: Mapping[str, Any], since: float, phases: Phases, wait_s: float = MARKER_WAIT_S
) -> None:
    """All markers from the journal: written out first, then read until they are there or `wait_s` is over."""
    until = time.monotonic() + wait_s
    while True:
        common.run([*common.journal_of(service), "--sync"])
        read_journal(service, since, phases)
        if phases.complete or time.monotonic() >= until:
            return
        time.sleep(LOG_POLL_S)


def alive(pid: int) -> bool:
    """Is the process there, and no zombie?"""
    try:
        text = (Path("/proc") / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in ("Z", "X")


def ask_as_service(service: Mapping[str, Any]) -> int:
    """The child: wait for the token, warm up, print one JSON object a step. The key comes on stdin."""
    key = sys.stdin.readline().strip() or None
    until = time.monotonic() + float(service["start_timeout_s"])
    try:
        answer = wait_for_token(service, until, key, alive=lambda: os.getppid() != 1)
        print(
            json.dumps(
                {
                    "step": "first token",
                    "at": time.time(),
                    "answer": answer.text,
                    "model": answer.model,
                    "tokens": answer.tokens,
                }
            ),
            flush=True,
        )
        sent = warm_up(service, time.monotonic() + float(service["start_timeout_s"]), key)
        print(json.dumps({"step": "warm-up", "at": time.time(), "requests": sent}), flush=True)
        if service.get("drafting"):
            seen = drafting.check(service, key)
            print(json.dumps({"step": "drafting", "at": time.time(), **seen}), flush=True)
    except (NoAnswer, EngineGone) as error:
        print(json.dumps({"step": "failed", "why": str(error)}), flush=True)
        return 1
    return 0


def ask(service: Mapping[str, Any], name: str, key: str | None, pid: int) -> dict[str, dict[str, Any]]:
    """Let the child ask as the service's user; what it printed, by step. Raises EngineGone, NoAnswer."""
    command = [sys.executable, "-s", str(Path(__file__).resolve()), name, "--ask"]
    # Only root may become somebody else; started by the user itself (a test) there is nobody to become.
    who: dict[str, Any] = (
        {"user": service["user"], "group": service["group"], "extra_groups": []} if os.geteuid() == 0 else {}
    )
    steps: dict[str, dict[str, Any]] = {}
    until = time.monotonic() + 2 * float(service["start_timeout_s"]) + CHILD_MARGIN_S
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **who) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(f"{key or ''}\n")
        child.stdin.close()
        reader = threading.Thread(target=_collect, args=(child.stdout, steps), daemon=True)
        reader.start()
        while child.poll() is None:
            if not alive(pid):
                child.kill()
                raise EngineGone("the engine's process ended while it started")
            if time.monotonic() > until:
                child.kill()
                raise NoAnswer("the asking process did not end in time")
            time.sleep(LOG_POLL_S)
        reader.join(CHILD_MARGIN_S)
    if "failed" in steps or "warm-up" not in steps:
        if not alive(pid):
            raise EngineGone("the engine's process ended while it started")
        what = "the warm-up failed" if "first token" in steps else "no real token"
        why = steps.get("failed", {}).get("why", "the asking process ended")
        raise NoAnswer(f"{what} within {service['start_timeout_s']} s: {why}")
    return steps


def _collect(stream: Iterable[str], steps: dict[str, dict[str, Any]]) -> None:
    for row in stream:
        data = json.loads(row)
        steps[data["step"]] = data


def started_at(pid: int) -> float:
    """When the process was started, in seconds since 1970 (from the kernel's clock ticks since boot); now, if
    it is gone.
    """
    try:
        text = (Path("/proc") / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return time.time()
    fields = text.rpartition(")")[2].split()
    since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot


def record(
    service: Mapping[str, Any],
    started: float,
    steps: Mapping[str, Mapping[str, Any]],
    phases: Phases,
    why: str,
) -> dict[str, Any]:
    """What this start was, as it is kept and as the run record takes it."""
    first, warm = steps.get("first token", {}), steps.get("warm-up", {})
    marks = {name: float(steps[name]["at"]) for name in STEPS if name in steps}
    drafts = {name: value for name, value in steps.get("drafting", {}).items() if name not in ("step", "at")}
    end = max(marks.values(), default=time.time())
    return {
        "schema_version": 1,
        "unit": service["unit"],
        "service": service["name"],
        "outcome": "failed" if why else "ready",
        "why": why,
        "at": common.utc(started),
        "seconds": round(end - started, 3),
        "phases": phases.table(started, marks),
        "answer": str(first.get("answer", ""))[:ANSWER_CHARACTERS],
        "model": service["served_name"],
        "address": f"http://{url_host(service['address'])}:{service['port']}",
        "warm_up_requests": warm.get("requests", 0),
        "drafting": drafts,
        "warnings": [] if why or not drafts.get("code") else [f"{drafts['code']}: {drafts['text']}"],
        "invocation": os.environ.get("INVOCATION_ID", ""),
        "is_stand_in": bool(service.get("is_stand_in")),
    }


def refused(service: Mapping[str, Any], drafts: Mapping[str, Any]) -> str:
    """Why a strict service that accepts too little of what it drafts is not up; "" where nothing is against it."""
    strict = (service.get("drafting") or {}).get("strict")
    return f"{drafts['code']}: {drafts['text']}" if strict and drafts.get("code") == drafting.LOW else ""


def url_host(address: str) -> str:
    """An address as it stands in a URL: IPv6 in brackets."""
    return f"[{address}]" if ":" in address else address


def gate(name: str, pid: int) -> int:
    """Wait, warm up, record; 0 when the server is ready, else 1 with the reason said and kept."""
    service = common.load(name)
    # The unit's mask is for the engine's files; these records are for everyone.
    os.umask(0o022)
    started, steps, why = started_at(pid), {}, ""
    phases, stop = Phases(service.get("log_markers") or {}), threading.Event()
    noted = common.read_json(common.RUN / "started" / f"{service['unit']}.json")
    follower = None
    if service.get("log_path"):
        arguments = (Path(service["log_path"]), noted.get("log", {}), phases, stop)
        follower = threading.Thread(target=follow_file, args=arguments, daemon=True)
        follower.start()
    gone = False
    try:
        steps = ask(service, name, common.key_of(service), pid)
    except (EngineGone, NoAnswer, Refusal) as error:
        why, gone = str(error), isinstance(error, EngineGone)
    why = why or refused(service, steps.get("drafting", {}))
    if follower:
        follower.join(LAST_WORDS_S if why else MARKER_WAIT_S)
        stop.set()
        follower.join(MARKER_WAIT_S)
    else:
        since = common.seconds_of(str(noted.get("at", ""))) or started
        journal_phases(service, since, phases, LAST_WORDS_S if why else MARKER_WAIT_S)
    if gone and phases.last:
        why = f"{why}: {' | '.join(phases.last)}"
    result = record(service, started, steps, phases, why)
    common.write_json(common.STARTS / f"{service['unit']}.json", result)
    if why:
        say(f"not ready: {why}")
        return 1
    spent = ", ".join(f"{phase['name']} {phase['seconds']:.1f} s" for phase in result["phases"])
    say(f"ready after {result['seconds']:.1f} s ({spent})")
    for warning in result["warnings"]:
        say(warning)
    say(f"{result['model']} at {result['address']} says {result['answer']!r}")
    return 0


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="gate.py", description="the unit is up when a real token is")
    parser.add_argument("name")
    parser.add_argument("--ask", action="store_true", help="wait and warm up, as the service's user")
    options = parser.parse_args(words)
    try:
        if options.ask:
            return ask_as_service(common.load(options.name))
        return gate(options.name, int(os.environ["MAINPID"]))
    except Refusal as refusal:
        say(str(refusal))
        return 1
    except (OSError, KeyError) as error:
        say(f"the gate could not look: {error!r}")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
