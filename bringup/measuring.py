"""Loads on the servers of an inventory, through SSH tunnels, as a run with a record (I/O).

The tunnel is OpenSSH's: one written in Python would be the bottleneck that it measures. What it adds to a
round trip is measured before each suite and stands in the result.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bringup import catalog, fleet, looking, playbook, remote, runindex, runs
from bringup import inventory as inventories
from bringup import plan as plans
from bringup.errors import BringupError, Exit, HostUnreachable, Problem, UsageError
from bringup.events import Outcome
from bringup.planned import HostPlan, Plan, Service

if TYPE_CHECKING:
    from bringup import suites
    from bringup.bench import Summary
    from bringup.benching import Against, BenchResult
    from bringup.load import Target

TUNNEL_LIMIT_S = 20.0
POLL_S = 0.05
PROFILE = "profile"
"""Says that a result is compared with what the profile's measurement promises."""
BENCH = "bench"
LAST = "last"
RESULT = "bench.json"
INTERRUPTED = "interrupted"
NOT_FINISHED = "not finished"
"""Why a result has fewer loads than its suite: what stays in a run whose controller was killed."""
DIGEST = 12
"""Hexadecimal digits of a digest that a fingerprint shows."""


def run(
    inventory: str,
    suite_name: str,
    *,
    limit: str | None = None,
    service: str | None = None,
    against: str | None = None,
    scale: float = 1.0,
    say: Any = None,
) -> tuple[runs.RunRecord, BenchResult, Against | None]:
    """Measures each chosen server in turn, with what is gathered beside it. `bench.json`, `bench.csv`,
    `against.json` and `report.html` lie in the run's folder; the record ends as GATE when a gate failed.

    A bench that is interrupted, or that an error ends, leaves the loads that it had measured, and why.

    `against`: `profile` or a profile's name, `last`, a run, or a file with a result. `scale`: a suite with prompts and
    answers at this share of their length, named so. Raises UsageError for wrong names (before anything runs).
    """
    from bringup import benching, lock, suites

    suite = suites.load(suite_name)
    if scale != 1:
        suite, suite_name = suites.scaled(suite, scale), f"{suite_name} at {scale:g} of its lengths"
    chosen = _chosen(inventory, limit, service)
    place = inventories.folder_of(inventory).name
    if against == LAST:
        against = last_measured(place, [f"{planned.name} {one.name}" for _, planned, one in chosen], suite).id
    before = _before(against, chosen)
    arguments = {"suite": suite_name, "limit": limit, "service": service, "against": against}
    with playbook.signals(), lock.hold(place, f"bench {inventory}") as held:
        record = runs.begin(BENCH, place, {"inventory": inventory, **arguments}, notes=held)
        kept = Kept(record.folder)
        try:
            for number, one in enumerate(chosen):
                keep = partial(kept.keep, number)
                keep(measure(suite, *one, name=suite_name, say=say, keep=keep))
        except KeyboardInterrupt:
            notes = kept.break_off(INTERRUPTED, say)
            runs.finish(record, Exit.INTERRUPTED, Outcome(notes=notes))
            raise
        except Exception as error:
            notes = kept.break_off(str(error), say)
            code = error.code if isinstance(error, BringupError) else Exit.INTERNAL
            runs.finish(record, code, Outcome(errors=(str(error),), notes=notes))
            raise
        finally:
            remote.close_all()
        result = kept.whole()
        compared = benching.against(*_paired(before, result)) if before else None
        write(record.folder, result, compared)
        failed = benching.gates(result, compared)
        code = Exit.GATE if failed else Exit.DONE
        return runs.finish(record, code, Outcome(errors=failed)), result, compared


@dataclass
class Kept:
    """What a bench has measured so far, by the number of the server: on disk after each load, so that nothing
    that ends the bench takes it away."""

    folder: Path
    parts: dict[int, BenchResult] = field(default_factory=dict)

    def keep(self, number: int, result: BenchResult) -> None:
        """Keeps what has been measured on a server, in the place of what was kept of it before."""
        self.parts[number] = result
        runs.write_private(self.folder / RESULT, _text(self._so_far(NOT_FINISHED)))

    def whole(self) -> BenchResult:
        """All results as one."""
        return self._so_far("")

    def break_off(self, why: str, say: Any = None) -> tuple[str, ...]:
        """Writes the files of what has been measured, if there is something, and says so; what was said."""
        if not self.parts:
            return ()
        result = self._so_far(why)
        write(self.folder, result)
        count = f"{result.loads} measured load{'s' * (result.loads != 1)}"
        left = f"broken off ({why}); kept in runs/{self.folder.name}/{RESULT}: {count}"
        if say is not None:
            say(left)
        return (left,)

    def _so_far(self, why: str) -> BenchResult:
        from bringup import benching

        return replace(benching.joined(list(self.parts.values())), broken_off=why)


def _text(result: BenchResult) -> str:
    return json.dumps(result.as_json(), indent=1) + "\n"


