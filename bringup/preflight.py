"""Is a node as its plan needs it? Facts in (`bringup.node.facts`), findings out, nothing else.

A check is a function of facts and expectation that yields findings. What is the same for each GPU is a row of
`GPU_RULES`. Codes are stable: reports, runbooks and tests name them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bringup import surroundings
from bringup.expected import GIB, Check, Expected, Facts, Finding, Port, Room, Severity, numbers, size

__all__ = [
    "CHECKS",
    "Expected",
    "Finding",
    "Port",
    "Room",
    "deferred",
    "plain",
    "refusal",
    "request",
    "verdicts",
]

OLDEST_SYSTEMD = 249
"""The first with LoadCredential and the sandboxing that units use (Ubuntu 22.04 has it)."""

OLDEST_PYTHON = (3, 10)
"""Of the node's own Python: what the oldest supported distribution has."""

DISTRIBUTIONS: Mapping[str, tuple[int, ...]] = {"debian": (12,), "ubuntu": (22, 4)}
"""The oldest version of each distribution that the roles are written for."""

SUPPORTED = "debian 12, ubuntu 22.04"

CLOCK_LIMIT_S = 300
"""Seconds that a node's clock may be away from ours before certificates and logs are in doubt."""

MEMORY_SHARE = 0.9
"""Part of the nominal memory that must be there: firmware and the kernel keep some."""

GPU_MEMORY_SHARE = 0.93
"""Part of a GPU's nominal memory that the driver must show: ECC and firmware take the rest."""

HARD_XIDS = frozenset({48, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140, *range(144, 151)})
"""Xid errors that mean hardware or a driver that must be reset (https://docs.nvidia.com/deploy/xid-errors/)."""

PROGRAM_XIDS = frozenset({13, 31, 43, 45})
"""Xid errors that a program brings about: a wrong address, an end in the middle of work."""

OWN_UNITS = "bringup-"
"""How the names of our servers' units begin: they may hold GPUs."""

IDLE_GIB = 2.0
"""GPU memory that may be used where none of our servers runs: drivers and monitors take some."""

FILES_SHARE = 0.01
"""Part of a file system's inodes that must be free: caches hold very many small files."""

NUMA_MEMORY_SHARE = 0.8
"""Part of a memory node's nominal size that must be there."""

POWER_SHARE = 0.95
"""Part of its default power that a GPU must be allowed where the site wishes nothing else."""

READ_WRITE = 0o6
"""Rights that CUDA needs of a device node."""

ANY_ADDRESSES = frozenset({"0.0.0.0", "::", "*", ""})
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})

# --- system -------------------------------------------------------------------------------------------------


def check_arch(facts: Facts, expected: Expected) -> Iterator[Finding]:
    """The processor architecture is the platform's."""
    if expected.arch not in ("any", "", facts["arch"]):
        yield Finding(
            "ARCH_WRONG",
            "error",
            f"platform {expected.platform} is {expected.arch}, this node is {facts['arch']}",
            f"uname -m: {facts['arch']}",
            "Give the host another node_platform in its inventory",
        )


def check_system(facts: Facts, expected: Expected) -> Iterator[Finding]:
    """The distribution is one that the roles are written for."""
    system = facts["os"]
    oldest = DISTRIBUTIONS.get(system["id"])
    if oldest is None:
        related = any(name in system["like"].split() for name in DISTRIBUTIONS)
        yield Finding(
            "OS_UNSUPPORTED",
            "warning" if related else "error",
            f"{system['name']} is not a system that the roles are written for",
            f"ID={system['id']}",
            f"Install one of: {SUPPORTED} (or newer)",
        )
    elif numbers(system["version"]) < oldest:
        yield Finding(
            "OS_UNSUPPORTED",
            "error",
            f"{system['name']} is too old",
            f"VERSION_ID={system['version']}",
            f"Upgrade to {SUPPORTED} (or newer)",
        )


def check_systemd(facts: Facts, expected: Expected) -> Iterator[Finding]:
    """systemd runs the machine, and is new enough for the units."""
    found = facts["systemd"]
    if not found["running"]:
        yield Finding(
            "SYSTEMD_MISSING",
            "error",
            "systemd does not run this machine, so servers cannot be supervised",
            "/run/systemd/system is not there",
            "Boot the node with systemd as its first process",
        )
    elif (found["version"] or 0) < OLDEST_SYSTEMD:
        yield Finding(
            "SYSTEMD_TOO_OLD",
            "error",
            f"systemd {found['version']} is older than {OLDEST_SYSTEMD}",
            f"systemctl --version: {found['version']}",
            "Upgrade the distribution",
        )


def check_python(facts: Facts, expected: Expected) -> Iterator[Finding]:
    """The node's own Python can run modules."""
    found = facts["python"]["version"]
    if numbers(found)[:2] < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        yield Finding(
            "PYTHON_TOO_OLD",
            "error",
            f"Python {found} is older than {oldest}",
            facts["python"]["executable"],
            "Install a newer python3, or set ansible_python_interpreter for the host",
        )


def check_root(facts: Facts, expected: Expected) -> Iterator[Finding]:
    """We look as root: without, ports have no owners and nothing can be installed."""
    if facts["uid"] != 0:
        yield Finding(
            "NOT_ROOT",
            "error",
            "the login user could not become root",
            f"uid {facts['uid']}",
            "Give it sudo rights, or set ansible_become_password from the vault",
        )


