"""What we know: one YAML file a thing under `catalog/`, read into frozen models.

A file's name is the entry's name. `lazy` reads a file when somebody asks for it (a plan needs a handful);
`load` reads and cross-checks all of them and reports every problem of every file at once.
Memory is in GiB (2**30 bytes) and bandwidth in GB/s (10**9 bytes a second) unless a name says otherwise.
"""

# ruff: noqa: RUF012 (pydantic copies a default for each instance)
from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, PositiveInt, model_validator

from bringup import ROOT, calendars, windows
from bringup.entries import Entry, build
from bringup.errors import Problem, UsageError, unknown
from bringup.yamlfile import read_yaml

FOLDER = ROOT / "catalog"
KINDS = ("platforms", "engines", "models", "profiles")
NAME = re.compile(r"[a-z0-9][a-z0-9.+-]*")
"""Names of entries: they end up in unit names, paths and URLs, so no spaces and no capitals."""

LONGEST_CHAIN = 8
"""Profiles that a profile may be based on, one after another, before we call it a mistake."""

LARGEST = 1e12
"""No quantity here is larger: what is, is a typing mistake."""
NotNegative = Annotated[float, Field(ge=0, le=LARGEST)]
Positive = Annotated[float, Field(gt=0, le=LARGEST)]
Share = Annotated[float, Field(gt=0, le=1)]


def _word(value: Any) -> Any:
    """Environment values: a number is its text; a YAML boolean is refused, since `yes` could mean "yes"
    or "1"."""
    if isinstance(value, bool):
        raise ValueError('write the text in quotes, such as "1" or "true"')
    return str(value) if isinstance(value, (int, float)) else value


Word = Annotated[str, BeforeValidator(_word)]
Scalar = bool | int | float | str
FlagValue = Scalar | list[Scalar] | dict[str, Any]
"""A flag's value: true = the bare flag, false = not given (also takes back an inherited one), a list =
several words, a mapping = JSON."""


# --- platforms ------------------------------------------------------------------------------------


class Gpus(Entry):
    """The GPUs of a node. `names` are compared as whole words: "GH200" contains "H200" and is another
    thing."""

    count: PositiveInt
    names: tuple[str, ...] = Field(min_length=1)
    pci_ids: tuple[Annotated[str, Field(pattern=r"^[0-9a-f]{4}:[0-9a-f]{4}$")], ...] = ()
    memory_gib: Positive
    sm: Annotated[str, Field(pattern=r"^\d+\.\d$")]
    hbm_gbps: Positive
    hbm_effective_gbps: Positive | None = None

    def matches(self, name: str) -> bool:
        """Is a product name, as the driver prints it, one of ours?"""
        words = name.split()
        return any(_contains(words, pattern.split()) for pattern in self.names)


def _contains(words: list[str], wanted: list[str]) -> bool:
    return any(words[at : at + len(wanted)] == wanted for at in range(len(words) - len(wanted) + 1))


class Links(Entry):
    """How bytes travel. `host_*_gbps`: host memory to a GPU, from the GPU's own socket and from another one;
    `staged_gbps`: GPU to GPU through host memory."""

    nvswitches: Annotated[int, Field(ge=0)] = 0
    nvlink_gbps: Positive | None = None
    peer_access: bool = True
    host_local_gbps: Positive | None = None
    host_remote_gbps: Positive | None = None
    staged_gbps: Positive | None = None


class NumaNode(Entry):
    """A NUMA node: `cpus` as the kernel lists them ("0-71"), empty for a node that is only memory (a
    Hopper's HBM on Grace)."""

    node: Annotated[int, Field(ge=0)]
    cpus: Annotated[str, Field(pattern=r"^(\d+(-\d+)?(,\d+(-\d+)?)*)?$")] = ""
    memory_gib: NotNegative
    gpus: tuple[Annotated[int, Field(ge=0)], ...] = ()
    gpu_memory: bool = False


class HostCpu(Entry):
    """Sockets, physical cores a socket, memory a socket, memory bandwidth of a socket and the NUMA nodes
    (empty: not known or no matter)."""

    sockets: PositiveInt
    cores_per_socket: PositiveInt
    memory_gib_per_socket: Positive
    memory_gbps_per_socket: Positive | None = None
    numa: tuple[NumaNode, ...] = ()


