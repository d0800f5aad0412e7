"""Any inventory on twins of its hosts, end to end: from a bare container with recorded hardware to real answers
of stand-in engines, twice; and a node that must be refused.

The tests stand in the order of one story: the twins of one inventory, then those of the next.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from bringup import ROOT, twins
from bringup.errors import Exit
from tests.e2e import site as sites

LIMIT_S = 400


def invoke(*words: str) -> sites.Done:
    done = subprocess.run(
        [str(sites.INVOKE), *words],
        cwd=ROOT,
        env=sites.environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    return sites.Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module", autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    twins.down(sites.quiet)


def provisioned(inventory: str) -> dict[str, Any]:
    done = invoke("provision", "--inventory", inventory, "--twins", "--json")
    assert done.code == Exit.DONE, done.text[-4000:]
    return done.data


@pytest.mark.parametrize(("inventory", "hosts", "gpus"), [("gh200", 1, 2), ("h20", 2, 8)])
def test_an_inventory_is_provisioned_on_twins_and_a_second_time_nothing_changes(
    inventory: str, hosts: int, gpus: int
) -> None:
    for other in set(twins.given()) - {inventory}:
        twins.down(sites.quiet, other)
    first = provisioned(inventory)
    assert len(first["hosts"]) == hosts
    assert all(host["changed"] > 0 for host in first["hosts"].values())
    assert all(answer["tokens"] > 0 for answer in first["answers"])
    second = provisioned(inventory)
    assert {name: host["changed"] for name, host in second["hosts"].items()} == dict.fromkeys(
        first["hosts"], 0
    )
    rows = sites.on("twin-01", "nvidia-smi --query-gpu=index,memory.used --format=csv,noheader,nounits")
    used = [int(row.split(", ")[1]) for row in rows.splitlines()]
    assert len(used) == gpus
    assert all(mib > 0 for mib in used), "the server holds its GPUs"


def test_a_twin_says_what_it_is_everywhere() -> None:
    assert "twin" in sites.on("twin-01", "cat /etc/motd")
    assert "stand-in" in sites.on("twin-01", "nvidia-smi --version")
    assert "stand-in" in sites.on("twin-01", "cat /proc/driver/nvidia/version")
    page = sites.on("twin-01", "curl -s http://127.0.0.1:8000/metrics")
    assert "bringup_stand_in{" in page
    status = invoke("status", "--inventory", "h20", "--twins", "--json")
    assert status.code == Exit.DONE, status.text
    assert all(row["healthy"] for row in status.data["services"])


def test_drivers_of_the_archive_really_upgrade_and_conflict() -> None:
    quiet = "DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends"
    old = "nvidia-utils-570=570.195.03-0twin1 libnvidia-compute-570=570.195.03-0twin1"
    assert "held" in sites.on(
        "twin-02", f"{quiet} --allow-downgrades install {old} 2>&1", check=False, limit=120
    )
    sites.on("twin-02", "apt-mark showhold | xargs -r apt-mark unhold")
    sites.on("twin-02", f"{quiet} --allow-downgrades install {old}", limit=120)
    there = sites.on(
        "twin-02", "dpkg-query -W -f '${Package} ${db:Status-Abbrev}\\n' 'nvidia-*' | grep 'ii ' || true"
    )
    assert "nvidia-utils-570" in there
    assert "nvidia-utils-580" not in there
    said = sites.on("twin-02", "nvidia-smi -L", check=False)
    assert "Driver/library version mismatch" in said
    linked = sites.on(
        "twin-02", "ldconfig -p | grep libcuda.so.1; readlink /usr/lib/x86_64-linux-gnu/libcuda.so.1"
    )
    assert "libcuda.so.570.195.03" in linked


def test_a_node_with_faults_is_refused_with_every_finding() -> None:
    words = ("--fault", "gpu-lost", "--fault", "dpkg-locked", "--fault", "tasks-low", "--fault", "shm-stale")
    done = invoke("provision", "--inventory", "h20", "--limit", "h20-01", "--twins", "--json", *words)
    assert done.code == Exit.REFUSED, done.text[-4000:]
    codes = {found["code"] for found in done.data["findings"]}
    assert {"GPU_LOST", "PACKAGE_LOCK_HELD", "LIMIT_TASKS", "SHM_STALE"} <= codes, json.dumps(sorted(codes))


def test_preflight_alone_refuses_what_a_role_would_mend() -> None:
    words = ("--fault", "fabric-manager-mismatch@h20-02")
    done = invoke("preflight", "--inventory", "h20", "--limit", "h20-02", "--twins", "--json", *words)
    assert done.code == Exit.REFUSED, done.text[-4000:]
    found = {one["code"]: one for one in done.data["findings"]}
    assert found["DRIVER_LIBRARY_MISMATCH"]["severity"] == "error"
    assert found["DRIVER_LIBRARY_MISMATCH"]["mended_by"] == "nvidia_driver"
