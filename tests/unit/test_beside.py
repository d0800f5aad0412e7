"""What lies beside a load is found on the node, through rotations, and says what it does not have."""

from __future__ import annotations

import gzip
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bringup import beside, fleet, inventory, plan
from bringup.catalog import lazy
from bringup.node import beside as node
from bringup.planned import HostPlan, Placement, Service


@pytest.fixture(scope="module")
def lab() -> HostPlan:
    return plan.resolve(inventory.read("lab"), lazy()).hosts[0]


@pytest.fixture
def service(lab: HostPlan) -> Service:
    return lab.services[0]


# --- the log -----------------------------------------------------------------------------------------------


def write(folder: Path, number: int, text: str) -> Path:
    path = folder / f"engine-{number:06}-20261130T00000{number}Z.log"
    path.write_text(text)
    link = folder / "engine.log"
    link.unlink(missing_ok=True)
    link.symlink_to(path.name)
    return path


def compress(path: Path) -> None:
    path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()


def test_the_log_since_a_mark_is_only_what_came_after_it(tmp_path: Path) -> None:
    path = write(tmp_path, 1, "before\n")
    begun = node.mark(tmp_path)
    path.write_text("before\nafter\n")
    assert node.since(tmp_path, begun) == "after\n"


def test_rotated_and_compressed_files_between_are_read_in_order(tmp_path: Path) -> None:
    write(tmp_path, 1, "long before\n")
    first = write(tmp_path, 2, "before\n")
    begun = node.mark(tmp_path)
    first.write_text("before\none\n")
    second = write(tmp_path, 3, "two\n")
    write(tmp_path, 4, "three\n")
    compress(first)
    compress(second)
    assert node.since(tmp_path, begun) == "one\ntwo\nthree\n"


def test_a_server_without_a_log_has_an_empty_one_and_what_comes_later_counts(tmp_path: Path) -> None:
    begun = node.mark(tmp_path)
    assert node.since(tmp_path, begun) == ""
    write(tmp_path, 1, "first\n")
    assert node.since(tmp_path, begun) == "first\n"


def test_of_a_huge_log_the_end_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "LOG_LIMIT", 10)
    write(tmp_path, 1, "0123456789abcdef")
    assert node.since(tmp_path, {"file": "", "size": 0}) == "6789abcdef"


def test_the_readings_of_the_lab_engine_are_summarised() -> None:
    line = "eval time =       8.96 ms /    32 tokens (    0.29 ms per token,  3459.82 tokens per second)\n"
    found = beside.log_of(line * 3, "llama-server")
    assert (found["readings"], found["decode_tok_s"]) == (3, 3459.82)
    assert beside.log_of("nothing of interest\n", "llama-server") == {}


# --- processes and memory ----------------------------------------------------------------------------------


def test_memory_maps_are_reduced_to_what_says_where_pages_lie() -> None:
    kept = node.maps([os.getpid()])
    text = kept.get(str(os.getpid()), "")
    assert all(word[0] == "N" or word.startswith("kernelpagesize_kB=") for word in text.split())


def test_locality_is_the_share_of_bytes_on_the_planned_nodes(service: Service) -> None:
    maps = {"10": "N0=75 N1=25 kernelpagesize_kB=4", "11": "N0=1 kernelpagesize_kB=2048"}
    bound = replace(service, placement=Placement("0-7", "0"))
    found = beside.locality_of(maps, 3, bound)
    assert found["bytes_by_node"] == {"0": 75 * 4096 + 2 * 1024**2, "1": 25 * 4096}
    assert found["local_percent"] == pytest.approx(95.92)
    assert found["processes"] == 3
    assert beside.locality_of(maps, 3, service)["local_percent"] is None
    assert beside.locality_of({}, 3, bound) == {}


def test_a_command_line_of_a_process_that_is_gone_is_empty() -> None:
    assert node.command_line(os.getpid())
    assert node.command_line(2**22 + 1) == []


def test_packages_are_read_from_the_environment_itself(tmp_path: Path) -> None:
    site = tmp_path / "lib" / "python3.11" / "site-packages"
    for name in ("sgl_kernel-0.4.1.dist-info", "torch-2.13.0+cu130.dist-info"):
        (site / name).mkdir(parents=True)
    assert node.packages(str(tmp_path / "bin" / "python")) == {"sgl-kernel": "0.4.1", "torch": "2.13.0+cu130"}


# --- the fingerprint ---------------------------------------------------------------------------------------

FACTS = {
    "kernel": "6.8.0-64-generic",
    "cpu": "a processor",
    "cpus": 192,
    "gpus": ["NVIDIA H20, 580.105.08, 500.00 W, 1980 MHz"] * 8,
    "packages": {"llama-server": "1", "torch": "2.13.0"},
}


def test_a_fingerprint_names_what_makes_results_comparable(lab: HostPlan, service: Service) -> None:
    notes: list[str] = []
    found = beside.fingerprint(lab, service, {**FACTS, "argv": list(service.argv)}, notes)
    assert found["driver"] == "580.105.08"
    assert found["GPUs"] == "8 x NVIDIA H20"
    assert found["cpu"] == "192 x a processor"
    assert found["packages"] == "llama-server 1, torch 2.13.0"
    assert found["profile"] == "cpu-words-llama-server"
    assert notes == []


def test_a_server_that_runs_otherwise_than_planned_is_said(lab: HostPlan, service: Service) -> None:
    notes: list[str] = []
    same = beside.fingerprint(lab, service, {"argv": list(service.argv)}, notes)
    other = beside.fingerprint(lab, service, {"argv": [*service.argv[:-1], "99"]}, notes)
    assert same["flags"] != other["flags"]
    assert notes == ["runs otherwise than planned: has 99, lacks 64"]


def test_a_node_that_tells_nothing_has_the_plans_own_fingerprint(lab: HostPlan, service: Service) -> None:
    found = beside.fingerprint(lab, service, {}, [])
    assert set(found) == {"platform", "profile", "flags", "environment"}


# --- the way -----------------------------------------------------------------------------------------------


class Kept(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[int]:
    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Kept)
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield int(made.server_address[1])
    made.shutdown()
    made.server_close()
    thread.join()


def test_a_round_trip_is_timed_in_milliseconds(server: int) -> None:
    assert 0 < node.trip_ms("127.0.0.1", server, "/health", count=5) < 1000


def test_a_server_that_is_not_there_is_an_error_and_no_time() -> None:
    with pytest.raises(OSError, match="refused"):
        node.trip_ms("127.0.0.1", 1, "/health")


def test_the_program_runs_by_itself_where_nothing_is_installed() -> None:
    program = beside.program({"what": "begin", "service": "there-is-none"})
    done = subprocess.run(
        [sys.executable, "-I", "-"], input=program, capture_output=True, text=True, timeout=240, check=True
    )
    found = json.loads(done.stdout)
    assert found["mark"] == {"file": "", "size": 0}
    assert found["facts"]["kernel"] == os.uname().release
    assert found["facts"]["argv"] == []


def test_no_gpus_need_no_watching() -> None:
    with beside.gpu_samples(fleet.Host("here", "127.0.0.1", local=True), ()) as uses:
        assert uses() == []
    assert beside.Beside().free_gib is None
    assert beside.Beside(gpus=[{"free_gib": 9.5}, {"free_gib": 4.25}, {"free_gib": None}]).free_gib == 4.25
