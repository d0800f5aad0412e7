"""python -m tests.engines.table [WAY ...]: each misbehaviour of an engine on a real systemd node, and what
comes of it.

A row a misbehaviour: what must be seen, within which time, what was seen, and what was left behind
(processes, shared memory, ports). Exit code 0 when every row is as it must be. The engine is a stand-in
(`misbehave.py`); systemd, units and programs are the real ones, made by the same code as a provisioned
node's.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from bringup import ROOT, lab
from bringup.planned import HostPlan, Plan, Service
from bringup.rolevars import engine_service, log_rotation
from tests.molecule import servers

NODE = "engines-table"
PORT = 8000
POLL_S = 0.1
COMMAND_LIMIT_S = 120
START_LIMIT_S = 12
STOP_LIMIT_S = 3
PROBE_LIMIT_S = 2
WATCH_S = 1
PREFILL_S = 16
STALL_S = 6
"""Less than the stand-in's long prefill takes: only its batches tell that from a hang."""
PROBES_S = 3 * (WATCH_S + PROBE_LIMIT_S) + 10
HANG_S = STALL_S + PROBES_S
HANG_BLIND_S = PREFILL_S + PROBES_S
BLIND = "hangs-after/blind", "long-prefill/blind"
"""The same stand-ins, of whose metrics no count of batches is known."""

CACHE = "/var/cache/bringup/words"
LOCK = f"{CACHE}/.cache/torch_extensions/some/kernels/lock"


@dataclass(frozen=True)
class Row:
    """One misbehaviour's outcome; `good`: as it must be, in time, nothing left."""

    way: str
    must: str
    limit_s: float
    seen: str
    seconds: float
    left: str

    @property
    def good(self) -> bool:
        """Is the row as it must be?"""
        return self.seconds <= self.limit_s and not self.left and not self.seen.startswith("not")


class Node:
    """A container with systemd, and a few ways to look into it."""

    def __init__(self, engine: lab.Engine, name: str = NODE) -> None:
        self.engine, self.name = engine, name

    def sh(self, script: str, stdin: str = "") -> str:
        """Standard output of a shell command in the node; RuntimeError when it fails."""
        words = self.engine.argv("exec", "-i", self.name, "sh", "-c", script)
        done = subprocess.run(
            words, input=stdin, capture_output=True, text=True, check=False, timeout=COMMAND_LIMIT_S
        )
        if done.returncode:
            raise RuntimeError(f"{script}: {done.stdout}{done.stderr}")
        return done.stdout.strip()

    def show(self, what: str, unit: str = "bringup-words.service") -> str:
        """One property of a unit."""
        return self.sh(f"systemctl show -P {what} {unit}")

    def until(self, true: Callable[[], bool], limit_s: float) -> float:
        """Seconds until it is so; RuntimeError when it is not within the limit."""
        began = time.monotonic()
        while not true():
            if time.monotonic() - began > limit_s:
                raise RuntimeError(f"not within {limit_s:g} s")
            time.sleep(POLL_S)
        return time.monotonic() - began

    def answers(self, prompt: str = "x", limit_s: float = 2.0) -> bool:
        """Does a completion come back within the limit?"""
        body = json.dumps({"model": "words", "messages": [{"role": "user", "content": prompt}]})
        address = f"http://127.0.0.1:{PORT}/v1/chat/completions"
        return (
            self.sh(
                f"curl -s -m {limit_s} -o /dev/null -w '%{{http_code}}' -d {shlex.quote(body)} {address} || true"
            )
            == "200"
        )

    def started(self) -> dict[str, Any]:
        """The record of the last start."""
        data: dict[str, Any] = json.loads(self.sh("cat /var/lib/bringup/starts/bringup-words.json"))
        return data


