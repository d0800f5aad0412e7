"""Before a start: refusals by name; at the start: the key never in an argv; after it: is it what the disk
says?
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bringup import ROOT
from bringup.node import common, serve
from bringup.node.common import Refusal

PROGRAM = ROOT / "bringup/node/serve.py"


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A service whose description, records and definition lie in a folder of the test."""
    (tmp_path / "ready.json").write_text("{}")
    (tmp_path / "unit").write_text("[Service]\n")
    made = {
        "name": "words",
        "unit": "bringup-words",
        "user": "nobody",
        "bind": "127.0.0.1",
        "address": "127.0.0.1",
        "port": free_port(),
        "gpus": [],
        "program": sys.executable,
        "model_stamp": str(tmp_path / "ready.json"),
        "definition": [str(tmp_path / "unit"), str(tmp_path / "missing")],
        "log_path": None,
    }
    monkeypatch.setattr(common, "SERVICES", tmp_path)
    monkeypatch.setattr(common, "STARTS", tmp_path / "starts")
    monkeypatch.setattr(common, "RUN", tmp_path / "run")
    monkeypatch.setattr(serve, "PORT_WAIT_S", 0.0)
    monkeypatch.setattr(serve, "GPU_WAIT_S", 0.0)
    monkeypatch.setattr(serve.check_port, "__defaults__", (0.0,))
    monkeypatch.setenv("INVOCATION_ID", "abc")
    keep(made, tmp_path)
    return made


def keep(service: dict[str, Any], folder: Path) -> None:
    (folder / "words.json").write_text(json.dumps(service))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_a_start_without_obstacles_is_noted_with_what_it_starts_from(
    service: dict[str, Any], tmp_path: Path
) -> None:
    assert serve.check("words") == 0
    noted = json.loads((tmp_path / "run/started/bringup-words.json").read_text())
    assert noted["invocation"] == "abc"
    assert noted["digest"] == serve.definition_digest(service["definition"])


def test_a_taken_port_is_refused_with_the_name_of_who_has_it(
    service: dict[str, Any], tmp_path: Path, taken: int
) -> None:
    keep({**service, "port": taken}, tmp_path)
    assert serve.check("words") == serve.REFUSED
    kept = json.loads((tmp_path / "starts/bringup-words.json").read_text())
    assert kept["refusal"] == "port-taken"
    assert f"process {os.getpid()} (" in kept["why"]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"program": "/nonexistent/python"}, "program-missing"),
        ({"model_stamp": "/nonexistent/ready.json"}, "model-not-ready"),
        ({"bind": "192.0.2.1"}, "address-missing"),
    ],
)
def test_each_obstacle_is_refused_by_its_name(
    service: dict[str, Any], tmp_path: Path, change: dict[str, Any], name: str
) -> None:
    keep({**service, **change}, tmp_path)
    assert serve.check("words") == serve.REFUSED
    assert json.loads((tmp_path / "starts/bringup-words.json").read_text())["refusal"] == name
    assert not (tmp_path / "run/started/bringup-words.json").exists()


def test_held_gpus_are_refused_with_their_holders_and_given_a_moment_to_go() -> None:
    with pytest.raises(
        Refusal, match=f"GPU 0, 3 is held by process {os.getpid()} .*invoke cleanup"
    ) as refused:
        serve.check_gpus({"gpus": [0, 1, 2, 3]}, 0.0, look=lambda gpus: [(0, os.getpid()), (3, os.getpid())])
    assert refused.value.name == "gpu-held"
    looks = iter([[(0, 1)], []])
    serve.check_gpus({"gpus": [0]}, 5.0, look=lambda gpus: next(looks))
    assert next(looks, None) is None


def test_memory_that_no_process_shows_for_is_refused_too() -> None:
    left = {0: 4, 3: 71234}
    with pytest.raises(Refusal, match=r"held on GPU 3 \(71234 MiB\), and no process .*reset-gpus") as refused:
        serve.check_gpus({"gpus": [0, 3]}, 0.0, look=lambda gpus: [], memory=lambda gpus: left)
    assert refused.value.name == "gpu-held"
    looks = iter([left, {0: 4, 3: 4}])
    serve.check_gpus({"gpus": [0, 3]}, 5.0, look=lambda gpus: [], memory=lambda gpus: next(looks))
    assert next(looks, None) is None


