"""Loads reach servers through tunnels that open or say why; a trial differs from its inventory in one
service.
"""

from __future__ import annotations

import http.server
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from bringup import bench, benching, catalog, envlock, inventory, measuring, runs, tune, tuning
from bringup import plan as plans
from bringup.entries import build
from bringup.errors import HostUnreachable, UsageError
from bringup.fleet import Host

HERE = Host("here", "127.0.0.1", local=True)
SERVICES = [
    {"name": "a", "profile": "p", "port": 8000, "flags": {"--x": 1, "--y": 2}},
    {"name": "b", "profile": "p", "port": 8001},
]


@pytest.fixture
def server() -> Iterator[int]:
    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield int(made.server_address[1])
    made.shutdown()
    thread.join()
    made.server_close()


def test_a_server_on_this_machine_needs_no_tunnel(server: int) -> None:
    with (
        measuring.tunnel(HERE, "127.0.0.1", server) as port,
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=120) as answer,
    ):
        assert answer.status == 200


def test_a_tunnel_that_does_not_open_says_why() -> None:
    gone = Host("gone", "127.0.0.1", port=1, user="nobody")
    with (
        pytest.raises(HostUnreachable, match=r"gone: the tunnel did not open: .*refused"),
        measuring.tunnel(gone, "127.0.0.1", 8000),
    ):
        pytest.fail("it opened")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "site"
    (folder / "group_vars").mkdir(parents=True)
    (folder / "hosts.yml").write_text("all: {hosts: {n1: {ansible_host: 10.0.0.1}, n2: {}}}")
    (folder / "group_vars" / "all.yml").write_text(
        yaml.safe_dump({"node_platform": "cpu", "node_services": SERVICES})
    )
    return folder


def services(folder: Path, host: str) -> list[dict[str, object]]:
    found = next(one for one in inventory.read(str(folder)).hosts if one.name == host)
    return [dict(one) for one in found.variables["node_services"]]


def test_a_trial_changes_one_service_of_one_host_and_nothing_else(site: Path, tmp_path: Path) -> None:
    setting = tune.Setting({"--y": 3, "--z": "w"}, {"NAME": "100% $HOME"})
    trial = tuning.write_trial(site, tmp_path / "trial" / "site", "n1", "a", setting)
    first, second = services(trial, "n1")
    assert first["flags"] == {"--x": 1, "--y": 3, "--z": "w"}
    assert first["environment"] == {"NAME": "100% $HOME"}
    assert second == SERVICES[1]
    assert services(trial, "n2") == SERVICES
    assert services(site, "n1") == SERVICES


def test_a_trial_keeps_what_the_host_has_of_its_own(site: Path, tmp_path: Path) -> None:
    (site / "host_vars").mkdir()
    (site / "host_vars" / "n1.yml").write_text("node_user: somebody\n")
    trial = tuning.write_trial(site, tmp_path / "trial" / "site", "n1", "b", tune.Setting({"--z": 1}))
    found = next(one for one in inventory.read(str(trial)).hosts if one.name == "n1")
    assert found.variables["node_user"] == "somebody"
    assert services(trial, "n1")[1]["flags"] == {"--z": 1}


def test_a_trial_is_written_anew_each_time(site: Path, tmp_path: Path) -> None:
    into = tmp_path / "trial" / "site"
    tuning.write_trial(site, into, "n1", "a", tune.Setting({"--q": 1}))
    tuning.write_trial(site, into, "n1", "a", tune.Setting({"--r": 1}))
    assert services(into, "n1")[0]["flags"] == {"--x": 1, "--y": 2, "--r": 1}


def test_every_setting_that_a_climb_can_reach_is_known_by_its_name() -> None:
    axes = [[tune.Setting({"--a": 1}), tune.Setting({"--a": 2})], [tune.Setting({"--b": 1})]]
    names = {setting.name for setting in tuning._all(axes)}
    assert names == {"as it is", "--a=1", "--a=2", "--a=1 --b=1", "--a=2 --b=1", "--b=1"}


def test_a_setting_that_the_profile_has_anyway_is_no_change() -> None:
    profile = catalog.lazy().profile("cpu-words-llama-server")
    as_it_is, other = ({"--parallel": value} for value in (profile.flags["--parallel"], 99))
    assert not tuning.changes(tune.Setting(as_it_is), profile)
    assert not tuning.changes(tune.Setting(), profile)
    assert tuning.changes(tune.Setting(other), profile)
    assert tuning.changes(tune.Setting(as_it_is, {"A": "1"}), profile)


