"""Which CPUs and memory nodes each rank may use, how to say so to engine or systemd, and how it is proven.

Read from recorded output: the `/sys/devices/system/node` tree and `nvidia-smi topo -m`. On Grace a GPU's own
memory shows up as memory nodes without CPUs (eight a GPU, most of them empty); those are never places for a
process. CPU and node lists are written as the kernel writes them: "0-71,144-215".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bringup.errors import Problem, UsageError
from bringup.planned import Placement

if TYPE_CHECKING:
    from bringup import catalog

SYS_NODES = "/sys/devices/system/node"
LOCAL_SHARE = 0.95
"""Share of a process's pages that must lie on its own nodes: libraries mapped by others may lie elsewhere."""
PAGE = 4096
MOST_CPUS = 65_536
"""More than any kernel is built for; a list beyond it is a damaged record."""

Wants = Literal["gpu-local", "one-node", "all", "ranks", "node", "none"]
_SYNONYMS = {"ranks": "gpu-local", "node": "one-node", "none": "all"}


# --- lists as the kernel writes them -----------------------------------------------------------------------


def numbers(text: str) -> tuple[int, ...]:
    """The numbers of a list such as "0-3,8"; () for an empty one. Raises ValueError for anything else."""
    result: list[int] = []
    for part in filter(None, (piece.strip() for piece in text.strip().split(","))):
        first, dash, last = part.partition("-")
        low, high = int(first), int(last if dash else first)
        if low > high or high >= MOST_CPUS:
            raise ValueError(f'"{part}" is no range')
        result += range(low, high + 1)
    return tuple(result)


def listed(values: Iterable[int]) -> str:
    """Numbers as a list: 0, 1, 2, 8 -> "0-2,8"."""
    ranges: list[list[int]] = []
    for value in sorted(set(values)):
        if ranges and value == ranges[-1][1] + 1:
            ranges[-1][1] = value
        else:
            ranges.append([value, value])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)


# --- topology ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Node:
    """A NUMA node: its CPUs (none: memory only), bytes of memory, and distances to all nodes in their
    order."""

    number: int
    cpus: tuple[int, ...]
    memory: int
    distances: tuple[int, ...] = ()


@dataclass(frozen=True)
class Gpu:
    """A GPU: CPUs and nodes near to it, the node its own memory is (None: not addressable by the CPU), and
    the kind of way to each other GPU ("NV18", "NODE", "SYS")."""

    index: int
    cpus: tuple[int, ...]
    nodes: tuple[int, ...]
    memory_node: int | None = None
    ways: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Topology:
    """A machine's nodes and GPUs, in the order of their numbers."""

    nodes: tuple[Node, ...]
    gpus: tuple[Gpu, ...] = ()

    @property
    def cpu_nodes(self) -> tuple[Node, ...]:
        """Nodes where a process can run and keep its memory."""
        return tuple(node for node in self.nodes if node.cpus)

    @property
    def memory_only(self) -> tuple[int, ...]:
        """Nodes without CPUs: a GPU's memory, or memory expanders. Never a place for a process."""
        return tuple(node.number for node in self.nodes if not node.cpus)

    def node_of(self, gpu: int) -> int | None:
        """The node with CPUs nearest to a GPU; None when the record does not say."""
        found = next((item for item in self.gpus if item.index == gpu), None)
        if found is None:
            return None
        named = [node for node in self.cpu_nodes if node.number in found.nodes]
        near = named or [node for node in self.cpu_nodes if set(node.cpus) & set(found.cpus)]
        if near:
            return near[0].number
        # A machine with one node has one answer, also when a virtual machine hides the affinity.
        return self.cpu_nodes[0].number if len(self.cpu_nodes) == 1 else None


def parse_topology(sys_tree: Mapping[str, str] | Path, topo_m: str | None = None) -> Topology:
    """A machine from its records. `sys_tree`: file -> text ("node0/cpulist", with or without the folder
    before it), or a folder that holds the tree. Raises UsageError with everything that is wrong in them."""
    files = _read_tree(sys_tree) if isinstance(sys_tree, Path) else _relative(sys_tree)
    problems: list[Problem] = []
    nodes = [_node(number, files, problems) for number in _node_numbers(files)]
    if not nodes:
        problems.append(Problem(SYS_NODES, "holds no node", "Record the tree again."))
    gpus = parse_topo_m(topo_m, problems) if topo_m else ()
    if problems:
        raise UsageError(problems)
    return Topology(tuple(nodes), gpus)


def _read_tree(folder: Path) -> dict[str, str]:
    wanted = ("cpulist", "meminfo", "distance")
    paths = [path for name in wanted for path in folder.glob(f"node*/{name}")]
    return {
        str(path.relative_to(folder)): path.read_text(encoding="ascii", errors="replace") for path in paths
    }


