"""CUDA on a node: the toolkit, the libraries that compilers link against, and whether the GPUs answer.

Programs need `libcuda.so.1`, which the driver brings. What compiles at run time links against `libcuda.so` (and
`libcudart.so`, `libnvrtc.so`), which a driver alone does not bring. Such a link is made only where the linker finds
none, in a folder of our own that servers get in LIBRARY_PATH: nothing is written into the system's folders.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
import select
import shutil
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from . import libraries, linking, packages, place, seal
from .facts import parse_os_release, read
from .undo import Journal, run

ROLE = "cuda_runtime"
LINKS = Path("/opt/bringup/cuda/lib")
"""Folder of our links; servers have it in LIBRARY_PATH."""

DRIVER = "libcuda.so"
RUNTIME = ("libcudart.so", "libnvrtc.so")
TARGETS = {"x86_64": "x86_64-linux", "aarch64": "sbsa-linux"}
"""What the toolkit calls each architecture of a server (https://docs.nvidia.com/cuda/sbsa-installation-guide/)."""

TOOLKITS = ("/usr/local/cuda", "/usr/local/cuda-*")
COMPILER_FILES = ("/usr/bin/cc", "/usr/bin/c++", "/usr/lib/gcc/*/*/libgcc.a", "/usr/lib/*/Scrt1.o")
"""What a compiler and the programs that it makes begin with: when one comes or goes, it is tried again."""

SMOKE_LIMIT_S = 180
"""Seconds that asking the GPUs may take: without persistence each is initialised first."""

VERSION_LIMIT_S = 60
"""Seconds that a toolkit's compiler may take to say its version."""

NVBANDWIDTH = {
    "host_to_device_memcpy_ce": "host_gbps",
    "device_to_device_memcpy_read_ce": "peer_gbps",
}
"""Tests of nvbandwidth that are asked for, and what each is to us."""

P2P = {"Unidirectional P2P=Enabled": "peer_gbps"}
"""The table of p2pBandwidthLatencyTest that is about the links between GPUs."""

TOOLS: Mapping[str, tuple[tuple[str, ...], Mapping[str, str]]] = {
    "nvbandwidth": (("--testcase", *NVBANDWIDTH), NVBANDWIDTH),
    "p2pBandwidthLatencyTest": ((), P2P),
}
"""Tools that time copies between GPUs: how each is called, and its tables."""

TOOL_FOLDERS = ("bin", "extras/demo_suite")
"""Where in a toolkit such tools lie, beside PATH."""

TOOL_LIMIT_S = 600
"""Seconds that one may take: between 8 GPUs there are 56 directions."""

FIGURES = {
    "host_gbps": "from host memory",
    "memory_gbps": "within its memory",
    "peer_gbps": "from or to another GPU",
}

COPY_BYTES = 256 * 1024 * 1024
COPIES = 8
MINOR = 76
MAJOR = 75


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit: its folder, its version as "13.0", its libraries' folders (stubs last)."""

    home: str
    version: str
    folders: tuple[str, ...]


# --- looking ------------------------------------------------------------------------------------------------


def toolkits(extra: Sequence[str] = (), machine: str | None = None) -> list[Toolkit]:
    """Toolkits on the node that have a compiler, the newest first; the same folder under two names counts once."""
    found: dict[str, Toolkit] = {}
    for pattern in (*extra, *TOOLKITS):
        for home in sorted(Path("/").glob(pattern.lstrip("/"))):
            if (home / "bin" / "nvcc").exists():
                made = Toolkit(
                    str(home), version_of(home), library_folders(home, machine or platform.machine())
                )
                found.setdefault(str(home.resolve()), made)
    return sorted(
        found.values(), key=lambda one: [int(part) for part in re.findall(r"\d+", one.version)], reverse=True
    )


def version_of(home: Path) -> str:
    """A toolkit's version, from its own `version.json`, its folder's name, or its compiler."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        text = str(json.loads((home / "version.json").read_text(encoding="utf-8"))["cuda"]["version"])
        return ".".join(text.split(".")[:2])
    match = re.fullmatch(r"cuda-(\d+\.\d+)", home.resolve().name)
    if match:
        return match[1]
    said = re.search(
        r"release (\d+\.\d+)", run([str(home / "bin" / "nvcc"), "--version"], VERSION_LIMIT_S)[1]
    )
    return said[1] if said else ""


def library_folders(home: Path, machine: str) -> tuple[str, ...]:
    """Where a toolkit keeps what is linked against: lib64, or targets/<architecture>/lib, then their stubs."""
    bases = [home / "lib64", home / "targets" / TARGETS.get(machine, "none") / "lib", home / "lib"]
    there = [base for base in bases if base.is_dir()]
    folders = [*there, *(base / "stubs" for base in there if (base / "stubs").is_dir())]
    kept: dict[str, str] = {}
    for folder in folders:
        kept.setdefault(str(folder.resolve()), str(folder))
    return tuple(kept.values())


def environment(toolkit: Toolkit | None, has_links: bool) -> dict[str, str]:
    """What a server must have in its environment to compile: the compiler on PATH, and where the linker looks."""
    paths = [str(LINKS)] if has_links else []
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    if not toolkit:
        return {"LIBRARY_PATH": ":".join(paths)} if paths else {}
    paths += toolkit.folders
    found = {"CUDA_HOME": toolkit.home, "PATH": f"{toolkit.home}/bin:{path}"}
    return {**found, "LIBRARY_PATH": ":".join(paths)} if paths else found


def links_without(name: str, folders: Sequence[str]) -> bool:
    """Does the linker find `-l<name>` by itself, or in these folders? Asked of a compiler where there is one that
    works, else looked up: the linker wants a file without a version."""
    found = linking.tried(
        shutil.which("cc") or shutil.which("gcc"),
        [name.removeprefix("lib").removesuffix(".so")],
        folders,
        run,
    )
    return not found["lost"] if found["links"] else _found(name, folders)


def _found(name: str, folders: Sequence[str]) -> bool:
    triplet = f"/usr/lib/{platform.machine()}-linux-gnu"
    usual = (
        triplet,
        f"/lib/{platform.machine()}-linux-gnu",
        "/usr/lib64",
        "/lib64",
        "/usr/lib",
        "/usr/local/lib",
    )
    return any((Path(folder) / name).exists() for folder in (*folders, *usual))


def missing_links(toolkit: Toolkit | None, cache: Mapping[str, str]) -> dict[str, str]:
    """Links that have to be made, name -> target: for each library that is there with a version only."""
    folders = toolkit.folders if toolkit else ()
    wanted: dict[str, str] = {}
    target = cache.get(f"{DRIVER}.1")
    if target and not links_without(DRIVER, folders):
        wanted[DRIVER] = target
    for name in RUNTIME:
        there = _versioned(name, folders, cache)
        if there and not links_without(name, folders):
            wanted[name] = there
    return wanted


def _versioned(name: str, folders: Sequence[str], cache: Mapping[str, str]) -> str:
    """The newest file `libx.so.N` in the toolkit's folders, else in the loader's cache; "" for none."""
    found = [
        path for folder in folders for path in Path(folder).glob(f"{name}.*") if "stubs" not in path.parts
    ]
    found += [Path(path) for entry, path in cache.items() if entry.startswith(f"{name}.")]
    short = [path for path in found if re.fullmatch(rf"{re.escape(name)}\.\d+(\.\d+)?", path.name)]
    return (
        str(max(short, key=lambda path: [int(part) for part in re.findall(r"\d+", path.name)]))
        if short
        else ""
    )


# --- asking the GPUs ----------------------------------------------------------------------------------------


def ask(bandwidth: bool) -> dict[str, Any]:
    """GPUs through the driver's own library, in this process: {cuda, gpus: [{name, sm, memory, ...}]}. Raises OSError
    without the library, RuntimeError with the driver's own words."""
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: Any) -> None:
        code = getattr(cuda, name)(*arguments)
        if code != 0:
            text = ctypes.c_char_p()
            with suppress(AttributeError):
                cuda.cuGetErrorName(code, ctypes.byref(text))
            raise RuntimeError(f"{name}: {(text.value or b'error').decode()} ({code})")

    number = ctypes.c_int()
    call("cuInit", 0)
    call("cuDriverGetVersion", ctypes.byref(number))
    version = number.value
    call("cuDeviceGetCount", ctypes.byref(number))
    gpus = []
    for index in range(number.value):
        device, size, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(128)
        major, minor = ctypes.c_int(), ctypes.c_int()
        call("cuDeviceGet", ctypes.byref(device), index)
        if hasattr(cuda, "bringup_stand_in"):
            # A twin's library answers to four functions and computes nothing.
            gpus.append({"name": "stand-in", "sm": "", "memory": 0})
            continue
        call("cuDeviceGetName", name, 128, device)
        call("cuDeviceTotalMem_v2", ctypes.byref(size), device)
        call("cuDeviceGetAttribute", ctypes.byref(major), MAJOR, device)
        call("cuDeviceGetAttribute", ctypes.byref(minor), MINOR, device)
        row = {"name": name.value.decode(), "sm": f"{major.value}.{minor.value}", "memory": size.value}
        gpus.append({**row, **(_bandwidth(call, device) if bandwidth else {})})
    return {"cuda": f"{version // 1000}.{version % 1000 // 10}", "gpus": gpus}


