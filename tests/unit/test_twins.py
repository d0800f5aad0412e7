"""Twins: hardware from the catalog, stand-ins that answer like the real tools, faults that preflight names."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import subprocess
import sys
import urllib.request
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from bringup import ROOT, commandline, lab, plan, preflight, surroundings, twins
from bringup.errors import UsageError
from bringup.node import contents, drafting, facts
from bringup.planned import HostPlan, Plan, Service
from bringup.rolevars import engine_service
from tests.lab.twin import archive, coverage, offline
from tests.lab.twin.node import smi

INVENTORIES = ("h20", "gh200", "h100", "h200")
WITH_GPUS = ("h20", "gh200")
"""One with NVSwitches, one without; `tests.lab.twin.coverage` shows every fault on all inventories."""

SHOWN_ON = (*WITH_GPUS, "lab")
"""And one whose model is a GGUF."""


@cache
def planned(inventory: str) -> Plan:
    return twins.plan_for(plan.load(inventory))


def first(inventory: str) -> HostPlan:
    return planned(inventory).hosts[0]


def shown() -> list[tuple[str, str]]:
    """(inventory, fault) of each fault that a platform can have and that shows without a container."""
    return [
        (inventory, name)
        for name, fault in twins.faults().items()
        for inventory in SHOWN_ON
        if offline.applies(fault, first(inventory)) and fault.code and not is_beside(fault)
    ]


BESIDE = {
    "files",
    "manager_environment",
    "dpkg_unpacked",
    "shm_mib",
    "no_compiler",
    "no_libgcc",
    "no_cuda_link",
    "memory_policy_denied",
    "page_size_kib",
}


ALONE = {"mirror-unreachable", "toolkit-too-old", "model-of-older-format", "libgcc-missing"}
"""Beside the hardware too, and not with others: there is one index, the newest toolkit counts, one format a model, and
what links nothing is a compiler that is there."""


def is_beside(fault: twins.Fault) -> bool:
    """A fault beside the hardware: any number of them can be on a twin at once."""
    return bool(fault.state) and set(fault.state) <= BESIDE and fault.name not in ALONE


def beside(inventory: str) -> list[twins.Fault]:
    return [
        one for one in twins.faults().values() if is_beside(one) and offline.applies(one, first(inventory))
    ]


@pytest.fixture
def root() -> Iterator[Path]:
    with offline.folder() as folder, offline.rooted(folder):
        yield folder


# --- faults and preflight -----------------------------------------------------------------------------------


@pytest.mark.parametrize("inventory", INVENTORIES)
def test_a_healthy_twin_of_any_platform_gives_no_finding(inventory: str, root: Path) -> None:
    found = offline.verdicts(first(inventory), planned(inventory), [], root)
    assert [str(finding) for finding in found] == []


@pytest.mark.parametrize(("inventory", "name"), shown())
def test_preflight_names_the_fault(inventory: str, name: str, root: Path) -> None:
    fault = twins.faults()[name]
    said = offline.said(first(inventory), planned(inventory), [fault], root)
    assert len(said.get(str(fault.code), ())) == 1, (
        f"one check names it, without which it is not named: {said}"
    )


@pytest.mark.parametrize("inventory", WITH_GPUS)
def test_preflight_names_all_faults_beside_the_hardware_at_once(inventory: str, root: Path) -> None:
    chosen = beside(inventory)
    assert len(chosen) > 20
    found = offline.verdicts(first(inventory), planned(inventory), chosen, root)
    said = {finding.code for finding in found}
    assert {fault.name for fault in chosen if fault.code not in said} == set()
    assert said == {fault.code for fault in chosen}


def test_every_public_case_is_named_by_preflight_or_given_to_somebody_else() -> None:
    """That each fault gets its code is what the tests above show."""
    rows = coverage.cases([ROOT / "tests/cases/failures/cases-open.jsonl"])
    shown = {fault.name: True if fault.code else None for fault in twins.faults().values()}
    found = coverage.judged(rows, shown)
    assert found.missing == ()
    assert len(found.covered) + len(found.planned) == found.possible >= 138
    given, ours = coverage.elsewhere(), coverage.by_cause()
    assert set(given) & set(ours) == set()
    assert {row["by"] for row in given.values()} <= {"plan", "role", "design", "beyond"}
    assert set(given) <= {row["cause"] for row in rows} | {row["id"] for row in rows}
    assert [name for name, row in given.items() if row["by"] == "plan" and not coverage.is_planned(row)] == []


def test_every_fault_shows_on_a_platform_or_in_a_container() -> None:
    there = {name for _, name in shown()} | {one.name for each in WITH_GPUS for one in beside(each)}
    others = {name for name, fault in twins.faults().items() if fault.run or not fault.code}
    assert there | others == set(twins.faults())


def test_every_fault_names_causes_and_codes_that_exist() -> None:
    causes = {path.stem for path in (ROOT / "catalog" / "failures").glob("*.yml")}
    plan_only = {"gpu-memory-already-used", "orphan-gpu-workers", "process-stuck-in-driver"}
    source = "".join(Path(str(module.__file__)).read_text() for module in (preflight, surroundings))
    for fault in twins.faults().values():
        assert set(fault.causes) <= causes | plan_only, fault.name
        assert fault.code is None or f'"{fault.code}"' in source, fault.name


def test_a_reboot_can_bring_one_gpu_fewer() -> None:
    fault = twins.faults()["gpu-gone-after-reboot"]
    worn = twins.with_faults(twins.hardware(first("h20"), "twin-01"), [fault])
    assert all(gpu.get("on_bus", True) for gpu in worn["gpus"])
    from tests.lab.twin.node import wear

    wear.apply_next_boot(worn)
    assert [gpu.get("on_bus", True) for gpu in worn["gpus"]].count(False) == 1


def test_faults_are_chosen_by_name_and_host_and_unknown_ones_are_all_told() -> None:
    chosen = twins.chosen_faults(["gpu-lost", "nouveau@b"], ["a", "b"])
    assert {host: [fault.name for fault in found] for host, found in chosen.items()} == {
        "a": ["gpu-lost"],
        "b": ["nouveau"],
    }
    with pytest.raises(UsageError) as caught:
        twins.chosen_faults(["gpu-lots", "nouveau@c"], ["a", "b"])
    assert len(caught.value.problems) == 2
    assert "gpu-lost" in str(caught.value)


def test_faults_that_add_to_the_same_part_do_not_push_each_other_out() -> None:
    chosen = [twins.faults()[name] for name in ("nccl-tuned", "cache-of-root")]
    worn = twins.with_faults(twins.hardware(first("h20"), "twin-01"), chosen)
    assert [row["path"] for row in worn["files"]] == ["/etc/nccl.conf", "{cache}/triton/by-root.so"]


def test_what_a_fault_put_there_is_taken_away_with_its_empty_folders_and_no_more(tmp_path: Path) -> None:
    from tests.lab.twin.node import wear

    kept = tmp_path / "etc/kept"
    kept.parent.mkdir()
    kept.touch()
    below = tmp_path / "etc/systemd/service.d"
    below.mkdir(parents=True)
    wear._remove_empty(below)
    assert list((tmp_path / "etc").iterdir()) == [kept]
    wear._remove_empty(tmp_path / "never/there")


def test_faults_leave_the_healthy_hardware_as_it_was() -> None:
    healthy = twins.hardware(first("h20"), "twin-01")
    before = json.dumps(healthy)
    twins.with_faults(healthy, list(twins.faults().values()))
    assert json.dumps(healthy) == before


# --- the plan -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inventory", INVENTORIES)
def test_launch_lines_units_and_ports_of_twins_are_the_real_ones(inventory: str) -> None:
    real = plan.load(inventory)
    for host, twin in zip(real.hosts, planned(inventory).hosts, strict=True):
        assert [replace(one, is_stand_in=False) for one in twin.services] == list(host.services)
        assert all(one.is_stand_in for one in twin.services)
        assert [one.prefix for one in twin.environments] == [one.prefix for one in host.environments]
        assert [one.folder for one in twin.models] == [one.folder for one in host.models]


@pytest.mark.parametrize("inventory", INVENTORIES)
def test_a_plan_of_twins_can_be_provisioned(inventory: str) -> None:
    assert plan.unprovisionable(planned(inventory)) == []
    assert all(model.files for host in planned(inventory).hosts for model in host.models)


def test_the_lab_keeps_its_real_engine_and_model_as_twins() -> None:
    real, twin = plan.load("lab"), planned("lab")
    assert twin.hosts[0].environments == real.hosts[0].environments
    assert twin.hosts[0].models == real.hosts[0].models
    assert not twin.hosts[0].services[0].is_stand_in


@pytest.mark.parametrize("inventory", INVENTORIES)
def test_stand_in_models_pass_the_checks_of_real_ones(inventory: str, tmp_path: Path) -> None:
    real = plan.load(inventory).hosts[0]
    for model in real.models:
        files = twins.model_files(model, 4096)
        for path, content in files.items():
            (tmp_path / path).write_bytes(content)
        assert contents.check_model(tmp_path, files, model.expects) == []


def test_an_inventory_of_twins_names_the_same_hosts_and_hides_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(twins, "FOLDER", tmp_path)
    real = plan.load("h20")
    folder = twins.write_inventory("h20", real, twins.assigned("h20", [host.name for host in real.hosts]))
    found = plan.load(str(folder))
    assert [host.name for host in found.hosts] == [host.name for host in real.hosts]
    assert found.inventory == "h20-twins"
    assert [finding.code for finding in found.findings].count("TWIN") == len(real.hosts)
    text = (folder / "hosts.yml").read_text()
    assert "198.18.5." in text
    assert "192.0.2." not in text


def mark(folder: Path, inventory: str, hosts: dict[str, str]) -> None:
    rows = {host: {"twin": name, "arch": "amd64"} for host, name in hosts.items()}
    twins.write(
        folder / f"{inventory}-twins" / twins.MARK, json.dumps({"of": inventory, "hosts": rows}).encode()
    )


def test_two_inventories_have_twins_at_once_and_keep_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(twins, "FOLDER", tmp_path)

    def names(inventory: str, *hosts: str) -> dict[str, str]:
        found = {one.host: one.name for one in twins.assigned(inventory, hosts)}
        mark(tmp_path, inventory, found)
        return found

    assert names("one", "a", "b") == {"a": "twin-01", "b": "twin-02"}
    assert names("two", "a") == {"a": "twin-03"}
    assert names("one", "a", "b", "c") == {"a": "twin-01", "b": "twin-02", "c": "twin-04"}
    assert names("one", "c") == {"c": "twin-04"}
    assert names("two", "a", "b") == {"a": "twin-03", "b": "twin-01"}


def test_a_twin_runs_as_it_does_until_it_is_asked_to_run_as_its_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(twins, "FOLDER", tmp_path)
    assert [one.arch for one in twins.assigned("one", ["a", "b"])] == ["amd64", "amd64"]
    real = twins.assigned("one", ["a", "b"], {"a": "arm64"})
    assert [one.arch for one in real] == ["arm64", "amd64"]
    folder = tmp_path / "one-twins"
    rows = {one.host: {"twin": one.name, "arch": one.arch} for one in real}
    twins.write(folder / twins.MARK, json.dumps({"of": "one", "hosts": rows}).encode())
    assert twins.assigned("one", ["a", "b"]) == real


def test_twins_are_asked_for_on_any_command_line() -> None:
    words = ["provision", "--twins", "--inventory", "x", "--fault", "a", "--fault=b@h"]
    assert commandline.without_twins(words) == (["provision", "--inventory", "x"], "", ["a", "b@h"])
    assert commandline.without_twins(["check", "--twins=real-arch"]) == (["check"], "real-arch", [])
    assert commandline.without_twins(["check"]) == (["check"], None, [])
    for wrong in (["check", "--twins=arm64"], ["check", "--fault", "a"], ["check", "--twins", "--fault"]):
        with pytest.raises(UsageError):
            commandline.without_twins(wrong)


def test_when_the_addresses_are_used_up_it_is_said_by_whom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(twins, "FOLDER", tmp_path)
    most = lab.room("twin")
    mark(tmp_path, "big", {f"h{number}": f"twin-{number:02d}" for number in range(1, most)})
    assert [one.name for one in twins.assigned("other", ["a"])] == [f"twin-{most:02d}"]
    with pytest.raises(
        lab.LabError, match=rf"2 hosts want a twin, 1 of {most} addresses are free \(big has {most - 1}\)"
    ):
        twins.assigned("other", ["a", "b"])


def test_an_inventory_without_twins_cannot_give_any_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(twins, "FOLDER", tmp_path)
    with pytest.raises(UsageError, match="h20"):
        twins.down(inventory="h20")


# --- hardware -----------------------------------------------------------------------------------------------


def answer(root: Path, *words: str) -> str:
    return smi.answer(words)


def test_the_stand_in_answers_every_form_that_is_used(root: Path) -> None:
    offline.dressed(twins.hardware(first("h20"), "twin-01"), root)
    listed = answer(root, "-L").splitlines()
    assert len(listed) == 8
    assert listed[0].startswith("GPU 0: NVIDIA H20-3e (UUID: GPU-")
    table = answer(root, "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits")
    assert table.splitlines()[7].split(", ")[::2] == ["7", "143771"]
    head = answer(root, "--query-gpu=name,memory.total", "--format=csv").splitlines()[0]
    assert head == "name, memory.total [MiB]"
    parsed = facts.parse_smi(answer(root, "-q", "-x"))
    assert (parsed["driver"], parsed["attached"], len(parsed["gpus"])) == ("580.159.04", 8, 8)
    assert facts.parse_nvlink(answer(root, "nvlink", "-s"))[7] == {"gpu": 7, "links": 18, "inactive": 0}
    assert "stand-in" in answer(root, "--version")
    assert answer(root, "topo", "-m").splitlines()[1].split("\t")[:3] == ["GPU0", " X ", "NV18"]


def test_the_topology_of_twins_is_read_as_the_platform_has_it(root: Path) -> None:
    from bringup import placement

    offline.dressed(twins.hardware(first("gh200"), "twin-01"), root)
    tree = root / "sys/devices/system/node"
    found = placement.parse_topology(tree, answer(root, "topo", "-m"))
    assert [node.number for node in found.cpu_nodes] == [0, 1]
    assert found.memory_only == (2, 10)
    assert [found.node_of(0), found.node_of(1)] == [0, 1]


def test_settings_last_until_the_next_boot(root: Path) -> None:
    offline.dressed(twins.hardware(first("gh200"), "twin-01"), root)
    answer(root, "-pl", "600")
    answer(root, "-i", "1", "-lgc", "300,1500")
    asked = ("--query-gpu=power.limit,clocks.sm", "--format=csv,noheader")
    assert answer(root, *asked).splitlines() == ["600.00 W, 345 MHz", "600.00 W, 1500 MHz"]
    with pytest.raises(smi.Refused, match="not a valid power limit"):
        answer(root, "-pl", "9000")


def test_an_option_that_the_stand_in_does_not_know_is_refused(root: Path) -> None:
    offline.dressed(twins.hardware(first("gh200"), "twin-01"), root)
    with pytest.raises(smi.Refused, match="--frobnicate"):
        answer(root, "--frobnicate")
    with pytest.raises(smi.Refused, match="not a valid field"):
        answer(root, "--query-gpu=colour")


def test_a_record_of_a_node_becomes_hardware() -> None:
    outputs = {
        "nvidia-smi-q.xml": (ROOT / "tests/cases/node/nvidia-smi-q.xml").read_text(),
        "meminfo.txt": "MemTotal:       131981020 kB\n",
        "numa.txt": "/sys/devices/system/node/node0/cpulist:0-15\n"
        "/sys/devices/system/node/node0/meminfo:Node 0 MemTotal:       131981020 kB\n",
        "lspci.txt": "0000:05:00.0 Bridge [0680]: NVIDIA Corporation GH100 [10de:22a3] (rev a1)\n",
    }
    worn = twins.hardware_of_record(outputs)
    gpu = worn["gpus"][0]
    assert (gpu["name"], gpu["memory_mib"], gpu["pci_id"]) == ("NVIDIA H200", 143771, "10de:2335")
    assert gpu["address"] == "0000:00:06.0"
    assert worn["switches"] == ["0000:05:00.0"]
    assert worn["numa"] == [{"node": 0, "cpus": "0-15", "memory_gib": 125.87}]


def outputs_of(worn: dict[str, Any], root: Path) -> dict[str, str]:
    """What the commands of a record say on a twin under `root`."""
    run = offline.runner(worn, root)
    folder = root / "sys/bus/pci/devices"
    nodes = [
        path
        for name in ("cpulist", "distance", "meminfo")
        for path in root.glob(f"sys/devices/system/node/*/{name}")
    ]
    return {
        "nvidia-smi-q.xml": twins.blanked(run(["nvidia-smi", "-q", "-x"], 60)[1]),
        "nvlink-s.txt": run(["nvidia-smi", "nvlink", "-s"], 60)[1],
        "lspci.txt": "".join(
            f"{one} Bridge [0680]: NVIDIA [10de:22a3] (rev a1)\n" for one in worn["switches"]
        ),
        "pci-nodes.txt": "".join(f"{path}:{path.read_text()}" for path in folder.glob("*/numa_node")),
        "numa.txt": "".join(f"{path}:{line}\n" for path in nodes for line in path.read_text().splitlines()),
        "meminfo.txt": (root / "proc/meminfo").read_text(),
        "page-size.txt": run(["getconf", "PAGESIZE"], 60)[1],
    }


@pytest.mark.parametrize("inventory", WITH_GPUS)
def test_a_recorded_node_replayed_as_a_twin_gives_the_same_facts(inventory: str, tmp_path: Path) -> None:
    worn = twins.hardware(first(inventory), "twin-01")
    before = offline.gathered(worn, tmp_path / "one")
    with offline.rooted(tmp_path / "one"):
        recorded = twins.hardware_of_record(outputs_of(worn, tmp_path / "one"))
    after = offline.gathered({**worn, **recorded}, tmp_path / "two")
    for facts_of in (before, after):
        for gpu in facts_of["gpu"]["smi"]["gpus"]:
            gpu.pop("uuid")
    same = ("numa", "memory", "page_size", "huge_pages", "limits")
    assert {name: after[name] for name in same} == {name: before[name] for name in same}
    assert after["gpu"]["smi"] == before["gpu"]["smi"]
    assert after["gpu"]["nvlink"] == before["gpu"]["nvlink"]
    assert after["gpu"]["pci"] == before["gpu"]["pci"]


def test_a_record_holds_nothing_that_is_a_machines_or_its_peoples_own() -> None:
    text = (
        "GPU 0: X (UUID: GPU-3a5a445e-deaf-d7a2-a16a-bbe3a9fa46ea)\n<serial>1654321</serial>\n"
        "<cluster_uuid>89abcdef-0000-4444-8888-123456789abc</cluster_uuid>\n<product_name>X</product_name>\n"
        "<processes>\n<process_info><process_name>serve --api-key 4f9c1</process_name></process_info>\n"
        "</processes>\nNVRM: by https://me:geheim@host.example with hf_abcdefghijklmnopqrst\n"
    )
    kept = twins.blanked(text)
    gone = ("3a5a445e", "1654321", "89abcdef", "4f9c1", "serve", "geheim", "hf_abcdef")
    assert [word for word in gone if word in kept] == []
    assert "<product_name>X</product_name>" in kept
    assert "<processes/>" in kept


# --- packages -----------------------------------------------------------------------------------------------


def test_packages_are_the_same_bytes_every_time_and_say_what_they_are() -> None:
    one = archive.Package(
        "demo", "1.0", "a demo", files={"/usr/share/demo": "text"}, links={"/usr/bin/x": "y"}
    )
    made = archive.deb(one, "amd64")
    assert made == archive.deb(one, "amd64")
    assert made.startswith(b"!<arch>\ndebian-binary")


def test_the_archive_says_the_sum_of_its_index() -> None:
    text = archive.release(b"Package: demo\n")
    assert f" {hashlib.sha256(b'Package: demo' + bytes([10])).hexdigest()} 14 Packages\n" in text


def test_two_drivers_exclude_each_other_and_versions_go_together() -> None:
    made = {
        (package.name, package.version): package
        for version in ("570.195.03", "580.159.04")
        for package in archive.driver_packages(version, b"", b"", "x86_64-linux-gnu")
    }
    new = made["nvidia-dkms-580-open", "580.159.04-0twin1"]
    old = made["nvidia-dkms-570-open", "570.195.03-0twin1"]
    assert new.relations["Conflicts"] == old.relations["Provides"]
    driver = made["nvidia-driver-580-open", "580.159.04-0twin1"].relations["Depends"]
    assert "libnvidia-compute-580 (= 580.159.04-0twin1)" in driver


def test_a_twin_is_born_with_the_recommended_driver() -> None:
    born = twins.born_driver({"minimum": "550", "recommended": "580.105.08", "fabric_manager": True})
    assert born["version"] == "580.105.08"
    assert "nvidia-fabricmanager-580=580.105.08-0twin1" in born["packages"]
    assert not [name for name in twins.born_driver({"minimum": "580"})["packages"] if "fabric" in name]


# --- engines ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Unpacked wheels of a version of each engine."""
    made = {}
    for engine, version in (("sglang", "0.5.15.post1"), ("vllm", "0.33.0")):
        _, content = twins.wheel(engine, version)
        folder = tmp_path_factory.mktemp(engine)
        with zipfile.ZipFile(BytesIO(content)) as packed:
            packed.extractall(folder)
        made[engine] = folder
    return made


