"""Status, answers and logs of an inventory's servers: one SSH round trip a host, in parallel (I/O)."""

from __future__ import annotations

import json
import re
import shlex
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bringup import ROOT, carrying, fleet, remote
from bringup.errors import BringupError, Exit, HostUnreachable, Problem, UsageError, unknown
from bringup.fleet import Host

if TYPE_CHECKING:
    from bringup.planned import HostPlan, Service
    from bringup.verdicts import Context

PROBE_LIMIT_S = 15.0
ASK_LIMIT_S = 120.0
MARGIN_S = 20.0
"""Beyond a request's own limit: connecting, starting Python on a busy node."""

WATCH_EVERY_S = 5.0
CRASH_LINES = 400
LINES_SHOWN = 12
LOG_FOLDER = "/var/log/bringup"
FOLLOW_LIMIT_S = 24 * 3600
AS_ROOT = 'if [ "$(id -u)" = 0 ]; then exec {0}; else exec sudo -n {0}; fi'


@dataclass(frozen=True)
class Target:
    """A host and the services that its plan has (None: the plan is not known; whatever is on the node)."""

    host: Host
    services: tuple[str, ...] | None


def targets(inventory: str, limit: str | None = None, service: str | None = None) -> list[Target]:
    """The hosts that `limit` picks, with their planned services (only `service` when it is given).

    A wrong intent does not stop the looking: then it is said on stderr, and what the nodes have is shown.
    """
    groups = fleet.groups_of(inventory)
    names = fleet.matching(groups, limit)
    hosts = fleet.hosts_of(inventory, names)
    planned = _planned(inventory)
    known = sorted({one for services in planned.values() for one in services})
    if service and planned and service not in known:
        raise UsageError(Problem("--service", *unknown("service", service, known)))
    result = []
    for host in hosts:
        services = planned.get(host.name)
        if service:
            services = (service,) if services is None or service in services else ()
        if services != ():
            result.append(Target(host, services))
    return result


def _planned(inventory: str) -> dict[str, tuple[str, ...]]:
    from bringup import plan

    try:
        resolved = plan.load(inventory)
    except BringupError as error:
        print(f"The plan is wrong, so what is on the nodes is shown:\n{error}", file=sys.stderr)
        return {}
    return {host.name: tuple(service.name for service in host.services) for host in resolved.hosts}


def status(chosen: Sequence[Target]) -> list[dict[str, Any]]:
    """One row a service: host, service, state, healthy, model, uptime_s, last_restart, next_restart, why,
    ...
    """
    return _rows(chosen, {"what": "status", "limit_s": PROBE_LIMIT_S}, PROBE_LIMIT_S + MARGIN_S)


def ask(
    chosen: Sequence[Target], prompt: str, tokens: int, limit_s: float = ASK_LIMIT_S
) -> list[dict[str, Any]]:
    """One chat completion from each service, asked on the node itself: text, tokens, seconds, address or
    error.
    """
    request = {"what": "ask", "prompt": prompt, "tokens": tokens, "limit_s": limit_s}
    return [_addressed(row, chosen) for row in _rows(chosen, request, limit_s + MARGIN_S)]


def crashes(chosen: Sequence[Target], lines: int) -> list[dict[str, Any]]:
    """The last failure of each service: when (epoch seconds), the journal around it, the log before it."""
    return _rows(chosen, {"what": "crash", "lines": lines}, 2 * MARGIN_S)


def evidence(chosen: Sequence[Target], lines: int) -> list[dict[str, Any]]:
    """Rows as `crashes` gives them, with what is there now for a service that has not failed, and `kernel`."""
    return _rows(chosen, {"what": "evidence", "lines": lines}, 2 * MARGIN_S)


def contexts(inventory: str) -> dict[tuple[str, str], Context]:
    """(host, service) -> what the plan knows about where its evidence comes from; empty for a wrong plan."""
    from bringup import plan

    try:
        resolved = plan.load(inventory)
    except BringupError:
        return {}
    return {
        (host.name, service.name): _context(host, service)
        for host in resolved.hosts
        for service in host.services
    }


def _context(host: HostPlan, service: Service) -> Context:
    from bringup.verdicts import Context

    gpus, links = host.expected.get("gpus"), host.expected.get("links") or {}
    return Context(
        platform=host.platform,
        nvswitch=bool(links.get("nvswitches")) if gpus else None,
        engine=service.engine,
        engine_version=service.engine_version,
        gpu_count=int(gpus["count"]) if gpus else None,
        arch=host.arch,
    )


