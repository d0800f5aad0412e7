"""CUDA on a node: toolkits, links only where the linker finds none, and what the GPUs must say."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from bringup import ROOT
from bringup.node import cuda, libraries, undo
from bringup.rolevars import cuda_runtime
from tests.molecule.gpu_node import host

EXPECTED: dict[str, Any] = {
    "gpus": 1,
    "sm": "9.0",
    "host_gbps": 46.8,
    "memory_gbps": 3330.0,
    "peer_gbps": 337.5,
}
RECORDED = ROOT / "tests" / "cases" / "bandwidth"
"""What tools printed on a real node with two H200 and NVLink between them."""
# What one real GPU said (bringup/node/cuda.py: ask(bandwidth=True)).
REAL = {"name": "NVIDIA H200", "sm": "9.0", "memory": 150109880320, "host_gbps": 55.1, "memory_gbps": 4123.6}


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(undo, "FOLDER", tmp_path / "undo")
    monkeypatch.setattr(cuda, "LINKS", tmp_path / "links")
    monkeypatch.setattr(cuda, "TOOLKITS", ())


def toolkit(home: Path, *files: str) -> Path:
    """A toolkit's folder with a compiler and these libraries."""
    for name in ("bin/nvcc", *files):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text("")
    return home


def test_the_newest_toolkit_comes_first_and_one_under_two_names_counts_once(tmp_path: Path) -> None:
    toolkit(tmp_path / "cuda-12.9", "lib64/libcudart.so.12")
    newer = toolkit(tmp_path / "cuda-12.10", "lib64/libcudart.so.12", "lib64/stubs/libcuda.so")
    (tmp_path / "cuda").symlink_to(newer)
    (tmp_path / "cuda-11.0").mkdir()
    found = cuda.toolkits([f"{tmp_path}/cuda", f"{tmp_path}/cuda-*"])
    assert [one.version for one in found] == ["12.10", "12.9"]
    assert found[0].home == f"{tmp_path}/cuda"


def test_a_toolkit_for_arm_servers_keeps_its_libraries_below_targets(tmp_path: Path) -> None:
    home = toolkit(
        tmp_path / "cuda-13.0", "targets/sbsa-linux/lib/stubs/libcuda.so", "targets/x86_64-linux/lib/x"
    )
    assert cuda.library_folders(home, "aarch64") == (
        f"{home}/targets/sbsa-linux/lib",
        f"{home}/targets/sbsa-linux/lib/stubs",
    )


def test_folders_that_are_one_by_a_link_count_once(tmp_path: Path) -> None:
    home = toolkit(tmp_path / "cuda-13.0", "targets/x86_64-linux/lib/libcudart.so.13")
    (home / "lib64").symlink_to("targets/x86_64-linux/lib")
    assert cuda.library_folders(home, "x86_64") == (f"{home}/lib64",)


