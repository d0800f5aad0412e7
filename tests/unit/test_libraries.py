"""The library doctor reads real libraries as binutils would, and preloads only what is needed and newer."""

from __future__ import annotations

import ctypes.util
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bringup.node import libraries, undo
from bringup.node.libraries import CXX, LIBC, Library, choose, examine, read

HERE = libraries.loaded()
SYSTEM_CXX, SYSTEM_LIBC = HERE[CXX], HERE[LIBC]


@pytest.fixture(autouse=True)
def _journals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(undo, "FOLDER", tmp_path / "undo")
    monkeypatch.setattr(libraries, "MEMORY", tmp_path / "memory")
    # Files of a test are seconds old at most.
    monkeypatch.setattr(libraries, "SETTLED_S", -1.0)


def test_the_systems_own_libraries_are_read() -> None:
    cxx, libc = read(SYSTEM_CXX), read(SYSTEM_LIBC)
    assert (cxx.soname, libc.soname) == (CXX, LIBC)
    assert cxx.machine == platform.machine()
    assert LIBC in cxx.needed
    assert {"GLIBCXX_3.4", "GLIBCXX_3.4.29", "CXXABI_1.3"} <= cxx.provides
    assert any(version.startswith("GLIBC_2.") for version in cxx.needs[LIBC])


def test_glibc_brings_the_version_that_it_says_it_is() -> None:
    version = platform.libc_ver()[1]
    newest = libraries.newest(read(SYSTEM_LIBC).provides, "GLIBC")
    # A release adds a version of symbols only when it adds symbols.
    assert libraries._rank(newest) <= libraries._rank(version)
    assert libraries._rank(newest)[0] == 2


@pytest.mark.parametrize(
    "name", sorted(set(HERE) & {CXX, "libc.so.6", "libm.so.6", "libssl.so.3", "libz.so.1"})
)
def test_what_is_read_is_what_the_tools_of_the_system_read(name: str) -> None:
    """readelf where there is one, else the loader's own verdict (ldd -v)."""
    found = read(HERE[name])
    if tool := shutil.which("readelf"):
        text = subprocess.run([tool, "-VW", HERE[name]], capture_output=True, text=True, check=True).stdout
        needs = set(re.findall(r"^\s+0x[0-9a-f]+:\s+Name: (\S+)\s+Flags: none", text, re.MULTILINE))
    else:
        text = subprocess.run(["ldd", "-v", HERE[name]], capture_output=True, text=True, check=True).stdout
        own = text.partition("Version information:")[2].partition(":\n")[2]
        own = re.split(r"^\t\S+:$", own, maxsplit=1, flags=re.MULTILINE)[0]
        needs = set(re.findall(r"\((\S+)\) =>", own))
    ours = {version for versions in found.needs.values() for version in versions}
    assert ours == {need for need in needs if not need.startswith("ld-")}


def test_a_library_that_python_has_loaded_is_where_the_cache_says() -> None:
    assert Path(HERE[LIBC]).name == ctypes.util.find_library("c")


@pytest.mark.parametrize(
    "content", [b"", b"not a library", b"\x7fELF\x01\x01" + b"\0" * 90, b"\x7fELF\x02\x01" + b"\xff" * 200]
)
def test_a_file_that_is_no_library_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.so").write_bytes(content)
    with pytest.raises(libraries.NotElf):
        read(tmp_path / "x.so")
    assert libraries.scan(tmp_path) == []


