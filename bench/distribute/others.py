"""The same task by tools that others keep: what runs on each node, and afterwards the check that ours has built in.

udpcast sends everything to all at once (multicast); libtorrent is a swarm whose members are told each other. Packages
of Debian: udpcast, python3-libtorrent. What has arrived is noted first, then the files are hashed as ours are.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

SYSTEM_PYTHON = "/usr/bin/python3"
"""The one that Debian's python3-libtorrent is for."""

PEER_PORT = 6881
RETRIES = 20
"""udpcast asks a receiver that is silent so often before it goes on without it (its own default: 200)."""

PIECE_BYTES = 256 * 1024
VERIFY = """
import json, sys
from pathlib import Path
from bringup.node import store
model = store.Model.of(json.loads(Path(sys.argv[1]).read_text())["model"])
Path(sys.argv[1] + ".arrived").touch()
wrong = store.verify(model, deep=True)
sys.exit(str(wrong)) if wrong else store.finish(model)
"""
MAKE_TORRENT = """
import sys
import libtorrent
folder, target, piece = sys.argv[1:]
files = libtorrent.file_storage()
libtorrent.add_files(files, folder, lambda path: ".bringup" not in path)
made = libtorrent.create_torrent(files, int(piece), libtorrent.create_torrent.v1_only)
libtorrent.set_piece_hashes(made, folder.rpartition("/")[0])
with open(target, "wb") as file:
    file.write(libtorrent.bencode(made.generate()))
"""
SWARM = """
import subprocess, sys, time
import libtorrent
torrent, folder, port, me, check, *peers = sys.argv[1:]
session = libtorrent.session({
    "listen_interfaces": f"{me}:{port}", "enable_dht": False, "enable_lsd": False, "enable_upnp": False,
    "enable_natpmp": False, "allow_multiple_connections_per_ip": True, "mixed_mode_algorithm": 0,
})
handle = session.add_torrent({"ti": libtorrent.torrent_info(torrent), "save_path": folder})
for peer in peers:
    handle.connect_peer((peer, int(port)))
while not handle.status().is_seeding:
    time.sleep(0.02)
if check:
    subprocess.run(check, shell=True, check=True)
time.sleep(600)
"""


def check(spec: Path) -> str:
    """The shell command that hashes what has arrived."""
    return shlex.join([sys.executable, "-c", VERIFY, str(spec)])


def shell(text: str) -> list[str]:
    """A shell command as a node's process."""
    return ["bash", "-c", f"set -eo pipefail; {text}"]


def address(node: int) -> str:
    """A node's address on the bench's network."""
    return f"10.99.0.{node + 1}"


def udpcast(base: Path, node: int, nodes: int) -> list[str]:
    """One stream to all who have come; the sender waits for all of them."""
    folder = shlex.quote(str(base / str(node) / "demo"))
    options = "--interface e0 --nokbd --no-progress"
    if node == 0:
        sender = f"udp-sender {options} --min-receivers {nodes - 1} --retries-until-drop {RETRIES}"
        return shell(f"tar -C {folder} --exclude=.bringup -c . | {sender}; sleep 600")
    take = f"mkdir -p {folder}; udp-receiver {options} | tar -C {folder} -x"
    return shell(f"{take}; {check(base / f'{node}.json')}; sleep 600")


def libtorrent(base: Path, node: int, nodes: int) -> list[str]:
    """A swarm whose members know each other."""
    peers = [address(other) for other in range(nodes) if other != node]
    after = check(base / f"{node}.json") if node else ""
    argv = [SYSTEM_PYTHON, "-c", SWARM, str(base / "demo.torrent"), str(base / str(node))]
    return [*argv, str(PEER_PORT), address(node), after, *peers]


WAYS: Mapping[str, Callable[[Path, int, int], list[str]]] = {
    "udpcast": udpcast,
    "libtorrent": libtorrent,
}
PROGRAMS = {"udpcast": ["udp-sender"], "libtorrent": [SYSTEM_PYTHON]}


def missing(way: str) -> list[str]:
    """The programs that a way needs and that are not here."""
    return [name for name in PROGRAMS.get(way, []) if not shutil.which(name)]


def prepare(base: Path) -> None:
    """The torrent of the first node's files. Raises CalledProcessError."""
    argv = [SYSTEM_PYTHON, "-c", MAKE_TORRENT, str(base / "0" / "demo"), str(base / "demo.torrent")]
    subprocess.run([*argv, str(PIECE_BYTES)], check=True, capture_output=True)


def arrived(base: Path, node: int) -> bool:
    """Has a node all bytes, hashed or not?"""
    return Path(f"{base / f'{node}.json'}.arrived").exists()


def spec(base: Path, node: int, rows: Any) -> None:
    """What `check` reads."""
    model = {"name": "demo", "folder": str(base / str(node) / "demo"), "files": list(rows)}
    (base / f"{node}.json").write_text(json.dumps({"model": model}))
    Path(f"{base / f'{node}.json'}.arrived").unlink(missing_ok=True)