@pytest.mark.parametrize("compiler", [True, False], ids=["asked of a compiler", "looked up"])
def test_a_library_is_missing_when_only_a_version_of_it_is_there(
    compiler: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiler:
        monkeypatch.setattr(shutil, "which", lambda name: None)
    home = toolkit(tmp_path / "cuda-13.0", "lib64/libcudart.so.13", "lib64/libcudart.so.13.0.96")
    made = cuda.toolkits([str(home)])[0]
    cache = {"libcuda.so.1": "/usr/lib/driver/libcuda.so.1"}
    assert cuda.missing_links(made, cache) == {
        "libcuda.so": "/usr/lib/driver/libcuda.so.1",
        "libcudart.so": f"{home}/lib64/libcudart.so.13",
    }


def test_the_toolkits_own_stub_needs_no_link(tmp_path: Path) -> None:
    home = toolkit(tmp_path / "cuda-13.0", "lib64/x")
    stub = home / "lib64/stubs/libcuda.so"
    stub.parent.mkdir()
    shutil.copy(libraries.loaded()["libc.so.6"], stub)
    made = cuda.toolkits([str(home)])[0]
    assert cuda.missing_links(made, {"libcuda.so.1": "/usr/lib/driver/libcuda.so.1"}) == {}


def test_without_a_driver_there_is_nothing_to_link_to() -> None:
    assert cuda.missing_links(None, {}) == {}


def test_servers_see_the_compiler_and_where_the_linker_looks(tmp_path: Path) -> None:
    made = cuda.Toolkit("/usr/local/cuda", "13.0", ("/usr/local/cuda/lib64", "/usr/local/cuda/lib64/stubs"))
    found = cuda.environment(made, has_links=True)
    assert found["PATH"].startswith("/usr/local/cuda/bin:")
    assert found["LIBRARY_PATH"] == f"{tmp_path}/links:/usr/local/cuda/lib64:/usr/local/cuda/lib64/stubs"
    assert cuda.environment(None, has_links=False) == {}


def test_what_the_plan_sets_itself_is_not_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "missing_links", lambda toolkit, cache: {})
    home = toolkit(tmp_path / "cuda-13.0", "lib64/x")
    owner = tmp_path / "words.cuda.env"
    service: dict[str, Any] = {
        "name": "words",
        "environment_file": str(owner),
        "drop_in": str(tmp_path / "50-cuda.conf"),
    }
    service |= {"languages": [], "links": [], "compilers": {}, "folders": []}
    given = {
        "homes": [str(home)],
        "expected": EXPECTED,
        "check_gpus": False,
        "bandwidth": False,
        "packages": [],
    }
    outcome = cuda.apply(
        {**given, "services": [{**service, "keeps": ["PATH", "LIBRARY_PATH"]}]}, check_only=True
    )
    assert sorted(outcome["changed_paths"]) == sorted([str(owner), str(tmp_path / "50-cuda.conf")])
    written = next(row["after"] for row in outcome["diff"] if row["after_header"] == str(owner))
    assert written.splitlines()[1:] == [f'CUDA_HOME="{home}"']


COMPILES: dict[str, Any] = {
    "name": "words",
    "languages": ["c", "c++"],
    "links": ["cuda"],
    "compilers": {},
    "folders": [],
}


def test_a_server_links_with_the_folders_that_its_environment_has(tmp_path: Path) -> None:
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    shutil.copy(libraries.loaded()["libc.so.6"], stubs / "libcuda.so")
    good = {"LIBRARY_PATH": f"{tmp_path}/nothing:{stubs}"}
    assert list(cuda.linked([COMPILES], good, has_driver=True)) == []
    (found,) = cuda.linked([COMPILES], {}, has_driver=True)
    assert (found.code, "cannot find -lcuda" in found.evidence) == ("LIBCUDA_LINK", True)
    assert list(cuda.linked([COMPILES], {}, has_driver=False)) == []
    assert list(cuda.linked([{**COMPILES, "folders": [str(stubs)]}], {}, has_driver=True)) == []
    assert list(cuda.linked([{**COMPILES, "languages": []}], {}, has_driver=True)) == []


@pytest.mark.parametrize(("language", "variable"), [("c", "CC"), ("c++", "CXX")])
def test_a_server_whose_compiler_is_not_there_is_named(language: str, variable: str) -> None:
    own = {**COMPILES, "compilers": {language: "/opt/gcc-99/bin/gcc"}}
    (found,) = cuda.linked([own], {}, has_driver=False)
    assert (found.code, "words compiles" in found.what) == ("COMPILER_MISSING", True)
    assert f"/opt/gcc-99/bin/gcc, as {variable} of the profile names it" in found.what


