"""A server is up when the right model has given a real token, and not before; its start's phases are kept."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bringup import ROOT
from bringup.node import common, gate
from bringup.node.common import NoAnswer

PROGRAM = ROOT / "bringup/node/gate.py"


class Engine:
    """An HTTP server of the test (no engine): `models`, `page` (of metrics) and `answer` say what it gives,
    `requests` what it got.
    """

    def __init__(self) -> None:
        self.models: dict[str, Any] = {"data": [{"id": "words"}]}
        self.answer: Callable[[dict[str, Any]], tuple[int, Any]] = lambda body: (200, chat("hello", 4))
        self.page: Callable[[], str] = lambda: ""
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.reply(200, outer.page().encode() if self.path == "/metrics" else outer.models)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append(body)
                outer.keys.append(self.headers.get("Authorization"))
                self.reply(*outer.answer(body))

            def reply(self, status: int, data: Any) -> None:
                content = data if isinstance(data, bytes) else json.dumps(data).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()

    @property
    def service(self) -> dict[str, Any]:
        return {
            "name": "words",
            "unit": "bringup-words",
            "user": "nobody",
            "group": "nogroup",
            "address": "127.0.0.1",
            "port": self.server.server_address[1],
            "served_name": "words",
            "endpoints": {"models": "/v1/models", "chat": "/v1/chat/completions", "metrics": None},
            "warm_up": [
                {"prompt_tokens": 8, "output_tokens": 2, "concurrent": 2},
                {"prompt_tokens": 64, "output_tokens": 4, "concurrent": 1},
            ],
            "start_timeout_s": 20,
            "probe_timeout_s": 5,
        }


def chat(text: str | None, tokens: int | None, **message: Any) -> dict[str, Any]:
    answer: dict[str, Any] = {"model": "words", "choices": [{"message": {"content": text, **message}}]}
    return answer if tokens is None else {**answer, "usage": {"completion_tokens": tokens}}


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    made.server.shutdown()
    made.server.server_close()


def token(engine: Engine, seconds: float = 0.5, **changes: Any) -> common.Answer:
    return gate.wait_for_token({**engine.service, **changes}, time.monotonic() + seconds, "key-1")


def test_a_token_of_the_right_model_is_an_answer_and_the_key_is_sent(engine: Engine) -> None:
    answer = token(engine)
    assert (answer.text, answer.tokens, answer.model) == ("hello", 4, "words")
    assert engine.keys == ["Bearer key-1"]


def test_tokens_that_a_model_thinks_count_as_well(engine: Engine) -> None:
    engine.answer = lambda body: (200, chat(None, 3, reasoning_content="hm"))
    assert token(engine).text == "hm"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ((200, chat("", 0)), "holds no token"),
        ((200, chat("", None)), "holds no token"),
        ((200, {"choices": []}), "holds no token"),
        ((200, b"<html>"), "not JSON"),
        ((200, [1]), "no mapping"),
        ((503, {"error": "loading"}), "status 503"),
    ],
)
def test_anything_but_a_token_is_none(engine: Engine, answer: tuple[int, Any], why: str) -> None:
    engine.answer = lambda body: answer
    with pytest.raises(NoAnswer, match=why):
        token(engine)


def test_another_models_name_is_no_answer_and_both_are_named(engine: Engine) -> None:
    engine.models = {"data": [{"id": "other"}]}
    with pytest.raises(NoAnswer, match="it serves other, not words"):
        token(engine)
    assert engine.requests == []


def test_a_smaller_context_than_planned_is_no_answer(engine: Engine) -> None:
    engine.models = {"data": [{"id": "words", "max_model_len": 1000}]}
    with pytest.raises(NoAnswer, match="its context is 1000 tokens, 2000 were planned"):
        token(engine, context_tokens=2000)
    assert token(engine, context_tokens=1000).tokens == 4


def test_the_wait_ends_when_its_time_is_over_and_says_what_was_last_seen() -> None:
    engine = Engine()
    service = engine.service
    engine.server.server_close()
    engine.server.shutdown()
    began = time.monotonic()
    with pytest.raises(NoAnswer, match="nothing listens on port"):
        gate.wait_for_token(service, began + 0.5, None)
    assert 0.4 < time.monotonic() - began < 60


def test_the_wait_ends_at_once_when_the_engine_is_gone(engine: Engine) -> None:
    with pytest.raises(gate.EngineGone):
        gate.wait_for_token(engine.service, time.monotonic() + 60, None, alive=lambda: False)


def test_the_warm_up_sends_every_size_with_prompts_that_share_no_beginning(engine: Engine) -> None:
    assert gate.warm_up(engine.service, time.monotonic() + 10, None) == 3
    prompts = [body["messages"][0]["content"] for body in engine.requests]
    assert sorted(len(prompt.split()) for prompt in prompts) == [8, 8, 64]
    assert len({prompt.split()[0] for prompt in prompts}) == 3
    assert sorted(body["max_tokens"] for body in engine.requests) == [2, 2, 4]


def test_a_warm_up_that_is_not_answered_fails(engine: Engine) -> None:
    engine.answer = lambda body: (500, {})
    with pytest.raises(NoAnswer, match="status 500"):
        gate.warm_up(engine.service, time.monotonic() + 10, None)


def test_phases_follow_each_other_and_a_line_seen_just_late_counts_before_the_token() -> None:
    phases = gate.Phases({"weights": "loaded weights", "graphs": "captured", "never": "not there"})
    phases.line("I loaded weights in 3 s", 13.0)
    phases.line("I loaded weights again", 90.0)
    phases.line("captured", 20.05)
    table = phases.table(10.0, {"first token": 20.0, "warm-up": 22.5})
    assert table == [
        {"name": "weights", "seconds": 3.0},
        {"name": "graphs", "seconds": 7.0},
        {"name": "first token", "seconds": 0.0},
        {"name": "warm-up", "seconds": 2.5},
    ]
    assert not phases.complete


def take(path: Path, mark: dict[str, int], steps: list[Callable[[], None]]) -> list[str]:
    """Lines that `lines_of` gives, with one step done whenever it has nothing."""
    found: list[str] = []
    for line in gate.lines_of(path, mark):
        if line is not None:
            found.append(line)
        elif steps:
            steps.pop(0)()
        else:
            return found
    return found


def test_a_log_is_followed_from_its_mark_through_rotations(tmp_path: Path) -> None:
    first, second, link = tmp_path / "1.log", tmp_path / "2.log", tmp_path / "engine.log"
    first.write_text("old\n")
    link.symlink_to(first)
    mark = {"inode": first.stat().st_ino, "offset": first.stat().st_size}

    def rotate() -> None:
        with first.open("a") as file:
            file.write("two\n")
        second.write_text("three\n")
        link.unlink()
        link.symlink_to(second)

    def more() -> None:
        with first.open("a") as file:
            file.write("one\nhal")

    def rest() -> None:
        with first.open("a") as file:
            file.write("f\n")

    assert take(link, mark, [more, rest, rotate]) == ["one", "half", "two", "three"]


def test_a_log_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"

    def write() -> None:
        path.write_text("one\n")

    assert take(path, {}, [lambda: None, write]) == ["one"]


@pytest.fixture
def node(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A node whose service is `engine`, logs to a file, and is asked by the test's own user."""
    log = tmp_path / "engine.log"
    log.write_text("before this start: loaded\n")
    service = {
        **engine.service,
        "log_path": str(log),
        "log_markers": {"weights": "^loaded"},
        "key_file": None,
    }
    (tmp_path / "words.json").write_text(json.dumps(service))
    monkeypatch.setattr(common, "SERVICES", tmp_path)
    monkeypatch.setattr(common, "STARTS", tmp_path / "starts")
    monkeypatch.setattr(common, "RUN", tmp_path / "run")
    noted = {"log": {"inode": log.stat().st_ino, "offset": log.stat().st_size}}
    common.write_json(tmp_path / "run/started/bringup-words.json", noted)
    program = tmp_path / "ask.py"
    program.write_text(
        f"import sys\nsys.path[:0] = [{str(ROOT)!r}]\n"
        "from pathlib import Path\nfrom bringup.node import common, gate\n"
        f"common.SERVICES = Path({str(tmp_path)!r})\nsys.exit(gate.main(sys.argv[1:]))\n"
    )
    monkeypatch.setattr(gate, "__file__", str(program))
    monkeypatch.setattr(os, "geteuid", lambda: 1)
    monkeypatch.setattr(gate, "MARKER_WAIT_S", 0.5)
    return {"log": log, "folder": tmp_path}