def _relative(files: Mapping[str, str]) -> dict[str, str]:
    return {re.sub(r"^.*?(?=node\d+/)", "", name): text for name, text in files.items()}


def _node_numbers(files: Mapping[str, str]) -> list[int]:
    matches = (re.fullmatch(r"node(\d+)/cpulist", name) for name in files)
    return sorted(int(match[1]) for match in matches if match)


def _node(number: int, files: Mapping[str, str], problems: list[Problem]) -> Node:
    where = f"{SYS_NODES}/node{number}"
    try:
        cpus = numbers(files[f"node{number}/cpulist"])
    except ValueError as error:
        problems.append(Problem(f"{where}/cpulist", f"not a CPU list: {error}"))
        cpus = ()
    total = re.search(r"MemTotal:\s*(\d+) kB", files.get(f"node{number}/meminfo", ""))
    distances = re.findall(r"\d+", files.get(f"node{number}/distance", ""))
    return Node(number, cpus, int(total[1]) * 1024 if total else 0, tuple(map(int, distances)))


_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_COLUMNS = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")


def parse_topo_m(text: str, problems: list[Problem] | None = None) -> tuple[Gpu, ...]:
    """The GPUs of `nvidia-smi topo -m`. Its header may be underlined with escape codes, and its columns are
    padded with tabs that do not line up, so cells are told apart by what they look like."""
    lines = [line for line in _ANSI.sub("", text).splitlines() if line.strip()]
    header = next((line for line in lines if re.match(r"\s*GPU0\b", line) and "Affinity" in line), "")
    peers = re.findall(r"\bGPU(\d+)\b", header)
    last = sum(column in header for column in _COLUMNS)
    rows = [line.split() for line in lines if re.match(r"GPU\d+\s", line) and line != header]
    found = problems if problems is not None else []
    if not header or not rows:
        found.append(Problem("nvidia-smi topo -m", "has no table of GPUs", "Record it again."))
        return ()
    gpus = [gpu for row in rows if (gpu := _gpu(row, peers, last, found))]
    if problems is None and found:
        raise UsageError(found)
    return tuple(gpus)


def _gpu(row: Sequence[str], peers: Sequence[str], last: int, problems: list[Problem]) -> Gpu | None:
    """One row: ways to the `peers` first, `last` cells about affinity at the end, other devices between."""
    index = int(row[0].removeprefix("GPU"))
    ways = {int(peer): way for peer, way in zip(peers, row[1:], strict=False) if way != "X"}
    try:
        if len(row) < 1 + len(peers) + last:
            raise ValueError("cells are missing")
        cpus, nodes, own = (numbers(_or_empty(cell)) for cell in [*row[-last:], "N/A"][:3])
    except ValueError:
        problems.append(Problem("nvidia-smi topo -m", f"row GPU{index} is not readable: {' '.join(row)}"))
        return None
    return Gpu(index, cpus, nodes, own[0] if own else None, ways)


def _or_empty(cell: str) -> str:
    return "" if cell.upper() == "N/A" else cell


# --- placement ---------------------------------------------------------------------------------------------


def place(
    platform: catalog.Platform, gpus: Sequence[int], wants: Wants, node: int | None = None
) -> Placement:
    """Where a service on `gpus` may run: "gpu-local" binds each rank to the node of its GPU, "one-node"
    everything to `node`, "all" nothing. Raises UsageError when the platform's entry does not have what is
    asked for."""
    return place_on(topology_of(platform), gpus, wants, node)


def topology_of(platform: catalog.Platform) -> Topology:
    """The topology that a platform's catalog entry states; no nodes when it states none."""
    stated = platform.host.numa if platform.host else ()
    nodes = [Node(item.node, numbers(item.cpus), int(item.memory_gib * 2**30)) for item in stated]
    gpus = [
        Gpu(index, numbers(item.cpus), (item.node,))
        for item in stated
        if item.cpus and not item.gpu_memory
        for index in item.gpus
    ]
    return Topology(tuple(nodes), tuple(sorted(gpus, key=lambda gpu: gpu.index)))


def place_on(topology: Topology, gpus: Sequence[int], wants: Wants, node: int | None = None) -> Placement:
    """`place` on a machine whose topology is known."""
    wish = _SYNONYMS.get(wants, wants)
    if wish == "one-node":
        return _one_node(topology, node)
    if wish == "all" or not topology.cpu_nodes or not gpus:
        return Placement()
    return _gpu_local(topology, gpus)


