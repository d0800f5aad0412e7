"""A stand-in for nvidia-smi: the forms that bringup and its roles ask for, answered from the twin's hardware.

Every answer is a view of one XML document, the one that `-q -x` prints, so that no two forms contradict each
other. What the document does not hold is answered as the real tool does: `[N/A]`.
"""

from __future__ import annotations

import copy
import functools
import os
import re
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.lab.twin.node import state

CUDA_OF_BRANCH = {
    "550": "12.4",
    "560": "12.6",
    "565": "12.7",
    "570": "12.8",
    "575": "12.9",
    "580": "13.0",
    "590": "13.1",
}
HANG_S = 3600
NVLINK_GBPS = "26.562 GB/s"

OK, INVALID, NO_DRIVER, MISMATCH, LOST, NO_PERMISSION, NO_DEVICES = 0, 2, 9, 18, 15, 4, 6

FIELDS: dict[str, tuple[str, str, str]] = {
    "name": ("name", "product_name", ""),
    "gpu_name": ("gpu_name", "product_name", ""),
    "uuid": ("uuid", "uuid", ""),
    "gpu_uuid": ("gpu_uuid", "uuid", ""),
    "serial": ("serial", "serial", ""),
    "vbios_version": ("vbios_version", "vbios_version", ""),
    "pci.bus_id": ("pci.bus_id", "pci/pci_bus_id", ""),
    "gpu_bus_id": ("gpu_bus_id", "pci/pci_bus_id", ""),
    "pci.device_id": ("pci.device_id", "pci/pci_device_id", ""),
    "memory.total": ("memory.total [MiB]", "fb_memory_usage/total", " MiB"),
    "memory.used": ("memory.used [MiB]", "fb_memory_usage/used", " MiB"),
    "memory.free": ("memory.free [MiB]", "fb_memory_usage/free", " MiB"),
    "memory.reserved": ("memory.reserved [MiB]", "fb_memory_usage/reserved", " MiB"),
    "persistence_mode": ("persistence_mode", "persistence_mode", ""),
    "compute_mode": ("compute_mode", "compute_mode", ""),
    "mig.mode.current": ("mig.mode.current", "mig_mode/current_mig", ""),
    "mig.mode.pending": ("mig.mode.pending", "mig_mode/pending_mig", ""),
    "ecc.mode.current": ("ecc.mode.current", "ecc_mode/current_ecc", ""),
    "ecc.mode.pending": ("ecc.mode.pending", "ecc_mode/pending_ecc", ""),
    "ecc.errors.uncorrected.volatile.total": (
        "ecc.errors.uncorrected.volatile.total",
        "ecc_errors/volatile/dram_uncorrectable",
        "",
    ),
    "ecc.errors.corrected.volatile.total": (
        "ecc.errors.corrected.volatile.total",
        "ecc_errors/volatile/dram_correctable",
        "",
    ),
    "remapped_rows.pending": ("remapped_rows.pending", "remapped_rows/remapped_row_pending", ""),
    "remapped_rows.failure": ("remapped_rows.failure", "remapped_rows/remapped_row_failure", ""),
    "clocks.sm": ("clocks.current.sm [MHz]", "clocks/sm_clock", " MHz"),
    "clocks.current.sm": ("clocks.current.sm [MHz]", "clocks/sm_clock", " MHz"),
    "clocks.mem": ("clocks.current.memory [MHz]", "clocks/mem_clock", " MHz"),
    "clocks.max.sm": ("clocks.max.sm [MHz]", "max_clocks/sm_clock", " MHz"),
    "clocks.max.graphics": ("clocks.max.graphics [MHz]", "max_clocks/graphics_clock", " MHz"),
    "power.draw": ("power.draw [W]", "gpu_power_readings/instant_power_draw", " W"),
    "power.limit": ("power.limit [W]", "gpu_power_readings/current_power_limit", " W"),
    "enforced.power.limit": ("enforced.power.limit [W]", "gpu_power_readings/current_power_limit", " W"),
    "power.default_limit": ("power.default_limit [W]", "gpu_power_readings/default_power_limit", " W"),
    "power.min_limit": ("power.min_limit [W]", "gpu_power_readings/min_power_limit", " W"),
    "power.max_limit": ("power.max_limit [W]", "gpu_power_readings/max_power_limit", " W"),
    "temperature.gpu": ("temperature.gpu", "temperature/gpu_temp", " C"),
    "temperature.memory": ("temperature.memory", "temperature/memory_temp", " C"),
    "utilization.gpu": ("utilization.gpu [%]", "utilization/gpu_util", " %"),
    "utilization.memory": ("utilization.memory [%]", "utilization/memory_util", " %"),
    "pstate": ("pstate", "performance_state", ""),
    "fabric.state": ("fabric.state", "fabric/state", ""),
    "fabric.status": ("fabric.status", "fabric/status", ""),
    "gpu_recovery_action": ("gpu_recovery_action", "gpu_recovery_action", ""),
    "addressing_mode": ("addressing_mode", "addressing_mode", ""),
}
"""Field of --query-gpu -> its column's title, where the document holds it, its unit."""


