"""Intent + catalog -> Plan, or every problem at once. Reads the inventory and the catalog; the rest is pure.

Hosts that want the same thing are worked out once: an inventory of a hundred equal nodes costs what one does.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from bringup import catalog as catalogs
from bringup import fit, flags, intent, inventory, placement
from bringup.catalog import Catalog, Engine, Graft, Model, Platform, Profile, uses_mtp
from bringup.entries import build
from bringup.errors import Problem, UsageError
from bringup.intent import Intent, LogWish, ServiceIntent
from bringup.inventory import Inventory
from bringup.planned import (
    ApiKey,
    Drafting,
    Drift,
    Endpoints,
    Finding,
    Fit,
    HostPlan,
    LogRotation,
    ModelFile,
    ModelSource,
    Placement,
    Plan,
    PlannedEnvironment,
    PlannedGraft,
    PlannedModel,
    Restart,
    Service,
    WarmUp,
)
from bringup.yamlfile import read_text

LIBRARY = "/opt/bringup/lib"
ENVIRONMENTS = "/opt/bringup/environments"
CACHES = "/var/cache/bringup"
DIGEST_LENGTH = 8
"""Hexadecimal digits of a digest that go into a folder's name."""
DELTA = "-delta"
"""What follows a grafted model's name in the name of the folder with the tensors that are put in."""
LEASE_PORT = 7766
"""Where the nodes ask each other before a scheduled restart: no server may have it."""
LOOPBACK = "127.0.0.1,localhost,::1"
MIB, GIB, HOUR_S = 1024**2, 1024**3, 3600

T = TypeVar("T")


@dataclass(frozen=True)
class Resolved:
    """What follows for one kind of host, and all that was noticed on the way."""

    host: HostPlan | None
    problems: tuple[Problem, ...]
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Parts:
    """Catalog entries of one service, its final flags (placeholders filled in) and environment, and its
    GPUs."""

    intent: ServiceIntent
    platform_name: str
    platform: Platform
    profile: Profile
    engine: Engine
    model: Model
    draft: Model | None
    gpus: tuple[int, ...]
    flags: Mapping[str, Any]
    placement: Placement
    said: Mapping[str, Any] = field(default_factory=dict)
    """Variables that say how much to log."""


def load(name_or_path: str) -> Plan:
    """The plan of an inventory, by name or folder. Raises UsageError with every problem of intent and
    catalog."""
    wanted = inventory.read(name_or_path)
    found = resolve(wanted, catalogs.lazy())
    if (wanted.folder / "twins.json").is_file():
        from bringup import twins

        return twins.worn(wanted.folder, found)
    return found


def resolve(wanted: Inventory, known: Catalog) -> Plan:
    """What follows from an inventory and the catalog. Raises UsageError with every problem."""
    kinds = _alike(wanted)
    results = {names: _resolve_kind(wanted.name, names, own, known) for names, own in kinds}
    problems = [problem for result in results.values() for problem in result.problems]
    if problems:
        raise UsageError(dict.fromkeys(problems))
    of_host = {name: result.host for names, result in results.items() for name in names}
    hosts = tuple(_named(of_host[host.name], host.name, host.groups) for host in wanted.hosts)
    findings = tuple(dict.fromkeys(finding for result in results.values() for finding in result.findings))
    return Plan(wanted.name, hosts, findings, digest_of([asdict(host) for host in hosts]))


def _named(host: HostPlan | None, name: str, groups: Sequence[str]) -> HostPlan:
    assert host is not None
    return replace(host, name=name, groups=tuple(groups))


def _alike(wanted: Inventory) -> list[tuple[tuple[str, ...], Mapping[str, Any]]]:
    """Hosts whose variables are the same where a plan looks: their names, and those variables."""
    found: dict[str, tuple[list[str], Mapping[str, Any]]] = {}
    for host in wanted.hosts:
        own = {
            name: value
            for name, value in host.variables.items()
            if not name.startswith(intent.PASSED_THROUGH)
        }
        try:
            key = json.dumps(own, default=repr, skipkeys=True)
        except (ValueError, RecursionError):
            problem = Problem(f"inventories/{wanted.name} ({host.name})", "a variable contains itself")
            raise UsageError(problem) from None
        found.setdefault(key, ([], own))[0].append(host.name)
    return [(tuple(names), own) for names, own in found.values()]