def test_a_good_start_is_kept_with_its_phases_answer_and_address(
    node: dict[str, Any], engine: Engine
) -> None:
    def late(body: dict[str, Any]) -> tuple[int, Any]:
        with node["log"].open("a") as file:
            file.write("loaded weights\n")
        return 200, chat("hello", 4)

    engine.answer = late
    assert gate.gate("words", os.getpid()) == 0
    kept = json.loads((node["folder"] / "starts/bringup-words.json").read_text())
    assert (kept["outcome"], kept["answer"], kept["model"], kept["warm_up_requests"]) == (
        "ready",
        "hello",
        "words",
        3,
    )
    assert kept["address"] == f"http://127.0.0.1:{engine.server.server_address[1]}"
    assert [phase["name"] for phase in kept["phases"]] == ["weights", "first token", "warm-up"]


def test_an_engine_that_ends_while_it_starts_fails_at_once_with_its_last_words(
    node: dict[str, Any], engine: Engine
) -> None:
    engine.models = {"data": []}
    with node["log"].open("a") as file:
        file.write("Traceback\nValueError: no such weights\n")
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1)"]) as process:
        began = time.monotonic()
        assert gate.gate("words", process.pid) == 1
    assert time.monotonic() - began < 120
    kept = json.loads((node["folder"] / "starts/bringup-words.json").read_text())
    assert kept["outcome"] == "failed"
    assert kept["why"].startswith("the engine's process ended while it started: ")
    assert "ValueError: no such weights" in kept["why"]