class Refused(Exception):
    """The tool ends here: what it prints and its exit code."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


# --- the document -------------------------------------------------------------------------------------------


def driver() -> dict[str, Any]:
    """The module that answers. Raises Refused as NVML does when there is none, or one of another version."""
    worn = state.hardware()
    if worn.get("smi_hangs"):
        time.sleep(HANG_S)
    module = state.loaded()
    if module is None:
        raise Refused(state.NO_DRIVER + "\n", NO_DRIVER)
    library = worn.get("library_version") or state.library_version()
    if library and library != module["version"]:
        short = ".".join(library.split(".")[:2])
        raise Refused(
            f"Failed to initialize NVML: Driver/library version mismatch\nNVML library version: {short}\n",
            MISMATCH,
        )
    if not state.usable(worn):
        raise Refused("No devices were found\n", NO_DEVICES)
    return module


def document(module: dict[str, Any]) -> ET.Element:
    """The whole report. Raises Refused when a GPU is lost, as the real tool gives up there."""
    worn, kernel = state.hardware(), state.kernel()
    gpus = state.usable(worn)
    for gpu in gpus:
        if gpu.get("lost"):
            raise Refused(
                f"Unable to determine the device handle for GPU{short(gpu['address'])}: GPU is lost.  "
                "Reboot the system to recover this GPU\n",
                LOST,
            )
    top = ET.Element("nvidia_smi_log")
    top.append(ET.Comment(" stand-in of a bringup twin: no GPU is here "))
    put(top, "timestamp", time.strftime("%a %b %d %H:%M:%S %Y"))
    put(top, "driver_version", module["version"])
    put(top, "cuda_version", cuda_of(module["version"]))
    put(top, "attached_gpus", str(len(gpus)))
    held = processes()
    for number, gpu in enumerate(gpus):
        top.append(
            one_gpu(number, gpu, module, kernel["settings"].get(str(number), {}), held.get(number, []))
        )
    ET.indent(top, "\t")
    return top


def cuda_of(version: str) -> str:
    """The newest CUDA that a driver branch supports."""
    return CUDA_OF_BRANCH.get(version.partition(".")[0], "12.0")


def short(address: str) -> str:
    """An address as messages have it: upper case."""
    return address.upper()


def long(address: str) -> str:
    """An address as the report has it: eight digits of domain."""
    domain, _, rest = address.partition(":")
    return f"{domain:0>8}:{rest}".upper().replace("X", "x")


def put(node: ET.Element, path: str, text: str) -> None:
    """Sets the text at a path, making what is missing."""
    for part in path.split("/"):
        found = node.find(part)
        node = found if found is not None else ET.SubElement(node, part)
    node.text = text


@functools.cache
def recorded_gpu() -> ET.Element:
    """The shape of a GPU's part in the report."""
    return ET.parse(Path(__file__).with_name("gpu.xml")).getroot()


