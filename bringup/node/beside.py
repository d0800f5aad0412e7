"""What a server's node can say about a measurement: sent over SSH and run as root, changes nothing.

`main(request)` prints one JSON object. `request["what"]` is `begin` (where the log ends now, what runs, on
which hardware), `end` (the log since then, where the processes' memory lies), `trip` (milliseconds of a
request from the node to its own server) or `client` (a run of the engine's own benchmark client, as the
server's user; the API key is read here and given in its environment). Standard library only, Python 3.9 and up.
"""

from __future__ import annotations

import gzip
import http.client
import json
import os
import pwd
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LOGS = Path("/var/log/bringup")
SERVICES = Path("/etc/bringup/services")
PROC = Path("/proc")
LOG_LIMIT = 8 * 1024 * 1024
"""Bytes of log that are sent, the newest."""
MAPS_LIMIT = 4 * 1024 * 1024
"""Bytes of all processes' memory maps that are sent, reduced to what says where pages lie."""
TRIP_REQUESTS = 40
SAID = 2000
"""Characters of a client's last words that are sent."""
CPU_EVERY_S = 0.25
CPU_SAMPLES = 2000
"""Samples of a client's CPU time that are sent; of a longer run every other one is dropped, again and again."""
COMMAND_LIMIT_S = 20
GPU_QUERY = "name,driver_version,power.limit,clocks.max.sm"

_PLACES = re.compile(r"\bN\d+=\d+|\bkernelpagesize_kB=\d+")


