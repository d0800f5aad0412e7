"""A chain of nodes ends with the same verified bytes on all, whoever dies on the way."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bringup import ROOT
from bringup.node import download, relay, store
from tests.standin.models import free_port, rows_of

FILES = {f"part-{number}.bin": random.Random(number).randbytes(2_500_000) for number in range(3)} | {
    "empty": b""
}
NODES = 4
CALM_LIMIT_S = 240


def model(folder: Path) -> dict[str, Any]:
    return {"name": "demo", "folder": str(folder / "demo"), "files": rows_of(FILES)}


class Chain:
    """Nodes as processes on this machine, each with its folder; node 0 has the model."""

    def __init__(self, folder: Path, bytes_s: float = 0) -> None:
        self.folder = folder
        self.ports = [free_port() for _ in range(NODES)]
        self.bytes_s = bytes_s
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        head = folder / "0" / "demo"
        head.mkdir(parents=True)
        for path, data in FILES.items():
            (head / path).write_bytes(data)

    def start(self, node: int) -> None:
        upstreams = [f"http://127.0.0.1:{self.ports[before]}" for before in range(node - 1, -1, -1)]
        spec = {
            "model": model(self.folder / str(node)),
            "listen": ["127.0.0.1", self.ports[node]],
            "upstreams": upstreams,
            "idle_s": 60,
            "bytes_s": self.bytes_s,
        }
        path = self.folder / f"{node}.json"
        path.write_text(json.dumps(spec))
        argv = [sys.executable, "-m", "bringup.node.relay", str(path)]
        self.running[node] = subprocess.Popen(argv, cwd=ROOT)

    def kill(self, node: int) -> None:
        process = self.running.pop(node)
        process.send_signal(signal.SIGKILL)
        process.wait(120)

    def ready(self, node: int) -> bool:
        return (self.folder / str(node) / "demo" / store.READY).is_file()

    def wait(self, nodes: set[int]) -> None:
        end = time.monotonic() + CALM_LIMIT_S
        while not all(self.ready(node) for node in nodes):
            assert time.monotonic() < end, [node for node in nodes if not self.ready(node)]
            time.sleep(0.05)

    def bytes_of(self, node: int) -> dict[str, bytes]:
        folder = self.folder / str(node) / "demo"
        return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    def end(self) -> None:
        for node in list(self.running):
            self.kill(node)


@pytest.fixture
def chain(tmp_path: Path) -> Iterator[Chain]:
    made = Chain(tmp_path)
    yield made
    made.end()


def test_every_node_of_a_chain_gets_every_byte(chain: Chain) -> None:
    for node in range(NODES):
        chain.start(node)
    chain.wait(set(range(NODES)))
    assert all(chain.bytes_of(node) == FILES for node in range(NODES))


def test_nodes_may_come_in_any_order(chain: Chain) -> None:
    for node in reversed(range(NODES)):
        chain.start(node)
        time.sleep(0.2)
    chain.wait(set(range(NODES)))
    assert all(chain.bytes_of(node) == FILES for node in range(NODES))


def test_a_node_that_dies_in_the_middle_is_gone_around(chain: Chain) -> None:
    chain.bytes_s = 3_000_000
    for node in range(NODES):
        chain.start(node)
    partial = chain.folder / "1" / "demo" / "part-0.bin.partial"
    wait_for(lambda: partial.is_file() and partial.stat().st_size > 0)
    chain.kill(1)
    chain.wait({0, 2, 3})
    assert not chain.ready(1)
    assert chain.bytes_of(2) == chain.bytes_of(3) == FILES


def test_a_node_that_was_killed_goes_on_with_what_it_had(chain: Chain) -> None:
    chain.bytes_s = 3_000_000
    chain.start(0)
    chain.start(1)
    partial = chain.folder / "1" / "demo" / "part-0.bin.partial"
    wait_for(lambda: partial.is_file() and partial.stat().st_size >= relay.SMALLEST_BLOCK)
    chain.kill(1)
    with partial.open("ab") as file:
        file.write(b"rubbish that a torn write has left")
    chain.start(1)
    chain.wait({1})
    assert chain.bytes_of(1) == FILES


def test_a_head_serves_while_its_own_files_still_come(chain: Chain) -> None:
    late = chain.folder / "0" / "demo" / "part-2.bin"
    shutil.move(late, chain.folder / "late")
    for node in (0, 1):
        chain.start(node)
    wait_for(lambda: (chain.folder / "1" / "demo" / "part-0.bin").is_file())
    assert not chain.ready(1)
    shutil.move(chain.folder / "late", late)
    chain.wait({0, 1})
    assert chain.bytes_of(1) == FILES


@contextmanager
def served(state: relay.Relay, allowed: Sequence[str] = ()) -> Iterator[str]:
    """A relay in this process; gives its address."""
    server = relay.Server(("127.0.0.1", 0), state, allowed)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        state.stop.set()
        server.shutdown()
        server.server_close()


def holding(folder: Path, lies: bool) -> relay.Relay:
    """A node that has the model; with `lies` its disk gives other bytes than those that were hashed."""
    (folder / "demo").mkdir(parents=True)
    for path, data in FILES.items():
        (folder / "demo" / path).write_bytes(data)
    state = relay.Relay(store.Model.of(model(folder)))
    state.get_all()
    for path, data in FILES.items() if lies else ():
        (folder / "demo" / path).write_bytes(b"x" * len(data))
    return state


def test_wrong_bytes_from_a_node_are_not_taken(tmp_path: Path) -> None:
    bad, good = holding(tmp_path / "bad", lies=True), holding(tmp_path / "good", lies=False)
    with served(bad) as liar, served(good) as honest:
        relay.Relay(store.Model.of(model(tmp_path / "me")), [liar, honest]).get_all()
    folder = tmp_path / "me" / "demo"
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == FILES


def test_bytes_from_a_node_whose_marks_lie_are_thrown_away(tmp_path: Path) -> None:
    """Its marks fit its wrong bytes and end with the lock's own sha256, so the last block shows the lie."""
    bad, good = holding(tmp_path / "bad", lies=True), holding(tmp_path / "good", lies=False)
    for item in bad.items.values():
        marks, _ = relay.marks_of(item.target, bad.block)
        item.tell([*marks[:-1], item.file.sha256] if marks else [], item.verified)
    with served(bad) as liar, served(good) as honest:
        relay.Relay(store.Model.of(model(tmp_path / "me")), [liar, honest]).get_all()
    folder = tmp_path / "me" / "demo"
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == FILES


