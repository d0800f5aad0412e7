"""A twin without a container: its trees in a folder, its programs called in this process.

Fast enough to show every fault to preflight in a second; what needs processes, mounts or locks is left to
real twins.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from bringup import ROOT, preflight, twins
from bringup.node import facts, linking, surroundings
from bringup.planned import HostPlan, Plan
from bringup.rolevars import preflight as variables
from tests.lab.twin.node import smi, state, tools, trees, wear

BASE = ROOT / "tests" / "cases" / "preflight" / "base" / "eight.yml"
DEBIAN_LIBRARIES = "usr/lib/x86_64-linux-gnu"


MEMORY = Path("/dev/shm")
COMPILERS = ("cc", "c++")


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """An empty folder, in memory where that can be: a twin of eight GPUs is 400 files, written for every fault."""
    with tempfile.TemporaryDirectory(dir=MEMORY if os.access(MEMORY, os.W_OK) else None) as made:
        yield Path(made)


@contextlib.contextmanager
def rooted(root: Path) -> Iterator[None]:
    """The twin's programs see `root` as `/`."""
    before = os.environ.get("TWIN_ROOT")
    os.environ["TWIN_ROOT"] = str(root)
    try:
        yield
    finally:
        if before is None:
            del os.environ["TWIN_ROOT"]
        else:
            os.environ["TWIN_ROOT"] = before


def dressed(worn: Mapping[str, Any], root: Path) -> None:
    """Writes what a booted twin with its driver installed would have under `root`."""
    given = dict(worn)
    version = (given.get("driver") or {}).get("version")
    with rooted(root):
        state.write_json(state.at("/var/lib/twin/hardware.json"), given)
        state.save_kernel({"module": None, "settings": {}})
        if version:
            _installed(version, root)
        modules = root / "lib/modules"
        wear.modules_folder(given, modules)
        if version and not given.get("driver_unloaded"):
            tools.load_nvidia()
        tools.refresh()
        if not given.get("no_compiler"):
            for name in COMPILERS:
                trees.text(state.at(f"/usr/bin/{name}"), "stand-in")
        (root / "dev/shm").mkdir(parents=True, exist_ok=True)
        for path, row in state.files(given).items():
            state.write_file(state.at(path), row)
        if given.get("dpkg_unpacked"):
            stanzas = [f"Package: {name}\nStatus: install ok unpacked\n" for name in given["dpkg_unpacked"]]
            trees.text(state.at("/var/lib/dpkg/status"), "\n".join(stanzas))
        if _fabric_manager_runs(given, version):
            trees.text(state.at(tools.FABRIC), str(version))
        if version:
            trees.text(state.at(tools.PERSISTENCE), "")


def _installed(version: str, root: Path) -> None:
    state.write_json(state.module_file(), {"stand_in": True, "version": version, "open": True})
    folder = root / DEBIAN_LIBRARIES
    folder.mkdir(parents=True)
    for name in ("libcuda.so", "libnvidia-ml.so"):
        (folder / f"{name}.{version}").touch()
    if not state.hardware().get("no_cuda_link"):
        (folder / "libcuda.so").symlink_to(f"libcuda.so.{version}")
    trees.text(root / "usr/bin/nvidia-smi", "stand-in")
    state.write_json(root / "usr/share/nvidia/nvswitch/stand-in.json", {"stand_in": True, "version": version})


def _fabric_manager_runs(worn: Mapping[str, Any], version: str | None) -> bool:
    if not version or not worn.get("switches") or worn.get("fabric_manager_fails"):
        return False
    if "nvidia-fabricmanager" in worn.get("stopped_units", ()):
        return False
    return bool(worn.get("fabric_manager_version", version) == worn.get("loaded_version", version))


PROGRAMS: Mapping[str, Callable[[Sequence[str]], int]] = {
    "nvidia-smi": smi.main,
    "journalctl": tools.journalctl,
    "mokutil": tools.mokutil,
    "nv-fabricmanager": tools.fabric_manager,
    "docker": tools.docker,
    "cc": tools.compiler,
}


