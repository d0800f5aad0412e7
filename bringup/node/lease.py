"""This node's say on who may restart a server: a small HTTP listener that grants one lease a group at a time.

    POST /v1/lease    {"group", "holder", "token", "ttl_s"}   200 {"granted": true} | 409 {"why"}
    POST /v1/release  {"group", "holder", "token"}            200 {"released"}
    GET  /v1/state                                       200 {"services": {name: {"active", "draining"}}, ...}
    GET  /v1/ready/NAME                                  200 | 503 {"why"}, to anybody: for load balancers

A holder needs the grants of more than half of its group's nodes (`restart.py`), and each node grants one at a
time: so two can never hold a group at once, whatever the clocks say. Grants outlive a restart of this program
and of the node; they end when released, or when their time is over. A node also says no while its own server
is not up, or while its last restart failed: then the group has no server to spare, and whoever comes next
must not go on.

The one thing that a caller can do here is to hold up restarts for a while. Settings: /etc/bringup/lease.json.
"""

from __future__ import annotations

import ipaddress
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from bringup.node import common
from bringup.node.common import say

SETTINGS = Path("/etc/bringup/lease.json")
RESTARTS = Path("/var/lib/bringup/restarts")

BODY_BYTES = 4096
REQUEST_LIMIT_S = 10.0
LONGEST_LEASE_S = 6 * 3600
CALLS_A_SECOND = 50
READY_CALLS_A_SECOND = 20
AT_ONCE = 16


class Leases:
    """The grants of this node, kept in a file: group -> holder, token, until (seconds since 1970)."""

    def __init__(self, file: Path, now: Callable[[], float] = time.time) -> None:
        self.file, self.now, self.lock = file, now, threading.Lock()
        self.held: dict[str, dict[str, Any]] = {
            group: lease for group, lease in common.read_json(file).items() if isinstance(lease, dict)
        }

    def current(self, group: str) -> dict[str, Any] | None:
        """Who holds a group's lease now; None: nobody."""
        lease = self.held.get(group)
        return lease if lease and lease["until"] > self.now() else None

    def take(self, group: str, holder: str, token: str, ttl_s: float) -> dict[str, Any] | None:
        """Grant or renew: None when granted, else the lease that is in the way."""
        with self.lock:
            there = self.current(group)
            if there and there["token"] != token:
                return there
            until = self.now() + min(max(1.0, ttl_s), LONGEST_LEASE_S)
            since = there["since"] if there else self.now()
            self._keep(
                {**self.held, group: {"holder": holder, "token": token, "until": until, "since": since}}
            )
            return None

    def release(self, group: str, token: str) -> bool:
        """Give back; False when the token is not the holder's."""
        with self.lock:
            there = self.held.get(group)
            if not there or there["token"] != token:
                return False
            self._keep({name: lease for name, lease in self.held.items() if name != group})
            return True

    def _keep(self, held: dict[str, dict[str, Any]]) -> None:
        # On the disk before it is said: a grant that a power cut forgets would be given twice.
        common.write_json(self.file, held, mode=0o600)
        self.held = held


def objection(service: Mapping[str, Any], restarts: Path = RESTARTS) -> str:
    """Why this node's own server forbids another node's restart; empty: it does not."""
    unit = service["unit"]
    state = common.unit_state(f"{unit}.service", ("ActiveState",))["ActiveState"]
    if state != "active":
        return f"its own server is {state or 'not there'}"
    last = common.read_json(restarts / f"{unit}.json")
    if last.get("outcome") == "failed":
        started = common.read_json(common.STARTS / f"{unit}.json")
        better = started.get("outcome") == "ready" and str(started.get("at")) > str(last.get("at"))
        if not better:
            return f"its own last restart failed: {last.get('why')}"
    return ""


class Rate:
    """At most so many calls in a second."""

    def __init__(self, calls: int) -> None:
        self.calls, self.second, self.count = calls, 0, 0

    def allows(self, now: float) -> bool:
        """One more call at `now` (seconds)?"""
        if int(now) != self.second:
            self.second, self.count = int(now), 0
        self.count += 1
        return self.count <= self.calls


class Node:
    """Settings, grants and this node's servers: the answer to each call, without HTTP."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        leases: Leases,
        object_to: Callable[[Mapping[str, Any]], str] = objection,
    ) -> None:
        self.settings, self.leases, self.object_to = settings, leases, object_to

    def lease(self, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        """Answer to a call for a lease."""
        problem = self._problem(body)
        if problem:
            return problem
        group, holder = str(body["group"]), str(body["holder"])
        service = self.settings["groups"][group]
        if holder != self.settings["name"] and (why := self.object_to(service)):
            return HTTPStatus.CONFLICT, {"granted": False, "holder": "", "why": why}
        there = self.leases.take(group, holder, str(body["token"]), float(body.get("ttl_s", 60)))
        if there:
            why = f"{there['holder']} has been restarting since {common.utc(there['since'])}"
            return HTTPStatus.CONFLICT, {"granted": False, "holder": there["holder"], "why": why}
        return HTTPStatus.OK, {"granted": True}

    def release(self, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        """Answer to a call that gives a lease back."""
        problem = self._problem(body)
        if problem:
            return problem
        return HTTPStatus.OK, {"released": self.leases.release(str(body["group"]), str(body["token"]))}

    def state(self) -> tuple[int, dict[str, Any]]:
        """Which servers of this node are up or draining, and who restarts."""
        services = {}
        for service in self.settings["groups"].values():
            active = (
                common.unit_state(f"{service['unit']}.service", ("ActiveState",))["ActiveState"] == "active"
            )
            services[service["name"]] = {"active": active, "draining": common.drained(service["name"])}
        held = {
            group: lease["holder"]
            for group in self.settings["groups"]
            if (lease := self.leases.current(group))
        }
        return HTTPStatus.OK, {"services": services, "leases": held}

    def ready(self, name: str) -> tuple[int, dict[str, Any]]:
        """May new requests go to this node's server of that name?"""
        found = [service for service in self.settings["groups"].values() if service["name"] == name]
        if not found:
            return _nothing()
        if common.drained(name):
            return HTTPStatus.SERVICE_UNAVAILABLE, {"ready": False, "why": "draining"}
        state = common.unit_state(f"{found[0]['unit']}.service", ("ActiveState",))["ActiveState"]
        if state != "active":
            return HTTPStatus.SERVICE_UNAVAILABLE, {"ready": False, "why": state or "not there"}
        return HTTPStatus.OK, {"ready": True}

    def _problem(self, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]] | None:
        group, holder = body.get("group"), body.get("holder")
        service = self.settings["groups"].get(group)
        if service is None:
            return HTTPStatus.NOT_FOUND, {"granted": False, "why": f"no group {group} here"}
        if holder not in service["peers"] or not isinstance(body.get("token"), str) or not body["token"]:
            return HTTPStatus.FORBIDDEN, {"granted": False, "why": f"{holder} is not of group {group}"}
        if not isinstance(body.get("ttl_s", 1), (int, float)):
            return HTTPStatus.BAD_REQUEST, {"granted": False, "why": "ttl_s is no number"}
        return None