def test_a_node_with_another_file_than_the_lock_says_is_left_before_a_byte_is_taken(tmp_path: Path) -> None:
    bad, good = holding(tmp_path / "bad", lies=True), holding(tmp_path / "good", lies=False)
    for item in bad.items.values():
        item.tell(relay.marks_of(item.target, bad.block)[0], item.verified)
    me = relay.Relay(store.Model.of(model(tmp_path / "me")), [])
    with served(bad) as liar, served(good) as honest:
        item = me.items["part-0.bin"]
        assert me._stay_with(liar, item) == "has another file than the lock says"
        assert (item.verified, download.partial_of(item.target).exists()) == (0, False)
        assert me._stay_with(honest, item) == ""


def test_when_the_hours_for_models_end_a_follower_stops_and_the_next_one_goes_on(tmp_path: Path) -> None:
    wanted = store.Model.of(model(tmp_path / "me"))
    with served(holding(tmp_path / "good", lies=False)) as honest:
        late = relay.Relay(wanted, [honest], until=time.monotonic() - 1)
        with pytest.raises(relay.RelayFailed, match="the hours in which models may be fetched are over"):
            late.get_all()
        assert not (wanted.folder / store.READY).exists()
        relay.Relay(wanted, [honest]).get_all()
    assert (wanted.folder / store.READY).is_file()


def test_a_model_that_no_node_has_ends_with_every_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "PAUSE_S", 0.01)
    monkeypatch.setattr(relay, "START_LIMIT_S", 0.1)
    follower = relay.Relay(store.Model.of(model(tmp_path)), ["http://127.0.0.1:9", "http://127.0.0.1:7"])
    with pytest.raises(relay.RelayFailed, match=r"127\.0\.0\.1:9: .*refused; .*127\.0\.0\.1:7: .*refused"):
        follower.get_all()


def test_only_allowed_addresses_are_served(tmp_path: Path) -> None:
    state = relay.Relay(store.Model.of(model(tmp_path)))
    with served(state, ["10.0.0.1"]) as address:
        assert not relay.alive(address)
    with served(state, ["127.0.0.1"]) as address:
        assert relay.alive(address)


@pytest.mark.parametrize(
    ("total", "block"),
    [
        (0, relay.SMALLEST_BLOCK),
        (256 * 2**20, relay.SMALLEST_BLOCK),
        (8 * 2**30, 8 * 2**20),
        (700 * 2**30, relay.LARGEST_BLOCK),
    ],
)
def test_blocks_are_about_a_thousand_within_bounds(total: int, block: int) -> None:
    assert relay.block_size(total) == block


def wait_for(holds: Any, limit_s: float = 20) -> None:
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)
