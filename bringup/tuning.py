"""Finding better settings for one server: each is put on the node, measured, judged, and taken away again
(I/O).

Which settings, in which order, and which one wins is decided in `tune.py`; a setting reaches the node the
way every setting does, through the plan, from a copy of the inventory that differs in this one service.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bringup import (
    ROOT,
    benching,
    catalog,
    confirm,
    fleet,
    gpusamples,
    measuring,
    playbook,
    remote,
    runs,
    tune,
)
from bringup import inventory as inventories
from bringup import plan as plans
from bringup.errors import BringupError, Exit, Problem, UsageError
from bringup.planned import HostPlan, Service

STATES = ROOT / "runs" / "tune"
SAMPLE_LIMIT_S = 4 * 3600.0
TAGS = "engine_service"


@dataclass(frozen=True)
class Tuned:
    """The decision, all that was measured for it, and the candidate profile (None: the profile itself is
    best).
    """

    decision: tune.Decision
    measured: Mapping[str, tune.Candidate]
    profile: Mapping[str, Any] | None
    state: Path


def run(
    inventory: str,
    limit: str,
    *,
    service: str | None = None,
    yes: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> Tuned:
    """Tunes one service on one host along its profile's `tune:` section; goes on where an earlier call
    stopped.

    Raises UsageError when there is nothing to tune and Locked when the operator does not agree.
    """
    host, planned, chosen = _one(inventory, limit, service)
    known = catalog.lazy()
    wish = known.profile(chosen.profile).tune
    if wish is None:
        raise UsageError(
            Problem(f"profile {chosen.profile}", "has no `tune:` section", "Add axes and workloads")
        )
    axes = [tune.settings_of(axis) for axis in wish.axes]
    count = sum(map(len, axes))
    what = f"tune {chosen.name}: restarts it with up to {count} settings, then puts it back. It runs"
    confirm.disruptive(what, inventories.folder_of(inventory).name, [host.name], yes=yes)
    return climb(inventory, host, planned, chosen, wish, axes, say)


def climb(
    inventory: str,
    host: fleet.Host,
    planned: HostPlan,
    chosen: Service,
    wish: catalog.Tune,
    axes: Sequence[Sequence[tune.Setting]],
    say: Callable[[str], None],
) -> Tuned:
    """Measures along `axes` and decides; the node is as planned again afterwards, whatever happens."""
    folder = inventories.folder_of(inventory)
    state = STATES / f"{folder.name}-{host.name}-{chosen.name}.json"
    key = f"{chosen.profile} {chosen.engine} {chosen.engine_version} {folder.name} {host.name}"
    suite = benching.suite_of(wish)
    trials = STATES / f".trial-{host.name}-{chosen.name}"

    def measure(setting: tune.Setting) -> tune.Candidate:
        say(f"{setting.name}: starting")
        trial = write_trial(folder, trials / folder.name, host.name, chosen.name, setting)
        failed = _apply(str(trial), host.name)
        if failed:
            return tune.Candidate(setting.name, {}, failed=failed)
        now = plans.load(str(trial)).host(host.name)
        server = next(one for one in now.services if one.name == chosen.name)
        with sampled(host, server) as free, measuring.target(host, now, server) as target:
            result = benching.run_suite(suite, [target], name=setting.name, say=say)
        return benching.as_candidate(setting.name, result.targets[0], free())

    def restore() -> None:
        shutil.rmtree(trials, ignore_errors=True)
        say("putting the planned settings back")
        failed = _apply(inventory, host.name)
        if failed:
            raise BringupError(
                Problem(host.name, f"is not back as planned: {failed}", "Run invoke provision")
            )

    limits = tune.constraints_of(wish)
    decision = tune.climb(axes, measure, limits, state, key, restore)
    measured = tune.load_state(state, key)
    return Tuned(decision, measured, _profile(decision, measured, axes, chosen, wish), state)


def write_trial(folder: Path, into: Path, host: str, service: str, setting: tune.Setting) -> Path:
    """A copy of an inventory in which one service of one host has a setting on top of its own; its folder."""
    shutil.rmtree(into, ignore_errors=True)
    shutil.copytree(folder, into)
    found = next(one for one in inventories.read(str(folder)).hosts if one.name == host)
    services = [dict(one) for one in found.variables["node_services"]]
    for one in services:
        if one["name"] == service:
            one["flags"] = {**(one.get("flags") or {}), **setting.flags}
            one["environment"] = {**(one.get("environment") or {}), **setting.environment}
    own = into / "host_vars" / host
    for suffix in (".yml", ".yaml"):
        plain = own.with_name(host + suffix)
        if plain.is_file():
            own.mkdir(exist_ok=True)
            plain.rename(own / f"own{suffix}")
    own.mkdir(parents=True, exist_ok=True)
    (own / "zz-trial.yml").write_text(yaml.safe_dump({"node_services": services}, sort_keys=False))
    return into


def _apply(inventory: str, host: str) -> str:
    """Brings the host's servers to an inventory's plan; why it failed, or the empty string."""
    record = playbook.run("provision", inventory, name="tune", limit=host, tags=TAGS)
    if record.exit_code == Exit.DONE:
        return ""
    if record.exit_code == Exit.INTERRUPTED:
        raise KeyboardInterrupt
    words = [
        failure.message.strip().splitlines()[-1] for failure in record.failures if failure.message.strip()
    ]
    return words[0] if words else record.status


@contextmanager
def sampled(host: fleet.Host, server: Service) -> Iterator[Callable[[], float | None]]:
    """Watches the server's GPUs for as long as the block lasts; gives the GiB left on the fullest of them."""
    if not server.gpus:
        yield lambda: None
        return
    kept: list[str] = []
    ids = ",".join(map(str, server.gpus))
    stop = threading.Event()
    command = (
        f"timeout {SAMPLE_LIMIT_S:.0f} nvidia-smi -i {ids} --query-gpu={gpusamples.QUERY} --format=csv -l 1"
    )

    def watch() -> None:
        remote.run(host, command, limit_s=SAMPLE_LIMIT_S, on_output=kept.append, stop=stop)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()

    def free() -> float | None:
        left = [use.free_gib for use in gpusamples.summarise(gpusamples.parse("".join(kept))) if use.free_gib]
        return min(left, default=None)

    try:
        yield free
    finally:
        stop.set()
        thread.join()


