"""Random changes behind our back: each must be found by `invoke drift` and put back by the next `invoke provision`.

    python -m bench.provision.mutations [--count 200] [--at-once 12] [--nodes 4] [--seed 1] [--raw FILE]
    python -m bench.provision.mutations --inventory INVENTORY ...           nodes of yours, which it changes

Without `--inventory` it boots nodes of the lab (bench-11 ...) of an inventory like the lab's, to which settings of the
system are added: limits, a cron file, quiet timers, and values in files that stand for the kernel's, which a container
cannot write.

What can be changed is read from the nodes' own seals, so everything that a role owns may be hit: content, owner, mode
and target of files, folders and links, what must not be there, units, servers, users, groups, kernel values, models,
environments, packages. A round changes things on two nodes and leaves the others alone. After each single change
`invoke drift` must name it, and nothing on nodes that were left alone: one look a change. Then `invoke provision` must
put all of them back, and another look finds nothing. Prints one line a change that was not found or not put back and
each false alarm, and a table of all; exit 1 when there was one. `--raw` gets a JSON line a change.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from bringup import ROOT, lab
from bringup.errors import Exit
from bringup.node import seal as node

INVOKE = Path(sys.executable).parent / "invoke"
RUN_LIMIT_S = 1800
BOUND = ("state", "mode", "uid", "gid", "target")
NODE_LIMIT_S = 120
LOOKS = 3
LOOK_AGAIN_S = 20
STRANGER = "nobody"
FIRST_NODE = 11
TOUCHED = 2
"""Nodes of a round that are changed."""

SLOW = ("tree",)
"""Kinds whose repair takes a server's stop and an environment's making: in every fourth round only."""

SETTINGS: Mapping[str, Any] = {
    "system_settings_values": [
        {"name": "demo.number", "path": "/srv/kernel/number", "value": "1"},
        {"name": "demo.choice", "path": "/srv/kernel/choice", "value": "madvise"},
    ],
    "system_settings_files": [
        {"path": "/etc/security/limits.d/60-bench.conf", "content": "* hard nofile 1048576\n"},
        {"path": "/etc/sysctl.d/60-bench.conf", "content": "vm.max_map_count = 262144\n"},
        {"path": "/etc/cron.d/bench", "content": "0 4 * * 0 root /bin/true\n"},
    ],
    "system_settings_timers": ["dpkg-db-backup.timer", "logrotate.timer"],
}
"""What a node with GPUs has of settings, in places that a container can write."""

KERNEL = "mkdir -p /srv/kernel && echo 0 >/srv/kernel/number && echo always >/srv/kernel/choice"
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


def bound(host: str) -> dict[str, dict[str, Any]]:
    """Thing -> what the seals of a node say of it that must be so again."""
    return {
        thing: {name: row[name] for name in BOUND if name in row}
        for seal in seals(host).values()
        for thing, row in seal["rows"].items()
    }


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
        "user": lambda: _of_user(row, name),
        "value": lambda: (
            {"another value": f"echo {_another(row['value'])} >{name}"} if "value" in row else {}
        ),
        "package": lambda: {
            "not held": f"apt-mark unhold {name}",
            "gone": f"dpkg --force-all --remove {name}",
        },
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


def _another(value: str) -> str:
    """A value that a kernel file could have instead."""
    return str(int(value) + 1) if value.isdigit() else "never"


def _of_user(row: Mapping[str, Any], name: str) -> dict[str, str]:
    if "shell" not in row:
        return {}
    return {"other shell": f"usermod --shell /bin/sh {name}", "other group": f"usermod --gid nogroup {name}"}


def _of_unit(row: Mapping[str, Any], name: str) -> dict[str, str]:
    if not row["on"]:
        return {"on again": f"systemctl enable --now {name}"}
    found = {}
    if row["enabled"] == "enabled":
        found = {"disabled": f"systemctl disable {name}", "masked": _masked(name)}
    if row.get("active"):
        found["stopped"] = f"systemctl stop {name}"
    return found


def _masked(name: str) -> str:
    """A unit whose file lies in /etc cannot be masked by systemctl: what people do then is put a link there."""
    return f"mv /etc/systemd/system/{name} /root/ && systemctl mask {name}"


def choose(hosts: Sequence[str], number: int, dice: random.Random, slow: bool) -> list[Mutation]:
    """So many changes of different things, each kind of thing as likely as the others; of slow kinds only if `slow`."""
    every: dict[str, list[Mutation]] = {}
    for host in hosts:
        for role, seal in seals(host).items():
            for thing, row in seal["rows"].items():
                for how, command in ways(row).items():
                    kind = f"{row['kind']} {row.get('state', '') if row['kind'] == 'path' else ''}".strip()
                    if slow or kind not in SLOW:
                        every.setdefault(kind, []).append(Mutation(host, role, thing, how, command))
    chosen: dict[tuple[str, str], Mutation] = {}
    while len(chosen) < number:
        one = dice.choice(every[dice.choice(sorted(every))])
        chosen.setdefault((one.host, one.thing), one)
    return list(chosen.values())


def look(inventory: str) -> dict[str, set[str]]:
    """Host -> things that differ from their seals. Raises SystemExit when a node could not be asked, three times."""
    for _ in range(LOOKS):
        code, data, said = invoke("drift", "--inventory", inventory)
        if code in (Exit.DONE, Exit.PENDING):
            return {row["host"]: {one["what"] for one in row["differs"]} for row in data["hosts"]}
        why = {row["host"]: row["why"] for row in data.get("hosts", ()) if row["why"]}
        print(f"drift ended with {code}: {why} {said[-1000:]}", file=sys.stderr, flush=True)
        time.sleep(LOOK_AGAIN_S)
    raise SystemExit("the nodes could not be asked")


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


@dataclass
class Story:
    """All that was done and seen."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    alarms: list[str] = field(default_factory=list)
    looks: int = 0
    quiet_looks: int = 0
    """Looks at a node that was not touched, and showed nothing."""

    def looked(self, before: Mapping[str, set[str]], untouched: Sequence[str]) -> None:
        """Counts a look; what an untouched node shows is a false alarm."""
        self.looks += 1
        for host in untouched:
            if before[host]:
                self.alarms.append(f"false alarm: {host}: {sorted(before[host])}")
            else:
                self.quiet_looks += 1

    @property
    def wrong(self) -> list[dict[str, Any]]:
        """Changes that were not found, or not put back."""
        return [row for row in self.rows if not (row["found"] and row["put_back"])]