def digest_of(value: Any) -> str:
    """SHA-256 (hexadecimal) of a JSON-able value."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


# --- one kind of host -----------------------------------------------------------------------------


def _resolve_kind(
    inventory_name: str, names: Sequence[str], variables: Mapping[str, Any], known: Catalog
) -> Resolved:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    where = f"inventories/{inventory_name} ({names[0]}{more})"
    problems = intent.strangers(variables, where)
    own = intent.of_variables(variables)
    problems += [
        problem for name, value in own.items() for problem in intent.closed(value, f"{where}: {name}")
    ]
    wanted = _attempt(problems, lambda: build(Intent, own, where))
    if wanted is None:
        return Resolved(None, tuple(problems), ())
    return _resolve_host(wanted, where, problems, known)


def _resolve_host(wanted: Intent, where: str, problems: list[Problem], known: Catalog) -> Resolved:
    platform = _attempt(problems, lambda: known.platform(wanted.node_platform))
    problems += _clashes(wanted, where)
    findings: list[Finding] = []
    parts: list[Parts] = []
    taken: dict[int, str] = {}
    for one in wanted.node_services:
        here = f"{where}: service {one.name}"
        found = _parts(one, here, wanted, platform, known, taken, problems)
        if found:
            parts.append(found)
    made = [_service(part, wanted, where, known, problems, findings) for part in parts]
    problems += _memory_clashes(made, platform, where) if platform else []
    if problems or platform is None:
        return Resolved(None, tuple(problems), tuple(findings))
    arch, root = platform.arch, known.folder.parent
    environments = _unique(_environment(part.engine, arch, root, findings) for part in parts)
    models = _unique(model for part in parts for model in _models(part, wanted, known, root, findings))
    host = HostPlan(
        name="",
        groups=(),
        platform=wanted.node_platform,
        arch=arch,
        services=tuple(service for service, _ in made),
        models=tuple(models),
        environments=tuple(environments),
        fits=tuple(verdict for _, verdict in made),
        expected=_expected(platform, [part.engine for part in parts]),
        site=_site(wanted),
    )
    return Resolved(host, (), tuple(findings))


def _expected(platform: Platform, engines: Iterable[Engine]) -> dict[str, Any]:
    """The platform as plain data; an engine built for a newer driver raises the least that will do."""
    facts = platform.model_dump(mode="json")
    if facts["driver"]:
        least = [engine.minimum_driver for engine in engines if engine.needs_gpu and engine.minimum_driver]
        facts["driver"]["minimum"] = max([facts["driver"]["minimum"], *least], key=catalogs.version_key)
    return facts


def _attempt(problems: list[Problem], make: Callable[[], T]) -> T | None:
    """What `make` makes; None, and its problems noted, when it cannot."""
    try:
        return make()
    except UsageError as error:
        problems += error.problems
        return None


def _unique(items: Iterable[T]) -> list[T]:
    """Each item once, in order (by value; dictionaries inside are allowed)."""
    found: list[T] = []
    for item in items:
        if item not in found:
            found.append(item)
    return found


def _site(wanted: Intent) -> dict[str, Any]:
    plain = wanted.model_dump(mode="json", exclude={"node_platform", "node_services"})
    return {name.removeprefix("node_"): value for name, value in plain.items()}


def _clashes(wanted: Intent, where: str) -> list[Problem]:
    """Names and ports that are used twice."""
    problems = []
    names: dict[str, int] = {}
    ports: dict[int, str] = {LEASE_PORT: "bringup itself (scheduled restarts)"}
    for index, one in enumerate(wanted.node_services):
        here = f"{where}: node_services.{index}"
        if one.name in names:
            problems.append(Problem(f"{here}.name", f'"{one.name}" is the name of another service already'))
        names[one.name] = index
        if one.port in ports:
            problems.append(
                Problem(f"{here}.port", f"{one.name} wants port {one.port}, which {ports[one.port]} has")
            )
        ports.setdefault(one.port, one.name)
        if not ipaddress.ip_address(one.bind).is_loopback and not one.api_key:
            problems.append(
                Problem(
                    f"{here}.bind",
                    f"{one.name} would listen on {one.bind} for everybody, without an API key",
                    "Set api_key to the name of a vault_ variable, or bind to 127.0.0.1.",
                )
            )
    return problems


def _memory_clashes(made: Sequence[tuple[Service, Fit]], platform: Platform, where: str) -> Iterator[Problem]:
    """Memory nodes of the host that services together ask more of than they have; each alone is checked by its
    own arithmetic. GPUs belong to one service each, so their memory needs no such sum.
    """
    stated = platform.host.numa if platform.host else ()
    room = {node.node: node.memory_gib for node in stated if not node.gpu_memory}
    asked: dict[int, dict[str, float]] = {node: {} for node in room}
    for service, verdict in made:
        for node, gib in _host_memory(service, verdict, sorted(room)).items():
            if node in asked:
                asked[node][service.name] = gib
    for node, services in asked.items():
        if len(services) > 1 and sum(services.values()) > room[node]:
            each = " and ".join(f"{gib:.0f} GiB of {name}" for name, gib in services.items())
            what = f"{each} do not fit together into the {room[node]:.0f} GiB of memory node {node}"
            yield Problem(where, what, "Give one of them another node, a smaller model, or less offloading.")


OF_THE_HOST = frozenset({"host memory", "the engine may use", "left free"})
"""Rows of a CPU server's arithmetic that are no use of memory."""