class Driver(Entry):
    """What the driver must be. `minimum` is a branch such as "550"; `recommended` what is known to run
    well here."""

    minimum: Annotated[str, Field(pattern=r"^\d+(\.\d+)*$")]
    recommended: Annotated[str, Field(pattern=r"^\d+(\.\d+)*$")] | None = None
    open_modules: bool = False
    fabric_manager: bool = False
    page_size_kib: PositiveInt | None = None
    notes: tuple[str, ...] = ()


class Thresholds(Entry):
    """When preflight and status speak up."""

    disk_free_gib: NotNegative = 20
    gpu_temperature_c: PositiveInt = 85
    gpu_free_gib_at_least: NotNegative = 10
    hbm_share_of_effective: Share = 0.9
    host_link_share: Share = 0.85
    nvlink_share: Share = 0.75


class Platform(Entry):
    """A kind of node."""

    title: str
    arch: Literal["x86_64", "aarch64", "any"]
    gpus: Gpus | None = None
    links: Links = Links()
    host: HostCpu | None = None
    driver: Driver | None = None
    expected: dict[str, int | float | str | bool] = {}
    thresholds: Thresholds = Thresholds()
    notes: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _whole(self) -> Platform:
        if self.gpus and not self.driver:
            raise ValueError("a platform with gpus needs driver")
        count = self.gpus.count if self.gpus else 0
        nodes = self.host.numa if self.host else []
        if beyond := sorted({gpu for node in nodes for gpu in node.gpus if gpu >= count}):
            raise ValueError(f"host.numa names gpus {beyond}, and there are {count}")
        return self


# --- engines --------------------------------------------------------------------------------------


class KeyHow(Entry):
    """How an engine takes its API key (see planned.ApiKey)."""

    how: Literal["environment", "file_flag", "flag"]
    name: str


class Launch(Entry):
    """The launch line. `argv` may hold `{prefix}` (the environment) and `{lib}` (our own programs on the
    node); the rest are the names of flags that the plan fills in. `model_is`: does the engine want a
    folder or one file?"""

    argv: tuple[str, ...] = Field(min_length=1)
    model: str
    host: str = "--host"
    port: str = "--port"
    served_name: str
    context: str | None = None
    api_key: KeyHow | None = None
    model_is: Literal["folder", "file"] = "folder"
    always: dict[str, FlagValue] = {}


class Paths(Entry):
    """Paths of the HTTP interface (see planned.Endpoints). `health_generates`: does asking for health
    make a token?"""

    health: str = "/health"
    health_generates: bool = False
    models: str = "/v1/models"
    chat: str = "/v1/chat/completions"
    completions: str = "/v1/completions"
    metrics: str | None = "/metrics"


class LogLevel(Entry):
    """How an engine is told how much to log: a flag or a variable, and what it calls each of our levels."""

    flag: str | None = None
    environment: str | None = None
    values: dict[Literal["debug", "info", "warning", "error"], FlagValue]

    @model_validator(mode="after")
    def _one(self) -> LogLevel:
        if (self.flag is None) == (self.environment is None):
            raise ValueError("needs flag or environment, and not both")
        return self


class EngineLog(Entry):
    """The engine's log: `format` is the parser's name; `markers`: phase -> regular expression found when
    the phase ends; `level`: how it is told how much to log."""

    format: str
    level: LogLevel | None = None
    markers: dict[Literal["imports", "distributed", "weights", "kv", "jit", "graphs", "ready"], str] = {}

    @model_validator(mode="after")
    def _compile(self) -> EngineLog:
        for phase, pattern in self.markers.items():
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"markers.{phase} is no regular expression: {error}") from None
        return self


class Stop(Entry):
    """Seconds until SIGKILL, and what is known about SIGTERM."""

    timeout_s: PositiveInt = 60
    notes: tuple[str, ...] = ()


