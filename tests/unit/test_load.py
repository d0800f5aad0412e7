"""The load client counts what the server says, times what it saw, and survives whatever a server does."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from bringup import load
from bringup.bench import Request
from bringup.errors import UsageError


def _module(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


servers = _module("openai_server", Path(__file__).with_name("openai_server.py"))


def one(how: str = "well", *, chat: bool = False, timeout_s: float = 5.0, delay_s: float = 0.0) -> Request:
    """One request to a server that behaves `how`."""

    async def run(address: str) -> Request:
        target = load.Target(address, "m", timeout_s=timeout_s)
        connection = load.Connection(target)
        try:
            return await load.ask(connection, target, load.Ask("a b c", 40, chat), time.perf_counter())
        finally:
            await connection.close()

    with servers.serving(servers.Behaviour(how, delay_s)) as address:
        return asyncio.run(run(address))


def test_tokens_are_the_servers_count_and_never_the_texts() -> None:
    got = one()
    assert got.error == ""
    assert (got.prompt_tokens, got.output_tokens, got.cached_tokens) == (9, 40, 1)


def test_first_token_and_end_are_when_they_came() -> None:
    got = one(delay_s=0.05)
    assert got.ttft_ms is not None
    assert 45 <= got.ttft_ms <= 500
    assert (got.ended - got.began) * 1000 >= 140


def test_a_reasoning_models_tokens_count_as_well() -> None:
    assert one(chat=True).first_token is not None


@pytest.mark.parametrize("how", ["without length", "closes after each"])
def test_servers_that_close_are_answers_too(how: str) -> None:
    assert one(how).error == ""


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("refuses", "HTTP 503: loading"),
        ("not http", "not an HTTP answer: SSH-2.0"),
        ("bad json", "Expecting property name"),
        ("not an event", "not an event: [1]"),
        ("no usage", "reports no usage"),
        ("error in stream", "engine died"),
        ("breaks off", "connection lost"),
    ],
)
def test_whatever_a_server_does_is_an_error_of_its_request(how: str, says: str) -> None:
    assert says in one(how).error


def test_a_server_that_hangs_is_given_up() -> None:
    began = time.monotonic()
    assert one("never", timeout_s=0.3).error == "no whole answer within 0.3 s"
    assert time.monotonic() - began < 60


def test_nobody_at_home_is_an_error_and_no_traceback() -> None:
    target = load.Target("http://127.0.0.1:1", "m")
    outcome = asyncio.run(load.closed_loop(target, [load.Ask("a", 1)], 1))
    assert "connection lost" in outcome.requests[0].error


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "ftp://x", "http://", "http://x:port"])
def test_an_address_that_is_none_is_refused_with_an_example(url: str) -> None:
    with pytest.raises(UsageError, match=r"is no address of a server\. Such as"):
        assert load.Target(url, "m").address


def test_a_target_keeps_its_key_out_of_sight_and_its_prefix_in_front() -> None:
    mode = servers.Behaviour()
    with servers.serving(mode) as address:
        target = load.Target(f"{address}/glm/", "m", api_key="s3cret")
        asyncio.run(load.closed_loop(target, [load.Ask("a", 1)], 1))
    assert "s3cret" not in repr(target)
    assert "POST /glm/v1/completions HTTP/1.1" in mode.heads[0]
    assert "Authorization: Bearer s3cret" in mode.heads[0]


def test_a_closed_loop_reuses_as_many_connections_as_run_at_once() -> None:
    mode = servers.Behaviour()
    with servers.serving(mode) as address:
        asks = [load.Ask(f"a {number}", 5) for number in range(20)]
        outcome = asyncio.run(load.closed_loop(load.Target(address, "m"), asks, 4))
    assert len(outcome.requests) == 20
    assert mode.connections == 4
    assert [body["prompt"] for body in mode.bodies].count("a 7") == 1


def test_a_connection_that_the_server_closed_is_opened_anew() -> None:
    mode = servers.Behaviour("closes after each")
    with servers.serving(mode) as address:
        outcome = asyncio.run(load.closed_loop(load.Target(address, "m"), [load.Ask("a", 5)] * 3, 1))
    assert [request.error for request in outcome.requests] == ["", "", ""]


def test_an_open_loop_sends_on_time_though_answers_are_late() -> None:
    mode = servers.Behaviour(delay_s=0.1)
    with servers.serving(mode) as address:
        began = time.monotonic()
        outcome = asyncio.run(load.open_loop(load.Target(address, "m"), [load.Ask("a", 5)] * 20, 100))
        took = time.monotonic() - began
    assert all(not request.error for request in outcome.requests)
    assert took < 20 * 0.3, "one after another would take six seconds"
    begun = [request.began for request in outcome.requests]
    assert begun == sorted(begun)


def test_prompts_never_begin_alike_unless_a_cache_is_wanted() -> None:
    fresh = load.Prompts(load.Tokens())
    first, second = fresh.make(50), fresh.make(50)
    assert first.split()[0] != second.split()[0]
    kept = load.Prompts(load.Tokens(), fresh=False)
    assert kept.make(50) == kept.make(50)
    assert len(kept.make(50).split()) == 50


def test_a_prompts_length_is_learned_from_the_server() -> None:
    with servers.serving(servers.Behaviour()) as address:
        tokens = asyncio.run(load.calibrate(load.Target(address, "m")))
    assert tokens.a_word == 2
    assert tokens.words(205) == pytest.approx(100, abs=1)


def test_a_server_that_does_not_answer_ends_before_the_load() -> None:
    mode = servers.Behaviour("refuses")
    with servers.serving(mode) as address, pytest.raises(UsageError, match="HTTP 503"):
        asyncio.run(load.calibrate(load.Target(address, "m")))


def test_a_client_that_was_late_says_so() -> None:
    assert load.Outcome((), 1.0, 0.4).trusted
    assert not load.Outcome((), 1.0, 40.0).trusted