def one_gpu(
    number: int,
    gpu: dict[str, Any],
    module: dict[str, Any],
    settings: dict[str, Any],
    held: list[tuple[int, str, int]],
) -> ET.Element:
    """One GPU: a recorded one, with this one's values."""
    node = copy.deepcopy(recorded_gpu())
    node.set("id", long(gpu["address"]))
    vendor, _, device = gpu["pci_id"].partition(":")
    used = gpu.get("memory_used_mib", 0) + sum(mib for _, _, mib in held)
    domain, bus, slot = re.split("[:.]", gpu["address"])[:3]
    persistence = settings.get("persistence", "Enabled" if persistenced() else "Disabled")
    power = f"{settings.get('power_limit_w', gpu.get('power_limit_w', 700)):.2f} W"
    usual = gpu.get("power_default_w", gpu.get("power_limit_w", 700))
    clock = settings.get("sm_clock_mhz") or gpu.get("idle_sm_mhz", 345)
    values: dict[str, Any] = {
        "product_name": gpu["name"],
        "addressing_mode": gpu.get("addressing_mode", "None"),
        "persistence_mode": gpu.get("persistence") or persistence,
        "mig_mode/current_mig": settings.get("mig", gpu.get("mig", "Disabled")),
        "mig_mode/pending_mig": settings.get("mig", gpu.get("mig", "Disabled")),
        "serial": gpu.get("serial", "stand-in"),
        "uuid": gpu["uuid"],
        "pdi": "0x0",
        "minor_number": number,
        "vbios_version": gpu.get("vbios", "96.00.A5.00.1A"),
        "gsp_firmware_version": module["version"],
        "gpu_recovery_action": gpu.get("recovery", "None"),
        "gpu_virtualization_mode/virtualization_mode": gpu.get("virtualization", "None"),
        "c2c_mode": gpu.get("c2c_mode", "Disabled"),
        "pci/pci_domain": domain.upper(),
        "pci/pci_bus": bus.upper(),
        "pci/pci_device": slot.upper(),
        "pci/pci_device_id": f"{device}{vendor}".upper(),
        "pci/pci_bus_id": long(gpu["address"]),
        "pci/pci_gpu_link_info/link_widths/current_link_width": f"{gpu.get('link_width', 16)}x",
        "fb_memory_usage/total": f"{gpu['memory_mib']} MiB",
        "fb_memory_usage/used": f"{used} MiB",
        "fb_memory_usage/free": f"{gpu['memory_mib'] - used - 616} MiB",
        "compute_mode": settings.get("compute_mode", gpu.get("compute_mode", "Default")),
        "ecc_mode/current_ecc": gpu.get("ecc", "Enabled"),
        "ecc_mode/pending_ecc": settings.get(
            "ecc_pending", gpu.get("ecc_pending", gpu.get("ecc", "Enabled"))
        ),
        "ecc_errors/volatile/dram_uncorrectable": gpu.get("ecc_uncorrected", 0),
        "ecc_errors/aggregate/dram_uncorrectable": gpu.get("ecc_uncorrected", 0),
        "remapped_rows/remapped_row_pending": gpu.get("remap_pending", "No"),
        "remapped_rows/remapped_row_failure": gpu.get("remap_failed", "No"),
        "temperature/gpu_temp": f"{gpu.get('temperature_c', 34)} C",
        "gpu_power_readings/current_power_limit": power,
        "gpu_power_readings/requested_power_limit": power,
        "gpu_power_readings/default_power_limit": f"{usual:.2f} W",
        "gpu_power_readings/max_power_limit": f"{usual:.2f} W",
        "applications_clocks/graphics_clock": f"{gpu.get('clocks_mhz', gpu.get('max_sm_mhz', 1980))} MHz",
        "default_applications_clocks/graphics_clock": f"{gpu.get('max_sm_mhz', 1980)} MHz",
        "clocks/graphics_clock": f"{clock} MHz",
        "clocks/sm_clock": f"{clock} MHz",
        "max_clocks/graphics_clock": f"{gpu.get('max_sm_mhz', 1980)} MHz",
        "max_clocks/sm_clock": f"{gpu.get('max_sm_mhz', 1980)} MHz",
    }
    for path, value in values.items():
        put(node, path, str(value))
    for reason in gpu.get("slowed", ()):
        put(node, f"clocks_event_reasons/clocks_event_reason_{reason}", "Active")
    name, status = fabric(gpu)
    put(node, "fabric/state", name)
    put(node, "fabric/status", status)
    _put_processes(node, held)
    return node


