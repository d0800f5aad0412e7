"""Finding better settings for one server: each is put on the node, measured, judged, and taken away again
(I/O).

Which settings, in which order, and which one wins is decided in `tune.py`; a setting reaches the node the
way every setting does, through the plan, from a copy of the inventory that differs in this one service.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
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
    lock,
    measuring,
    playbook,
    remote,
    runs,
    tune,
)
from bringup import (
    inventory as inventories,
)
from bringup import (
    plan as plans,
)
from bringup.errors import BringupError, Exit, Problem, UsageError
from bringup.events import Outcome
from bringup.planned import HostPlan, Service

TRIALS = ROOT / "runs" / ".trials"
TAGS = "engine_service"
STATE = "state.json"
CANDIDATE = "candidate.yml"
NAME = "tune"


@dataclass(frozen=True)
class Tuned:
    """The decision, all that was measured for it, and the candidate profile (None: the profile itself is
    best). `written`: the catalog file that it went into, if it was to.
    """

    decision: tune.Decision
    measured: Mapping[str, tune.Candidate]
    profile: Mapping[str, Any] | None
    record: runs.RunRecord
    written: Path | None = None


@dataclass(frozen=True)
class Job:
    """What is tuned: the server, its profile's wish, and the settings of each axis."""

    inventory: str
    folder: Path
    host: fleet.Host
    planned: HostPlan
    service: Service
    wish: catalog.Tune
    axes: tuple[tuple[tune.Setting, ...], ...]

    @property
    def key(self) -> str:
        """Names what is tuned, so that results of something else are not mixed in."""
        server = self.service
        engine = f"{server.engine} {server.engine_version}"
        return f"{server.profile} {engine} {self.folder.name} {self.host.name} {server.name}"