def _bandwidth(call: Any, device: ctypes.c_int) -> dict[str, float]:
    """GB/s (10**9 bytes) from pinned host memory to the GPU, and within its memory (read and written)."""
    context, host, first, second = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_uint64()
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    call("cuMemHostAlloc", ctypes.byref(host), ctypes.c_size_t(COPY_BYTES), 0)
    call("cuMemAlloc_v2", ctypes.byref(first), ctypes.c_size_t(COPY_BYTES))
    call("cuMemAlloc_v2", ctypes.byref(second), ctypes.c_size_t(COPY_BYTES))

    def timed(name: str, *arguments: Any) -> float:
        call(name, *arguments)
        call("cuCtxSynchronize")
        begun = time.perf_counter()
        for _ in range(COPIES):
            call(name, *arguments)
        call("cuCtxSynchronize")
        return COPIES * COPY_BYTES / (time.perf_counter() - begun) / 1e9

    size = ctypes.c_size_t(COPY_BYTES)
    to_gpu = timed("cuMemcpyHtoD_v2", first, host, size)
    within = 2 * timed("cuMemcpyDtoD_v2", second, first, size)
    for pointer in (first, second):
        call("cuMemFree_v2", pointer)
    call("cuMemFreeHost", host)
    call("cuDevicePrimaryCtxRelease_v2", device)
    return {"host_gbps": round(to_gpu, 1), "memory_gbps": round(within, 1)}


