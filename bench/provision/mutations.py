"""Random changes behind our back: each must be found by `invoke drift` and put back by the next `invoke provision`.

    python -m bench.provision.mutations [--inventory lab] [--count 200] [--at-once 8] [--seed 1]

What can be changed is read from the nodes' own seals, so everything that a role owns may be hit: content, owner, mode
and target of files, folders and links, what must not be there, units, servers, users, models, environments. Each round
changes some things at once on random nodes (containers of the lab, entered from outside), looks, provisions and
looks again. Nodes that were not touched in a round must have nothing to show. Prints one line a mutation that was
not found or not put back, and a table of all; exit 1 when there was one, or a false alarm.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bringup import ROOT, lab
from bringup.errors import Exit
from bringup.node import seal as node

INVOKE = Path(sys.executable).parent / "invoke"
RUN_LIMIT_S = 1800
NODE_LIMIT_S = 120
STRANGER = "nobody"
STRAY = {"name": "stray", "unit": "bringup-stray", "schema_version": 1}


@dataclass(frozen=True)
class Mutation:
    """One change: on which node, of what (`kind name` as its seal has it), how it is called, and the shell command."""

    host: str
    role: str
    thing: str
    how: str
    command: str


def on(host: str, command: str) -> str:
    """What a command prints on a node, as root from outside. Raises SystemExit when it fails."""
    engine = lab.find_engine()
    if engine is None:
        raise SystemExit("the lab's engine does not run")
    done = engine.tries("exec", host, "sh", "-c", command, limit=NODE_LIMIT_S)
    if done.returncode:
        raise SystemExit(f"{host}: {command}: {done.stdout}{done.stderr}")
    return done.stdout


def invoke(*words: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, JSON and everything else that a command said."""
    done = subprocess.run(
        [str(INVOKE), *words, "--json"],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=RUN_LIMIT_S,
        check=False,
    )
    try:
        return done.returncode, json.loads(done.stdout), done.stderr
    except ValueError:
        return done.returncode, {}, done.stdout + done.stderr


def seals(host: str) -> dict[str, dict[str, Any]]:
    """Role -> its seal, from the node."""
    text = on(host, "cd /var/lib/bringup/seals && for f in *.json; do cat $f; echo; done")
    found = [json.loads(line) for line in text.splitlines() if line]
    return {seal["role"]: seal for seal in found}


def ways(row: Mapping[str, Any]) -> dict[str, str]:
    """How a thing can be changed: what it is called -> the command. Nothing for what was only looked at, or is of
    others."""
    if row.get("basis") or row.get(node.OTHERS):
        return {}
    name = shlex.quote(str(row["name"]))
    return {
        "path": lambda: _of_path(row, name),
        "unit": lambda: _of_unit(row, name),
        "server": lambda: {"stopped": f"systemctl stop {name}"},
        "user": lambda: {"other shell": f"usermod --shell /bin/sh {name}"} if "shell" in row else {},
        "listing": lambda: {
            "a server too many": f"echo {shlex.quote(json.dumps(STRAY))} >{row['name'].replace('*', 'stray')}"
        },
        "tree": lambda: {
            "other content": f"echo '# by hand' >>$(find {name} -name '*.py' -path '*site-packages*' | shuf -n 1)",
            "file gone": f"rm $(find {name} -name '*.py' -path '*site-packages*' | shuf -n 1)",
            "file too many": f"touch {name}/bin/by-hand",
        },
        "model": lambda: {
            "other content": f"f=$(find {name} -type f ! -path '*/.bringup/*' | shuf -n 1); chmod u+w $f; echo x >>$f",
            "file gone": f"rm $(find {name} -type f ! -path '*/.bringup/*' | shuf -n 1)",
            "no record": f"rm {name}/.bringup/ready.json",
        },
    }.get(str(row["kind"]), dict)()


def _of_path(row: Mapping[str, Any], name: str) -> dict[str, str]:
    rights = {"other owner": f"chown {STRANGER} {name}", "other group": f"chgrp nogroup {name}"}
    if row["state"] == "absent":
        return {"there again": f"mkdir -p $(dirname {name}) && echo 'by hand' >{name}"}
    if row["state"] == "link":
        return {"other target": f"ln -sfn /elsewhere {name}", "gone": f"rm {name}"}
    if row["state"] == "directory":
        return {**rights, "other mode": f"chmod 0701 {name}"}
    return {
        **rights,
        "other mode": f"chmod 0606 {name}",
        "other content": f"echo '# by hand' >>{name}",
        "empty": f": >{name}",
        "gone": f"rm {name}",
        "a link": f"mv {name} {name}.aside && ln -s {name}.aside {name}",
    }