def _put_processes(node: ET.Element, held: list[tuple[int, str, int]]) -> None:
    rows = node.find("processes")
    if rows is None:
        rows = ET.SubElement(node, "processes")
    for pid, name, mib in held:
        row = ET.SubElement(rows, "process_info")
        for tag, value in (
            ("pid", pid),
            ("type", "C"),
            ("process_name", name),
            ("used_memory", f"{mib} MiB"),
        ):
            put(row, tag, str(value))


def fabric(gpu: dict[str, Any]) -> tuple[str, str]:
    """State and status of the NVLink fabric: completed once the fabric manager has run since the boot."""
    worn = state.hardware()
    if gpu.get("fabric_state"):
        return str(gpu["fabric_state"]), str(gpu.get("fabric_status", "N/A"))
    if not worn.get("switches"):
        return "N/A", "N/A"
    if state.at("/run/twin/fabric").exists():
        return "Completed", str(gpu.get("fabric_status", "Success"))
    return "In Progress", "N/A"


def persistenced() -> bool:
    """Whether the persistence daemon's stand-in runs."""
    return state.at("/run/twin/persistenced").exists()


def processes() -> dict[int, list[tuple[int, str, int]]]:
    """Processes that hold GPU memory, by GPU: recorded ones, and engines' stand-ins, whose titles say so."""
    found: dict[int, list[tuple[int, str, int]]] = {}
    for number, gpu in enumerate(state.usable(state.hardware())):
        for row in gpu.get("processes", []):
            found.setdefault(number, []).append((row["pid"], row["name"], row["memory_mib"]))
    for folder in Path("/proc").glob("[0-9]*") if state.root() == Path("/") else ():
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        # Before the title of an emulated process stand the emulator and the program's path.
        title = next((word for word in words[:3] if "[stand-in] gpus=" in word), "")
        match = re.search(r"\[stand-in\] gpus=([\d,]+) mib=(\d+)", title)
        for number in map(int, match[1].split(",")) if match else ():
            name = title.partition(" [")[0]
            found.setdefault(number, []).append((int(folder.name), name, int(match[2]) if match else 0))
    return found


# --- forms --------------------------------------------------------------------------------------------------


def chosen(top: ET.Element, wanted: str | None) -> list[tuple[int, ET.Element]]:
    """GPUs picked by `-i` (numbers, UUIDs or addresses). Raises Refused for one that is not there."""
    gpus = list(enumerate(top.findall("gpu")))
    if not wanted:
        return gpus
    found = []
    for word in wanted.split(","):
        hits = [
            (number, gpu)
            for number, gpu in gpus
            if word in (str(number), gpu.findtext("uuid")) or (gpu.get("id") or "").endswith(word.upper())
        ]
        if not hits:
            raise Refused("No devices were found\n", NO_DEVICES)
        found += hits
    return found