def _host_memory(service: Service, verdict: Fit, nodes: Sequence[int]) -> dict[int, float]:
    """GiB that a service takes of each memory node of its host, by its arithmetic."""
    rows = dict(verdict.rows)
    placed = service.placement
    if service.gpus:
        each = rows.get("kept in host memory", 0.0) / GIB
        ranks = [int(own) for _, own in placed.per_rank if own.isdigit()]
        taken: dict[int, float] = {}
        for node in ranks if len(ranks) == len(service.gpus) else ():
            taken[node] = taken.get(node, 0.0) + each
        spread = 0.0 if taken else each * len(service.gpus)
    else:
        taken = {}
        spread = sum(size for label, size in rows.items() if label not in OF_THE_HOST) / GIB
    own = sorted(placement.numbers(placed.memory_nodes)) if placed.memory_nodes else list(nodes)
    if spread and own:
        taken = {node: spread / len(own) for node in own}
    return {node: gib for node, gib in taken.items() if gib}


# --- one service: its entries, flags and GPUs -----------------------------------------------------


def _parts(
    one: ServiceIntent,
    here: str,
    wanted: Intent,
    platform: Platform | None,
    known: Catalog,
    taken: dict[int, str],
    problems: list[Problem],
) -> Parts | None:
    """The entries of a service, and what follows for flags, GPUs and placement; None with problems noted."""
    before = len(problems)
    profile = _attempt(problems, lambda: known.profile(one.profile))
    if profile is None:
        return None
    problems += known.check_profile(known.where("profiles", one.profile), profile)
    engine = _attempt(problems, lambda: known.engine(profile.engine))
    model = _attempt(problems, lambda: known.model(profile.model))
    draft = _attempt(problems, lambda: known.model(profile.draft or "")) if profile.draft else None
    if platform is not None and wanted.node_platform not in profile.platforms:
        problems.append(
            Problem(
                here,
                f"profile {one.profile} is for {', '.join(profile.platforms)}, not {wanted.node_platform}",
                _other_profiles(wanted.node_platform, profile, known),
            )
        )
    if platform is None or engine is None or model is None or len(problems) > before:
        return None
    gpus = _gpus(one, here, profile, engine, platform, taken, problems)
    put = _attempt(
        problems,
        lambda: placement.place(platform, gpus, profile.placement.bind, profile.placement.node),
    )
    problems += _reserved(one, here, profile, engine, known)
    level = _log_level(engine, _logs(one.logs, wanted.node_log_rotation), here, problems)
    if put is None or len(problems) > before:
        return None
    merged = engine.launch.always | profile.flags | placement.engine_flags(engine.engine, put)
    merged = merged | level.get("flag", {}) | one.flags
    filled = {
        flag: _filled(value, {"draft": f"{wanted.node_model_folder}/{profile.draft}"})
        for flag, value in merged.items()
    }
    said = level.get("environment", {})
    return Parts(one, wanted.node_platform, platform, profile, engine, model, draft, gpus, filled, put, said)