def _one_node(topology: Topology, number: int | None) -> Placement:
    found = next((item for item in topology.cpu_nodes if item.number == number), None)
    if found is None:
        choices = ", ".join(str(item.number) for item in topology.cpu_nodes) or "none known"
        kind = "has no CPUs (a GPU's memory)" if number in topology.memory_only else "does not exist"
        raise UsageError(Problem("placement", f"node {number} {kind}", f"Nodes with CPUs: {choices}."))
    memory = str(found.number)
    return Placement(listed(found.cpus), memory, (), _proof((memory,)))


def _gpu_local(topology: Topology, gpus: Sequence[int]) -> Placement:
    homes = {gpu: topology.node_of(gpu) for gpu in gpus}
    lost = [gpu for gpu, home in homes.items() if home is None]
    if lost:
        raise UsageError(
            Problem(
                "placement",
                f"no node is known for GPU {listed(lost)}",
                "State it under host.numa of the platform, or place the service on all nodes.",
            )
        )
    cpus = {item.number: item.cpus for item in topology.cpu_nodes}
    ranks = tuple((listed(cpus[home]), str(home)) for home in homes.values() if home is not None)
    used = sorted({int(memory) for _, memory in ranks})
    every = listed(cpu for home in used for cpu in cpus[home])
    return Placement(every, listed(used), ranks, _proof(tuple(memory for _, memory in ranks)))


def _proof(nodes: Sequence[str]) -> str:
    """How an operator (and the status command) sees that it is so."""
    share = f"{LOCAL_SHARE:.0%}"
    if len(set(nodes)) == 1:
        return f"{share} of each process's pages in /proc/PID/numa_maps are on node {nodes[0]}"
    ranks = ", ".join(f"rank {rank} on node {node}" for rank, node in enumerate(nodes))
    return f"{share} of each rank's pages in /proc/PID/numa_maps are where it runs: {ranks}"


# --- saying it ---------------------------------------------------------------------------------------------


def engine_flags(engine: str, placement: Placement) -> dict[str, Any]:
    """The engine's own flags for binding each rank; {} when it has none or nothing is to be bound by rank.

    vLLM starts each worker under `numactl` (which must be installed) and only logs a warning when the kernel
    refuses the memory policy; SGLang binds by libnuma. So both are verified afterwards.
    """
    nodes = [int(memory) for _, memory in placement.per_rank]
    if not nodes:
        return {}
    if engine.startswith("vllm"):
        return {"--numa-bind": True, "--numa-bind-nodes": nodes}
    if engine.startswith("sglang"):
        return {"--numa-node": nodes}
    return {}


def systemd_settings(placement: Placement) -> dict[str, str]:
    """Unit settings that hold the whole service on its CPUs and memory nodes; {} for the whole machine.

    A memory policy, not a cpuset: children may narrow it (each rank to its own node), and a driver may still
    allocate a GPU's memory, which on some machines is a memory node too.
    """
    if placement.cpus is None or placement.memory_nodes is None:
        return {}
    settings = {"CPUAffinity": placement.cpus, "NUMAPolicy": "bind", "NUMAMask": placement.memory_nodes}
    return {
        key: value.replace(",", " ") if key == "CPUAffinity" else value for key, value in settings.items()
    }


def numactl(placement: Placement) -> tuple[str, ...]:
    """The same as words before a command, for a shell; () for the whole machine."""
    if placement.cpus is None or placement.memory_nodes is None:
        return ()
    return (
        "numactl",
        f"--physcpubind={placement.cpus}",
        f"--membind={placement.memory_nodes}",
    )


# --- proving it --------------------------------------------------------------------------------------------

_MAPPED = re.compile(r"\bN(\d+)=(\d+)")
_PAGE_SIZE = re.compile(r"\bkernelpagesize_kB=(\d+)")


def pages_by_node(numa_maps: str) -> dict[int, int]:
    """Bytes on each node, from the text of `/proc/PID/numa_maps`. Empty mappings and device memory count
    nothing."""
    sizes: dict[int, int] = {}
    for line in numa_maps.splitlines():
        page = _PAGE_SIZE.search(line)
        size = int(page[1]) * 1024 if page else PAGE
        for number, pages in _MAPPED.findall(line):
            sizes[int(number)] = sizes.get(int(number), 0) + int(pages) * size
    return sizes


def local_share(numa_maps: str, memory_nodes: str) -> float | None:
    """Share of a process's bytes that lie on `memory_nodes`; None when the process has no pages (it has
    ended)."""
    sizes = pages_by_node(numa_maps)
    total = sum(sizes.values())
    return sum(sizes.get(number, 0) for number in numbers(memory_nodes)) / total if total else None


def is_local(numa_maps: str, memory_nodes: str) -> bool:
    """Does the placement hold for a process: at least `LOCAL_SHARE` of its bytes on its nodes?"""
    share = local_share(numa_maps, memory_nodes)
    return share is not None and share >= LOCAL_SHARE
