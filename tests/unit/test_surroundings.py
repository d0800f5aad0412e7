"""What surrounds a server is read from files and tools as they are: limits, drop-ins, containers, mirrors, models."""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bringup import plan, preflight
from bringup.node import contents, surroundings
from bringup.rolevars import preflight as variables

UNIT = "bringup-big.service"


def put(root: Path, path: str, text: str) -> Path:
    file = root / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def test_limits_of_the_first_process_and_the_machine_are_read(tmp_path: Path) -> None:
    put(
        tmp_path,
        "/proc/1/limits",
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        "Max open files            1024                 524288               files     \n"
        "Max locked memory         8388608              unlimited            bytes     \n",
    )
    put(tmp_path, "/proc/1/status", "CapBnd:\t00000000a80425fb\n")
    put(tmp_path, "/proc/sys/fs/file-nr", "2048\t0\t9223372036854775807\n")
    put(tmp_path, "/proc/sys/kernel/threads-max", "95000\n")
    put(tmp_path, "/sys/fs/cgroup/system.slice/pids.max", "4915\n")
    found = surroundings.limits(tmp_path)
    assert (found["open_files"], found["locked_memory"], found["raised"]) == (524288, -1, False)
    assert (found["files_open"], found["tasks_most"]) == (2048, 4915)
    assert found["open_files_most"] is None


def test_the_last_drop_in_counts_and_only_those_of_the_unit(tmp_path: Path) -> None:
    put(tmp_path, "/etc/systemd/system/service.d/10-all.conf", "[Service]\nTasksMax=512\nNice=5\n")
    put(tmp_path, "/usr/lib/systemd/system/bringup-.service.d/20-ours.conf", "[Service]\nTasksMax = 4096\n")
    put(tmp_path, "/etc/systemd/system/nginx.service.d/30.conf", "[Service]\nLimitNOFILE=64\n")
    put(tmp_path, "/usr/lib/systemd/system/bringup-big.service.d/30.conf", "[Service]\nRestart=no\n")
    put(tmp_path, "/etc/systemd/system/bringup-big.service.d/30.conf", "[Service]\n# taken out\n")
    rows = surroundings.overrides([UNIT], tmp_path)
    assert [(row["key"], row["value"]) for row in rows] == [("TasksMax", "4096")]
    assert rows[0]["file"] == "/usr/lib/systemd/system/bringup-.service.d/20-ours.conf"


def test_shared_memory_that_somebody_maps_is_not_stale(tmp_path: Path) -> None:
    for name in ("nccl-dead", "nccl-alive", "pulse-shm-1"):
        put(tmp_path, f"/dev/shm/{name}", "x")
    put(tmp_path, "/proc/77/maps", "7f00-7f01 rw-s 00000000 00:18 5    /dev/shm/nccl-alive\n")
    found = surroundings.shared_memory(tmp_path)
    assert found is not None
    assert (found["stale"], found["stale_count"]) == (["nccl-dead"], 1)


def test_huge_pages_are_read_in_bytes(tmp_path: Path) -> None:
    put(tmp_path, "/sys/kernel/mm/hugepages/hugepages-524288kB/nr_hugepages", "4\n")
    put(tmp_path, "/sys/kernel/mm/hugepages/hugepages-524288kB/free_hugepages", "3\n")
    put(tmp_path, "/proc/cmdline", "root=/dev/x hugepagesz=1G hugepages=8\n")
    found = surroundings.huge_pages(tmp_path)
    assert found == {"sizes": [{"size": 512 * 1024**2, "pages": 4, "free": 3}], "asked": [1024**3]}