def allowed(settings: Mapping[str, Any]) -> frozenset[str]:
    """Addresses that may call: those of all peers, as far as they are addresses (names are not asked for)."""
    found = {"127.0.0.1", "::1"}
    for service in settings["groups"].values():
        for address in service["peers"].values():
            try:
                found.add(str(ipaddress.ip_address(address)))
            except ValueError:
                return frozenset()
    return frozenset(found)


class Handler(BaseHTTPRequestHandler):
    """HTTP in front of a Node; small bodies, few calls, peers only."""

    node: Node
    rate: Rate
    ready_rate: Rate
    allowed: frozenset[str] = frozenset()
    timeout = REQUEST_LIMIT_S
    protocol_version = "HTTP/1.0"
    server_version, sys_version = "bringup-lease", ""

    def do_GET(self) -> None:
        """`/v1/state`, and `/v1/ready/NAME`: that one to anybody, with calls of its own to count."""
        start, _, name = self.path.rpartition("/")
        if start == "/v1/ready":
            many = not self.ready_rate.allows(time.monotonic())
            busy = (HTTPStatus.TOO_MANY_REQUESTS, {"why": "too many calls"})
            self._answer(*(busy if many else self.node.ready(name)))
        elif self._may():
            self._answer(*(self.node.state() if self.path == "/v1/state" else _nothing()))

    def do_POST(self) -> None:
        """`/v1/lease` and `/v1/release`."""
        if not self._may():
            return
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > BODY_BYTES:
            self._answer(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                {"why": f"a body of at most {BODY_BYTES} bytes is needed"},
            )
            return
        try:
            body = json.loads(self.rfile.read(int(length)))
        except ValueError:
            body = None
        if not isinstance(body, dict):
            self._answer(HTTPStatus.BAD_REQUEST, {"why": "no JSON mapping"})
            return
        calls = {"/v1/lease": self.node.lease, "/v1/release": self.node.release}
        self._answer(*(calls[self.path](body) if self.path in calls else _nothing()))

    def _may(self) -> bool:
        if self.allowed and self.client_address[0] not in self.allowed:
            self._answer(HTTPStatus.FORBIDDEN, {"why": "not a peer"})
            return False
        if not self.rate.allows(time.monotonic()):
            self._answer(HTTPStatus.TOO_MANY_REQUESTS, {"why": "too many calls"})
            return False
        return True

    def _answer(self, status: int, data: Mapping[str, Any]) -> None:
        # The node's name: whoever has called must be sure whose word this is (addresses can lead astray).
        content = json.dumps({"node": self.node.settings["name"], **data}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        """What was granted and given back, to the journal; who waits asks too often for a line each."""
        if getattr(self, "command", None) == "POST" and str(HTTPStatus.OK.value) in map(str, arguments):
            say(f"{self.client_address[0]} {format % arguments}")


def _nothing() -> tuple[int, dict[str, Any]]:
    return HTTPStatus.NOT_FOUND, {"why": "nothing here"}


class Server(ThreadingHTTPServer):
    """At most AT_ONCE calls at a time; more wait in the kernel's queue."""

    daemon_threads = True
    request_queue_size = 64
    slots = threading.BoundedSemaphore(AT_ONCE)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Wait for a free slot, then as always."""
        self.slots.acquire()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """As always, then free the slot."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.slots.release()


def serve(settings: Mapping[str, Any], file: Path) -> Server:
    """A server that is bound and ready; the caller lets it run."""
    address = str(settings["bind"])
    kind = type("BoundServer", (Server,), {"address_family": 10 if ":" in address else 2})
    handler = type(
        "BoundHandler",
        (Handler,),
        {
            "node": Node(settings, Leases(file)),
            "allowed": allowed(settings),
            "rate": Rate(CALLS_A_SECOND),
            "ready_rate": Rate(READY_CALLS_A_SECOND),
        },
    )
    made: Server = kind((address, int(settings["port"])), handler)
    return made


def main() -> int:
    settings = json.loads(SETTINGS.read_text(encoding="utf-8"))
    folder = os.environ.get("STATE_DIRECTORY", "/var/lib/bringup-lease")
    try:
        server = serve(settings, Path(folder) / "leases.json")
    except OSError as error:
        say(f"the lease listener cannot have {settings['bind']}:{settings['port']}: {error.strerror}")
        return 1
    server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