def service_of(name: str) -> dict[str, Any]:
    """The service's description on this node; {} when there is none."""
    try:
        found = json.loads((SERVICES / f"{name}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


# --- the log -----------------------------------------------------------------------------------------------


def mark(folder: Path) -> dict[str, Any]:
    """Where the log ends now: the newest file's name and its size."""
    files = log_files(folder)
    return {"file": files[-1].name, "size": files[-1].stat().st_size} if files else {"file": "", "size": 0}


def log_files(folder: Path) -> list[Path]:
    """The log's files, oldest first; their names begin with a rising number."""
    return sorted((path for path in folder.glob("*.log*") if not path.is_symlink()), key=plain_name)


def plain_name(path: Path) -> str:
    """A file's name before it was compressed."""
    return path.name[:-3] if path.name.endswith(".gz") else path.name


def since(folder: Path, begun: Mapping[str, Any]) -> str:
    """The log from a mark on, through rotations, the newest LOG_LIMIT bytes of it."""
    parts = []
    for path in log_files(folder):
        if plain_name(path) < begun["file"]:
            continue
        try:
            with gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as stream:
                stream.seek(begun["size"] if plain_name(path) == begun["file"] else 0)
                parts.append(stream.read())
        except (OSError, EOFError):
            continue  # compressed or removed in this very moment
    return b"".join(parts)[-LOG_LIMIT:].decode(errors="replace")


# --- what runs, and where ----------------------------------------------------------------------------------


def processes(unit: str) -> list[int]:
    """The unit's main process and all that it started."""
    said = _output(["systemctl", "show", "-P", "MainPID", f"{unit}.service"])
    main = int(said) if said.isdigit() else 0
    if not main:
        return []
    parents: dict[int, int] = {}
    for path in PROC.glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
    found, new = [main], {main}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new} - set(found)
        found += sorted(new)
    return found


def command_line(pid: int) -> list[str]:
    """A process's arguments; [] when it is gone."""
    try:
        words = (PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return []
    return [word.decode(errors="replace") for word in words[:-1]]


def maps(pids: list[int]) -> dict[str, str]:
    """Process -> its numa_maps, each line reduced to pages by node and the page size."""
    found: dict[str, str] = {}
    left = MAPS_LIMIT
    for pid in pids:
        try:
            lines = (PROC / str(pid) / "numa_maps").read_text(errors="replace").splitlines()
        except OSError:
            continue
        kept = [" ".join(_PLACES.findall(line)) for line in lines if " N" in line]
        text = "\n".join(kept)[:left]
        left -= len(text)
        if text:
            found[str(pid)] = text
    return found


def packages(program: str) -> dict[str, str]:
    """Installed packages and versions of the environment that a program belongs to."""
    found: dict[str, str] = {}
    for path in Path(program).parent.parent.glob("lib/python*/site-packages/*.dist-info"):
        name, _, version = path.name[: -len(".dist-info")].rpartition("-")
        found[name.lower().replace("_", "-")] = version
    return found


def facts(service: Mapping[str, Any]) -> dict[str, Any]:
    """Kernel, processor, GPUs, packages and the running command line."""
    pids = processes(str(service.get("unit", "")))
    gpus = _output(["nvidia-smi", f"--query-gpu={GPU_QUERY}", "--format=csv,noheader"])
    return {
        "kernel": os.uname().release,
        "arch": os.uname().machine,
        "cpu": _cpu(),
        "cpus": len(os.sched_getaffinity(0)),
        "gpus": gpus.splitlines(),
        "argv": command_line(pids[0]) if pids else [],
        "packages": packages(str(service.get("program", ""))),
    }


def _cpu() -> str:
    try:
        text = (PROC / "cpuinfo").read_text(errors="replace")
    except OSError:
        return ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else ""


def _output(argv: list[str]) -> str:
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


# --- the way -----------------------------------------------------------------------------------------------


def trip_ms(host: str, port: int, path: str, count: int = TRIP_REQUESTS) -> float:
    """Median milliseconds of a GET on a kept connection, from here. Raises OSError."""
    connection = http.client.HTTPConnection(host, port, timeout=COMMAND_LIMIT_S)
    took = []
    try:
        for _ in range(count):
            began = time.perf_counter()
            connection.request("GET", path)
            connection.getresponse().read()
            took.append((time.perf_counter() - began) * 1000)
    except http.client.HTTPException as error:
        raise OSError(str(error)) from None
    finally:
        connection.close()
    return statistics.median(took)


# --- the engine's own client -------------------------------------------------------------------------------


def cpu_seconds(pid: int) -> float:
    """Seconds of CPU that a process (all its threads) has had. Raises OSError when it is gone."""
    words = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def watch_cpu(pid: int, over: threading.Event, samples: list[list[float]]) -> None:
    """Appends (seconds of this machine's monotonic clock, CPU seconds) until the process or the watch is over."""
    every = 1
    while True:
        try:
            samples.append([round(time.perf_counter(), 3), round(cpu_seconds(pid), 2)])
        except (OSError, IndexError, ValueError):
            return
        if len(samples) > CPU_SAMPLES:
            del samples[1::2]
            every *= 2
        if over.wait(CPU_EVERY_S * every):
            return


def client(request: Mapping[str, Any]) -> dict[str, Any]:
    """Runs a command whose `{result}` is a new file; its exit code, what it wrote there, its last words, and
    how much CPU it had when (`cpu`)."""
    environment = {"PATH": os.defpath, "LC_ALL": "C.UTF-8", **request["environment"]}
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        as_user: dict[str, Any] = {}
        if os.geteuid() == 0 and request["user"]:
            found = pwd.getpwnam(request["user"])
            os.chown(folder, found.pw_uid, found.pw_gid)
            as_user = {"user": found.pw_uid, "group": found.pw_gid, "extra_groups": []}
        environment.update(HOME=folder)
        if request["key"] and request["key_file"]:
            environment[request["key"]] = Path(request["key_file"]).read_text(encoding="utf-8").strip()
        argv = [word.replace("{result}", str(result)) for word in request["argv"]]
        try:
            process = subprocess.Popen(
                argv,
                env=environment,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                **as_user,
            )
        except OSError as error:
            return {"code": 127, "result": "", "said": str(error), "cpu": []}
        over, samples = threading.Event(), list[list[float]]()
        watcher = threading.Thread(target=watch_cpu, args=(process.pid, over, samples), daemon=True)
        watcher.start()
        try:
            said, _ = process.communicate(timeout=request["limit_s"])
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return {
                "code": 124,
                "result": "",
                "said": f"took longer than {request['limit_s']:g} s",
                "cpu": [],
            }
        finally:
            over.set()
            watcher.join()
        text = result.read_text(encoding="utf-8", errors="replace") if result.is_file() else ""
    words = said.decode(errors="replace")[-SAID:]
    return {"code": process.returncode, "result": text, "said": words, "cpu": samples}


def main(request: Mapping[str, Any]) -> None:
    """Looks as `request` says and prints one JSON object."""
    name = str(request["service"])
    service = service_of(name)
    if request["what"] == "begin":
        found: dict[str, Any] = {"mark": mark(LOGS / name), "facts": facts(service)}
    elif request["what"] == "end":
        pids = processes(str(service.get("unit", "")))
        found = {"log": since(LOGS / name, request["mark"]), "maps": maps(pids), "processes": len(pids)}
    elif request["what"] == "client":
        found = client(request)
    else:
        try:
            ms = trip_ms(str(service["address"]), int(service["port"]), str(request["path"]))
            found = {"trip_ms": ms}
        except (OSError, KeyError) as error:
            found = {"error": str(error)}
    json.dump(found, sys.stdout)