def test_values_of_choices_and_patterns_are_read(tmp_path: Path) -> None:
    put(tmp_path, "/sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
    for number, value in enumerate(("performance", "powersave")):
        put(tmp_path, f"/sys/devices/system/cpu/cpu{number}/cpufreq/scaling_governor", f"{value}\n")
    asked = [
        "/sys/kernel/mm/transparent_hugepage/enabled",
        "/sys/devices/system/cpu/cpu*/cpufreq/scaling_governor",
        "/proc/sys/not/there",
    ]
    assert sorted(surroundings.values(asked, tmp_path).values()) == ["madvise", "performance", "powersave"]


@pytest.fixture
def listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        yield port


def test_an_address_answers_or_says_why_not(listening: int, tmp_path: Path) -> None:
    put(tmp_path, "/srv/there", "")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        silent = free.getsockname()[1]
        rows = surroundings.addresses(
            [
                {"host": "127.0.0.1", "port": listening, "purpose": "a"},
                {"host": "127.0.0.1", "port": silent, "purpose": "b"},
                {"host": "no-such-name.invalid", "port": 443, "purpose": "c"},
                {"host": "no-such-name.invalid", "port": 443, "purpose": "d", "unless": "/srv/there"},
            ],
            tmp_path,
        )
    assert [row["purpose"] for row in rows] == ["a", "b", "c"]
    assert rows[0]["error"] == ""
    assert rows[1]["error"].startswith("no connection")
    assert rows[2]["error"].startswith("name not found")


def test_the_nodes_own_index_and_proxy_are_asked_for(tmp_path: Path) -> None:
    row = {"host": "", "port": 443, "purpose": "p", "kind": "pip"}
    asked: list[tuple[str, int]] = []

    def connect(host: str, port: int) -> str:
        asked.append((host, port))
        return ""

    assert surroundings.addresses([row], tmp_path, connect) == []
    put(tmp_path, "/etc/pip.conf", "[global]\nindex-url = http://mirror.example:8080/simple\n")
    surroundings.addresses([row], tmp_path, connect)
    put(tmp_path, "/etc/environment", 'https_proxy="http://user:secret@proxy.example:3128"\n')
    surroundings.addresses([row], tmp_path, connect)
    put(
        tmp_path,
        "/etc/environment",
        "https_proxy=http://proxy.example:3128\nno_proxy=localhost,mirror.example\n",
    )
    surroundings.addresses([row], tmp_path, connect)
    put(tmp_path, "/etc/pip.conf", "[global]\nno-index = true\n")
    surroundings.addresses([row], tmp_path, connect)
    assert asked == [("mirror.example", 8080), ("proxy.example", 3128), ("mirror.example", 8080)]


def test_containers_with_gpus_are_told_from_others() -> None:
    rows = [
        {
            "Name": "/a",
            "Config": {"Image": "i"},
            "HostConfig": {"DeviceRequests": [{"Capabilities": [["gpu"]]}]},
        },
        {"Name": "/b", "Config": {"Image": "i"}, "HostConfig": {"Devices": [{"PathOnHost": "/dev/nvidia0"}]}},
        {"Name": "/c", "Config": {"Image": "i"}, "HostConfig": {"Runtime": "nvidia"}},
        {"Name": "/d", "Config": {"Image": "i"}, "HostConfig": {"DeviceRequests": None, "Devices": []}},
        {
            "Name": "/e",
            "Config": {"Image": "i"},
            "HostConfig": {"DeviceRequests": [{"DeviceIDs": ["nvidia.com/gpu=all"]}]},
        },
    ]
    found = surroundings.parse_containers(json.dumps(rows))
    assert [row["name"] for row in found] == ["a", "b", "c", "e"]
    assert surroundings.parse_containers("Error: no such thing") == []


def test_what_every_unit_inherits_is_read_without_passwords(tmp_path: Path) -> None:
    def runner(argv: Sequence[str], limit_s: int) -> tuple[int, str]:
        return 0, "LANG=C\nLD_PRELOAD=/x.so\nhttp_proxy=http://me:secret@proxy.example:1\nNCCL_DEBUG=INFO\n"

    put(tmp_path, "/etc/nccl.conf", "# ours\nNCCL_BUFFSIZE = 1\n")
    found = surroundings.environment(runner, tmp_path)
    assert found["manager"] == {
        "LD_PRELOAD": "/x.so",
        "http_proxy": "http://proxy.example:1",
        "NCCL_DEBUG": "INFO",
    }
    assert (found["nccl"], found["char_links"]) == ({"NCCL_BUFFSIZE": "1"}, False)


def test_a_cache_is_its_users_or_somebody_elses(tmp_path: Path) -> None:
    import pwd

    me = pwd.getpwuid(os.getuid()).pw_name
    put(tmp_path, "/var/cache/big/triton/x.so", "")
    assert surroundings.cache("/var/cache/big", me, tmp_path)["foreign"] is None
    assert (
        surroundings.cache("/var/cache/big", "nobody-has-this", tmp_path)["foreign"]
        == "/var/cache/big/triton"
    )
    assert surroundings.cache("/var/cache/none", me, tmp_path)["foreign"] is None


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.safetensors", b"version https://git-lfs.github.com/spec/v1\n", "pointer of git-lfs"),
        ("a.gguf", b"lmgg" + b"\0" * 60, "is no GGUF"),
        ("a.safetensors", struct.pack("<Q", 1 << 50) + b"x" * 56, "no safetensors"),
        ("a.safetensors", struct.pack("<Q", 2) + b"{}", "has 10 bytes of 64"),
        ("config.json", b"{}" * 32, ""),
    ],
)
def test_a_models_file_is_judged_by_size_and_first_bytes(
    tmp_path: Path, name: str, content: bytes, says: str
) -> None:
    (tmp_path / name).write_bytes(content)
    found = surroundings.wrong_file(tmp_path / name, 64)
    assert len(found) == bool(says)
    assert says in "".join(found)