class EngineBench(Entry):
    """The engine's own benchmark client, run on the node. `argv` may hold `{prefix}`, `{base_url}`,
    `{served_name}`, `{model}`, `{prompt_tokens}`, `{output_tokens}`, `{requests}`, `{seed}` and `{result}`
    (the file it writes); `closed` (with `{concurrent}`) or `open` (with `{rate}`) follows it. `key`: the
    variable that takes the API key."""

    name: str
    argv: tuple[str, ...] = Field(min_length=1)
    closed: tuple[str, ...]
    open: tuple[str, ...]
    key: str | None = None


class Start(Entry):
    """Seconds until the first real token, and until one health probe is given up."""

    timeout_s: PositiveInt = 1800
    probe_timeout_s: PositiveInt = 30


class Environment(Entry):
    """A Python environment. `locks`: architecture -> path of the lock in this checkout. `checks`: argv
    lists run in it."""

    provider: Literal["pip", "uv", "conda", "mamba", "micromamba", "rattler"]
    python: str
    locks: dict[Literal["x86_64", "aarch64"], str] = {}
    requires: tuple[str, ...] = ()
    checks: tuple[tuple[str, ...], ...] = ()


class Compiles(Entry):
    """The engine compiles at run time: in which languages, and libraries that what it compiles is linked with."""

    languages: tuple[Literal["c", "c++"], ...] = Field(default=("c",), min_length=1)
    links: tuple[Literal["cuda"], ...] = ()


class Engine(Entry):
    """One version of an inference engine. `compiles`: what it asks of a compiler when it starts (None: nothing)."""

    engine: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*$")]
    version: str
    released: str | None = None
    launch: Launch
    endpoints: Paths = Paths()
    metrics: dict[str, str] = {}
    log: EngineLog
    environment: dict[str, Word] = {}
    cache_environment: dict[str, str] = {}
    stop: Stop = Stop()
    start: Start = Start()
    bench: EngineBench | None = None
    needs_gpu: bool = True
    compiles: Compiles | None = None
    cuda: str | None = None
    minimum_driver: str | None = None
    arches: tuple[Literal["x86_64", "aarch64"], ...] = ("x86_64", "aarch64")
    install: Environment
    flag_table: str
    reads: tuple[Literal["safetensors", "gguf"], ...] = ("safetensors",)
    programs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()


# --- models ---------------------------------------------------------------------------------------


class Hub(Entry):
    """The model's names on the hubs. `revision` pins a commit (required before remote code is trusted); it is
    Hugging Face's when both are given, and `modelscope_revision` is the other hub's (default: its newest)."""

    huggingface: str | None = None
    modelscope: str | None = None
    revision: str | None = None
    modelscope_revision: str | None = None
    include: tuple[str, ...] = ()


class Size(Entry):
    """One statement about a size: sources disagree, so each figure keeps its source."""

    gb: Positive
    source: str


class Weights(Entry):
    """Bytes of the weights in memory. `routed_experts_gib` and `mtp_gib` are parts of `total_gib` (and
    overlap: the MTP layer has experts too). `expert_bits`: bits of one routed-expert weight, scales
    included."""

    total_gib: Positive
    routed_experts_gib: NotNegative = 0
    mtp_gib: NotNegative = 0
    expert_bits: Positive | None = None


class Shape(Entry):
    """What the memory and speed arithmetic needs. `layers` without the MTP layer; `dense_layers` of them
    have no experts."""

    layers: PositiveInt
    hidden: PositiveInt
    vocab: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    intermediate: PositiveInt | None = None
    dense_layers: Annotated[int, Field(ge=0)] | None = None
    experts: Annotated[int, Field(ge=0)] = 0
    active_experts: Annotated[int, Field(ge=0)] = 0
    shared_experts: Annotated[int, Field(ge=0)] = 0
    moe_intermediate: PositiveInt | None = None
    kv_lora_rank: PositiveInt | None = None
    q_lora_rank: PositiveInt | None = None
    qk_rope_dim: PositiveInt | None = None
    qk_nope_dim: PositiveInt | None = None
    v_head_dim: PositiveInt | None = None

    @model_validator(mode="after")
    def _experts(self) -> Shape:
        if self.active_experts > self.experts:
            raise ValueError(f"active_experts {self.active_experts} is more than experts {self.experts}")
        return self


