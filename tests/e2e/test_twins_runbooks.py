"""Runbooks for GPUs, on the twin of a node with eight of them: reset, CUDA's links, another driver and back, and a boot
after which one GPU is missing.

The tests stand in the order of one story, on the twin that test_twins.py leaves behind.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import yaml

from bringup import lab, twins
from bringup.errors import Exit
from tests.e2e.rehearsal import Provisioned, invoke
from tests.e2e.site import on
from tests.lab.twin import archive

HOST, PORT = "h20-01", 8000
FOLDER = twins.FOLDER / f"h20{twins.SUFFIX}"
"""The inventory of twins: commands that take it keep the faults that are in."""

LINK = "/opt/bringup/cuda/lib/libcuda.so"
DAEMONS = ("nvidia-fabricmanager", "nvidia-persistenced", "bringup-gpu-settings")


def dressed(*faults: str) -> None:
    """The twin with these faults and no others."""
    words = [word for fault in faults for word in ("--fault", fault)]
    done = invoke("plan", "--inventory", "h20", "--limit", HOST, "--twins", "--json", *words)
    assert done.code == Exit.DONE, done.text[-3000:]


def plain(*names: str, **variables: Any) -> None:
    """Runbooks one after the other by ansible-playbook alone, each to its good end."""
    books = [f"playbooks/runbooks/{name}.yml" for name in names]
    words = ["-i", str(FOLDER), *books, "--limit", HOST, "-e", json.dumps(variables)]
    done = invoke(*words, program="ansible-playbook")
    assert done.code == 0, done.text[-5000:]


def node() -> str:
    """The twin's container."""
    return twins.given()["h20"][HOST].name


def see(words: str, check: bool = True) -> str:
    """What a command prints on the twin."""
    return on(node(), words, check=check)


def serves() -> bool:
    return see(f"curl -s -m 20 http://127.0.0.1:{PORT}/v1/models", check=False) != ""


def in_rotation() -> bool:
    return see("ls /run/bringup/draining 2>/dev/null || true") == ""


def driver() -> tuple[str, str]:
    """The driver that runs, and the version of the fabric manager."""
    version = see("nvidia-smi --query-gpu=driver_version --format=csv,noheader").split()
    assert len(set(version)) == 1
    return version[0], see("nv-fabricmanager --version").split()[-1]


def gpus() -> int:
    return len(see("nvidia-smi -L").splitlines())


@contextmanager
def powered() -> Iterator[None]:
    """A container that reboots only ends: somebody must switch it on again, as a machine does by itself."""
    engine, stop, name = lab.find_engine(), threading.Event(), node()
    assert engine is not None

    def keep() -> None:
        while not stop.wait(0.5):
            engine.tries("start", name)

    power = threading.Thread(target=keep)
    power.start()
    try:
        yield
    finally:
        stop.set()
        power.join()


@pytest.fixture(scope="module", autouse=True)
def twin(board: Provisioned) -> None:
    """One twin that serves."""
    assert board.twin.host == HOST


def test_a_reset_clears_what_only_a_reset_clears_and_starts_the_fabric_before_all_else() -> None:
    dressed("ecc-pending")
    asks = "nvidia-smi --query-gpu=gpu_recovery_action,remapped_rows.pending --format=csv,noheader"
    assert "Reset, Yes" in see(asks)
    said = see("nvidia-smi --gpu-reset", check=False)
    assert "In use by another client" in said, "while servers and the fabric manager run"
    plain("reset-gpus")
    assert set(see(asks).splitlines()) == {"None, No"}
    begun = [
        int(see(f"systemctl show -P ActiveEnterTimestampMonotonic {unit}"))
        for unit in (*DAEMONS, "bringup-glm")
    ]
    assert begun == sorted(begun), "fabric manager, persistence daemon, clocks and power, servers"
    assert serves()
    assert in_rotation()


def test_links_for_the_linker_are_taken_away_and_made_again() -> None:
    assert see(f"readlink {LINK}").endswith("libcuda.so.1")
    plain("remove-libcuda-link")
    assert see(f"ls {LINK} 2>/dev/null || true") == ""
    plain("fix-libcuda-link")
    assert see(f"readlink {LINK}").endswith("libcuda.so.1")
    assert serves()


def test_another_driver_comes_with_its_fabric_manager_and_the_one_before_is_brought_back() -> None:
    before, _ = driver()
    wanted = next(version for version in archive.BRANCHES[before[:3]] if version != before)
    plan = FOLDER / "host_vars" / f"{HOST}.yml"
    plan.parent.mkdir(exist_ok=True)
    plan.write_text(yaml.safe_dump({"node_driver": {"version": wanted}}))
    try:
        with powered():
            plain("upgrade-driver")
            assert driver() == (wanted, wanted)
            assert (gpus(), serves(), in_rotation()) == (8, True, True)
            plain("roll-back-driver")
        assert driver() == (before, before)
        assert (gpus(), serves(), in_rotation()) == (8, True, True)
    finally:
        plan.unlink()


def test_a_boot_after_which_a_gpu_is_missing_fails_and_keeps_the_node_out_of_rotation() -> None:
    dressed("gpu-gone-after-reboot")
    gone = see("nvidia-smi --query-gpu=pci.bus_id,uuid --format=csv,noheader -i 1")
    words = ("reboot-node", "--inventory", str(FOLDER), "--limit", HOST, "--yes", "--json")
    with powered():
        done = invoke("run", *words, "--extra", "runbook_gpu_looks=1")
    assert done.code == Exit.FAILED, done.text[-4000:]
    assert "8 GPUs were there before the boot, 7 are there now. Missing:" in done.text
    assert gone in done.data["failures"][-1]["message"]
    assert not in_rotation()
    assert see("cat /run/bringup/run.json 2>/dev/null || true") == "", "its lock is given back"
    assert done.data["hosts"][HOST]["failed"] == 1
