"""Stand-ins of the other programs that a twin has: kernel modules, kernel log, fabric manager, persistence.

Each says what it is when asked for its version. What they change is kept in the twin's `kernel.json`, or
under /run/twin, and is gone after a reboot, as it is on a machine.
"""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.lab.twin.node import state, trees

REAL_TIMEDATECTL = "/usr/bin/timedatectl"
REAL_JOURNALCTL = "/usr/bin/journalctl"
REAL_NUMACTL = "/usr/bin/numactl"
REAL_GETCONF = "/usr/bin/getconf"
FABRIC = "/run/twin/fabric"
PERSISTENCE = "/run/twin/persistenced"
NVIDIA_MODULES = (
    "nvidia",
    "nvidia-uvm",
    "nvidia_uvm",
    "nvidia-modeset",
    "nvidia_modeset",
    "nvidia-drm",
    "nvidia-peermem",
)


def fail(text: str, code: int = 1) -> int:
    """Prints to stderr and gives the exit code."""
    print(text, file=sys.stderr)
    return code


def say_kernel(text: str) -> None:
    """A line into the twin's kernel log."""
    path = state.at("/var/lib/twin/kernel.log")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{text}\n")


def kernel_log() -> list[str]:
    """The lines since boot: what the hardware says, then what was done here."""
    lines = [str(line) for line in state.hardware().get("kernel_log", [])]
    try:
        return lines + state.at("/var/lib/twin/kernel.log").read_text(encoding="utf-8").splitlines()
    except OSError:
        return lines


def refresh() -> None:
    """Writes the trees and device nodes anew, after something was loaded or unloaded."""
    worn, kernel = state.hardware(), state.kernel()
    base = state.root() if state.root() != Path("/") else Path("/run/twin/root")
    trees.write(worn, kernel, base)
    trees.device_nodes(worn, kernel, state.root())
    count = 0 if kernel["module"] is None else len(state.usable(worn))
    trees.text(state.at("/var/lib/twin/gpu-count"), str(count))


# --- kernel modules -----------------------------------------------------------------------------------------


def built() -> dict[str, Any]:
    """The module that a package built for the running kernel (version, open, signed); empty: none."""
    return state.read_json(state.module_file())


def load_nvidia() -> str:
    """Loads the built module. Returns why it cannot be, "" when it is loaded."""
    worn, kernel, module = state.hardware(), state.kernel(), built()
    if kernel["module"] is not None:
        return ""
    if not module:
        return f"modprobe: FATAL: Module nvidia not found in directory /lib/modules/{state.kernel_release()}"
    if worn.get("nouveau"):
        say_kernel("NVRM: GPU is already bound to nouveau.")
        return "modprobe: ERROR: could not insert 'nvidia': No such device"
    if worn.get("secure_boot") and not worn.get("module_signed"):
        say_kernel("Loading of module with unavailable key is rejected")
        return "modprobe: ERROR: could not insert 'nvidia': Key was rejected by service"
    if not state.on_bus(worn):
        say_kernel("NVRM: No NVIDIA GPU found.")
        return "modprobe: ERROR: could not insert 'nvidia': No such device"
    if worn.get("needs_open") and not module["open"]:
        say_kernel("NVRM: The NVIDIA GPU requires use of the NVIDIA open kernel modules.")
        return "modprobe: ERROR: could not insert 'nvidia': No such device"
    version = worn.get("loaded_version") or module["version"]
    is_open = bool(module["open"]) and not worn.get("loaded_closed")
    kernel["module"] = {"version": version, "open": is_open}
    state.save_kernel(kernel)
    flavour = "Open Kernel Module" if is_open else "Kernel Module"
    say_kernel(
        f"NVRM: loading NVIDIA UNIX {flavour} for {worn.get('arch', 'x86_64')}  {version}  (stand-in of a twin)"
    )
    refresh()
    return ""


