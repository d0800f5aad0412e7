"""Puts recorded hardware on a container: at its boot (`init`), and when the controller changed it (`refresh`).

`init` runs before systemd, as the container's first process; it must not fail for long, and never ask for
anything that a container without privileges has not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.lab.twin.node import state, tools, trees

GIVEN = Path("/etc/twin/hardware.json")
"""Where the controller's file is bound, read-only."""

BASE = Path("/run/twin/root")
STANDIN = "/usr/lib/twin/tests/lab/twin/node/standin"
LOCAL = {
    "/usr/local/sbin": (
        "modprobe",
        "rmmod",
        "lsmod",
        "modinfo",
        "dkms",
        "twin-refresh",
        "twin-state",
        "hold-dpkg-lock",
    ),
    "/usr/local/bin": ("dmesg", "journalctl", "mokutil", "dkms-build", "timedatectl", "getconf", "numactl"),
}
"""Programs that stand before the distribution's own in every PATH. nvidia-smi and the daemons come with packages."""

MOTD = "This is a twin of {host} ({platform}): a container that wears recorded hardware. No GPU is here.\n"
OTHER_KERNEL = "-twin"
"""How the names of kernels end that only a fault has."""

FAULTS = Path("/run/twin/faults")
"""Processes that faults have started, by pid."""

LITTER = Path("/run/twin/litter.json")
"""What faults have put on the twin: path -> the file's text before, None where there was none."""

OVER = Path("/run/twin/over")
"""Files that are bound over ones of the kernel."""

NO_INDEX = "# A stand-in engine comes from the twin's own disk.\n[global]\nno-index = true\n"
STEP_LIMIT_S = 600
UNITS = ("nvidia-persistenced", "nvidia-fabricmanager")


def init() -> int:
    """At boot: what the last boot had loaded is gone, changes that wait for a boot come true."""
    worn = state.read_json(GIVEN)
    if not worn:
        return tools.fail("twin: there is no /etc/twin/hardware.json")
    if state.at("/var/lib/twin/booted").exists():
        apply_next_boot(worn)
    state.write_json(state.at("/var/lib/twin/hardware.json"), worn)
    state.save_kernel({"module": None, "settings": {}})
    for path in ("/var/lib/twin/kernel.log", tools.FABRIC, tools.PERSISTENCE):
        state.at(path).unlink(missing_ok=True)
    install_programs(worn)
    trees.write(worn, state.kernel(), BASE)
    mount()
    tools.load_nvidia()
    tools.refresh()
    state.at("/var/lib/twin/booted").touch()
    return 0


def apply_next_boot(worn: dict[str, Any]) -> None:
    """Changes that a fault holds back until the machine boots again."""
    for dotted, value in worn.get("next_boot", {}).items():
        state.set_at(worn, dotted, value)


def refresh() -> int:
    """The controller wrote new hardware: show it, and start or stop what depends on it."""
    heal()
    worn = state.read_json(GIVEN)
    before = state.hardware()
    state.write_json(state.at("/var/lib/twin/hardware.json"), worn)
    kernel = state.kernel()
    module = tools.built()
    if kernel["module"] and (worn.get("nouveau") or worn.get("driver_unloaded") or not module):
        kernel["module"] = None
    elif kernel["module"]:
        kernel["module"]["version"] = worn.get("loaded_version") or module["version"]
        kernel["module"]["open"] = bool(module.get("open")) and not worn.get("loaded_closed")
    state.save_kernel(kernel)
    if not worn.get("driver_unloaded"):
        tools.load_nvidia()
    tools.refresh()
    install_programs(worn)
    put_litter(worn)
    if worn.get("fabric_state_lost"):
        state.at(tools.FABRIC).unlink(missing_ok=True)
    settle_units(worn, before)
    return 0


def heal() -> None:
    """Takes back what earlier faults did beside the hardware: processes, mounts, a proxy."""
    for mark in FAULTS.glob("*"):
        subprocess.run(
            ["kill", "-9", "--", f"-{mark.name}"], capture_output=True, timeout=STEP_LIMIT_S, check=False
        )
        mark.unlink()
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        source, target, *_ = line.split()
        if source == "twin-fault":
            subprocess.run(["umount", "-l", target], capture_output=True, timeout=STEP_LIMIT_S, check=False)
    pick_up_litter()
    path = Path("/etc/environment")
    kept = [
        line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("http_proxy=")
    ]
    path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")