def _log_level(
    engine: Engine, logs: LogRotation, here: str, problems: list[Problem]
) -> dict[str, dict[str, Any]]:
    """What tells the engine how much to log: {"flag" or "environment": {its name: its value}}; empty: nobody asked."""
    way = engine.log.level
    if logs.level is None:
        return {}
    if way is None or logs.level not in way.values:
        known = ", ".join(way.values) if way else "none"
        what = f"{engine.engine} {engine.version} has no log level {logs.level}"
        problems.append(Problem(f"{here}.logs.level", what, f"Known levels: {known}."))
        return {}
    kind = "flag" if way.flag else "environment"
    return {kind: {str(way.flag or way.environment): way.values[logs.level]}}


def _other_profiles(platform: str, profile: Profile, known: Catalog) -> str:
    """Profiles of the same model for this platform."""
    names = [
        name
        for name in known.names("profiles")
        if name != profile.based_on and platform in name and profile.model.split("-")[0] in name
    ]
    return f"For {platform} there are: {', '.join(names[:6])}." if names else ""


def _gpus(
    one: ServiceIntent,
    here: str,
    profile: Profile,
    engine: Engine,
    platform: Platform,
    taken: dict[int, str],
    problems: list[Problem],
) -> tuple[int, ...]:
    """The GPUs a service gets: those it names, else the first free ones, as many as its profile wants
    (default: all)."""
    there = platform.gpus.count if platform.gpus else 0
    if one.gpus is not None:
        chosen = tuple(one.gpus)
        if beyond := [gpu for gpu in chosen if gpu >= there]:
            problems.append(Problem(f"{here}.gpus", f"there is no GPU {beyond[0]}: the platform has {there}"))
        if len(set(chosen)) < len(chosen):
            problems.append(Problem(f"{here}.gpus", "names a GPU twice"))
    elif not engine.needs_gpu and profile.gpus is None:
        chosen = ()
    else:
        count = profile.gpus if profile.gpus is not None else there
        free = [gpu for gpu in range(there) if gpu not in taken]
        # Where they do not suffice, others' are taken, so that the message below names who has them.
        chosen = tuple((free if len(free) >= count else list(range(there)))[:count])
    for gpu in dict.fromkeys(chosen):
        if gpu in taken:
            problems.append(Problem(f"{here}.gpus", f"GPU {gpu} belongs to service {taken[gpu]} already"))
        taken.setdefault(gpu, one.name)
    return chosen


def _reserved(
    one: ServiceIntent, here: str, profile: Profile, engine: Engine, known: Catalog
) -> list[Problem]:
    """Flags that the plan itself gives: two values for one thing would leave it to chance which one wins."""
    launch = engine.launch
    why = {
        launch.model: "it comes from the model",
        launch.host: "it is the service's bind",
        launch.port: "it is the service's port",
        launch.served_name: "it is the service's served_name",
        "--api-key": "it is the service's api_key, and never on a command line",
        "--trust-remote-code": "it is the model's decision (trust_remote_code in its entry)",
    }
    if launch.api_key:
        why[launch.api_key.name] = why["--api-key"]
    places = ((known.where("profiles", one.profile), profile.flags), (f"{here}.flags", one.flags))
    return [
        Problem(f"{place}: {flag}", f"is not set here: {why[flag]}")
        for place, given in places
        for flag in given
        if flag in why
    ]


