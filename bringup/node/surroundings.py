"""What surrounds a server on a node: limits, shared memory, huge pages, settings, names and mirrors, containers,
environment, toolkits, who cuts logs, proxies in front, caches, models, packages. Only reads; `gather` is a part of what
`facts.gather` gives.

Every file is read below `root`, so that a test reads a folder instead of a machine. Sizes are bytes.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import socket
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from . import contents

Runner = Callable[[Sequence[str], int], "tuple[int, str]"]

COMMAND_LIMIT_S = 10
CONNECT_LIMIT_S = 5
CONNECTIONS_AT_ONCE = 8
NGINX_READ_TIMEOUT_S = 60
"""What nginx has by itself (https://nginx.org/en/docs/http/ngx_http_proxy_module.html#proxy_read_timeout)."""

CACHE_ENTRIES = 2000
"""How many entries of a cache are looked at: one that belongs to somebody else is enough."""

SHOWN = 3
SYS_RESOURCE = 24
"""Number of the capability that lets a process raise its own limits (capabilities(7))."""

UNIT_FOLDERS = ("etc/systemd/system", "run/systemd/system", "usr/lib/systemd/system", "lib/systemd/system")
UNIT_KEYS = (
    "LimitNOFILE",
    "LimitMEMLOCK",
    "LimitNPROC",
    "TasksMax",
    "DevicePolicy",
    "PrivateDevices",
    "Restart",
    "TimeoutStartSec",
)
"""What a drop-in of somebody else can take from a server."""

SHARED_MEMORY = re.compile(r"^(nccl-|psm_|sem\.mp-|torch_|cuda\.shm|vllm|sglang|sgl_)")
"""Names of segments that ranks make; one that nobody maps was left by a crash."""

VARIABLES = re.compile(
    r"^(LD_PRELOAD|LD_LIBRARY_PATH|PYTHONPATH|PYTHONHOME|CUDA_\w+|NVIDIA_\w+|NCCL_\w+|GLOO_\w+|TORCH_\w+|OMP_\w+"
    r"|VLLM_\w+|SGLANG_\w+|(https?|all|no)_proxy)$",
    re.I,
)
"""Environment variables that change what a server does."""

LFS_START = b"version https://git-lfs.github.com/spec/"
GGUF_MAGIC = b"GGUF"
HEADER_LIMIT_BYTES = 100 * 1024 * 1024


def read(path: Path) -> str:
    """A file's text, "" when it is not there or may not be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def gather(request: Mapping[str, Any], runner: Runner, root: Path) -> dict[str, Any]:
    """`request`: `units`, `settings` (paths), `addresses`, `caches`, `models`, `memory_nodes`, `ports` and `logs` (see
    `bringup.expected.Expected`); what is not asked for is not looked at."""
    return {
        "limits": limits(root),
        "overrides": overrides(request.get("units", ()), root),
        "shared_memory": shared_memory(root),
        "huge_pages": huge_pages(root),
        "page_size": page_size(runner),
        "values": values(request.get("settings", ()), root),
        "addresses": addresses(request.get("addresses", ()), root),
        "containers": containers(runner),
        "environment": environment(runner, root),
        "own_name": own_name(runner),
        "toolkits": toolkits(root),
        "log_cutters": log_cutters(request.get("logs", ()), root),
        "fronts": fronts(request.get("ports", ()), root),
        "caches": [cache(row["path"], row["user"], root) for row in request.get("caches", ())],
        "models": [found for row in request.get("models", ()) if (found := model(row, root))],
        "packages_broken": packages_broken(root),
        "memory_policy": memory_policy(request.get("memory_nodes", ""), runner),
    }


# --- limits -------------------------------------------------------------------------------------------------


def limits(root: Path) -> dict[str, Any]:
    """Hard limits of the first process (-1: none, None: not known) and whether units may have more, and what the
    whole machine has: most open files of a process and of all, tasks of all and of the slice that units run in."""
    first = read(root / "proc/1/limits")
    files = read(root / "proc/sys/fs/file-nr").split()
    capabilities = re.search(r"^CapBnd:\s*([0-9a-f]+)", read(root / "proc/1/status"), re.MULTILINE)
    return {
        "open_files": _hard(first, "Max open files"),
        "locked_memory": _hard(first, "Max locked memory"),
        "raised": bool(int(capabilities[1], 16) >> SYS_RESOURCE & 1) if capabilities else None,
        "open_files_most": _number(root / "proc/sys/fs/nr_open"),
        "files_open": int(files[0]) if len(files) == 3 else None,
        "files_most": int(files[2]) if len(files) == 3 else None,
        "tasks_most": _least(
            _number(root / path)
            for path in (
                "proc/sys/kernel/threads-max",
                "proc/sys/kernel/pid_max",
                "sys/fs/cgroup/system.slice/pids.max",
            )
        ),
    }


def _hard(text: str, name: str) -> int | None:
    match = re.search(rf"^{name}\s+\S+\s+(\S+)", text, re.MULTILINE)
    if match is None:
        return None
    return -1 if match[1] == "unlimited" else int(match[1])


def _number(path: Path) -> int | None:
    text = read(path).strip()
    return int(text) if text.isdecimal() else None


def _least(numbers: Iterable[int | None]) -> int | None:
    return min((number for number in numbers if number is not None), default=None)


def overrides(units: Iterable[str], root: Path) -> list[dict[str, str]]:
    """What drop-ins set for units in `UNIT_KEYS`: unit, file, key, value; the last of each key, as systemd takes
    it (systemd.unit(5): by the name of the file, whichever folder it lies in)."""
    found: list[dict[str, str]] = []
    for unit in units:
        last: dict[str, dict[str, str]] = {}
        for path in _drop_ins(unit, root):
            for key, value in re.findall(r"^\s*(\w+)\s*=\s*(.*?)\s*$", read(path), re.MULTILINE):
                if key in UNIT_KEYS:
                    file = f"/{path.relative_to(root)}"
                    last[key] = {"unit": unit, "file": file, "key": key, "value": value}
        found += last.values()
    return found


def _drop_ins(unit: str, root: Path) -> list[Path]:
    stem, _, kind = unit.rpartition(".")
    parts = stem.split("-")
    names = [f"{kind}.d", *(f"{'-'.join(parts[:n])}-.{kind}.d" for n in range(1, len(parts))), f"{unit}.d"]
    found: dict[str, Path] = {}
    for base in reversed(UNIT_FOLDERS):
        for name in names:
            found.update({path.name: path for path in sorted((root / base / name).glob("*.conf"))})
    return [found[name] for name in sorted(found)]


# --- memory -------------------------------------------------------------------------------------------------


def shared_memory(root: Path) -> dict[str, Any] | None:
    """Size of /dev/shm, and the segments there that nobody maps; None without one."""
    folder = root / "dev/shm"
    try:
        room = os.statvfs(folder)
    except OSError:
        return None
    names = [path.name for path in folder.iterdir() if SHARED_MEMORY.match(path.name)]
    stale = sorted(set(names) - _mapped(root)) if names else []
    return {
        "total": room.f_blocks * room.f_frsize,
        "free": room.f_bavail * room.f_frsize,
        "stale": stale[:SHOWN],
        "stale_count": len(stale),
        "stale_bytes": sum(_allocated(folder / name) for name in stale),
    }


def _mapped(root: Path) -> set[str]:
    """Names in /dev/shm that some process maps."""
    found: set[str] = set()
    for path in (root / "proc").glob("[0-9]*/maps"):
        found.update(re.findall(r"/dev/shm/(\S+)", read(path)))
    return found


def _allocated(path: Path) -> int:
    with suppress(OSError):
        return path.lstat().st_blocks * 512
    return 0


def huge_pages(root: Path) -> dict[str, Any]:
    """Sizes that the kernel has (bytes a page -> pages, and how many are free), and sizes that its command line asks
    for."""
    base = root / "sys/kernel/mm/hugepages"
    sizes = {
        int(folder.name[10:-2]) * 1024: (
            _number(folder / "nr_hugepages") or 0,
            _number(folder / "free_hugepages") or 0,
        )
        for folder in base.glob("hugepages-*kB")
    }
    units = {"K": 1024, "M": 1024**2, "G": 1024**3}
    asked = re.findall(r"\bhugepagesz=(\d+)([KMG])", read(root / "proc/cmdline"), re.I)
    return {
        "sizes": [
            {"size": size, "pages": pages, "free": free} for size, (pages, free) in sorted(sizes.items())
        ],
        "asked": [int(number) * units[unit.upper()] for number, unit in asked],
    }


def page_size(runner: Runner) -> int:
    """Bytes of a page of memory."""
    code, text = runner(["getconf", "PAGESIZE"], COMMAND_LIMIT_S)
    return int(text) if code == 0 and text.strip().isdecimal() else os.sysconf("SC_PAGE_SIZE")


def memory_policy(nodes: str, runner: Runner) -> str | None:
    """Why the kernel does not let memory be bound to `nodes`; "" when it does, None when nobody can say."""
    if not nodes:
        return None
    code, text = runner(["numactl", f"--membind={nodes}", "true"], COMMAND_LIMIT_S)
    if code == 0:
        return ""
    # Nodes that are not there are another matter (NUMA_UNLIKE); only a refusal is one of rights.
    return next((line.strip() for line in text.splitlines() if "not permitted" in line), None)


def values(paths: Iterable[str], root: Path) -> dict[str, str]:
    """What settings are: path -> value ("[x]" of a choice). Patterns give what any file of them has that is not like
    the others' last; files that are not there, or that nobody may write here, are left out."""
    found: dict[str, str] = {}
    for pattern in paths:
        for path in sorted(root.glob(pattern.lstrip("/"))):
            if os.access(path, os.W_OK):
                text = " ".join(read(path).split())
                chosen = re.search(r"\[(\S+)\]", text)
                found[f"/{path.relative_to(root)}"] = chosen[1] if chosen else text
    return found


# --- names and mirrors --------------------------------------------------------------------------------------


def addresses(
    rows: Iterable[Mapping[str, Any]], root: Path, connect: Callable[[str, int], str] | None = None
) -> list[dict[str, Any]]:
    """Whether each address can be reached, the ones whose `unless` is there left out. A row: host, port, purpose;
    `kind: pip` (host "") is what the node's own pip settings name, if any. With a proxy, the proxy is asked.

    Adds `error`: "" or why not; a name that is not found begins with "name".
    """
    wanted = [
        target
        for row in rows
        if not (row.get("unless") and (root / str(row["unless"]).lstrip("/")).exists())
        and (target := _target(row, root))
    ]
    reach = connect or reached
    with ThreadPoolExecutor(CONNECTIONS_AT_ONCE) as pool:
        errors = list(pool.map(lambda row: reach(row["host"], row["port"]), wanted))
    return [{**row, "error": error} for row, error in zip(wanted, errors, strict=True)]


def _target(row: Mapping[str, Any], root: Path) -> dict[str, Any] | None:
    """The address that a row stands for on this node; None when it needs none."""
    found = {"host": row["host"], "port": row["port"], "purpose": row["purpose"]}
    variables = _variables(read(root / "etc/environment"))
    if row.get("kind") == "pip":
        files = (root / "etc/pip.conf", root / "root/.config/pip/pip.conf", root / "root/.pip/pip.conf")
        text = "\n".join(map(read, files))
        if re.search(r"^\s*no-index\s*=\s*(1|true|yes)", text, re.MULTILINE | re.I):
            return None
        match = re.search(r"^\s*index-url\s*=\s*(\S+)", text, re.MULTILINE)
        _move(found, variables.get("pip_index_url") or (match[1] if match else ""))
    spared = {part.strip() for part in variables.get("no_proxy", "").split(",")}
    if found["host"] not in spared:
        _move(found, variables.get("https_proxy") or variables.get("all_proxy") or "")
    return found if found["host"] else None


def _move(row: dict[str, Any], url: str) -> None:
    parts = urlsplit(url if "://" in url or not url else f"http://{url}")
    if parts.hostname:
        row["host"], row["port"] = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)