def modprobe(words: Sequence[str]) -> int:
    """`modprobe [-r] nvidia...`; any other module: this kernel has none."""
    names = [word for word in words if not word.startswith("-")]
    quiet = any(word in ("-q", "--quiet") for word in words)
    if any(word in ("-V", "--version") for word in words):
        print("modprobe, stand-in of a bringup twin")
        return 0
    for name in names[:1]:
        if any(word in ("-r", "--remove") for word in words):
            return rmmod([name])
        if name in NVIDIA_MODULES:
            problem = load_nvidia()
            if problem:
                return fail("" if quiet else problem)
        elif name not in ("nouveau",) and not (state.at("/sys/module") / name.replace("-", "_")).exists():
            return fail(
                "" if quiet else f"modprobe: FATAL: Module {name} not found in directory /lib/modules"
            )
    return 0


def rmmod(words: Sequence[str]) -> int:
    """Unloads the module, unless somebody computes."""
    from tests.lab.twin.node import smi

    name = next((word for word in words if not word.startswith("-")), "")
    kernel = state.kernel()
    if name not in NVIDIA_MODULES or kernel["module"] is None:
        return fail(f"rmmod: ERROR: Module {name} is not currently loaded")
    if smi.processes():
        return fail(f"rmmod: ERROR: Module {name} is in use")
    if name == "nvidia":
        kernel["module"] = None
        state.save_kernel(kernel)
        state.at(FABRIC).unlink(missing_ok=True)
        refresh()
    return 0


def lsmod(words: Sequence[str]) -> int:
    """What /sys/module has of ours."""
    print("Module                  Size  Used by")
    if state.hardware().get("nouveau"):
        print("nouveau              3096576  1")
    if state.loaded() is not None:
        print("nvidia_uvm           2076672  0")
        print("nvidia              14381056  1 nvidia_uvm")
    return 0


def modinfo(words: Sequence[str]) -> int:
    """`modinfo [-F field] [-k kernel] nvidia`: the built module."""
    rest, field, release = list(words), "", state.kernel_release()
    names: list[str] = []
    while rest:
        word = rest.pop(0)
        if word in ("-F", "--field"):
            field = rest.pop(0)
        elif word in ("-k", "--set-version"):
            release = rest.pop(0)
        else:
            names.append(word)
    path = state.at(f"/lib/modules/{release}/updates/dkms/nvidia.ko")
    module = state.read_json(path)
    if "nvidia" not in names or not module:
        return fail(f"modinfo: ERROR: Module {' '.join(names)} not found.")
    values = {
        "filename": str(path),
        "version": module["version"],
        "license": "Dual MIT/GPL" if module["open"] else "NVIDIA",
        "description": "stand-in of a bringup twin",
        "signer": "twin" if state.hardware().get("module_signed") else "",
    }
    print(
        values.get(field, "")
        if field
        else "\n".join(f"{key}:{'':<10}{value}" for key, value in values.items())
    )
    return 0


def dkms_build(words: Sequence[str]) -> int:
    """What a driver package's installation does: `dkms-build VERSION open|closed`, or `dkms-build --remove`."""
    path = state.module_file()
    if words[:1] == ["--remove"]:
        path.unlink(missing_ok=True)
        return 0
    release = state.kernel_release()
    if not state.at(f"/lib/modules/{release}/build").exists():
        print(
            f"Module build for kernel {release} was skipped since the kernel headers for it "
            "do not seem to be installed."
        )
        return 0
    version, flavour = words
    state.write_json(path, {"stand_in": True, "version": version, "open": flavour == "open"})
    print(f"nvidia/{version}, {release}: installed (stand-in of a bringup twin)")
    return 0


def dkms(words: Sequence[str]) -> int:
    """`dkms status`."""
    module = built()
    if module:
        print(
            f"nvidia/{module['version']}, {state.kernel_release()}, {state.hardware().get('arch')}: installed"
        )
    return 0


def mokutil(words: Sequence[str]) -> int:
    """`mokutil --sb-state`, and `mokutil --test-key FILE`: a twin's key is enrolled when its modules are signed."""
    if words[:1] == ["--test-key"]:
        is_known = bool(state.hardware().get("module_signed"))
        print(f"{words[1]} is {'already' if is_known else 'not'} enrolled")
        return 0
    print(f"SecureBoot {'enabled' if state.hardware().get('secure_boot') else 'disabled'}")
    return 0