def _rows(chosen: Sequence[Target], request: Mapping[str, Any], limit_s: float) -> list[dict[str, Any]]:
    """Runs the node's look program on every host; a host that cannot be reached is a row with `state`
    unreachable.
    """
    by_name = {target.host.name: target for target in chosen}

    def look(host: Host) -> list[dict[str, Any]]:
        services = by_name[host.name].services
        return _look(host, {**request, "services": list(services) if services else None}, limit_s)

    rows: list[dict[str, Any]] = []
    for target, found in zip(chosen, fleet.each([t.host for t in chosen], look), strict=True):
        if isinstance(found, Exception):
            why = found.problems[0].what if isinstance(found, BringupError) else str(found)
            rows += [_unreached(target.host.name, name, why) for name in target.services or ("?",)]
        else:
            rows += [{"host": target.host.name, **row} for row in found]
    return rows


def _unreached(host: str, service: str, why: str) -> dict[str, Any]:
    return {
        "host": host,
        "service": service,
        "state": "unreachable",
        "healthy": False,
        "why": why,
        "error": why,
        "text": "",
        "tokens": 0,
        "seconds": 0.0,
        "model": "",
        "journal": [],
        "log": [],
        "kernel": [],
        "when": 0.0,
    }


def _look(host: Host, request: Mapping[str, Any], limit_s: float) -> list[dict[str, Any]]:
    quick = request["what"] == "ask"
    ran = remote.once(
        host, AS_ROOT.format("python3 -I -"), stdin=script(request), limit_s=limit_s, quick=quick
    )
    try:
        rows: list[dict[str, Any]] = json.loads(ran.out)["services"]
    except (ValueError, KeyError, TypeError):
        said = (ran.err or ran.out).strip().splitlines()
        raise HostUnreachable(
            Problem(host.name, f"looking failed (exit {ran.code}): {said[-1] if said else 'no output'}")
        ) from None
    return rows


def script(request: Mapping[str, Any], modules: Sequence[str] = ("common", "look")) -> str:
    """One Python program that needs nothing on the node: some modules, the request as data, and the call of the last
    module's `main`."""
    folder = ROOT / "bringup" / "node"
    sources = {name: (folder / f"{name}.py").read_text(encoding="utf-8") for name in modules}
    called = f"sys.modules['bringup.node.{modules[-1]}'].main"
    return (
        f"{carrying.bundle(sources.items())}import sys, types\n"
        f"{MODULES}{called}(json.loads({json.dumps(dict(request))!r}))\n"
    )


MODULES = """for name in ('bringup', 'bringup.node', *(f'bringup.node.{part}' for part in texts)):
    sys.modules[name] = types.ModuleType(name)
    parent, _, short = name.rpartition('.')
    if parent:
        setattr(sys.modules[parent], short, sys.modules[name])
for part, text in texts.items():
    exec(compiled(text, f'{part}.py', digests[part]), sys.modules[f'bringup.node.{part}'].__dict__)
"""


def _addressed(row: dict[str, Any], chosen: Sequence[Target]) -> dict[str, Any]:
    """The row with the address that a client uses: the node's, or the node's own loopback."""
    host = next(target.host for target in chosen if target.host.name == row["host"])
    inside = str(row.get("address", ""))
    loopback = inside.startswith("127.") or inside in ("::1", "localhost", "")
    at = inside if loopback else host.address
    return {**row, "address": f"http://{at}:{row.get('port', '?')}/v1", "loopback": loopback}


def exit_of(rows: Sequence[Mapping[str, Any]]) -> Exit:
    """UNREACHABLE when a host was not reached, else FAILED when a service is not healthy, else DONE."""
    if any(row["state"] == "unreachable" for row in rows):
        return Exit.UNREACHABLE
    return Exit.DONE if rows and all(row["healthy"] for row in rows) else Exit.FAILED


def answers_exit(rows: Sequence[Mapping[str, Any]]) -> Exit:
    """DONE when every service answered with at least one token."""
    if any(row.get("state") == "unreachable" for row in rows):
        return Exit.UNREACHABLE
    return Exit.DONE if rows and all(row["tokens"] > 0 for row in rows) else Exit.FAILED


def log_command(service: str, lines: int, *, follow: bool) -> str:
    """The shell command that prints a service's log: the newest file behind the link, followed through
    rotations, or the journal of its own that it logs to where there is no such folder.
    """
    path = shlex.quote(f"{LOG_FOLDER}/{service}/engine.log")
    journal = shlex.join(
        ["journalctl", f"--namespace=bringup-{service}", "--output=cat", "--quiet", f"--lines={lines}"]
    )
    file = f"tail -n {lines} {'-F ' if follow else ''}{path}"
    own = shlex.quote(f"/etc/systemd/journald@bringup-{service}.conf")
    either = f"if [ -e {own} ]; then {journal}{' --follow' if follow else ''}; else {file}; fi"
    return AS_ROOT.format(f"sh -c {shlex.quote(either)}")


