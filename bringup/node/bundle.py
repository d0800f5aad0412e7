"""What support needs to know of this node, as texts (module `node_bundle`). Looks, and changes nothing.

Nothing is hidden here: the controller takes secrets out before anything is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .common import run

COMMAND_LIMIT_S = 30.0
TAIL_BYTES = 512 * 1024
"""The most that is taken of one file, from its end."""

COMMANDS: Mapping[str, str] = {
    "system/uname": "uname -a",
    "system/os-release": "cat /etc/os-release",
    "system/boots": "journalctl --list-boots --no-pager",
    "system/kernel.log": "journalctl --dmesg --boot --no-pager --lines=2000 --output=short-iso",
    "system/memory": "cat /proc/meminfo",
    "system/cpus": "lscpu",
    "system/numa": "numactl --hardware",
    "system/disks": "df -h",
    "system/mounts": "cat /proc/mounts",
    "system/processes": "ps -eo pid,ppid,user,etimes,rss,stat,comm,args --sort=-rss",
    "system/sockets": "ss -lntp",
    "system/pci": "lspci -nn",
    "system/limits": "sysctl -a",
    "gpu/list": "nvidia-smi -L",
    "gpu/query": "nvidia-smi -q",
    "gpu/topology": "nvidia-smi topo -m",
    "gpu/fabric": "systemctl status nvidia-fabricmanager --no-pager",
    "units/list": "systemctl list-units bringup* --all --no-pager --plain",
    "units/timers": "systemctl list-timers bringup* --all --no-pager",
    "units/journal": "journalctl --unit=bringup* --no-pager --lines=3000 --output=short-iso",
    "units/text": "systemctl cat bringup* --no-pager",
}
FILES = (
    "/etc/bringup/plan.json",
    "/etc/bringup/services/*.json",
    "/etc/bringup/services/*.env",
    "/var/lib/bringup/starts/*.json",
    "/var/lib/bringup/restarts/*.json*",
    "/var/lib/bringup/runs/*.json",
    "/var/lib/bringup/crashes/*/*",
    "/var/log/bringup/*/engine.log",
    "/var/log/bringup/environments/*.log",
)


def gather(root: Path = Path("/")) -> dict[str, str]:
    """Name in the bundle -> text. A command that is not there says so in its text."""
    found = {}
    for name, command in COMMANDS.items():
        code, out, err = run(command.split(), timeout_s=COMMAND_LIMIT_S)
        found[name] = out if code == 0 else f"{out}{err}\n(exit {code})\n"
    for pattern in FILES:
        for path in sorted(root.glob(pattern.lstrip("/"))):
            if path.is_file():
                found[f"files/{path.relative_to(root)}"] = tail(path)
    return found


def tail(path: Path, most: int = TAIL_BYTES) -> str:
    """The end of a file; a cut file begins with a whole line."""
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(max(0, size - most))
            text = stream.read(most).decode(errors="replace")
    except OSError as error:
        return f"({error.strerror})\n"
    return text.partition("\n")[2] if size > most else text