def _of_unit(row: Mapping[str, Any], name: str) -> dict[str, str]:
    found = {"disabled": f"systemctl disable {name}"} if row["enabled"] == "enabled" else {}
    if row.get("active"):
        found["stopped"] = f"systemctl stop {name}"
    return found


def choose(hosts: Sequence[str], number: int, dice: random.Random) -> list[Mutation]:
    """So many changes of different things, each kind of thing as likely as the others."""
    every: dict[str, list[Mutation]] = {}
    for host in hosts:
        for role, seal in seals(host).items():
            for thing, row in seal["rows"].items():
                for how, command in ways(row).items():
                    kind = f"{row['kind']} {row.get('state', '') if row['kind'] == 'path' else ''}".strip()
                    every.setdefault(kind, []).append(Mutation(host, role, thing, how, command))
    chosen: dict[tuple[str, str], Mutation] = {}
    while len(chosen) < number:
        one = dice.choice(every[dice.choice(sorted(every))])
        chosen.setdefault((one.host, one.thing), one)
    return list(chosen.values())


def look(inventory: str) -> dict[str, set[str]]:
    """Host -> things that differ from their seals. Raises SystemExit when a node could not be asked."""
    code, data, said = invoke("drift", "--inventory", inventory)
    if code not in (Exit.DONE, Exit.PENDING):
        raise SystemExit(f"drift ended with {code}: {said}")
    return {row["host"]: {one["what"] for one in row["differs"]} for row in data["hosts"]}


def provision(inventory: str) -> None:
    """Provisions; where an environment is damaged under its server, as the message says: stops it first."""
    code, data, said = invoke("provision", "--inventory", inventory)
    if code == Exit.FAILED and "Stop their service" in json.dumps(data["failures"]):
        invoke("run", "stop-servers", "--inventory", inventory, "--yes")
        code, data, said = invoke("provision", "--inventory", inventory)
    if code != Exit.DONE:
        raise SystemExit(
            f"provision ended with {code}: {json.dumps(data.get('failures'))[:2000]} {said[-2000:]}"
        )


def play(
    inventory: str, hosts: Sequence[str], number: int, dice: random.Random, tally: Counter[str]
) -> list[str]:
    """One round; what went wrong, a line each."""
    chosen = choose(hosts, number, dice)
    for one in chosen:
        on(one.host, one.command)
    before = look(inventory)
    wrong = [f"not found: {one}" for one in chosen if one.thing not in before[one.host]]
    touched = {one.host for one in chosen}
    alarms = {host: things for host, things in before.items() if things and host not in touched}
    wrong += [f"false alarm: {host}: {sorted(things)}" for host, things in alarms.items()]
    provision(inventory)
    after = look(inventory)
    wrong += [f"not put back: {one}" for one in chosen if one.thing in after[one.host]]
    wrong += [
        f"differs after provisioning: {host}: {sorted(things)}" for host, things in after.items() if things
    ]
    tally.update(f"{one.thing.partition(' ')[0]}: {one.how}" for one in chosen)
    return wrong


def main() -> int:
    """Plays rounds until so many changes were made, and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inventory", default="lab")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    dice, tally, wrong = random.Random(options.seed), Counter[str](), list[str]()
    provision(options.inventory)
    hosts = sorted(look(options.inventory))
    begun, rounds = time.monotonic(), 0
    while tally.total() < options.count:
        rounds += 1
        number = min(options.at_once, options.count - tally.total())
        # Every other round leaves a node alone, which must not raise an alarm.
        some = [dice.choice(hosts)] if rounds % 2 else hosts
        found = play(options.inventory, some, number, dice, tally)
        wrong += found
        print(f"round {rounds}: {tally.total()} changes, {len(wrong)} wrong", file=sys.stderr, flush=True)
        for line in found:
            print(line, flush=True)
    print("| changed behind our back | times |\n| --- | --- |")
    for what, times in sorted(tally.items()):
        print(f"| {what} | {times} |")
    seconds = time.monotonic() - begun
    print(
        f"\n{tally.total()} changes in {rounds} rounds, {seconds:.0f} s, seed {options.seed}: {len(wrong)} wrong"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
