"""Recorded facts in, verdicts out; and what the gathering reads from files and tools."""

from __future__ import annotations

import copy
import os
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import yaml

from bringup import ROOT, preflight, surroundings
from bringup.node import facts

CASES = ROOT / "tests" / "cases" / "preflight"
NODE_CASES = ROOT / "tests" / "cases" / "node"


def changed(data: Any, dotted: str, value: Any) -> None:
    """Sets `a.0.b` or `a.*.b` in plain data; a whole number in place of a list keeps its first rows."""
    first, _, rest = dotted.partition(".")
    if first == "*":
        for index in range(len(data)):
            changed(data, f"{index}.{rest}", value)
        return
    key: Any = int(first) if isinstance(data, list) else first
    # Units have names with dots and dashes: the longest key that exists wins.
    if isinstance(data, dict) and dotted in data:
        key, rest = dotted, ""
    if rest:
        changed(data[key], rest, value)
    elif isinstance(data, dict) and isinstance(data.get(key), list) and isinstance(value, int):
        data[key] = data[key][:value]
    else:
        data[key] = value


def load(path: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    case = yaml.safe_load(path.read_text())
    base = yaml.safe_load((CASES / "base" / f"{case['base']}.yml").read_text())
    # Rows that are one and the same in the file (an alias) must be able to differ.
    data = copy.deepcopy(yaml.safe_load(yaml.dump(base, Dumper=_NoAliases)))
    for part in ("facts", "expected"):
        for dotted, value in case.get(part, {}).items():
            changed(data[part], dotted, value)
    return case, data["facts"], data["expected"]


class _NoAliases(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


@pytest.mark.parametrize("path", sorted(CASES.glob("*.yml")), ids=lambda path: path.stem)
def test_a_node_gets_exactly_the_verdicts_that_its_facts_deserve(path: Path) -> None:
    case, node, expected = load(path)
    found = preflight.verdicts(node, preflight.Expected.of(expected))
    assert [finding.code for finding in found] == case["codes"]
    text = "\n".join(map(str, found))
    assert [word for word in case.get("says", []) if word not in text] == []
    assert [finding.code for finding in found if not finding.remedy] == []


def known_codes() -> set[str]:
    """Every code that a check can give, from the checks' own text."""
    sources = "".join(Path(str(module.__file__)).read_text() for module in (preflight, surroundings))
    return set(re.findall(r'"([A-Z]+(?:_[A-Z]+)+)"', sources)) - {"ID", "VERSION_ID", "CUDA_HOME"}


def test_every_code_is_in_the_table_of_the_documents_and_no_other() -> None:
    section = (ROOT / "docs" / "roles.md").read_text().split("| codes | about |")[1].split("\n\n")[0]
    named = re.findall(r"`([A-Z]+(?:_[A-Z]+)+)`", section)
    assert len(named) == len(set(named))
    assert set(named) == known_codes()


def test_every_code_has_a_case() -> None:
    shown = {code for path in CASES.glob("*.yml") for code in yaml.safe_load(path.read_text())["codes"]}
    assert shown == known_codes()


def test_no_check_can_be_taken_out_unseen() -> None:
    """Every code of every case comes from one check alone: without that check the case, and so this file, fails."""
    busy: dict[str, set[str]] = {check.__name__: set() for check in preflight.CHECKS}
    for path in CASES.glob("*.yml"):
        _, node, data = load(path)
        expected = preflight.Expected.of(data)
        codes = [
            {(check.__name__, finding.code) for finding in check(node, expected)}
            for check in preflight.CHECKS
        ]
        given = [code for rows in codes for _, code in rows]
        assert len(given) == len(set(given)), f"{path.stem}: two checks give one code"
        for name, code in set().union(*codes):
            busy[name].add(code)
    assert [name for name, shown in busy.items() if not shown] == []


def test_every_code_has_a_case_beside_it_that_is_all_well() -> None:
    """A check that always speaks fails the case of the same base in which there is nothing to say."""
    cases = [yaml.safe_load(path.read_text()) for path in CASES.glob("*.yml")]
    well = {case["base"] for case in cases if not case["codes"]}
    assert {case["base"] for case in cases} == well


def test_a_refusal_lists_every_error_and_no_warning() -> None:
    findings = [
        preflight.Finding("A_CODE", "error", "first", "seen", "Do this"),
        preflight.Finding("B_CODE", "warning", "second"),
        preflight.Finding("C_CODE", "error", "third"),
    ]
    text = preflight.refusal("node-01", findings)
    assert text.splitlines() == [
        "node-01 is not as its plan needs it, 2 findings:",
        "- A_CODE: first (seen). Do this",
        "- C_CODE: third",
    ]
    assert preflight.refusal("node-01", findings[1:2]) == ""


def test_an_expectation_with_a_misspelt_key_is_an_error() -> None:
    with pytest.raises(TypeError, match="prots"):
        preflight.Expected.of({"prots": []})


def test_the_gathered_facts_of_this_machine_give_verdicts(tmp_path: Path) -> None:
    gathered = facts.gather({"paths": [str(tmp_path / "not" / "yet")], "users": ["root", "nobody-has-this"]})
    room = {"path": str(tmp_path / "not" / "yet"), "needed": 1 << 60, "purpose": "more than there is"}
    found = preflight.verdicts(gathered, preflight.Expected.of({"rooms": [room]}))
    assert "DISK_FULL" in [finding.code for finding in found]
    assert (gathered["users"]["root"]["uid"], gathered["users"]["nobody-has-this"]) == (0, None)
    assert 0 in gathered["users"]["root"]["groups"]


def test_device_nodes_are_gathered_with_who_may_open_them(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    for name, mode in (
        ("nvidia0", 0o640),
        ("nvidiactl", 0o666),
        ("nvidia-uvm", 0o600),
        ("nvidia-modeset", 0o666),
    ):
        (tmp_path / "dev" / name).touch()
        (tmp_path / "dev" / name).chmod(mode)
    found = facts.devices(tmp_path)
    assert {row["path"]: row["mode"] for row in found} == {
        "/dev/nvidia0": 0o640,
        "/dev/nvidia-uvm": 0o600,
        "/dev/nvidiactl": 0o666,
    }
    assert {(row["uid"], row["gid"]) for row in found} == {(os.getuid(), tmp_path.stat().st_gid)}
    assert all(row["owner"] and row["group"] for row in found)


def test_an_access_list_is_read_without_what_the_mode_holds() -> None:
    entries = [
        (0x01, 6, 2**32 - 1),
        (0x02, 6, 987),
        (0x04, 4, 2**32 - 1),
        (0x08, 6, 44),
        (0x10, 6, 0),
        (0x20, 0, 0),
    ]
    raw = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    assert facts.parse_access_list(raw) == [
        {"kind": "user", "id": 987, "rights": 6},
        {"kind": "owning group", "id": None, "rights": 4},
        {"kind": "group", "id": 44, "rights": 6},
    ]
    assert facts.parse_access_list(raw[:-3])[:1] == [{"kind": "user", "id": 987, "rights": 6}]
    assert facts.parse_access_list(b"") == []


def test_a_real_report_of_the_gpu_tool_is_read() -> None:
    smi = facts.parse_smi((NODE_CASES / "nvidia-smi-q.xml").read_text())
    gpu = smi["gpus"][0]
    assert (smi["driver"], smi["cuda"], smi["attached"]) == ("580.159.04", "13.0", 1)
    assert (gpu["name"], gpu["memory"]) == ("NVIDIA H200", 143771 * 1024**2)
    assert (gpu["mig"], gpu["persistence"], gpu["remap_pending"]) == ("Disabled", "Enabled", "No")
    assert (gpu["link_width"], gpu["link_width_max"]) == (16, 16)
    assert gpu["ecc_uncorrected_since_boot"] == 0


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build", "580.159.04"),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.261.03  Thu", "535.261.03"),
        ("", None),
    ],
)
def test_the_kernel_modules_version_is_read_of_both_kinds(text: str, version: str | None) -> None:
    assert facts.parse_module_version(text) == version


