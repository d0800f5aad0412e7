"""Loads on the servers of an inventory, through SSH tunnels, as a run with a record (I/O).

The tunnel is OpenSSH's: one written in Python would be the bottleneck that it measures.
"""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bringup import fleet, looking, remote, runs
from bringup.errors import BringupError, Exit, HostUnreachable, Problem, UsageError
from bringup.events import Outcome
from bringup.planned import HostPlan, Plan, Service

if TYPE_CHECKING:
    from bringup.bench import Summary
    from bringup.benching import Against, BenchResult
    from bringup.load import Target

TUNNEL_LIMIT_S = 20.0
POLL_S = 0.05
PROFILE = "profile"
"""Says that a result is compared with what the profile's measurement promises."""


def run(
    inventory: str,
    suite_name: str,
    *,
    limit: str | None = None,
    service: str | None = None,
    against: str | None = None,
    say: Any = None,
) -> tuple[runs.RunRecord, BenchResult, Against | None]:
    """Measures each chosen server in turn; result, comparison and page lie in the run's folder.

    `against`: `profile`, a run, or a file with a result. Raises UsageError for wrong names (before anything
    runs).
    """
    from bringup import benching, benchreport, suites

    suite = suites.load(suite_name)
    chosen = _chosen(inventory, limit, service)
    before = _before(against, chosen)
    record = runs.begin(
        "bench", Path(inventory).name, {"suite": suite_name, "limit": limit, "service": service}
    )
    try:
        with ExitStack() as stack:
            targets = [stack.enter_context(target(host, planned, one)) for host, planned, one in chosen]
            result = benching.run_suite(
                suite,
                targets,
                name=suite_name,
                fingerprints=_fingerprints(chosen),
                say=say or (lambda line: None),
            )
    except KeyboardInterrupt:
        runs.finish(record, Exit.INTERRUPTED, Outcome())
        raise
    except Exception as error:
        code = error.code if isinstance(error, BringupError) else Exit.INTERNAL
        runs.finish(record, code, Outcome(errors=(str(error),)))
        raise
    compared = benching.against(before, _summaries(result)) if before else None
    runs.write_private(record.folder / "result.json", json.dumps(result.as_json(), indent=1) + "\n")
    runs.write_private(record.folder / "report.html", benchreport.page(result, against=compared))
    worse = compared is not None and compared.verdict == "worse"
    return runs.finish(record, Exit.FAILED if worse else Exit.DONE, Outcome()), result, compared


@contextmanager
def target(host: fleet.Host, planned: HostPlan, service: Service) -> Iterator[Target]:
    """The server as a load client reaches it: a tunnel, its key, the names of its metrics."""
    from bringup.load import Target as LoadTarget

    address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(service.bind, service.bind)
    with tunnel(host, address, service.port) as port:
        yield LoadTarget(
            base_url=f"http://127.0.0.1:{port}",
            model=service.served_name,
            api_key=_key(host, service),
            name=f"{planned.name} {service.name}",
            completions=service.endpoints.completions,
            chat=service.endpoints.chat,
            metrics=service.endpoints.metrics,
            metrics_names=service.metrics_names,
            engine=service.engine,
            engine_version=service.engine_version,
        )


@contextmanager
def tunnel(host: fleet.Host, address: str, port: int) -> Iterator[int]:
    """A local port that leads to `address`:`port` on the node. Raises HostUnreachable when it does not
    open.
    """
    if host.local:
        yield port
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        local = int(free.getsockname()[1])
    *argv, destination = remote.ssh_argv(host)
    forward = f"127.0.0.1:{local}:{f'[{address}]' if ':' in address else address}:{port}"
    options = ["-N", "-o", "BatchMode=yes", "-o", "ExitOnForwardFailure=yes", "-L", forward]
    process = subprocess.Popen(
        [*argv, *options, destination],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        _wait_for(process, host, local)
        yield local
    finally:
        process.terminate()
        process.communicate()


def _wait_for(process: subprocess.Popen[bytes], host: fleet.Host, port: int) -> None:
    deadline = time.monotonic() + TUNNEL_LIMIT_S
    while True:
        if process.poll() is not None:
            said = process.stderr.read().decode(errors="replace").strip() if process.stderr else ""
            raise HostUnreachable(Problem(host.name, f"the tunnel did not open: {said or 'ssh ended'}"))
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            if time.monotonic() > deadline:
                raise HostUnreachable(
                    Problem(host.name, f"the tunnel did not open within {TUNNEL_LIMIT_S:g} s")
                ) from None
            time.sleep(POLL_S)
        else:
            return


def _key(host: fleet.Host, service: Service) -> str:
    """The server's API key, read on the node; it stays in memory."""
    from bringup import systemd

    path = systemd.key_file(service)
    if not path:
        return ""
    ran = remote.run(host, looking.AS_ROOT.format(f"cat {path}"))
    if ran.code:
        raise HostUnreachable(
            Problem(host.name, f"the API key of {service.name} cannot be read: {ran.err.strip()}")
        )
    return ran.out.strip()


def _chosen(
    inventory: str, limit: str | None, service: str | None
) -> list[tuple[fleet.Host, HostPlan, Service]]:
    from bringup import plan as plans

    plan: Plan = plans.load(inventory)
    names = fleet.matching({host.name: host.groups for host in plan.hosts}, limit)
    found = [
        (host, plan.host(host.name), one)
        for host in fleet.hosts_of(inventory, names)
        for one in plan.host(host.name).services
        if service in (None, one.name)
    ]
    if not found:
        raise UsageError(
            Problem("--service", f"no service {service or ''} on {len(names)} hosts".replace("  ", " "))
        )
    return found


def _fingerprints(chosen: Sequence[tuple[fleet.Host, HostPlan, Service]]) -> dict[str, dict[str, str]]:
    """What a result must name to be comparable: platform, profile and the environment's digest."""
    found = {}
    for _, planned, service in chosen:
        digests = [one.digest[:12] for one in planned.environments if one.name == service.env_name]
        found[f"{planned.name} {service.name}"] = {
            "platform": planned.platform,
            "profile": service.profile,
            "environment": digests[0] if digests else "",
        }
    return found


def _summaries(result: BenchResult) -> dict[str, Summary]:
    """The first target's loads by label: comparisons are of one server."""
    first = result.targets[0]
    return {item.load.label: item.summary for item in first.measured if item.summary is not None}


def _before(
    against: str | None, chosen: Sequence[tuple[fleet.Host, HostPlan, Service]]
) -> Mapping[str, Summary]:
    from bringup import benching, catalog

    if against is None:
        return {}
    if against == PROFILE:
        profile = catalog.lazy().profile(chosen[0][2].profile)
        found = benching.of_profile(profile.expectations)
        if not found:
            raise UsageError(
                Problem("--against", f"profile {chosen[0][2].profile} has no measurement of its own")
            )
        return found
    path = Path(against)
    if not path.is_file():
        path = runs.find(against).folder / "result.json"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        raise UsageError(
            Problem("--against", f"{path.name} of {against} is not there; is it a bench?")
        ) from None
    return _summaries(benching.read_result(text, str(path)))
