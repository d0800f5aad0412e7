"""The figures of the real GPU are what its raw data says, and no GPU but a node's own is in its files."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench.hopper import report
from bringup import ROOT

NODE = ROOT / "bench" / "hopper" / "node.sh"
FUNCTIONS = ("gpus_on_bus", "hidden", "hide")
SCRIPT = """
set -eu
own_gpus={own}
mount -t tmpfs tmpfs /sys/bus/pci; mkdir /sys/bus/pci/devices
mount -t tmpfs tmpfs /proc/driver; mkdir -p /proc/driver/nvidia/gpus
mkdir -p sys/bus/pci/devices proc/driver/nvidia dev mnt
number=1
for address in 0000:00:06.0 0000:00:07.0; do
  mkdir -p devices/$address /proc/driver/nvidia/gpus/$address
  echo 0x10de >devices/$address/vendor; echo 0x030200 >devices/$address/class
  ln -s "$PWD/devices/$address" /sys/bus/pci/devices/$address
  echo "Device Minor: 	 $number" >/proc/driver/nvidia/gpus/$address/information
  touch dev/nvidia$number; number=$((number - 1))
done
echo "ModifyDeviceFiles: 1" >/proc/driver/nvidia/params
cp -a /sys/bus/pci/devices/. sys/bus/pci/devices/; cp -a /proc/driver/nvidia/. proc/driver/nvidia/
{functions}
hide
ls dev sys/bus/pci/devices proc/driver/nvidia/gpus; cat proc/driver/nvidia/params
"""


def row(concurrent: int, latencies: list[float], cold: int = 0, **more: Any) -> dict[str, Any]:
    """A load's row: 500 tokens a request."""
    speeds = [500_000 / latency for latency in latencies]
    colds = [index < cold for index in range(len(latencies))]
    load = {"concurrent": concurrent, "output_tokens": 500}
    return {"load": load, "latencies_ms": latencies, "request_tok_s": speeds, "cold": colds, **more}


def test_the_tables_in_the_page_are_made_of_the_raw_data() -> None:
    assert f"{report.BEGIN}\n{report.tables()}\n{report.END}" in report.PAGE.read_text(encoding="utf-8")


def test_a_speed_is_the_median_of_warm_requests_or_of_whole_batches() -> None:
    alone = row(1, [9000, 1000, 500, 250], cold=1)
    eight = row(2, [900, 1000, 400, 500, 2000, 100])
    rung = {"rows": [alone, eight]}
    assert report.speed(rung, 1) == 1000
    # Three batches of two requests: 1,000 tokens in 1.0, 0.5 and 2.0 s.
    assert report.speed(rung, 2) == 1000
    assert report.speed(rung, 8) is None


def test_first_runs_that_are_clearly_slow_do_not_count() -> None:
    steady = [500.0, 505.0, 498.0, 502.0, 499.0, 503.0]
    rung = {"rows": [row(1, [4000, 2000, 1500, *steady], cold=1)]}
    assert round(report.speed(rung, 1) or 0) == 998
    assert report.warm([1.0, 2.0]) == 1.5


def test_two_runs_are_compared_with_what_their_cpus_did(monkeypatch: pytest.MonkeyPatch) -> None:
    def one(latency: float, loop: float, steal: int) -> dict[str, Any]:
        rung = {"rows": [row(1, [latency] * 5)], "start": {"seconds": 40.0}}
        pace = {"loop_ms": [[loop, loop], [loop]], "ticks": [90, 0, 0, 900, 0, 0, 0, steal]}
        return {"rungs": {report.PROFILE: rung}, "pace": {report.PROFILE: pace}}

    bare = one(500, 1, 0)
    del bare["pace"]
    monkeypatch.setattr(report, "runs", lambda: [bare, one(500, 13.1, 0), one(600, 15.2, 10)])
    _, _, first, second = report.differences()
    assert first.endswith("| 2 against 1 | +0% | - | +0% | yes | - -> 13.1 | - -> 0.0% |")
    assert second.endswith("| 3 against 2 | -17% | - | +0% | no | 13.1 -> 15.2 | 0.0% -> 1.0% |")


def test_what_drafts_nothing_has_no_accept_length() -> None:
    rung = {"rows": [row(1, [1000], accept_length=[]), row(8, [1000], accept_length=[3.0, 3.5])]}
    assert (report.accepted(rung, 1), report.accepted(rung, 8)) == (None, 3.25)


@pytest.mark.parametrize(
    ("own", "devices", "addresses", "makes_devices"),
    [
        (1, ["nvidia1"], ["0000:00:06.0"], "0"),
        (2, ["nvidia0", "nvidia1"], ["0000:00:06.0", "0000:00:07.0"], "1"),
    ],
)
def test_only_a_nodes_own_gpus_are_in_its_files(
    tmp_path: Path, own: int, devices: list[str], addresses: list[str], makes_devices: str
) -> None:
    text = NODE.read_text(encoding="utf-8")
    functions = "\n".join(
        f"{name}() {{{text.partition(f'{name}() {{')[2].partition(chr(10) + '}')[0]}\n}}"
        for name in FUNCTIONS
    )
    script = SCRIPT.replace("{own}", str(own)).replace("{functions}", functions)
    argv = ["unshare", "--mount", "sh", "-c", script]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    shown = [
        "dev:",
        *devices,
        "",
        "proc/driver/nvidia/gpus:",
        *addresses,
        "",
        "sys/bus/pci/devices:",
        *addresses,
    ]
    assert done.stdout.splitlines() == [*shown, f"ModifyDeviceFiles: {makes_devices}"]
