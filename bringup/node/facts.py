"""What a node is like, gathered in one go: system, memory, disks, ports, GPUs, users, leftovers.

`gather(request)` only reads. Everything it returns is plain data, so that a recorded answer is a test case.
Sizes are bytes, times are seconds since the epoch.
"""

from __future__ import annotations

import grp
import json
import os
import platform
import pwd
import re
import shutil
import socket
import stat
import struct
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from . import linking, surroundings

SCHEMA_VERSION = 1

COMMAND_LIMIT_S = 10
"""Seconds that one command (systemctl, journalctl) may take."""

GPU_COMMAND_LIMIT_S = 60
"""Seconds that nvidia-smi may take: without persistence it initialises every GPU first."""

XID_LINES_KEPT = 20
LOG_WORDS = "NVRM|SXid|PCIe slot"
"""Lines of the kernel log that are looked at."""

Runner = Callable[[Sequence[str], int], "tuple[int, str]"]


def run(argv: Sequence[str], limit_s: int = COMMAND_LIMIT_S) -> tuple[int, str]:
    """Exit code and output of a command; 127: there is no such, 124: it took longer than its limit."""
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        done = subprocess.run(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=limit_s,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 124, ""
    except OSError as error:
        return 127, str(error)
    return done.returncode, done.stdout.decode("utf-8", "replace")


SLASH = Path("/")
"""Where hardware is read from; a test reads it from a folder."""


def read(path: str | Path) -> str:
    """A file's text, "" when it is not there or may not be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# --- system -------------------------------------------------------------------------------------------------


def parse_os_release(text: str) -> dict[str, str]:
    """id, version, name and the ids it is like, from /etc/os-release."""
    values = dict(re.findall(r'^([A-Z_]+)="?(.*?)"?$', text, re.MULTILINE))
    return {
        "id": values.get("ID", "unknown"),
        "version": values.get("VERSION_ID", ""),
        "name": values.get("PRETTY_NAME", "unknown"),
        "like": values.get("ID_LIKE", ""),
    }


def parse_meminfo(text: str) -> dict[str, int]:
    """Bytes of total and available memory and of swap."""
    kib = {name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
    return {
        "total": kib.get("MemTotal", 0) * 1024,
        "available": kib.get("MemAvailable", 0) * 1024,
        "swap": kib.get("SwapTotal", 0) * 1024,
    }


def parse_systemd_version(text: str) -> int | None:
    """The major version in the first line of `systemctl --version`, None when there is none."""
    match = re.match(r"systemd (\d+)", text)
    return int(match.group(1)) if match else None


def systemd(runner: Runner = run) -> dict[str, Any]:
    """Version, and whether it is what runs the machine."""
    code, text = runner(["systemctl", "--version"], COMMAND_LIMIT_S)
    return {
        "version": parse_systemd_version(text) if code == 0 else None,
        "running": Path("/run/systemd/system").is_dir(),
    }


def cgroup() -> dict[str, Any]:
    """Version of the control groups that systemd sees, and their controllers."""
    unified = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    return {"version": 2 if unified else 1, "controllers": read("/sys/fs/cgroup/cgroup.controllers").split()}


def python() -> dict[str, Any]:
    """The interpreter that gathers, and whether it can make environments."""
    have_venv = all(_has_module(name) for name in ("venv", "ensurepip"))
    return {"version": platform.python_version(), "executable": sys.executable, "venv": have_venv}


def _has_module(name: str) -> bool:
    from importlib.util import find_spec

    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def clock(runner: Runner = run) -> dict[str, Any]:
    """The time here and whether somebody keeps it right (None: nobody to ask)."""
    code, text = runner(["timedatectl", "show", "--property=NTPSynchronized", "--value"], COMMAND_LIMIT_S)
    synchronized = {"yes": True, "no": False}.get(text.strip()) if code == 0 else None
    return {"epoch": time.time(), "synchronized": synchronized, "zone": time.strftime("%Z")}


def users(names: Iterable[str]) -> dict[str, dict[str, Any] | None]:
    """Uid and groups (gids, its own among them) of each asked-for user, None when there is no such user."""
    return {name: _user(name) for name in names}


def _user(name: str) -> dict[str, Any] | None:
    try:
        found = pwd.getpwnam(name)
    except KeyError:
        return None
    return {"uid": found.pw_uid, "groups": sorted(os.getgrouplist(name, found.pw_gid))}


def package_lock() -> dict[str, Any] | None:
    """Who holds the package manager's lock: pid and process, None when nobody does."""
    path = "/var/lib/dpkg/lock-frontend"
    try:
        status = Path(path).stat()
    except OSError:
        return None
    wanted = (os.major(status.st_dev), os.minor(status.st_dev), status.st_ino)
    for pid, major, minor, inode in parse_locks(read("/proc/locks")):
        if (major, minor, inode) == wanted:
            return {"pid": pid, "process": read(f"/proc/{pid}/comm").strip() or "unknown"}
    return None


def parse_locks(text: str) -> list[tuple[int, int, int, int]]:
    """(pid, major, minor, inode) of each held lock in /proc/locks; waiting ones ("->") are left out."""
    rows = re.findall(
        r"^\d+: (?:POSIX|FLOCK|OFDLCK)\s+\S+\s+\S+\s+(\d+) ([0-9a-f]+):([0-9a-f]+):(\d+)", text, re.MULTILINE
    )
    return [(int(pid), int(major, 16), int(minor, 16), int(inode)) for pid, major, minor, inode in rows]


# --- disks --------------------------------------------------------------------------------------------------


def existing_parent(path: str) -> str:
    """The closest folder above (or at) `path` that exists."""
    here = Path(path)
    return str(next(folder for folder in (here, *here.parents, Path("/")) if folder.is_dir()))


def disk(path: str) -> dict[str, Any]:
    """Room at `path`, or where it will be: bytes, files, file system and how much `path` holds already."""
    here = existing_parent(path)
    room = os.statvfs(here)
    mount, kind, options = mount_of(here, read("/proc/self/mounts"))
    return {
        "path": path,
        "mount": mount,
        "kind": kind,
        "read_only": "ro" in options.split(","),
        "free": room.f_bavail * room.f_frsize,
        "total": room.f_blocks * room.f_frsize,
        "files": room.f_files,
        "files_free": room.f_favail,
        "held": held(path),
    }


def held(path: str) -> int:
    """Bytes allocated by the files below `path` (links not followed)."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):
                total += Path(folder, name).lstat().st_blocks * 512
    return total


def mount_of(path: str, mounts: str) -> tuple[str, str, str]:
    """Mount point, file system and options of a path, given the text of /proc/self/mounts."""
    best = ("/", "unknown", "")
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 4:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), fields[1])
        inside = point == "/" or path == point or path.startswith(point + "/")
        if inside and len(point) >= len(best[0]):
            best = (point, fields[2], fields[3])
    return best


# --- ports and processes ------------------------------------------------------------------------------------


def parse_listening(text: str) -> list[tuple[str, int, str]]:
    """(address, port, socket inode) of each listening socket in /proc/net/tcp or /proc/net/tcp6."""
    found = []
    for line in text.splitlines()[1:]:
        fields = line.split()
        if len(fields) > 9 and fields[3] == "0A":
            address, port = fields[1].split(":")
            found.append((_address(address), int(port, 16), fields[9]))
    return found


def _address(text: str) -> str:
    raw = b"".join(struct.pack("=I", int(text[start : start + 8], 16)) for start in range(0, len(text), 8))
    return socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)


def socket_owners(inodes: Iterable[str]) -> dict[str, int]:
    """Pid that holds each socket (root sees all, others their own)."""
    wanted = {f"socket:[{inode}]": inode for inode in inodes}
    owners: dict[str, int] = {}
    for pid in pids():
        for target in _open_files(pid):
            if target in wanted:
                owners.setdefault(wanted[target], pid)
    return owners


def pids() -> list[int]:
    """All processes."""
    return sorted(int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())


def _open_files(pid: int) -> list[str]:
    """What a process's descriptors point to; empty when it is gone or not ours to see."""
    targets = []
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                targets.append(str(link.readlink()))
    except OSError:
        return []
    return targets


def listening() -> list[dict[str, Any]]:
    """Listening TCP sockets with process, pid and systemd unit, by port."""
    rows = parse_listening(read("/proc/net/tcp")) + parse_listening(read("/proc/net/tcp6"))
    owners = socket_owners(inode for _, _, inode in rows)
    found = []
    for address, port, inode in rows:
        pid = owners.get(inode)
        found.append({"address": address, "port": port, "pid": pid, **process(pid)})
    return sorted(found, key=lambda row: (row["port"], row["address"]))


def process(pid: int | None) -> dict[str, str | None]:
    """Name and unit of a process; None when unknown."""
    if pid is None:
        return {"process": None, "unit": None}
    unit = parse_unit(read(f"/proc/{pid}/cgroup"))
    return {"process": read(f"/proc/{pid}/comm").strip() or None, "unit": unit}


def parse_unit(text: str) -> str | None:
    """The service in a process's /proc/<pid>/cgroup, None when it runs in none."""
    match = re.search(r"([^/\n]+\.service)", text)
    return match.group(1) if match else None


def leftovers(pattern: str) -> list[dict[str, Any]]:
    """Processes outside any unit whose command line matches `pattern`: servers that somebody left behind."""
    if not pattern:
        return []
    wanted = re.compile(pattern)
    mine = {os.getpid(), os.getppid()}
    found = []
    for pid in pids():
        command = read(f"/proc/{pid}/cmdline").replace("\0", " ").strip()
        if pid in mine or not command or not wanted.search(command):
            continue
        unit = parse_unit(read(f"/proc/{pid}/cgroup"))
        if unit is None or not unit.startswith("bringup-"):
            found.append({"pid": pid, "process": read(f"/proc/{pid}/comm").strip(), "unit": unit})
    return found


# --- GPUs ---------------------------------------------------------------------------------------------------

NVIDIA_VENDOR = "0x10de"
GPU_CLASSES = ("0x0300", "0x0302")
SWITCH_CLASS = "0x0680"
LIBRARY_FOLDERS = ("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64")
MPS_PROGRAM = "nvidia-cuda-mps"
"""The beginning of the names of the multi-process service's two programs, as /proc/<pid>/comm cuts it."""

DEVICES = ("nvidiactl", "nvidia-uvm", "nvidia[0-9]*")
"""Names below /dev that CUDA opens."""

ACCESS_LIST = "system.posix_acl_access"
ACCESS_KINDS: Mapping[int, str] = {0x02: "user", 0x04: "owning group", 0x08: "group"}
"""Tags of an access list's entries that the mode does not hold (linux/posix_acl.h)."""


def pci(base: Path = Path("/sys/bus/pci/devices")) -> dict[str, Any]:
    """Addresses of NVIDIA GPUs and NVSwitches on the bus, and the kernel driver of each GPU."""
    gpus: list[dict[str, Any]] = []
    switches: list[str] = []
    for folder in sorted(base.glob("*")):
        if read(folder / "vendor").strip() != NVIDIA_VENDOR:
            continue
        kind = read(folder / "class").strip()[:6]
        if kind in GPU_CLASSES:
            link = folder / "driver"
            driver = link.resolve().name if link.exists() else None
            near = read(folder / "numa_node").strip()
            gpus.append(
                {
                    "address": folder.name,
                    "device": read(folder / "device").strip(),
                    "driver": driver,
                    "numa_node": int(near) if near.lstrip("-").isdecimal() else None,
                }
            )
        elif kind == SWITCH_CLASS:
            switches.append(folder.name)
    return {"gpus": gpus, "switches": switches}


def parse_smi(text: str) -> dict[str, Any]:
    """Driver, CUDA version and one row a GPU from `nvidia-smi -q -x`. Raises ET.ParseError."""
    root = ET.fromstring(text)
    return {
        "driver": root.findtext("driver_version"),
        "cuda": root.findtext("cuda_version"),
        "attached": _number(root.findtext("attached_gpus")),
        "gpus": [_gpu(node) for node in root.findall("gpu")],
    }


def _gpu(node: ET.Element) -> dict[str, Any]:
    def text(path: str) -> str | None:
        value = node.findtext(path)
        return None if value in (None, "N/A", "[N/A]", "Unknown Error") else value

    def total(*paths: str) -> int | None:
        """The first of `paths` that this driver reports, as a number."""
        return next((value for value in (_number(text(path)) for path in paths) if value is not None), None)

    return {
        "name": text("product_name"),
        "uuid": text("uuid"),
        "minor": _number(text("minor_number")),
        "address": node.get("id"),
        "pci_id": text("pci/pci_device_id"),
        "memory": _mebibytes(text("fb_memory_usage/total")),
        "memory_used": _mebibytes(text("fb_memory_usage/used")),
        "persistence": text("persistence_mode"),
        "compute_mode": text("compute_mode"),
        "mig": text("mig_mode/current_mig"),
        "ecc": text("ecc_mode/current_ecc"),
        "ecc_uncorrected": total(
            "ecc_errors/aggregate/sram_uncorrectable_parity", "ecc_errors/aggregate/dram_uncorrectable"
        ),
        "ecc_uncorrected_since_boot": total("ecc_errors/volatile/dram_uncorrectable"),
        "remap_pending": text("remapped_rows/remapped_row_pending"),
        "remap_failed": text("remapped_rows/remapped_row_failure"),
        "recovery": text("gpu_recovery_action"),
        "fabric_state": text("fabric/state"),
        "fabric_status": text("fabric/status"),
        "power_limit_w": _number(
            text("gpu_power_readings/current_power_limit") or text("power_readings/power_limit")
        ),
        "power_default_w": _number(
            text("gpu_power_readings/default_power_limit") or text("power_readings/default_power_limit")
        ),
        "clocks_mhz": _number(text("applications_clocks/graphics_clock")),
        "clocks_default_mhz": _number(text("default_applications_clocks/graphics_clock")),
        "slowed": slowed(node),
        "ecc_pending": text("ecc_mode/pending_ecc"),
        "temperature_c": _number(text("temperature/gpu_temp")),
        "link_width": _number(text("pci/pci_gpu_link_info/link_widths/current_link_width")),
        "link_width_max": _number(text("pci/pci_gpu_link_info/link_widths/max_link_width")),
        "processes": [
            {
                "pid": _number(row.findtext("pid")),
                "name": row.findtext("process_name"),
                "memory": _mebibytes(row.findtext("used_memory")),
                "unit": parse_unit(read(f"/proc/{_number(row.findtext('pid'))}/cgroup")),
            }
            for row in node.findall("processes/process_info")
        ],
    }


SLOWDOWNS = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")
"""Reasons for lower clocks that are a fault; that a GPU idles or is at its power cap is none."""


def slowed(node: ET.Element) -> list[str]:
    """What holds a GPU's clocks down right now, of `SLOWDOWNS` (drivers before 535 say "throttle")."""
    return [
        name
        for name in SLOWDOWNS
        for form in (
            "clocks_event_reasons/clocks_event_reason",
            "clocks_throttle_reasons/clocks_throttle_reason",
        )
        if node.findtext(f"{form}_{name}") == "Active"
    ]


def _number(text: str | None) -> int | None:
    match = re.match(r"\s*(\d+)", text or "")
    return int(match.group(1)) if match else None


def _mebibytes(text: str | None) -> int | None:
    number = _number(text)
    return None if number is None else number * 1024 * 1024


def parse_module_version(text: str) -> str | None:
    """The running kernel module's version in /proc/driver/nvidia/version."""
    match = re.search(r"Kernel Module(?:\s+for\s+\S+)?\s+(\d+\.\d+(?:\.\d+)?)", text)
    return match.group(1) if match else None


def parse_xids(text: str) -> list[dict[str, Any]]:
    """The newest Xid errors in a kernel log: number, PCI address and the line."""
    rows = re.findall(r"(NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+).*)", text)
    return [{"xid": int(number), "address": at, "line": line} for line, at, number in rows[-XID_LINES_KEPT:]]


KERNEL_FAULTS: tuple[tuple[str, str], ...] = (
    ("switch", r"SXid \(PCI:[^)]*\): \d+, Fatal"),
    ("init", r"RmInitAdapter failed|rm_init_adapter failed"),
    ("bar", r"BAR\d+ is 0M|PCI I/O region assigned to your NVIDIA device is invalid"),
    ("fallen", r"has fallen off the bus"),
    ("slot", r"Detected insufficient power on the PCIe slot"),
)
"""Kinds of lines in the kernel log, beside Xid errors, that mean that a GPU, switch or network card cannot be used."""


def parse_kernel_faults(text: str) -> list[dict[str, str]]:
    """The newest lines of each kind of `KERNEL_FAULTS`; Xid lines are left to `parse_xids`."""
    found = []
    for kind, pattern in KERNEL_FAULTS:
        lines = [line for line in text.splitlines() if re.search(pattern, line) and "NVRM: Xid" not in line]
        found += [{"kind": kind, "line": line.strip()} for line in lines[-3:]]
    return found


def parse_nvlink(text: str) -> list[dict[str, int]]:
    """Number of NVLinks of each GPU and how many of them are inactive, from `nvidia-smi nvlink -s`; a GPU
    without links is left out."""
    found: list[dict[str, int]] = []
    for line in text.splitlines():
        if match := re.match(r"GPU (\d+):", line):
            found.append({"gpu": int(match.group(1)), "links": 0, "inactive": 0})
        elif found and re.match(r"\s+Link \d+:", line):
            found[-1]["links"] += 1
            found[-1]["inactive"] += "inactive" in line.lower()
        elif found and "all links are inactive" in line.lower():
            found[-1]["links"] = found[-1]["inactive"] = max(1, found[-1]["links"])
    return found


def gpu(runner: Runner = run, root: Path = SLASH) -> dict[str, Any]:
    """All about the GPUs; on a node without any, two empty lists and no command run."""
    bus = pci(root / "sys/bus/pci/devices")
    module = read(root / "proc/driver/nvidia/version")
    tool = _tool("nvidia-smi", root)
    facts: dict[str, Any] = {
        "pci": bus,
        "module": parse_module_version(module),
        "open_module": "Open Kernel Module" in module if module else None,
        "library": library_version(root),
        "linkable": linkable(root),
        "nouveau": (root / "sys/module/nouveau").is_dir(),
        "devices": devices(root),
        "uvm": (root / "dev/nvidia-uvm").exists(),
        "tool": tool,
        "smi": None,
        "smi_error": None,
        "nvlink": [],
        "xids": [],
        "kernel_faults": [],
        "kernels": kernels(root),
        "secure_boot": None,
        "mps": None,
        "units": {},
        "fabric_manager": None,
    }
    if not (bus["gpus"] or tool or module):
        return facts
    facts.update(_smi(runner) if tool else {})
    if facts["smi"]:
        facts["nvlink"] = parse_nvlink(runner(["nvidia-smi", "nvlink", "-s"], GPU_COMMAND_LIMIT_S)[1])
    log = runner(["journalctl", "-k", "-b", "-q", "-o", "cat", "--grep", LOG_WORDS], COMMAND_LIMIT_S)[1]
    facts["xids"], facts["kernel_faults"] = parse_xids(log), parse_kernel_faults(log)
    for unit in ("nvidia-persistenced", "nvidia-fabricmanager"):
        facts["units"][unit] = runner(["systemctl", "is-active", unit], COMMAND_LIMIT_S)[1].strip()
    facts["secure_boot"] = secure_boot(runner, root)
    facts["mps"] = next((pid for pid in pids() if read(f"/proc/{pid}/comm").startswith(MPS_PROGRAM)), None)
    code, text = runner(["nv-fabricmanager", "--version"], COMMAND_LIMIT_S)
    match = re.search(r"(\d+\.\d+(?:\.\d+)?)", text) if code == 0 else None
    facts["fabric_manager"] = match.group(1) if match else None
    return facts


def devices(root: Path = SLASH) -> list[dict[str, Any]]:
    """Device nodes that CUDA opens: path, who owns it (numbers and names), mode, and what an access list adds."""
    found = []
    for path in sorted(path for name in DEVICES for path in (root / "dev").glob(name)):
        with suppress(OSError):
            seen = path.stat()
            found.append(
                {
                    "path": f"/{path.relative_to(root)}",
                    "uid": seen.st_uid,
                    "gid": seen.st_gid,
                    "owner": _name_of(pwd.getpwuid, seen.st_uid),
                    "group": _name_of(grp.getgrgid, seen.st_gid),
                    "mode": stat.S_IMODE(seen.st_mode),
                    "access": _access_list(path),
                }
            )
    return found


def _name_of(look_up: Callable[[int], Sequence[Any]], number: int) -> str:
    """A user's or group's name; the number where it has none."""
    try:
        return str(look_up(number)[0])
    except KeyError:
        return str(number)


def _access_list(path: Path) -> list[dict[str, Any]]:
    if not hasattr(os, "getxattr"):
        return []
    with suppress(OSError):
        return parse_access_list(os.getxattr(path, ACCESS_LIST))
    return []


def parse_access_list(raw: bytes) -> list[dict[str, Any]]:
    """Entries of a file's access list that its mode does not hold: kind ("user", "group", "owning group"), id (None
    for the owning group) and rights (three bits). The mode's group bits are then the list's mask (acl(5))."""
    rows = struct.iter_unpack("<HHI", raw[4 : len(raw) - (len(raw) - 4) % 8])
    return [
        {"kind": ACCESS_KINDS[tag], "id": None if tag == 0x04 else number, "rights": rights}
        for tag, rights, number in rows
        if tag in ACCESS_KINDS
    ]


def _tool(name: str, root: Path) -> str | None:
    if root == SLASH:
        return shutil.which(name)
    return str(root / "usr/bin" / name) if (root / "usr/bin" / name).exists() else None


def library_version(root: Path = SLASH) -> str | None:
    """The version of the driver's management library on the disk, the newest when there are more."""
    found = [
        match.group(1)
        for folder in LIBRARY_FOLDERS
        for path in (root / folder).glob("libnvidia-ml.so.*.*")
        if (match := re.fullmatch(r"libnvidia-ml\.so\.(\d+\.\d+(?:\.\d+)?)", path.name))
    ]
    return max(found, key=lambda version: [int(part) for part in version.split(".")], default=None)


LINK_FOLDERS = (*LIBRARY_FOLDERS, "usr/lib", "usr/local/cuda/lib64/stubs", "opt/bringup/cuda/lib")


def linkable(root: Path = SLASH) -> bool:
    """Whether `-lcuda` can be linked: a `libcuda.so` where linkers and servers look."""
    toolkits = (root / "usr/local").glob("cuda-*/lib64/stubs/libcuda.so")
    return any((root / folder / "libcuda.so").exists() for folder in LINK_FOLDERS) or any(toolkits)


def kernels(root: Path = SLASH) -> list[dict[str, Any]]:
    """Installed kernels: release, whether it is the one that runs, has headers, and has an nvidia module."""
    base = root / "lib/modules"
    running = platform.release()
    return [
        {
            "release": folder.name,
            "running": folder.name == running,
            "headers": (folder / "build").exists(),
            "nvidia": any(folder.glob("updates/dkms/nvidia.ko*"))
            or any(folder.glob("kernel/*/nvidia*/nvidia.ko*"))
            or any(folder.glob("kernel/drivers/video/nvidia.ko*")),
        }
        for folder in (sorted(base.iterdir()) if base.is_dir() else [])
        if folder.is_dir()
    ]


def secure_boot(runner: Runner, root: Path = SLASH) -> bool | None:
    """Whether the firmware lets only signed modules in; None when nobody can say."""
    variables = sorted((root / "sys/firmware/efi/efivars").glob("SecureBoot-*"))
    for path in variables:
        with suppress(OSError):
            return path.read_bytes()[-1:] == b"\1"
    code, text = runner(["mokutil", "--sb-state"], COMMAND_LIMIT_S)
    return "enabled" in text.lower() if code == 0 else None


def _smi(runner: Runner) -> dict[str, Any]:
    code, text = runner(["nvidia-smi", "-q", "-x"], GPU_COMMAND_LIMIT_S)
    if code == 0:
        try:
            return {"smi": parse_smi(text)}
        except ET.ParseError as error:
            return {"smi_error": f"nvidia-smi -q -x gave no valid XML: {error}"}
    reason = f"took longer than {GPU_COMMAND_LIMIT_S} s" if code == 124 else " ".join(text.split())[:300]
    return {"smi_error": reason or f"exit code {code}"}


# --- memory nodes and settings ------------------------------------------------------------------------------


def numa(root: Path = SLASH) -> list[dict[str, Any]]:
    """Memory nodes: number, CPUs as the kernel lists them ("" for memory alone) and bytes."""
    found = []
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        match = re.search(r"MemTotal:\s+(\d+) kB", read(folder / "meminfo"))
        found.append(
            {
                "node": int(folder.name[4:]),
                "cpus": read(folder / "cpulist").strip(),
                "memory": int(match.group(1)) * 1024 if match else 0,
            }
        )
    return sorted(found, key=lambda row: int(row["node"]))


def settings(root: Path = SLASH) -> dict[str, Any]:
    """Settings that matter to servers: page size, huge pages, their transparent use, /dev/shm, proxies."""
    transparent = re.search(r"\[(\w+)\]", read(root / "sys/kernel/mm/transparent_hugepage/enabled"))
    return {
        "page_size": os.sysconf("SC_PAGE_SIZE"),
        "huge_pages": int(read(root / "proc/sys/vm/nr_hugepages").strip() or 0),
        "transparent_huge_pages": transparent.group(1) if transparent else None,
        "shm": _room("/dev/shm"),
        "proxies": parse_proxies(read(root / "etc/environment")),
    }


def _room(path: str) -> dict[str, int] | None:
    with suppress(OSError):
        room = os.statvfs(path)
        return {"total": room.f_blocks * room.f_frsize, "free": room.f_bavail * room.f_frsize}
    return None


def parse_proxies(text: str) -> dict[str, str]:
    """Proxy variables of /etc/environment, by name in lower case; what may be a password is left out."""
    rows = re.findall(r'^(?:export )?((?:https?|no|all)_proxy)="?([^"\n]*)"?$', text, re.MULTILINE | re.I)
    return {name.lower(): re.sub(r"//[^@/]*@", "//", value) for name, value in rows}


# --- all together -------------------------------------------------------------------------------------------


def gather(request: Mapping[str, Any], runner: Runner = run, root: Path = SLASH) -> dict[str, Any]:
    """All facts. `request`: `paths` (disks to look at), `users` and `programs` (names), `leftovers` (a
    pattern of command lines), `linking` (see there), and what `surroundings.gather` takes. Hardware is read below
    `root`."""
    return {
        "schema_version": SCHEMA_VERSION,
        "host": socket.gethostname(),
        "uid": os.geteuid(),
        "os": parse_os_release(read("/etc/os-release")),
        "arch": platform.machine(),
        "kernel": platform.release(),
        "systemd": systemd(runner),
        "cgroup": cgroup(),
        "python": python(),
        "cpus": os.cpu_count() or 0,
        "memory": parse_meminfo(read(root / "proc/meminfo")),
        "numa": numa(root),
        "settings": settings(root),
        "disks": [disk(path) for path in request.get("paths", [])],
        "listening": listening(),
        "leftovers": leftovers(request.get("leftovers", "")),
        "users": users(request.get("users", [])),
        "package_lock": package_lock(),
        "clock": clock(runner),
        "gpu": gpu(runner, root),
        "programs": {name: shutil.which(name) for name in request.get("programs", [])},
        "linking": linking.gather(request.get("linking") or (), runner, root),
        **surroundings.gather(request, runner, root),
    }


if __name__ == "__main__":
    json.dump(gather(json.load(sys.stdin) if not sys.stdin.isatty() else {}), sys.stdout, indent=1)
