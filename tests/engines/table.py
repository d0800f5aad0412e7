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
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from bringup import ROOT, lab
from bringup.planned import HostPlan, Plan, Service
from bringup.rolevars import engine_service, log_rotation, scheduled_restart
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
FLOOD_LINES = 20_000
KEPT_LOGS = 2
STALL_S = 6
"""Less than the stand-in's long prefill takes: only its batches tell that from a hang."""
PROBES_S = 3 * (WATCH_S + PROBE_LIMIT_S) + 10
HANG_S = STALL_S + PROBES_S
HANG_BLIND_S = PREFILL_S + PROBES_S
BLIND = "hangs-after/blind", "long-prefill/blind"
"""The same stand-ins, of whose metrics no count of batches is known."""

HISTORY = "/var/lib/bringup/restarts/bringup-words.history.jsonl"
CACHE = "/var/cache/bringup/words"
LOCK = f"{CACHE}/.cache/torch_extensions/some/kernels/lock"


@dataclass(frozen=True)
class Case:
    """What must be seen of a stand-in within which time, how it is tried, and what its service has of its own."""

    must: str
    limit_s: float
    act: Callable[[Node], str]
    changes: Mapping[str, Any] = field(default_factory=dict)


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

    def restarts(self) -> list[dict[str, Any]]:
        """The history of restarts, refused ones too."""
        lines = self.sh(f"cat {HISTORY} 2>/dev/null || true").splitlines()
        return [json.loads(line) for line in lines]


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
    roles = (log_rotation, engine_service, scheduled_restart)
    given = {name: value for role in roles for name, value in role.variables(host, plan).items()}
    files, units = (
        [item for name, value in given.items() if name.endswith(kind) for item in value]
        for kind in ("_files", "_units")
    )
    entries = {entry["path"]: _filled(entry) for entry in files}
    stand_in = (ROOT / "tests/engines/misbehave.py").read_text(encoding="utf-8")
    path = "/opt/bringup/lib/misbehave.py"
    entries[path] = {"path": path, "content": stand_in}
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


def rotate(made: Node) -> None:
    """Cut the log, and wait until another file is written."""
    newest = "readlink /var/log/bringup/words/engine.log"
    old = made.sh(f"{newest}; echo another line > /run/bringup/log/words; systemctl reload bringup-log-words")
    made.until(lambda: made.sh(newest) != old, 20)


def exits_0(made: Node) -> str:
    """It ends by itself with 0: started again, and kept as a crash, also when its log has been cut since."""
    up(made)
    seen = comes_back(made, lambda: None, 25)
    for _ in range(KEPT_LOGS + 2):
        rotate(made)
    kept = made.sh("python3 /opt/bringup/lib/trail.py words --show")
    return (
        f"{seen}, end of its log kept" if "stand-in: model loaded" in kept else f"not kept as a crash: {kept}"
    )


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


def ends_its_worker(made: Node) -> str:
    """Only the server is told to end: its worker, told too, would count as crashed."""
    up(made)
    both = made.sh("pgrep -u bringup-words -x stand-in | wc -l")
    made.sh("systemctl stop bringup-words")
    how = made.show("ActiveState"), made.show("Result"), both
    return "ended by itself, with success" if how == ("inactive", "success", "2") else f"not so: {how}"


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


def limited(made: Node) -> str:
    """No more lines than allowed, and each of the rest is counted."""
    up(made)
    log = "zcat -f /var/log/bringup/words/engine-*"
    ended = f"{log} | grep -q 'lines were dropped' && {log} | grep -c '^flood 19999$' || true"
    made.until(lambda: made.sh(ended) in ("0", "1"), 30)
    time.sleep(2)
    written = int(made.sh(f"{log} | grep -c '^flood '"))
    dropped = sum(
        map(int, made.sh(f"{log} | sed -n 's/^bringup: \\([0-9]*\\) lines were dropped.*/\\1/p'").split())
    )
    whole = written < FLOOD_LINES <= written + dropped
    return (
        f"{written} written, {dropped} counted"
        if whole and made.answers()
        else f"not all: {written}, {dropped}"
    )