def query(top: ET.Element, fields: str, form: str, wanted: str | None) -> str:
    """`--query-gpu=FIELDS --format=csv[,noheader][,nounits]`. Raises Refused for an unknown field."""
    names = [name.strip() for name in fields.split(",")]
    forms = form.split(",")
    module = state.loaded() or {"version": "", "open": True}
    rows, titles = [], []
    for name in names:
        if name not in FIELDS and name not in (
            "index",
            "count",
            "driver_version",
            "timestamp",
            "compute_cap",
        ):
            raise Refused(f'Field "{name}" is not a valid field to query.\n\n', INVALID)
        titles.append(FIELDS[name][0] if name in FIELDS else name)
    worn = state.usable(state.hardware())
    for number, gpu in chosen(top, wanted):
        special = {
            "index": str(number),
            "count": str(len(worn)),
            "driver_version": module["version"],
            "timestamp": time.strftime("%Y/%m/%d %H:%M:%S.000"),
            "compute_cap": worn[number].get("sm", "9.0"),
        }
        cells = [special.get(name) or _cell(gpu, name, "nounits" in forms) for name in names]
        rows.append(", ".join(cells))
    head = [] if "noheader" in forms else [", ".join(titles)]
    return "\n".join([*head, *rows]) + "\n"


def _cell(gpu: ET.Element, name: str, bare: bool) -> str:
    _, path, unit = FIELDS[name]
    value = gpu.findtext(path) or "N/A"
    if value == "N/A":
        return "[N/A]"
    if name == "pci.device_id":
        return f"0x{value}"
    return value.removesuffix(unit) if unit and (bare or unit == " C") else value


def query_apps(top: ET.Element, fields: str, form: str) -> str:
    """`--query-compute-apps=FIELDS`."""
    names = [name.strip() for name in fields.split(",")]
    rows = [] if "noheader" in form.split(",") else [", ".join(names)]
    for gpu in top.findall("gpu"):
        for row in gpu.findall("processes/process_info"):
            memory = row.findtext("used_memory") or ""
            cells = {
                "gpu_uuid": gpu.findtext("uuid"),
                "gpu_bus_id": gpu.findtext("pci/pci_bus_id"),
                "gpu_name": gpu.findtext("product_name"),
                "pid": row.findtext("pid"),
                "process_name": row.findtext("process_name"),
                "name": row.findtext("process_name"),
                "used_memory": memory.removesuffix(" MiB") if "nounits" in form else memory,
                "used_gpu_memory": memory.removesuffix(" MiB") if "nounits" in form else memory,
            }
            unknown = [name for name in names if name not in cells]
            if unknown:
                raise Refused(f'Field "{unknown[0]}" is not a valid field to query.\n\n', INVALID)
            rows.append(", ".join(cells[name] or "[N/A]" for name in names))
    return "".join(f"{row}\n" for row in rows)


def listing() -> str:
    """`-L`: a lost GPU is named with what is wrong, the others as they are."""
    lines = []
    for number, gpu in enumerate(state.usable(state.hardware())):
        if gpu.get("lost"):
            lines.append(
                f"Unable to determine the device handle for gpu {long(gpu['address'])}: GPU is lost."
            )
        else:
            lines.append(f"GPU {number}: {gpu['name']} (UUID: {gpu['uuid']})")
    return "".join(f"{line}\n" for line in lines)


def nvlink() -> str:
    """`nvlink -s`: each link of each GPU with its speed, or inactive."""
    lines = []
    for number, gpu in enumerate(state.usable(state.hardware())):
        count = gpu.get("nvlinks", 0)
        if not count:
            continue
        lines.append(f"GPU {number}: {gpu['name']} (UUID: {gpu['uuid']})")
        if gpu.get("nvlinks_down") == "all":
            lines.append("NVML: Unable to retrieve NVLink information as all links are inActive")
            continue
        down = gpu.get("nvlinks_down") or []
        lines += [f"\t Link {link}: {'<inactive>' if link in down else NVLINK_GBPS}" for link in range(count)]
    return "".join(f"{line}\n" for line in lines)


