"""How a download along a chain stands a node's reboot: two lab nodes, the head or the follower is rebooted midway.

    .venv/bin/python bench/models/reboot.py [--rounds 10] [--mib 64] [--nodes bench-11,bench-12]

Role `model_store` is played as provisioning plays it; a hub stand-in on this machine gives the files. The first
play is capped, so that half a minute is left when a quarter is there and the node (the head and the follower in turn)
goes down: it must fail, and leave a part of the model and no stamp. The next play, without a cap, must end with the
right bytes on both nodes and must not fetch again what was there. Prints one JSON object: bytes at the reboot and
after it, and how many the hub was asked for afterwards. Exit code 1: something of that did not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bringup import lab  # noqa: E402 (the checkout must be on the path first)
from tests.standin.hub import REPOSITORY, Hub, serving  # noqa: E402
from tests.standin.models import parts, rows_of  # noqa: E402

FILES = 4
PLAY_LIMIT_S = 600
WAIT_LIMIT_S = 120
SECONDS = 40.0
"""How long the capped download takes: far longer than a node needs to go down."""

CUT_AT = 0.25
KEPT_AT_LEAST = 0.5
"""Of the bytes that were there at the reboot: what was on its way to the disk may be lost."""

FOLDER = "/srv/models/reboot"


def play(base: Path, names: Sequence[str], model: dict[str, Any], rate_mib_s: float) -> subprocess.Popen[str]:
    """Starts the role on the nodes, with a cap on each file (0: none)."""
    hosts = {name: {"ansible_host": lab.address(name)[0]} for name in names}
    options = f"-F {ROOT}/.lab/ssh_config"
    inventory = {"all": {"vars": {"ansible_user": "sre", "ansible_ssh_common_args": options}, "hosts": hosts}}
    roles = [
        {"role": "model_store", "vars": {"model_store_models": [model], "model_store_rate_mib_s": rate_mib_s}}
    ]
    (base / "hosts.yml").write_text(yaml.safe_dump(inventory))
    book = [{"hosts": "all", "gather_facts": False, "become": True, "roles": roles}]
    (base / "play.yml").write_text(yaml.safe_dump(book))
    argv = [str(Path(sys.executable).parent / "ansible-playbook"), "-i", str(base / "hosts.yml")]
    return subprocess.Popen(
        [*argv, str(base / "play.yml")],
        cwd=ROOT,
        env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def on(name: str, command: str) -> str:
    """What a command prints on a node."""
    done = subprocess.run(
        lab.ssh_argv(name, f"sudo sh -c '{command}'"), capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout.strip()


def held(name: str) -> int:
    """Bytes of the model on a node."""
    return int(on(name, f"du -sb {FOLDER} 2>/dev/null | cut -f1") or 0)


def one(base: Path, names: Sequence[str], victim: str, hub: Hub, model: dict[str, Any]) -> dict[str, Any]:
    """One round: a part of it arrives, the victim reboots, the play is run again."""
    total = sum(row["size"] for row in model["files"])
    for name in names:
        on(name, f"systemctl stop bringup-relay-{model['name']}; rm -rf {FOLDER}")
    first = play(base, names, model, total / SECONDS / FILES / 1024**2)
    end = time.monotonic() + WAIT_LIMIT_S
    while held(victim) < total * CUT_AT and first.poll() is None and time.monotonic() < end:
        time.sleep(0.3)
    there = held(victim)
    lab.reboot(victim)
    first.communicate(timeout=PLAY_LIMIT_S)
    kept = held(victim)
    stamped = on(victim, f"ls {FOLDER}/.bringup/ready.json 2>/dev/null")
    wrong = uncut(first.returncode, stamped, there, kept, total)
    hub.asked.clear()
    second = play(base, names, model, 0)
    text, _ = second.communicate(timeout=PLAY_LIMIT_S)
    wrong += [
        f"{name}: {row['path']} has other bytes"
        for name in names
        for row in model["files"]
        if on(name, f"sha256sum < {FOLDER}/{row['path']}").split(" ")[0] != row["sha256"]
    ]
    wrong += [f"{name} is not ready" for name in names if not on(name, f"ls {FOLDER}/.bringup/ready.json")]
    wrong += [text[-1500:]] if second.returncode else []
    starts = [int(wanted.removeprefix("bytes=").rstrip("-") or 0) for _, _, wanted, _ in hub.asked]
    again = total - sum(starts) if starts else 0
    if again > total - kept * KEPT_AT_LEAST:
        wrong.append(f"{again} bytes were asked for again, though {kept} of {total} were there")
    return {
        "victim": "head" if victim == names[0] else "follower",
        "bytes_at_reboot": there,
        "kept": kept,
        "asked_afterwards": again,
        "wrong": wrong,
    }


def uncut(code: int, stamped: str, there: int, kept: int, total: int) -> list[str]:
    """What says that the reboot did not come in the middle of the download, or that it lost what was there."""
    claims = {
        "the play that was cut did not fail": code != 0,
        "it was ready when it came back": not stamped,
        f"{there} bytes at the reboot, {kept} after it, {total} in all: not in the middle": 0
        < there * KEPT_AT_LEAST
        <= kept
        < total,
    }
    return [text for text, holds in claims.items() if not holds]


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--nodes", default="bench-11,bench-12")
    parser.add_argument("--address", default="198.18.5.1", help="this machine, as the nodes reach it")
    given = parser.parse_args()
    names = given.nodes.split(",")
    files = parts(FILES, given.mib * 1024**2 // FILES)
    rows = rows_of(files)
    hub = Hub(files)
    results = []
    lab.up(names, lambda text: print(text, file=sys.stderr))
    with tempfile.TemporaryDirectory() as folder, serving(hub, host=given.address) as address:
        model = {"name": "reboot", "folder": FOLDER, "files": rows, "made_by": "", "expects": {}, "graft": {}}
        locator = f"{address}/{REPOSITORY}/resolve/main"
        model.update(chain=names, sources=[{"kind": "http", "locator": locator}])
        for number in range(given.rounds):
            results.append(one(Path(folder), names, names[number % len(names)], hub, model))
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    print(json.dumps({"schema_version": 1, "mib": given.mib, "rounds": results}))
    sys.exit(1 if any(row["wrong"] for row in results) else 0)


if __name__ == "__main__":
    main()
