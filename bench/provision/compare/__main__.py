"""Provisioning beside its alternatives: the same end state on the same light hosts, measured in one go.

    python -m bench.provision.compare [--nodes 1,10] [--net fast,slow] [--with default,mitogen,pyinfra,bringup,floor]
                                      [--runs first,again,one] [--repeats 3] [--fresh | --report]

Linux, as root; needs mmdebstrap, iproute2 and (without netem) gcc. For each repeat the contenders take turns on fresh
hosts, in another order each time: a first run, a run that has nothing to change, one after a single value changed
(without `first` among --runs, everything is brought about before, not measured).
All must leave the same file systems (contents, owners, modes), or nothing is reported. Each run is a line of
`docs/measured/provision-compare.jsonl`; from all lines of the newest commit the tables and the plot of
`docs/performance.md` are written. Exit 1 when the comparison is void.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.provision.compare import contenders, report, tree
from bench.provision.compare.contenders import CannotRun, Contender, Field
from bench.provision.compare.hosts import CONTROLLER, MOST, NETS, NODES, Hosts
from bench.provision.compare.measure import Group, measured
from bringup import ROOT

RUNS = ("first", "again", "one")
FOLDER = ROOT / ".lab" / "compare"
LIMIT_S = 3600.0
SHOWN = 20


class Void(Exception):
    """Why the comparison says nothing."""


def rounds(options: argparse.Namespace) -> Iterator[tuple[int, str, int, Sequence[str]]]:
    """Hosts, network, repeat, and contenders in the order in which they take their turns."""
    dice = random.Random(options.seed)
    for net in options.net.split(","):
        for number in map(int, options.nodes.split(",")):
            for repeat in range(options.repeats):
                order = options.contenders.split(",")
                dice.shuffle(order)
                yield number, net, repeat, order


class Bench:
    """One session: its hosts and groups, and the lines that it adds."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.session = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.groups = (Group(CONTROLLER), Group(NODES))
        self.hosts = Hosts(FOLDER / "hosts", self.groups[1])
        self.trees: dict[tuple[int, str], tuple[str, dict[str, dict[str, str]]]] = {}
        self.cannot: dict[str, str] = {}

    def run(self) -> None:
        """All rounds. Raises Void."""
        field = Field(FOLDER, self.hosts, self.hosts.prepare())
        self.warm(field)
        for number, net, repeat, order in rounds(self.options):
            for name in order:
                if name in self.cannot:
                    continue
                try:
                    field.set(number, net)
                    field.contender(name)
                except CannotRun as why:
                    self.cannot[name] = str(why)
                    say(f"{name} cannot run here: {why}")
                    continue
                self.hosts.up(number)
                if "first" not in self.options.runs:
                    self.settle(field, name)
                for which in self.options.runs.split(","):
                    self.one(field, name, number, net, repeat, which)

    def warm(self, field: Field) -> None:
        """What an operator has done before in a checkout: looked at the plan, which is not measured."""
        field.set(1, "fast")
        ours = field.contender("bringup")
        words = [ours.words[0], "plan", *ours.words[2:]]
        subprocess.run(
            words,
            cwd=ours.folder,
            env=dict(ours.environment),
            stdout=subprocess.DEVNULL,
            timeout=LIMIT_S,
            check=True,
        )

    def settle(self, field: Field, name: str) -> None:
        """Brings everything about, not measured, where no first run is wanted: by the script, and by ours itself, which
        goes by what its own runs left."""
        one = field.contender(name if name == "bringup" else "floor")
        words = ["nsenter", f"--net=/var/run/netns/{CONTROLLER}", *one.words]
        subprocess.run(
            words,
            cwd=one.folder,
            env=dict(one.environment),
            stdout=subprocess.DEVNULL,
            timeout=LIMIT_S,
            check=True,
        )

    def one(self, field: Field, name: str, number: int, net: str, repeat: int, which: str) -> None:
        """One run, measured and checked, as a line."""
        # One that nobody has had before: a plan that was worked out once is read back.
        field.set(number, net, changed=repeat + 1 if which == "one" else 0)
        one = field.contender(name)
        controller = self.groups[0]
        # Whatever the run before left behind (connections that stay, sessions): every run connects anew.
        controller.kill()
        sample, code, said = measured(
            one.words,
            folder=one.folder,
            environment=one.environment,
            namespace=CONTROLLER,
            useful=contenders.USEFUL,
            groups=self.groups,
            limit_s=LIMIT_S,
        )
        controller.kill()
        (FOLDER / f"said-{name}-{which}.txt").write_text(said)
        changed = one.number_changed(said) - number * contenders.ALWAYS_SAID.get(name, 0)
        if code or bool(changed) != (which != "again"):
            raise Void(
                f"{name}, {which} run on {number} hosts: exit {code}, {changed} changed:\n{said[-3000:]}"
            )
        self.same(name, number, f"one {repeat}" if which == "one" else "first")
        row: dict[str, Any] = {
            "session": self.session,
            "commit": field.commit,
            "nodes": number,
            "net": net,
            "repeat": repeat,
            "contender": name,
            "run": which,
            **sample.row(),
            "load": round(os.getloadavg()[0], 2),
            **(played(one) if name == "bringup" else {}),
        }
        report.add(row)
        say(" ".join(f"{key}={value}" for key, value in row.items() if key not in ("session", "commit")))

    def same(self, name: str, number: int, state: str) -> None:
        """Every contender leaves the same trees. Raises Void with the paths that differ."""
        found = {
            host: tree.lines(self.hosts.uppers / host / "up", self.hosts.root)
            for host in self.hosts.names(number)
        }
        other, expected = self.trees.setdefault((number, state), (name, found))
        for host, lines in found.items():
            differing = sorted(set(lines.items()) ^ set(expected[host].items()))
            if differing:
                text = "\n".join(f"{path}: {now}" for path, now in differing[:SHOWN])
                raise Void(f"{host} is not the same after {name} ({state}) and after {other}:\n{text}")


