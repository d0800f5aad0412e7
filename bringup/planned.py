"""What a plan says: frozen values, from a whole inventory down to one file of one model.

`bringup.plan` makes them from intent and catalog; `bringup.rolevars` turns them into the
variables of each role; `bringup.preview` prints them. Nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """One verdict on a plan: stable `code`, where it holds, why, the source, and the right form."""

    code: str
    severity: Severity
    where: str
    what: str
    reason: str = ""
    instead: str = ""
    source: str = ""


@dataclass(frozen=True)
class ModelFile:
    """One file of a locked model: path inside the model's folder, bytes, sha256 (hex)."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class ModelSource:
    """Where files come from: kind and a locator (`zai-org/GLM-5.2-FP8@<revision>`, an address, a path, a maker)."""

    kind: Literal["huggingface", "modelscope", "http", "path", "node", "controller"]
    locator: str


@dataclass(frozen=True)
class PlannedGraft:
    """How a model is put together on the node: the names of the two models of the same host that it is made of,
    the layer that comes, how many tensors and of which types (none: any), keys of config.json to set, and what the
    engine's code must hold (what it is -> a word in it)."""

    base: str
    delta: str
    layer: int
    tensors: int
    dtypes: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PlannedModel:
    """A model as a node must hold it. `folder` is absolute on the node; `entry` is what engines are given.

    `files` is empty when the model has no lock yet: such a plan previews, and does not provision. A model with
    `graft` has no files of its own: it is made of others, takes no room, and comes after them.
    `made_by`: path (in this checkout) of the script that makes a small lab model, else None.
    """

    name: str
    folder: str
    entry: str
    size: int
    files: tuple[ModelFile, ...]
    sources: tuple[ModelSource, ...]
    made_by: str | None = None
    expects: Mapping[str, Any] = field(default_factory=dict)
    graft: PlannedGraft | None = None


@dataclass(frozen=True)
class PlannedEnvironment:
    """A Python environment on a node: `prefix` is absolute, its name ends in the digest of what goes in.

    `lock` is a path in this checkout (hashes inside), `python` such as "3.11" or "system",
    `checks` are argv lists run inside the new prefix that must exit 0 before it is switched to.
    """

    name: str
    provider: Literal["pip", "uv", "conda", "mamba", "micromamba", "rattler"]
    python: str
    lock: str
    digest: str
    prefix: str
    checks: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Endpoints:
    """Paths of a server's HTTP interface, each starting with "/"; None: the engine has no such thing."""

    health: str
    models: str = "/v1/models"
    chat: str = "/v1/chat/completions"
    completions: str = "/v1/completions"
    metrics: str | None = None


@dataclass(frozen=True)
class ApiKey:
    """How a server gets its key. `vault` names the variable; `how`/`name`: an environment variable,
    a flag taking a file, or a flag taking the value (given in-process, never visible in argv)."""

    vault: str
    how: Literal["environment", "file_flag", "flag"]
    name: str


@dataclass(frozen=True)
class WarmUp:
    """Requests sent after start: prompt and output tokens, and how many at once."""

    prompt_tokens: int = 16
    output_tokens: int = 8
    concurrent: int = 1


@dataclass(frozen=True)
class Placement:
    """CPUs and memory nodes of a service's processes (cpu lists as the kernel writes them: "0-71").

    `cpus`/`memory_nodes` None: the whole machine. `per_rank` (one pair a rank) when the engine binds each rank itself.
    """

    cpus: str | None = None
    memory_nodes: str | None = None
    per_rank: tuple[tuple[str, str], ...] = ()
    proof: str = ""


@dataclass(frozen=True)
class Drift:
    """When a server that still answers counts as drifted from the level recorded after its warm-up: its memory
    (of its control group, without the cache of files) above, its idle probe's seconds above, or its tokens a second
    for each request below that level times a ratio, for `for_s` seconds on end. None: that sign is off."""

    memory_ratio: float | None = None
    latency_ratio: float | None = None
    throughput_ratio: float | None = None
    for_s: int = 600

    @property
    def watched(self) -> bool:
        """Is any sign on?"""
        return any((self.memory_ratio, self.latency_ratio, self.throughput_ratio))