def _filled(value: Any, places: Mapping[str, str]) -> Any:
    """A flag's value with `{name}` replaced; braces of JSON stay as they are."""
    if isinstance(value, str):
        for name, text in places.items():
            value = value.replace("{" + name + "}", text)
        return value
    if isinstance(value, list):
        return [_filled(item, places) for item in value]
    if isinstance(value, dict):
        return {key: _filled(item, places) for key, item in value.items()}
    return value


def words_of(given: Mapping[str, Any]) -> list[str]:
    """Flags as words of a command line."""
    result: list[str] = []
    for flag, value in given.items():
        if value is True:
            result.append(flag)
        elif isinstance(value, list):
            result += [flag, *(_word(item) for item in value)]
        elif value is not False:
            result += [flag, _word(value)]
    return result


def _word(value: Any) -> str:
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return str(value).lower() if isinstance(value, bool) else str(value)


# --- one service: the result ----------------------------------------------------------------------


def _service(
    part: Parts,
    wanted: Intent,
    where: str,
    known: Catalog,
    problems: list[Problem],
    findings: list[Finding],
) -> tuple[Service, Fit]:
    """The planned service and its memory arithmetic; what flags and memory have to say is noted."""
    one, engine, profile = part.intent, part.engine, part.profile
    root = known.folder.parent
    planned_model = _planned_model(profile.model, part.model, engine.launch.model_is, wanted, root)
    served = one.served_name or profile.model
    launch = engine.launch
    given: dict[str, Any] = {
        launch.model: planned_model.entry,
        launch.served_name: served,
        launch.host: one.bind,
        launch.port: one.port,
    }
    if launch.context and profile.context:
        given[launch.context] = profile.context
    given |= part.flags
    if part.model.trust_remote_code:
        given["--trust-remote-code"] = True
    flag_words = words_of(given)
    cache = f"{CACHES}/{one.name}"
    environment = _variables(part, cache)
    here = f"{where}: service {one.name}"
    _check_flags(here, part, flag_words, environment, problems, findings)
    verdict = _fit(here, part, known, problems, findings)
    prefix = _environment(engine, part.platform.arch, root, []).prefix
    service = Service(
        name=one.name,
        unit=f"bringup-{one.name}",
        profile=one.profile,
        engine=engine.engine,
        engine_version=engine.version,
        model=profile.model,
        served_name=served,
        bind=one.bind,
        port=one.port,
        user=one.user or wanted.node_user,
        argv=(*(_filled(word, {"prefix": prefix, "lib": LIBRARY}) for word in launch.argv), *flag_words),
        environment=environment,
        env_name=profile.engine,
        endpoints=Endpoints(
            health=engine.endpoints.health,
            models=engine.endpoints.models,
            chat=engine.endpoints.chat,
            completions=engine.endpoints.completions,
            metrics=engine.endpoints.metrics,
        ),
        gpus=part.gpus,
        placement=part.placement,
        warm_up=tuple(WarmUp(**step.model_dump()) for step in profile.warm_up),
        restart=_restart(one, wanted, profile),
        logs=_logs(one.logs, wanted.node_log_rotation),
        start_timeout_s=profile.limits.start_timeout_s or engine.start.timeout_s,
        stop_timeout_s=profile.limits.stop_timeout_s or engine.stop.timeout_s,
        probe_timeout_s=profile.limits.probe_timeout_s or engine.start.probe_timeout_s,
        api_key=_api_key(one, engine),
        log_markers={str(phase): pattern for phase, pattern in engine.log.markers.items()},
        metrics_names=dict(engine.metrics),
        writable=(cache,),
        cache_folder=cache,
        context_tokens=_context(part),
        memory_gib=profile.limits.memory_gib,
        compiles=engine.compiles.languages if engine.compiles else (),
        links=engine.compiles.links if engine.compiles else (),
        drafts=_drafts(part),
        drafting=_drafting(one, profile),
    )
    return service, verdict


