"""`restart.py NAME`: restart one server of a group, politely, and only while no other one of the group is
restarting.

In order: wait for the hours in which it may be restarted (at most `hours_wait_s`), wait while it is busy (at most
`postpone_s`, and not beyond those hours), get the group's lease from more than half of its nodes and a no from
none, refuse new connections and let requests in flight end (at most `drain_s`), restart (which waits for a real
token and warms up), ask once more, let requests in again, give the lease back. A server that somebody has stopped
or taken out of rotation is not restarted by itself (by schedule or drift). A restart that fails is kept: this
node then says no to the others, so that the group stops at its first failure. It needs no controller: if one dies
that has called this, the restart ends by itself. What it waits for stands in /run/bringup/restarting/NAME.json.

Exit codes: 0 restarted (or told to end by TERM), 4 failed, 8 refused (somebody else restarts, nodes do not answer,
not in these hours, or it does not serve).
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType
from typing import Any

from bringup.node import common, drain, drift, windows
from bringup.node.common import NoAnswer, Refusal, say

SETTINGS = Path("/etc/bringup/lease.json")
RESTARTS = Path("/var/lib/bringup/restarts")
WAITING = common.RUN / "restarting"

DONE, FAILED, REFUSED = 0, 4, 8
TOLD = "told"
"""Name of the refusal that a TERM makes: its unit was stopped, which is no failure."""

PEER_TIMEOUT_S = 10.0
POLL_S = 1.0
IDLE_LOOKS = 2
"""So many looks in a row must find no request before a server counts as idle."""

LEASE_POLL_S = 2.0
MARGIN_S = 60.0
VERIFY_TIMEOUT_S = 60.0
HISTORY_LINES = 200
MADE_UP_S = 2.0
WEEK_S = 7 * 24 * 3600.0
HOURS_POLL_S = 30.0
SCHEDULE = "schedule"
BY_ITSELF = (SCHEDULE, drift.REASON)
"""Reasons of restarts that nobody asks for by hand; these keep to the hours."""

UNANSWERED_LIMIT_S = 60.0
"""How long nodes that do not answer are asked again before the restart is given up."""


@dataclass(frozen=True)
class Vote:
    """One node's answer to a call for the lease; `granted` None: it did not answer."""

    node: str
    granted: bool | None
    why: str