def tables(text: str) -> Iterator[tuple[str, list[list[float | None]]]]:
    """The tables in what a tool printed: the two lines above each, and its rows (None: "N/A"). A table begins with
    the numbers of its columns; each row begins with its own number."""
    above: list[str] = []
    columns = 0
    rows: list[list[float | None]] = []
    for line in [*text.splitlines(), ""]:
        words = line.replace("D\\D", " ").split()
        if columns and len(words) == columns + 1 and words[0].isdigit():
            rows.append([None if word == "N/A" else float(word) for word in words[1:]])
            continue
        if rows:
            yield " ".join(above[-2:]), rows
            above = []
        is_head = bool(words) and words == [str(number) for number in range(len(words))]
        columns, rows = (len(words) if is_head else 0), []
        if words and not is_head:
            above.append(line.strip())


def figures(text: str, meant: Mapping[str, str]) -> list[dict[str, float]]:
    """The slowest copy of each kind in GB/s, a row a GPU, from what a tool printed. `meant`: words above a table ->
    what it is to us. Between GPUs a copy counts for both."""
    found: dict[int, dict[str, float]] = {}
    for above, rows in tables(text):
        for name in (name for words, name in meant.items() if words in above):
            for number, row in enumerate(rows):
                for other, speed in enumerate(row):
                    if speed is None or (name == "peer_gbps" and number == other):
                        continue
                    for gpu in {number, other} if name == "peer_gbps" else {other}:
                        known = found.setdefault(gpu, {})
                        known[name] = min(speed, known.get(name, speed))
    return [found[gpu] for gpu in sorted(found)]


def timed_by_tool(folders: Sequence[str]) -> dict[str, Any]:
    """What the first tool that is there says of copies between GPUs: {"tool", "rows"}, or {"tool", "problem"}; empty
    without one. `folders`: where one may be beside PATH."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *folders])
    for name, (options, meant) in TOOLS.items():
        program = shutil.which(name, path=path)
        if not program:
            continue
        code, said = run([program, *options], TOOL_LIMIT_S)
        rows = figures(said, meant)
        if code != 0 or not rows:
            last = " | ".join(said.splitlines()[-3:])
            return {"tool": program, "problem": f"ended with {code} and timed nothing: {last[-300:]}"}
        return {"tool": program, "rows": rows}
    return {}


def smoke(bandwidth: bool = False) -> dict[str, Any]:
    """`ask` in a process of its own, which may hang or die: its answer, else {"problem": why}."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _answer_and_exit(writer, bandwidth)
    os.close(writer)
    try:
        return _read_answer(reader)
    finally:
        os.close(reader)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _answer_and_exit(writer: int, bandwidth: bool) -> NoReturn:
    try:
        answer = ask(bandwidth)
    except (OSError, RuntimeError, AttributeError) as error:
        answer = {"problem": str(error)}
    os.write(writer, json.dumps(answer).encode())
    os._exit(0)