class SparseAttention(Entry):
    """The model's own sparse attention: tokens attended, the indexer's key width, and on how many layers
    an index is kept (every `index_every` layers; 1: all)."""

    kind: str
    topk: PositiveInt
    index_dim: PositiveInt
    index_heads: PositiveInt | None = None
    index_every: PositiveInt = 1


class Mtp(Entry):
    """The multi-token-prediction layer: its index, its tensors' common prefix and number, and their
    precision."""

    layer: Annotated[int, Field(ge=0)]
    tensors: PositiveInt | None = None
    prefix: str
    precision: str


class Graft(Entry):
    """A model put together on the node: `base` (a catalog model) plus the tensors of a delta repository.

    The model's `lock` is the delta's, the base has its own. `dtypes`: which types the tensors may have (none:
    any); `config`: keys of config.json to set, dotted; `needs`: what the engine must have been given, and
    `words`: what it is -> a word that the code of such an engine holds, looked for on the node.
    """

    base: str
    delta: Hub
    tensors: PositiveInt
    dtypes: tuple[str, ...] = ()
    config: dict[str, Any] = {}
    needs: tuple[str, ...] = ()
    words: dict[str, str] = {}


class Model(Entry):
    """A model as engines load it."""

    title: str
    family: str
    licence: str
    hub: Hub = Hub()
    made_by: str | None = None
    lock: str | None = None
    format: Literal["safetensors", "gguf"]
    entry: str | None = None
    architecture: str | None = None
    quantisation: str
    sizes: tuple[Size, ...] = ()
    weights: Weights
    shape: Shape
    context: PositiveInt
    sparse_attention: SparseAttention | None = None
    mtp: Mtp | None = None
    graft: Graft | None = None
    draft_for: tuple[str, ...] = ()
    draft_method: str | None = None
    trust_remote_code: bool = False
    minimum_engines: dict[str, str] = {}
    sm_minimum: str | None = None
    notes: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _whole(self) -> Model:
        if not (self.hub.huggingface or self.hub.modelscope or self.made_by or self.graft):
            raise ValueError("needs a place to come from: hub, made_by or graft")
        if self.graft and not self.mtp:
            raise ValueError("a graft adds an MTP layer: say which under mtp")
        if self.draft_for and not self.draft_method:
            raise ValueError("a draft needs draft_method")
        if self.mtp and not 0 <= self.mtp.layer - self.shape.layers < LONGEST_CHAIN:
            raise ValueError(f"mtp.layer {self.mtp.layer} does not follow the {self.shape.layers} layers")
        return self


# --- profiles -------------------------------------------------------------------------------------


class Workload(Entry):
    """The load that a number belongs to."""

    prompt_tokens: PositiveInt | None = None
    output_tokens: PositiveInt | None = None
    concurrent: PositiveInt = 1
    runs: PositiveInt | None = None
    note: str = ""


class Expectation(Entry):
    """One measurement behind a profile. `value` is the median or the only figure; `low`/`high` bound a
    range."""

    workload: Workload
    metric: Literal[
        "output_tok_s", "total_tok_s", "prefill_tok_s", "tpot_ms", "ttft_ms", "accept_length", "accept_share"
    ] = "output_tok_s"
    value: Positive | None = None
    low: Positive | None = None
    high: Positive | None = None
    p10: Positive | None = None
    p90: Positive | None = None
    cv: NotNegative | None = None
    tpot_ms: Positive | None = None
    accept_percent: NotNegative | None = None
    runs_below_60: Annotated[int, Field(ge=0)] | None = None
    source: str

    @model_validator(mode="after")
    def _figure(self) -> Expectation:
        if self.value is None and (self.low is None or self.high is None):
            raise ValueError("needs value, or low and high")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}")
        return self