def _variables(text: str) -> dict[str, str]:
    rows = re.findall(r'^(?:export )?(\w+)="?([^"\n]*)"?$', text, re.MULTILINE)
    return {name.lower(): value for name, value in rows}


def reached(host: str, port: int) -> str:
    """ "" when somebody answers at an address, else why not."""
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return f"name not found: {getattr(error, 'strerror', None) or error}"
    try:
        socket.create_connection((host, port), CONNECT_LIMIT_S).close()
    except OSError as error:
        return f"no connection: {error.strerror or error}"
    return ""


def own_name(runner: Runner) -> dict[str, Any]:
    """The node's name, and whether it has an address here (None: nobody can say)."""
    name = socket.gethostname()
    code, _ = runner(["getent", "ahosts", name], COMMAND_LIMIT_S)
    return {"name": name, "found": {0: True, 2: False}.get(code)}


def fronts(ports: Iterable[int], root: Path) -> list[dict[str, Any]]:
    """Files of nginx that pass requests on to a server's port: file, port, and the seconds that it waits for the next
    piece of an answer (the longest in the file, else the general one, else nginx's own 60)."""
    base = root / "etc/nginx"
    general = _read_timeout(read(base / "nginx.conf"))
    found = []
    for path in sorted({*base.rglob("*.conf"), *(base / "sites-enabled").glob("*")}):
        text = re.sub(r"#.*", "", read(path))
        for port in ports:
            if re.search(rf"(127\.0\.0\.1|localhost|\[::1\]):{port}\b", text):
                seconds = _read_timeout(text) or general or NGINX_READ_TIMEOUT_S
                found.append({"file": f"/{path.relative_to(root)}", "port": port, "seconds": seconds})
    return found