def drifts(made: Node) -> str:
    """Restarted once, with the figures as its reason; then left alone, which is said."""
    up(made)
    made.until(lambda: any(row["outcome"] == "done" for row in made.restarts()), 60)
    reason = str(made.restarts()[-1]["reason"])
    said = "journalctl -u bringup-watch-words --no-pager -o cat | grep -c 'is left alone' || true"
    made.until(lambda: made.sh(said) != "0", 60)
    done = [row["outcome"] for row in made.restarts()]
    return (
        reason
        if done == ["done"] and reason.startswith("drift: its memory")
        else f"not once: {done}, {reason}"
    )


def refused(made: Node, before: str, text: str) -> str:
    """A restart by schedule does nothing and says why."""
    up(made)
    made.sh(before)
    old = made.show("MainPID"), made.show("ActiveState")
    made.sh("systemctl start bringup-restart-words || true")
    last = made.restarts()[-1]
    same = (made.show("MainPID"), made.show("ActiveState")) == old
    good = same and last["outcome"] == "refused" and text in last["why"]
    return f"refused: {last['why']}" if good else f"not refused as it must be: {same}, {last}"


def begin_to_wait(made: Node) -> None:
    """A server with a long prompt in flight (its answer's status goes to /root/code), whose restart waits for that."""
    up(made)
    body = json.dumps({"model": "words", "messages": [{"role": "user", "content": "a-very-long-prompt"}]})
    ask = f"curl -s -m 60 -o /dev/null -w '%{{http_code}}' -d {shlex.quote(body)}"
    made.sh(f"rm -f /root/code; {ask} http://127.0.0.1:{PORT}/v1/chat/completions > /root/code 2>/dev/null &")
    running = f"curl -s http://127.0.0.1:{PORT}/metrics | grep running"
    made.until(lambda: made.sh(running) == "standin:running 1", 10)
    made.sh("systemctl start --no-block bringup-restart-words")
    made.until(lambda: "a quiet moment" in made.sh(WAITS), 10)


def busy(made: Node) -> str:
    """It waits for a quiet moment, not for ever, and then for the request in flight."""
    begin_to_wait(made)
    old = made.show("MainPID")
    made.until(lambda: "requests in flight" in made.sh(WAITS), 20)
    made.until(lambda: bool(made.restarts()), 40)
    last, code = made.restarts()[-1], made.sh("cat /root/code")
    new = made.show("MainPID") not in (old, "0")
    good = new and code == "200" and last["cut_requests"] == 0 and last["refused_new"]
    waited = ", ".join(f"{one['seconds']:.0f} s for {one['for']}" for one in last["waits"])
    return f"waited {waited}; none cut" if good else f"not as it must be: {new}, {code}, {last}"


def paused(made: Node) -> str:
    """Whoever stops the schedule stops the restart that waits, and that is no failure."""
    begin_to_wait(made)
    old = made.show("MainPID")
    made.sh(f"systemctl stop {TIMER}")
    unit = "bringup-restart-words.service"
    made.until(lambda: made.show("ActiveState", unit) == "inactive", 10)
    last = made.restarts()[-1]
    good = made.show("MainPID") == old and last["outcome"] == "refused" and not made.sh(WAITS)
    return f"refused: {last['why']}" if good else f"not ended as it must be: {last}"


def resumed(made: Node) -> str:
    """What came up while the schedule was stopped is not made up for when it goes on."""
    made.sh(f"systemctl stop {TIMER}")
    up(made)
    known, minute = made.restarts(), made.sh("date +%M")
    made.until(lambda: made.sh("date +%M") != minute, 70)
    made.sh(f"systemctl start {TIMER}")
    time.sleep(RESUMED_S)
    missed = (
        made.show("ActiveState", "bringup-restart-words.service") != "inactive" or made.restarts() != known
    )
    return "left alone" if not missed else f"not left alone: {made.restarts()[-1:]}"