def logs(chosen: Sequence[Target], lines: int, *, follow: bool = False) -> Iterator[tuple[str, str, str]]:
    """(host, service, line) of each service's log: the last `lines`, and with `follow` what comes, until
    interrupted.

    A host that cannot be reached gives one line that says so, from the service called `!!`; one without the log
    or whose command fails, from the service called `!`.
    """
    import queue

    inbox: queue.SimpleQueue[tuple[str, str, str] | None] = queue.SimpleQueue()
    jobs = [(target.host, service) for target in chosen for service in target.services or ()]

    def read(host: Host, service: str) -> None:
        kept = ""

        def take(text: str) -> None:
            nonlocal kept
            *whole, kept = (kept + text).split("\n")
            for line in whole:
                inbox.put((host.name, service, line))

        try:
            limit = FOLLOW_LIMIT_S if follow else remote.COMMAND_LIMIT_S
            ran = remote.run(host, log_command(service, lines, follow=follow), limit_s=limit, on_output=take)
            if kept:
                inbox.put((host.name, service, kept))
            if ran.code:
                inbox.put((host.name, "!", ran.err.strip()))
        except BringupError as error:
            inbox.put((host.name, "!!", error.problems[0].what))
        finally:
            inbox.put(None)

    for host, service in jobs:
        threading.Thread(target=read, args=(host, service), daemon=True).start()
    left = len(jobs)
    while left:
        item = inbox.get()
        if item is None:
            left -= 1
        else:
            yield item


def execute(hosts: Sequence[Host], command: str, at_once: int, limit_s: float) -> list[dict[str, Any]]:
    """A shell command on every host: rows of host, reached, code, out, err; code 255 for a host that was not
    reached.
    """
    rows = []
    for host, ran in zip(
        hosts, fleet.each(hosts, lambda h: remote.run(h, command, limit_s=limit_s), at_once), strict=True
    ):
        if isinstance(ran, Exception):
            why = ran.problems[0].what if isinstance(ran, BringupError) else str(ran)
            rows.append({"host": host.name, "reached": False, "code": 255, "out": "", "err": why})
        else:
            rows.append(
                {"host": host.name, "reached": True, "code": ran.code, "out": ran.out, "err": ran.err}
            )
    return rows


def grouped(rows: Sequence[Mapping[str, Any]]) -> list[tuple[list[str], Mapping[str, Any]]]:
    """Hosts that said exactly the same, together, in the order in which they first appear."""
    groups: dict[tuple[int, str, str], tuple[list[str], Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["code"], row["out"], row["err"]), ([], row))[0].append(row["host"])
    return list(groups.values())


SHORT_LIST = 4
"""So many hosts are all named; of more, runs of numbers are drawn together."""

_NUMBERED = re.compile(r"(.*?)(\d+)")
_TERMINAL = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)
"""Colours, titles, cursor movements and other control characters: a node must not write on our terminal."""


def named(hosts: Sequence[str]) -> str:
    """Hosts for a heading: `a, b`; of many `h20-01..h20-11, h20-14 (12 hosts)`."""
    if len(hosts) <= SHORT_LIST:
        return ", ".join(hosts)
    runs: list[tuple[str, str]] = []
    for host in hosts:
        if runs and host == _next(runs[-1][1]):
            runs[-1] = (runs[-1][0], host)
        else:
            runs.append((host, host))
    names = [first if first == last else f"{first}..{last}" for first, last in runs]
    return f"{', '.join(names)} ({len(hosts)} hosts)"


def _next(host: str) -> str | None:
    """The name with the next number: `h20-09` -> `h20-10`."""
    match = _NUMBERED.fullmatch(host)
    return f"{match[1]}{int(match[2]) + 1:0{len(match[2])}}" if match else None


def plain_lines(text: str) -> list[str]:
    """Lines of a command's output without what steers a terminal; of a line that was written over, the last state."""
    rows = (line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    lines = [_TERMINAL.sub("", row).expandtabs() for row in rows]
    return lines[:-1] if lines[-1] == "" else lines


def watch(chosen: Sequence[Target]) -> Iterator[list[dict[str, Any]]]:
    """Status rows, again every WATCH_EVERY_S seconds, until interrupted."""
    while True:
        begun = time.monotonic()
        yield status(chosen)
        time.sleep(max(0.5, WATCH_EVERY_S - (time.monotonic() - begun)))