def _read_timeout(text: str) -> int | None:
    """The longest `proxy_read_timeout` in seconds ("90", "90s", "5m", "1h"), None without any."""
    rows = re.findall(r"\bproxy_read_timeout\s+(\d+)([smhd]?)\s*;", re.sub(r"#.*", "", text))
    factors = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
    return max((int(number) * factors[unit] for number, unit in rows), default=None)


# --- containers and environment -----------------------------------------------------------------------------


def containers(runner: Runner) -> list[dict[str, Any]]:
    """Container engines: name, whether they can give GPUs, and the running containers that have some."""
    found = []
    for engine in ("docker", "podman"):
        code, text = runner([engine, "ps", "--quiet", "--no-trunc"], COMMAND_LIMIT_S)
        if code != 0:
            continue
        rows: list[dict[str, Any]] = []
        if text.split():
            code, inspected = runner([engine, "inspect", *text.split()], COMMAND_LIMIT_S)
            rows = parse_containers(inspected) if code == 0 else []
        about = runner([engine, "info", "--format", "json"], COMMAND_LIMIT_S)[1]
        found.append({"engine": engine, "gives_gpus": "nvidia" in about, "with_gpus": rows})
    return found


def parse_containers(text: str) -> list[dict[str, str]]:
    """Name and image of each container that has GPUs, from `docker inspect` or `podman inspect`."""
    try:
        rows = json.loads(text)
    except ValueError:
        return []
    return [
        {
            "name": str(row.get("Name", "")).lstrip("/"),
            "image": str((row.get("Config") or {}).get("Image", "")),
        }
        for row in rows
        if _has_gpus(row.get("HostConfig") or {})
    ]