def runner(worn: Mapping[str, Any], root: Path) -> facts.Runner:
    """What `facts.gather` runs commands with, on the twin under `root`."""

    def run(argv: Sequence[str], limit_s: int) -> tuple[int, str]:
        program, *words = argv
        if program == "timeout":
            # The compiler, behind its limit and its variables.
            start = next(at for at, word in enumerate(words) if word.rpartition("/")[2] in COMPILERS)
            program, *words = words[start], *words[start + 1 :]
        if program.rpartition("/")[2] in COMPILERS:
            program = COMPILERS[0]
        if program == "systemctl" and words[:1] == ["is-active"]:
            return 0, "active" if _active(worn, words[1], root) else "inactive"
        if program == "nvidia-smi" and worn.get("smi_hangs"):
            return 124, ""
        if program == "systemctl" and words == ["show-environment"]:
            rows = {"LANG": "C.UTF-8", **worn.get("manager_environment", {})}
            return 0, "".join(f"{name}={value}\n" for name, value in rows.items())
        if program == "getent":
            only_files = (root / "etc/nsswitch.conf").exists()
            return (2 if only_files and words[-1] not in facts.read(root / "etc/hosts").split() else 0), ""
        if program == "getconf":
            return 0, str(1024 * worn.get("page_size_kib", 4))
        if program == "numactl":
            return (
                (1, "set_mempolicy: Operation not permitted") if worn.get("memory_policy_denied") else (0, "")
            )
        if program == "podman" or (program == "docker" and not worn.get("containers")):
            return 127, ""
        if program not in PROGRAMS:
            return facts.run(argv, limit_s)
        out = io.StringIO()
        with rooted(root), contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            code = PROGRAMS[program](words)
        return code, out.getvalue()

    return run


def _active(worn: Mapping[str, Any], unit: str, root: Path) -> bool:
    mark = {"nvidia-fabricmanager": tools.FABRIC, "nvidia-persistenced": tools.PERSISTENCE}[unit]
    return (root / mark.lstrip("/")).exists()


def gathered(worn: Mapping[str, Any], root: Path, asked: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The facts of a twin: its hardware, on a system that is as it should be. `asked`: see `preflight.request`."""
    dressed(worn, root)
    run = runner(worn, root)
    around = surroundings.gather(asked or {}, run, root)
    around["shared_memory"]["total"] = worn.get("shm_mib", 16384) * 1024**2
    system = facts.read(root / "etc/os-release")
    base = yaml.safe_load(BASE.read_text(encoding="utf-8"))["facts"]
    return {
        **base,
        **around,
        "os": facts.parse_os_release(system) if system else base["os"],
        "arch": worn["arch"],
        "disks": [],
        "memory": facts.parse_meminfo(facts.read(root / "proc/meminfo")),
        "numa": facts.numa(root),
        "settings": facts.settings(root),
        "clock": {"epoch": 0.0, "synchronized": not worn.get("clock_not_kept"), "zone": "UTC"},
        "gpu": facts.gpu(run, root),
        "linking": linking.gather((asked or {}).get("linking") or (), run, root),
    }


def expected(host: HostPlan, plan: Plan) -> preflight.Expected:
    """What the host's plan wants; room on disks and the clock are no part of hardware."""
    wanted = variables.variables(host, plan)["preflight_expected"]
    return preflight.Expected.of({**wanted, "rooms": []})


def verdicts(
    host: HostPlan, plan: Plan, chosen: Sequence[twins.Fault], root: Path
) -> list[preflight.Finding]:
    """What preflight says of a host's twin with faults."""
    return preflight.verdicts(*judged(host, plan, chosen, root))


def judged(
    host: HostPlan, plan: Plan, chosen: Sequence[twins.Fault], root: Path
) -> tuple[dict[str, Any], preflight.Expected]:
    """The facts of a host's twin with faults, and what they are compared with."""
    worn = twins.with_faults(twins.hardware(host, "twin-01"), chosen)
    wanted = expected(host, plan)
    return gathered(worn, root, preflight.request(wanted)), wanted


def said(host: HostPlan, plan: Plan, chosen: Sequence[twins.Fault], root: Path) -> dict[str, list[str]]:
    """Code -> the checks of preflight that give it for a host's twin with faults."""
    facts_of, wanted = judged(host, plan, chosen, root)
    found: dict[str, list[str]] = {}
    for check in preflight.CHECKS:
        for code in sorted({finding.code for finding in check(facts_of, wanted)}):
            found.setdefault(code, []).append(check.__name__)
    return found


def applies(fault: twins.Fault, host: HostPlan) -> bool:
    """Whether a host's hardware can have the fault, and it can be shown without a container."""
    platform = host.expected
    if fault.needs == "gguf":
        return any(file.path.endswith(".gguf") for model in host.models for file in model.files)
    if fault.run or not platform.get("gpus"):
        return False
    needs = {
        "": True,
        "gpus": True,
        "switches": platform["links"]["nvswitches"] > 0,
        "open modules": bool((platform.get("driver") or {}).get("open_modules")),
        "big pages": bool((platform.get("driver") or {}).get("page_size_kib")),
        "drafts": bool(host.models and host.models[0].expects.get("tensors")),
        "memory nodes": bool((platform.get("host") or {}).get("numa")),
    }
    numbered = [name.split(".")[1] for name in fault.state if name.startswith("gpus.")]
    highest = max((int(number) for number in numbered if number != "*"), default=0)
    return bool(needs[fault.needs] and highest < platform["gpus"]["count"])
