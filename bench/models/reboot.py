"""How a download along a chain stands a node's reboot: two lab nodes, the head or the follower is rebooted midway.

    DOCKER_HOST=... .venv/bin/python bench/models/reboot.py [--rounds 2] [--mib 96] [--nodes bench-11,bench-12]

Role `model_store` is played as provisioning plays it; a hub stand-in on this machine gives the files. The first
play is expected to fail on the rebooted node, the next one must end with the right bytes on both. Prints one JSON
object: bytes that were there at the reboot, and what the hub was asked for afterwards. Exit code 1: a byte is wrong.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
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

FILES = 4
PLAY_LIMIT_S = 600
WAIT_LIMIT_S = 120
RATE_MIB_S = 3.0
FOLDER = "/srv/models/reboot"


def play(base: Path, names: Sequence[str], model: dict[str, Any]) -> subprocess.Popen[str]:
    """Starts the role on the nodes."""
    hosts = {name: {"ansible_host": lab.address(name)[0]} for name in names}
    options = f"-F {ROOT}/.lab/ssh_config"
    inventory = {"all": {"vars": {"ansible_user": "sre", "ansible_ssh_common_args": options}, "hosts": hosts}}
    roles = [
        {"role": "model_store", "vars": {"model_store_models": [model], "model_store_rate_mib_s": RATE_MIB_S}}
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
    """One round: half of it arrives, the victim reboots, the play is run again."""
    total = sum(row["size"] for row in model["files"])
    for name in names:
        on(name, f"systemctl stop bringup-relay-{model['name']}; rm -rf {FOLDER}")
    first = play(base, names, model)
    end = time.monotonic() + WAIT_LIMIT_S
    while held(victim) < total / 2 and first.poll() is None and time.monotonic() < end:
        time.sleep(0.3)
    there = held(victim)
    lab.reboot(victim)
    first.communicate(timeout=PLAY_LIMIT_S)
    kept = held(victim)
    ready = on(victim, f"ls {FOLDER}/.bringup/ready.json 2>/dev/null")
    hub.asked.clear()
    second = play(base, names, model)
    text, _ = second.communicate(timeout=PLAY_LIMIT_S)
    wrong = [
        f"{name}: {row['path']}"
        for name in names
        for row in model["files"]
        if on(name, f"sha256sum < {FOLDER}/{row['path']}").split(" ")[0] != row["sha256"]
    ]
    wrong += [name for name in names if not on(name, f"ls {FOLDER}/.bringup/ready.json")]
    wrong += [text[-1500:]] if second.returncode else []
    return {
        "victim": victim,
        "bytes_at_reboot": there,
        "kept": kept,
        "ready_after_reboot": bool(ready),
        "first_play": first.returncode,
        "second_play": second.returncode,
        "asked_afterwards": [wanted for _, _, wanted, _ in hub.asked],
        "wrong": wrong,
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--mib", type=int, default=96)
    parser.add_argument("--nodes", default="bench-11,bench-12")
    parser.add_argument("--address", default="198.18.5.1", help="this machine, as the nodes reach it")
    given = parser.parse_args()
    names = given.nodes.split(",")
    data = random.Random(1).randbytes(given.mib * 1024**2 // FILES)
    files = {f"part-{number}.bin": bytes([number]) + data[1:] for number in range(FILES)}
    rows = [
        {"path": path, "size": len(text), "sha256": hashlib.sha256(text).hexdigest()}
        for path, text in files.items()
    ]
    hub = Hub(files)
    results = []
    lab.up(names, lambda text: print(text, file=sys.stderr))
    with tempfile.TemporaryDirectory() as folder, serving(hub, host=given.address) as address:
        model = {"name": "reboot", "folder": FOLDER, "files": rows, "made_by": "", "expects": {}, "graft": {}}
        locator = f"{address}/{REPOSITORY}/resolve/main"
        model.update(chain=names, sources=[{"kind": "http", "locator": locator}])
        for number in range(given.rounds):
            results.append(one(Path(folder), names, names[number % len(names)], hub, model))
            print(
                json.dumps({**results[-1], "asked_afterwards": len(results[-1]["asked_afterwards"])}),
                file=sys.stderr,
            )
    print(json.dumps({"schema_version": 1, "mib": given.mib, "rounds": results}))
    sys.exit(1 if any(row["wrong"] for row in results) else 0)


if __name__ == "__main__":
    main()