def _has_gpus(host: Mapping[str, Any]) -> bool:
    devices = [str(one.get("PathOnHost", "")) for one in host.get("Devices") or ()]
    asked = json.dumps(host.get("DeviceRequests") or []).lower()
    return (
        host.get("Runtime") == "nvidia"
        or any(path.startswith("/dev/nvidia") for path in devices)
        or "gpu" in asked
        or "nvidia" in asked
    )


def environment(runner: Runner, root: Path) -> dict[str, Any]:
    """Variables that every unit inherits from systemd, and settings of the collective library for all
    programs; passwords in addresses are left out. `char_links`: whether /dev/char leads to the GPUs' devices."""
    code, text = runner(["systemctl", "show-environment"], COMMAND_LIMIT_S)
    rows = [line.partition("=") for line in text.splitlines()] if code == 0 else []
    nccl = re.findall(r"^\s*(NCCL_\w+)\s*=\s*(.*?)\s*$", read(root / "etc/nccl.conf"), re.MULTILINE)
    return {
        "manager": {
            name: re.sub(r"//[^@/]*@", "//", value) for name, _, value in rows if VARIABLES.match(name)
        },
        "nccl": dict(nccl),
        "char_links": any((root / "dev/char").glob("195:*")),
    }


def toolkits(root: Path) -> list[str]:
    """Versions ("12.8") of CUDA toolkits that have a compiler, each once; one that does not say its version is left
    out."""
    found = set()
    for home in (root / "usr/local").glob("cuda*"):
        if (home / "bin/nvcc").exists():
            said = re.search(r'"cuda"\s*:\s*\{[^}]*"version"\s*:\s*"(\d+\.\d+)', read(home / "version.json"))
            said = said or re.fullmatch(r"cuda-(\d+\.\d+)", home.resolve().name)
            found.add(said[1] if said else "")
    return sorted(found - {""})


def log_cutters(logs: Iterable[str], root: Path) -> list[dict[str, str]]:
    """Patterns in logrotate's configuration that take in one of our servers' logs: file, pattern."""
    logs = list(logs)
    found = []
    for path in (root / "etc/logrotate.conf", *sorted((root / "etc/logrotate.d").glob("*"))):
        for names in re.findall(r"^([^#{}]*?)\{", re.sub(r"#.*", "", read(path)), re.MULTILINE):
            for pattern in re.findall(r"/[^\s\"']+", names):
                if any(PurePosixPath(log).match(pattern) for log in logs):
                    found.append({"file": f"/{path.relative_to(root)}", "pattern": pattern})
    return found


# --- what lies there ----------------------------------------------------------------------------------------


