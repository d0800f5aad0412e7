"""Start one engine under its unit: `serve.py NAME [--key HOW:NAME] -- ARGV...`, `--check NAME`, `--current
NAME`.

`--check` runs before the start, as root: it refuses, by name, what would make the start fail or do harm (port
taken, GPUs held, model not ready, program missing), and notes which definition is about to start. Without an
option it takes the API key from the unit's credentials and becomes the engine, so that no secret is in any
argv. `--current` prints, as JSON, whether the running server was started from what is on the disk now.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import json
import os
import runpy
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from bringup.node import common
from bringup.node.common import Refusal, say

REFUSED = 78
"""Exit code of a refusal (EX_CONFIG): told apart from an engine that failed."""

GPU_WAIT_S = 30.0
"""How long GPUs may take to be given back by processes that are just being killed."""

NODE_SHM = Path("/proc/1/root/dev/shm")
"""The unit, its checks too, has a /dev/shm of its own; what was run by hand leaves its memory in the node's."""

GPU_IDLE_MIB = 2048
"""So much memory a GPU may hold that nobody uses (driver, persistence)."""

FABRIC_UNIT = "nvidia-fabricmanager.service"

BUILD_LOCKS = ".cache/torch_extensions/*/*/lock"
"""In a cache folder, which is the server's HOME: what torch.utils.cpp_extension takes while it builds."""

CACHE_ROOM_BYTES = 64 * 1024 * 1024

PORT_WAIT_S = 10.0
POLL_S = 0.5


def started_file(unit: str) -> Path:
    """Where the check notes what is being started (kept in memory: gone after a reboot, like the process)."""
    return common.RUN / "started" / f"{unit}.json"


def definition_digest(paths: Iterable[str]) -> str:
    """One sha256 over the files that define a server, by path and content; a missing file counts as such."""
    total = hashlib.sha256()
    for path in sorted(paths):
        try:
            content = hashlib.sha256(Path(path).read_bytes()).hexdigest()
        except OSError as error:
            content = f"errno {error.errno}"
        total.update(f"{path}\0{content}\n".encode())
    return total.hexdigest()


def check_program(service: Mapping[str, Any]) -> None:
    """The engine's program is there and may be run."""
    program = service["program"]
    if not os.access(program, os.X_OK):
        raise Refusal(
            "program-missing", f"{program} is not there. Provision the environment again (tag engine_env)"
        )


def check_model(service: Mapping[str, Any]) -> None:
    """The model store says that the model is complete and verified."""
    stamp = service.get("model_stamp")
    if stamp and not Path(stamp).exists():
        raise Refusal(
            "model-not-ready",
            f"{stamp} is missing: the model is not complete. Provision it again (tag model_store)",
        )


def check_port(service: Mapping[str, Any], wait_s: float = PORT_WAIT_S) -> None:
    """Nothing listens on the service's address and port; waits a little for one that is just going."""
    address, port = service["bind"], int(service["port"])
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    until = time.monotonic() + wait_s
    while True:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
                return
            except OSError as error:
                if error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
                    raise Refusal(
                        "port-not-allowed", f"{address}:{port} cannot be bound: {error.strerror}"
                    ) from None
                problem = error.errno
        if problem == errno.EADDRNOTAVAIL:
            raise Refusal(
                "address-missing", f"{address} is no address of this node. Set the service's bind address"
            )
        if time.monotonic() >= until:
            raise Refusal(
                "port-taken",
                f"port {port} is taken by {_named(_listeners(port))}. Stop it, or choose another port",
            )
        time.sleep(POLL_S)


def _listeners(port: int) -> list[int]:
    return common.holders(common.sockets(port, common.LISTENING))


def _named(pids: Iterable[int]) -> str:
    return (
        ", ".join(f"process {pid} ({common.command_line(pid)})" for pid in sorted(set(pids)))
        or "an unknown process"
    )


