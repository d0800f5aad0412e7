"""A line of C is really linked on the node, and what a compiler says of a failure leads to the right package."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from bringup import ROOT, plan, preflight
from bringup.node import facts, libraries, linking
from bringup.rolevars import preflight as variables

CASES = sorted((ROOT / "tests" / "cases" / "linking").glob("*.yml"))
BASE = ROOT / "tests" / "cases" / "preflight" / "base" / "eight.yml"
SLASH = Path("/")
ROW: dict[str, Any] = {
    "services": ["big"],
    "languages": ["c"],
    "libraries": ["cuda"],
    "compilers": {},
    "folders": [],
}


def findings(row: dict[str, Any], system: dict[str, str] | None = None) -> list[preflight.Finding]:
    """What preflight says of an otherwise good node on which one row of linking was tried."""
    node = copy.deepcopy(yaml.safe_load(BASE.read_text()))
    node["facts"]["linking"] = [{"services": ["big"], "wish": "", **row}]
    node["facts"]["os"] = {"id": "debian", "like": "", "version": "12", "name": "", **(system or {})}
    expected = preflight.Expected.of({**node["expected"], "linking": [ROW]})
    return [one for one in preflight.verdicts(node["facts"], expected) if not one.code.startswith("OS_")]


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_what_a_compiler_said_names_what_is_missing_and_its_package(path: Path) -> None:
    case = yaml.safe_load(path.read_text())

    def runner(argv: Sequence[str], limit_s: int) -> tuple[int, str]:
        return (0, "12\n") if "-dumpversion" in argv else (case["exit"], case["output"])

    language = case.get("language", "c")
    (found,) = findings(linking.tried("/usr/bin/cc", ["cuda"], [], runner, language), case.get("system"))
    assert (found.code, found.severity, found.remedy) == ("LINK_FAILED", "error", case["command"])
    assert [word for word in case["says"] if word not in str(found)] == []
    assert "bringup-link-" not in str(found)


def wrapped(folder: Path, option: str) -> str:
    """The machine's own compiler with one more option."""
    path = folder / "cc"
    path.write_text(f'#!/bin/sh\nexec {shutil.which("cc")} {option} "$@"\n')
    path.chmod(0o755)
    return str(path)


def test_a_real_compiler_links_what_is_there_and_says_which_library_is_not() -> None:
    (found,) = linking.gather([{**ROW, "libraries": ["m", "no-such-library"]}], facts.run, SLASH)
    assert (found["links"], found["lost"]) == (True, ["no-such-library"])
    assert "cannot find -lno-such-library" in found["said"]
    (found,) = linking.gather([{**ROW, "libraries": ["m"]}], facts.run, SLASH)
    assert (found["links"], found["lost"], found["said"]) == (True, [], "")


def test_a_node_with_a_c_compiler_alone_lacks_the_other_language(tmp_path: Path) -> None:
    """What engines compile for GPUs is C++; the C compiler brings nothing of it."""
    both = {**ROW, "languages": ["c", "c++"], "libraries": []}
    (found,) = linking.gather([both], facts.run, SLASH)
    assert (found["links"], found["language"], found["said"]) == (True, "C", "")
    (tmp_path / "usr/bin").mkdir(parents=True)
    (tmp_path / "usr/bin/cc").symlink_to(str(shutil.which("cc")))
    (row,) = linking.gather([both], facts.run, tmp_path)
    (said,) = findings(row)
    assert (said.code, said.remedy) == ("COMPILER_MISSING", "sudo apt-get install --reinstall g++")
    assert "there is no C++ compiler" in said.what


def test_a_library_is_found_in_a_folder_of_its_own(tmp_path: Path) -> None:
    shutil.copy(libraries.loaded()["libc.so.6"], tmp_path / "libcuda.so")
    (found,) = linking.gather([{**ROW, "folders": [str(tmp_path)]}], facts.run, SLASH)
    assert (found["links"], found["lost"]) == (True, [])
    (found,) = linking.gather([{**ROW, "folders": [str(tmp_path / "other")]}], facts.run, SLASH)
    assert found["lost"] == ["cuda"]


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--sysroot=/nowhere", "the C library's development files"),
        ("-B/nowhere -nostartfiles -fuse-ld=no-such-linker", "cannot"),
    ],
)
def test_a_real_compiler_that_links_nothing_is_an_error_with_a_package(
    option: str, words: str, tmp_path: Path
) -> None:
    (row,) = linking.gather([{**ROW, "compilers": {"c": wrapped(tmp_path, option)}}], facts.run, SLASH)
    assert row["links"] is False
    (found,) = findings(row)
    assert (found.code, found.severity) == ("LINK_FAILED", "error")
    assert words in str(found)
    assert found.remedy.startswith("sudo apt-get install --reinstall ")


def test_a_link_that_hangs_ends_with_its_limit_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = tmp_path / "cc"
    hanging.write_text('#!/bin/sh\n[ "$1" = -dumpversion ] && echo 12 && exit\nsleep 60 & wait\n')
    hanging.chmod(0o755)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(linking, "LIMIT_S", 1)
    (row,) = linking.gather([{**ROW, "compilers": {"c": str(hanging)}}], facts.run, SLASH)
    assert (row["links"], row["said"]) == (False, "it did not end within 1 s")
    assert [path.name for path in tmp_path.iterdir()] == ["cc"]


def test_nothing_is_asked_where_nothing_is_compiled() -> None:
    assert linking.gather([], facts.run, SLASH) == []
    for inventory, asked in (("lab", []), ("h20", [["cuda"]])):
        whole = plan.load(inventory)
        expected = variables.variables(whole.hosts[0], whole)["preflight_expected"]
        assert [row["libraries"] for row in expected["linking"]] == asked


def test_a_profile_with_its_own_compiler_and_folders_is_asked_with_them(tmp_path: Path) -> None:
    whole = plan.load("h20")
    host = whole.hosts[0]
    own = {"CC": "gcc-13", "LIBRARY_PATH": "/opt/a:/opt/b"}
    service = replace(host.services[0], environment={**host.services[0].environment, **own})
    changed = replace(host, services=(service,))
    (row,) = variables.variables(changed, whole)["preflight_expected"]["linking"]
    assert (row["compilers"], row["folders"]) == ({"c": "gcc-13"}, ["/opt/a", "/opt/b"])
    (tmp_path / "usr/bin").mkdir(parents=True)
    (tmp_path / "usr/bin/cc").touch()
    assert linking.compiler(tmp_path, "gcc-13") is None
    assert linking.compiler(tmp_path) == "/usr/bin/cc"
    assert linking.compiler(tmp_path, language="c++") is None


def test_servers_folders_are_looked_at_below_the_root_and_once_each(tmp_path: Path) -> None:
    target = tmp_path / "usr/local/cuda-13.0/targets/x86_64-linux/lib/stubs"
    target.mkdir(parents=True)
    (tmp_path / "usr/local/cuda-13.0/lib64").symlink_to("targets/x86_64-linux/lib")
    (tmp_path / "usr/local/cuda").symlink_to("cuda-13.0")
    found = linking.folders(tmp_path)
    assert [folder.rpartition("/")[2] for folder in found] == ["lib64", "stubs"]