def call(address: str, port: int, path: str, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """POST to one node's lease listener. Raises NoAnswer."""
    status, content = common.request(
        {"address": address, "port": port}, "POST", path, body, timeout_s=PEER_TIMEOUT_S
    )
    try:
        data = json.loads(content)
    except ValueError:
        raise NoAnswer("no JSON came back") from None
    return status, data if isinstance(data, dict) else {}


class Lease:
    """The right to restart one group's server, held on this group's nodes."""

    def __init__(self, settings: Mapping[str, Any], group: str, ttl_s: float) -> None:
        self.name, self.port = settings["name"], int(settings["port"])
        self.peers: Mapping[str, str] = settings["groups"][group]["peers"]
        self.group, self.ttl_s, self.token = group, ttl_s, secrets.token_hex(16)

    @property
    def needed(self) -> int:
        """More than half of the group's nodes: two such sets always share one, and that one grants once."""
        return len(self.peers) // 2 + 1

    def ask(self, node: str) -> Vote:
        """One node's vote."""
        body = {"group": self.group, "holder": self.name, "token": self.token, "ttl_s": self.ttl_s}
        try:
            status, data = call(self.peers[node], self.port, "/v1/lease", body)
        except NoAnswer as error:
            return Vote(node, None, str(error))
        if data.get("node") != node:
            return Vote(node, None, f"{self.peers[node]} is {data.get('node', 'no lease listener')}")
        if status in (200, 409):
            return Vote(node, status == 200, str(data.get("why", "")))
        return Vote(node, None, f"status {status}: {data.get('why', '')}")

    def round(self) -> list[Vote]:
        """Votes in the nodes' order until one says no: the first node is everyone's first, so two never block
        each other.
        """
        votes: list[Vote] = []
        for node in sorted(self.peers):
            votes.append(self.ask(node))
            if votes[-1].granted is False:
                break
        return votes

    def release(self, nodes: Iterable[str] | None = None) -> None:
        """Give back the grants of these nodes (None: of all), as far as they answer; the rest runs out by
        itself.
        """
        for node in sorted(self.peers if nodes is None else nodes):
            body = {"group": self.group, "holder": self.name, "token": self.token}
            try:
                call(self.peers[node], self.port, "/v1/release", body)
            except NoAnswer:
                continue

    def take(self, wait_s: float, led: bool) -> None:
        """Hold the lease, waiting at most `wait_s` for another holder. Raises Refusal.

        `led`: a controller takes the group's nodes one by one, so nodes that do not answer are only named.
        """
        until = time.monotonic() + wait_s
        unanswered_until = time.monotonic() + min(wait_s, UNANSWERED_LIMIT_S)
        said = ""
        while True:
            votes = self.round()
            no = next((vote for vote in votes if vote.granted is False), None)
            silent = [vote for vote in votes if vote.granted is None]
            enough = sum(vote.granted is True for vote in votes) >= self.needed
            if no is None and (enough or led):
                for vote in silent:
                    say(f"{vote.node} does not answer ({vote.why}); going on without it")
                return
            self.release(vote.node for vote in votes if vote.granted is not False)
            over = time.monotonic() >= (until if no else unanswered_until)
            if no:
                text = f"{no.node} says no: {no.why}"
            else:
                names = "; ".join(f"{vote.node}: {vote.why}" for vote in silent)
                text = (
                    f"{self.needed} of {len(self.peers)} nodes must agree, and these do not answer: {names}"
                )
            if over:
                raise Refusal(
                    "lease", f"{text}. Try again later, or restart this one server: systemctl restart"
                )
            if text != said:
                say(f"waiting: {text}")
                said = text
            # Unequal pauses, so that two that wait do not ask in step for ever.
            time.sleep(LEASE_POLL_S * (0.5 + secrets.randbelow(1000) / 1000))

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Renew the grants in the background; at the end give them back."""
        stop = threading.Event()

        def renew() -> None:
            while not stop.wait(self.ttl_s / 3):
                for node in sorted(self.peers):
                    self.ask(node)

        thread = threading.Thread(target=renew, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(2 * PEER_TIMEOUT_S)
            self.release()


@dataclass
class Waiting:
    """What a restart is waiting for now, for whoever looks (`invoke status`), and what it has waited for."""

    name: str
    folder: Path | None = None

    def __post_init__(self) -> None:
        self.waits: list[dict[str, Any]] = []

    @contextmanager
    def for_(self, what: str, limit_s: float) -> Iterator[None]:
        """Waiting for `what`, at most `limit_s`, while the block lasts."""
        began, now = time.monotonic(), time.time()
        data = {"for": what, "since": common.utc(now), "until": common.utc(now + limit_s), "pid": os.getpid()}
        file = (self.folder or WAITING) / f"{self.name}.json"
        common.write_json(file, data)
        try:
            yield
        finally:
            file.unlink(missing_ok=True)
            self.waits.append({"for": what, "seconds": round(time.monotonic() - began, 1)})


def utc_now() -> datetime:
    """Now, aware."""
    return datetime.now(timezone.utc)  # noqa: UP017 (nodes have Python 3.9)


def wait_hours(
    service: Mapping[str, Any],
    waiting: Waiting,
    now: Callable[[], datetime] | None = None,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Wait for the hours in which this server may be restarted. Raises Refusal when they are too far away."""
    hours, never = service.get("hours") or [], service.get("never") or []
    limit_s, clock = float(service.get("hours_wait_s", 0)), now or utc_now
    try:
        if windows.may(hours, never, clock()):
            return
        left = windows.until_may_change(hours, never, clock(), WEEK_S)
    except ValueError as error:
        raise Refusal("hours", f"{error}. Install tzdata on this node, or name hours in UTC") from None
    if left is None or left > limit_s:
        when = "not within a week" if left is None else f"in {left / 3600:.1f} h"
        raise Refusal(
            "hours", f"it may be restarted {when}, and waits at most {limit_s / 3600:.1f} h for that"
        )
    say(f"it may be restarted in {left:.0f} s, and waits until then")
    with waiting.for_("the hours in which it may be restarted", left):
        while not windows.may(hours, never, clock()):
            pause(HOURS_POLL_S)


def hours_left(service: Mapping[str, Any], now: datetime) -> float:
    """Seconds until this server may no longer be restarted; a week when that is not sooner."""
    hours, never = service.get("hours") or [], service.get("never") or []
    return windows.until_may_change(hours, never, now, WEEK_S) or WEEK_S


def wait_idle(
    service: Mapping[str, Any], limit_s: float, key: str | None, look: Callable[..., int] = common.in_flight
) -> int:
    """Wait until no request runs or waits, at most `limit_s`; how many there were at the end (0: idle)."""
    until, quiet, count = time.monotonic() + limit_s, 0, 0
    while True:
        count = look(service, key=key)
        quiet = quiet + 1 if count == 0 else 0
        if quiet >= IDLE_LOOKS or (count and time.monotonic() >= until):
            return count
        time.sleep(min(POLL_S, 0.2) if count == 0 else POLL_S)


def settings_of(name: str, path: Path = SETTINGS) -> tuple[dict[str, Any], str | None]:
    """The node's lease settings and the group of service `name`; None: it is in no group."""
    settings = common.read_json(path)
    for group, service in (settings.get("groups") or {}).items():
        if service["name"] == name:
            return settings, group
    return settings, None


def restart_unit(service: Mapping[str, Any]) -> None:
    """`systemctl restart`, which ends when a real token has come. Raises NoAnswer with the reason."""
    unit = f"{service['unit']}.service"
    limit = start_s(service) + 4 * MARGIN_S
    common.run(["systemctl", "reset-failed", unit])
    began = time.time()
    code, _, err = common.run(["systemctl", "restart", unit], timeout_s=limit)
    if code != 0:
        said = [line for line in err.splitlines() if line.strip()] or [f"systemctl ended with {code}"]
        raise NoAnswer(common.why_not_started(str(service["unit"]), began) or said[0])


def verify(service: Mapping[str, Any], key: str | None) -> dict[str, Any]:
    """The new server is up, from a new start, and answers once more. Raises NoAnswer."""
    shown = common.unit_state(f"{service['unit']}.service", ("ActiveState", "InvocationID"))
    kept = common.read_json(common.STARTS / f"{service['unit']}.json")
    if shown["ActiveState"] != "active":
        raise NoAnswer(f"the unit is {shown['ActiveState']}")
    if kept.get("invocation") != shown["InvocationID"]:
        raise NoAnswer("the unit has been started again meanwhile")
    common.ask(service, "Say one word.", 4, timeout_s=VERIFY_TIMEOUT_S, key=key)
    return kept


def start_s(service: Mapping[str, Any]) -> float:
    """Seconds that stop, start and warm-up may take together."""
    return 2 * float(service["start_timeout_s"]) + float(service["stop_timeout_s"])


def longest_s(service: Mapping[str, Any]) -> float:
    """Seconds that drain, stop, start and warm-up may take together."""
    return start_s(service) + float(service["drain_s"])


@contextmanager
def draining(service: Mapping[str, Any]) -> Iterator[str]:
    """No new requests for as long as the block lasts; gives why new connections are not refused, or "".

    A server that somebody has taken out of rotation before stays out of it.
    """
    name = str(service["name"])
    before = bool(drain.marked([name]))
    refused = drain.mark(service, None if before else longest_s(service) + MARGIN_S)
    try:
        yield refused
    finally:
        if not before:
            drain.put_back([name])


def keep(service: Mapping[str, Any], result: Mapping[str, Any], reason: str) -> dict[str, Any]:
    """Keep the last restart's record (not of one that was refused), and a short history beside it; the record."""
    record = {"schema_version": 1, "service": service["name"], "at": common.utc(), "reason": reason, **result}
    if record["outcome"] != "refused":
        common.write_json(RESTARTS / f"{service['unit']}.json", record)
    history = RESTARTS / f"{service['unit']}.history.jsonl"
    history.parent.mkdir(parents=True, exist_ok=True)
    try:
        rows = history.read_text(encoding="utf-8").splitlines()[-HISTORY_LINES + 1 :]
    except OSError:
        rows = []
    history.write_text("\n".join([*rows, json.dumps(record, sort_keys=True)]) + "\n", encoding="utf-8")
    return record


def state_of(service: Mapping[str, Any], reason: str) -> str:
    """What systemd says of the server (`active`, `failed`, ...). Raises Refusal when nobody has asked for this
    restart and the server is down or out of rotation: that is somebody's will, or a matter for somebody.
    """
    unit = f"{service['unit']}.service"
    state = common.unit_state(unit, ("ActiveState",))["ActiveState"]
    if reason.startswith(BY_ITSELF):
        if state != "active":
            raise Refusal(
                "down", f"it is {state}, and only one that serves is. To start it: systemctl start {unit}"
            )
        if drain.marked([str(service["name"])]):
            raise Refusal("drained", "it is out of rotation. To put it back: invoke run return-node")
    return state


def is_made_up(timer: Mapping[str, str], unit: Mapping[str, str]) -> bool:
    """Has the timer started the unit as soon as it was itself started? From the moments that systemd shows of both.

    Then it is for a time that came up before: systemd (252) counts a timer's next time from its former start, so that
    one which is stopped and started is due at once, whatever its `Persistent=` says.
    """
    shown = timer.get("ActiveEnterTimestamp"), timer.get("LastTriggerUSec"), unit.get("InactiveExitTimestamp")
    began, fired, started = (_moment(text or "") for text in shown)
    if began is None or fired is None or started is None:
        return False
    return (fired - began).total_seconds() <= MADE_UP_S and abs(started - fired).total_seconds() <= MADE_UP_S


def _moment(text: str) -> datetime | None:
    """A moment as systemd prints it (`Mon 2026-11-30 18:36:46 UTC`), without its zone; None for none."""
    try:
        return datetime.strptime(" ".join(text.split()[1:3]), "%Y-%m-%d %H:%M:%S")
    except ValueError:
        return None


def made_up(name: str) -> bool:
    """Is this the restart that a schedule brings when it is started, and not at its time?"""
    unit = f"bringup-restart-{name}"
    timer = common.unit_state(f"{unit}.timer", ("ActiveEnterTimestamp", "LastTriggerUSec"))
    return is_made_up(timer, common.unit_state(f"{unit}.service", ("InactiveExitTimestamp",)))


def restart(service: Mapping[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """The whole restart; its record (outcome "done" or "failed"). Raises Refusal when nothing was done."""
    key, began, waiting = common.key_of(service), time.monotonic(), Waiting(str(service["name"]))
    settings, group = settings_of(service["name"])
    state = state_of(service, options.reason)
    left_s = WEEK_S
    if not options.now:
        wait_hours(service, waiting)
        left_s = hours_left(service, utc_now())
        if state == "active":
            _postpone(service, waiting, key, left_s)
    postponed = time.monotonic() - began
    with lease(settings, group, service, options, waiting, left_s - postponed):
        result: dict[str, Any] = {"postponed_s": round(postponed, 1), "waits": waiting.waits}
        # Hours may have gone by: somebody may have stopped it since.
        state = state_of(service, options.reason)
        try:
            with draining(service) as open_because:
                if open_because:
                    say(f"new connections are not refused meanwhile: {open_because}")
                with waiting.for_("requests in flight", float(service["drain_s"])):
                    cut = wait_idle(service, float(service["drain_s"]), key) if state == "active" else 0
                if cut:
                    say(f"{cut} requests did not end within {service['drain_s']} s and are cut off")
                with waiting.for_("a token of the server that it starts", start_s(service)):
                    restart_unit(service)
                    kept = verify(service, key)
            start = {name: kept.get(name) for name in ("seconds", "phases", "answer", "model", "address")}
            result.update(outcome="done", why="", cut_requests=cut, refused_new=not open_because, start=start)
        except NoAnswer as error:
            result.update(outcome="failed", why=str(error))
        result["seconds"] = round(time.monotonic() - began, 1)
        # Kept before the lease is given back: nobody may come in between a failure and its mark.
        return keep(service, result, options.reason)


def _postpone(service: Mapping[str, Any], waiting: Waiting, key: str | None, left_s: float) -> None:
    """Wait for a quiet moment: at most `postpone_s`, and so that the drain still ends within the hours."""
    limit_s = min(float(service["postpone_s"]), max(0.0, left_s - float(service["drain_s"])))
    with waiting.for_("a quiet moment", limit_s):
        busy = wait_idle(service, limit_s, key)
    if busy:
        say(f"still {busy} requests after {limit_s:.0f} s: it is restarted all the same")


@contextmanager
def lease(
    settings: Mapping[str, Any],
    group: str | None,
    service: Mapping[str, Any],
    options: argparse.Namespace,
    waiting: Waiting,
    left_s: float,
) -> Iterator[None]:
    """The group's lease, held and renewed; nothing for a server that is alone, or when told so. `left_s`: when
    its hours are over nobody waits any more.
    """
    if group is None or options.alone:
        yield
        return
    held = Lease(settings, group, longest_s(service) + MARGIN_S)
    wait_s = options.wait_s if options.wait_s is not None else float(service["postpone_s"])
    with waiting.for_("the other nodes of its group", max(0.0, min(wait_s, left_s))):
        held.take(max(0.0, min(wait_s, left_s)), options.led)
    with held.kept():
        yield


@contextmanager
def only_one(name: str) -> Iterator[None]:
    """One restart of a service on this node at a time. Raises Refusal."""
    common.RUN.mkdir(parents=True, exist_ok=True)
    with (common.RUN / f"restart-{name}.lock").open("w", encoding="ascii") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refusal("already", f"{name} is already being restarted on this node") from None
        yield


def run(options: argparse.Namespace) -> int:
    """One restart from the command line; its outcome is said, and is the exit code."""
    record: dict[str, Any]
    service: dict[str, Any] = {}
    code = REFUSED
    if options.reason == SCHEDULE and not options.drift and made_up(options.name):
        say(
            "not restarted: its schedule has just begun to run, and a time that came up before is not made up for"
        )
        return DONE
    try:
        service = common.load(options.name)
        if options.drift:
            options.reason = _drift_reason(options.name)
        with only_one(options.name):
            record = restart(service, options)
    except Refusal as refusal:
        code = DONE if refusal.name == TOLD else REFUSED
        record = {"schema_version": 1, "service": options.name, "outcome": "refused", "why": str(refusal)}
        if service and options.reason.startswith(BY_ITSELF):
            record = keep(service, record, options.reason)
    if record["outcome"] == "done":
        say(f"restarted {options.name} in {record['seconds']} s")
    elif record["outcome"] == "refused":
        say(f"not restarted: {record['why']}")
    else:
        say(f"the restart failed: {record['why']}. The rest of its group waits until this server is up")
    if options.json:
        print(json.dumps(record))
    return {"done": DONE, "refused": code}.get(record["outcome"], FAILED)


def _drift_reason(name: str) -> str:
    try:
        return drift.requested(drift.folder_of(name))
    except ValueError as error:
        raise Refusal("no-drift", str(error)) from None


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="restart.py", description="restart one server of a group, politely")
    parser.add_argument("name")
    parser.add_argument(
        "--now", action="store_true", help="do not wait for a quiet moment (requests in flight may still end)"
    )
    parser.add_argument("--alone", action="store_true", help="ask no other node")
    parser.add_argument(
        "--led",
        action="store_true",
        help="a controller takes the nodes one by one: silent nodes do not stop it",
    )
    parser.add_argument(
        "--wait-s", type=float, help="seconds to wait for another node's restart (default: postpone_s)"
    )
    parser.add_argument("--reason", default=SCHEDULE)
    parser.add_argument("--drift", action="store_true", help="the watchdog has asked for it, and says why")
    parser.add_argument("--json", action="store_true", help="print the record")

    def on_term(number: int, frame: FrameType | None) -> None:
        # Leaves through every `finally`: the lease is given back.
        raise Refusal(TOLD, "it was told to end")

    signal.signal(signal.SIGTERM, on_term)
    os.umask(0o022)
    return run(parser.parse_args(words))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