def check_clock(facts: Facts, expected: Expected) -> Iterator[Finding]:
    """The clock is near ours; certificates, tokens and log order need that."""
    if expected.now is not None and abs(facts["clock"]["epoch"] - expected.now) > CLOCK_LIMIT_S:
        away = round(facts["clock"]["epoch"] - expected.now)
        yield Finding(
            "CLOCK_WRONG",
            "error",
            f"the node's clock is {abs(away)} s {'ahead of' if away > 0 else 'behind'} the controller's",
            f"limit {CLOCK_LIMIT_S} s",
            "Set the time and keep it: sudo timedatectl set-ntp true",
        )


def check_clock_kept(facts: Facts, expected: Expected) -> Iterator[Finding]:
    """Somebody keeps the clock right; without, it drifts until certificates fail."""
    if facts["clock"]["synchronized"] is False and expected.gpus:
        yield Finding(
            "CLOCK_NOT_KEPT",
            "warning",
            "nobody keeps the clock right",
            "timedatectl: NTPSynchronized=no",
            "Install a time service: sudo apt-get install chrony",
        )


def check_package_lock(facts: Facts, expected: Expected) -> Iterator[Finding]:
    """Somebody installs packages right now: we wait for them, so it is only a word of warning."""
    holder = facts.get("package_lock")
    if holder:
        yield Finding(
            "PACKAGE_LOCK_HELD",
            "warning",
            f"{holder['process']} (pid {holder['pid']}) is installing packages; roles wait for it",
            "/var/lib/dpkg/lock-frontend is held",
            "Wait, or see: sudo journalctl -u apt-daily-upgrade",
        )


# --- memory, disks, ports -----------------------------------------------------------------------------------


def check_memory(facts: Facts, expected: Expected) -> Iterator[Finding]:
    """There is as much memory as the plan's services and the platform need."""
    total = facts["memory"]["total"]
    if expected.memory and total < expected.memory * MEMORY_SHARE:
        yield Finding(
            "MEMORY_TOO_SMALL",
            "error",
            f"needs {size(expected.memory)} of memory, this node has {size(total)}",
            f"MemTotal {size(total)}",
            "Use a bigger node, or a profile that offloads less to host memory",
        )


def check_disks(facts: Facts, expected: Expected) -> Iterator[Finding]:
    """What must be stored fits: paths on one file system share its room."""
    disks = {disk["path"]: disk for disk in facts["disks"]}
    by_mount: dict[str, list[Room]] = defaultdict(list)
    for room in expected.rooms:
        if room.path in disks:
            by_mount[disks[room.path]["mount"]].append(room)
    reserve = int(expected.threshold("disk_free_gib", 0) * GIB)
    for mount, rooms in by_mount.items():
        here = disks[rooms[0].path]
        if here["read_only"]:
            yield Finding(
                "DISK_READ_ONLY",
                "error",
                f"{mount} is mounted read-only, and {rooms[0].path} ({rooms[0].purpose}) must be written",
                f"{here['kind']} on {mount}",
                f"Look why (sudo dmesg | grep -i remount), then: sudo mount -o remount,rw {mount}",
            )
            continue
        if here["files_free"] < FILES_SHARE * here.get("files", 0):
            yield Finding(
                "DISK_NO_INODES",
                "error",
                f"{mount} has {here['files_free']} free inodes of {here['files']}: new files cannot be made there",
                f"{here['kind']} on {mount}",
                f"Remove small files, caches first: sudo du --inodes -x --max-depth=2 {mount} | sort -n | tail",
            )
        missing = sum(max(0, room.needed - disks[room.path]["held"]) for room in rooms)
        if here["free"] < missing + reserve:
            listed = "; ".join(f"{room.path} {size(room.needed)} for {room.purpose}" for room in rooms)
            yield Finding(
                "DISK_FULL",
                "error",
                f"{mount} has {size(here['free'])} free, {size(missing + reserve)} are needed "
                f"({size(missing)} to store, {size(reserve)} to keep free)",
                listed,
                f"Make room (sudo du -xh --max-depth=2 {mount} | sort -h | tail) or store on another disk",
            )


def check_ports(facts: Facts, expected: Expected) -> Iterator[Finding]:
    """Nobody but our own unit listens on a service's port."""
    planned = {port.unit: port.port for port in expected.ports}
    for port in expected.ports:
        for row in facts["listening"]:
            unit = (row["unit"] or "").removesuffix(".service")
            if row["port"] != port.port or unit == port.unit or not _overlap(row["address"], port.bind):
                continue
            moves = unit in planned and planned[unit] != port.port
            yield Finding(
                "PORT_TAKEN",
                "warning" if moves else "error",
                f"port {port.port} of service {port.service} is taken by {_who(row)}"
                + (", which moves to another port in this run" if moves else ""),
                f"{row['address']}:{row['port']} is listened on",
                _free_port(row),
            )


def _overlap(taken: str, wanted: str) -> bool:
    """Do two listening addresses exclude each other?"""
    if taken in ANY_ADDRESSES or wanted in ANY_ADDRESSES or taken == wanted:
        return True
    return wanted in LOOPBACK and taken in LOOPBACK and ":" not in taken


def _who(row: Mapping[str, Any]) -> str:
    if row["pid"] is None:
        return "a process that root cannot see (another container?)"
    unit = f", unit {row['unit']}" if row["unit"] else ""
    return f"{row['process'] or 'a process'} (pid {row['pid']}{unit})"


