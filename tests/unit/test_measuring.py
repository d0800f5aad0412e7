"""Loads reach servers through tunnels that open or say why; a trial differs from its inventory in one
service.
"""

from __future__ import annotations

import http.server
import os
import signal
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from bringup import bench, benching, catalog, envlock, inventory, measuring, runs, suites, tune, tuning
from bringup import plan as plans
from bringup.entries import build
from bringup.errors import Exit, HostUnreachable, UsageError
from bringup.events import Outcome
from bringup.fleet import Host
from tests.unit import openai_server as servers

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
    found = measuring._before(str(tmp_path / "bench.json"), ())
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


@pytest.fixture
def kept_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "runs"
    monkeypatch.setattr(runs, "FOLDER", folder)
    return folder


def benched(inventory: str, *servers: str, code: Exit = Exit.DONE) -> runs.RunRecord:
    """A bench that ended so, with a measurement of these servers, or with none."""
    record = runs.begin("bench", inventory, {})
    if servers:
        measuring.write(record.folder, result(servers))
    return runs.finish(record, code, Outcome())


def last(*servers: str, loads: str = "32->32") -> str:
    prompt, output = loads.split("->")
    step = suites.Step(prompt_tokens=int(prompt), output_tokens=int(output))
    return measuring.last_measured("lab", servers, suites.Suite(title="a suite", steps=(step,))).id


def test_the_last_measurement_is_of_these_servers_under_these_loads(kept_runs: Path) -> None:
    with pytest.raises(UsageError, match="no bench on lab has measured n1 words under a load of this suite"):
        last("n1 words")
    both = benched("lab", "n1 words", "n2 words")
    first = benched("lab", "n1 words", code=Exit.GATE)
    benched("another", "n1 words", "n2 words")
    # Each of these has the newest record and nothing to compare with.
    benched("lab", code=Exit.UNREACHABLE)
    benched("lab", code=Exit.INTERRUPTED)
    unreadable = benched("lab", "n1 words", "n2 words")
    (unreadable.folder / "bench.json").write_text('{"schema_version": 1, "targets": [')
    runs.begin("bench", "lab", {})
    assert last("n1 words") == first.id
    assert last("n2 words") == last("n1 words", "n2 words") == both.id
    for name, loads in (("n3 words", "32->32"), ("n1 words", "64->32")):
        with pytest.raises(UsageError, match="--against last: no bench on lab has measured"):
            last(name, loads=loads)


# --- broken off ---------------------------------------------------------------------------------------------


@pytest.fixture
def local_site(tmp_path: Path) -> Callable[[str], str]:
    """Makes an inventory whose only host is this machine, with a server at each of these addresses."""

    def make(*addresses: str) -> str:
        folder = tmp_path / "here"
        (folder / "group_vars").mkdir(parents=True)
        (folder / "hosts.yml").write_text("all: {hosts: {here: {ansible_connection: local}}}")
        ports = [int(address.rpartition(":")[2]) for address in addresses]
        wanted = [
            {"name": f"words{port}", "profile": "cpu-words-llama-server", "port": port} for port in ports
        ]
        variables = {"node_platform": "cpu", "node_services": wanted}
        (folder / "group_vars" / "all.yml").write_text(yaml.safe_dump(variables))
        return str(folder)

    return make


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_bench_leaves_its_loads_and_can_be_compared_with(
    number: signal.Signals, kept_runs: Path, local_site: Callable[..., str]
) -> None:
    with servers.serving(servers.Behaviour(delay_s=0.002)) as address:
        place = local_site(address)
        said: list[str] = []

        def stop_at_the_second_load(line: str) -> None:
            said.append(line)
            if "4x 32->32" in line:
                # On disk already: a bench that is killed has it as well.
                (written,) = kept_runs.glob("*/bench.json")
                assert benching.read_result(written.read_text(), "written").broken_off == "not finished"
                os.kill(os.getpid(), number)

        with pytest.raises(KeyboardInterrupt):
            measuring.run(place, "smoke", say=stop_at_the_second_load)
        (record,) = runs.listed("here")
        assert (record.status, record.exit_code) == ("interrupted", Exit.INTERRUPTED)
        left = f"broken off (interrupted); kept in runs/{record.id}/bench.json: 1 measured load"
        assert said[-1] == left
        assert record.notes == (left,)
        kept = benching.read_result((record.folder / "bench.json").read_text(), "kept")
        assert kept.broken_off == "interrupted"
        assert list(kept.targets[0].summaries) == ["32->32"]
        assert "broken off: interrupted" in (record.folder / "report.html").read_text()

        again, whole, compared = measuring.run(place, "smoke", against="last")
        assert again.arguments["against"] == record.id
        assert whole.broken_off == ""
        assert compared is not None
        assert list(compared.comparisons) == ["32->32"]
        assert compared.unmatched == ("4x 32->32",)


def test_a_bench_that_an_error_ends_keeps_the_servers_before_it(
    kept_runs: Path, local_site: Callable[..., str]
) -> None:
    with servers.serving(servers.Behaviour()) as address, socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        place = local_site(address, f"http://127.0.0.1:{nobody.getsockname()[1]}")
        with pytest.raises(UsageError, match="Is the server ready"):
            measuring.run(place, "smoke")
    (record,) = runs.listed("here")
    kept = benching.read_result((record.folder / "bench.json").read_text(), "kept")
    assert len(kept.targets) == 1
    assert kept.loads == 2
    assert "Is the server ready" in kept.broken_off
    assert record.errors == (kept.broken_off,)


def test_a_bench_with_nothing_measured_leaves_no_result(
    kept_runs: Path, local_site: Callable[..., str]
) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        place = local_site(f"http://127.0.0.1:{nobody.getsockname()[1]}")
        with pytest.raises(UsageError):
            measuring.run(place, "smoke")
        (record,) = runs.listed("here")
        assert {path.name for path in record.folder.iterdir()} == {"record.json"}
        with pytest.raises(UsageError, match="--against last"):
            measuring.run(place, "smoke", against="last")


def test_a_profile_without_a_measurement_is_nothing_to_compare_with() -> None:
    plan = plans.resolve(inventory.read("lab"), catalog.lazy())
    chosen = [(HERE, plan.hosts[0], plan.hosts[0].services[0])]
    with pytest.raises(UsageError, match="cpu-words-llama-server has no measurement of its own"):
        measuring._before("profile", chosen)
    recorded = measuring._before("gh200-2x-glm-5.2-fp8-vllm", chosen)
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
