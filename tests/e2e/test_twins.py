"""Inventories on twins of their hosts, end to end: a node that must be refused, and the whole way from a bare container
with recorded hardware to real answers of a stand-in engine, twice.

The tests stand in the order of one story: first one platform, then another. test_twins_runbooks.py goes on with the
second twin.
"""

from __future__ import annotations

import json
from pathlib import Path

from bringup import twins
from bringup.errors import Exit
from tests.e2e import rehearsal
from tests.e2e.rehearsal import Provisioned, Rehearsal

PARTS = (
    "name",
    "address",
    "pci_id",
    "memory_mib",
    "power_limit_w",
    "numa_node",
    "nvlinks",
    "peers_by_nvlink",
)
"""What a record of a GPU holds."""


def test_faults_that_only_a_container_shows_are_named_before_the_first_run(fresh: Rehearsal) -> None:
    faults = rehearsal.only_in_containers()
    assert set(faults.values()) - set(fresh.codes("preflight", faults)) == set()


def test_the_node_is_healed_and_provisioned_and_a_second_time_nothing_changes(grace: Provisioned) -> None:
    grace.is_as_it_should_be()


def test_drivers_of_the_archive_really_upgrade_and_conflict(grace: Provisioned) -> None:
    on = grace.twin.on
    quiet = "DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends"
    old = "nvidia-utils-570=570.195.03-0twin1 libnvidia-compute-570=570.195.03-0twin1"
    assert "held" in on(f"{quiet} --allow-downgrades install {old} 2>&1", check=False)
    on("apt-mark showhold | xargs -r apt-mark unhold")
    on(f"{quiet} --allow-downgrades install {old}")
    there = on("dpkg-query -W -f '${Package} ${db:Status-Abbrev}\\n' 'nvidia-*' | grep 'ii ' || true")
    assert "nvidia-utils-570" in there
    assert "nvidia-utils-580" not in there
    assert "Driver/library version mismatch" in on("nvidia-smi -L", check=False)
    linked = on("ldconfig -p | grep libcuda.so.1; readlink /usr/lib/x86_64-linux-gnu/libcuda.so.1")
    assert "libcuda.so.570.195.03" in linked


def test_preflight_alone_refuses_what_a_role_would_mend(grace: Provisioned) -> None:
    found = grace.twin.codes("preflight", ["disk-full"])
    assert found["DRIVER_LIBRARY_MISMATCH"]["severity"] == "error"
    assert found["DRIVER_LIBRARY_MISMATCH"]["mended_by"] == "nvidia_driver"
    assert "DISK_FULL" in found


def test_eight_gpus_are_provisioned_and_a_second_time_nothing_changes(board: Provisioned) -> None:
    board.is_as_it_should_be()
    rows = board.twin.on("nvidia-smi --query-gpu=index,memory.used --format=csv,noheader,nounits")
    used = [int(row.split(", ")[1]) for row in rows.splitlines()]
    assert len(used) == 8
    assert all(mib > 0 for mib in used), "the server holds its GPUs"


def test_a_twin_says_what_it_is_everywhere(board: Provisioned) -> None:
    on = board.twin.on
    assert "twin" in on("cat /etc/motd")
    assert "stand-in" in on("nvidia-smi --version")
    assert "stand-in" in on("cat /proc/driver/nvidia/version")
    assert "bringup_stand_in{" in on("curl -s http://127.0.0.1:8000/metrics")
    status = board.twin.invoke("status")
    assert status.code == Exit.DONE, status.text
    assert all(row["healthy"] for row in status.data["services"])


def test_what_is_recorded_of_a_node_is_what_it_wears_and_nothing_private(
    board: Provisioned, tmp_path: Path
) -> None:
    secret = "s3cr3t-of-somebody"
    board.twin.on(f"echo 'NVRM: opened by serve --api-key {secret}' >>/var/lib/twin/kernel.log")
    done = board.twin.invoke("twins.record", "--folder", str(tmp_path))
    assert done.code == Exit.DONE, done.text
    recorded = json.loads((tmp_path / "twin.json").read_text())
    worn = json.loads((twins.FOLDER / "nodes" / board.twin.node / "hardware.json").read_text())
    for part in PARTS:
        assert [gpu[part] for gpu in recorded["gpus"]] == [gpu[part] for gpu in worn["gpus"]], part
    assert recorded["switches"] == worn["switches"]
    for part in ("node", "cpus", "memory_gib"):
        assert [row[part] for row in recorded["numa"]] == [row[part] for row in worn["numa"]], part
    text = "".join(path.read_text() for path in (tmp_path / "recorded").iterdir())
    assert "serve --api-key" in text
    private = [secret, "sglang", *(gpu["uuid"].removeprefix("GPU-") for gpu in worn["gpus"])]
    assert [word for word in private if word in text] == []


def test_a_node_with_faults_is_refused_with_every_finding(board: Provisioned) -> None:
    found = board.twin.codes("provision", ["gpu-lost", "dpkg-locked", "tasks-low", "shm-stale"])
    assert {"GPU_LOST", "PACKAGE_LOCK_HELD", "LIMIT_TASKS", "SHM_STALE"} <= set(found)