TIMER = "bringup-restart-words.timer"
RESUMED_S = 5
"""Long enough for a restart to begin, and over before the next minute."""

WAITS = "cat /run/bringup/restarting/words.json 2>/dev/null || true"
ALWAYS = ["00:00-24:00"]
CASES: Mapping[str, Case] = {
    "well": Case("serves", 15, well),
    "well/after-a-crash": Case("what a run by hand and a killed build left is swept", 20, swept),
    "well/no-cache": Case("refused by name", 15, no_cache),
    "well/stopped": Case(
        "stays stopped when its schedule comes",
        15,
        lambda made: refused(made, "systemctl stop bringup-words", "it is inactive"),
    ),
    "well/not-now": Case(
        "not restarted outside of its hours",
        15,
        lambda made: refused(made, "true", "not within a week"),
        {"restart": {"calendar": "daily", "never": ALWAYS, "hours_wait_s": 60}},
    ),
    "well/resumed": Case(
        "not restarted for a time that came while its schedule was stopped",
        90,
        resumed,
        {"restart": {"calendar": "*-*-* *:*:00"}},
    ),
    "slow-start": Case("active only with a token", 25, slow_start),
    "wrong-name": Case(
        "refused, both names said", 30, lambda made: fails(made, "it serves another, not words")
    ),
    "lies": Case(
        "refused: no token in time", 35, lambda made: fails(made, f"no real token within {START_LIMIT_S} s")
    ),
    "crash-loop": Case("given up after 5 starts, with the engine's last words", 60, crash_loop),
    "exits-0": Case(
        "started again, end of the log kept, also when it was cut since",
        45,
        exits_0,
        {"logs": {"keep": KEPT_LOGS}},
    ),
    "leaks-shm": Case("started again, child and memory gone", 30, leaks),
    "ignores-term": Case("stopped after the stop limit", 25, ignores_term),
    "has-a-worker": Case("stopped in order, worker and all", 15, ends_its_worker),
    "hangs-after": Case("found by the watchdog while others wait, started again", HANG_S + 30, hangs),
    "hangs-after/blind": Case(
        "the same, though no metric moves within a prefill",
        HANG_BLIND_S + 30,
        lambda made: hangs(made, HANG_BLIND_S),
    ),
    "long-prefill": Case("left alone, though longer than a stall", 45, long_prefill),
    "long-prefill/blind": Case("left alone", 45, long_prefill),
    "long-prefill/restart": Case(
        "restarted after a limited wait, its request answered first",
        60,
        busy,
        {"restart": {"calendar": "daily", "postpone_s": 3, "drain_s": 30}},
    ),
    "long-prefill/paused": Case(
        "its restart, which waits, ends with its timer",
        45,
        paused,
        {"restart": {"calendar": "daily", "postpone_s": 60}},
    ),
    "floods": Case("no line lost or doubled, serves", 45, floods),
    "floods/limited": Case(
        "as many lines as allowed, the rest counted", 45, limited, {"logs": {"lines_per_s": 100}}
    ),
    "grows": Case(
        "restarted once for its drift, then left alone",
        90,
        drifts,
        {"restart": {"drift": {"memory_ratio": 1.5, "for_s": 2}}},
    ),
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
    case = CASES[way]
    # Each begins with nothing of the one before it.
    kept = "/var/lib/bringup/crashes /var/lib/bringup/restarts /var/lib/bringup/services/words /var/log/bringup/words"
    made.sh(
        "systemctl stop bringup-log-words.socket bringup-log-words 2>/dev/null;"
        f" find {kept} -type f -delete 2>/dev/null || true"
    )
    install(made, way, **case.changes)
    began = time.monotonic()
    try:
        seen = case.act(made)
    except RuntimeError as error:
        seen = f"not as it must be: {error}"
    seconds = time.monotonic() - began
    return Row(way, case.must, case.limit_s, seen, seconds, left_behind(made))


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