def topology() -> str:
    """`topo -m`: recorded, or composed from the NUMA nodes."""
    worn = state.hardware()
    if worn.get("topology"):
        return str(worn["topology"])
    gpus = state.usable(worn)
    nodes = {node["node"]: node for node in worn.get("numa", [])}
    head = "\t".join(
        ["", *(f"GPU{number}" for number in range(len(gpus))), "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"]
    )
    lines = [head]
    for number, gpu in enumerate(gpus):
        near = gpu.get("numa_node", 0)
        cells = [" X " if other == number else _way(gpu, gpus[other]) for other in range(len(gpus))]
        memory = gpu.get("memory_node")
        cpus = nodes.get(near, {}).get("cpus", "N/A")
        own = "N/A" if memory is None else str(memory)
        lines.append("\t".join([f"GPU{number}", *cells, cpus, f"{near}\t", own]))
    legend = "\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe as well as the SMP interconnect between "
    legend += "NUMA nodes (e.g., QPI/UPI)\n"
    legend += "  NODE = Connection traversing PCIe as well as the interconnect between PCIe "
    legend += "Host Bridges within a NUMA node\n  NV#  = Connection traversing a bonded set of # NVLinks\n"
    return "\n".join(lines) + "\n" + legend


def _way(gpu: dict[str, Any], other: dict[str, Any]) -> str:
    if gpu.get("peers_by_nvlink") and other.get("peers_by_nvlink"):
        return f"NV{gpu.get('nvlinks', 0)}"
    return "NODE" if gpu.get("numa_node") == other.get("numa_node") else "SYS"


def as_text(top: ET.Element, sections: str | None) -> str:
    """`-q`: the document as indented text (titles are made from the tags)."""
    lines = ["", "==============NVSMI LOG============== (stand-in of a bringup twin)", ""]
    for node in top:
        if node.tag == "gpu":
            lines.append(f"GPU {node.get('id')}")
            lines += [line for child in node for line in _lines(child, 1)]
        elif isinstance(node.tag, str):
            lines.append(f"{_label(node.tag):<42}: {node.text or ''}")
    return "\n".join(lines) + "\n"


def _lines(node: ET.Element, depth: int) -> list[str]:
    indent = "    " * depth
    if len(node) == 0:
        return [f"{indent}{_label(node.tag):<{42 - len(indent)}}: {(node.text or 'N/A').strip()}"]
    return [f"{indent}{_label(node.tag)}", *(line for child in node for line in _lines(child, depth + 1))]


def _label(tag: str) -> str:
    known = {
        "fb_memory_usage": "FB Memory Usage",
        "mig_mode": "MIG Mode",
        "ecc_mode": "ECC Mode",
        "pci": "PCI",
    }
    return known.get(tag, " ".join(word.capitalize() for word in tag.split("_")))


def summary(top: ET.Element) -> str:
    """No option at all: one line a GPU, labelled."""
    version, cuda = top.findtext("driver_version"), top.findtext("cuda_version")
    lines = [
        f"| NVIDIA-SMI {version} (stand-in of a bringup twin)  Driver Version: {version}  CUDA Version: {cuda} |"
    ]
    for number, gpu in enumerate(top.findall("gpu")):
        used, total = gpu.findtext("fb_memory_usage/used"), gpu.findtext("fb_memory_usage/total")
        lines.append(f"| {number:3}  {gpu.findtext('product_name'):<28} {gpu.get('id')}  {used} / {total} |")
    return "\n".join(lines) + "\n"


# --- settings -----------------------------------------------------------------------------------------------


