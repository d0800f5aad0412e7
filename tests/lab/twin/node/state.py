"""What a twin is: hardware that it wears, and what its pretended kernel has loaded. Standard library only.

`hardware.json` comes from the controller (recorded or composed, with faults in it). `kernel.json` is made
anew at each boot: the loaded module and settings that do not outlive one. `TWIN_ROOT` puts every path under
a folder, so that a test needs no container.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
from pathlib import Path
from typing import Any

PR_SET_NAME = 15

NO_DRIVER = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
NO_DRIVER += "Make sure that the latest NVIDIA driver is installed and running."


def root() -> Path:
    """The folder that stands for `/`."""
    return Path(os.environ.get("TWIN_ROOT", "/"))


def at(path: str) -> Path:
    """An absolute path of the twin."""
    return root() / path.lstrip("/")


def kernel_release() -> str:
    """The release of the kernel that runs (the machine's own: a container has no other)."""
    return platform.release()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty when there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes beside and renames, so that no reader sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(value, indent=1), encoding="utf-8")
    beside.replace(path)


def hardware() -> dict[str, Any]:
    """The hardware that this twin wears."""
    return read_json(at("/var/lib/twin/hardware.json"))


def kernel() -> dict[str, Any]:
    """What the pretended kernel has loaded: `module` (version, open) or None, `settings` of GPUs by index."""
    return {"module": None, "settings": {}, **read_json(at("/var/lib/twin/kernel.json"))}


def save_kernel(value: dict[str, Any]) -> None:
    """Notes what is loaded now."""
    write_json(at("/var/lib/twin/kernel.json"), value)


def set_at(data: Any, dotted: str, value: Any) -> None:
    """Sets `gpus.3.on_bus` in plain data; `*` is every row of a list."""
    first, _, rest = dotted.partition(".")
    if first == "*":
        for index in range(len(data)):
            set_at(data, f"{index}.{rest}" if rest else str(index), value)
        return
    key: Any = int(first) if isinstance(data, list) else first
    if rest:
        set_at(data[key], rest, value)
    else:
        data[key] = value


def on_bus(worn: dict[str, Any]) -> list[dict[str, Any]]:
    """GPUs that the PCI bus shows."""
    return [gpu for gpu in worn.get("gpus", []) if gpu.get("on_bus", True)]


def usable(worn: dict[str, Any]) -> list[dict[str, Any]]:
    """GPUs that the driver has brought up, a lost one among them (the driver knows it and cannot reach it)."""
    return [gpu for gpu in on_bus(worn) if not gpu.get("fails_init")]


def loaded() -> dict[str, Any] | None:
    """The loaded NVIDIA module (version, open), None when there is none."""
    found: dict[str, Any] | None = kernel()["module"]
    return found


def module_file() -> Path:
    """The kernel module that a stand-in package builds for the running kernel."""
    return at(f"/lib/modules/{kernel_release()}/updates/dkms/nvidia.ko")


def library_version(name: str = "libnvidia-ml.so") -> str | None:
    """The version of the driver's library on the disk: the newest, as the linker would take it."""
    found = [
        match[1]
        for folder in ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64")
        for path in at(folder).glob(f"{name}.*.*")
        if (match := re.fullmatch(rf"{re.escape(name)}\.(\d+\.\d+(?:\.\d+)?)", path.name))
    ]
    return max(found, key=lambda version: [int(part) for part in version.split(".")], default=None)


def files(worn: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Files that faults put on a twin: path -> `text` or `bytes` (a size). `{model}`, `{shard}`, `{cache}` and `{unit}`
    in a path are those of the twin's first service."""
    places = worn.get("places", {})
    return {
        str(row["path"]).format_map(places): row
        for row in worn.get("files", [])
        if all(part.partition("}")[0] in places for part in str(row["path"]).split("{")[1:])
    }


def write_file(path: Path, row: dict[str, Any]) -> None:
    """Writes a fault's file: its text, or as many bytes as it says, allocated."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(row.get("text", ""), encoding="utf-8")
    if row.get("bytes"):
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, int(row["bytes"]))


def name_process(name: str) -> None:
    """Says in the process's own name (`ps -o comm`) that it is a stand-in."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0)