def _one(inventory: str, limit: str, service: str | None) -> tuple[fleet.Host, HostPlan, Service]:
    host = fleet.one_host(inventory, limit)
    planned = plans.load(inventory).host(host.name)
    found = [one for one in planned.services if service in (None, one.name)]
    if len(found) != 1:
        names = ", ".join(one.name for one in planned.services) or "none"
        raise UsageError(Problem("--service", f"one service is tuned at a time; {host.name} has: {names}"))
    return host, planned, found[0]


def _profile(
    decision: tune.Decision,
    measured: Mapping[str, tune.Candidate],
    axes: Sequence[Sequence[tune.Setting]],
    chosen: Service,
    wish: catalog.Tune,
) -> dict[str, Any] | None:
    """The picked setting as a profile's YAML data; None when nothing is better than the profile itself."""
    if decision.picked is None or not decision.picked:
        return None
    settings = {one.name: one for one in _all(axes)}
    setting = settings.get(decision.picked)
    if setting is None or not (setting.flags or setting.environment):
        return None
    loads = {
        step.load.label: {
            "prompt_tokens": step.prompt_tokens,
            "output_tokens": step.output_tokens,
            "concurrent": step.concurrent,
        }
        for step in benching.suite_of(wish).steps
    }
    title = f"{chosen.profile} with {setting.name}"
    return tune.as_profile(
        chosen.profile,
        title,
        setting,
        measured[decision.picked],
        loads,
        f"measured by invoke tune, {runs.commit()}",
    )


def _all(axes: Sequence[Sequence[tune.Setting]]) -> list[tune.Setting]:
    """Every setting that a climb along `axes` can reach."""
    reached = [tune.Setting()]
    for axis in axes:
        reached = [*reached, *(base.with_(step) for base in reached for step in axis)]
    return reached


def as_json(tuned: Tuned) -> dict[str, Any]:
    """The decision and its evidence as plain data."""
    import dataclasses

    return {
        "picked": tuned.decision.picked,
        "reason": tuned.decision.reason,
        "rejected": dict(tuned.decision.rejected),
        "measured": [
            json.loads(json.dumps(dataclasses.asdict(one), default=str)) for one in tuned.measured.values()
        ],
        "profile": tuned.profile,
        "state": str(tuned.state),
    }
