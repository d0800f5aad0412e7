"""Writes the trees that recorded hardware shows itself in: NUMA nodes, the PCI bus, modules, /proc/driver.

`write(worn, kernel, root)` fills `root/sys/...` and `root/proc/...`. In a twin, `root` is a folder in memory
and each of `MOUNTS` is bound over the real thing; in a test, `root` is a temporary folder.
"""

from __future__ import annotations

import os
import shutil
import stat
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.lab.twin.node import state

MOUNTS = (
    "/sys/devices/system/node",
    "/sys/bus/pci",
    "/sys/module",
    "/proc/driver",
    "/proc/meminfo",
    "/proc/1/limits",
)
"""What is bound over the machine's own."""

GPU_CLASS, SWITCH_CLASS, BRIDGE_CLASS = 0x030200, 0x068000, 0x060400
MODULES = ("nvidia", "nvidia_uvm", "nvidia_modeset")
MIB_KB = 1024
GIB_KB = 1024 * 1024


LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max open files            1048576              1048576              files
Max locked memory         unlimited            unlimited            bytes
Max processes             unlimited            unlimited            processes
"""
"""/proc/1/limits of a machine; a container's first process has those of the engine that started it."""


def write(worn: dict[str, Any], kernel: dict[str, Any], root: Path) -> None:
    """Writes all trees; what an earlier call wrote is replaced, the top folders stay (they are bound)."""
    numa(worn.get("numa", []), root / "sys/devices/system/node")
    pci(worn, kernel, root / "sys/bus/pci")
    modules(worn, kernel, root / "sys/module")
    driver(worn, kernel, root / "proc/driver")
    text(root / "proc/meminfo", meminfo(worn))
    text(root / "proc/1/limits", LIMITS)


