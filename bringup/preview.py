"""What `invoke plan` shows: for each host what will run and how, its units, memory, and findings.

Hosts with the same plan are shown once. Nothing is decided here.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from bringup import systemd
from bringup.planned import Finding, Fit, HostPlan, Plan, PlannedModel, Service

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA_VERSION = 1
GIB = 1024**3
RECORDED = ("name", "argv", "environment", "gpus", "placement", "restart", "logs", "context_tokens")
MORE_RECORDED = ("start_timeout_s", "stop_timeout_s", "probe_timeout_s", "warm_up", "api_key", "user", "unit")
STYLES = {"error": "red", "warning": "yellow", "note": "dim"}


# --- data --------------------------------------------------------------------------------------------------


def as_json(plan: Plan) -> dict[str, Any]:
    """The whole plan as one JSON-able object; `unit_text` is the unit that starts each service."""
    return {
        "schema_version": SCHEMA_VERSION,
        "inventory": plan.inventory,
        "digest": plan.digest,
        "hosts": {host.name: _host_data(host) for host in plan.hosts},
        "findings": [asdict(finding) for finding in plan.findings],
    }


def _host_data(host: HostPlan) -> dict[str, Any]:
    data = asdict(host)
    for row, service in zip(data["services"], host.services, strict=True):
        row["unit_text"] = systemd.unit_text(service, host)
    return data


def record(plan: Plan) -> dict[str, Any]:
    """What `tests/plans/<inventory>.yml` keeps: what reaches nodes, so that a review sees every change."""
    return {
        "hosts": {name: _host_record(host) for host, names in alike(plan) for name in [", ".join(names)]},
        "findings": [f"{one.severity} {one.code} {one.where}: {one.what}" for one in plan.findings],
    }


def _host_record(host: HostPlan) -> dict[str, Any]:
    return {
        "platform": host.platform,
        "services": [_service_record(service) for service in host.services],
        "models": {
            model.name: {
                "folder": model.folder,
                "files": len(model.files),
                "sources": [f"{source.kind} {source.locator}" for source in model.sources],
                **({"graft": f"{model.graft.delta} onto {model.graft.base}"} if model.graft else {}),
            }
            for model in host.models
        },
        "environments": {one.name: {"prefix": one.prefix, "lock": one.lock} for one in host.environments},
        "fits": {one.service: {"fits": one.fits, "estimates": dict(one.estimates)} for one in host.fits},
    }


def _service_record(service: Service) -> dict[str, Any]:
    whole = asdict(service)
    kept = {key: whole[key] for key in (*RECORDED, *MORE_RECORDED)}
    gpus = ", ".join(map(str, service.gpus))
    plain: dict[str, Any] = _plain({**kept, "argv": by_flag(service.argv), "gpus": gpus})
    return plain


def _plain(value: Any) -> Any:
    """Tuples as lists, for YAML."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def alike(plan: Plan) -> list[tuple[HostPlan, tuple[str, ...]]]:
    """Hosts with one plan together: the first of them, and the names of all."""
    found: list[tuple[HostPlan, list[str]]] = []
    for host in plan.hosts:
        bare = replace(host, name="")
        same = next((names for first, names in found if replace(first, name="") == bare), None)
        if same is None:
            found.append((host, [host.name]))
        else:
            same.append(host.name)
    return [(host, tuple(names)) for host, names in found]


# --- for people --------------------------------------------------------------------------------------------


def show(plan: Plan, out: Console, *, units: bool = True) -> None:
    """Prints the plan; `units`: with the text of each unit."""
    for host, names in alike(plan):
        out.print(f"[bold]{', '.join(names)}[/]  {host.platform} ({host.arch})")
        if not host.services:
            out.print("  no services")
        for service in host.services:
            _show_service(service, host, out, units=units)
        for model in host.models:
            out.print(f"  model {model.name}: {model.folder}, {_held(model)}", markup=False)
        for one in host.environments:
            out.print(
                f"  environment {one.name}: {one.prefix} ({one.provider}, Python {one.python})", markup=False
            )
        out.print()
    show_findings(plan.findings, out)
    out.print(f"plan {plan.digest[:12]}", style="dim")


def _held(model: PlannedModel) -> str:
    if model.graft:
        return f"{model.graft.tensors} tensors of {model.graft.delta} grafted onto {model.graft.base}"
    files = f"{len(model.files)} files" if model.files else "no lock yet"
    return f"{model.size / GIB:,.1f} GiB, {files}"