def test_a_server_that_never_answers_fails_when_its_time_is_over(
    node: dict[str, Any], engine: Engine
) -> None:
    service = json.loads((node["folder"] / "words.json").read_text())
    (node["folder"] / "words.json").write_text(json.dumps({**service, "start_timeout_s": 1}))
    engine.answer = lambda body: (503, {})
    assert gate.gate("words", os.getpid()) == 1
    kept = json.loads((node["folder"] / "starts/bringup-words.json").read_text())
    assert "no real token within 1 s: POST /v1/chat/completions: status 503" in kept["why"]


def test_a_process_start_is_known_to_a_second() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert abs(gate.started_at(process.pid) - time.time()) < 1.5
        assert gate.alive(process.pid)
        process.kill()
        time.sleep(0.2)
        assert not gate.alive(process.pid), "a zombie is not alive"
        assert process.stdin is not None
        process.stdin.close()


def test_metrics_are_summed_over_labels_and_called_by_our_names() -> None:
    rows = [
        "# HELP x",
        'vllm:num_requests_running{engine="0"} 2',
        'vllm:num_requests_running{engine="1"} 3.0',
    ]
    text = "\n".join([*rows, "other NaN", ""])
    assert common.parse_metrics(text) == {"vllm:num_requests_running": 5.0}


def test_times_can_be_read_back() -> None:
    assert common.seconds_of(common.utc(1_700_000_000.25)) == 1_700_000_000.25
    assert common.seconds_of("never") == 0.0