def put_litter(worn: dict[str, Any]) -> None:
    """What faults put beside the hardware: files, variables of systemd, a small /dev/shm, packages half there."""
    before: dict[str, str | None] = {}
    if worn.get("shm_mib"):
        option = f"size={worn['shm_mib']}m,mode=1777"
        _quietly("mount", "-t", "tmpfs", "-o", option, "twin-fault", "/dev/shm")
    for name, row in state.files(worn).items():
        path = Path(name)
        if name.startswith(("/proc/", "/sys/")):
            if path.exists():
                over = OVER / name.lstrip("/")
                state.write_file(over, row)
                bind(str(over), name)
                before[name] = None
            continue
        before[name] = path.read_text(encoding="utf-8") if path.is_file() else None
        state.write_file(path, row)
    variables = worn.get("manager_environment", {})
    if variables:
        systemctl("set-environment", *(f"{name}={value}" for name, value in variables.items()))
    for package in worn.get("dpkg_unpacked", []):
        _quietly("sh", "-c", f"dpkg --force-depends --unpack /opt/twin/archive/{package}_*.deb")
    note = {"files": before, "variables": list(variables), "packages": worn.get("dpkg_unpacked", [])}
    state.write_json(LITTER, note)


def pick_up_litter() -> None:
    """Takes back what `put_litter` did."""
    found = state.read_json(LITTER)
    for name, text in found.get("files", {}).items():
        path = Path(name)
        if name.startswith(("/proc/", "/sys/")):
            _quietly("umount", "-l", name)
        elif text is None:
            path.unlink(missing_ok=True)
            _remove_empty(path.parent)
        else:
            path.write_text(text, encoding="utf-8")
    if found.get("variables"):
        systemctl("unset-environment", *found["variables"])
    for package in found.get("packages", []):
        _quietly("dpkg", "--force-all", "--purge", package)
    LITTER.unlink(missing_ok=True)


def _remove_empty(folder: Path) -> None:
    """Removes a folder and those above it for as long as they are there, empty, and no mount point."""
    while folder != Path("/"):
        try:
            folder.rmdir()
        except OSError:
            return
        folder = folder.parent


def _quietly(*argv: str) -> None:
    subprocess.run(argv, capture_output=True, timeout=STEP_LIMIT_S, check=False)


def fault(words: Sequence[str]) -> int:
    """Becomes a fault's command, in a group of its own, noted so that it can be ended."""
    FAULTS.mkdir(parents=True, exist_ok=True)
    if os.getpgrp() != os.getpid():
        os.setsid()
    (FAULTS / str(os.getpid())).touch()
    os.execvp(words[0], list(words))


def settle_units(worn: dict[str, Any], before: dict[str, Any]) -> None:
    """Restarts the daemons that a change concerns; one that the hardware says is stopped stays stopped."""
    stopped = worn.get("stopped_units", [])
    was_stopped = before.get("stopped_units", [])
    faults = (
        "fabric_manager_version",
        "fabric_manager_fails",
        "loaded_version",
        "nouveau",
        "driver_unloaded",
    )
    concerned = any(worn.get(name) != before.get(name) for name in faults)
    for unit in UNITS:
        if (
            not Path(f"/etc/systemd/system/{unit}.service").exists()
            and not Path(f"/lib/systemd/system/{unit}.service").exists()
        ):
            continue
        if unit in stopped:
            systemctl("stop", unit)
        elif unit in was_stopped or concerned or not _active(unit):
            systemctl("reset-failed", unit)
            systemctl("restart", unit)


def _active(unit: str) -> bool:
    return systemctl("is-active", "--quiet", unit) == 0


