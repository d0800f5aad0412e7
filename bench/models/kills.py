"""How downloads stand being killed: each run is ended by kill -9 at random moments and must end bit-identical.

    .venv/bin/python bench/models/kills.py [--runs 50] [--kills 3] [--mib 24] [--seed 1] [--way http|relay|mixed]

The client is the node's own (`bringup/node/store.py`, and for `relay` the follower of a chain) in a process of
its own, the hub is a stand-in on this machine that limits the rate. Prints one JSON object; exit code 1 when a
run did not end ready and bit-identical, or a killed client had left something ready.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bringup.node import relay, store  # noqa: E402 (the checkout must be on the path first)
from tests.standin.hub import REPOSITORY, Hub, serving  # noqa: E402
from tests.standin.models import free_port, parts, rows_of  # noqa: E402

FILES = 6
RUN_LIMIT_S = 120
SLACK_BYTES = FILES * relay.SMALLEST_BLOCK
"""A relay keeps whole blocks only."""

HTTP = """
import json, sys
from pathlib import Path
from bringup.node import download, store
spec = json.loads(Path(sys.argv[1]).read_text())
store.PROGRESS = Path(sys.argv[1] + ".progress")
limits = download.Limits(back_off_s=0.02, bytes_s=spec["bytes_s"])
store.ensure(store.Model.of(spec["model"]), store.Access(limits=limits))
"""


def spec_of(folder: Path, rows: Sequence[dict[str, Any]], origin: str, port: int, bytes_s: float) -> Path:
    """What a node is told: the model, where it comes from, and how fast."""
    model = {"name": "demo", "folder": str(folder / "demo"), "files": list(rows)}
    upstream = [f"http://127.0.0.1:{port}"] if port else []
    spec = {
        "model": {**model, "sources": [{"kind": "http", "locator": origin}]},
        "listen": ["127.0.0.1", free_port()],
        "upstreams": upstream,
        "idle_s": 0,
        "bytes_s": bytes_s,
    }
    path = folder / "spec.json"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(spec))
    return path


def command(way: str, spec: Path) -> list[str]:
    """The client's process."""
    if way == "relay":
        return [sys.executable, "-m", "bringup.node.relay", str(spec)]
    return [sys.executable, "-c", HTTP, str(spec)]


def one(
    way: str, base: Path, rows: Sequence[dict[str, Any]], origin: str, head: int, given: Any
) -> dict[str, Any]:
    """One run: killed at random moments, then left alone; what it took and whether every byte is right."""
    choice = random.Random(f"{given.seed} {base.name}")
    spec = spec_of(base, rows, origin, head if way == "relay" else 0, given.mib * 1024**2 / FILES / 1.5)
    folder = base / "demo"
    wrong, kept, started = [], [], time.monotonic()
    for _ in range(given.kills):
        client = subprocess.Popen(command(way, spec), cwd=ROOT, stderr=subprocess.DEVNULL)
        try:
            client.wait(choice.uniform(0.15, 1.6))
        except subprocess.TimeoutExpired:
            client.send_signal(signal.SIGKILL)
            client.wait(10)
            kept.append(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()))
            if (folder / store.READY).exists() and store.verify(model_of(folder, rows), deep=True):
                wrong.append("a killed client left a folder ready that is not right")
    last = subprocess.run(command(way, spec), cwd=ROOT, timeout=RUN_LIMIT_S, capture_output=True, check=False)
    if last.returncode:
        wrong.append(last.stderr.decode(errors="replace").strip()[-200:])
    model = model_of(folder, rows)
    wrong += [f"{path} {text}" for path, text in store.verify(model, deep=True).items()]
    if not store.is_stamped(model):
        wrong.append("is not ready")
    strange = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    if left := strange - {row["path"] for row in rows} - {store.READY}:
        wrong.append(f"left over: {sorted(left)}")
    if any(later < earlier - SLACK_BYTES for earlier, later in itertools.pairwise(kept)):
        wrong.append(f"what was there was thrown away: {kept}")
    seconds = round(time.monotonic() - started, 2)
    return {
        "run": base.name,
        "way": way,
        "killed": len(kept),
        "kept": kept,
        "seconds": seconds,
        "wrong": wrong,
    }


def model_of(folder: Path, rows: Sequence[dict[str, Any]]) -> store.Model:
    """The model as it must be."""
    return store.Model.of({"name": "demo", "folder": str(folder), "files": list(rows)})


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--mib", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--way", default="mixed", choices=["http", "relay", "mixed"])
    given = parser.parse_args()
    files = parts(FILES, given.mib * 1024**2 // FILES, given.seed)
    rows = rows_of(files)
    results = []
    with tempfile.TemporaryDirectory() as folder, serving(Hub(files)) as address:
        origin = f"{address}/{REPOSITORY}/resolve/main"
        head = start_head(Path(folder) / "head", files, rows)
        try:
            for run in range(given.runs):
                way = ("http", "relay")[run % 2] if given.way == "mixed" else given.way
                done = one(way, Path(folder) / f"{run:03}", rows, origin, head[1], given)
                results.append(done)
                print(
                    f"{run:03} {way}: killed {done['killed']} times, {done['wrong'] or 'right'}",
                    file=sys.stderr,
                )
        finally:
            head[0].kill()
            head[0].wait()
    bad = [done for done in results if done["wrong"]]
    kills = sum(done["killed"] for done in results)
    about = {"schema_version": 1, "runs": len(results), "kills": kills, "mib": given.mib, "wrong": bad}
    print(json.dumps(about))
    sys.exit(1 if bad else 0)


def start_head(
    folder: Path, files: dict[str, bytes], rows: Sequence[dict[str, Any]]
) -> tuple[subprocess.Popen[bytes], int]:
    """The head of a chain, with the whole model, and its port."""
    (folder / "demo").mkdir(parents=True)
    for path, text in files.items():
        (folder / "demo" / path).write_bytes(text)
    spec = json.loads(spec_of(folder, rows, "", 0, 0).read_text())
    spec["idle_s"] = 24 * 3600
    (folder / "spec.json").write_text(json.dumps(spec))
    argv = command("relay", folder / "spec.json")
    process = subprocess.Popen(argv, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    return process, int(spec["listen"][1])


if __name__ == "__main__":
    main()