@pytest.mark.parametrize(
    ("limit", "service", "says"),
    [
        (None, "no-such", "words"),
        ("all", None, "picks 2 hosts"),
        ("nowhere", None, "unknown host or group"),
    ],
)
def test_what_cannot_be_tuned_is_refused_before_any_node_is_asked(
    limit: str | None, service: str | None, says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        tuning.run("lab", limit, service=service, yes=True)


def test_a_candidate_profile_is_the_change_and_its_evidence() -> None:
    setting = tune.Setting({"--parallel": 8})
    summary = bench.Summary(median=100.0, runs=6, p10=90.0, minimum=80.0, cv=0.1)
    load = {"prompt_tokens": 32, "output_tokens": 32, "concurrent": 8}
    data = tune.as_profile(
        "cpu-words-llama-server",
        "faster",
        setting,
        tune.Candidate(setting.name, {"8x 32->32": summary}),
        {"8x 32->32": load},
        "a run",
    )
    text = yaml.safe_load(tuning.as_yaml(data))
    base = catalog.lazy()._data("profiles", "cpu-words-llama-server")
    profile = build(catalog.Profile, catalog.merged(base, text), "candidate")
    assert profile.flags["--parallel"] == 8
    assert profile.flags["--ctx-size"] == 65536
    assert profile.expectations[0].value == 100.0
    assert profile.expectations[0].source == "a run"


# --- compared with what -------------------------------------------------------------------------------------


def result(names: tuple[str, ...]) -> benching.BenchResult:
    load = bench.Load(32, 32)
    run = bench.Run(1.0, (bench.Request(0.0, 0.1, 1.0, 32, 32),))
    measured = benching.measured_of(bench.Series(load, (run,) * 4))
    made = tuple(benching.TargetResult(name, "http://x", "m", "e", "1", (measured,)) for name in names)
    return benching.BenchResult("smoke", "2026-11-30T00:00:00+00:00", 1.0, made)


def test_one_server_is_compared_with_one_whatever_they_are_called() -> None:
    before = {"old": result(("old",)).targets[0].summaries}
    first, second = measuring._paired(before, result(("new",)))
    assert list(first) == list(second) == ["32->32"]
    assert benching.against(first, second).verdict == "same"


def test_several_servers_are_compared_by_name_and_what_is_gone_is_said() -> None:
    before = {target.name: target.summaries for target in result(("a", "gone")).targets}
    found = benching.against(*measuring._paired(before, result(("a", "b"))))
    assert list(found.comparisons) == ["a: 32->32"]
    assert found.missing == ("gone: 32->32",)


def test_files_of_a_result_lie_in_the_runs_folder_and_can_be_compared_with(tmp_path: Path) -> None:
    whole = result(("a",))
    measuring.write(tmp_path, whole, benching.against({}, {}))
    assert {path.name for path in tmp_path.iterdir()} == {
        "bench.json",
        "bench.csv",
        "report.html",
        "against.json",
    }
    found = measuring._before(str(tmp_path / "bench.json"), (), "lab")
    assert found == {"a": whole.targets[0].summaries}


def test_the_last_run_is_that_of_the_command_and_not_a_play_that_it_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "FOLDER", tmp_path)
    with pytest.raises(UsageError, match="there is no run of tune on lab"):
        measuring.earlier("last", "tune", "lab")
    tuned = runs.begin("tune", "lab", {})
    step = runs.begin("tune-step", "lab", {})
    runs.begin("tune", "another", {})
    assert measuring.earlier("last", "tune", "lab").id == tuned.id
    assert measuring.earlier(step.id, "tune", "lab").id == step.id


def test_a_profile_without_a_measurement_is_nothing_to_compare_with() -> None:
    plan = plans.resolve(inventory.read("lab"), catalog.lazy())
    chosen = [(HERE, plan.hosts[0], plan.hosts[0].services[0])]
    with pytest.raises(UsageError, match="cpu-words-llama-server has no measurement of its own"):
        measuring._before("profile", chosen, "lab")
    recorded = measuring._before("gh200-2x-glm-5.2-fp8-vllm", chosen, "lab")
    assert all(loads for loads in recorded.values())


def test_a_lock_is_refused_for_what_is_not_known() -> None:
    with pytest.raises(UsageError, match="is not one of x86_64, aarch64"):
        envlock.lock("vllm-0.33.0", "riscv64")
    with pytest.raises(UsageError, match="unknown engine"):
        envlock.lock("vllm-0.0", "x86_64")


def test_every_engine_of_the_catalog_has_a_lock_with_hashes_and_without_an_index() -> None:
    locks = sorted((catalog.FOLDER / "engines" / "locks").glob("*.txt"))
    assert locks
    for path in locks:
        lines = path.read_text().splitlines()
        assert not any(
            line.lstrip().startswith(("-i", "--index", "--extra-index", "--find")) for line in lines
        ), path
        assert all("--hash=sha256:" in line or "==" in line for line in lines if line.strip()), path