@pytest.mark.skipif(
    shutil.which("dpkg-query") is None, reason="a machine without dpkg has no packages to ask for"
)
def test_packages_of_a_compiler_are_named_only_where_none_makes_a_program(tmp_path: Path) -> None:
    asked = ["no-such-package"]
    assert cuda.bring_compiler([COMPILES], asked, check_only=True) == []
    assert cuda.bring_compiler([COMPILES], asked, True, root=tmp_path) == ["install no-such-package"]
    own = {**COMPILES, "compilers": {"c": "/opt/cc", "c++": "/opt/c++"}}
    for row in ({**COMPILES, "languages": []}, own):
        assert cuda.bring_compiler([row], asked, True, root=tmp_path) == []


@pytest.mark.parametrize(
    ("answer", "expected", "words"),
    [
        ({"cuda": "13.0", "gpus": [REAL]}, {}, []),
        ({"cuda": "13.0", "gpus": [REAL]}, {"gpus": 2}, ["sees 1 of 2"]),
        ({"cuda": "13.0", "gpus": [REAL]}, {"sm": "8.9"}, ["capability 9.0, the platform 8.9"]),
        ({"cuda": "13.0", "gpus": [{**REAL, "host_gbps": 12.0}]}, {}, ["copies 12.0 GB/s from host memory"]),
        ({"cuda": "13.0", "gpus": [{**REAL, "memory_gbps": 900.0}]}, {}, ["900.0 GB/s within its memory"]),
        ({"cuda": "13.0", "gpus": [REAL]}, {"host_gbps": 0, "memory_gbps": 0}, []),
        ({"problem": "cuInit: CUDA_ERROR_NO_DEVICE (100)"}, {}, ["CUDA_ERROR_NO_DEVICE"]),
    ],
)
def test_what_the_gpus_say_is_compared_with_the_platform(
    answer: dict[str, Any], expected: dict[str, Any], words: list[str]
) -> None:
    said = list(cuda.complaints(answer, {**EXPECTED, **expected}))
    assert len(said) == len(words)
    assert all(word in text for word, text in zip(words, said, strict=True))


@pytest.mark.parametrize(
    ("file", "tool", "rows"),
    [
        (
            "nvbandwidth-0.8-2x-h200.txt",
            "nvbandwidth",
            [{"host_gbps": 53.88, "peer_gbps": 390.27}, {"host_gbps": 55.24, "peer_gbps": 390.27}],
        ),
        (
            "p2pBandwidthLatencyTest-2x-h200.txt",
            "p2pBandwidthLatencyTest",
            [{"peer_gbps": 363.04}, {"peer_gbps": 363.04}],
        ),
    ],
)
def test_what_a_tool_printed_on_a_real_node_is_read(
    file: str, tool: str, rows: list[dict[str, float]]
) -> None:
    text = (RECORDED / file).read_text()
    assert cuda.figures(text, cuda.TOOLS[tool][1]) == rows
    assert list(cuda.tool_complaints({"tool": tool, "rows": rows}, EXPECTED)) == []


def test_every_table_of_a_tool_is_read_and_nothing_else() -> None:
    text = (RECORDED / "nvbandwidth-0.8-2x-h200.txt").read_text()
    found = dict(cuda.tables(text))
    assert len(found) == 5
    assert found[
        "Running device_to_device_memcpy_read_ce. memcpy CE GPU(row) -> GPU(column) bandwidth (GB/s)"
    ] == [
        [None, 390.27],
        [390.42, None],
    ]
    assert list(cuda.tables("no table\n 0 1\n\nGPU 0 is here\n 0 1 2 3\n")) == []


def test_a_slow_link_is_named_at_both_its_ends_and_a_single_gpu_has_none() -> None:
    text = (RECORDED / "nvbandwidth-0.8-2x-h200.txt").read_text().replace("390.42", " 37.69")
    rows = cuda.figures(text, cuda.NVBANDWIDTH)
    said = list(cuda.tool_complaints({"tool": "nvbandwidth", "rows": rows}, EXPECTED))
    assert said == [
        f"GPU {number} copies 37.69 GB/s from or to another GPU (nvbandwidth), at least 337.5 are expected"
        for number in (0, 1)
    ]
    one = "Running host_to_device_memcpy_ce.\nbandwidth (GB/s)\n    0\n 0  12.5\n"
    assert cuda.figures(one, cuda.NVBANDWIDTH) == [{"host_gbps": 12.5}]