def _free_port(row: Mapping[str, Any]) -> str:
    if row["unit"]:
        return (
            f"Stop it (sudo systemctl stop {row['unit']}) or give the service another port in node_services"
        )
    if row["pid"]:
        return f"Stop it (sudo kill {row['pid']}) or give the service another port in node_services"
    return "Give the service another port in node_services"


def check_leftovers(facts: Facts, expected: Expected) -> Iterator[Finding]:
    """No server of an earlier life is still there: it would hold memory and GPUs."""
    for row in facts["leftovers"]:
        yield Finding(
            "LEFTOVER_PROCESS",
            "warning",
            f"{row['process']} (pid {row['pid']}) looks like a server that nobody supervises",
            f"unit {row['unit'] or 'none'}",
            f"Look at it (ps -fp {row['pid']}), then: sudo kill {row['pid']}",
        )


def check_proxies(facts: Facts, expected: Expected) -> Iterator[Finding]:
    """A proxy for everybody spares the node itself: warm-ups and health probes go to its own address."""
    proxies = (facts.get("settings") or {}).get("proxies") or {}
    spared = {part.strip() for part in proxies.get("no_proxy", "").split(",")}
    if (proxies.get("http_proxy") or proxies.get("all_proxy")) and not spared & {
        "localhost",
        "127.0.0.1",
        "*",
    }:
        yield Finding(
            "PROXY_TAKES_LOOPBACK",
            "warning",
            "a proxy is set for everything on this node, its own address included; servers get NO_PROXY from us, "
            "people and scripts do not",
            f"/etc/environment: http_proxy={proxies.get('http_proxy') or proxies.get('all_proxy')}",
            "Add to /etc/environment: no_proxy=localhost,127.0.0.1,::1",
        )


def check_memory_nodes(facts: Facts, expected: Expected) -> Iterator[Finding]:
    """The memory nodes are where the plan puts processes: with CPUs and with memory."""
    there = {row["node"]: row for row in facts.get("numa") or ()}
    for wanted in expected.numa:
        if wanted.get("gpu_memory") or not there:
            continue
        node = there.get(wanted["node"])
        if node is None:
            seen = "it is not there"
        elif wanted["cpus"] and node["cpus"] != wanted["cpus"]:
            seen = f"CPUs {node['cpus'] or 'none'}, not {wanted['cpus']}"
        elif node["memory"] < wanted["memory_gib"] * GIB * NUMA_MEMORY_SHARE:
            seen = f"{size(node['memory'])} of {size(wanted['memory_gib'] * GIB)}"
        else:
            continue
        yield Finding(
            "NUMA_UNLIKE",
            "error",
            f"memory node {wanted['node']} is not as platform {expected.platform} has it: {seen}",
            f"nodes: {', '.join(map(str, sorted(there)))}",
            "Look at numactl -H and the firmware's settings; or give the host the platform that it is",
        )


def check_gpu_nodes(facts: Facts, expected: Expected) -> Iterator[Finding]:
    """Each GPU hangs at the memory node where the plan puts its processes."""
    gpus = facts["gpu"]["pci"]["gpus"]
    for wanted in expected.numa:
        for index in wanted.get("gpus", ()) if wanted["cpus"] else ():
            seen = gpus[index].get("numa_node") if index < len(gpus) else None
            if seen is not None and seen != wanted["node"]:
                yield Finding(
                    "GPU_NODE",
                    "error",
                    f"GPU {index} hangs at memory node {seen}, platform {expected.platform} has it at "
                    f"{wanted['node']}: its processes would reach it through the other module or socket",
                    f"{gpus[index]['address']}: numa_node {seen}",
                    "Look at nvidia-smi topo -m and the firmware's settings; or give the host the platform that it is",
                )


# --- GPUs ---------------------------------------------------------------------------------------------------


def check_gpu_count(facts: Facts, expected: Expected) -> Iterator[Finding]:
    """As many GPUs as the platform has, on the bus and in the driver."""
    if not expected.gpus:
        return
    wanted = expected.gpus["count"]
    bus = len(facts["gpu"]["pci"]["gpus"])
    smi = facts["gpu"]["smi"]
    seen = len(smi["gpus"]) if smi else None
    if seen is not None and seen < wanted:
        lost = "one fell off the bus or failed to initialise" if bus >= wanted else "not all are on the bus"
        yield Finding(
            "GPU_COUNT",
            "error",
            f"platform {expected.platform} has {wanted} GPUs, the driver shows {seen}: {lost}",
            f"nvidia-smi: {seen}, PCI bus: {bus}",
            "Look for Xid errors (sudo journalctl -k -g Xid), then power-cycle the node",
        )
    elif seen is None and bus < wanted:
        yield Finding(
            "GPU_COUNT",
            "error",
            f"platform {expected.platform} has {wanted} GPUs, the PCI bus shows {bus}",
            f"PCI bus: {bus}",
            "Check that the node is of this platform; power-cycle it when GPUs are missing",
        )
    elif seen is not None and seen > wanted:
        yield Finding(
            "GPU_COUNT",
            "warning",
            f"platform {expected.platform} has {wanted} GPUs, the driver shows {seen}",
            f"nvidia-smi: {seen}",
            "Give the host the platform that it is, or the rest stays unused",
        )