def run(
    inventory: str,
    limit: str | None,
    *,
    service: str | None = None,
    resume: str | None = None,
    yes: bool = False,
    write: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> Tuned:
    """Tunes one service on one host along its profile's `tune:` section; the node is as planned again
    afterwards, whatever happens. `resume`: a run that was interrupted, whose results are taken over.

    State, every setting's result, the candidate profile and a page lie in the run's folder; `write` puts the
    profile into the catalog as well. Raises UsageError when there is nothing to tune and Locked when the
    operator does not agree.
    """
    job = _job(inventory, limit, service)
    before = _before(resume, job)
    target = _catalog_file(job) if write else None
    count = sum(map(len, job.axes))
    what = f"tune {job.service.name}: restarts it with up to {count} settings, then puts it back. It runs"
    confirm.disruptive(what, job.folder.name, [job.host.name], yes=yes)
    arguments = {"inventory": inventory, "limit": limit, "service": service, "resume": resume}
    with playbook.signals(), lock.hold(job.folder.name, f"tune {inventory}") as notes:
        record = runs.begin(NAME, job.folder.name, arguments, notes=notes)
        try:
            _take_over(before, record)
            decision, measured = climb(job, record.folder, say)
            profile = _profile(decision, measured, job, record.id)
            _write_evidence(record.folder, job, measured, profile)
            written = _write_profile(target, profile) if target else None
        except KeyboardInterrupt:
            note = f"Go on with: invoke tune --inventory {inventory} --resume {record.id}"
            say(note)
            runs.finish(record, Exit.INTERRUPTED, Outcome(), notes=(*record.notes, note))
            raise
        except Exception as error:
            code = error.code if isinstance(error, BringupError) else Exit.INTERNAL
            runs.finish(record, code, Outcome(errors=(str(error),)))
            raise
        finally:
            remote.close_all()
        code = Exit.DONE if decision.picked is not None else Exit.GATE
        left_out = [note for one in measured.values() for note in one.left_out]
        finished = runs.finish(record, code, Outcome(), notes=(*record.notes, decision.reason, *left_out))
        return Tuned(decision, measured, profile, finished, written)


def climb(
    job: Job, folder: Path, say: Callable[[str], None]
) -> tuple[tune.Decision, Mapping[str, tune.Candidate]]:
    """Measures along the axes and decides; every result is in `folder` before the next is made."""
    suite = benching.suite_of(job.wish)
    trials = TRIALS / f"{job.host.name}-{job.service.name}"

    def measure(setting: tune.Setting) -> tune.Candidate:
        say(f"{setting.name}: starting")
        trial = write_trial(job.folder, trials / job.folder.name, job.host.name, job.service.name, setting)
        failed = _apply(str(trial), job.host.name, fresh=job.service.name)
        if failed:
            return tune.Candidate(setting.name, {}, failed=failed)
        now = plans.load(str(trial)).host(job.host.name)
        server = next(one for one in now.services if one.name == job.service.name)
        result = measuring.measure(suite, job.host, now, server, name=setting.name, say=say)
        _keep(folder, result)
        return benching.as_candidate(setting.name, result.targets[0], _free_gib(result.targets[0]))

    def restore() -> None:
        say("putting the planned settings back (Ctrl-C now leaves the node as it is)")
        try:
            failed = _apply(job.inventory, job.host.name)
        except KeyboardInterrupt:
            failed = "interrupted"
        finally:
            shutil.rmtree(trials, ignore_errors=True)
        if failed:
            remedy = f"Run invoke provision --inventory {job.inventory} --limit {job.host.name}"
            raise BringupError(Problem(job.host.name, f"is not back as planned: {failed}", remedy))

    limits = tune.constraints_of(job.wish)
    decision = tune.climb(job.axes, measure, limits, folder / STATE, job.key, restore)
    return decision, tune.load_state(folder / STATE, job.key)


def _free_gib(target: benching.TargetResult) -> float | None:
    found = [use["free_gib"] for use in target.beside.get("gpus") or () if use.get("free_gib") is not None]
    return min(found, default=None)


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


def _apply(inventory: str, host: str, *, fresh: str = "") -> str:
    """Brings the host's servers to an inventory's plan; why it failed, or the empty string. `fresh`: a server
    that is restarted even if it had these settings already."""
    record = playbook.run("provision", inventory, name="tune-step", limit=host, tags=TAGS, locked=True)
    failed = _failure(record)
    if failed or not fresh or any(one["service"] == fresh for one in record.starts):
        return failed
    only = {"runbook_service": fresh, "runbook_lease": "--alone"}
    again = playbook.run(
        "runbooks/restart-servers", inventory, name="tune-step", limit=host, extra=only, locked=True
    )
    return _failure(again)


def _failure(record: runs.RunRecord) -> str:
    if record.exit_code == Exit.DONE:
        return ""
    if record.exit_code == Exit.INTERRUPTED:
        raise KeyboardInterrupt
    words = [
        failure.message.strip().splitlines()[-1] for failure in record.failures if failure.message.strip()
    ]
    return words[0] if words else record.status


def _job(inventory: str, limit: str | None, service: str | None) -> Job:
    host, planned, chosen = _one(inventory, limit, service)
    wish = catalog.lazy().profile(chosen.profile).tune
    if wish is None:
        raise UsageError(
            Problem(f"profile {chosen.profile}", "has no `tune:` section", "Add axes and workloads")
        )
    axes = tuple(tune.settings_of(axis) for axis in wish.axes)
    return Job(inventory, inventories.folder_of(inventory), host, planned, chosen, wish, axes)


def _one(inventory: str, limit: str | None, service: str | None) -> tuple[fleet.Host, HostPlan, Service]:
    """The server to tune; without a limit, the first host that has it."""
    plan = plans.load(inventory)
    names = fleet.matching({host.name: host.groups for host in plan.hosts}, limit)
    if limit and len(names) > 1:
        what = f'"{limit}" picks {len(names)} hosts ({", ".join(names[:5])}), not one'
        raise UsageError(Problem("--limit", what))
    having = [name for name in names if any(service in (None, one.name) for one in plan.host(name).services)]
    planned = plan.host((having or names)[0])
    found = [one for one in planned.services if service in (None, one.name)]
    if len(found) != 1:
        known = ", ".join(one.name for one in planned.services) or "none"
        what = f"one service is tuned at a time; {planned.name} has: {known}"
        raise UsageError(Problem("--service", what))
    return fleet.hosts_of(inventory, [planned.name])[0], planned, found[0]


# --- what is kept ------------------------------------------------------------------------------------------


def _before(resume: str | None, job: Job) -> Path | None:
    """The folder of the run to go on with. Raises UsageError when it tuned something else."""
    if resume is None:
        return None
    folder = measuring.earlier(resume, NAME, job.folder.name).folder
    if not tune.load_state(folder / STATE, job.key):
        raise UsageError(Problem("--resume", f"run {folder.name} has measured no setting to go on from"))
    return folder


def _take_over(before: Path | None, record: runs.RunRecord) -> None:
    if before is not None:
        for path in [before / STATE, *before.glob("setting-*.json")]:
            runs.write_private(record.folder / path.name, path.read_text(encoding="utf-8"))


def _keep(folder: Path, result: benching.BenchResult) -> None:
    number = len(list(folder.glob("setting-*.json"))) + 1
    runs.write_private(folder / f"setting-{number:02}.json", json.dumps(result.as_json(), indent=1) + "\n")


def _write_evidence(
    folder: Path, job: Job, measured: Mapping[str, tune.Candidate], profile: Mapping[str, Any] | None
) -> None:
    """The page and table of all settings, and the candidate profile beside them."""
    results = [
        benching.read_result(path.read_text(encoding="utf-8"), str(path))
        for path in sorted(folder.glob("setting-*.json"))
    ]
    if results:
        renamed = [
            dataclasses.replace(
                one, targets=tuple(dataclasses.replace(target, name=one.suite) for target in one.targets)
            )
            for one in results
        ]
        whole = dataclasses.replace(benching.joined(renamed), suite=f"tune {job.service.profile}")
        measuring.write(folder, whole, ladder=_ladder(measured))
    if profile is not None:
        runs.write_private(folder / CANDIDATE, as_yaml(profile))


def _ladder(measured: Mapping[str, tune.Candidate]) -> list[tuple[str, float]]:
    """Settings in the order of their trial, with the median at the first load."""
    return [
        (name, next(iter(one.loads.values())).median)
        for name, one in measured.items()
        if one.loads and not one.failed
    ]


def as_yaml(profile: Mapping[str, Any]) -> str:
    """A profile as its catalog file's text."""
    return yaml.safe_dump(dict(profile), sort_keys=False, allow_unicode=True, width=110)


def _catalog_file(job: Job) -> Path:
    """Where the profile is to be written. Raises UsageError when it is there already."""
    path = catalog.FOLDER / "profiles" / f"{job.service.profile}-tuned.yml"
    if path.exists():
        raise UsageError(Problem(f"catalog/profiles/{path.name}", "is there already", "Rename it first"))
    return path


def _write_profile(path: Path, profile: Mapping[str, Any] | None) -> Path | None:
    if profile is None:
        return None
    runs.write_private(path, as_yaml(profile))
    path.chmod(0o644)
    try:
        catalog.lazy().profile(path.stem)
    except UsageError:
        path.unlink()
        raise
    return path


def _profile(
    decision: tune.Decision, measured: Mapping[str, tune.Candidate], job: Job, run_id: str
) -> dict[str, Any] | None:
    """The picked setting as a profile's YAML data; None when nothing is better than the profile itself."""
    setting = next((one for one in _all(job.axes) if one.name == decision.picked), None)
    if setting is None or not changes(setting, catalog.lazy().profile(job.service.profile)):
        return None
    loads = {
        step.load.label: {
            "prompt_tokens": step.prompt_tokens,
            "output_tokens": step.output_tokens,
            "concurrent": step.concurrent,
        }
        for step in benching.suite_of(job.wish).steps
    }
    return tune.as_profile(
        job.service.profile,
        f"{job.service.profile} with {setting.name}",
        setting,
        measured[setting.name],
        loads,
        f"invoke tune on {job.host.name}, run {run_id}, commit {runs.commit() or 'unknown'}",
    )


def changes(setting: tune.Setting, profile: catalog.Profile) -> bool:
    """Whether a setting differs from what its profile says anyway."""
    flags = {name: value for name, value in setting.flags.items() if profile.flags.get(name) != value}
    own = {
        name: value for name, value in setting.environment.items() if profile.environment.get(name) != value
    }
    return bool(flags or own)


def _all(axes: Sequence[Sequence[tune.Setting]]) -> list[tune.Setting]:
    """Every setting that a climb along `axes` can reach."""
    reached = [tune.Setting()]
    for axis in axes:
        reached = [*reached, *(base.with_(step) for base in reached for step in axis)]
    return reached


def as_json(tuned: Tuned) -> dict[str, Any]:
    """The decision and its evidence as plain data."""
    return {
        "run": tuned.record.id,
        "picked": tuned.decision.picked,
        "reason": tuned.decision.reason,
        "rejected": dict(tuned.decision.rejected),
        "measured": [dataclasses.asdict(one) for one in tuned.measured.values()],
        "profile": tuned.profile,
        "written": str(tuned.written) if tuned.written else None,
    }