def _read_answer(reader: int) -> dict[str, Any]:
    """One JSON object, which fits into a pipe."""
    ready, _, _ = select.select([reader], [], [], SMOKE_LIMIT_S)
    if not ready:
        return {"problem": f"the driver did not answer within {SMOKE_LIMIT_S} s"}
    content = os.read(reader, 1 << 16)
    if not content:
        return {"problem": "the asking process died; see dmesg"}
    answer: dict[str, Any] = json.loads(content)
    return answer


def complaints(answer: Mapping[str, Any], expected: Mapping[str, Any]) -> Iterator[str]:
    """What a smoke check found wrong. `expected`: gpus, sm, host_gbps, memory_gbps, peer_gbps (at least; 0: do not
    mind)."""
    if "problem" in answer:
        yield f"CUDA does not start: {answer['problem']}"
        return
    rows = answer["gpus"]
    if len(rows) != expected["gpus"]:
        yield f"CUDA sees {len(rows)} of {expected['gpus']} GPUs"
    for number, row in enumerate(rows):
        if expected["sm"] and row["sm"] and row["sm"] != expected["sm"]:
            yield f"GPU {number} ({row['name']}) has compute capability {row['sm']}, the platform {expected['sm']}"
        yield from _too_slow(number, row, expected, "")


def tool_complaints(timed: Mapping[str, Any], expected: Mapping[str, Any]) -> Iterator[str]:
    """The same of what a tool timed."""
    if "problem" in timed:
        yield f"{timed['tool']} {timed['problem']}"
    for number, row in enumerate(timed.get("rows", ())):
        yield from _too_slow(number, row, expected, f" ({timed['tool']})")


def _too_slow(number: int, row: Mapping[str, float], expected: Mapping[str, Any], by: str) -> Iterator[str]:
    for name, what in FIGURES.items():
        if expected.get(name) and name in row and row[name] < expected[name]:
            yield f"GPU {number} copies {row[name]} GB/s {what}{by}, at least {expected[name]:g} are expected"


# --- the compiler -------------------------------------------------------------------------------------------


def bring_compiler(
    services: Sequence[Mapping[str, Any]], names: Sequence[str], check_only: bool, root: Path = Path("/")
) -> list[str]:
    """Installs packages of a compiler where a service needs the node's own and that makes no program: those that are
    not there, else again those whose files are gone; what was done. Raises PackagesFailed."""
    own = [
        language for row in services for language in row["languages"] if not row["compilers"].get(language)
    ]
    if not names or not own:
        return []
    found = linking.tried_all({"languages": dict.fromkeys(own)}, (), run, root, ())
    have = packages.versions()
    if found["links"] or not have:
        return []
    missing = [name for name in names if name not in have]
    wanted = missing or [name for name in linking.lost_packages(found) if name in have]
    if wanted and not check_only:
        if set(wanted) - set(packages.available(wanted)):
            packages.refresh()
        packages.install(wanted, Journal(ROLE), packages.INSTALL_LIMIT_S, again=not missing)
    return [f"install {' '.join(wanted)}{'' if missing else ' again'}"] if wanted else []


def linked(
    services: Sequence[Mapping[str, Any]],
    variables: Mapping[str, str],
    has_driver: bool,
    root: Path = Path("/"),
) -> Iterator[linking.Trouble]:
    """Why services cannot link what they compile, each asked with the folders that its environment has. Without a
    driver there is nothing to link with."""
    system = parse_os_release(read("/etc/os-release"))
    given = [folder for folder in variables.get("LIBRARY_PATH", "").split(":") if folder]
    for row in services:
        if not row["languages"]:
            continue
        where = row["folders"] or given
        found = linking.tried_all(row, where, run, root, row["links"] if has_driver else ())
        trouble = linking.trouble({"services": [row["name"]], **found}, system)
        if trouble:
            yield trouble