def check_driver(
    service: Mapping[str, Any], run: Callable[[list[str]], tuple[int, str, str]] = common.run
) -> None:
    """The driver answers and shows the service's GPUs; where they are joined by switches, the fabric manager
    runs.
    """
    gpus = service.get("gpus") or []
    if not gpus:
        return
    code, out, err = run(["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"])
    if code != 0:
        said = next((line.strip() for line in (*err.splitlines(), *out.splitlines()) if line.strip()), "")
        raise Refusal("driver", f"the GPU driver does not answer: {said or code}. Run: invoke diagnose")
    there = {int(row) for row in out.split() if row.isdigit()}
    missing = ", ".join(str(gpu) for gpu in gpus if gpu not in there)
    if missing:
        raise Refusal(
            "gpu-missing", f"GPU {missing} is not there, the driver shows {len(there)}. Run: invoke diagnose"
        )
    if service.get("fabric"):
        _, out, _ = run(["systemctl", "show", FABRIC_UNIT, "--property", "LoadState,ActiveState"])
        state = dict(line.split("=", 1) for line in out.splitlines() if "=" in line)
        if state.get("LoadState") == "loaded" and state.get("ActiveState") != "active":
            raise Refusal(
                "fabric",
                f"{FABRIC_UNIT} is {state.get('ActiveState')}, and these GPUs are joined by switches."
                " Run: invoke diagnose",
            )


def check_caches(service: Mapping[str, Any]) -> None:
    """The folders that kernels compiled at run time are kept in are there, the server's own, and not full."""
    for path in service.get("writable") or []:
        try:
            status, disk = Path(path).stat(), os.statvfs(path)
        except OSError as error:
            raise Refusal(
                "cache-missing", f"{path}: {error.strerror}. Provision this node again (tag engine_service)"
            ) from None
        if service.get("user_id") is not None and status.st_uid != service["user_id"]:
            raise Refusal(
                "cache-not-writable",
                f"{path} does not belong to {service['user']}. Provision this node again (tag engine_service)",
            )
        if disk.f_bavail * disk.f_frsize < CACHE_ROOM_BYTES or disk.f_flag & os.ST_RDONLY:
            raise Refusal("cache-full", f"{path} has no room: what is compiled could not be kept. Free some")


def check_gpus(
    service: Mapping[str, Any],
    wait_s: float = GPU_WAIT_S,
    look: Callable[[Iterable[int]], list[tuple[int, int]]] = common.gpu_holders,
    memory: Callable[[Iterable[int]], dict[int, int]] = common.gpu_memory,
) -> None:
    """No process computes on the service's GPUs, and their memory is free; waits a little for ones that are just
    dying.
    """
    gpus = service.get("gpus") or []
    until = time.monotonic() + wait_s
    while gpus:
        held = look(gpus)
        used = {} if held else {gpu: mib for gpu, mib in memory(gpus).items() if mib > GPU_IDLE_MIB}
        if not held and not used:
            return
        if time.monotonic() >= until and used:
            listed = ", ".join(f"GPU {gpu} ({mib} MiB)" for gpu, mib in sorted(used.items()))
            raise Refusal(
                "gpu-held",
                f"memory is held on {listed}, and no process shows for it."
                " Look for containers and dead workers (fuser -v /dev/nvidia*), else: invoke run reset-gpus",
            )
        if time.monotonic() >= until:
            listed = ", ".join(sorted({str(gpu) for gpu, _ in held}))
            who = _named(pid for _, pid in held)
            raise Refusal("gpu-held", f"GPU {listed} is held by {who}. Run: invoke cleanup")
        time.sleep(POLL_S)


def sweep_shm(
    service: Mapping[str, Any], folder: Path = NODE_SHM, known_as: Path = Path("/dev/shm")
) -> list[str]:
    """Remove what this service's user left in the node's shared memory, and no process has open under the name that
    it is `known_as`; names of what went.

    Only for a user that serves this one service: with a shared user the neighbour's memory would go too.
    """
    if service.get("user_id") is None or not service.get("own_user"):
        return []
    swept = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.is_file() and path.lstat().st_uid == service["user_id"] and not open_by(known_as / path.name):
            path.unlink(missing_ok=True)
            swept.append(path.name)
    return swept


