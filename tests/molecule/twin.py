"""Makes a scenario's node a twin: it wears the hardware of two made-up GPUs on a board with a switch, without a driver.

python -m tests.molecule.twin NODE [HARDWARE]       HARDWARE: JSON merged into what it wears

The packages in /opt/twin/archive and /opt/twin/debs (the same, without an index) are stand-ins that really install.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bringup import ROOT, lab, twins
from tests.lab.twin import archive
from tests.molecule.gpu_node import host

ON_NODE = "/usr/lib/twin/tests/lab/twin/node"
BOOT_LIMIT_S = 120


def hardware(changes: dict[str, Any]) -> dict[str, Any]:
    """What the node wears."""
    one, _ = host({})
    platform = {
        **one.expected,
        "gpus": {**one.expected["gpus"], "pci_ids": [], "names": ["NVIDIA H200"], "memory_gib": 140.4},
        "links": {"nvswitches": 1, "nvlink_gbps": 900},
        "host": None,
    }
    made = twins._composed(one, platform)
    return {
        **made,
        "driver": None,
        "needs_open": True,
        "host": "node",
        "platform": "demo",
        "arch": "x86_64",
        **changes,
    }


def docker(*words: str) -> str:
    """What a docker command says. Raises CalledProcessError."""
    environment = lab.ensure_engine().environment()
    import os

    done = subprocess.run(
        ["docker", *words], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return done.stdout


def main(words: list[str]) -> None:
    """Put hardware and archive on the node and boot it again."""
    node, changes = words[0], json.loads(words[1]) if len(words) > 1 else {}
    with tempfile.TemporaryDirectory() as text:
        root = Path(text)
        packages = archive.build(ROOT / ".cache" / "molecule" / "twin", "amd64")
        shutil.copytree(packages, root / "opt/twin/archive")
        debs = root / "opt/twin/debs"
        shutil.copytree(packages, debs, ignore=shutil.ignore_patterns("Packages", "Release", "cuda-*"))
        shutil.copytree(ROOT / "tests/lab/twin/node", root / ON_NODE.lstrip("/"))
        (root / "etc/twin").mkdir(parents=True)
        (root / "etc/twin/hardware.json").write_text(json.dumps(hardware(changes)))
        (root / "etc/node-fake").mkdir()
        (root / "etc/node-fake/init").write_text((ROOT / "tests/lab/twin/node/init").read_text())
        for folder in root.rglob("*"):
            folder.chmod(0o755 if folder.is_dir() or folder.name in ("init", "standin") else 0o644)
        docker("cp", f"{root}/.", f"{node}:/")
    docker("restart", node)
    end = time.monotonic() + BOOT_LIMIT_S
    while time.monotonic() < end:
        try:
            docker("exec", node, "systemctl", "is-system-running", "--wait")
        except subprocess.CalledProcessError as error:
            if "degraded" in error.stdout:
                return
            time.sleep(1)
        else:
            return
    raise SystemExit(f"{node} did not boot")


if __name__ == "__main__":
    main(sys.argv[1:])
