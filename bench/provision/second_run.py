"""Seconds of a provision that has nothing, or one thing, to change, next to plain Ansible playing the same playbook.

    python -m bench.provision.second_run [--nodes 2] [--repeats 3]

Fresh nodes of the lab (bench-01, bench-02, ...) are provisioned first. Then, interleaved and repeated, ways of the
second run are timed: `invoke provision` (which looks at the seals and asks each server for a completion), the same
with `--full`, `invoke drift`, one value changed in the inventory, `ansible-playbook` with this project's ansible.cfg,
and `ansible-playbook` with Ansible's defaults (only the paths that the playbook cannot do without). Printed are the
medians of wall seconds and of the controller's CPU seconds, and the share of the last row; every run must end well
and, where nothing was changed in the inventory, with nothing changed, or there is no figure.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from bringup import ROOT, lab

RUN_LIMIT_S = 3600
BIN = Path(sys.executable).parent
PORT = 7767

NEEDED = """[defaults]
inventory = {root}/inventories
roles_path = {root}/roles
library = {root}/plugins/modules
module_utils = {root}/plugins/module_utils
action_plugins = {root}/plugins/action
filter_plugins = {root}/plugins/filter
inventory_plugins = {root}/plugins/inventory

[inventory]
enable_plugins = plan, host_list, yaml, ini
"""


@dataclass(frozen=True)
class Way:
    """One way to do it: command line, what is added to the environment, and the intent to write before."""

    argv: Sequence[str]
    environment: Mapping[str, str]
    intent: Mapping[str, object]


def timed(way: Way) -> tuple[float, float]:
    """Wall seconds and CPU seconds of one run with its processes. Raises SystemExit with its output when it failed."""
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(
        list(way.argv),
        cwd=ROOT,
        env={**os.environ, **way.environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=RUN_LIMIT_S,
        check=False,
    )
    seconds, after = time.monotonic() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(way.argv)} ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        )
    check(way, done.stdout)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def check(way: Way, said: str) -> None:
    """Raises SystemExit where a run was not the one that is measured: something was changed that should not be."""
    if "provision" not in way.argv:
        return
    roles = {role for host in json.loads(said)["hosts"].values() for role in host["roles"]} - {"play"}
    changed = sum(host["changed"] for host in json.loads(said)["hosts"].values())
    if way.intent:
        wrong = roles != {"scheduled_restart"} or not changed
    else:
        wrong = bool(changed) or bool(roles) != ("--full" in way.argv)
    if wrong:
        raise SystemExit(f"{' '.join(way.argv)}: {changed} changed, played {sorted(roles)}")


def site(folder: Path, number: int) -> Path:
    """An inventory like the lab's with nodes of its own, which are up when this returns."""
    names = [f"bench-{one:02}" for one in range(1, number + 1)]
    lab.up(names)
    made = folder / "bench"
    made.mkdir()
    for path in (ROOT / "inventories" / "lab").rglob("*"):
        target = made / path.relative_to(ROOT / "inventories" / "lab")
        target.mkdir(exist_ok=True) if path.is_dir() else target.write_bytes(path.read_bytes())
    hosts = yaml.safe_load((made / "hosts.yml").read_text())
    hosts["all"]["hosts"] = {name: {"ansible_host": lab.address(name)[0]} for name in names}
    (made / "hosts.yml").write_text(yaml.safe_dump(hosts))
    return made


def ways(inventory: Path, plain: Path) -> dict[str, Way]:
    """Name -> each way to play the same thing."""
    invoke = [str(BIN / "invoke"), "provision", "--inventory", str(inventory), "--json"]
    play = [str(BIN / "ansible-playbook"), "-i", str(inventory), "playbooks/provision.yml"]
    look = [str(BIN / "invoke"), "drift", "--inventory", str(inventory), "--json"]
    return {
        "invoke drift": Way(look, {}, {}),
        "invoke provision": Way(invoke, {}, {}),
        "invoke provision, one value changed": Way(invoke, {}, {"scheduled_restart_port": PORT}),
        "invoke provision, and changed back": Way(invoke, {}, {"scheduled_restart_port": PORT - 1}),
        "invoke provision --full": Way([*invoke, "--full"], {}, {}),
        "ansible-playbook, our ansible.cfg": Way(play, {}, {}),
        "ansible-playbook, default settings": Way(play, {"ANSIBLE_CONFIG": str(plain)}, {}),
    }


def measure(inventory: Path, plain: Path, repeats: int) -> dict[str, list[tuple[float, float]]]:
    """Name -> wall and CPU seconds of each run, in the order in which they were made."""
    intent = inventory / "group_vars" / "all.yml"
    text = intent.read_text()
    all_ways = ways(inventory, plain)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in all_ways}
    for _ in range(repeats):
        for name, way in all_ways.items():
            if way.intent:
                intent.write_text(yaml.safe_dump({**yaml.safe_load(text), **way.intent}))
            elif name.startswith("invoke"):
                # By itself ansible-playbook makes no seals: they are made again, and that is not timed.
                settle(all_ways["invoke provision"], intent)
            found[name].append(timed(way))
            print(f"{name}: {found[name][-1][0]:.1f} s", file=sys.stderr, flush=True)
    return found


def settle(way: Way, intent: Path) -> None:
    """Brings the nodes to the intent as it is written now. Raises SystemExit when that fails."""
    done = subprocess.run(
        list(way.argv), cwd=ROOT, capture_output=True, text=True, timeout=RUN_LIMIT_S, check=False
    )
    if done.returncode:
        raise SystemExit(f"{intent} cannot be brought about:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--keep", action="store_true", help="leave the nodes up")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "ansible.cfg"
        plain.write_text(NEEDED.format(root=ROOT))
        inventory = site(Path(folder), options.nodes)
        try:
            found = measure(inventory, plain, options.repeats)
        finally:
            if not options.keep:
                lab.down([f"bench-{one:02}" for one in range(1, options.nodes + 1)])
    walls = {name: statistics.median(wall for wall, _ in rows) for name, rows in found.items()}
    cpus = {name: statistics.median(cpu for _, cpu in rows) for name, rows in found.items()}
    last = list(found)[-1]
    print(
        f"| second run, {options.nodes} nodes | wall s | all runs | of default | controller CPU s | of default |\n"
        "| --- | --- | --- | --- | --- | --- |"
    )
    for name, rows in found.items():
        runs = ", ".join(f"{wall:.1f}" for wall, _ in rows)
        print(
            f"| {name} | {walls[name]:.1f} | {runs} | {walls[name] / walls[last]:.3f} "
            f"| {cpus[name]:.1f} | {cpus[name] / cpus[last]:.3f} |"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