def test_xids_are_read_with_number_and_address() -> None:
    line = "[ 12.3] NVRM: Xid (PCI:0000:1b:00): 79, pid=1, GPU has fallen off the bus.\n"
    assert [(row["xid"], row["address"]) for row in facts.parse_xids("noise\n" + line)] == [
        (79, "0000:1b:00")
    ]


def test_listening_sockets_are_read_of_both_families() -> None:
    head = (
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    )
    four = (
        "   0: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4242 1\n"
    )
    talk = (
        "   1: 0100007F:1F41 0100007F:1F40 01 00000000:00000000 00:00000000 00000000     0        0 4243 1\n"
    )
    six = four.replace("0100007F", "00000000000000000000000001000000")
    assert facts.parse_listening(head + four + talk) == [("127.0.0.1", 8000, "4242")]
    assert facts.parse_listening(head + six) == [("::1", 8000, "4242")]


def test_the_mount_of_a_path_is_the_longest_that_holds_it() -> None:
    mounts = "/dev/a / ext4 rw 0 0\n/dev/b /data xfs rw 0 0\n/dev/c /data/my\\040models ext4 ro,noatime 0 0\n"
    assert facts.mount_of("/data/my models/x", mounts) == ("/data/my models", "ext4", "ro,noatime")
    assert facts.mount_of("/database", mounts)[0] == "/"


def test_the_unit_of_a_process_is_read_from_its_control_group() -> None:
    assert facts.parse_unit("0::/system.slice/bringup-words.service\n") == "bringup-words.service"
    assert facts.parse_unit("0::/user.slice/user-0.slice/session-1.scope\n") is None


def test_only_held_package_locks_count() -> None:
    text = "1: POSIX  ADVISORY  WRITE 77 08:01:1234 0 EOF\n1: -> POSIX  ADVISORY  WRITE 78 08:01:1234 0 EOF\n"
    assert facts.parse_locks(text) == [(77, 8, 1, 1234)]


def test_a_command_over_its_limit_is_ended_and_one_that_is_not_there_is_said() -> None:
    assert facts.run(["sleep", "5"], 1) == (124, "")
    assert facts.run(["no-such-program-anywhere"])[0] == 127