# --- on the node --------------------------------------------------------------------------------------------


def drop_in(file: str) -> str:
    """The text that gives a server these variables. They come from a file of their own: what is in a unit's
    EnvironmentFile= wins over its Environment= (systemd.exec(5)), and the later of two files over the earlier."""
    return f"# Written by bringup: where this node's CUDA toolkit is.\n[Service]\nEnvironmentFile={file}\n"


def environment_file(variables: Mapping[str, str]) -> str:
    """The file that a drop-in names."""
    return "".join(f'{name}="{value}"\n' for name, value in sorted(variables.items()))


def _basis(home: str, homes: Sequence[str], compiles: bool) -> list[dict[str, Any]]:
    """What was decided by: which toolkits there are, what the loader finds, the driver that runs, and for servers that
    compile the compiler and what it starts programs with."""
    names = [*TOOLKITS, *homes, *(COMPILER_FILES if compiles else ())]
    rows: list[dict[str, Any]] = [
        {"kind": "listing", "name": name, "paths": None, "basis": True} for name in names
    ]
    rows.append(seal.path_row("/etc/ld.so.cache", "file", sha256=None, basis=True))
    rows.append({"kind": "driver", "name": "", "runs": None, "basis": True})
    return rows


def apply(given: Mapping[str, Any], check_only: bool) -> dict[str, Any]:
    """The compiler, links, the servers' environment, a link with it, and a smoke check.

    Gives {changed, changed_paths, done, toolkit, toolkit_version, links, smoke, timed, problems, diff}. `given`:
    services (name, drop_in, environment_file, keeps: variables that the plan sets itself, languages that it compiles,
    links: libraries, compilers and folders: the profile's own), homes, packages (of the compiler), expected,
    check_gpus, bandwidth.
    Raises PlaceFailed, PackagesFailed, OSError.
    """
    installed = bring_compiler(given["services"], given["packages"], check_only)
    found = toolkits(given["homes"])
    toolkit = found[0] if found else None
    links = missing_links(toolkit, libraries.loaded())
    entries: list[dict[str, Any]] = []
    if links:
        entries += [
            {"path": str(path), "state": "directory", "mode": "0755"} for path in (LINKS.parent, LINKS)
        ]
    for name in (DRIVER, *RUNTIME):
        path = str(LINKS / name)
        if name in links:
            entries.append({"path": path, "state": "link", "target": links[name]})
        else:
            entries.append({"path": path, "state": "absent"})
    variables = environment(toolkit, bool(links))
    for service in given["services"]:
        file, part = str(service["environment_file"]), str(service["drop_in"])
        own = {name: value for name, value in variables.items() if name not in service["keeps"]}
        if own:
            entries.append({"path": file, "content": environment_file(own)})
            entries.append({"path": part, "content": drop_in(file)})
        else:
            entries += [{"path": path, "state": "absent"} for path in (part, file)]
    placed = place.apply(entries, check_only, ROLE)
    if not check_only:
        compiles = any(row["languages"] for row in given["services"])
        seal.claim(_basis(toolkit.home if toolkit else "", given["homes"], compiles))
    has_driver = f"{DRIVER}.1" in libraries.loaded()
    has_gpus = bool(sorted(Path("/dev").glob("nvidia[0-9]*"))) and has_driver
    answer = smoke(bool(given["bandwidth"])) if given["check_gpus"] and has_gpus else {}
    troubles = [] if check_only else linked(given["services"], variables, has_driver)
    problems = [f"{one.code}: {one.what} ({one.evidence}). {one.remedy}" for one in troubles]
    problems += complaints(answer, given["expected"]) if answer else []
    if has_gpus and not check_only:
        seal.claim([{"kind": "gpus", "name": "that the driver shows", "count": given["expected"]["gpus"]}])
    timed: dict[str, Any] = {}
    if answer and given["bandwidth"] and not check_only:
        timed = timed_by_tool([f"{toolkit.home}/{name}" for name in TOOL_FOLDERS] if toolkit else [])
        problems += tool_complaints(timed, given["expected"])
    return {
        **placed,
        "changed": bool(placed["changed"] or installed),
        "done": [*installed, *placed["changed_paths"]],
        "toolkit": toolkit.home if toolkit else "",
        "toolkit_version": toolkit.version if toolkit else "",
        "links": links,
        "smoke": answer,
        "timed": timed,
        "problems": problems,
    }