def stale_locks(service: Mapping[str, Any]) -> list[Path]:
    """Locks of builds at run time (torch's extensions) in the service's caches that no process holds.

    Such a lock is a file that is there while its builder has it open. One that was killed leaves it, and every start
    after that waits for it for ever.
    """
    folders = [Path(path) for path in service.get("writable") or []]
    found = [path for folder in folders for path in sorted(folder.glob(BUILD_LOCKS)) if path.is_file()]
    return [path for path in found if not open_by(path)]


def sweep_locks(service: Mapping[str, Any]) -> list[str]:
    """Remove locks that killed builds have left; their paths."""
    swept = stale_locks(service)
    for path in swept:
        path.unlink(missing_ok=True)
    return [str(path) for path in swept]


def open_by(path: Path) -> list[int]:
    """Processes that have `path` open or mapped."""
    found = []
    for pid in common.processes():
        with suppress(OSError):
            maps = (Path("/proc") / str(pid) / "maps").read_text(encoding="utf-8", errors="replace")
            if str(path) in common.open_files(pid) or str(path) in maps:
                found.append(pid)
    return found


def user_id(name: str) -> int | None:
    """The user's number; None when there is no such user."""
    import pwd

    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        return None


def log_mark(service: Mapping[str, Any]) -> dict[str, int]:
    """Where the service's log ends now, so that readers see this start's lines only."""
    path = service.get("log_path")
    try:
        status = Path(path).stat() if path else None
    except OSError:
        status = None
    return {"inode": status.st_ino, "offset": status.st_size} if status else {"inode": 0, "offset": 0}


def refuse(service: Mapping[str, Any], refusal: Refusal) -> None:
    """Say it and keep it where `status` and the role look."""
    say(f"not started: {refusal} [{refusal.name}]")
    common.write_json(
        common.STARTS / f"{service['unit']}.json",
        {
            "schema_version": 1,
            "unit": service["unit"],
            "service": service["name"],
            "outcome": "refused",
            "refusal": refusal.name,
            "why": str(refusal),
            "at": common.utc(),
            "invocation": os.environ.get("INVOCATION_ID", ""),
        },
    )


def check(name: str) -> int:
    """All checks before a start; 0, or REFUSED with the refusal said and kept."""
    # The unit's mask is for the engine's files; these records are for everyone.
    os.umask(0o022)
    service = common.load(name)
    service["user_id"] = user_id(service["user"])
    try:
        for one in (check_program, check_model, check_caches, check_port, check_driver, check_gpus):
            one(service)
    except Refusal as refusal:
        refuse(service, refusal)
        return REFUSED
    swept = sweep_shm(service)
    if swept:
        say(f"swept shared memory that an earlier run left: {', '.join(swept)}")
    unlocked = sweep_locks(service)
    if unlocked:
        say(f"removed locks that a killed build left: {', '.join(unlocked)}")
    common.write_json(
        started_file(service["unit"]),
        {
            "digest": definition_digest(service["definition"]),
            "invocation": os.environ.get("INVOCATION_ID", ""),
            "at": common.utc(),
            "log": log_mark(service),
        },
    )
    return 0


def current(name: str) -> dict[str, Any]:
    """Is the server running, from the definition on the disk? {exists, active, state, due, why}."""
    service = common.load(name)
    shown = common.unit_state(
        f"{service['unit']}.service", ("ActiveState", "InvocationID", "LoadState", "NeedDaemonReload")
    )
    noted = common.read_json(started_file(service["unit"]))
    active = shown["ActiveState"] == "active"
    why = ""
    if not active:
        why = f"it is {shown['ActiveState'] or 'not there'}"
    elif noted.get("invocation") != shown["InvocationID"]:
        why = "it is not known what it was started from"
    elif noted.get("digest") != definition_digest(service["definition"]):
        why = "its definition changed"
    elif shown["NeedDaemonReload"] == "yes":
        why = "systemd has not read its unit again"
    return {"active": active, "state": shown["ActiveState"], "due": bool(why), "why": why}