def _drafts(part: Parts) -> Literal["", "mtp", "other"]:
    """Does the service speculate, and with the model's own layer?"""
    if uses_mtp(part.flags) and not part.profile.draft:
        return "mtp"
    serving = fit.facts_of_serving(part.profile, part.flags, part.gpus, part.model, part.draft)
    return "other" if serving.speculates else ""


def _variables(part: Parts, cache: str) -> dict[str, str]:
    """The environment: the engine's, then the profile's, then the service's own."""
    own = {"HOME": cache, "NO_PROXY": LOOPBACK, "no_proxy": LOOPBACK}
    caches = {name: _filled(value, {"cache": cache}) for name, value in part.engine.cache_environment.items()}
    # Only where a service may not see all GPUs: otherwise the engine's own order holds.
    everything = tuple(range(part.platform.gpus.count)) if part.platform.gpus else ()
    visible = (
        {"CUDA_VISIBLE_DEVICES": ",".join(map(str, part.gpus))}
        if part.gpus != everything and everything
        else {}
    )
    return (
        own
        | caches
        | visible
        | part.engine.environment
        | part.profile.environment
        | {name: str(value) for name, value in part.said.items()}
        | part.intent.environment
    )


def _api_key(one: ServiceIntent, engine: Engine) -> ApiKey | None:
    how = engine.launch.api_key
    return ApiKey(one.api_key, how.how, how.name) if one.api_key and how else None


def _restart(one: ServiceIntent, wanted: Intent, profile: Profile) -> Restart:
    """The service's wish, else the host's quiet hours, else the profile's, key by key."""
    levels = (profile.restart, wanted.node_quiet_hours, one.restart)
    given = [level.model_dump(exclude_none=True) for level in levels]
    merged = {key: value for level in given for key, value in level.items()}
    return Restart(**{**merged, "drift": Drift(**merged.get("drift", {}))})


def _drafting(one: ServiceIntent, profile: Profile) -> Drafting:
    """The service's wish, else the profile's, key by key."""
    given = [level.model_dump(exclude_none=True) for level in (profile.drafting, one.drafting)]
    return Drafting(**{key: value for level in given for key, value in level.items()})


def _logs(*levels: LogWish) -> LogRotation:
    """The first level that says something decides."""

    def first(name: str) -> Any:
        return next((value for level in levels if (value := getattr(level, name)) is not None), None)

    default = LogRotation()
    size, age = first("size_mib"), first("age_hours")
    return LogRotation(
        size_bytes=int(size * MIB) if size else default.size_bytes,
        age_s=int(age * HOUR_S) if age else default.age_s,
        keep=first("keep") or default.keep,
        mode=first("mode") or default.mode,
        level=first("level"),
        lines_per_s=first("lines_per_s") or default.lines_per_s,
    )


def _context(part: Parts) -> int:
    """Tokens that one request may have: the launch line's, else the profile's, else the model's."""
    flag = part.engine.launch.context
    given = part.flags.get(flag) if flag else None
    tokens = given if isinstance(given, int) and given > 0 else part.profile.context or part.model.context
    slots = part.flags.get("--parallel") if part.engine.engine == "llama-server" else None
    return int(tokens) // slots if isinstance(slots, int) and slots > 0 else int(tokens)


# --- checks ---------------------------------------------------------------------------------------


def _check_flags(
    here: str,
    part: Parts,
    flag_words: Sequence[str],
    environment: Mapping[str, str],
    problems: list[Problem],
    findings: list[Finding],
) -> None:
    """The engine version's own view of the command line."""
    table = _attempt(problems, lambda: flags.load_table(part.engine.engine, part.engine.version))
    if table is None:
        return
    gpus = part.platform.gpus
    model = part.model
    context = flags.FlagContext(
        sm=int(gpus.sm.replace(".", "")) if gpus else None,
        platform=part.platform_name,
        model=flags.ModelFacts(
            name=part.profile.model,
            architecture=model.architecture,
            sparse_attention=model.sparse_attention is not None,
            moe=model.shape.experts > 0,
            quantization=model.quantisation,
            mtp=model.mtp is not None,
        ),
    )
    ours = ("HOME", "NO_PROXY", "no_proxy")
    theirs = {name: value for name, value in environment.items() if name not in ours}
    for found in flags.check(table, flag_words, theirs, context):
        if found.code == "FLAG_UNSAFE" and found.flag == part.engine.launch.host:
            continue  # the plan is stricter itself: no key, no open address
        place = f"{here}, profile {part.intent.profile}: {found.flag}"
        _note(
            Finding(found.code, found.severity, place, found.what, found.reason, found.instead, found.source),
            problems,
            findings,
        )