def play(inventory: str, hosts: Sequence[str], chosen: Sequence[Mutation], number: int, story: Story) -> None:
    """One round: each change and a look after it, then a provision and a look."""
    untouched = sorted(set(hosts) - {one.host for one in chosen})
    rows = []
    before = {host: bound(host) for host in {one.host for one in chosen}}
    for one in chosen:
        on(one.host, one.command)
        seen = look(inventory)
        story.looked(seen, untouched)
        rows.append({"round": number, **asdict(one), "found": one.thing in seen[one.host], "put_back": False})
    begun = time.monotonic()
    provision(inventory)
    after = look(inventory)
    story.looked(after, untouched)
    now = {host: bound(host) for host in before}
    for row in rows:
        host, thing = row["host"], row["thing"]
        # Sealed as it was left by others would be no difference either.
        row["put_back"] = thing not in after[host] and now[host].get(thing) == before[host].get(thing)
        row["provision_s"] = round(time.monotonic() - begun, 1)
    story.rows += rows
    story.alarms += [
        f"differs after provisioning: {host}: {sorted(things)}" for host, things in after.items() if things
    ]


@contextlib.contextmanager
def site(number: int) -> Iterator[str]:
    """An inventory like the lab's, with so many nodes of its own and settings of the system; nodes go afterwards."""
    names = [f"bench-{one:02}" for one in range(FIRST_NODE, FIRST_NODE + number)]
    lab.up(names)
    try:
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "mutations"
            shutil.copytree(ROOT / "inventories" / "lab", made)
            hosts = yaml.safe_load((made / "hosts.yml").read_text())
            hosts["all"]["hosts"] = {name: {"ansible_host": lab.address(name)[0]} for name in names}
            (made / "hosts.yml").write_text(yaml.safe_dump(hosts))
            (made / "host_vars").mkdir(exist_ok=True)
            for name in names:
                (made / "host_vars" / f"{name}.yml").write_text(yaml.safe_dump(dict(SETTINGS)))
                on(name, KERNEL)
            yield str(made)
    finally:
        lab.down(names)


def main() -> int:
    """Plays rounds until so many changes were made, and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inventory", help="of nodes of the lab that may be changed")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=12)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--raw", type=Path, help="file to append a JSON line a change to")
    options = parser.parse_args()
    with contextlib.nullcontext(options.inventory) if options.inventory else site(options.nodes) as inventory:
        return run(inventory, options)


def run(inventory: str, options: argparse.Namespace) -> int:
    """All rounds on an inventory."""
    dice, story = random.Random(options.seed), Story()
    provision(inventory)
    hosts = sorted(look(inventory))
    begun, rounds = time.monotonic(), 0
    while len(story.rows) < options.count:
        rounds += 1
        number = min(options.at_once, options.count - len(story.rows))
        touched = dice.sample(hosts, min(TOUCHED, max(1, len(hosts) - 1)))
        before = len(story.rows)
        play(inventory, hosts, choose(touched, number, dice, rounds % 4 == 1), rounds, story)
        if options.raw:
            with options.raw.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in story.rows[before:])
        said = f"{len(story.rows)} changes, {len(story.wrong)} wrong, {len(story.alarms)} alarms, {story.looks} looks"
        print(f"round {rounds}: {said}, {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
        for row in (one for one in story.rows[before:] if one in story.wrong):
            print(row, flush=True)
    return told(story, rounds, time.monotonic() - begun, options.seed)


def told(story: Story, rounds: int, seconds: float, seed: int) -> int:
    """Prints what it came to; the exit code."""
    tally = Counter(f"{row['thing'].partition(' ')[0]}: {row['how']}" for row in story.rows)
    print("| changed behind our back | times |\n| --- | --- |")
    for what, times in sorted(tally.items()):
        print(f"| {what} | {times} |")
    for line in story.alarms:
        print(line)
    found = sum(row["found"] for row in story.rows)
    back = sum(row["put_back"] for row in story.rows)
    print(
        f"\n{len(story.rows)} changes in {rounds} rounds, {seconds:.0f} s, seed {seed}: {found} found, {back} put "
        f"back; {story.looks} looks, {story.quiet_looks} times a node that was not touched showed nothing, "
        f"{len(story.alarms)} alarms"
    )
    return 1 if story.wrong or story.alarms else 0


if __name__ == "__main__":
    raise SystemExit(main())