def systemctl(*words: str) -> int:
    """Exit code of systemctl; its output is nobody's business here."""
    return subprocess.run(
        ["systemctl", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=STEP_LIMIT_S,
        check=False,
    ).returncode


def install_programs(worn: dict[str, Any]) -> None:
    """Links that lead to the stand-ins, and what a login says."""
    for folder, names in LOCAL.items():
        for name in names:
            link = Path(folder, name)
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.is_symlink():
                link.symlink_to(STANDIN)
    for name, is_there in (
        ("docker", worn.get("containers")),
        ("cc", worn.get("gpus") and not worn.get("no_compiler")),
        ("c++", worn.get("gpus") and not worn.get("no_compiler")),
    ):
        link = Path("/usr/local/bin", name)
        if is_there and not link.is_symlink():
            link.symlink_to(STANDIN)
        elif not is_there:
            link.unlink(missing_ok=True)
    text = MOTD.format(host=worn["host"], platform=worn["platform"])
    Path("/etc/motd").write_text(text, encoding="utf-8")
    Path("/etc/issue.net").write_text(text, encoding="utf-8")
    Path("/etc/profile.d/twin.sh").write_text("[ -t 1 ] && cat /etc/motd\n", encoding="utf-8")
    if worn.get("gpus"):
        Path("/etc/pip.conf").write_text(NO_INDEX, encoding="utf-8")
    modules_folder(worn)
    sources = Path("/etc/apt/sources.list.d/twin.list")
    if not sources.exists():
        sources.write_text("deb [trusted=yes] file:/opt/twin/archive ./\n", encoding="utf-8")


def modules_folder(worn: dict[str, Any], modules: Path = Path("/lib/modules")) -> None:
    """/lib/modules/<release>: with headers, unless the recorded machine has none; and other kernels' folders."""
    folder = modules / state.kernel_release()
    headers = folder / "build"
    folder.mkdir(parents=True, exist_ok=True)
    if worn.get("no_headers"):
        if headers.is_dir():
            headers.rmdir()
    else:
        headers.mkdir(exist_ok=True)
    wanted = worn.get("other_kernels", [])
    for stranger in modules.iterdir():
        if stranger.name.endswith(OTHER_KERNEL) and stranger.name not in wanted:
            stranger.rmdir()
    for release in wanted:
        (modules / release).mkdir(exist_ok=True)


def mount() -> None:
    """Binds each tree over the machine's own."""
    machine = BASE / "machine-modules"
    machine.mkdir(parents=True, exist_ok=True)
    bind("/sys/module", str(machine))
    for path in trees.MOUNTS:
        source = BASE / path.lstrip("/")
        if source.exists() and Path(path).exists():
            bind(str(source), path)


def bind(source: str, target: str) -> None:
    """`mount --bind`; a container's boot must go on when it fails, so it is only said."""
    done = subprocess.run(
        ["mount", "--bind", source, target], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode:
        print(f"twin: {target}: {done.stderr.strip()}", file=sys.stderr)
    # /sys/module is bound twice, and with shared mounts the second would appear on top of the first too. A shutdown
    # takes both away at once, and systemd waits forever for the stop of the one that went by itself.
    _quietly("mount", "--make-private", target)


def born(words: Sequence[str]) -> int:
    """Once, after the first boot: installs the driver that the recorded machine had."""
    worn = state.hardware()
    mark = Path("/var/lib/twin/born")
    driver = worn.get("driver") or {}
    if mark.exists():
        return 0
    if driver.get("packages"):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        apt = ["apt-get", "-o", "DPkg::Lock::Timeout=60"]
        update = ["-o", "Dir::Etc::sourcelist=sources.list.d/twin.list", "-o", "Dir::Etc::sourceparts=-"]
        for argv in (
            [*apt, *update, "-o", "APT::Get::List-Cleanup=0", "-qq", "update"],
            [*apt, "-qq", "-y", "--no-install-recommends", "install", *driver["packages"]],
        ):
            done = subprocess.run(
                argv, env=environment, capture_output=True, text=True, timeout=STEP_LIMIT_S, check=False
            )
            if done.returncode:
                return tools.fail(f"twin: {' '.join(argv)}: {done.stdout}{done.stderr}")
        problem = tools.load_nvidia()
        if problem:
            return tools.fail(f"twin: {problem}")
        for unit in UNITS:
            if Path(f"/lib/systemd/system/{unit}.service").exists():
                systemctl("enable", unit)
                systemctl("restart", unit)
    mark.write_text(json.dumps(driver), encoding="utf-8")
    return 0