@contextmanager
def node(name: str = NODE) -> Iterator[Node]:
    """A fresh node with a user for the server and one for the log; gone at the end."""
    engine = lab.ensure_engine()
    image = lab.ensure_image(engine=engine)
    engine.tries("rm", "--force", "--volumes", name)
    capabilities = [word for name in lab.CAPABILITIES for word in ("--cap-add", name)]
    options = ["--cgroupns", "private", *capabilities, "--security-opt", "seccomp=unconfined"]
    engine.run("run", "--detach", "--name", name, "--hostname", name, *options, image)
    try:
        made = Node(engine, name)
        made.until(
            lambda: (
                engine.tries("exec", name, "systemctl", "is-system-running").stdout.strip()
                in ("running", "degraded")
            ),
            60,
        )
        made.sh(
            "useradd -r -U -M -s /usr/sbin/nologin bringup-words; useradd -r -U -M -s /usr/sbin/nologin bringup-log"
        )
        yield made
    finally:
        engine.tries("rm", "--force", "--volumes", name)


def service(way: str, **changes: Any) -> Service:
    """The stand-in as a service of a plan, with short limits."""
    argv = [
        "/usr/bin/python3",
        "/opt/bringup/lib/misbehave.py",
        "--port",
        str(PORT),
        "--alias",
        "words",
        "--how",
        way.partition("/")[0],
    ]
    names = {"running": "standin:running", "generation_tokens_total": "standin:tokens_total"}
    steps = {} if way in BLIND else {"steps_total": "standin:steps_total"}
    return servers.service(
        argv=argv,
        start_timeout_s=START_LIMIT_S,
        stop_timeout_s=STOP_LIMIT_S,
        probe_timeout_s=PROBE_LIMIT_S,
        metrics_names={**names, **steps},
        log_markers={"model": "model loaded"},
        environment={},
        writable=(CACHE,),
        is_stand_in=True,
        **changes,
    )


def install(made: Node, way: str, **changes: Any) -> None:
    """What the roles would bring, through the code of their modules."""
    host = HostPlan("node", (), "cpu", "x86_64", (service(way, **changes),), (), ())
    plan = Plan("table", (host,), (), "digest")
    logs, engine = log_rotation.variables(host, plan), engine_service.variables(host, plan)
    entries = {
        entry["path"]: _filled(entry)
        for entry in [*logs["log_rotation_files"], *engine["engine_service_files"]]
    }
    stand_in = (ROOT / "tests/engines/misbehave.py").read_text(encoding="utf-8")
    path = "/opt/bringup/lib/misbehave.py"
    entries[path] = {"path": path, "content": stand_in}
    units = [*logs["log_rotation_units"], *engine["engine_service_units"]]
    made.sh("rm -rf /root/bringup && mkdir /root/bringup")
    made.engine.run("cp", str(ROOT / "bringup/node"), f"{made.name}:/root/bringup/node")
    code = (
        "import sys, json; sys.path.insert(0, '/root'); from bringup.node import place, units;"
        "data = json.load(sys.stdin);"
        "changed = place.apply(data['entries'])['changed_paths']; units.apply(data['units'], changed)"
    )
    made.sh(
        f"python3 -c {shlex.quote(code)}", json.dumps({"entries": list(entries.values()), "units": units})
    )