def _note(found: Finding, problems: list[Problem], findings: list[Finding]) -> None:
    if found.severity == "error":
        reason = f" ({found.reason})" if found.reason else ""
        problems.append(Problem(found.where, f"{found.what}{reason}", found.instead))
    else:
        findings.append(found)


def _fit(here: str, part: Parts, known: Catalog, problems: list[Problem], findings: list[Finding]) -> Fit:
    """The memory arithmetic; when it says no, it is asked again which platforms would do."""

    def ask(others: Mapping[str, Platform] | None) -> tuple[Fit, list[Finding]]:
        return fit.of_service(
            part.model,
            part.platform,
            part.profile,
            part.flags,
            part.gpus,
            service=part.intent.name,
            where=here,
            draft=part.draft,
            others=others,
        )

    verdict, found = ask(None)
    if any(finding.severity == "error" for finding in found):
        names = known.names("platforms")
        verdict, found = ask({name: known.platform(name) for name in names})
    for finding in found:
        _note(finding, problems, findings)
    return verdict


# --- environments and models ----------------------------------------------------------------------


def _environment(engine: Engine, arch: str, root: Path, findings: list[Finding]) -> PlannedEnvironment:
    """The engine's environment; its digest covers all that goes into it, so that a change makes a new
    folder."""
    install, name = engine.install, f"{engine.engine}-{engine.version}"
    lock = install.locks.get("aarch64" if arch == "aarch64" else "x86_64", "")
    if not lock:
        findings.append(
            Finding(
                "PLAN_NO_LOCK",
                "warning",
                f"environment {name}",
                f"no lock for {arch} yet: this previews, and does not provision",
                instead=_locking(install.requires, install.python, arch),
            )
        )
    content = read_text(root / lock, lock) if lock else " ".join(install.requires)
    parts = [install.provider, install.python, content, [list(check) for check in install.checks]]
    digest = digest_of(parts)
    return PlannedEnvironment(
        name=name,
        provider=install.provider,
        python=install.python,
        lock=lock,
        digest=digest,
        prefix=f"{ENVIRONMENTS}/{name}-{digest[:DIGEST_LENGTH]}",
        checks=tuple(tuple(check) for check in install.checks),
    )


def _locking(requires: Sequence[str], python: str, arch: str) -> str:
    """The command that makes a lock, with its requirements on standard input."""
    platform = f"{'x86_64' if arch == 'any' else arch}-manylinux_2_34"
    options = f"--generate-hashes --no-header --python-version {python} --python-platform {platform}"
    return f"printf '%s\\n' {' '.join(map(shlex.quote, requires))} | uv pip compile {options} -"


def _models(
    part: Parts, wanted: Intent, known: Catalog, root: Path, findings: list[Finding]
) -> Iterator[PlannedModel]:
    """What the service's model and its draft are made of, parts before what is made of them."""
    named = [(part.profile.model, part.model)]
    named += [(part.profile.draft or "", part.draft)] if part.draft else []
    for name, model in named:
        if model.graft:
            yield from _grafted(name, model, model.graft, part, wanted, known, root, findings)
        else:
            planned = _planned_model(name, model, part.engine.launch.model_is, wanted, root)
            findings += _no_lock(planned, name)
            yield planned


def _no_lock(planned: PlannedModel, name: str) -> list[Finding]:
    """`name`: the catalog's name of the model whose lock is missing."""
    if planned.files:
        return []
    what, command = "no lock yet: this previews, and does not provision", f"invoke models.lock --model {name}"
    return [Finding("PLAN_NO_LOCK", "warning", f"model {planned.name}", what, instead=command)]