class PlacementWish(Entry):
    """How processes are put on CPUs and memory. `bind: none` leaves it to the kernel; `ranks` binds each
    rank to the node of its GPU (by the engine itself where it can); `node` binds the whole service to
    NUMA node `node`."""

    bind: Literal["none", "ranks", "node"] = "none"
    node: Annotated[int, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _node(self) -> PlacementWish:
        if (self.bind == "node") != (self.node is not None):
            raise ValueError("bind: node and a node number go together")
        return self


class WarmUpWish(Entry):
    """Requests after a start (see planned.WarmUp)."""

    prompt_tokens: PositiveInt = 16
    output_tokens: PositiveInt = 8
    concurrent: PositiveInt = 1


class Limits(Entry):
    """What a profile changes of the engine's budgets; `memory_gib`: the most host memory of the whole
    service."""

    start_timeout_s: PositiveInt | None = None
    stop_timeout_s: PositiveInt | None = None
    probe_timeout_s: PositiveInt | None = None
    memory_gib: Positive | None = None


ChangeWindow = Annotated[str, AfterValidator(windows.checked)]
"""A range of the week, such as `Mon..Fri 09:00-17:00 Europe/Berlin`."""


class DriftWish(Entry):
    """Signs of drift that restart a server; each is off until its ratio is given (see planned.Drift)."""

    memory_ratio: Annotated[float, Field(gt=1)] | None = None
    latency_ratio: Annotated[float, Field(gt=1)] | None = None
    throughput_ratio: Annotated[float, Field(gt=0, lt=1)] | None = None
    for_s: PositiveInt = 600


class RestartWish(Entry):
    """Restarts that nobody asks for by hand; what is not given comes from the level above (see
    planned.Restart)."""

    calendar: Annotated[str, AfterValidator(calendars.checked)] | None = None
    spread_s: Annotated[int, Field(ge=0)] | None = None
    postpone_s: Annotated[int, Field(ge=0)] | None = None
    drain_s: Annotated[int, Field(ge=0)] | None = None
    hours: tuple[ChangeWindow, ...] | None = None
    never: tuple[ChangeWindow, ...] | None = None
    hours_wait_s: Annotated[int, Field(ge=0)] | None = None
    drift: DriftWish | None = None


class DraftingWish(Entry):
    """What a service that drafts must accept (see planned.Drafting); what is not given comes from the level above."""

    accept_length_at_least: Annotated[float, Field(ge=0, le=64)] | None = None
    strict: bool | None = None


class Rung(Entry):
    """A place on a ladder of profiles, each one change better than the one before; rung 0 proves that
    anything runs."""

    name: str
    rung: Annotated[int, Field(ge=0)]
    change: str


class Axis(Entry):
    """One setting that `invoke tune` walks: a flag (or a variable), its values in walking order, what it
    is set along with."""

    flag: str | None = None
    environment: str | None = None
    values: tuple[FlagValue, ...] = Field(min_length=2)
    along: dict[str, list[FlagValue]] = {}

    @model_validator(mode="after")
    def _one(self) -> Axis:
        if (self.flag is None) == (self.environment is None):
            raise ValueError("needs flag or environment, and not both")
        for name, values in self.along.items():
            if len(values) != len(self.values):
                raise ValueError(f"along.{name} has {len(values)} values for {len(self.values)}")
        return self


class Tune(Entry):
    """What may be tuned and for what: the loads that are measured, what counts, and the head-room that
    must stay."""

    axes: tuple[Axis, ...] = Field(min_length=1)
    workloads: tuple[Workload, ...] = Field(min_length=1)
    goal: Literal["single_request", "throughput"] = "single_request"
    warm_runs: PositiveInt = 10
    keep_free_gib: NotNegative = 10
    accept_percent_at_least: NotNegative = 60


class Profile(Entry):
    """A tuned combination. `based_on` names a profile that this one is a change to: everything not given
    is taken from it; flags and environment are merged key by key."""

    title: str
    platforms: tuple[str, ...] = Field(min_length=1)
    model: str
    engine: str
    based_on: str | None = None
    flags: dict[str, FlagValue] = {}
    environment: dict[str, Word] = {}
    draft: str | None = None
    gpus: Annotated[int, Field(ge=0)] | None = None
    context: PositiveInt | None = None
    placement: PlacementWish = PlacementWish()
    warm_up: tuple[WarmUpWish, ...] = (WarmUpWish(),)
    limits: Limits = Limits()
    restart: RestartWish = RestartWish()
    drafting: DraftingWish = DraftingWish()
    expectations: tuple[Expectation, ...] = ()
    unmeasured: str | None = None
    ladder: Rung | None = None
    tune: Tune | None = None
    notes: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _measured(self) -> Profile:
        if bool(self.expectations) == bool(self.unmeasured):
            raise ValueError("needs expectations (a measurement) or unmeasured (the reason), and not both")
        for flag in self.flags:
            if not flag.startswith("--"):
                raise ValueError(f'flags: "{flag}" should start with "--"')
        return self


# --- reading --------------------------------------------------------------------------------------

MODELS: dict[str, type[Entry]] = {
    "platforms": Platform,
    "engines": Engine,
    "models": Model,
    "profiles": Profile,
}
NOT_INHERITED = ("expectations", "unmeasured", "ladder", "title", "based_on", "notes", "tune")
"""Keys of a profile that say something about that very profile, so that a profile based on it does not
get them."""
MERGED = ("flags", "environment")

EntryT = TypeVar("EntryT", bound=Entry)


class Catalog:
    """The entries of one folder, each read when first asked for. Raises UsageError for what is wrong or
    unknown."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self.folder = folder
        self._read: dict[tuple[str, str], Entry] = {}

    @cached_property
    def _names(self) -> dict[str, tuple[str, ...]]:
        return {kind: tuple(sorted(p.stem for p in self._files(kind))) for kind in KINDS}

    def _files(self, kind: str) -> Iterator[Path]:
        folder = self.folder / kind
        if folder.is_dir():
            yield from (path for path in folder.iterdir() if path.suffix == ".yml" and path.is_file())

    def names(self, kind: str) -> tuple[str, ...]:
        """The names of a kind's entries, sorted."""
        return self._names[kind]

    def platform(self, name: str) -> Platform:
        """A platform. Raises UsageError when it is unknown or its file is wrong."""
        return self._entry("platforms", name, Platform)

    def engine(self, name: str) -> Engine:
        """An engine version, such as "sglang-0.5.10.post1"."""
        return self._entry("engines", name, Engine)

    def model(self, name: str) -> Model:
        """A model."""
        return self._entry("models", name, Model)

    def profile(self, name: str) -> Profile:
        """A profile with what it inherits already in it."""
        return self._entry("profiles", name, Profile)

    def entry(self, kind: str, name: str) -> Entry:
        """An entry of a kind of KINDS. Raises UsageError when it is unknown or its file is wrong."""
        return self._entry(kind, name, MODELS[kind])

    def _entry(self, kind: str, name: str, model: type[EntryT]) -> EntryT:
        found = self._read.get((kind, name))
        if found is None:
            found = build(model, self._data(kind, name), self.where(kind, name))
            self._read[kind, name] = found
        assert isinstance(found, model)
        return found

    def _data(self, kind: str, name: str) -> Any:
        if name not in self.names(kind):
            what, remedy = unknown(kind[:-1], name, near(name, self.names(kind)))
            raise UsageError(Problem(self.where(kind, name), what, remedy))
        if not NAME.fullmatch(name):
            raise UsageError(
                Problem(
                    self.where(kind, name),
                    "names have small letters, digits, dots, dashes and plus signs only",
                )
            )
        data = read_yaml(self.folder / kind / f"{name}.yml", self.where(kind, name))
        return self._with_base(name, data, ()) if kind == "profiles" else data

    def _with_base(self, name: str, data: Any, chain: tuple[str, ...]) -> Any:
        """A profile's data on top of what it is based on."""
        base = data.get("based_on") if isinstance(data, dict) else None
        if not isinstance(base, str):
            return data
        where = f"{self.where('profiles', name)}: based_on"
        if base in (*chain, name) or len(chain) >= LONGEST_CHAIN:
            raise UsageError(Problem(where, "goes round in a circle: " + " -> ".join((*chain, name, base))))
        if base not in self.names("profiles"):
            raise UsageError(Problem(where, *unknown("profile", base, near(base, self.names("profiles")))))
        below = read_yaml(self.folder / "profiles" / f"{base}.yml", self.where("profiles", base))
        return merged(self._with_base(base, below, (*chain, name)), data)

    def where(self, kind: str, name: str) -> str:
        """How messages call an entry's file."""
        return f"catalog/{kind}/{name}.yml"

    def everything(self) -> list[Problem]:
        """Reads all files. Returns the problems of all of them, cross-checks included."""
        problems: list[Problem] = []
        for kind in KINDS:
            for name in self.names(kind):
                try:
                    self.entry(kind, name)
                except UsageError as error:
                    problems += error.problems
        return [*dict.fromkeys(problems), *self._cross_checks()]

    def _cross_checks(self) -> list[Problem]:
        problems: list[Problem] = []
        for (kind, name), entry in sorted(self._read.items(), key=lambda item: item[0]):
            where = self.where(kind, name)
            if isinstance(entry, Model):
                problems += self._check_model(where, entry)
            elif isinstance(entry, Engine):
                problems += self._check_engine(where, name, entry)
            elif isinstance(entry, Profile):
                problems += self.check_profile(where, entry)
        return problems

    def _check_model(self, where: str, model: Model) -> list[Problem]:
        problems = []
        for key, value in (("made_by", model.made_by), ("lock", model.lock)):
            if value and not (self.folder.parent / value).is_file():
                problems.append(Problem(f"{where}: {key}", f"there is no file {value}"))
        names = [("graft.base", model.graft.base)] if model.graft else []
        names += [("draft_for", name) for name in model.draft_for]
        for key, name in names:
            if name not in self.names("models"):
                problems.append(
                    Problem(f"{where}: {key}", *unknown("model", name, near(name, self.names("models"))))
                )
        if model.trust_remote_code and not model.hub.revision and not model.lock:
            problems.append(
                Problem(
                    f"{where}: trust_remote_code",
                    "needs hub.revision: code is only trusted at a pinned revision",
                )
            )
        return problems

    def _check_engine(self, where: str, name: str, engine: Engine) -> list[Problem]:
        problems = []
        if name != f"{engine.engine}-{engine.version}":
            problems.append(
                Problem(
                    where,
                    f"should be called {engine.engine}-{engine.version}.yml, after engine and version",
                )
            )
        if not (self.folder / "flags" / f"{engine.flag_table}.json").is_file():
            problems.append(
                Problem(
                    f"{where}: flag_table",
                    f"there is no catalog/flags/{engine.flag_table}.json",
                    f"Make it: invoke flags.table --engine {engine.engine} --version {engine.version}",
                )
            )
        for arch, lock in engine.install.locks.items():
            if not (self.folder.parent / lock).is_file():
                problems.append(Problem(f"{where}: install.locks.{arch}", f"there is no file {lock}"))
        for program in engine.programs:
            if not (self.folder.parent / program).is_file():
                problems.append(Problem(f"{where}: programs", f"there is no file {program}"))
        return problems

    def check_profile(self, where: str, profile: Profile) -> list[Problem]:
        """Does a profile name things that exist and go together? (Flags and memory are checked with the
        plan.)"""
        problems: list[Problem] = []
        platforms = [
            self._named("platforms", name, f"{where}: platforms", problems) for name in profile.platforms
        ]
        engine = self._named("engines", profile.engine, f"{where}: engine", problems)
        model = self._named("models", profile.model, f"{where}: model", problems)
        draft = self._named("models", profile.draft, f"{where}: draft", problems) if profile.draft else None
        if isinstance(engine, Engine):
            for name, platform in zip(profile.platforms, platforms, strict=True):
                if isinstance(platform, Platform):
                    problems += _engine_on(where, profile, name, platform, engine)
            if isinstance(model, Model):
                problems += _engine_reads(where, profile, engine, model)
        if isinstance(model, Model):
            problems += _drafts(where, profile, model, draft)
        return problems

    def _named(self, kind: str, name: str, where: str, problems: list[Problem]) -> Entry | None:
        """The entry, or None with a problem noted; a file that is wrong has its problems noted already by
        reading it."""
        if name not in self.names(kind):
            problems.append(Problem(where, *unknown(kind[:-1], name, near(name, self.names(kind)))))
            return None
        try:
            return self.entry(kind, name)
        except UsageError:
            return None


def _engine_on(where: str, profile: Profile, name: str, platform: Platform, engine: Engine) -> list[Problem]:
    problems = []
    if platform.arch != "any" and platform.arch not in engine.arches:
        problems.append(
            Problem(
                f"{where}: engine",
                f"{profile.engine} does not run on {platform.arch}, and {name} is {platform.arch}",
            )
        )
    if engine.needs_gpu and not platform.gpus:
        problems.append(
            Problem(f"{where}: engine", f"{profile.engine} needs GPUs, and platform {name} has none")
        )
    wanted = profile.gpus or 0
    if platform.gpus and wanted > platform.gpus.count:
        problems.append(
            Problem(f"{where}: gpus", f"wants {wanted} GPUs, and platform {name} has {platform.gpus.count}")
        )
    if profile.placement.node is not None and platform.host and platform.host.numa:
        cpus = {node.node for node in platform.host.numa if node.cpus}
        if profile.placement.node not in cpus:
            problems.append(
                Problem(
                    f"{where}: placement.node",
                    f"{name} has no NUMA node {profile.placement.node} with CPUs",
                    f"Nodes with CPUs: {', '.join(map(str, sorted(cpus)))}.",
                )
            )
    return problems


def _engine_reads(where: str, profile: Profile, engine: Engine, model: Model) -> list[Problem]:
    problems = []
    if model.format not in engine.reads:
        problems.append(
            Problem(
                f"{where}: model",
                f"{profile.model} is {model.format}, and {profile.engine} reads {', '.join(engine.reads)}",
            )
        )
    least = model.minimum_engines.get(engine.engine)
    if least and version_key(engine.version) < version_key(least):
        problems.append(
            Problem(
                f"{where}: engine",
                f"{profile.engine} is too old for {profile.model}",
                f"It needs {engine.engine} {least} or newer.",
            )
        )
    return problems


def _drafts(where: str, profile: Profile, model: Model, draft: Entry | None) -> list[Problem]:
    problems = []
    if not model.mtp and not profile.draft and uses_mtp(profile.flags):
        problems.append(
            Problem(
                f"{where}: flags",
                f"MTP is on, and {profile.model} has no MTP tensors: it would not start, or accept nothing",
                "Use a model that has them (or a graft), or take the speculative flags out.",
            )
        )
    if isinstance(draft, Model) and profile.model not in draft.draft_for:
        problems.append(
            Problem(
                f"{where}: draft",
                f"{profile.draft} drafts for {', '.join(draft.draft_for)}, not for {profile.model}",
            )
        )
    return problems


MTP_ALGORITHMS = ("EAGLE", "NEXTN")


def uses_mtp(flags: Mapping[str, Any]) -> bool:
    """Do these flags draft with the model's own MTP layer?"""
    if str(flags.get("--speculative-algorithm", "")).upper() in MTP_ALGORITHMS:
        return not flags.get("--speculative-draft-model-path")
    config = flags.get("--speculative-config")
    methods = [flags.get("--spec-method"), flags.get("--speculative-config.method")]
    methods.append(config.get("method") if isinstance(config, dict) else None)
    return any(str(method).endswith("mtp") for method in methods if method)


def merged(below: Any, above: Any) -> Any:
    """A profile's data with its base's beneath it; flags and environment key by key, the base's order
    first."""
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    result = {key: value for key, value in below.items() if key not in NOT_INHERITED} | above
    for key in MERGED:
        lower, upper = below.get(key, {}), above.get(key, {})
        if isinstance(lower, dict) and isinstance(upper, dict):
            result[key] = lower | upper
    return result


def version_key(version: str) -> tuple[tuple[int, int], ...]:
    """A key that orders releases: "0.5.10" < "0.5.10.post1" < "0.5.11"; a part that is no number counts
    as its digits."""
    parts = re.findall(r"post|\d+", version)
    return tuple((0, 0) if part == "post" else (1, int(part)) for part in parts)


def near(word: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """`known`, the most alike first, so that a message's short list holds what was probably meant."""
    return tuple(sorted(known, key=lambda name: -difflib.SequenceMatcher(None, word, name).ratio()))


def lazy(folder: Path = FOLDER) -> Catalog:
    """The catalog with nothing read yet."""
    return Catalog(folder)


def load(folder: Path = FOLDER) -> Catalog:
    """The catalog with every file read and cross-checked. Raises UsageError with all problems of all
    files."""
    catalog = Catalog(folder)
    if problems := catalog.everything():
        raise UsageError(problems)
    return catalog