def test_a_library_that_was_cut_is_refused(tmp_path: Path) -> None:
    whole = Path(SYSTEM_CXX).read_bytes()
    for size in (100, 5000, len(whole) // 2):
        (tmp_path / "x.so").write_bytes(whole[:size])
        try:
            read(tmp_path / "x.so")
        except libraries.NotElf:
            continue
        assert size == len(whole) // 2, "only what lies before the cut may be read"


def test_the_cache_of_the_loader_is_read_by_architecture() -> None:
    text = (
        "520 libs found in cache `/etc/ld.so.cache'\n"
        "\tlibx.so.1 (libc6) => /lib/i386-linux-gnu/libx.so.1\n"
        "\tlibx.so.1 (libc6,x86-64) => /opt/first/libx.so.1\n"
        "\tlibx.so.1 (libc6,x86-64) => /lib/libx.so.1\n"
        "\tliby.so.1 (libc6,AArch64) => /lib/aarch64-linux-gnu/liby.so.1\n"
    )
    assert libraries.parse_cache(text, "x86_64") == {"libx.so.1": "/opt/first/libx.so.1"}
    assert libraries.parse_cache(text, "aarch64") == {"liby.so.1": "/lib/aarch64-linux-gnu/liby.so.1"}


# --- the verdict: libraries of an environment are the system's, with version names replaced in their bytes


def rename(path: Path, source: str, old: bytes, new: bytes) -> Path:
    """A copy of a real library in which a version has another name of the same length."""
    assert len(old) == len(new)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(Path(source).read_bytes().replace(old + b"\0", new + b"\0"))
    return path


@pytest.fixture
def needs_newer(tmp_path: Path) -> Path:
    """An environment with a library that needs GLIBCXX_3.9.99 of libstdc++."""
    user = next(
        path
        for name, path in sorted(HERE.items())
        if name != CXX and "GLIBCXX_3.4.21" in _needs(path).get(CXX, frozenset())
    )
    env = tmp_path / "env"
    rename(env / "lib/python3/site-packages/thing/ext.so", user, b"GLIBCXX_3.4.21", b"GLIBCXX_3.9.99")
    return env


def _needs(path: str) -> dict[str, frozenset[str]]:
    try:
        return dict(read(path).needs)
    except (libraries.NotElf, OSError):
        return {}


def test_an_environment_that_needs_nothing_newer_gets_no_preload(tmp_path: Path) -> None:
    env = tmp_path / "env"
    rename(env / "lib/libstdc++.so.6.0.99", SYSTEM_CXX, b"GLIBCXX_3.4.1", b"GLIBCXX_3.4.1")
    verdict = examine(env)
    assert (verdict.preload, verdict.missing, verdict.unsolved) == ("", {}, ())
    assert verdict.scanned == 1


def test_a_newer_one_in_the_environment_is_preloaded_when_something_needs_it(needs_newer: Path) -> None:
    own = needs_newer / "lib/libstdc++.so.6.0.99"
    # It has all of the system's versions but for one that nobody asks for here: the system lacks that too.
    rename(own, SYSTEM_CXX, b"GLIBCXX_3.4.21", b"GLIBCXX_3.9.99")
    system = needs_newer.parent / "system" / CXX
    rename(system, SYSTEM_CXX, b"GLIBCXX_3.4.21", b"GLIBCXX_3.4.20")
    verdict = examine(needs_newer, cache={**HERE, CXX: str(system)})
    assert verdict.preload == str(own)
    assert list(verdict.missing) == ["GLIBCXX_3.9.99"]
    assert verdict.unsolved == ()


def test_without_a_newer_one_the_need_is_named_with_its_file_and_a_way_out(needs_newer: Path) -> None:
    verdict = examine(needs_newer)
    assert verdict.preload == ""
    assert "ext.so need GLIBCXX_3.9.99" in verdict.unsolved[0]
    assert "libstdcxx-ng" in verdict.unsolved[0]


def test_a_need_of_a_newer_c_plus_plus_abi_counts_as_well(tmp_path: Path) -> None:
    user = next(
        path
        for name, path in sorted(HERE.items())
        if name != CXX and "CXXABI_1.3" in _needs(path).get(CXX, frozenset())
    )
    rename(tmp_path / "env/lib/ext.so", user, b"CXXABI_1.3", b"CXXABI_9.9")
    verdict = examine(tmp_path / "env")
    assert list(verdict.missing) == ["CXXABI_9.9"]
    assert "ext.so need CXXABI_9.9" in verdict.unsolved[0]


def test_one_that_would_take_away_a_version_of_the_nodes_own_is_not_preloaded(needs_newer: Path) -> None:
    rename(needs_newer / "lib/libstdc++.so.6.0.99", SYSTEM_CXX, b"GLIBCXX_3.4.21", b"GLIBCXX_3.9.99")
    verdict = examine(needs_newer)
    assert verdict.preload == ""
    assert "lacks GLIBCXX_3.4.21, which the node's own has" in verdict.unsolved[0]


def test_a_need_of_a_newer_glibc_cannot_be_preloaded_and_says_so(tmp_path: Path) -> None:
    rename(tmp_path / "env/lib/x.so", SYSTEM_CXX, b"GLIBC_2.34", b"GLIBC_2.99")
    verdict = examine(tmp_path / "env")
    assert verdict.preload == ""
    assert "x.so need GLIBC_2.99" in verdict.unsolved[0]
    assert "cannot be preloaded" in verdict.unsolved[0]


# --- what was read before


def remembered(env: Path) -> tuple[libraries.Doctor, int]:
    """The verdict with the environment's memory, and how much had to be read for it."""
    memory = libraries.Memory.of(env)
    verdict = examine(env, memory=memory)
    memory.save("demo")
    return verdict, memory.read_again


def test_what_did_not_change_is_not_read_again(needs_newer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = examine(needs_newer)
    first, read_first = remembered(needs_newer)
    # Five folders from the environment down to the library, and the library.
    assert (first, read_first) == (plain, 6)
    monkeypatch.setattr(libraries, "_read_or_none", {path: read(path) for path in HERE.values()}.get)
    assert remembered(needs_newer) == (plain, 0)


def _in_its_place(path: Path) -> None:
    """Other bytes of the same length in the same file, with the old time of change put back."""
    before = path.stat()
    with path.open("r+b") as file:
        file.write(path.read_bytes().replace(b"GLIBCXX_3.9.99\0", b"GLIBCXX_3.9.98\0"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _by_a_rename(path: Path) -> None:
    beside = path.with_name("beside")
    beside.write_bytes(path.read_bytes().replace(b"GLIBCXX_3.9.99\0", b"GLIBCXX_3.9.98\0"))
    beside.rename(path)


def _by_another_name(path: Path) -> None:
    _by_a_rename(path)
    path.rename(path.with_name("other.so"))


def _in_a_new_folder(path: Path) -> None:
    (path.parent / "deep" / "er").mkdir(parents=True)
    _by_a_rename(path)
    path.rename(path.parent / "deep" / "er" / path.name)


@pytest.mark.parametrize("change", [_in_its_place, _by_a_rename, _by_another_name, _in_a_new_folder])
def test_a_library_that_changed_is_read_again(needs_newer: Path, change: Callable[[Path], None]) -> None:
    remembered(needs_newer)
    change(next(needs_newer.rglob("*.so")))
    verdict, again = remembered(needs_newer)
    assert list(verdict.missing) == ["GLIBCXX_3.9.98"]
    assert again > 0
    assert remembered(needs_newer) == (verdict, 0)


def test_a_library_that_is_gone_is_forgotten(needs_newer: Path) -> None:
    remembered(needs_newer)
    next(needs_newer.rglob("*.so")).unlink()
    verdict, _ = remembered(needs_newer)
    assert (verdict.missing, verdict.scanned) == ({}, 0)
    assert ".so" not in libraries.Memory.of(needs_newer).file.read_text()  # type: ignore[union-attr]


def test_a_library_that_has_just_changed_is_not_remembered(
    needs_newer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another change within a tick of the clock could leave its times as they are."""
    monkeypatch.setattr(libraries, "SETTLED_S", 3600.0)
    remembered(needs_newer)
    assert remembered(needs_newer)[1] == 6


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 0, "rows": {}}', '{"version": 1, "rows": 5}'])
def test_a_memory_that_is_none_is_written_again(needs_newer: Path, text: str) -> None:
    first, _ = remembered(needs_newer)
    file = libraries.Memory.of(needs_newer).file
    assert file is not None
    file.write_text(text)
    assert remembered(needs_newer) == (first, 6)
    assert remembered(needs_newer) == (first, 0)


def test_the_memory_of_an_environment_that_is_gone_goes_and_an_undo_takes_it_all(
    needs_newer: Path, tmp_path: Path
) -> None:
    remembered(needs_newer)
    old = needs_newer.rename(tmp_path / "old")
    service = {"name": "words", "prefix": str(old), "drop_in": str(tmp_path / "unit.d" / "50-libraries.conf")}
    assert not libraries.apply([service], (), "demo", check_only=True)["changed"]
    assert [libraries.Memory.of(needs_newer).file] == list(libraries.MEMORY.iterdir())
    libraries.apply([service], (), "demo", check_only=False)
    assert [libraries.Memory.of(old).file] == list(libraries.MEMORY.iterdir())
    undo.Journal("demo").restore()
    assert not libraries.MEMORY.exists()


# --- candidates


def made(**changes: object) -> Library:
    known = Library(
        "/new",
        "x86_64",
        CXX,
        (),
        {LIBC: frozenset({"GLIBC_2.36"})},
        frozenset({"GLIBCXX_3.4", "GLIBCXX_3.4.33"}),
    )
    return replace(known, **changes)  # type: ignore[arg-type]


OWN = frozenset({"GLIBCXX_3.4"})
NODE = {CXX: OWN, LIBC: frozenset({"GLIBC_2.36"})}
MISSING = frozenset({"GLIBCXX_3.4.33"})


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"machine": "aarch64"}, "another machine"),
        ({"soname": "libother.so"}, "another library"),
        ({"provides": OWN}, "lacks GLIBCXX_3.4.33"),
        ({"provides": MISSING}, "which the node's own has"),
        ({"needs": {LIBC: frozenset({"GLIBC_2.39"})}}, "itself needs GLIBC_2.39"),
    ],
)
def test_a_candidate_that_would_not_do_is_refused_with_the_reason(
    changes: dict[str, object], why: str
) -> None:
    chosen, refused = choose([made(**changes)], OWN, MISSING, NODE, "x86_64")
    assert chosen is None
    assert why in refused[0]


def test_of_two_that_would_do_the_newer_is_taken() -> None:
    newer = made(path="/newer", provides=frozenset({"GLIBCXX_3.4", "GLIBCXX_3.4.33", "GLIBCXX_3.4.100"}))
    assert choose([made(), newer], OWN, MISSING, NODE, "x86_64")[0] == newer


def test_versions_are_compared_as_numbers() -> None:
    assert (
        libraries.newest(["GLIBCXX_3.4.9", "GLIBCXX_3.4.30", "GLIBCXX_LDBL_3.4"], "GLIBCXX")
        == "GLIBCXX_3.4.30"
    )