def cache(path: str, user: str, root: Path) -> dict[str, Any]:
    """A server's folder: the first entry in it that is not its user's, None when there is none."""
    try:
        uid: int | None = pwd.getpwnam(user).pw_uid
    except KeyError:
        uid = None
    left = CACHE_ENTRIES
    for folder, folders, names in os.walk(root / path.lstrip("/")):
        for name in (*folders, *names):
            entry = Path(folder, name)
            with suppress(OSError):
                owner = entry.lstat().st_uid
                if owner != uid:
                    return {
                        "path": path,
                        "user": user,
                        "foreign": f"/{entry.relative_to(root)}",
                        "owner": owner,
                    }
            left -= 1
        if left <= 0:
            break
    return {"path": path, "user": user, "foreign": None, "owner": None}


def model(row: Mapping[str, Any], root: Path) -> dict[str, Any] | None:
    """What is wrong with a model's files that are there, by their sizes, first bytes, and (`expects`) by what its
    configuration and index name; None when there is no such folder. A file that is not there counts only when the
    model is said to be complete. A model without files of its own (put together here) has those that its stamp names.

    `mtp`: tensors of the draft layer that services use (`prefix`, `services`, `found`), {} where nobody drafts with
    one or there is no index yet.
    """
    folder = root / str(row["folder"]).lstrip("/")
    if not folder.is_dir():
        return None
    stamp = root / str(row.get("stamp") or "-").lstrip("/")
    ready = bool(row.get("stamp")) and stamp.exists()
    problems: list[str] = []
    mtp: dict[str, Any] = {}
    try:
        names, total = contents.index_map(folder)
    except contents.BadFile as error:
        problems.append(str(error))
    except OSError:
        pass
    else:
        mtp = _drafts(row, names)
        problems += contents.check_listed(folder, names, total) if ready else []
        problems += _config(folder, row.get("expects") or {}, mtp, names)
    for path, size in _files(row, stamp):
        if (folder / path).is_file():
            problems += [f"{path} {said}" for said in wrong_file(folder / path, size)]
        elif ready:
            problems.append(f"{path} is missing")
    problems += [
        f"{path.relative_to(folder)} was left by a broken download"
        for path in sorted(folder.rglob("*.incomplete"))
    ]
    return {
        "name": row["name"],
        "folder": row["folder"],
        "problems": problems[:SHOWN],
        "count": len(problems),
        "mtp": mtp,
    }


def _files(row: Mapping[str, Any], stamp: Path) -> list[tuple[str, int]]:
    """Paths and sizes that a model's files must have: of its lock, else of the stamp that was written here."""
    if row["files"]:
        return [(str(file["path"]), int(file["size"])) for file in row["files"]]
    try:
        rows = json.loads(stamp.read_text(encoding="utf-8"))["files"]
        return [(str(file["path"]), int(file["size"])) for file in rows]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _drafts(row: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    wish = row.get("mtp") or {}
    found = sum(name.startswith(wish["prefix"]) for name in names) if wish else 0
    return {**wish, "found": found} if wish else {}


def _config(
    folder: Path, expects: Mapping[str, Any], mtp: Mapping[str, Any], names: Iterable[str]
) -> list[str]:
    """`contents.check_config`; a draft layer of which nothing is there is said apart."""
    if not (folder / "config.json").is_file():
        return []
    tensors = dict(expects.get("tensors") or {})
    if mtp and not mtp["found"]:
        tensors.pop(mtp["prefix"], None)
    return contents.check_config(folder, {**expects, "tensors": tensors}, names)


def wrong_file(path: Path, size: int) -> list[str]:
    """Why a file is not what its name and its planned size say; empty when it may be."""
    there = path.stat().st_size
    try:
        with path.open("rb") as file:
            start = file.read(len(LFS_START))
    except OSError as error:
        return [f"cannot be read ({error.strerror})"]
    if start == LFS_START:
        return ["is a pointer of git-lfs, not the file"]
    if path.suffix == ".gguf" and start[:4] != GGUF_MAGIC:
        return [f"is no GGUF: it starts with {start[:4]!r}"]
    if path.suffix == ".safetensors" and len(start) >= 8:
        length = struct.unpack("<Q", start[:8])[0]
        if length > min(there, HEADER_LIMIT_BYTES):
            return [f"is no safetensors: its header would have {length} bytes"]
    return [f"has {there} bytes of {size}"] if there != size else []


def packages_broken(root: Path) -> list[str]:
    """Packages that are neither installed nor gone: an installation was broken off, or needs what is not there."""
    rows = re.findall(
        r"^Package: (\S+)\nStatus: \S+ \S+ (\S+)$", read(root / "var/lib/dpkg/status"), re.MULTILINE
    )
    return [name for name, state in rows if state in ("half-installed", "unpacked", "half-configured")]