# --- kernel log ---------------------------------------------------------------------------------------------


def dmesg(words: Sequence[str]) -> int:
    """The twin's kernel log."""
    if any(word in ("-V", "--version") for word in words):
        print("dmesg, stand-in of a bringup twin")
        return 0
    print("\n".join(kernel_log()))
    return 0


def journalctl(words: Sequence[str]) -> int:
    """The kernel's part is the twin's; everything else is the real journal's."""
    if not any(word in ("-k", "--dmesg") or re.fullmatch(r"-[a-z]*k[a-z]*", word) for word in words):
        os.execv(REAL_JOURNALCTL, [REAL_JOURNALCTL, *words])
    pattern = ""
    for number, word in enumerate(words):
        if word in ("-g", "--grep"):
            pattern = words[number + 1]
        elif word.startswith("--grep="):
            pattern = word.partition("=")[2]
    found = [
        line for line in kernel_log() if re.search(pattern, line, 0 if pattern != pattern.lower() else re.I)
    ]
    sys.stdout.write("".join(f"{line}\n" for line in found))
    return 0 if found else 1


def timedatectl(words: Sequence[str]) -> int:
    """Whether somebody keeps the clock right is the twin's; all else is the real program's."""
    if "show" in words and any("NTPSynchronized" in word for word in words):
        value = "no" if state.hardware().get("clock_not_kept") else "yes"
        print(value if "--value" in words else f"NTPSynchronized={value}")
        return 0
    return os.execv(REAL_TIMEDATECTL, [REAL_TIMEDATECTL, *words])


def getconf(words: Sequence[str]) -> int:
    """The page size is the recorded kernel's; all else is the real program's."""
    kib = state.hardware().get("page_size_kib")
    if list(words) in (["PAGESIZE"], ["PAGE_SIZE"]) and kib:
        print(kib * 1024)
        return 0
    return os.execv(REAL_GETCONF, [REAL_GETCONF, *words])


def numactl(words: Sequence[str]) -> int:
    """The real program, unless the hardware says that the kernel refuses."""
    if state.hardware().get("memory_policy_denied"):
        return fail("set_mempolicy: Operation not permitted\nsetting membind: Operation not permitted")
    return os.execv(REAL_NUMACTL, [REAL_NUMACTL, *words])


def docker(words: Sequence[str]) -> int:
    """A container engine with the containers that the hardware names; it starts none."""
    found = state.hardware().get("containers") or {}
    rows = found.get("running", [])
    if words[:1] == ["ps"]:
        print("\n".join(row["name"] for row in rows))
    elif words[:1] == ["inspect"]:
        print(json.dumps([_container(row) for row in rows if row["name"] in words]))
    elif words[:1] == ["info"]:
        names = ["runc", *(["nvidia"] if found.get("gives_gpus") else [])]
        print(json.dumps({"Runtimes": {name: {} for name in names}, "Name": "stand-in of a bringup twin"}))
    else:
        return fail("docker: stand-in of a bringup twin: it starts no containers")
    return 0


def _container(row: dict[str, Any]) -> dict[str, Any]:
    asked = [{"Driver": "nvidia", "Count": -1, "Capabilities": [["gpu"]]}] if row.get("gpus") else None
    return {
        "Name": f"/{row['name']}",
        "Config": {"Image": row["image"]},
        "HostConfig": {"Runtime": "runc", "DeviceRequests": asked, "Devices": []},
    }


# --- daemons ------------------------------------------------------------------------------------------------


def _serve_until_told(mark: str, content: str) -> None:
    """Keeps `mark` while running."""
    path = state.at(mark)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