def test_gpu_memory_is_read_by_index_and_not_where_it_is_memory_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf '0, 4\\n1, 71234\\n2, [N/A]\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name, nodes in (("has_memory", "0-1"), ("has_cpu", "0-1")):
        (tmp_path / name).write_text(f"{nodes}\n")
    assert common.gpu_memory([1, 2], tmp_path) == {1: 71234}
    (tmp_path / "has_memory").write_text("0-9\n")
    assert common.gpu_memory([1, 2], tmp_path) == {}


def test_gpu_holders_are_read_from_nvidia_smi_by_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\ncase $1 in *query-gpu*) echo '0, GPU-a'; echo '1, GPU-b';;"
        " *) echo 'GPU-b, 4711'; echo 'GPU-a, 99';; esac\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert common.gpu_holders([1]) == [(1, 4711)]
    assert common.gpu_holders([0, 1]) == [(0, 99), (1, 4711)]
    assert common.gpu_holders([]) == []


def test_only_shared_memory_that_nobody_uses_is_swept(tmp_path: Path) -> None:
    user = os.getuid()
    (tmp_path / "left").write_text("x")
    with (tmp_path / "used").open("w") as used:
        used.write("x")
        assert serve.sweep_shm({"user_id": user, "own_user": True}, tmp_path, tmp_path) == ["left"]
    assert (tmp_path / "used").exists()
    assert serve.sweep_shm({"user_id": user, "own_user": False}, tmp_path) == []
    assert serve.sweep_shm({"user_id": user + 1, "own_user": True}, tmp_path) == []


def test_the_units_own_shared_memory_is_not_the_nodes() -> None:
    assert serve.sweep_shm.__defaults__ == (Path("/proc/1/root/dev/shm"), Path("/dev/shm"))


def test_what_an_earlier_start_said_is_no_reason_for_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "STARTS", tmp_path)
    began = common.seconds_of("2026-11-30T07:00:00.500Z")
    for at, why in (("2026-11-30T06:59:00.000Z", ""), ("2026-11-30T07:00:00.400Z", "port 8000 is taken")):
        common.write_json(tmp_path / "bringup-words.json", {"why": "port 8000 is taken", "at": at})
        assert common.why_not_started("bringup-words", began) == why
    assert common.why_not_started("bringup-other", began) == ""


def test_a_server_is_due_when_one_of_its_files_is_another(
    service: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"ActiveState": "active", "InvocationID": "abc", "LoadState": "loaded", "NeedDaemonReload": "no"}
    monkeypatch.setattr(common, "unit_state", lambda unit, properties: state)
    assert serve.current("words")["due"] is True
    serve.check("words")
    assert serve.current("words") == {"active": True, "state": "active", "due": False, "why": ""}
    (tmp_path / "unit").write_text("[Service]\nNice=1\n")
    assert serve.current("words")["why"] == "its definition changed"
    serve.check("words")
    state["InvocationID"] = "another"
    assert serve.current("words")["due"] is True
    state.update(ActiveState="failed")
    assert serve.current("words")["why"] == "it is failed"


ENGINE = (
    "import os, sys; seen = open('/proc/self/cmdline').read().count('sesame-open')\n"
    "print(repr(sys.argv), os.environ.get('KEY'), seen)"
)


@pytest.fixture
def engine(tmp_path: Path) -> dict[str, Any]:
    """A Python program and module that print their argv, variable KEY, and how often the key is in the
    kernel's argv.
    """
    (tmp_path / "engine.py").write_text(ENGINE)
    tool = tmp_path / "tool"
    tool.write_text(f"#!{sys.executable}\n{ENGINE}\n")
    tool.chmod(0o755)
    (tmp_path / "credentials").mkdir()
    (tmp_path / "credentials/api_key").write_text("sesame-open-12\n")
    return {
        **os.environ,
        "CREDENTIALS_DIRECTORY": str(tmp_path / "credentials"),
        "PYTHONPATH": f"{ROOT}:{tmp_path}",
    }


def started(engine: dict[str, Any], *words: str) -> str:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *words], env=engine, capture_output=True, text=True, check=False
    )
    return (done.stdout or done.stderr).strip()


def test_a_key_comes_in_a_variable(engine: dict[str, Any], tmp_path: Path) -> None:
    script = str(tmp_path / "engine.py")
    assert started(engine, "--key", "environment:KEY", "--", sys.executable, script, "a b") == (
        f"{[script, 'a b']!r} sesame-open-12 0"
    )


def test_a_key_comes_in_a_file(engine: dict[str, Any], tmp_path: Path) -> None:
    script = str(tmp_path / "engine.py")
    said = started(engine, "--key", "file_flag:--key-file", "--", sys.executable, script)
    assert said == f"{[script, '--key-file', str(tmp_path / 'credentials/api_key')]!r} None 0"