def change(wanted: str | None, what: str, values: dict[str, Any], told: str) -> str:
    """Keeps a setting of the chosen GPUs until the next boot. Raises Refused for who is not root."""
    if os.geteuid() != 0 and state.root() == Path("/"):
        raise Refused(f"Unable to set {what}: Insufficient Permissions\n", NO_PERMISSION)
    top = document(driver())
    kernel = state.kernel()
    lines = []
    for number, gpu in chosen(top, wanted):
        kernel["settings"].setdefault(str(number), {}).update(values)
        lines.append(f"{told} for GPU {gpu.get('id')}.")
    state.save_kernel(kernel)
    return "\n".join([*lines, "All done.", ""])


CLIENTS = ("twin-nv-fabricm", "twin-nvidia-per")
"""Daemons that have every GPU open, as the kernel cuts their names."""


def reset(top: ET.Element) -> str:
    """`--gpu-reset` of all GPUs: what only a reset clears is gone, and so is the fabric, until its manager starts.
    Raises Refused while anybody has a GPU open, the fabric manager among them, as the real tool does.
    """
    count = len(processes())
    for folder in Path("/proc").glob("[0-9]*") if state.root() == Path("/") else ():
        try:
            count += (folder / "comm").read_text().strip() in CLIENTS
        except OSError:
            continue
    if count:
        names = "".join(f"  GPU {gpu.get('id')}: In use by another client\n" for gpu in top.findall("gpu"))
        raise Refused(
            f"The following GPUs could not be reset:\n{names}\n{count} devices are currently being used by one or "
            "more other processes (e.g., Fabric Manager, CUDA application, graphics application such as an X server, "
            "or a monitoring application such as another instance of nvidia-smi).\n",
            INVALID,
        )
    worn, kernel = state.hardware(), state.kernel()
    for gpu in state.usable(worn):
        for name in ("remap_pending", "recovery"):
            gpu.pop(name, None)
    state.write_json(state.at("/var/lib/twin/hardware.json"), worn)
    state.save_kernel({**kernel, "settings": {}})
    state.at("/run/twin/fabric").unlink(missing_ok=True)
    return (
        "".join(f"GPU {gpu.get('id')} was successfully reset.\n" for gpu in top.findall("gpu"))
        + "All done.\n"
    )


MODES = {"0": "Disabled", "1": "Enabled", "DISABLED": "Disabled", "ENABLED": "Enabled"}
COMPUTE = {"0": "Default", "DEFAULT": "Default", "2": "Prohibited", "PROHIBITED": "Prohibited"}
COMPUTE |= {"3": "Exclusive_Process", "EXCLUSIVE_PROCESS": "Exclusive_Process"}


def settings(options: dict[str, str]) -> str | None:
    """The text of a changing form (-pm, -pl, -lgc, -rgc, -mig, -c, -e), None when none is asked for."""
    wanted = options.get("-i")
    if "-pm" in options:
        value = MODES[options["-pm"].upper()]
        return change(wanted, "persistence mode", {"persistence": value}, f"{value} persistence mode")
    if "-pl" in options:
        watts = float(options["-pl"])
        most = max(gpu.get("power_limit_w", 700) for gpu in state.usable(state.hardware()))
        if not 100 <= watts <= most:
            text = f"Provided power limit {watts:.2f} W is not a valid power limit which should be between "
            raise Refused(
                f"{text}200.00 W and {most:.2f} W\nTerminating early due to previous errors.\n", INVALID
            )
        return change(
            wanted, "power limit", {"power_limit_w": watts}, f"Power limit was set to {watts:.2f} W"
        )
    if "-lgc" in options:
        clock = int(options["-lgc"].split(",")[-1])
        told = f'GPU clocks set to "(gpuClkMin {options["-lgc"].split(",")[0]}, gpuClkMax {clock})"'
        return change(wanted, "locked GPU clocks", {"sm_clock_mhz": clock}, told)
    if "-rgc" in options:
        return change(wanted, "locked GPU clocks", {"sm_clock_mhz": 0}, "All done, clocks reset")
    if "-mig" in options:
        value = MODES[options["-mig"]]
        return change(wanted, "MIG mode", {"mig": value}, f"{value} MIG Mode")
    if "-c" in options:
        value = COMPUTE[options["-c"].upper()]
        return change(wanted, "compute mode", {"compute_mode": value}, f"Set compute mode to {value}")
    if "-e" in options:
        value = MODES[options["-e"]]
        return change(wanted, "ECC mode", {"ecc_pending": value}, f"{value} ECC support")
    return None


