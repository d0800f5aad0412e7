"""Which driver is installed, from which packages, and when a reboot is due: cases in, decisions out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from bringup import ROOT
from bringup.node import driver, packages, undo
from bringup.node.driver import Now, Wish
from bringup.rolevars import nvidia_driver
from tests.molecule.gpu_node import host

SETS: list[dict[str, Any]] = yaml.safe_load((ROOT / "roles/nvidia_driver/defaults/main.yml").read_text())[
    "nvidia_driver_packages"
]
KERNEL = "6.8.0-60-generic"
UBUNTU: tuple[str, ...] = (
    "nvidia-dkms-580-open",
    "nvidia-kernel-common-580",
    "libnvidia-compute-580",
    "nvidia-utils-580",
)
UBUNTU += ("nvidia-compute-utils-580", "nvidia-fabricmanager-580")
DEBIAN = ("nvidia-kernel-open-dkms", "nvidia-driver-cuda", "nvidia-persistenced", "nvidia-fabricmanager")


@pytest.mark.parametrize(
    ("version", "spec", "fits"),
    [
        ("580.105.08", "580", True),
        ("580.105.08", "580.105.08", True),
        ("580.105.8", "580.105.08", True),
        ("580.159.04", "580.105.08", False),
        ("570.158.01", "580", False),
        ("", "580", False),
    ],
)
def test_a_version_is_of_a_branch_or_the_very_one(version: str, spec: str, fits: bool) -> None:
    assert driver.matches(version, spec) is fits


@pytest.mark.parametrize(
    ("wish", "now", "well"),
    [
        (Wish(minimum="550"), Now(running="580.105.08", packaged="580.105.08"), True),
        (Wish(minimum="550"), Now(running="535.183.01", packaged="535.183.01"), False),
        (Wish(minimum="550"), Now(), False),
        # A driver from the vendor's installer is kept where the site names none.
        (Wish(minimum="550"), Now(running="580.105.08"), True),
        (Wish(version="580.105.08", minimum="550"), Now(running="580.159.04", packaged="580.159.04"), False),
        (Wish(version="580", minimum="550"), Now(running="580.159.04", packaged="580.159.04"), True),
        # Installed, and the boot is still due: nothing is to be installed again.
        (Wish(version="580", minimum="550"), Now(running="570.158.01", packaged="580.159.04"), True),
        (Wish(minimum="550", open_modules=True), Now(running="580.105.08", packaged="580.105.08"), False),
        (Wish(minimum="550", open_modules=True), Now("580.105.08", True, "580.105.08"), True),
        # The open modules of the same version are installed and wait for a boot.
        (
            Wish(minimum="550", open_modules=True),
            Now(running="580.105.08", packaged="580.105.08", packaged_open=True),
            True,
        ),
        (Wish(minimum="550", fabric=True), Now("580.105.08", True, "580.105.08", "580.105.08"), True),
        (Wish(minimum="550", fabric=True), Now("580.105.08", True, "580.105.08", "580.159.04"), False),
        (Wish(minimum="550", fabric=True), Now("580.105.08", True, "580.105.08"), False),
    ],
)
def test_a_node_is_as_wanted_or_not(wish: Wish, now: Now, well: bool) -> None:
    assert driver.satisfied(wish, now) is well


def test_a_wrong_fabric_manager_does_not_move_the_driver() -> None:
    wish = Wish(minimum="550", recommended="580", fabric=True)
    now = Now("570.158.01", True, "570.158.01", "570.195.03")
    assert driver.wanted_version(wish, now) == "570.158.01"
    assert driver.wanted_version(wish, Now()) == "580"


@pytest.mark.parametrize(
    ("wish", "now", "words"),
    [
        (Wish(), Now(nouveau=True), ["nouveau"]),
        (Wish(), Now(running="570.1", packaged="580.1"), ["570.1 runs, 580.1 is installed"]),
        (Wish(open_modules=True), Now(running="580.1", packaged="580.1"), ["closed kernel modules"]),
        (Wish(open_modules=True), Now("580.1", True, "580.1"), []),
        (Wish(), Now(packaged="580.1"), []),
    ],
)
def test_a_boot_is_due_when_what_runs_is_not_what_is_installed(
    wish: Wish, now: Now, words: list[str]
) -> None:
    reasons = driver.reboot_reasons(wish, now)
    assert len(reasons) == len(words)
    assert all(word in reason for word, reason in zip(words, reasons, strict=True))


def had(names: tuple[str, ...], *versions: str) -> dict[str, list[str]]:
    return {name: [f"{version}-0ubuntu1" for version in versions] for name in names}


def test_the_newest_of_a_branch_that_all_packages_have_is_chosen() -> None:
    there = had(UBUNTU, "580.159.04", "580.105.08")
    there["nvidia-fabricmanager-580"] = ["580.105.08-1"]
    wish = Wish(open_modules=True, fabric=True)
    version, chosen = driver.choose(wish, "580", SETS, there, KERNEL)
    assert version == "580.105.08"
    assert chosen["nvidia-fabricmanager-580"] == "580.105.08-1"
    assert chosen["nvidia-dkms-580-open"] == "580.105.08-0ubuntu1"
    assert set(chosen) == set(UBUNTU)


def test_without_switches_no_fabric_manager_is_chosen() -> None:
    _, chosen = driver.choose(Wish(open_modules=True), "580", SETS, had(UBUNTU, "580.105.08"), KERNEL)
    assert "nvidia-fabricmanager-580" not in chosen
    assert len(chosen) == 5


def test_closed_modules_are_not_chosen_where_open_ones_are_needed() -> None:
    closed = had(
        (*(name.removesuffix("-open") for name in UBUNTU), "nvidia-kernel-dkms", *DEBIAN[1:]),
        "580.105.08",
    )
    assert driver.choose(Wish(open_modules=True), "580", SETS, closed, KERNEL) == ("", {})
    _, chosen = driver.choose(Wish(), "580", SETS, closed, KERNEL)
    assert "nvidia-dkms-580" in chosen


@pytest.mark.parametrize(
    ("name", "is_open"),
    [
        ("nvidia-dkms-580-open", True),
        ("nvidia-kernel-open-dkms", True),
        (f"linux-modules-nvidia-580-server-open-{KERNEL}", True),
        ("nvidia-dkms-580", False),
        ("nvidia-kernel-dkms", False),
        ("libnvidia-compute-580", False),
        ("nvidia-driver-cuda", False),
    ],
)
def test_open_modules_are_known_by_packages_that_closed_ones_do_not_have(name: str, is_open: bool) -> None:
    parts = ("driver", "other")
    assert bool(driver.installed_of(driver.open_only(SETS), [name], KERNEL, parts)) is is_open


def test_the_vendors_packages_for_debian_are_found_by_what_can_be_had() -> None:
    version, chosen = driver.choose(
        Wish(open_modules=True, fabric=True),
        "580.105.08",
        SETS,
        had(DEBIAN, "580.159.04", "580.105.08"),
        KERNEL,
    )
    assert version == "580.105.08"
    assert set(chosen) == set(DEBIAN)


def test_prebuilt_modules_are_those_of_the_running_kernel() -> None:
    names = (
        "nvidia-headless-no-dkms-580-server-open",
        "libnvidia-compute-580-server",
        "nvidia-utils-580-server",
    )
    there = had((*names, "nvidia-compute-utils-580-server"), "580.105.08")
    wish = Wish(open_modules=True, modules="prebuilt")
    assert driver.choose(wish, "580", SETS, there, KERNEL) == ("", {})
    modules = f"linux-modules-nvidia-580-server-open-{KERNEL}"
    version, chosen = driver.choose(wish, "580", SETS, {**there, modules: ["6.8.0-60.63"]}, KERNEL)
    assert (version, chosen[modules]) == ("580.105.08", "6.8.0-60.63")


def test_a_version_that_cannot_be_had_is_named_with_those_that_can() -> None:
    there = had(UBUNTU, "580.105.08")
    assert driver.choose(Wish(open_modules=True), "580.95.05", SETS, there, KERNEL) == ("", {})
    said = driver._none(Wish(open_modules=True), "580.95.05", [*UBUNTU, "nvidia-driver-cuda"], there)
    assert "580.95.05 (open kernel modules, dkms)" in said
    assert "can be had: 580.105.08" in said
    assert "not to be had: nvidia-driver-cuda" in said


def test_packages_of_any_branch_are_known_as_the_drivers() -> None:
    have = {
        "libnvidia-compute-570": "570.158.01-0ubuntu1",
        "nvidia-fabricmanager-570": "570.158.01-1",
        "zlib1g": "1",
    }
    assert driver.packaged_version(SETS, have, KERNEL) == "570.158.01"
    assert driver.packaged_version(SETS, have, KERNEL, "fabric") == "570.158.01"
    assert driver.installed_of(SETS, have, KERNEL, ("driver", "fabric")) == [
        "libnvidia-compute-570",
        "nvidia-fabricmanager-570",
    ]
    assert driver.packaged_version(SETS, {"zlib1g": "1"}, KERNEL) == ""


@pytest.mark.parametrize(
    ("text", "upstream"),
    [
        ("1:580.105.08-0ubuntu1", "580.105.08"),
        ("580.105.08-0twin1", "580.105.08"),
        ("580.105.08", "580.105.08"),
    ],
)
def test_the_makers_version_is_in_the_packages(text: str, upstream: str) -> None:
    assert packages.upstream(text) == upstream


def test_what_can_be_had_is_read_from_the_package_manager() -> None:
    text = (
        "nvidia-utils-580 | 580.159.04-0twin1 | file:/opt ./ Packages\n"
        "nvidia-utils-580 | 580.105.08-0twin1 | file:/opt ./ Packages\n"
        "nvidia-utils-580 | 580.105.08-0twin1 | file:/other ./ Packages\n"
    )
    assert packages.parse_madison(text) == {"nvidia-utils-580": ["580.159.04-0twin1", "580.105.08-0twin1"]}


def test_an_archive_that_is_not_as_listed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.deb").write_bytes(b"a")
    (tmp_path / "SHA256SUMS").write_text(f"{'0' * 64}  a.deb\n{'1' * 64}  b.deb\n")
    with pytest.raises(driver.DriverFailed, match=r"a\.deb, b\.deb missing or not as listed"):
        driver.check_sums(tmp_path)
    (tmp_path / "SHA256SUMS").write_text(f"{driver.sha256(tmp_path / 'a.deb')}  a.deb\n")
    driver.check_sums(tmp_path)


def test_an_empty_archive_and_none_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(undo, "FOLDER", tmp_path / "undo")
    with pytest.raises(driver.DriverFailed, match="no folder"):
        driver.make_ready(tmp_path / "none", undo.Journal("demo"))
    with pytest.raises(driver.DriverFailed, match="holds no packages"):
        driver.make_ready(tmp_path, undo.Journal("demo"))


# --- secure boot --------------------------------------------------------------------------------------------


def firmware(root: Path, state: bytes) -> None:
    folder = root / "sys/firmware/efi/efivars"
    folder.mkdir(parents=True)
    (folder / "SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c").write_bytes(b"\x06\0\0\0" + state)


def key(root: Path, path: str = driver.DKMS_KEYS[0]) -> Path:
    made = root / path.lstrip("/")
    made.parent.mkdir(parents=True, exist_ok=True)
    made.write_bytes(b"certificate")
    return made


class Mokutil:
    """Answers as mokutil does; `enrolled`: the keys that the firmware knows; code 127: there is none."""

    def __init__(self, *enrolled: Path, code: int = 0) -> None:
        self.enrolled, self.code = [str(path) for path in enrolled], code

    def __call__(self, argv: Sequence[str], limit_s: int) -> tuple[int, str]:
        if self.code:
            return self.code, "no such command"
        assert argv[:2] == ["mokutil", "--test-key"]
        return (0, f"{argv[2]} is {'already' if argv[2] in self.enrolled else 'not'} enrolled")


def test_without_secure_boot_modules_need_no_key(tmp_path: Path) -> None:
    firmware(tmp_path, b"\0")
    assert driver.unsigned(Mokutil(), tmp_path) == ""
    # A machine without EFI and without mokutil.
    assert driver.unsigned(Mokutil(code=127), tmp_path / "none") == ""


@pytest.mark.parametrize("path", driver.DKMS_KEYS)
def test_with_secure_boot_an_enrolled_key_is_good(path: str, tmp_path: Path) -> None:
    firmware(tmp_path, b"\1")
    assert driver.unsigned(Mokutil(key(tmp_path, path)), tmp_path) == ""


def test_with_secure_boot_modules_that_the_kernel_would_refuse_are_not_installed(tmp_path: Path) -> None:
    firmware(tmp_path, b"\1")
    said = driver.unsigned(Mokutil(), tmp_path)
    assert "no key that they could be signed with" in said
    assert "dkms generate_mok" in said
    made = key(tmp_path)
    said = driver.unsigned(Mokutil(), tmp_path)
    assert f"their key {made} is not enrolled" in said
    assert f"sudo mokutil --import {made}" in said
    assert "node_driver.modules: prebuilt" in said
    assert "cannot be seen without mokutil" in driver.unsigned(Mokutil(code=127), tmp_path)


def test_a_key_of_the_sites_own_is_the_one_that_counts(tmp_path: Path) -> None:
    firmware(tmp_path, b"\1")
    usual, own = key(tmp_path), key(tmp_path, "/etc/site/mok.der")
    settings = tmp_path / "etc/dkms/framework.conf.d/site.conf"
    settings.parent.mkdir(parents=True)
    settings.write_text('# mok_certificate=/none\nmok_certificate="/etc/site/mok.der"\n')
    assert driver.signing_keys(tmp_path) == [own]
    assert driver.unsigned(Mokutil(own), tmp_path) == ""
    assert "not enrolled" in driver.unsigned(Mokutil(usual), tmp_path)


# --- the plan -----------------------------------------------------------------------------------------------


def given(**changes: Any) -> dict[str, Any]:
    one, plan = host(changes)
    return nvidia_driver.variables(one, plan)


def content(variables: dict[str, Any], path: str) -> str:
    text: str = next(row["content"] for row in variables["nvidia_driver_files"] if row["path"] == path)
    return text


def test_a_host_without_gpus_and_a_site_that_manages_it_itself_get_nothing() -> None:
    assert given(expected={"gpus": None})["nvidia_driver_gpus"] == 0
    assert given(site={"driver": {"manage": False}})["nvidia_driver_files"] == []


def test_clocks_and_power_are_set_at_boot_and_taken_back() -> None:
    text = nvidia_driver.settings_text({"clocks_mhz": (1200, 1980), "power_w": 600})
    assert "--lock-gpu-clocks=1200,1980\nExecStop=/usr/bin/nvidia-smi --reset-gpu-clocks\n" in text
    assert "--power-limit=600\n" in text
    assert f"ExecStop={nvidia_driver.DEFAULT_POWER}\n" in text
    plain = nvidia_driver.settings_text({})
    assert "lock-gpu-clocks" not in plain
    assert "power" not in plain.replace("Persistence, clocks and power", "")


def test_persistence_runs_as_root_only_where_gpu_memory_is_a_memory_node() -> None:
    drop_in = "/etc/systemd/system/nvidia-persistenced.service.d/50-bringup.conf"
    assert drop_in not in [row["path"] for row in given()["nvidia_driver_files"]]
    machine = {"numa": [{"node": 2, "gpu_memory": True}]}
    assert "--user root" in content(given(expected={"host": machine}), drop_in)


def test_a_repository_is_trusted_by_its_own_key_only(tmp_path: Path) -> None:
    (tmp_path / "vendor.asc").write_text("-----BEGIN PGP PUBLIC KEY BLOCK-----\n")
    wish = {"uri": "file:/srv/debs", "suite": "./", "components": [], "key": str(tmp_path / "vendor.asc")}
    variables = given(site={"driver": {"repository": wish}})
    source = content(variables, nvidia_driver.REPOSITORY)
    assert "Signed-By: /etc/apt/keyrings/bringup-driver.asc\n" in source
    assert "Components" not in source
    assert content(variables, nvidia_driver.KEYRING).startswith("-----BEGIN PGP")


def test_a_repository_that_the_site_names_no_more_goes_with_its_key() -> None:
    gone = [row["path"] for row in given()["nvidia_driver_files"] if row.get("state") == "absent"]
    assert gone == [nvidia_driver.KEYRING, nvidia_driver.REPOSITORY]


def test_what_an_archive_offers_is_read_from_its_index_newest_first(tmp_path: Path) -> None:
    rows = [("a", "570.9-1"), ("a", "570.158.01-1"), ("b", "1:580.1-1")]
    text = "\n".join(f"Package: {name}\nVersion: {version}\nDescription: x\n" for name, version in rows)
    (tmp_path / "Packages").write_text(text)
    assert driver.offered(tmp_path) == {"a": ["570.158.01-1", "570.9-1"], "b": ["1:580.1-1"]}
    assert driver.offered(tmp_path / "none") == {}
