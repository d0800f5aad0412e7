"""Settings of a GPU node: each says why, a site may change one, and what cannot be set fails nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bringup import ROOT
from bringup.node import packages, settings, undo
from bringup.node.settings import Value
from bringup.rolevars import system_settings
from bringup.yamlfile import read_yaml
from tests.molecule.gpu_node import host


@pytest.fixture(autouse=True)
def _journals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(undo, "FOLDER", tmp_path / "undo")


def given(**site: Any) -> dict[str, Any]:
    one, plan = host({"site": site})
    return system_settings.variables(one, plan)


def text(variables: dict[str, Any], path: str) -> str:
    content: str = next(row["content"] for row in variables["system_settings_files"] if row["path"] == path)
    return content


def test_each_setting_says_why_and_where_that_is_known_from() -> None:
    known = read_yaml(ROOT / system_settings.SETTINGS)
    rows = [row for kind in ("kernel", "files", "limits") for row in known[kind].values()]
    rows += [row for kind, row in known.items() if kind not in ("kernel", "files", "limits")]
    assert [row for row in rows if len(row["why"]) < 40 or not row["source"].startswith("https://")] == []


def test_what_a_serving_node_is_known_to_need_is_set() -> None:
    """Kernel values, limits, huge pages of both kinds, governor, NUMA balancing, timers, clock, shared memory."""
    variables = given()
    names = {row["name"] for row in variables["system_settings_values"]}
    assert {"kernel.numa_balancing", "vm.nr_hugepages", "vm.swappiness", "vm.max_map_count"} <= names
    assert "/sys/kernel/mm/transparent_hugepage/enabled" in names
    assert "/sys/devices/system/cpu/cpu*/cpufreq/scaling_governor" in names
    assert "* - memlock unlimited\n" in text(variables, "/etc/security/limits.d/60-bringup.conf")
    assert {"apt-daily.timer", "apt-daily-upgrade.timer"} <= {*variables["system_settings_timers"]}
    assert variables["system_settings_clock"] is True
    assert variables["system_settings_shared_memory"] == "50%"
    assert 'Automatic-Reboot "false";' in text(variables, "/etc/apt/apt.conf.d/52bringup-quiet")
    left_alone = text(variables, "/etc/needrestart/conf.d/bringup.conf")
    assert "$nrconf{override_rc}{qr(^bringup-)} = 0;\n$nrconf{override_rc}{qr(^nvidia-)} = 0;\n" in left_alone


def test_files_say_why_in_comments_only() -> None:
    """The reason may not become a setting of its own."""
    variables = given()
    for path, mark in (
        ("/etc/apt/apt.conf.d/52bringup-quiet", "//"),
        ("/etc/needrestart/conf.d/bringup.conf", "#"),
    ):
        lines = text(variables, path).splitlines()
        assert [line for line in lines[:-2] if not line.startswith((mark, "$nrconf"))] == []


class Machine:
    """What a machine answers when somebody asks for its clock; `ran` keeps what was installed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, running: str, is_container: bool) -> None:
        self.ran: list[list[str]] = []
        monkeypatch.setattr(undo, "unit_state", lambda unit: ("", unit == f"{running}.service"))
        monkeypatch.setattr(undo, "run", lambda argv, limit_s=0: (0 if is_container else 1, ""))
        monkeypatch.setattr(packages, "refresh", lambda: self.ran.append(["refresh"]))
        monkeypatch.setattr(packages, "install", lambda names, journal, limit_s: self.ran.append([*names]))


def test_a_time_service_is_installed_only_where_none_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, running="systemd-timesyncd", is_container=False)
    assert settings.clock(["chrony"], undo.Journal("demo"), 1) == ([], [])
    machine = Machine(monkeypatch, running="", is_container=True)
    assert (
        settings.clock(["chrony"], undo.Journal("demo"), 1)[1][0]["why"] == "a container has its host's clock"
    )
    assert machine.ran == []
    machine = Machine(monkeypatch, running="", is_container=False)
    assert settings.clock(["chrony"], None, 1) == (["install chrony"], [])
    assert machine.ran == []
    assert settings.clock(["chrony"], undo.Journal("demo"), 1) == (["install chrony"], [])
    assert machine.ran == [["refresh"], ["chrony"]]


