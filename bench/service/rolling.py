"""Rolling restarts of a group under constant load, through a client that tries another node: none may fail.

    python -m bench.service.rolling [--rounds 20] [--nodes bench-35,bench-36,bench-37]

Fresh lab nodes are provisioned with a real engine that listens to the network. Clients send requests at a constant
rate, each over a connection of its own, to one node after the other; what is refused, cut off or not answered goes
to the next node. Meanwhile `invoke restart --yes` is run `--rounds` times. Prints a table; exit code 1 when a
request failed on every node, or a restart failed.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from bringup import lab
from bringup.errors import Exit
from tests.e2e import site as sites
from tests.e2e.site import Site, on

KEY = "a-key-for-the-load-of-this-measurement"
PORT = 8000
CLIENTS = 3
PAUSE_S = 0.25
REQUEST_LIMIT_S = 60.0
TRIES_A_NODE = 3
BETWEEN_S = 0.2
PROVISION_LIMIT_S = 1800.0
RESTARTS = "/var/lib/bringup/restarts/bringup-words.json"


@dataclass
class Count:
    """Requests so far: sent, failed on every node, tries that another node had to take over, and seconds of each."""

    sent: int = 0
    failed: int = 0
    refused: int = 0
    cut: int = 0
    seconds: list[float] = field(default_factory=list)
    why: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Round:
    """One rolling restart: seconds, nodes restarted, nodes that refused new connections, and the requests meanwhile."""

    number: int
    code: int
    seconds: float
    restarted: int
    refused_new: int
    cut_requests: int
    sent: int
    failed: int
    tried_again: int


class Load:
    """Clients at a constant rate; each request tries node after node, TRIES_A_NODE times around."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.addresses, self.count = addresses, Count()
        self.lock, self.stop, self.turn = threading.Lock(), threading.Event(), itertools.count()
        self.threads = [threading.Thread(target=self._run) for _ in range(CLIENTS)]

    def __enter__(self) -> Load:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join()

    def _run(self) -> None:
        while not self.stop.wait(PAUSE_S):
            self._one(next(self.turn))

    def _one(self, number: int) -> None:
        began, last = time.monotonic(), ""
        for attempt in range(TRIES_A_NODE * len(self.addresses)):
            try:
                self._ask(self.addresses[(number + attempt) % len(self.addresses)])
                break
            except (OSError, http.client.HTTPException, ValueError) as error:
                last = f"{type(error).__name__}: {error}"
                with self.lock:
                    self.count.refused += isinstance(error, ConnectionRefusedError)
                    self.count.cut += not isinstance(error, ConnectionRefusedError)
                if attempt % len(self.addresses) == len(self.addresses) - 1:
                    time.sleep(BETWEEN_S)
        else:
            with self.lock:
                self.count.failed += 1
                self.count.why.append(last)
        with self.lock:
            self.count.sent += 1
            self.count.seconds.append(time.monotonic() - began)

    @staticmethod
    def _ask(address: str) -> None:
        """One completion; an exception when none with tokens comes."""
        connection = http.client.HTTPConnection(address, PORT, timeout=REQUEST_LIMIT_S)
        body = {"model": "words", "max_tokens": 16, "messages": [{"role": "user", "content": "hello"}]}
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            data = answer.read()
            if answer.status != 200 or json.loads(data)["usage"]["completion_tokens"] < 1:
                raise ValueError(f"status {answer.status}: {data[:100]!r}")
        finally:
            connection.close()


def listen_to_the_network(place: Site) -> None:
    """The site's service at an address that clients reach, with a key."""
    intent = yaml.safe_load(place.intent_file.read_text())
    service: dict[str, Any] = intent["node_services"][0]
    # Its timer would add restarts of its own.
    service.pop("restart", None)
    service.update(bind="0.0.0.0", port=PORT, api_key="vault_words_api_key", served_name="words")
    intent["vault_words_api_key"] = KEY
    place.intent_file.write_text(yaml.safe_dump(intent, sort_keys=False))


def pids(place: Site) -> dict[str, str]:
    """The engine's process on each node."""
    return {name: on(name, "systemctl show -P MainPID bringup-words") for name in place.names}


def one(number: int, place: Site, load: Load) -> Round:
    """One rolling restart under the load."""
    before, old, began = (
        (load.count.sent, load.count.failed, load.count.refused + load.count.cut),
        pids(place),
        0.0,
    )
    began = time.monotonic()
    done = place.invoke("restart", "--yes", "--json")
    seconds = time.monotonic() - began
    if done.code != Exit.DONE:
        print(done.text[-3000:], file=sys.stderr)
    kept = [json.loads(on(name, f"cat {RESTARTS}")) for name in place.names]
    new = pids(place)
    return Round(
        number=number,
        code=done.code,
        seconds=round(seconds, 1),
        restarted=sum(new[name] not in (old[name], "0") for name in place.names),
        refused_new=sum(bool(record.get("refused_new")) for record in kept),
        cut_requests=sum(int(record.get("cut_requests", 0)) for record in kept),
        sent=load.count.sent - before[0],
        failed=load.count.failed - before[1],
        tried_again=load.count.refused + load.count.cut - before[2],
    )


def show(rounds: Sequence[Round], total: Mapping[str, Any]) -> None:
    """The table for people."""
    names = ("number", "seconds", "restarted", "refused_new", "cut_requests", "sent", "failed", "tried_again")
    table = Table(*("round", "s", "restarted", "refused new", "cut", "requests", "failed", "tried again"))
    for row in rounds:
        table.add_row(*(str(getattr(row, name)) for name in names))
    Console().print(table)
    Console().print(", ".join(f"{name} {value}" for name, value in total.items()))


def main(words: Sequence[str] | None = None) -> int:
    """Measures, prints, and says whether anything failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--nodes", default="bench-35,bench-36,bench-37")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(words)
    names = given.nodes.split(",")
    try:
        with tempfile.TemporaryDirectory() as folder:
            place = sites.make(Path(folder) / "rolling", names)
            listen_to_the_network(place)
            made = place.invoke("provision", "--json", limit=PROVISION_LIMIT_S)
            if made.code != Exit.DONE:
                print(made.text[-5000:], file=sys.stderr)
                return 1
            with Load([lab.address_of(name) for name in names]) as load:
                rounds = []
                for number in range(1, given.rounds + 1):
                    rounds.append(one(number, place, load))
                    print(rounds[-1], file=sys.stderr, flush=True)
    finally:
        lab.down(names, say=sites.quiet)
    count = load.count
    total = {
        "restarts": sum(row.restarted for row in rounds),
        "requests": count.sent,
        "failed": count.failed,
        "refused and asked elsewhere": count.refused,
        "cut off and asked elsewhere": count.cut,
        "median s": round(statistics.median(count.seconds), 3),
        "longest s": round(max(count.seconds), 3),
    }
    if given.json:
        print(json.dumps({"schema_version": 1, "rounds": [asdict(row) for row in rounds], "total": total}))
    else:
        show(rounds, total)
    print("\n".join(count.why), file=sys.stderr)
    good = not count.failed and all(row.code == 0 and row.restarted == len(names) for row in rounds)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
