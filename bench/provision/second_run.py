"""Seconds of a provision that has nothing to change, next to plain Ansible playing the same playbook.

    python -m bench.provision.second_run [--inventory lab] [--repeats 3]

The inventory is provisioned first. Then, interleaved and repeated, three ways of that second run are timed:
`invoke provision`, `ansible-playbook` with this project's ansible.cfg, and `ansible-playbook` with Ansible's
defaults (only the paths that the playbook cannot do without). The median of each is printed with its share of
the last one; every run must end well with nothing changed, or there is no figure.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bringup import ROOT

RUN_LIMIT_S = 1200
BIN = Path(sys.executable).parent

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


def timed(argv: Sequence[str], environment: Mapping[str, str]) -> float:
    """Wall seconds of one run. Raises SystemExit with its output when it failed."""
    begun = time.monotonic()
    done = subprocess.run(
        list(argv),
        cwd=ROOT,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=RUN_LIMIT_S,
        check=False,
    )
    seconds = time.monotonic() - begun
    if done.returncode:
        raise SystemExit(
            f"{' '.join(argv)} ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        )
    return seconds


def ways(inventory: str, plain: Path) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Name -> argv and environment of each way to play the same thing."""
    play = [str(BIN / "ansible-playbook"), "-i", f"inventories/{inventory}", "playbooks/provision.yml"]
    return {
        "invoke provision": ([str(BIN / "invoke"), "provision", "--inventory", inventory, "--json"], {}),
        "ansible-playbook, our ansible.cfg": (play, {}),
        "ansible-playbook, default settings": (play, {"ANSIBLE_CONFIG": str(plain)}),
    }


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inventory", default="lab")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "ansible.cfg"
        plain.write_text(NEEDED.format(root=ROOT))
        all_ways = ways(options.inventory, plain)
        timed(*all_ways["invoke provision"])
        seconds: dict[str, list[float]] = {name: [] for name in all_ways}
        for _ in range(options.repeats):
            for name, (argv, environment) in all_ways.items():
                seconds[name].append(timed(argv, environment))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    last = medians["ansible-playbook, default settings"]
    print(
        f"| second run of {options.inventory} | median s | all runs | of default |\n| --- | --- | --- | --- |"
    )
    for name, values in seconds.items():
        runs = ", ".join(f"{value:.1f}" for value in values)
        print(f"| {name} | {medians[name]:.1f} | {runs} | {medians[name] / last:.2f} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
