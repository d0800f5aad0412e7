"""What the service's measuring commands count is right: they would see a lost line and a failed request."""

from __future__ import annotations

import dataclasses
import json
import socket
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from bench.service import reboots, rolling, rotations


def lines(*numbers: int) -> str:
    return "".join(f"line {number} {'x' * number} end\n" for number in numbers)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (lines(0, 1, 2), (0, 0, 0)),
        (lines(0, 2), (1, 0, 0)),
        (lines(0, 1, 1, 2), (0, 1, 0)),
        (lines(0, 1) + "line 2 xx", (1, 0, 1)),
        ("other\n" + lines(2, 1, 0), (0, 0, 0)),
    ],
)
def test_lost_doubled_and_torn_lines_are_counted(text: str, found: tuple[int, int, int]) -> None:
    assert tuple(rotations.count(text, 3).values()) == found


class Answers(BaseHTTPRequestHandler):
    """One completion for whoever has the key."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        good = self.headers["Authorization"] == f"Bearer {rolling.KEY}"
        content = json.dumps({"usage": {"completion_tokens": 1}} if good else {}).encode()
        self.send_response(200 if good else 401)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing."""


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A server on 127.0.0.1 only; nothing listens at 127.0.0.2."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    monkeypatch.setattr(rolling, "PORT", server.server_address[1])
    monkeypatch.setattr(rolling, "BETWEEN_S", 0.0)
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


def test_a_request_that_one_node_refuses_goes_to_the_next(port: int) -> None:
    load = rolling.Load(["127.0.0.2", "127.0.0.1"])
    load._one(0)
    load._one(1)
    assert (load.count.sent, load.count.failed, load.count.refused, load.count.cut) == (2, 0, 1, 0)


def test_a_request_that_every_node_refuses_has_failed_and_says_why() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rolling, "PORT", unused.getsockname()[1])
            patch.setattr(rolling, "BETWEEN_S", 0.0)
            load = rolling.Load(["127.0.0.1"])
            load._one(0)
    assert (load.count.failed, load.count.refused) == (1, rolling.TRIES_A_NODE)
    assert load.count.why[0].startswith("ConnectionRefusedError")


@pytest.mark.parametrize("point", reboots.POINTS)
def test_each_point_of_a_power_cut_is_a_shell_command(point: str) -> None:
    assert subprocess.run(["sh", "-n", "-c", reboots.POINTS[point][1]], check=False).returncode == 0


def test_there_are_ten_points_and_a_row_is_good_only_when_the_node_converged() -> None:
    assert len(reboots.POINTS) >= 10
    good = reboots.Row(("logs",), (3.0,), (5,), 0, 9.0, 0, answered=True)
    assert good.good
    never = reboots.Row(("logs", "units"), (3.0, None), (5, 0), 0, 9.0, 0, answered=True)
    assert not never.good, "a point was never met"
    assert not dataclasses.replace(good, changed=2).good
    assert not dataclasses.replace(good, second=4, changed=-1).good
    assert not dataclasses.replace(good, answered=False).good