def test_a_missing_file_counts_only_in_a_model_that_is_said_to_be_whole(tmp_path: Path) -> None:
    row = {
        "name": "m",
        "folder": "/m",
        "stamp": "/m/.bringup/ready.json",
        "files": [{"path": "a", "size": 1}],
    }
    assert surroundings.model(row, tmp_path) is None
    (tmp_path / "m").mkdir()
    found = surroundings.model(row, tmp_path)
    assert found is not None
    assert found["problems"] == []
    put(tmp_path, "/m/.bringup/ready.json", "{}")
    found = surroundings.model(row, tmp_path)
    assert found is not None
    assert found["problems"] == ["a is missing"]


def test_packages_half_there_are_found(tmp_path: Path) -> None:
    put(
        tmp_path,
        "/var/lib/dpkg/status",
        "Package: good\nStatus: install ok installed\n\nPackage: gone\nStatus: deinstall ok config-files\n\n"
        "Package: half\nStatus: install ok unpacked\n\nPackage: held\nStatus: hold ok half-configured\n",
    )
    assert surroundings.packages_broken(tmp_path) == ["half", "held"]


# --- what a later role mends --------------------------------------------------------------------------------


def test_what_a_role_of_the_run_mends_refuses_nobody_and_is_judged_again() -> None:
    from tests.unit.test_preflight import CASES, load

    _, node, wanted = load(CASES / "driver-missing.yml")
    expected = preflight.Expected.of({**wanted, "mends": {"DRIVER_MISSING": "nvidia_driver"}})
    alone = preflight.verdicts(node, expected)
    assert [(one.code, one.severity) for one in alone] == [("DRIVER_MISSING", "error")]
    assert alone[0].mended_by == "nvidia_driver"
    within = preflight.verdicts(node, expected, ["nvidia_driver"])
    assert [(one.code, one.severity) for one in within] == [("DRIVER_MISSING", "note")]
    assert "role nvidia_driver of this run" in within[0].what
    assert preflight.refusal("node", within) == ""
    assert preflight.deferred(node, expected, ["nvidia_driver"]) == ["DRIVER_MISSING"]
    assert preflight.deferred(node, expected, ["cuda_runtime"]) == []


def test_a_site_that_keeps_its_driver_to_itself_gets_no_promise() -> None:
    from dataclasses import replace

    whole = plan.load("h20")
    host = whole.hosts[0]
    mends = variables.variables(host, whole)["preflight_expected"]["mends"]
    assert mends["DRIVER_MISSING"] == "nvidia_driver"
    kept = replace(host, site={**host.site, "driver": {**host.site["driver"], "manage": False}})
    assert "DRIVER_MISSING" not in variables.variables(kept, whole)["preflight_expected"]["mends"]