def _show_service(service: Service, host: HostPlan, out: Console, *, units: bool) -> None:
    gpus = f"GPUs {', '.join(map(str, service.gpus))}" if service.gpus else "no GPU"
    head = f"{service.engine} {service.engine_version}, {service.model} on {gpus}"
    out.print(f"  service {service.name}: {head}, {service.bind}:{service.port}", markup=False)
    out.print(f"    profile {service.profile}, context {service.context_tokens:,} tokens", markup=False)
    for line in wrapped(service.argv):
        out.print(f"    {line}", style="cyan", markup=False, soft_wrap=True)
    for name, value in sorted(service.environment.items()):
        out.print(f"    {name}={shlex.quote(value)}", markup=False, soft_wrap=True)
    for line in _facts(service):
        out.print(f"    {line}", markup=False)
    for fit in host.fits:
        if fit.service == service.name:
            _show_fit(fit, out)
    if units:
        out.print(f"    {service.unit}.service", style="bold", markup=False)
        for line in systemd.unit_text(service, host).splitlines():
            out.print(f"      {line}", style="dim", markup=False, soft_wrap=True)


def _facts(service: Service) -> Iterator[str]:
    place = service.placement
    if place.per_rank:
        ranks = "; ".join(
            f"rank {at}: CPUs {cpus}, memory {node}" for at, (cpus, node) in enumerate(place.per_rank)
        )
        yield f"placement: {ranks}"
    elif place.cpus:
        yield f"placement: CPUs {place.cpus}, memory of node {place.memory_nodes}"
    if place.proof:
        yield f"proven when {place.proof}"
    if service.api_key:
        yield f"API key from {service.api_key.vault}"
    restart = service.restart
    if restart.calendar:
        yield f"restarted {restart.calendar}, spread over {restart.spread_s} s, one host at a time"
    signs = [name for name, ratio in asdict(restart.drift).items() if ratio and name.endswith("_ratio")]
    if signs:
        listed = ", ".join(f"{name} {getattr(restart.drift, name):g}" for name in signs)
        yield f"restarted when it drifts for {restart.drift.for_s} s: {listed}"
    if restart.hours or restart.never:
        hours = f"in {', '.join(restart.hours)}" if restart.hours else "at any time"
        never = f", never in {', '.join(restart.never)}" if restart.never else ""
        yield f"so restarted only {hours}{never}"
    logs = service.logs
    where = "own journal" if logs.mode == "journal" else "log"
    limit = f", at most {logs.lines_per_s} lines/s" if logs.lines_per_s else ""
    yield f"{where} cut at {logs.size_bytes // 1024**2} MiB or {logs.age_s // 3600} h, {logs.keep} kept{limit}"


def by_flag(argv: Sequence[str]) -> list[str]:
    """A command line, quoted for a shell: the program, then each flag with its values."""
    lines: list[list[str]] = [[]]
    for word in argv:
        if word.startswith("--"):
            lines.append([])
        lines[-1].append(shlex.quote(word))
    return [" ".join(words) for words in lines if words]


def wrapped(argv: Sequence[str]) -> list[str]:
    """A command line for reading: one flag a line, a backslash at each line's end."""
    texts = by_flag(argv)
    folded = [text + (" \\" if at < len(texts) - 1 else "") for at, text in enumerate(texts)]
    return [f"  {text}" if at else text for at, text in enumerate(folded)]


def _show_fit(fit: Fit, out: Console) -> None:
    verdict = {True: "fits", False: "does not fit", None: "not checked"}[fit.fits]
    out.print(f"    memory: {verdict}", style="green" if fit.fits else "yellow", markup=False)
    for label, amount in fit.rows:
        out.print(f"      {label:<36}{amount / GIB:>12,.2f} GiB", markup=False)
    for label, text in fit.estimates.items():
        out.print(f"      {label:<52}{text:>16}", markup=False)
    for note in fit.notes:
        out.print(f"      {note}", style="dim", markup=False)


def show_findings(findings: Sequence[Finding], out: Console) -> None:
    """What to know about the plan, the gravest first."""
    order = list(STYLES)
    for found in sorted(findings, key=lambda one: order.index(one.severity)):
        out.print(
            f"{found.severity} {found.code} {found.where}: {found.what}",
            style=STYLES[found.severity],
            markup=False,
        )
        if found.reason:
            out.print(f"  why: {found.reason}", markup=False)
        if found.instead:
            out.print(f"  do: {found.instead}", markup=False)