def measure(
    suite: suites.Suite,
    host: fleet.Host,
    planned: HostPlan,
    service: Service,
    *,
    name: str,
    say: Any = None,
    keep: Callable[[BenchResult], None] = lambda result: None,
) -> BenchResult:
    """A suite on one server, with what was gathered beside it. `keep` gets what has been measured so far, after
    each load. Raises HostUnreachable, or UsageError when the server does not answer."""
    from bringup import benching, beside, engineclient

    known = catalog.lazy()
    engine = known.engine(known.profile(service.profile).engine)
    with (
        beside.watched(host, planned, service, engine.log.format) as seen,
        target(host, planned, service) as reached,
    ):
        digest = plans.digest_of(known.profile(service.profile).model_dump(mode="json"))
        prints = {reached.name: {**seen.fingerprint, "profile digest": digest[:DIGEST]}}
        if not host.local:
            seen.tunnel_ms = tunnel_ms(host, service, reached, seen.notes)
        result = benching.run_suite(
            suite,
            [reached],
            name=name,
            fingerprints=prints,
            say=say or (lambda line: None),
            client=engineclient.of(host, planned, service, engine),
            keep=keep,
        )
    return benching.with_beside(result, seen.as_json())


def tunnel_ms(host: fleet.Host, service: Service, reached: Target, notes: list[str]) -> float | None:
    """What the way through the tunnel adds to a round trip: median milliseconds of asking for the models from
    here, less the same from the node itself. None, and the reason in `notes`, when it cannot be had. Health is
    not asked: in SGLang every answer to it takes a second (`health_generate` in http_server.py of 0.5.15)."""
    from bringup import beside
    from bringup.node.beside import trip_ms

    path = service.endpoints.models
    try:
        there = beside.look(host, {"what": "trip", "service": service.name, "path": path})
        if "trip_ms" not in there:
            raise OSError(there.get("error", "no answer"))
        name, port, _ = reached.address
        return round(max(0.0, trip_ms(name, port, path) - float(there["trip_ms"])), 3)
    except (OSError, BringupError) as error:
        notes.append(f"what the tunnel costs is not known: {error}")
        return None


def write(
    folder: Path,
    result: BenchResult,
    compared: Against | None = None,
    ladder: Sequence[tuple[str, float]] = (),
) -> None:
    """A result's files in a run's folder."""
    from bringup import benching, benchreport

    files = {
        RESULT: _text(result),
        "bench.csv": benching.as_csv(result),
        "report.html": benchreport.page(result, against=compared, ladder=ladder),
    }
    if compared is not None:
        files["against.json"] = json.dumps(compared.as_json(), indent=1) + "\n"
    for name, text in files.items():
        runs.write_private(folder / name, text)


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
            context=service.context_tokens,
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


def earlier(name: str, command: str, place: str) -> runs.RunRecord:
    """An earlier run by its id or a part of it; `last` is the newest of this command on this inventory, and not
    one of the plays that it ran. Raises UsageError."""
    if name != LAST:
        return runs.find(name)
    newest = runindex.listed(place, 1, name=command)
    if not newest:
        raise UsageError(Problem(f"run {LAST}", f"there is no run of {command} on {place}"))
    return newest[0]


def last_measured(place: str, servers: Collection[str], suite: suites.Suite) -> runs.RunRecord:
    """The newest bench on an inventory that left a measurement of each of these servers under a load of this
    suite. Raises UsageError when there is none."""
    labels = {step.load.label for step in suite.steps}
    for record in runindex.listed(place, sys.maxsize, name=BENCH):
        found = _summaries(record)
        if all(labels & found.get(server, {}).keys() for server in servers):
            return record
    what = f"no bench on {place} has measured {', '.join(servers)} under a load of this suite"
    raise UsageError(
        Problem(f"--against {LAST}", what, "Measure once without --against, or name a run or profile.")
    )


def _summaries(record: runs.RunRecord) -> dict[str, Mapping[str, Summary]]:
    """What a bench left, by server and load; {} when it left nothing that can be read."""
    from bringup import benching

    try:
        text = (record.folder / RESULT).read_text(encoding="utf-8")
        return {target.name: target.summaries for target in benching.read_result(text, RESULT).targets}
    except (OSError, UsageError):
        return {}


def _before(
    against: str | None, chosen: Sequence[tuple[fleet.Host, HostPlan, Service]]
) -> dict[str, Mapping[str, Summary]]:
    """What to compare with, by target; {} for nothing."""
    from bringup import benching

    if against is None:
        return {}
    known = catalog.lazy()
    if against == PROFILE or against in known.names("profiles"):
        names = {
            f"{planned.name} {one.name}": one.profile if against == PROFILE else against
            for _, planned, one in chosen
        }
        found = {key: benching.of_profile(known.profile(name).expectations) for key, name in names.items()}
        lacking = sorted({names[key] for key, loads in found.items() if not loads})
        if lacking:
            raise UsageError(
                [
                    Problem(
                        "--against", f"profile {name} has no measurement of its own", "Name a run instead"
                    )
                    for name in lacking
                ]
            )
        return dict(found)
    path = Path(against)
    if not path.is_file():
        path = runs.find(against).folder / RESULT
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        raise UsageError(
            Problem("--against", f"{path.name} of {against} is not there; is it a bench?")
        ) from None
    return {target.name: target.summaries for target in benching.read_result(text, str(path)).targets}


def _paired(
    before: Mapping[str, Mapping[str, Summary]], result: BenchResult
) -> tuple[dict[str, Summary], dict[str, Summary]]:
    """Loads of both, under the same names: by target and load; one target on either side is the same."""
    now = {target.name: target.summaries for target in result.targets}
    if len(now) == len(before) == 1:
        return dict(next(iter(before.values()))), dict(next(iter(now.values())))
    first, second = (
        {f"{target}: {label}": summary for target, loads in side.items() for label, summary in loads.items()}
        for side in (before, now)
    )
    return first, second