def fabric_manager(words: Sequence[str]) -> int:
    """nv-fabricmanager: refuses to serve a driver of another version, and a machine without NVSwitches."""
    package = state.read_json(state.at("/usr/share/nvidia/nvswitch/stand-in.json"))
    version = str(state.hardware().get("fabric_manager_version") or package.get("version", ""))
    if any(word in ("-v", "--version") for word in words):
        print(f"Fabric Manager version is : {version}")
        return 0
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    module = state.loaded()
    if module is None:
        return fail("request to query NVSwitch device information from NVSwitch driver failed (stand-in)")
    if not state.hardware().get("switches"):
        return fail("failed to initialize: NV_WARN_NOTHING_TO_DO (stand-in)")
    if module["version"] != version:
        return fail(
            f"fabric manager NVIDIA GPU driver interface version {version} don't match with driver version "
            f"{module['version']}. Please update with matching NVIDIA driver package."
        )
    if state.hardware().get("fabric_manager_fails"):
        return fail(str(state.hardware()["fabric_manager_fails"]))
    print(f"Successfully configured all the available NVSwitches (stand-in, {version})", flush=True)
    # The fabric stays as it was trained when the manager goes: only a reset undoes it.
    _serve_until_told(FABRIC, version)
    return 0


def persistenced(words: Sequence[str]) -> int:
    """nvidia-persistenced: persistence mode of every GPU for as long as it runs."""
    if "--version" in words:
        print("nvidia-persistenced: stand-in of a bringup twin")
        return 0
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    if state.loaded() is None:
        return fail("nvidia-persistenced failed to initialize. Check syslog for more details. (stand-in)")
    if state.hardware().get("needs_root_persistence") and os.geteuid() != 0:
        return fail("Failed to open libnvidia-cfg.so.1: permission denied. (stand-in)")
    _serve_until_told(PERSISTENCE, "")
    state.at(PERSISTENCE).unlink(missing_ok=True)
    return 0


LINKED_FROM = (
    "/usr/lib/{}-linux-gnu",
    "/lib/{}-linux-gnu",
    "/usr/lib64",
    "/lib64",
    "/usr/lib",
    "/usr/local/lib",
)


def compiler(words: Sequence[str]) -> int:
    """cc: says like a real one what it and its linker cannot find; what it makes says that it is no program."""
    if "-dumpversion" in words:
        print("12")
        return 0
    if state.hardware().get("no_libgcc"):
        return fail("ld: cannot find -lgcc: No such file or directory (stand-in)")
    folders = [word[2:] for word in words if word.startswith("-L")]
    folders += [folder for folder in os.environ.get("LIBRARY_PATH", "").split(":") if folder]
    folders += [place.format(platform.machine()) for place in LINKED_FROM]
    names = [word[2:] for word in words if word.startswith("-l")]
    gone = [
        name for name in names if not any(state.at(f"{folder}/lib{name}.so").exists() for folder in folders)
    ]
    if gone:
        return fail(
            "\n".join(f"ld: cannot find -l{name}: No such file or directory (stand-in)" for name in gone)
        )
    if "-o" not in words:
        return fail("cc: stand-in of a bringup twin: it compiles nothing")
    Path(words[words.index("-o") + 1]).write_text(
        "stand-in of a bringup twin: nothing was compiled\n", encoding="utf-8"
    )
    return 0


def nvcc(words: Sequence[str]) -> int:
    """`nvcc --version` as the real one prints it; it compiles nothing and says so."""
    release = Path(sys.argv[0]).resolve().parents[1].name.removeprefix("cuda-")
    release = release if re.fullmatch(r"\d+\.\d+", release) else "13.0"
    if "--version" in words or "-V" in words:
        print("nvcc: NVIDIA (R) Cuda compiler driver (stand-in of a bringup twin: it compiles nothing)")
        print(f"Cuda compilation tools, release {release}, V{release}.88")
        return 0
    return fail("nvcc fatal   : stand-in of a bringup twin: it compiles nothing")


def hold_dpkg_lock(words: Sequence[str]) -> int:
    """Holds the package manager's lock, as an unattended upgrade does; `hold-dpkg-lock SECONDS`."""
    import fcntl

    state.name_process("unattended-upgr")
    with state.at("/var/lib/dpkg/lock-frontend").open("w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        time.sleep(float(words[0]) if words else 600)
    return 0


def show_state(words: Sequence[str]) -> int:
    """The whole state, for people: `twin-state`."""
    print(json.dumps({"hardware": state.hardware(), "kernel": state.kernel()}, indent=1))
    return 0