def test_a_plan_asks_for_hubs_and_index_only_where_nothing_nearer_is_named() -> None:
    whole = plan.load("h20")
    rows = variables.variables(whole.hosts[0], whole)["preflight_expected"]["addresses"]
    assert {row["host"] for row in rows} == {"huggingface.co", "modelscope.cn", ""}
    assert all(row["unless"].startswith("/") for row in rows)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((0, ""), ""),
        ((127, "not found"), None),
        ((1, "libnuma: Warning: node argument 1 out of range"), None),
        (
            (1, "set_mempolicy: Operation not permitted\nsetting membind: x"),
            "set_mempolicy: Operation not permitted",
        ),
    ],
)
def test_only_a_refusal_by_the_kernel_is_one_of_rights(answer: tuple[int, str], said: str | None) -> None:
    assert surroundings.memory_policy("0-1", lambda argv, limit_s: answer) == said


def test_a_model_without_the_planned_drafts_is_told_by_its_index(tmp_path: Path) -> None:
    put(tmp_path, "/m/config.json", '{"architectures": ["A"]}')
    row = {"name": "m", "folder": "/m", "files": [], "expects": {"architecture": "A", "tensors": {"mtp.": 2}}}
    found = surroundings.model(row, tmp_path)
    assert found is not None
    assert found["problems"] == [], "an index that is not there yet says nothing"
    put(tmp_path, "/m/model.safetensors.index.json", '{"weight_map": {"mtp.a": "x", "other": "x"}}')
    found = surroundings.model(row, tmp_path)
    assert found is not None
    assert found["problems"] == ["1 tensors start with mtp., the plan needs 2"]


INDEX = "/m/model.safetensors.index.json"
READY = "/m/.bringup/ready.json"
GRAFT: dict[str, Any] = {
    "name": "m",
    "folder": "/m",
    "stamp": READY,
    "files": [],
    "expects": {"architecture": "A", "tensors": {"model.layers.2.": 2}},
    "mtp": {"prefix": "model.layers.2.", "services": ["big"]},
}
"""A model that is put together on the node: the plan knows none of its files, its stamp does."""


def grafted(root: Path, names: dict[str, str], total: int = 0, size: int = 100) -> dict[str, Any]:
    """What is found of a model whose index has these names; its file x has 100 bytes, by its stamp `size`."""
    put(root, "/m/config.json", '{"architectures": ["A"]}')
    put(root, INDEX, json.dumps({"metadata": {"total_size": total}, "weight_map": names}))
    put(root, "/m/x", "x" * 100)
    put(root, READY, json.dumps({"files": [{"path": "x", "size": size}]}))
    found = surroundings.model(GRAFT, root)
    assert found is not None
    return found


def test_a_grafted_model_whose_index_lost_the_draft_layer_is_found(tmp_path: Path) -> None:
    layer = {"model.layers.2.a": "x", "model.layers.2.b": "x"}
    found = grafted(tmp_path, {"model.layers.1.a": "x", **layer})
    assert (found["problems"], found["mtp"]["found"]) == ([], 2)
    found = grafted(tmp_path, {"model.layers.1.a": "x", "model.layers.20.a": "x"})
    assert (found["problems"], found["mtp"]["found"]) == ([], 0), "layer 20 is not layer 2"
    found = grafted(tmp_path, {"model.layers.2.a": "x"})
    assert found["problems"] == ["1 tensors start with model.layers.2., the plan needs 2"]


def test_files_that_an_index_or_a_stamp_names_are_there_and_as_large_as_it_says(tmp_path: Path) -> None:
    layer = {"model.layers.2.a": "x", "model.layers.2.b": "x"}
    assert grafted(tmp_path, layer, total=96)["problems"] == []
    (said,) = grafted(tmp_path, layer, total=101)["problems"]
    assert said == "model.safetensors.index.json names tensors of 101 bytes, and its files have 100"
    (said,) = grafted(tmp_path, layer, size=120)["problems"]
    assert said == "x has 100 bytes of 120"
    (said,) = grafted(tmp_path, {**layer, "model.layers.1.a": "gone"})["problems"]
    assert said == "model.safetensors.index.json names files that are not there: gone"
    (tmp_path / READY[1:]).unlink()
    found = surroundings.model(GRAFT, tmp_path)
    assert found is not None
    assert found["problems"] == [], "a model that is still being fetched is not damaged"


@pytest.mark.parametrize("text", ["[]", '{"weight_map": 5}', "{", '{"weight_map": {"a": "x"}}' + " " * 50])
def test_an_index_that_is_none_or_far_too_large_is_said_and_ends_nothing(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "INDEX_LIMIT_BYTES", 40)
    put(tmp_path, INDEX, text)
    found = surroundings.model(GRAFT, tmp_path)
    assert found is not None
    assert "is no index" in found["problems"][0]


