"""Processes are put where their GPUs are, never on a GPU's own memory, and it can be proven."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bringup import placement
from bringup.errors import UsageError
from bringup.planned import Placement
from bringup.yamlfile import read_yaml

FACTS = Path(__file__).parents[1] / "facts"
CASES = sorted(FACTS.glob("*/topology/*.yml"))
IDS = [f"{path.parents[1].name}/{path.stem}" for path in CASES]


def topology(case: dict[str, Any]) -> placement.Topology:
    return placement.parse_topology(case["sys"], case["topo_m"])


@pytest.mark.parametrize("path", CASES, ids=IDS)
def test_a_recorded_machine_is_understood(path: Path) -> None:
    case = read_yaml(path)
    machine, expect = topology(case), case["expect"]
    assert [node.number for node in machine.cpu_nodes] == expect["cpu_nodes"]
    assert list(machine.memory_only) == expect["memory_only"]
    by_index = {gpu.index: gpu for gpu in machine.gpus}
    for index, node in expect["gpu_nodes"].items():
        assert machine.node_of(index) == node
    for index, node in expect["memory_node"].items():
        assert by_index[index].memory_node == node
    for index, ways in expect.get("ways", {}).items():
        assert {peer: by_index[index].ways[peer] for peer in ways} == ways


@pytest.mark.parametrize("path", CASES, ids=IDS)
def test_each_wish_becomes_the_right_lists(path: Path) -> None:
    case = read_yaml(path)
    machine = topology(case)
    for wish in case["expect"]["placements"]:
        got = placement.place_on(machine, wish["gpus"], wish["wants"], wish.get("node"))
        assert (got.cpus, got.memory_nodes) == (wish["cpus"], wish["memory_nodes"])
        assert [list(rank) for rank in got.per_rank] == wish["per_rank"]
        assert bool(got.proof) == (wish["cpus"] is not None)
    for wish in case["expect"].get("refused", []):
        with pytest.raises(UsageError, match=wish["says"]):
            placement.place_on(machine, wish["gpus"], wish["wants"], wish.get("node"))


@pytest.mark.parametrize("path", CASES, ids=IDS)
def test_no_placement_ever_names_a_node_without_cpus(path: Path) -> None:
    machine = topology(read_yaml(path))
    for gpus in ([gpu.index for gpu in machine.gpus], *([gpu.index] for gpu in machine.gpus)):
        got = placement.place_on(machine, gpus, "gpu-local")
        named = {int(node) for _, node in got.per_rank} | set(placement.numbers(got.memory_nodes or ""))
        assert not named & set(machine.memory_only)


def test_a_tree_on_disk_reads_like_its_record(tmp_path: Path) -> None:
    case = read_yaml(FACTS / "gh200-2x" / "topology" / "composed.yml")
    for name, text in case["sys"].items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text + "\n")
    (tmp_path / "online").write_text("0-17\n")
    assert placement.parse_topology(tmp_path, case["topo_m"]) == topology(case)
    absolute = {f"{placement.SYS_NODES}/{name}": text for name, text in case["sys"].items()}
    assert placement.parse_topology(absolute, case["topo_m"]) == topology(case)


def test_every_damaged_part_of_a_record_is_named() -> None:
    header = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\n"
    with pytest.raises(UsageError) as caught:
        placement.parse_topology(
            {"node0/cpulist": "0-3", "node1/cpulist": "seven"},
            header + "GPU0\t X \tSYS\t0-3\t0\nGPU1\tSYS\t X",
        )
    assert len(caught.value.problems) == 2
    with pytest.raises(UsageError, match="holds no node"):
        placement.parse_topology({}, None)
    with pytest.raises(UsageError, match="has no table of GPUs"):
        placement.parse_topology({"node0/cpulist": "0"}, "Failed to initialize NVML")


@pytest.mark.parametrize("text", ["3-1", "a", "1-", "0-999999999", "1,,x"])
def test_a_list_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        placement.numbers(text)


@pytest.mark.parametrize("text", ["", "0", "0-71", "0-3,8", "0-55,112-167"])
def test_lists_come_back_as_they_were(text: str) -> None:
    assert placement.listed(placement.numbers(text)) == text


RANKS = Placement("0-143", "0-1", (("0-71", "0"), ("72-143", "1")))


@pytest.mark.parametrize(
    ("engine", "flags"),
    [
        ("vllm-0.33.0", {"--numa-bind": True, "--numa-bind-nodes": [0, 1]}),
        ("sglang-0.5.23", {"--numa-node": [0, 1]}),
        ("llama-server-1", {}),
    ],
)
def test_engines_that_bind_ranks_are_told_in_their_own_flags(engine: str, flags: dict[str, Any]) -> None:
    assert placement.engine_flags(engine, RANKS) == flags
    assert placement.engine_flags(engine, Placement("0-71", "0")) == {}


def test_a_service_is_held_by_systemd_or_by_numactl() -> None:
    spread = Placement("0-3,8-11", "0,2")
    assert placement.systemd_settings(spread) == {
        "CPUAffinity": "0-3 8-11",
        "NUMAPolicy": "bind",
        "NUMAMask": "0,2",
    }
    assert placement.numactl(spread) == ("numactl", "--physcpubind=0-3,8-11", "--membind=0,2")
    assert placement.systemd_settings(Placement()) == {}
    assert placement.numactl(Placement()) == ()


MAPS = """\
aaaac0000000 bind:0 file=/usr/bin/python3.12 mapped=700 N0=700 kernelpagesize_kB=4
fffe00000000 bind:0 anon=3000 dirty=3000 N0=2990 N1=10 kernelpagesize_kB=2048
fffef0000000 bind:0 stack anon=8 dirty=8 N0=8 kernelpagesize_kB=64
ffff00000000 default file=/dev/nvidia0
"""


def test_pages_are_weighed_by_their_size() -> None:
    sizes = placement.pages_by_node(MAPS)
    assert sizes == {0: 700 * 4096 + 2990 * 2**21 + 8 * 65536, 1: 10 * 2**21}
    assert placement.is_local(MAPS, "0")
    assert not placement.is_local(MAPS, "1")
    assert placement.local_share(MAPS, "0-1") == 1.0


def test_a_process_without_pages_proves_nothing() -> None:
    assert placement.local_share("", "0") is None
    assert not placement.is_local("", "0")