def launched(folder: Path, *argv: str, limit: float = 30) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *argv],
        env={"PYTHONPATH": str(folder), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )


def test_the_same_engine_gives_the_same_wheel() -> None:
    from tests.lab.twin.engine import package

    name, content = twins.wheel("sglang", "0.5.15.post1")
    package.wheel.cache_clear()
    assert (name, content) == twins.wheel("sglang", "0.5.15.post1")
    lock, text = twins.lock_of("sglang", "0.5.15.post1")
    assert hashlib.sha256(content).hexdigest() in text
    assert lock.startswith(".lab/")


def test_an_unknown_flag_is_refused_in_the_words_of_the_real_engine(engines: dict[str, Path]) -> None:
    done = launched(engines["sglang"], "sglang.launch_server", "--model-path", "/m", "--enable-turbo-mode")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "sglang serve: error: unrecognized arguments: --enable-turbo-mode"


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["--speculative-algorithm", "EAGLE", "--speculative-num-steps", "3"], 1, "NoneType"),
        (["--kv-cache-dtype", "fp8_e5m2"], 1, "AssertionError"),
        (["--enable-single-batch-overlap"], -9, "Received sigquit from a child process"),
        ([], 1, "config.json"),
    ],
)
def test_what_the_real_engine_refuses_after_parsing_is_refused_too(
    engines: dict[str, Path], argv: list[str], code: int, says: str
) -> None:
    done = launched(engines["sglang"], "sglang.launch_server", "--model-path", "/no/model", *argv)
    assert done.returncode == code, done.stdout + done.stderr
    assert says in done.stdout