def test_an_index_as_large_as_the_largest_is_read_in_two_seconds(tmp_path: Path) -> None:
    names = {
        f"model.layers.{n // 1500}.mlp.experts.{n}.down_proj.weight_scale_inv": "x" for n in range(120_000)
    }
    before = time.monotonic()
    found = grafted(tmp_path, names)
    assert time.monotonic() - before < 2.0
    assert found["mtp"]["found"] == 1500


def test_a_plan_asks_for_the_draft_layer_only_where_a_service_drafts_with_it() -> None:
    whole = plan.load("hopper")
    host = whole.hosts[0]
    asked = {
        row["name"]: row["mtp"] for row in variables.variables(host, whole)["preflight_expected"]["models"]
    }
    drafting = host.services[0].drafts == "mtp"
    assert bool(asked[host.services[0].model]) == drafting
    service = replace(host.services[0], drafts="mtp" if not drafting else "")
    changed = replace(host, services=(service,))
    asked = {
        row["name"]: row["mtp"] for row in variables.variables(changed, whole)["preflight_expected"]["models"]
    }
    assert bool(asked[service.model]) != drafting


def test_a_name_that_no_name_service_could_know_is_not_found(tmp_path: Path) -> None:
    """Python refuses to ask for it, with an error of another kind."""
    row = {"host": "two..dots", "port": 443, "purpose": "p"}
    assert surroundings.addresses([row], tmp_path)[0]["error"].startswith("name not found")


def test_toolkits_say_their_version_in_a_file_or_by_their_folder(tmp_path: Path) -> None:
    for home in ("cuda-12.4", "opt"):
        put(tmp_path, f"/usr/local/{home}/bin/nvcc", "")
    put(tmp_path, "/usr/local/cuda-11.8/lib64/libcudart.so", "a runtime alone is no toolkit")
    (tmp_path / "usr/local/cuda").symlink_to("opt")
    put(tmp_path, "/usr/local/opt/version.json", '{"cuda": {"name": "CUDA SDK", "version": "13.0.1"}}')
    assert surroundings.toolkits(tmp_path) == ["12.4", "13.0"]


def test_only_patterns_that_take_in_a_servers_log_cut_it(tmp_path: Path) -> None:
    logs = ["/var/log/bringup/glm/engine.log"]
    put(tmp_path, "/etc/logrotate.d/system", "/var/log/*.log /var/log/nginx/*.log {\n  weekly\n}\n")
    put(tmp_path, "/etc/logrotate.d/off", "# /var/log/bringup/glm/engine.log {\n#}\n")
    assert surroundings.log_cutters(logs, tmp_path) == []
    put(tmp_path, "/etc/logrotate.d/all", '/var/log/x.log\n"/var/log/bringup/*/*.log" {\n  copytruncate\n}\n')
    found = surroundings.log_cutters(logs, tmp_path)
    assert found == [{"file": "/etc/logrotate.d/all", "pattern": "/var/log/bringup/*/*.log"}]


@pytest.mark.parametrize(
    ("site", "general", "seconds"),
    [
        ("proxy_pass http://127.0.0.1:8000;", "", 60),
        ("proxy_pass http://127.0.0.1:8000; # proxy_read_timeout 1h;", "proxy_read_timeout 5m;", 300),
        (
            "server localhost:8000; proxy_read_timeout 75; proxy_read_timeout 1h;",
            "proxy_read_timeout 5m;",
            3600,
        ),
        ("proxy_pass http://127.0.0.1:80001;", "", None),
        ("proxy_pass http://192.0.2.1:8000;", "", None),
    ],
)
def test_what_stands_in_front_of_a_server_is_found_with_its_patience(
    site: str, general: str, seconds: int | None, tmp_path: Path
) -> None:
    put(tmp_path, "/etc/nginx/sites-enabled/models", site)
    put(tmp_path, "/etc/nginx/nginx.conf", general)
    found = surroundings.fronts([8000], tmp_path)
    file = "/etc/nginx/sites-enabled/models"
    assert found == ([{"file": file, "port": 8000, "seconds": seconds}] if seconds else [])