@pytest.mark.parametrize("form", ["script", "module", "program"])
def test_a_key_that_must_be_a_flags_value_is_in_no_argv_that_others_see(
    engine: dict[str, Any], tmp_path: Path, form: str
) -> None:
    forms = {
        "script": [sys.executable, str(tmp_path / "engine.py")],
        "module": [sys.executable, "-u", "-m", "engine"],
        "program": [str(tmp_path / "tool")],
    }
    said = started(engine, "--key", "flag:--api-key", "--", *forms[form], "--port", "1")
    assert said.endswith("'--port', '1', '--api-key', 'sesame-open-12'] None 0"), said


def test_a_key_for_a_program_that_is_no_python_is_refused(engine: dict[str, Any]) -> None:
    assert "[key-in-argv]" in started(engine, "--key", "flag:--api-key", "--", "/bin/true")


def test_a_missing_key_is_refused(engine: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "credentials/api_key").write_text("\n")
    assert "the API key is empty" in started(engine, "--key", "environment:KEY", "--", "/bin/true")


def test_an_engine_without_a_key_gets_exactly_its_argv(engine: dict[str, Any], tmp_path: Path) -> None:
    script = str(tmp_path / "engine.py")
    nasty = ["100% $HOME", "--", "-x", "ü", ""]
    assert started(engine, "--", sys.executable, script, *nasty) == f"{[script, *nasty]!r} None 0"


def test_an_engine_finds_the_programs_of_its_own_environment(engine: dict[str, Any], tmp_path: Path) -> None:
    """Kernels are compiled with the `ninja` that came with the engine, by its name alone."""
    home = tmp_path / "environment/bin"
    home.mkdir(parents=True)
    (home / "ninja").write_text("#!/bin/sh\necho its own ninja\n")
    (home / "engine").write_text("#!/bin/sh\nninja; echo $PATH\n")
    for program in home.iterdir():
        program.chmod(0o755)
    bare = {**engine, "PATH": "/usr/bin:/bin"}
    assert started(bare, "--", str(home / "engine")) == f"its own ninja\n{home}:/usr/bin:/bin"
    named = {**engine, "PATH": f"/nowhere:{home}"}
    assert started(named, "--", str(home / "engine")) == f"its own ninja\n/nowhere:{home}"


# ---------------------------------------------------------------- driver, fabric and caches


def driver(gpus: str, code: int = 0, fabric: str = "active") -> Any:
    """nvidia-smi and systemctl as they answer on a node; `gpus`: what the driver shows."""

    def run(words: list[str]) -> tuple[int, str, str]:
        if words[0] == "nvidia-smi":
            return code, gpus, "NVIDIA-SMI has failed because it couldn't communicate with the driver"
        return 0, f"LoadState=loaded\nActiveState={fabric}\n", ""

    return run


def refusal(check: Any, *arguments: Any) -> str:
    with pytest.raises(Refusal) as error:
        check(*arguments)
    return error.value.name


def test_a_driver_that_does_not_answer_or_lacks_a_gpu_is_refused_by_name() -> None:
    two = {"gpus": [0, 1], "fabric": True}
    serve.check_driver(two, driver("0\n1\n"))
    serve.check_driver({"gpus": []}, driver("", code=127))
    assert refusal(serve.check_driver, two, driver("", code=9)) == "driver"
    assert refusal(serve.check_driver, two, driver("0\n")) == "gpu-missing"


def test_the_fabric_manager_counts_only_where_gpus_are_joined_by_switches() -> None:
    assert (
        refusal(serve.check_driver, {"gpus": [0], "fabric": True}, driver("0\n", fabric="failed")) == "fabric"
    )
    serve.check_driver({"gpus": [0], "fabric": False}, driver("0\n", fabric="failed"))


def test_a_cache_folder_that_is_missing_foreign_or_full_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = {"writable": [str(tmp_path)], "user": "words", "user_id": os.getuid()}
    serve.check_caches(mine)
    assert refusal(serve.check_caches, {**mine, "writable": [str(tmp_path / "x")]}) == "cache-missing"
    assert refusal(serve.check_caches, {**mine, "user_id": os.getuid() + 1}) == "cache-not-writable"
    monkeypatch.setattr(serve, "CACHE_ROOM_BYTES", 1 << 62)
    assert refusal(serve.check_caches, mine) == "cache-full"