@dataclass(frozen=True)
class Restart:
    """Scheduled restart: systemd calendar expression (UTC unless it names a zone), seconds of spread and of
    postponement at most while the server is busy; None calendar: never.

    Restarts by schedule and by drift happen only in `hours` (ranges of the week; none: at any time) and not in
    `never`; outside they wait, at most `hours_wait_s` seconds, and are given up after that."""

    calendar: str | None = None
    spread_s: int = 0
    postpone_s: int = 3600
    drain_s: int = 120
    hours: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    hours_wait_s: int = 43_200
    drift: Drift = Drift()


@dataclass(frozen=True)
class Drafting:
    """What a service that drafts must accept after its warm-up: tokens that a verification step yields at least, the
    model's own counted (1.0 is nothing accepted; 0: nobody looks). `strict`: below it the start fails, else it is a
    warning."""

    accept_length_at_least: float = 1.2
    strict: bool = False


@dataclass(frozen=True)
class LogRotation:
    """When a log file is cut: bytes, seconds of age, and how many compressed ones are kept (in journal mode: the
    same limits of a journal of its own). `level`: how much the engine logs (None: as it likes); lines above
    `lines_per_s` are dropped and counted (0: none are)."""

    size_bytes: int = 64 * 1024 * 1024
    age_s: int = 86_400
    keep: int = 14
    mode: Literal["file", "journal"] = "file"
    level: Literal["debug", "info", "warning", "error"] | None = None
    lines_per_s: int = 0


@dataclass(frozen=True)
class Service:
    """One server on one host, fully resolved.

    `argv` is the whole command (absolute interpreter or program first) without secrets; `environment` likewise.
    `unit` is the systemd unit without suffix (`bringup-<name>`). `start_timeout_s` bounds the time to a real token.
    `log_markers`: phase name -> regular expression found in the engine's log when the phase ends.
    `metrics_names`: our name (running, waiting, generation_tokens_total, ...) -> the engine's metric name.
    `drafts`: whether it speculates, with the model's own layer or otherwise.
    `compiles`: languages that the engine compiles at run time, `links`: libraries that it links what it compiles with.
    """

    name: str
    unit: str
    profile: str
    engine: str
    engine_version: str
    model: str
    served_name: str
    bind: str
    port: int
    user: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    env_name: str
    endpoints: Endpoints
    gpus: tuple[int, ...]
    placement: Placement
    warm_up: tuple[WarmUp, ...]
    restart: Restart
    logs: LogRotation
    start_timeout_s: int
    stop_timeout_s: int
    probe_timeout_s: int
    api_key: ApiKey | None = None
    log_markers: Mapping[str, str] = field(default_factory=dict)
    metrics_names: Mapping[str, str] = field(default_factory=dict)
    writable: tuple[str, ...] = ()
    cache_folder: str = ""
    context_tokens: int | None = None
    memory_gib: float | None = None
    compiles: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    drafts: Literal["", "mtp", "other"] = ""
    drafting: Drafting = Drafting()
    is_stand_in: bool = False


@dataclass(frozen=True)
class Fit:
    """A service's memory arithmetic: verdict, rows to print (label, bytes a GPU), and estimates (label -> text)."""

    service: str
    fits: bool | None
    rows: tuple[tuple[str, float], ...]
    notes: tuple[str, ...] = ()
    estimates: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class HostPlan:
    """All that follows for one host. `expected`: facts preflight compares with (platform entry as plain data)."""

    name: str
    groups: tuple[str, ...]
    platform: str
    arch: str
    services: tuple[Service, ...]
    models: tuple[PlannedModel, ...]
    environments: tuple[PlannedEnvironment, ...]
    fits: tuple[Fit, ...] = ()
    expected: Mapping[str, Any] = field(default_factory=dict)
    site: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """An inventory's plan: hosts in inventory order, findings that are no errors, and the digest of it all."""

    inventory: str
    hosts: tuple[HostPlan, ...]
    findings: tuple[Finding, ...]
    digest: str

    def host(self, name: str) -> HostPlan:
        """The plan of one host; KeyError when it is not in the inventory."""
        for host in self.hosts:
            if host.name == name:
                return host
        raise KeyError(name)