def text(path: Path, content: str) -> None:
    """One file, written in place: it may be bound."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if content.endswith("\n") or not content else content + "\n", encoding="utf-8")


def emptied(folder: Path) -> Path:
    """The folder without what was in it."""
    folder.mkdir(parents=True, exist_ok=True)
    for item in folder.iterdir():
        if item.is_dir() and not item.is_symlink():
            shutil.rmtree(item)
        else:
            item.unlink()
    return folder


def expanded(cpus: str) -> list[int]:
    """Numbers of "0-3,8"."""
    found: list[int] = []
    for part in filter(None, cpus.split(",")):
        low, _, high = part.partition("-")
        found += range(int(low), int(high or low) + 1)
    return found


def _mask(numbers: Iterable[int], count: int) -> str:
    value = sum(1 << number for number in numbers)
    words = [f"{(value >> (32 * word)) & 0xFFFFFFFF:08x}" for word in range(max(1, (count + 31) // 32))]
    return ",".join(reversed(words))


def numa(nodes: list[dict[str, Any]], folder: Path) -> None:
    """A /sys/devices/system/node tree; a node without CPUs is memory only, as a Hopper's own on Grace is."""
    if not nodes:
        return
    emptied(folder)
    last = nodes[-1]["node"]
    everything = f"0-{last}" if last else "0"
    for name in ("online", "possible", "has_memory", "has_normal_memory"):
        text(folder / name, everything)
    text(folder / "has_cpu", ",".join(str(node["node"]) for node in nodes if node["cpus"]))
    total = 1 + max((cpu for node in nodes for cpu in expanded(node["cpus"])), default=0)
    for node in nodes:
        here, number = folder / f"node{node['node']}", node["node"]
        cpus = expanded(node["cpus"])
        kib = int(node["memory_gib"] * GIB_KB)
        text(here / "cpulist", node["cpus"])
        text(here / "cpumap", _mask(cpus, total))
        text(here / "distance", node.get("distance") or _distances(node, nodes))
        rows = (("MemTotal", kib), ("MemFree", kib * 98 // 100), ("MemUsed", kib * 2 // 100))
        text(here / "meminfo", "".join(f"Node {number} {key}: {value:>14} kB\n" for key, value in rows))
        for kind in ("nr_hugepages", "free_hugepages", "surplus_hugepages"):
            text(here / f"hugepages/hugepages-2048kB/{kind}", "0")
        for cpu in cpus:
            (here / f"cpu{cpu}").symlink_to(f"../../cpu/cpu{cpu}")


def _distances(node: dict[str, Any], nodes: list[dict[str, Any]]) -> str:
    return " ".join("10" if other is node else "40" for other in nodes)


def meminfo(worn: dict[str, Any]) -> str:
    """/proc/meminfo of a machine that does nothing."""
    kib = int(worn.get("memory_gib", 1) * GIB_KB)
    rows = {
        "MemTotal": kib,
        "MemFree": kib * 95 // 100,
        "MemAvailable": kib * 97 // 100,
        "Buffers": 1024,
        "Cached": kib // 100,
        "SwapTotal": 0,
        "SwapFree": 0,
        "Shmem": 4096,
    }
    huge = "HugePages_Total:       0\nHugePages_Free:        0\nHugepagesize:       2048 kB\n"
    return "".join(f"{key + ':':<15}{value:>12} kB\n" for key, value in rows.items()) + huge


def pci(worn: dict[str, Any], kernel: dict[str, Any], folder: Path) -> None:
    """The bus: GPUs with the driver that holds them, and NVSwitches."""
    emptied(folder)
    for name in ("nvidia", "nouveau", "nvidia-nvswitch"):
        (folder / "drivers" / name).mkdir(parents=True)
    module = kernel.get("module")
    for gpu in state.on_bus(worn):
        holder = (
            "nouveau" if worn.get("nouveau") else "nvidia" if module and not gpu.get("fails_init") else ""
        )
        _device(folder, gpu["address"], gpu["pci_id"], GPU_CLASS, holder, gpu)
    for address in worn.get("switches", []):
        _device(folder, address, "10de:22a3", SWITCH_CLASS, "nvidia-nvswitch" if module else "", {})


def _device(folder: Path, address: str, pci_id: str, kind: int, holder: str, more: dict[str, Any]) -> None:
    here = folder / "devices" / address
    vendor, _, device = pci_id.partition(":")
    values = {
        "vendor": f"0x{vendor}",
        "device": f"0x{device}",
        "class": f"0x{kind:06x}",
        "revision": "0xa1",
        "subsystem_vendor": f"0x{vendor}",
        "subsystem_device": "0x0000",
        "irq": "0",
        "enable": "1",
        "numa_node": str(more.get("numa_node", -1)),
        "current_link_width": str(more.get("link_width", 16)),
        "max_link_width": "16",
        "current_link_speed": "32.0 GT/s PCIe",
        "max_link_speed": "32.0 GT/s PCIe",
        "resource": "0x0000000000000000 0x0000000000000000 0x0000000000000000\n" * 13,
    }
    for name, value in values.items():
        text(here / name, value)
    config = struct.pack("<HHHHBBBB", int(vendor, 16), int(device, 16), 0, 0, 0xA1, 0, *_class(kind))
    (here / "config").write_bytes(config.ljust(64, b"\0"))
    if holder:
        (here / "driver").symlink_to(f"../../drivers/{holder}")


def _class(kind: int) -> tuple[int, int]:
    return (kind >> 8) & 0xFF, (kind >> 16) & 0xFF


def modules(worn: dict[str, Any], kernel: dict[str, Any], folder: Path) -> None:
    """/sys/module: the machine's own (`.machine` leads to them where it is bound), and the pretended ones."""
    own = folder.parent.parent / "machine-modules"
    emptied(folder)
    if own.is_dir():
        for item in own.iterdir():
            (folder / item.name).symlink_to(item)
    if worn.get("nouveau"):
        text(folder / "nouveau/refcnt", "1")
    module = kernel.get("module")
    if module:
        for name in MODULES:
            text(folder / name / "version", module["version"])
            text(folder / name / "refcnt", "0")
            text(folder / name / "initstate", "live")


def driver(worn: dict[str, Any], kernel: dict[str, Any], folder: Path) -> None:
    """/proc/driver/nvidia, there only while the module is loaded."""
    emptied(folder)
    module = kernel.get("module")
    if not module:
        return
    arch = worn.get("arch", "x86_64")
    flavour = f"Open Kernel Module for {arch}" if module["open"] else f"{arch} Kernel Module"
    text(
        folder / "nvidia/version",
        f"NVRM version: NVIDIA UNIX {flavour}  {module['version']}  Release Build  (stand-in of a twin)\n"
        "GCC version:  gcc version 12.2.0 (stand-in of a twin)\n",
    )
    text(folder / "nvidia/params", "ModifyDeviceFiles: 1\nDeviceFileUID: 0\nDeviceFileGID: 0\n")
    for number, gpu in enumerate(state.usable(worn)):
        text(
            folder / f"nvidia/gpus/{gpu['address']}/information",
            f"Model: \t\t {gpu['name']}\nGPU UUID: \t {gpu['uuid']}\nBus Type: \t PCIe\n"
            f"Bus Location: \t {gpu['address']}\nDevice Minor: \t {number}\nGPU Excluded:\t No\n",
        )


def device_nodes(worn: dict[str, Any], kernel: dict[str, Any], root: Path) -> None:
    """/dev/nvidia*: character devices where the twin may make them, plain files in a test."""
    folder = root / "dev"
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("nvidia*"):
        if not path.is_dir():
            path.unlink()
    if not kernel.get("module"):
        return
    nodes = {f"nvidia{number}": (195, number) for number in range(len(state.usable(worn)))}
    nodes |= {"nvidiactl": (195, 255)}
    nodes |= {} if worn.get("no_uvm") else {"nvidia-uvm": (238, 0), "nvidia-uvm-tools": (238, 1)}
    mode = int(worn.get("device_mode", "0666"), 8)
    for name, (major, minor) in nodes.items():
        path = folder / name
        if root == Path("/"):
            os.mknod(path, stat.S_IFCHR | mode, os.makedev(major, minor))
        else:
            path.touch()
        path.chmod(mode)