def _grafted(
    name: str,
    model: Model,
    wish: Graft,
    part: Parts,
    wanted: Intent,
    known: Catalog,
    root: Path,
    findings: list[Finding],
) -> Iterator[PlannedModel]:
    """Base, delta, and the overlay that is made of both; the model's lock is the delta's."""
    base = _planned_model(wish.base, known.model(wish.base), "folder", wanted, root)
    weights = model.weights.model_copy(update={"total_gib": model.weights.mtp_gib})
    bare = model.model_copy(update={"hub": wish.delta, "weights": weights, "mtp": None, "architecture": None})
    delta = _planned_model(f"{name}{DELTA}", bare, "folder", wanted, root)
    for planned, locked in ((base, wish.base), (delta, name)):
        findings += _no_lock(planned, locked)
    findings += [
        Finding("PLAN_GRAFT_NEEDS", "warning", f"model {name}", f"the graft needs {need}")
        for need in wish.needs
    ]
    assert model.mtp is not None  # the catalog refuses a graft without one
    whole = _planned_model(name, model, part.engine.launch.model_is, wanted, root)
    put = PlannedGraft(
        base.name, delta.name, model.mtp.layer, wish.tensors, wish.dtypes, wish.config, wish.words
    )
    yield from (base, delta, replace(whole, size=0, files=(), sources=(), graft=put))


def _planned_model(name: str, model: Model, model_is: str, wanted: Intent, root: Path) -> PlannedModel:
    folder = f"{wanted.node_model_folder}/{name}"
    revision, files = _lock(model, root)
    entry = f"{folder}/{model.entry}" if model_is == "file" and model.entry else folder
    return PlannedModel(
        name=name,
        folder=folder,
        entry=entry,
        size=sum(file.size for file in files) or int(model.weights.total_gib * 1024**3),
        files=files,
        sources=tuple(_sources(name, model, revision, wanted)),
        made_by=model.made_by,
        expects=_expects(model),
    )


def _lock(model: Model, root: Path) -> tuple[str, tuple[ModelFile, ...]]:
    """The locked revision and files; nothing of both when the model has no lock."""
    if not model.lock:
        return "", ()
    from bringup import models  # it knows hubs, which most plans need not load

    return models.read_lock(root / model.lock, model.lock)


def _sources(name: str, model: Model, locked: str, wanted: Intent) -> Iterator[ModelSource]:
    """The site's own places first, then the hubs at the pinned revision."""
    if model.made_by:
        return
    revision = locked or model.hub.revision or "main"
    places = {
        "name": name,
        "repository": model.hub.huggingface or model.hub.modelscope or name,
        "revision": revision,
    }
    for source in wanted.node_model_sources:
        yield ModelSource(source.kind, _filled(source.locator, places))
    if model.hub.huggingface:
        yield ModelSource("huggingface", f"{model.hub.huggingface}@{revision}")
    if model.hub.modelscope:
        # A commit is known to the hub that made it only; the lock's sha256 says whether the bytes are the same.
        theirs = model.hub.modelscope_revision or ("master" if model.hub.huggingface else revision)
        yield ModelSource("modelscope", f"{model.hub.modelscope}@{theirs}")


def _expects(model: Model) -> dict[str, Any]:
    """What the files must say of themselves (bringup/node/contents.py): a wrong or half model is found
    before it runs."""
    if model.format != "safetensors":
        return {}
    expects: dict[str, Any] = {"architecture": model.architecture} if model.architecture else {}
    if model.mtp:
        expects["tensors"] = {model.mtp.prefix: model.mtp.tensors}
    return expects


def unprovisionable(plan: Plan) -> list[Problem]:
    """What is missing before a plan may change nodes: locks that nobody has made yet."""
    return [
        Problem(finding.where, finding.what, f"Make it: {finding.instead}")
        for finding in plan.findings
        if finding.code == "PLAN_NO_LOCK"
    ]
