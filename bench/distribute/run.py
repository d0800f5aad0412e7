"""How long until N nodes have a model, against the time that one network card needs for one copy.

    sudo .venv/bin/python bench/distribute/run.py [--nodes 8] [--mib 256] [--mbit 200] [--ways star,chain]

Ways: chain (ours), killed (the same, and a node dies after a third of a copy's time), star (each from the first
node), and of others.py udpcast, udpcast-killed and libtorrent, whose `arrived_of_one_nic` is without the hashing of
what has come: it costs more here, where all nodes share the cores, than on nodes of their own.

Each node is a network namespace behind its own rate limit (token bucket both ways) on one bridge. Needs
root, `ip` and `tc`. Prints one JSON object; times are from the start of the processes until the folder of
every (living) node is ready. `up_s` of them is until the last node listens (it has nothing yet then): here all
nodes share this machine's cores, so this is mostly the start of N + 1 Pythons; `since_up` is the rest against one
card's time. `cpu_s_gib` is the CPU time (system and user) of all processes a node and GiB received, start included.
Give --folder a memory file system, or the disk is what is measured. On a busy machine begin with `chrt -r 5`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.distribute import others  # noqa: E402 (the checkout must be on the path first)

SWITCH = "bgsw"
PREFIX = "bgn"
PORT = 7801
LIMIT_S = 900.0
OURS = ("chain", "killed", "star")
KILLED = "-killed"
STAR = """
import json, sys
from pathlib import Path
from bringup.node import store
spec = json.loads(Path(sys.argv[1]).read_text())
store.PROGRESS = Path(sys.argv[1] + ".progress")
sources = [{"kind": "http", "locator": spec["origin"]}]
store.ensure(store.Model.of({**spec["model"], "sources": sources}), store.Access())
"""


def sh(*argv: str) -> None:
    """Runs a command that must work."""
    subprocess.run(argv, check=True, capture_output=True)


@contextmanager
def network(nodes: int, mbit: int) -> Iterator[None]:
    """Namespaces bgn0..., each with 10.99.0.(i+1) behind its rate limit."""
    names = [SWITCH, *(f"{PREFIX}{index}" for index in range(nodes))]
    for name in names:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
    try:
        sh("ip", "netns", "add", SWITCH)
        sh("ip", "-n", SWITCH, "link", "add", "br0", "type", "bridge")
        sh("ip", "-n", SWITCH, "link", "set", "br0", "up")
        for index in range(nodes):
            space, port = f"{PREFIX}{index}", f"p{index}"
            sh("ip", "netns", "add", space)
            sh("ip", "-n", space, "link", "set", "lo", "up")
            sh(
                "ip",
                "link",
                "add",
                "e0",
                "netns",
                space,
                "type",
                "veth",
                "peer",
                "name",
                port,
                "netns",
                SWITCH,
            )
            sh("ip", "-n", SWITCH, "link", "set", port, "master", "br0")
            sh("ip", "-n", SWITCH, "link", "set", port, "up")
            sh("ip", "-n", space, "addr", "add", f"10.99.0.{index + 1}/24", "brd", "+", "dev", "e0")
            sh("ip", "-n", space, "link", "set", "e0", "up")
            limit = ["root", "tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "50ms"]
            sh("tc", "-n", space, "qdisc", "add", "dev", "e0", *limit)
            sh("tc", "-n", SWITCH, "qdisc", "add", "dev", port, *limit)
        yield
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def make(folder: Path, mib: int, files: int) -> list[dict[str, Any]]:
    """The head's files, of random bytes; returns their lock."""
    folder.mkdir(parents=True)
    rows = []
    for number in range(files):
        digest = hashlib.sha256()
        size = mib * 1024 * 1024 // files
        with (folder / f"part-{number}.bin").open("wb") as file:
            for _ in range(size // 65536):
                block = os.urandom(65536)
                digest.update(block)
                file.write(block)
        rows.append({"path": f"part-{number}.bin", "size": size, "sha256": digest.hexdigest()})
    return rows


def inside(node: int, argv: Sequence[str], base: Path) -> subprocess.Popen[bytes]:
    """A process of a node; what Python compiles of our modules is kept, as it is on a node."""
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(base / "compiled")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return subprocess.Popen(
        ["ip", "netns", "exec", f"{PREFIX}{node}", *argv], cwd=ROOT, env=environment, start_new_session=True
    )


def end(process: subprocess.Popen[bytes]) -> None:
    """Kills a process with its children."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def listens(process: subprocess.Popen[bytes]) -> bool:
    """Does somebody listen on the relays' port in a process's network?"""
    wanted = f":{PORT:04X}"
    try:
        rows = Path(f"/proc/{process.pid}/net/tcp").read_text().splitlines()[1:]
    except OSError:
        return False
    return any(row.split()[1].endswith(wanted) and row.split()[3] == "0A" for row in rows)


def cpu() -> float:
    """CPU seconds of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def play(way: str, base: Path, rows: Sequence[dict[str, Any]], nodes: int, t1: float) -> dict[str, float]:
    """Seconds until all nodes are ready (until all listened, until all bytes had arrived), and the CPU seconds of
    all processes. A way that ends with `killed`: node 2 dies after a third of a copy's time."""
    running: dict[int, subprocess.Popen[bytes]] = {}
    for node in range(1, nodes):
        shutil.rmtree(base / str(node), ignore_errors=True)
    shutil.rmtree(base / "0" / "demo" / ".bringup", ignore_errors=True)
    ours = way in OURS
    if way == "libtorrent":
        others.prepare(base)
    began, up, there, seconds = cpu(), 0.0, 0.0, 0.0
    argvs = [command(way, base, rows, node, nodes) for node in range(nodes)]
    started = time.monotonic()
    try:
        for node, argv in enumerate(argvs):
            running[node] = inside(node, argv, base)
        waiting = set(range(1, nodes))
        coming = set() if ours else set(waiting)
        silent = set(range({"star": 1}.get(way, nodes if ours else 0)))
        while waiting:
            silent = {node for node in silent if not listens(running[node])}
            up = up or (0.0 if silent or not ours else time.monotonic() - started)
            coming = {node for node in coming & waiting if not others.arrived(base, node)}
            there = there or (0.0 if coming else time.monotonic() - started)
            if time.monotonic() - started > LIMIT_S:
                raise SystemExit(f"{way}: nodes {sorted(waiting)} were not ready after {LIMIT_S} s")
            if way.endswith("killed") and 2 in waiting and time.monotonic() - started > t1 / 3:
                end(running[2])
                waiting.discard(2)
            waiting = {
                node for node in waiting if not (base / str(node) / "demo/.bringup/ready.json").exists()
            }
            time.sleep(0.02)
        seconds = time.monotonic() - started
    finally:
        for process in running.values():
            end(process)
    return {
        "seconds": seconds,
        "up_s": up,
        "arrived_s": seconds if ours else there,
        "cpu_s": cpu() - began,
    }


def command(way: str, base: Path, rows: Sequence[dict[str, Any]], node: int, nodes: int) -> list[str]:
    """What runs on a node."""
    if way not in OURS:
        others.spec(base, node, rows)
        return others.WAYS[way.removesuffix(KILLED)](base, node, nodes)
    addresses = [f"http://10.99.0.{before + 1}:{PORT}" for before in range(node - 1, -1, -1)]
    spec = {
        "model": {"name": "demo", "folder": str(base / str(node) / "demo"), "files": list(rows)},
        "listen": ["0.0.0.0", PORT],
        "upstreams": addresses,
        "origin": f"http://10.99.0.1:{PORT}",
        "idle_s": 60,
    }
    path = base / f"{node}.json"
    path.write_text(json.dumps(spec))
    if way != "star":
        return [sys.executable, "-m", "bringup.node.relay", str(path)]
    if node == 0:
        return [sys.executable, "-m", "http.server", str(PORT), "--directory", str(base / "0" / "demo")]
    return [sys.executable, "-c", STAR, str(path)]


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=8, help="nodes that need the model; one more holds it")
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--mbit", type=int, default=200)
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--ways", default="chain,killed,star")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument(
        "--folder", help="where the nodes keep their files (default: the folder for temporary files)"
    )
    given = parser.parse_args()
    t1 = given.mib * 1024 * 1024 * 8 / (given.mbit * 1e6)
    result: dict[str, Any] = {"schema_version": 1, "nodes": given.nodes, "mib": given.mib, "mbit": given.mbit}
    result.update(one_nic_s=round(t1, 2), ways={})
    with tempfile.TemporaryDirectory(dir=given.folder) as folder, network(given.nodes + 1, given.mbit):
        base = Path(folder)
        rows = make(base / "0" / "demo", given.mib, given.files)
        inside(0, [sys.executable, "-c", "import bringup.node.relay"], base).wait()
        for way in given.ways.split(","):
            if lacking := others.missing(way.removesuffix(KILLED)):
                print(f"{way}: left out, {', '.join(lacking)} is not here", file=sys.stderr)
                continue
            runs = []
            for _ in range(given.repeats):
                run = play(way, base, rows, given.nodes + 1, t1)
                run.update(of_one_nic=run["seconds"] / t1, since_up=(run["seconds"] - run["up_s"]) / t1)
                run.update(arrived_of_one_nic=run.pop("arrived_s") / t1)
                run.update(load_1m=os.getloadavg()[0])
                run["cpu_s_gib"] = run["cpu_s"] / given.nodes / (given.mib / 1024)
                runs.append({name: round(value, 3) for name, value in run.items()})
                print(f"{way}: {json.dumps(runs[-1])}", file=sys.stderr, flush=True)
            result["ways"][way] = {"runs": runs}
            for name in ("of_one_nic", "since_up", "arrived_of_one_nic"):
                found = [run[name] for run in runs]
                spread = {"median": round(statistics.median(found), 3), "min": min(found), "max": max(found)}
                result["ways"][way][name] = spread
    print(json.dumps(result))


if __name__ == "__main__":
    main()