def check_driver(facts: Facts, expected: Expected) -> Iterator[Finding]:
    """A driver is loaded, its tools talk to it, and it is new enough."""
    if not expected.gpus:
        return
    gpu, wanted = facts["gpu"], expected.driver or {}
    if gpu["nouveau"]:
        yield Finding(
            "NOUVEAU_LOADED",
            "error",
            "the nouveau driver holds the GPUs, so NVIDIA's cannot load",
            "/sys/module/nouveau is there",
            "Blacklist nouveau, rebuild the initramfs and reboot",
        )
    if gpu["module"] is None and gpu["smi"] is None:
        yield Finding(
            "DRIVER_MISSING",
            "error",
            "no NVIDIA driver is loaded",
            gpu["smi_error"] or "/proc/driver/nvidia/version is not there",
            f"Install driver {wanted.get('recommended') or wanted.get('minimum')}, then reboot",
        )
        return
    if gpu["smi"] is None and "gpu is lost" in (gpu["smi_error"] or "").lower():
        yield Finding(
            "GPU_LOST",
            "error",
            "the driver has lost a GPU, and no tool can talk to the others either",
            gpu["smi_error"],
            "Drain the node and reboot it; call the vendor when it comes back without the GPU",
        )
    elif gpu["smi"] is None:
        mismatch = "version mismatch" in (gpu["smi_error"] or "").lower()
        yield Finding(
            "DRIVER_LIBRARY_MISMATCH" if mismatch else "DRIVER_NOT_ANSWERING",
            "error",
            "the driver's library and its kernel module are of different versions"
            if mismatch
            else "nvidia-smi cannot talk to the driver",
            f"{gpu['smi_error']}; kernel module {gpu['module']}",
            "Reboot the node (drain its servers first)",
        )
    found = gpu["module"] or gpu["smi"]["driver"]
    minimum = wanted.get("minimum")
    if minimum and numbers(found)[: len(numbers(minimum))] < numbers(minimum):
        yield Finding(
            "DRIVER_TOO_OLD",
            "error",
            f"driver {found} is older than {minimum}",
            f"driver {found}",
            f"Install driver {wanted.get('recommended') or minimum} and reboot",
        )
    if wanted.get("open_modules") and gpu["open_module"] is False:
        yield Finding(
            "DRIVER_NOT_OPEN",
            "error",
            "this platform needs the open kernel modules, the closed ones are loaded",
            f"kernel module {gpu['module']}",
            "Install the -open variant of the driver and reboot",
        )


LOG_VERDICTS: Mapping[str, tuple[str, Severity, str, str]] = {
    "switch": (
        "NVSWITCH_ERROR",
        "error",
        "an NVSwitch had a fatal error since boot",
        "Drain the node, reset all GPUs and switches together or reboot, and call the vendor when it comes back",
    ),
    "init": (
        "GPU_INIT_FAILED",
        "error",
        "the driver could not bring a GPU up",
        "Power-cycle the node (a reboot may not do); check that the driver is right for this GPU",
    ),
    "bar": (
        "GPU_BAR_UNASSIGNED",
        "error",
        "the firmware gave a GPU no address window",
        "Turn on Above 4G Decoding (and Resizable BAR) in the firmware; in a virtual machine enlarge the MMIO window",
    ),
    "fallen": (
        "GPU_FELL_OFF",
        "error",
        "a GPU has fallen off the bus since boot",
        "Drain the node and power-cycle it; call the vendor when it comes back",
    ),
    "slot": (
        "NIC_POWER",
        "warning",
        "a network card gets less power than it asks for, and may slow down or stop",
        "Connect its auxiliary power or move it to a slot that gives more; look at: sudo mlxconfig -d DEVICE q",
    ),
}
"""What kinds of lines in the kernel log (`facts.KERNEL_FAULTS`) mean: code, severity, what, remedy."""


def check_kernel_log(facts: Facts, expected: Expected) -> Iterator[Finding]:
    """Nothing in the kernel log, beside Xid errors, says that GPUs cannot be used."""
    if not expected.gpus:
        return
    lines: dict[str, list[str]] = defaultdict(list)
    for row in facts["gpu"].get("kernel_faults", ()):
        lines[row["kind"]].append(row["line"])
    for kind, (code, severity, what, remedy) in LOG_VERDICTS.items():
        if lines[kind]:
            yield Finding(code, severity, what, lines[kind][-1][:200], remedy)


def check_kernel(facts: Facts, expected: Expected) -> Iterator[Finding]:
    """The kernel that runs next can have the driver too."""
    gpu = facts["gpu"]
    kernels = gpu.get("kernels") or []
    if not expected.gpus or not kernels:
        return
    running = next((row for row in kernels if row["running"]), None)
    if gpu.get("secure_boot") and gpu["module"] is None and running and running["nvidia"]:
        yield Finding(
            "SECURE_BOOT",
            "error",
            "secure boot is on and the driver's module is not loaded: its key is probably not enrolled",
            "mokutil --sb-state: enabled",
            "Enrol the module's key (sudo mokutil --import ...; reboot) or use signed modules of the distribution",
        )
    if running and running["nvidia"] and not running["headers"]:
        yield Finding(
            "KERNEL_HEADERS_MISSING",
            "warning",
            f"there are no headers for kernel {running['release']}: an update of the driver cannot be built",
            f"/lib/modules/{running['release']}/build is not there",
            f"sudo apt-get install linux-headers-{running['release']}",
        )
    newest = max(kernels, key=lambda row: numbers(row["release"]))
    if running and running["nvidia"] and not newest["running"] and not newest["nvidia"]:
        yield Finding(
            "KERNEL_WITHOUT_DRIVER",
            "error",
            f"kernel {newest['release']} runs after the next reboot, and has no NVIDIA module",
            f"running: {running['release']}",
            f"sudo apt-get install linux-headers-{newest['release']} && sudo dkms autoinstall -k {newest['release']}",
        )