def _filled(entry: Mapping[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in entry.items() if name != "program"}
    if "program" in entry:
        rest["content"] = (ROOT / "bringup/node" / entry["program"]).read_text(encoding="utf-8")
    if entry["path"].endswith("/services/words.json"):
        # The watchdog looks often here: a table must not take minutes.
        limits = {"watch_every_s": WATCH_S, "prefill_s": PREFILL_S, "stall_s": STALL_S}
        rest["content"] = json.dumps({**json.loads(entry["content"]), **limits})
    return rest


def up(made: Node) -> None:
    """Start the server; systemd says yes only after a real token."""
    made.sh("systemctl start bringup-words")


def fails(made: Node, text: str) -> str:
    """Start it, and find the reason that was kept; "not ..." when it is another one."""
    made.sh("systemctl start bringup-words || true")
    why = str(made.started()["why"])
    return why if text in why else f"not refused as it must be: {why}"


def comes_back(made: Node, act: Callable[[], Any], limit_s: float) -> str:
    """Do something to a running server; another process must answer within the limit."""
    old = made.show("MainPID")
    act()
    made.until(
        lambda: made.show("MainPID") not in (old, "0") and made.show("ActiveState") == "active", limit_s
    )
    return "another process serves"


def well(made: Node) -> str:
    """It serves."""
    up(made)
    return "serves" if made.answers() else "not answering"


def swept(made: Node) -> str:
    """What a run by hand and a killed build left is gone with the start, what is in use or another's is not."""
    made.sh(
        f"install -D -o bringup-words /dev/null {LOCK}; cd /dev/shm;"
        " install -o bringup-words /dev/null by-hand; install -o bringup-words /dev/null in-use;"
        " touch of-root; setsid tail -f /dev/shm/in-use > /dev/null 2>&1 & echo $! > /root/tail"
    )
    made.until(lambda: made.sh("readlink /proc/$(cat /root/tail)/fd/3 || true").endswith("in-use"), 10)
    up(made)
    left = made.sh(f"ls /dev/shm {LOCK} 2>/dev/null || true").split()
    made.sh("kill $(cat /root/tail); rm /dev/shm/of-root /dev/shm/in-use")
    return (
        "both gone, serves"
        if left == ["/dev/shm:", "in-use", "of-root"]
        else f"not swept as it must be: {left}"
    )


def no_cache(made: Node) -> str:
    """Refused by its name, not by systemd's."""
    made.sh(f"mv {CACHE} /root/cache")
    seen = fails(made, f"{CACHE}: No such file")
    made.sh(f"systemctl stop bringup-words; mv /root/cache {CACHE}")
    return seen


def slow_start(made: Node) -> str:
    """Not active before it answers."""
    made.sh("systemctl start --no-block bringup-words")
    time.sleep(2)
    early = made.show("ActiveState")
    made.until(lambda: made.show("ActiveState") == "active", 20)
    return f"{early}, then active" if early == "activating" and made.answers() else f"not right: {early}"


def crash_loop(made: Node) -> str:
    """Given up after five starts, with the engine's last words."""
    made.sh("systemctl start --no-block bringup-words")
    made.until(lambda: made.show("ActiveState") == "failed" and made.show("Result") == "exit-code", 60)
    why, tries = str(made.started()["why"]), made.show("NRestarts")
    return (
        f"failed after {tries} restarts: {why}"
        if "illegal memory access" in why
        else f"not its last words: {why}"
    )


def exits_0(made: Node) -> str:
    """It ends by itself with 0: started again, and kept as a crash."""
    up(made)
    seen = comes_back(made, lambda: None, 25)
    kept = made.sh("ls /var/lib/bringup/crashes/bringup-words | wc -l")
    return f"{seen}, {kept} crash kept" if int(kept) >= 1 else "not kept as a crash"


def leaks(made: Node) -> str:
    """Killed hard; neither its child nor its memory stays."""
    up(made)
    child = made.sh("pgrep -u bringup-words -x stand-in | wc -l")
    seen = comes_back(made, lambda: made.sh("kill -9 $(systemctl show -P MainPID bringup-words)"), 15)
    now = made.sh("pgrep -u bringup-words -x stand-in | wc -l")
    return (
        f"{seen}, its child too"
        if (child, now) == ("2", "2")
        else f"not cleared: {child} and then {now} processes"
    )


def ignores_term(made: Node) -> str:
    """Stopped all the same."""
    up(made)
    made.sh("systemctl stop bringup-words")
    return (
        "killed after the stop limit" if made.show("ActiveState") in ("failed", "inactive") else "not stopped"
    )


def hangs(made: Node, limit_s: float = HANG_S) -> str:
    """The watchdog finds it, though requests of others are in flight."""
    up(made)
    seen = comes_back(made, lambda: [made.answers() for _ in range(6)], limit_s + 15)
    said = made.sh("journalctl -u bringup-watch-words --no-pager -o cat | grep -c 'hangs and is killed'")
    return f"{seen}, killed by the watchdog" if int(said) >= 1 else "not found by the watchdog"


def long_prefill(made: Node) -> str:
    """The watchdog waits."""
    up(made)
    old = made.show("MainPID")
    answered = made.answers("a-very-long-prompt", 30)
    same = made.show("MainPID") == old
    return "answered by the same process" if answered and same else f"not left alone: {answered}, {same}"


def floods(made: Node) -> str:
    """Every line is there once, and it answers meanwhile."""
    up(made)
    count = "cat /var/log/bringup/words/engine-*.log | grep -c '^flood ' || true"
    made.until(lambda: made.sh(count) == "20000", 30)
    lines = made.sh("cat /var/log/bringup/words/engine-*.log | grep '^flood ' | sort -u | wc -l")
    return "20000 lines, each once" if lines == "20000" and made.answers() else f"not all lines: {lines}"


CASES: Mapping[str, tuple[str, float, Callable[[Node], str]]] = {
    "well": ("serves", 15, well),
    "well/after-a-crash": ("what a run by hand and a killed build left is swept", 20, swept),
    "well/no-cache": ("refused by name", 15, no_cache),
    "slow-start": ("active only with a token", 25, slow_start),
    "wrong-name": ("refused, both names said", 30, lambda made: fails(made, "it serves another, not words")),
    "lies": (
        "refused: no token in time",
        35,
        lambda made: fails(made, f"no real token within {START_LIMIT_S} s"),
    ),
    "crash-loop": ("given up after 5 starts, with the engine's last words", 60, crash_loop),
    "exits-0": ("started again, end of the log kept", 40, exits_0),
    "leaks-shm": ("started again, child and memory gone", 30, leaks),
    "ignores-term": ("stopped after the stop limit", 25, ignores_term),
    "hangs-after": ("found by the watchdog while others wait, started again", HANG_S + 30, hangs),
    "hangs-after/blind": (
        "the same, though no metric moves within a prefill",
        HANG_BLIND_S + 30,
        lambda made: hangs(made, HANG_BLIND_S),
    ),
    "long-prefill": ("left alone, though longer than a stall", 45, long_prefill),
    "long-prefill/blind": ("left alone", 45, long_prefill),
    "floods": ("no line lost or doubled, serves", 45, floods),
}


def left_behind(made: Node) -> str:
    """Stop everything, then look: processes of the server's user, shared memory, ports."""
    made.sh("systemctl stop bringup-watch-words bringup-words; systemctl reset-failed bringup-words || true")
    found = {
        "processes": made.sh("pgrep -u bringup-words -l || true"),
        "shared memory": made.sh("find /dev/shm -type f"),
        "ports": made.sh(f"ss -ltnH 'sport = :{PORT} or sport = :{PORT + 1}'"),
    }
    return "; ".join(f"{kind}: {' '.join(text.split())}" for kind, text in found.items() if text)


def try_one(made: Node, way: str) -> Row:
    """One row of the table."""
    must, limit_s, case = CASES[way]
    install(made, way)
    made.sh("rm -rf /var/lib/bringup/crashes/bringup-words /var/lib/bringup/services/words/*")
    began = time.monotonic()
    try:
        seen = case(made)
    except RuntimeError as error:
        seen = f"not as it must be: {error}"
    seconds = time.monotonic() - began
    return Row(way, must, limit_s, seen, seconds, left_behind(made))


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="tests.engines.table", description="misbehaving engines, and what comes of them"
    )
    parser.add_argument("ways", nargs="*", choices=[*CASES, []], help="only these (default: all)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(words)
    with node() as made:
        rows = []
        for way in options.ways or CASES:
            rows.append(try_one(made, way))
            print(f"{way}: {rows[-1].seen} ({rows[-1].seconds:.1f} s)", file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps({"schema_version": 1, "rows": [{**vars(row), "good": row.good} for row in rows]}))
    else:
        show(rows)
    return 0 if all(row.good for row in rows) else 1


def show(rows: list[Row]) -> None:
    """The table for people."""
    table = Table("stand-in", "must be", "within s", "was", "s", "left behind", "")
    for row in rows:
        cells = (row.way, row.must, f"{row.limit_s:g}", row.seen, f"{row.seconds:.1f}", row.left or "nothing")
        table.add_row(*cells, "ok" if row.good else "NOT OK")
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