TAKES_VALUE = {
    "-i",
    "-pm",
    "-pl",
    "-lgc",
    "-mig",
    "-c",
    "-e",
    "-d",
    "--id",
    "--display",
    "--format",
    "--query-gpu",
}
TAKES_VALUE |= {"--query-compute-apps", "--persistence-mode", "--power-limit", "--lock-gpu-clocks"}
SHORT = {
    "--id": "-i",
    "--persistence-mode": "-pm",
    "--power-limit": "-pl",
    "--lock-gpu-clocks": "-lgc",
    "--query": "-q",
}
SHORT |= {
    "--list-gpus": "-L",
    "--xml-format": "-x",
    "--display": "-d",
    "--reset-gpu-clocks": "-rgc",
    "--gpu-reset": "-r",
}
FLAGS = {"-q", "-x", "-L", "-m", "-s", "-rgc", "-r", "-h", "--help", "--version", "topo", "nvlink"}


def options_of(words: Sequence[str]) -> dict[str, str]:
    """Options with their values ("" for none). Raises Refused for what the stand-in does not know."""
    found: dict[str, str] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        takes = name in TAKES_VALUE
        name = SHORT.get(name, name)
        if takes:
            if not equals and not rest:
                raise Refused(f"Option {word} requires a value.\n", INVALID)
            found[name] = value if equals else rest.pop(0)
        elif name in FLAGS:
            found[name] = ""
        else:
            raise Refused(
                f"Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.\n"
                f"(stand-in of a bringup twin: it does not know {word})\n",
                INVALID,
            )
    return found


def answer(words: Sequence[str]) -> str:
    """What the tool prints. Raises Refused."""
    options = options_of(words)
    if "-h" in options or "--help" in options:
        known = ", ".join(sorted(TAKES_VALUE | FLAGS))
        return f"Stand-in of nvidia-smi for a bringup twin. It knows: {known}\nFields: {', '.join(FIELDS)}\n"
    module = driver()
    if "--version" in options:
        version = module["version"]
        return (
            f"NVIDIA-SMI version  : {version} (stand-in of a bringup twin)\nNVML version        : {version}\n"
            f"DRIVER version      : {version}\nCUDA Version        : {cuda_of(version)}\n"
        )
    if "topo" in options:
        return topology()
    if "nvlink" in options:
        return nvlink()
    if "-L" in options:
        return listing()
    try:
        changed = settings(options)
    except (KeyError, ValueError) as error:
        raise Refused(f"Invalid value: {error}\n", INVALID) from None
    if changed is not None:
        return changed
    top = document(module)
    if "-r" in options:
        return reset(top)
    if "--query-gpu" in options:
        return query(top, options["--query-gpu"], options.get("--format", "csv"), options.get("-i"))
    if "--query-compute-apps" in options:
        return query_apps(top, options["--query-compute-apps"], options.get("--format", "csv"))
    if "-q" in options:
        kept = {number for number, _ in chosen(top, options.get("-i"))}
        for number, gpu in enumerate(list(top.findall("gpu"))):
            if number not in kept:
                top.remove(gpu)
        if "-x" in options:
            return '<?xml version="1.0" ?>\n' + ET.tostring(top, encoding="unicode") + "\n"
        return as_text(top, options.get("-d"))
    return summary(top)


def main(words: Sequence[str]) -> int:
    """Prints the answer; exit codes are the real tool's."""
    try:
        text, code = answer(words), OK
    except Refused as refused:
        text, code = str(refused), refused.code
    sys.stdout.write(text)
    return code