def check_device_nodes(facts: Facts, expected: Expected) -> Iterator[Finding]:
    """What CUDA opens is there."""
    gpu = facts["gpu"]
    if expected.gpus and gpu["smi"] and gpu.get("uvm") is False:
        yield Finding(
            "UVM_MISSING",
            "error",
            "/dev/nvidia-uvm is not there, so CUDA cannot start",
            "module nvidia_uvm is not loaded or udev made no node",
            "sudo nvidia-modprobe -u -c 0",
        )
    if expected.gpus and gpu.get("mps"):
        yield Finding(
            "MPS_RUNNING",
            "error",
            "the multi-process service runs: servers would share its fate and its limits",
            f"nvidia-cuda-mps-control (pid {gpu['mps']})",
            "echo quit | sudo nvidia-cuda-mps-control",
        )


def check_devices_open(facts: Facts, expected: Expected) -> Iterator[Finding]:
    """Each server's user may read and write the device nodes of its GPUs: we look as root, who may always."""
    there = {row["path"]: row for row in facts["gpu"].get("devices") or ()}
    gpus = (facts["gpu"]["smi"] or {}).get("gpus") or ()
    for row in expected.devices:
        user = (facts.get("users") or {}).get(row["user"])
        shut = [
            there[path]
            for path in ("/dev/nvidiactl", "/dev/nvidia-uvm", *(_gpu_node(gpus, at) for at in row["gpus"]))
            if path in there and not _may_open(there[path], user)
        ]
        if shut:
            paths = ", ".join(one["path"] for one in shut)
            yield Finding(
                "DEVICE_SHUT",
                "error",
                f"{row['user']}, the user of service {row['service']}, may not open {paths}: "
                "CUDA finds no device there, or calls it invalid",
                f"{_modes(shut)}; {_membership(row['user'], user)}",
                _let_in(shut, row["user"], user),
            )


def _gpu_node(gpus: Sequence[Mapping[str, Any]], index: int) -> str:
    """The device node of a GPU: named by its minor number, which is not its index where others are hidden."""
    minor = gpus[index].get("minor") if index < len(gpus) else None
    return f"/dev/nvidia{index if minor is None else minor}"


def _may_open(node: Mapping[str, Any], user: Mapping[str, Any] | None) -> bool:
    """May a user read and write a file, by its mode and access list (acl(5))? None: one that is yet to be made, in no
    group but its own."""
    uid, groups = (user["uid"], set(user["groups"])) if user else (None, set())
    owner, middle, others = (node["mode"] >> shift & 7 for shift in (6, 3, 0))
    if uid == node["uid"]:
        return _both(owner)
    access = node.get("access") or ()
    named = [one["rights"] & middle for one in access if one["kind"] == "user" and one["id"] == uid]
    if named:
        return _both(named[0])
    owning = next((one["rights"] & middle for one in access if one["kind"] == "owning group"), middle)
    ours = [owning] if node["gid"] in groups else []
    ours += [one["rights"] & middle for one in access if one["kind"] == "group" and one["id"] in groups]
    return any(map(_both, ours)) if ours else _both(others)


def _both(rights: int) -> bool:
    return rights & READ_WRITE == READ_WRITE


def _modes(nodes: Iterable[Mapping[str, Any]]) -> str:
    seen = (f"mode {node['mode']:04o} of {node['owner']}:{node['group']}" for node in nodes)
    return ", ".join(dict.fromkeys(seen))


def _membership(name: str, user: Mapping[str, Any] | None) -> str:
    if user is None:
        return f"{name} is yet to be made, in no group but its own"
    return f"{name} is uid {user['uid']} in groups {', '.join(map(str, user['groups']))}"


def _let_in(nodes: Sequence[Mapping[str, Any]], name: str, user: Mapping[str, Any] | None) -> str:
    """The step that helps: a group that may open them all, where there are one and the user, else everybody."""
    paths = " ".join(node["path"] for node in nodes)
    everybody = (
        f"sudo chmod 0666 {paths}, and take away what closes them at boot: "
        "grep -rs nvidia /etc/udev/rules.d /etc/modprobe.d (NVreg_DeviceFileMode)"
    )
    groups = {node["group"] for node in nodes if node["gid"] != 0 and _both(node["mode"] >> 3)}
    if user is None or len(groups) != 1 or not all(_both(node["mode"] >> 3) for node in nodes):
        return everybody
    return f"sudo usermod -aG {groups.pop()} {name}; or for all: {everybody}"


def check_cuda_link(facts: Facts, expected: Expected) -> Iterator[Finding]:
    """What engines compile at run time can be linked against the driver's library: tried where there is a compiler
    that works, else looked up."""
    gpu = facts["gpu"]
    if not (expected.gpus and gpu["smi"] and any("cuda" in row["libraries"] for row in expected.linking)):
        return
    tried = [row for row in facts.get("linking") or () if row["links"]]
    lost = [row for row in tried if "cuda" in row["lost"]]
    if lost or (not tried and gpu.get("linkable") is False):
        yield Finding(
            "LIBCUDA_LINK",
            "warning",
            "nothing is called libcuda.so here, only libcuda.so.1: what compiles at run time cannot link -lcuda",
            lost[0]["said"]
            if lost
            else "looked in the system's folders, the toolkits' stubs and /opt/bringup/cuda/lib",
            "invoke provision makes a link for servers (role cuda_runtime)",
        )