@dataclass(frozen=True)
class Standing:
    """A stand-in that serves: the planned service, its address, what it wrote until it was ready, its process."""

    service: Service
    base: str
    lines: list[str]
    process: subprocess.Popen[str]


@contextlib.contextmanager
def standing(inventory: str, folder: Path, port: int) -> Iterator[Standing]:
    """The stand-in of an inventory's first service, started with its planned line; `folder` is its twin's root."""
    host = plan.load(inventory).hosts[0]
    service = host.services[0]
    model = next(model for model in host.models if model.name == service.model)
    _, content = twins.wheel(service.engine, service.engine_version)
    with zipfile.ZipFile(BytesIO(content)) as packed:
        packed.extractall(folder / "site")
    (folder / "model").mkdir()
    for path, data in twins.model_files(model, service.context_tokens).items():
        (folder / "model" / path).write_bytes(data)
    argv = [str(folder / "model") if word == model.entry else word for word in service.argv[1:]]
    argv[argv.index("--port") + 1] = str(port)
    process = subprocess.Popen(
        [sys.executable, *argv],
        env={"PYTHONPATH": str(folder / "site"), "PATH": "/usr/bin:/bin", "TWIN_ROOT": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield Standing(service, f"http://127.0.0.1:{port}", _until(process, "Uvicorn running"), process)
    finally:
        process.terminate()
        assert process.wait(20) == 0
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.parametrize("inventory", ["h20", "gh200", "h200"])
def test_a_planned_launch_line_serves_and_says_that_it_is_a_stand_in(
    inventory: str, tmp_path: Path, unused_port: int
) -> None:
    with standing(inventory, tmp_path, unused_port) as one:
        listed = json.loads(_get(f"{one.base}/v1/models"))["data"][0]
        assert listed["id"] == one.service.served_name
        assert listed["max_model_len"] >= (one.service.context_tokens or 0)
        body = json.dumps({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}).encode()
        reply = json.loads(_get(f"{one.base}/v1/chat/completions", body))
        assert reply["usage"]["completion_tokens"] == 5
        page = _get(f"{one.base}/metrics")
        assert "bringup_stand_in" in page
        assert [theirs for theirs in one.service.metrics_names.values() if theirs not in page] == []
        text = "\n".join(one.lines)
        assert [name for name, mark in one.service.log_markers.items() if not re.search(mark, text)] == []
        assert Path(f"/proc/{one.process.pid}/comm").read_text().startswith("standin-")


@pytest.mark.parametrize("inventory", ["h20", "gh200", "h200"])
@pytest.mark.parametrize(
    ("worn", "code", "length"), [({}, "", 3.0), ({"drafts_thrown_away": True}, "ACCEPT_LOW", 1.0)]
)
def test_the_gate_finds_a_server_that_throws_its_drafts_away(
    inventory: str, worn: dict[str, Any], code: str, length: float, tmp_path: Path, unused_port: int
) -> None:
    """Engines that count steps, one that counts accepted tokens, and one with a gauge only."""
    (tmp_path / "var/lib/twin").mkdir(parents=True)
    (tmp_path / "var/lib/twin/hardware.json").write_text(json.dumps(worn))
    with standing(inventory, tmp_path, unused_port) as one:
        wish = engine_service.drafting(replace(one.service, drafts="mtp"))
        known = {
            **engine_service.description(one.service, plan.load(inventory).hosts[0]),
            "address": "127.0.0.1",
            "port": unused_port,
            "drafting": wish,
        }
        found = drafting.check(known, None)
    assert (found["code"], found["accept_length"]) == (code, pytest.approx(length, abs=0.05))
    assert bool(found["text"]) == bool(code)


def _until(process: subprocess.Popen[str], mark: str) -> list[str]:
    lines: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if mark in line:
            return lines
    raise AssertionError("".join(lines))


def _get(url: str, body: bytes | None = None) -> str:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as reply:
        text: Any = reply.read().decode()
        return str(text)


@pytest.fixture
def unused_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