def with_key(
    argv: list[str], how: str, name: str, environment: dict[str, str]
) -> tuple[list[str], dict[str, str], bool]:
    """argv, environment and "in this process?" for an engine that takes its key as `how` says.

    environment: a variable; file_flag: a flag with the credential's path; flag: a flag with the value, which
    is only ever added to `sys.argv` inside the engine's own interpreter (third value True), never to an argv
    of the kernel.
    """
    path = Path(environment.get("CREDENTIALS_DIRECTORY", "/nonexistent")) / "api_key"
    try:
        key = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise Refusal(
            "no-key", f"the API key cannot be read: {error}. Set the vault variable and provision again"
        ) from None
    if not key:
        raise Refusal("no-key", "the API key is empty. Set the vault variable and provision again")
    if how == "environment":
        return argv, {**environment, name: key}, False
    if how == "file_flag":
        return [*argv, name, str(path)], environment, False
    if how == "flag":
        return [*argv, name, key], environment, True
    raise Refusal("bad-description", f"unknown way to give a key: {how}. Provision this node again")


def interpreter_of(program: str) -> list[str]:
    """The Python that runs `program`: itself, or the one of its first line. Raises Refusal when it is no
    Python program.
    """
    if Path(program).name.startswith("python"):
        return [program]
    with Path(program).open("rb") as file:
        first = file.readline(1024).decode(errors="replace").strip()
    words = first[2:].split() if first.startswith("#!") else []
    if words and "python" in Path(words[0]).name:
        return [words[0], program]
    raise Refusal(
        "key-in-argv",
        f"{program} is no Python program: its key would be visible in argv. Use a key file or variable",
    )


PYTHON_OPTIONS = frozenset({"-u", "-B", "-s", "-E", "-O"})


def inside_command(argv: list[str], key: str) -> list[str]:
    """The argv that starts a Python engine through this file, which then adds the key to `sys.argv` only."""
    python, *rest = interpreter_of(argv[0])
    rest += argv[1:]
    options = []
    while rest and rest[0] in PYTHON_OPTIONS:
        options.append(rest.pop(0))
    if not rest or (rest[0].startswith("-") and rest[0] != "-m"):
        raise Refusal(
            "bad-description",
            f"cannot give a key to {' '.join(argv[:3])} inside Python. Provision this node again",
        )
    return [python, *options, str(Path(__file__).resolve()), "--inside", key, "--", *rest]


def inside(argv: list[str]) -> None:
    """Run a Python program in this process as if `python ARGV` had been called (`-m module` or a script)."""
    if argv[0] == "-m":
        del sys.path[0]
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(argv[0]).parent)
        sys.argv = argv
        runpy.run_path(argv[0], run_name="__main__")


def with_tools(argv: list[str], environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with the engine's own folder of programs in front: what it compiles at its start calls
    `ninja` by name, which lies there (SGLang 0.5.15 on a node without another one died of it)."""
    folder = str(Path(argv[0]).parent)
    path = environment.get("PATH", os.defpath)
    return dict(environment) if folder in path.split(":") else {**environment, "PATH": f"{folder}:{path}"}


def become(argv: list[str], key: str | None) -> None:
    """Replace this process by the engine; comes back only by an exception."""
    environment = with_tools(argv, os.environ)
    command = argv
    if key:
        how, _, name = key.partition(":")
        command, environment, in_process = with_key(argv, how, name, environment)
        if in_process:
            command = inside_command(argv, key)
    os.execve(command[0], command, environment)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="serve.py", description="start one engine under its unit")
    parser.add_argument("--check", metavar="NAME")
    parser.add_argument("--current", metavar="NAME")
    parser.add_argument("--key", metavar="HOW:NAME")
    parser.add_argument("--inside", metavar="HOW:NAME")
    cut = words.index("--") if "--" in words else len(words)
    options, argv = parser.parse_args(words[:cut]), words[cut + 1 :]
    try:
        if options.check:
            return check(options.check)
        if options.current:
            print(json.dumps(current(options.current)))
            return 0
        if options.inside:
            how, _, name = options.inside.partition(":")
            inside(with_key(argv, how, name, dict(os.environ))[0])
            return 0
        become(argv, options.key)
        return REFUSED
    except Refusal as refusal:
        say(f"not started: {refusal} [{refusal.name}]")
        return REFUSED
    except OSError as error:
        say(f"not started: {error}")
        return REFUSED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