def played(one: Contender) -> dict[str, Any]:
    """Of our own last run: the roles that were played, and seconds from the first to the last host in each."""
    record = json.loads(max((one.folder / "runs").glob("*/record.json")).read_text())
    roles: dict[str, list[tuple[float, float]]] = {}
    for host in record["hosts"].values():
        for role, row in host["roles"].items():
            if role != "play" and row["ok"]:
                roles.setdefault(role, []).append((row["begin_s"], row["end_s"]))
    spans = {
        role: round(max(end for _, end in rows) - min(begin for begin, _ in rows), 3)
        for role, rows in roles.items()
    }
    return {"roles": spans}


def say(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)


def machine() -> dict[str, Any]:
    """What the figures were made on."""
    names = ("ansible-core", "paramiko", "fabric")
    model = next(
        (line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
         if line.startswith("model name")), platform.machine(),
    )  # fmt: skip
    return {
        "cpus": os.cpu_count(),
        "cpu": model,
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version(),
        "versions": {name: version(name) for name in names},
    }


def main() -> int:
    """Measures and writes the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", default="1,10")
    parser.add_argument("--net", default="fast", help=f"of {', '.join(NETS)}")
    parser.add_argument("--with", dest="contenders", default=",".join(contenders.NAMES))
    parser.add_argument("--runs", default=",".join(RUNS))
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fresh", action="store_true", help="forget what was measured before")
    parser.add_argument("--report", action="store_true", help="only write the page again")
    options = parser.parse_args()
    if max(map(int, options.nodes.split(","))) > MOST:
        parser.error(f"--nodes: {MOST} at most")
    if options.report:
        report.write()
        return 0
    if options.fresh:
        report.forget()
    FOLDER.mkdir(parents=True, exist_ok=True)
    lock = (FOLDER / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        parser.error("another comparison runs in this checkout; wait for its end")
    bench = Bench(options)
    try:
        bench.run()
    except Void as why:
        say(f"The comparison is void: {why}")
        return 1
    finally:
        bench.hosts.close()
        for group in bench.groups:
            group.remove()
    report.about(machine(), bench.cannot)
    report.write()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