def check_links(facts: Facts, expected: Expected) -> Iterator[Finding]:
    """Every NVLink carries: one that does not slows all collectives, or hangs them."""
    if not expected.gpus or not facts["gpu"]["smi"] or not expected.links.get("nvswitches"):
        return
    rows = facts["gpu"].get("nvlink") or []
    broken = [row for row in rows if row["inactive"]]
    if broken:
        listed = "; ".join(f"GPU {row['gpu']}: {row['inactive']} of {row['links']}" for row in broken)
        yield Finding(
            "NVLINK_DOWN",
            "error",
            f"NVLinks are inactive on GPU {', '.join(str(row['gpu']) for row in broken)}",
            listed,
            "Look for Xid and SXid errors; restart in the order fabric manager, GPU reset; else call the vendor",
        )


def check_gpu_users(facts: Facts, expected: Expected) -> Iterator[Finding]:
    """Nobody but our own servers holds GPU memory."""
    if not expected.gpus or not facts["gpu"]["smi"]:
        return
    limit = expected.threshold("gpu_idle_gib", IDLE_GIB) * GIB
    strangers: dict[int, tuple[str, list[int]]] = {}
    unexplained = []
    for index, gpu in enumerate(facts["gpu"]["smi"]["gpus"]):
        ours = False
        for row in gpu.get("processes") or ():
            if str(row.get("unit") or "").startswith(OWN_UNITS):
                ours = True
            elif (row.get("memory") or 0) > limit:
                strangers.setdefault(row["pid"], (row["name"] or "a process", []))[1].append(index)
        if not ours and not (gpu.get("processes") or ()) and (gpu.get("memory_used") or 0) > limit:
            unexplained.append(index)
    for pid, (name, indexes) in strangers.items():
        yield Finding(
            "GPU_BUSY",
            "error",
            f"{name} (pid {pid}) holds memory of GPU {', '.join(map(str, indexes))}",
            f"more than {size(limit)}, in no unit of ours",
            "Look at it (ps, docker ps), then: invoke cleanup",
        )
    if unexplained:
        yield Finding(
            "GPU_BUSY",
            "error",
            f"memory of GPU {', '.join(map(str, unexplained))} is held, and no process shows for it",
            f"more than {size(limit)} used",
            "Look for containers and dead workers (sudo fuser -v /dev/nvidia*), then: invoke cleanup",
        )


def check_fabric(facts: Facts, expected: Expected) -> Iterator[Finding]:
    """Where there are NVSwitches, the fabric manager runs and is of exactly the driver's version."""
    switches = int(expected.links.get("nvswitches", 0))
    gpu = facts["gpu"]
    if not switches or not gpu["smi"]:
        return
    found = len(gpu["pci"]["switches"])
    if found < switches:
        yield Finding(
            "NVSWITCH_COUNT",
            "error",
            f"platform {expected.platform} has {switches} NVSwitches, the PCI bus shows {found}",
            f"PCI bus: {found}",
            "Power-cycle the node; call the vendor when it stays so",
        )
    if gpu["units"].get("nvidia-fabricmanager") != "active":
        yield Finding(
            "FABRIC_MANAGER_DOWN",
            "error",
            "the fabric manager does not run: CUDA fails with error 802 on such a node",
            f"nvidia-fabricmanager is {gpu['units'].get('nvidia-fabricmanager') or 'missing'}",
            f"Install nvidia-fabricmanager {gpu['smi']['driver']} and start it before any server",
        )
    if gpu["fabric_manager"] and gpu["fabric_manager"] != gpu["smi"]["driver"]:
        yield Finding(
            "FABRIC_MANAGER_MISMATCH",
            "error",
            f"fabric manager {gpu['fabric_manager']} and driver {gpu['smi']['driver']} must be equal",
            f"nv-fabricmanager {gpu['fabric_manager']}",
            f"Install nvidia-fabricmanager {gpu['smi']['driver']} and hold both packages",
        )


def check_xids(facts: Facts, expected: Expected) -> Iterator[Finding]:
    """No Xid error since boot that means broken hardware."""
    hard = [row for row in facts["gpu"]["xids"] if row["xid"] in HARD_XIDS]
    if hard:
        listed = ", ".join(sorted({f"{row['xid']} on {row['address']}" for row in hard}))
        yield Finding(
            "GPU_XID",
            "error",
            f"the kernel log has GPU errors since boot: Xid {listed}",
            hard[-1]["line"][:200],
            "Drain the node, reset or reboot it, and call the vendor when they come back",
        )
    faults = [row for row in facts["gpu"]["xids"] if row["xid"] in PROGRAM_XIDS]
    if faults and expected.gpus:
        yield Finding(
            "GPU_XID_PROGRAM",
            "note",
            f"programs have faulted on GPUs since boot: Xid {', '.join(sorted({str(row['xid']) for row in faults}))}",
            faults[-1]["line"][:200],
            "Look which program and when (sudo journalctl -k -g Xid); the GPU itself is not in doubt",
        )


@dataclass(frozen=True)
class GpuRule:
    """What must be so on every GPU: `wrong` gives the evidence, or None when all is well."""

    code: str
    severity: Severity
    what: str
    wrong: Callable[[Mapping[str, Any], Expected], str | None]
    remedy: str