def test_a_host_without_gpus_gets_nothing() -> None:
    one, plan = host({})
    nothing = system_settings.variables(replace(one, expected={"arch": "any"}), plan)
    assert not any(nothing.values())
    assert not any(given(sysctl=False).values())


def test_a_site_changes_one_setting_adds_one_and_leaves_one() -> None:
    wishes = {"vm.swappiness": 10, "net.ipv4.tcp_mtu_probing": 1, "kernel.panic": None}
    variables = given(settings=wishes)
    written = text(variables, "/etc/sysctl.d/60-bringup.conf")
    assert "vm.swappiness = 10\n" in written
    assert "net.ipv4.tcp_mtu_probing = 1\n" in written
    assert "kernel.panic" not in written
    paths = [row["path"] for row in variables["system_settings_values"]]
    assert "/proc/sys/net/ipv4/tcp_mtu_probing" in paths


def test_what_is_set_now_is_also_set_at_boot() -> None:
    variables = given()
    boot = text(variables, "/etc/sysctl.d/60-bringup.conf")
    boot += text(variables, "/etc/tmpfiles.d/bringup-settings.conf")
    assert [
        row
        for row in variables["system_settings_values"]
        if f"{row['name']} = {row['value']}\n" not in boot
        and f"w {row['name']} - - - - {row['value']}\n" not in boot
    ] == []


@pytest.mark.parametrize(
    ("said", "means"),
    [
        ("always [madvise] never\n", "madvise"),
        ("0\n", "0"),
        ("4096\t131072\t6291456\n", "4096 131072 6291456"),
    ],
)
def test_a_kernel_file_means_its_chosen_word(said: str, means: str) -> None:
    assert undo.meaning(said) == means


def test_a_value_is_set_in_every_file_of_its_pattern_and_remembered(tmp_path: Path) -> None:
    for cpu, now in enumerate(["powersave", "performance"]):
        (tmp_path / f"cpu{cpu}").mkdir()
        (tmp_path / f"cpu{cpu}" / "governor").write_text(f"{now}\n")
    value = Value("governor", f"{tmp_path}/cpu*/governor", "performance")
    done, skipped = settings.kernel([value], undo.Journal("demo"))
    assert [line.rpartition(": ")[2] for line in done] == ["powersave -> performance"]
    assert skipped == []
    assert settings.kernel([value], undo.Journal("demo")) == ([], [])
    assert undo.Journal("demo").data["values"] == {f"{tmp_path}/cpu0/governor": "powersave"}


def test_check_mode_says_it_and_sets_nothing(tmp_path: Path) -> None:
    (tmp_path / "value").write_text("60\n")
    done, _ = settings.kernel([Value("demo", str(tmp_path / "value"), "1")], None)
    assert len(done) == 1
    assert (tmp_path / "value").read_text() == "60\n"


def test_what_a_machine_lacks_or_refuses_is_named_with_the_reason(tmp_path: Path) -> None:
    missing = Value("demo", str(tmp_path / "none"), "1")
    refused = Value("kernel.osrelease", "/proc/sys/kernel/ostype", "Other")
    done, skipped = settings.kernel([missing, refused], undo.Journal("demo"))
    assert done == []
    assert [row["name"] for row in skipped] == ["demo", "kernel.osrelease"]
    assert "no such setting" in skipped[0]["why"]


@pytest.mark.parametrize(("wish", "size"), [("64G", 64 * 1024**3), ("512M", 512 * 1024**2), ("4096", 4096)])
def test_a_size_is_bytes(wish: str, size: int) -> None:
    assert settings.shm_bytes(wish) == size


def test_a_size_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="neither a share"):
        settings.shm_bytes("half")