def tool(folder: Path, name: str, text: str) -> None:
    """A program that prints what the real one had printed, and keeps its arguments."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.txt").write_text(text)
    program = folder / name
    program.write_text(f'#!/bin/sh\necho "$@" > {folder}/asked\ncat {folder}/{name}.txt\n')
    program.chmod(0o755)


def test_the_first_tool_that_is_there_times_copies_between_gpus(tmp_path: Path) -> None:
    assert cuda.timed_by_tool([str(tmp_path / "demo")]) == {}
    tool(
        tmp_path / "demo",
        "p2pBandwidthLatencyTest",
        (RECORDED / "p2pBandwidthLatencyTest-2x-h200.txt").read_text(),
    )
    found = cuda.timed_by_tool([str(tmp_path / "demo")])
    assert (found["tool"], len(found["rows"])) == (f"{tmp_path}/demo/p2pBandwidthLatencyTest", 2)
    tool(tmp_path / "bin", "nvbandwidth", (RECORDED / "nvbandwidth-0.8-2x-h200.txt").read_text())
    found = cuda.timed_by_tool([str(tmp_path / "demo"), str(tmp_path / "bin")])
    assert found["tool"] == f"{tmp_path}/bin/nvbandwidth"
    asked = (tmp_path / "bin/asked").read_text().split()
    assert asked == ["--testcase", "host_to_device_memcpy_ce", "device_to_device_memcpy_read_ce"]


def test_a_tool_that_times_nothing_is_a_problem_with_its_last_words(tmp_path: Path) -> None:
    tool(tmp_path / "bin", "nvbandwidth", "Cuda error: CUDA_ERROR_SYSTEM_NOT_READY\n")
    found = cuda.timed_by_tool([str(tmp_path / "bin")])
    assert "CUDA_ERROR_SYSTEM_NOT_READY" in next(cuda.tool_complaints(found, EXPECTED))


def test_a_node_without_the_drivers_library_says_so_and_the_asking_process_is_gone() -> None:
    answer = cuda.smoke()
    assert "libcuda.so.1" in answer["problem"]


def test_an_asking_process_that_dies_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "ask", lambda bandwidth: os._exit(139))
    assert "died" in cuda.smoke()["problem"]


def test_thresholds_come_from_the_platform_and_servers_on_gpus_get_the_toolkit() -> None:
    gpus = {"count": 2, "sm": "9.0", "hbm_effective_gbps": 3700}
    links = {"host_local_gbps": 378.5, "nvlink_gbps": 900}
    one, plan = host({"expected": {"gpus": gpus, "links": links}})
    variables = cuda_runtime.variables(one, plan)
    assert variables["cuda_runtime_expected"] == {
        "gpus": 2,
        "sm": "9.0",
        "host_gbps": 321.7,
        "peer_gbps": 337.5,
        "memory_gbps": 3330.0,
    }
    row = variables["cuda_runtime_services"][0]
    assert row["drop_in"] == "/etc/systemd/system/bringup-words.service.d/50-cuda.conf"
    assert row["environment_file"] == "/etc/bringup/services/words.cuda.env"


def test_one_gpu_has_no_links_to_others() -> None:
    one, plan = host({"expected": {"gpus": {"count": 1}, "links": {"nvlink_gbps": 900}}})
    assert cuda_runtime.variables(one, plan)["cuda_runtime_expected"]["peer_gbps"] == 0


def test_a_host_without_gpus_gets_nothing() -> None:
    one, plan = host({"expected": {"gpus": None}})
    assert not any(cuda_runtime.variables(one, plan).values())