def _name(gpu: Mapping[str, Any], expected: Expected) -> str | None:
    words = (gpu["name"] or "").split()
    patterns = [name.split() for name in (expected.gpus or {}).get("names", ())]
    fits = any(
        words[at : at + len(pattern)] == pattern
        for pattern in patterns
        for at in range(len(words) - len(pattern) + 1)
    )
    return None if fits or not patterns or not words else f'"{gpu["name"]}"'


def _memory(gpu: Mapping[str, Any], expected: Expected) -> str | None:
    wanted = float((expected.gpus or {}).get("memory_gib", 0)) * GIB
    if gpu["memory"] is None or gpu["memory"] >= wanted * GPU_MEMORY_SHARE:
        return None
    return f"{size(gpu['memory'])} of {size(wanted)}"


def _is(key: str, *values: str) -> Callable[[Mapping[str, Any], Expected], str | None]:
    """Wrong when the GPU's `key` is one of `values`."""
    return lambda gpu, expected: f"{key} {gpu[key]}" if gpu.get(key) in values else None


def _over(key: str, threshold: str, default: float) -> Callable[[Mapping[str, Any], Expected], str | None]:
    """Wrong when the GPU's number `key` is above the platform's threshold."""

    def wrong(gpu: Mapping[str, Any], expected: Expected) -> str | None:
        value, limit = gpu.get(key), expected.threshold(threshold, default)
        return f"{value:g}, limit {limit:g}" if value is not None and value > limit else None

    return wrong


def _power(gpu: Mapping[str, Any], expected: Expected) -> str | None:
    limit, usual = gpu.get("power_limit_w"), gpu.get("power_default_w")
    if limit is None or usual is None:
        return None
    if expected.power_w:
        return f"{limit} W, wished {expected.power_w} W" if limit != expected.power_w else None
    return f"{limit} W of {usual} W" if limit < usual * POWER_SHARE else None


def _narrow_link(gpu: Mapping[str, Any], expected: Expected) -> str | None:
    width, most = gpu.get("link_width"), gpu.get("link_width_max")
    return f"x{width} of x{most}" if width and most and width < most else None


GPU_RULES: tuple[GpuRule, ...] = (
    GpuRule(
        "GPU_NAME",
        "error",
        "is not the platform's GPU",
        _name,
        "Give the host the platform that it is (node_platform)",
    ),
    GpuRule(
        "GPU_MEMORY",
        "error",
        "has less memory than the platform's GPUs",
        _memory,
        "Give the host the platform that it is, or a profile that fits",
    ),
    GpuRule(
        "GPU_MIG", "error", "is split by MIG", _is("mig", "Enabled"), "Turn MIG off: sudo nvidia-smi -mig 0"
    ),
    GpuRule(
        "GPU_EXCLUSIVE",
        "error",
        "takes one process only, or none",
        _is("compute_mode", "Exclusive_Process", "Prohibited"),
        "sudo nvidia-smi -c DEFAULT",
    ),
    GpuRule(
        "GPU_ECC_OFF",
        "warning",
        "runs without error correction",
        _is("ecc", "Disabled"),
        "sudo nvidia-smi -e 1, then reboot",
    ),
    GpuRule(
        "GPU_ECC_ERRORS",
        "error",
        "had uncorrectable memory errors since boot",
        _over("ecc_uncorrected_since_boot", "ecc_uncorrected", 0),
        "Drain the node and reset the GPU; call the vendor when they come back",
    ),
    GpuRule(
        "GPU_REMAP_PENDING",
        "error",
        "waits for a reset to replace bad memory rows",
        _is("remap_pending", "Yes"),
        "Drain the node and reset the GPUs, or reboot",
    ),
    GpuRule(
        "GPU_REMAP_FAILED",
        "error",
        "has bad memory rows that could not be replaced",
        _is("remap_failed", "Yes"),
        "The GPU must be exchanged: call the vendor",
    ),
    GpuRule(
        "GPU_RECOVERY",
        "error",
        "asks for a reset",
        _is("recovery", "Reset", "Reboot", "Drain P2P", "Drain and Reset"),
        "Drain the node and do what it asks for",
    ),
    GpuRule(
        "GPU_FABRIC_STATE",
        "error",
        "has not joined the NVLink fabric",
        _is("fabric_state", "In Progress", "Not Started"),
        "Wait for the fabric manager; look at: sudo journalctl -u nvidia-fabricmanager",
    ),
    GpuRule(
        "GPU_FABRIC_STATUS",
        "error",
        "is in the NVLink fabric, which has not come up well",
        lambda gpu, expected: (
            f"fabric {gpu['fabric_state']}, status {gpu['fabric_status']}"
            if gpu.get("fabric_state") == "Completed" and gpu.get("fabric_status") not in (None, "Success")
            else None
        ),
        "sudo journalctl -u nvidia-fabricmanager; reset all GPUs together, or reboot",
    ),
    GpuRule(
        "GPU_POWER_CAP",
        "warning",
        "may not take the power that is planned",
        _power,
        "sudo nvidia-smi -pl WATTS; a wish of the site is node_driver.power_w",
    ),
    GpuRule(
        "GPU_CLOCKS_SET",
        "warning",
        "has clocks that somebody has set lower",
        lambda gpu, expected: (
            f"{gpu['clocks_mhz']} MHz of {gpu['clocks_default_mhz']}"
            if not expected.clocks_mhz and (gpu.get("clocks_mhz") or 0) < (gpu.get("clocks_default_mhz") or 0)
            else None
        ),
        "sudo nvidia-smi -rac; sudo nvidia-smi -rgc; a wish of the site is node_driver.clocks_mhz",
    ),
    GpuRule(
        "GPU_SLOWED",
        "warning",
        "is slowed down by its board: heat, or a power supply that asks for less",
        lambda gpu, expected: ", ".join(gpu.get("slowed") or ()) or None,
        "Look at: nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER; check power supplies, cables and air flow",
    ),
    GpuRule(
        "GPU_ECC_WAITS",
        "warning",
        "changes its error correction at the next boot",
        lambda gpu, expected: (
            f"{gpu['ecc']} now, {gpu['ecc_pending']} then"
            if gpu.get("ecc_pending") and gpu.get("ecc") and gpu["ecc_pending"] != gpu["ecc"]
            else None
        ),
        "Reboot the node in a window (invoke reboot), or take it back: sudo nvidia-smi -e 1",
    ),
    GpuRule(
        "GPU_HOT",
        "warning",
        "is hotter than it should be",
        _over("temperature_c", "gpu_temperature_c", 90),
        "Check fans, air flow and the power cap",
    ),
    GpuRule(
        "GPU_LINK_NARROW",
        "warning",
        "has fewer PCIe lanes than it can use",
        _narrow_link,
        "Reseat the GPU or riser at the next maintenance",
    ),
    GpuRule(
        "GPU_PERSISTENCE_OFF",
        "warning",
        "is unloaded when nobody uses it, which makes starts slow",
        _is("persistence", "Disabled"),
        "sudo systemctl enable --now nvidia-persistenced",
    ),
)


def check_each_gpu(facts: Facts, expected: Expected) -> Iterator[Finding]:
    """The rules that hold for every GPU: one finding a rule, with the GPUs that break it."""
    if not expected.gpus or not facts["gpu"]["smi"]:
        return
    gpus = facts["gpu"]["smi"]["gpus"]
    for rule in GPU_RULES:
        broken = [(index, seen) for index, gpu in enumerate(gpus) if (seen := rule.wrong(gpu, expected))]
        if broken:
            which = ", ".join(str(index) for index, _ in broken)
            yield Finding(
                rule.code,
                rule.severity,
                f"GPU {which} {rule.what}",
                "; ".join(dict.fromkeys(seen for _, seen in broken)),
                rule.remedy,
            )


CHECKS: tuple[Check, ...] = (
    check_root,
    check_arch,
    check_system,
    check_systemd,
    check_python,
    check_clock,
    check_clock_kept,
    check_package_lock,
    check_memory,
    check_memory_nodes,
    check_gpu_nodes,
    check_disks,
    check_ports,
    check_leftovers,
    check_proxies,
    check_gpu_count,
    check_driver,
    check_kernel,
    check_kernel_log,
    check_device_nodes,
    check_devices_open,
    check_cuda_link,
    check_fabric,
    check_links,
    check_xids,
    check_each_gpu,
    check_gpu_users,
    *surroundings.CHECKS,
)


def verdicts(facts: Facts, expected: Expected, coming: Iterable[str] = ()) -> list[Finding]:
    """All findings, errors first, in the order of the checks. `coming`: roles of this run that come after; what one of
    them mends (`Expected.mends`) is a note."""
    roles = set(coming)
    found = [
        _deferred(finding, role)
        if (role := expected.mends.get(finding.code, "")) in roles
        else replace(finding, mended_by=role)
        for check in CHECKS
        for finding in check(facts, expected)
    ]
    return sorted(found, key=lambda finding: ("error", "warning", "note").index(finding.severity))


def _deferred(finding: Finding, role: str) -> Finding:
    return replace(
        finding, severity="note", what=f"{finding.what}; role {role} of this run will mend it", mended_by=role
    )


def deferred(facts: Facts, expected: Expected, coming: Iterable[str]) -> list[str]:
    """Codes of errors that a role of this run will mend: to be judged again after it."""
    roles = set(coming)
    found = [
        one.code for one in verdicts(facts, expected) if one.severity == "error" and one.mended_by in roles
    ]
    return sorted(set(found))


def request(expected: Expected) -> dict[str, Any]:
    """What `bringup.node.facts.gather` is to look at for an expectation."""
    return {
        "paths": [room.path for room in expected.rooms],
        "units": list(expected.units),
        "settings": [str(row["path"]) for row in expected.settings],
        "addresses": [dict(row) for row in expected.addresses],
        "caches": [dict(row) for row in expected.caches],
        "models": [dict(row) for row in expected.models],
        "memory_nodes": expected.memory_nodes,
        "ports": [port.port for port in expected.ports],
        "linking": [dict(row) for row in expected.linking],
        "logs": list(expected.logs),
        "users": sorted({str(row["user"]) for row in expected.devices}),
    }


def refusal(host: str, findings: Iterable[Finding]) -> str:
    """One message with every error, one a line; "" when there is none."""
    errors = [finding for finding in findings if finding.severity == "error"]
    if not errors:
        return ""
    count = "1 finding" if len(errors) == 1 else f"{len(errors)} findings"
    return f"{host} is not as its plan needs it, {count}:\n" + "\n".join(f"- {finding}" for finding in errors)


def plain(findings: Iterable[Finding]) -> list[dict[str, str]]:
    """Findings as plain data: code, severity, what, evidence, remedy."""
    return [asdict(finding) for finding in findings]
