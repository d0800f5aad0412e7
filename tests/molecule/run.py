"""Runs the molecule scenarios of the roles, several at a time, each with its own log.

python tests/molecule/run.py                          all of them, `molecule test`
python tests/molecule/run.py engine_service           one role; ROLE/SCENARIO for one scenario
python tests/molecule/run.py engine_service -c converge     another molecule command, the node is kept
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from bringup import ROOT, lab
from bringup.errors import BringupError

CONFIG = ROOT / ".config" / "molecule" / "config.yml"
SECONDS = ROOT / "tests" / "molecule" / "seconds.yml"
LOGS = ROOT / ".cache" / "molecule"
AT_ONCE = 2
SCENARIO_LIMIT_S = 2400
"""Seconds; a scenario of half a minute took 1204 on a machine with ten times more to do than it could."""

LOG_TAIL_LINES = 60
REHEARSED = [True, False, False, True]
"""Plays of converge.yml in a scenario's test: is it check mode?"""

LIED = 125


@dataclass(frozen=True)
class Scenario:
    """One scenario of one role, in one checkout."""

    role: str
    name: str
    checkout: Path = ROOT

    @property
    def title(self) -> str:
        """What it is called in messages and on the command line."""
        return f"{self.role}/{self.name}"

    @property
    def files(self) -> str:
        """What the names of its files begin with: no other scenario's of this checkout."""
        return f"molecule-{self.role}-{self.name}".replace("_", "-")

    @property
    def node(self) -> str:
        """Its container: a valid host name, no other scenario's and no other checkout's with the same engine."""
        return f"{self.files}-{hashlib.sha256(os.fsencode(self.checkout)).hexdigest()[:8]}"


@dataclass(frozen=True)
class Result:
    """How a scenario ended: molecule's exit code (124: over its limit) and the seconds it took."""

    scenario: Scenario
    code: int
    seconds: float
    log: Path


def find(roles: Path) -> list[Scenario]:
    """Every scenario under roles/*/molecule/*."""
    return [
        Scenario(path.parents[2].name, path.parent.name)
        for path in sorted(roles.glob("*/molecule/*/molecule.yml"))
    ]


def select(scenarios: Sequence[Scenario], words: Sequence[str]) -> list[Scenario]:
    """The scenarios named by ROLE or ROLE/SCENARIO, all without words. ValueError: no such one."""
    if not words:
        return list(scenarios)
    lost = [word for word in words if not any(word in (item.role, item.title) for item in scenarios)]
    if lost:
        raise ValueError(
            f"no such scenario: {', '.join(lost)}. Known: {', '.join(item.title for item in scenarios)}"
        )
    return [item for item in scenarios if item.role in words or item.title in words]


def longest_first(scenarios: Sequence[Scenario], seconds: Mapping[str, float]) -> list[Scenario]:
    """The order that ends soonest: unknown ones first, then by how long they took."""
    return sorted(scenarios, key=lambda item: (-seconds.get(item.title, float("inf")), item.title))


def environment(scenario: Scenario, image: str, engine: lab.Engine) -> dict[str, str]:
    """What molecule and .config/molecule/config.yml read."""
    binaries = str(Path(sys.executable).parent)
    return {
        **os.environ,
        **engine.environment(),
        "PATH": f"{binaries}{os.pathsep}{os.environ.get('PATH', '')}",
        "BRINGUP_ROOT": str(ROOT),
        "BRINGUP_NODE": scenario.node,
        "BRINGUP_NODE_IMAGE": image,
        "BRINGUP_REHEARSAL": str(rehearsal(scenario)),
        "MOLECULE_EPHEMERAL_DIRECTORY": str(state(scenario)),
        "ANSIBLE_CONFIG": "",
        "NO_COLOR": "1",
        "PY_COLORS": "0",
        "ANSIBLE_FORCE_COLOR": "0",
    }


def state(scenario: Scenario) -> Path:
    """Where molecule keeps what it has made for a scenario."""
    return LOGS / "state" / scenario.files


def log_of(scenario: Scenario) -> Path:
    """What a scenario's last try said."""
    return LOGS / f"{scenario.files}.log"


def rehearsal(scenario: Scenario) -> Path:
    """Where tests/molecule/callback/rehearsal.py writes what each play of a scenario said."""
    return LOGS / f"{scenario.files}.rehearsal.jsonl"


def lies(lines: Sequence[str]) -> list[str]:
    """What check mode said wrongly: on the fresh node against the first real play, and on the converged node.

    `lines`: of the plays of converge.yml in their order; check, real, real, check.
    """
    plays = [json.loads(line) for line in lines]
    if [play["check"] for play in plays] != REHEARSED:
        return [f"plays of converge.yml: check mode {[play['check'] for play in plays]}, not {REHEARSED}"]
    said, did, _, after = (changed(play["tasks"]) for play in plays)
    found = [
        f"fresh node, {host}, {task}: check mode says {said.get((host, task), 'nothing')}, "
        f"it does {did.get((host, task), 'nothing')}"
        for host, task in dict.fromkeys([*said, *did])
        if said.get((host, task)) != did.get((host, task))
    ]
    return found + [
        f"converged node, {host}, {task}: check mode says {row}" for (host, task), row in after.items()
    ]


def changed(tasks: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], list[Any]]:
    """By host and task, the results that changed something and what they changed."""
    found: dict[tuple[str, str], list[Any]] = {}
    for row in tasks:
        if row["changed"]:
            what = {name: row[name] for name in ("changed_paths", "done", "items") if name in row}
            if "changed_paths" in what:
                what["changed_paths"] = ends(what["changed_paths"])
            found.setdefault((row["host"], row["task"]), []).append(what)
    return found


def ends(paths: Sequence[str]) -> list[str]:
    """Paths without the folders above another of them: those come with it, whoever is the first to need them."""
    return [path for path in paths if not any(other.startswith(f"{path}/") for other in paths)]


def remove_nodes(engine: lab.Engine, scenario: Scenario) -> None:
    """Removes what an interrupted earlier run of this scenario left."""
    listed = engine.run("ps", "--all", "--quiet", "--filter", f"name=^{scenario.node}(-[a-z0-9]+)?$")
    if listed:
        engine.run("rm", "--force", "--volumes", *listed.split())


def play(scenario: Scenario, command: Sequence[str], image: str, engine: lab.Engine) -> Result:
    """One scenario through molecule; its output goes to its log."""
    LOGS.mkdir(parents=True, exist_ok=True)
    log = log_of(scenario)
    if command[0] == "test":
        remove_nodes(engine, scenario)
        # What a run that was broken off believes to be there is gone as well.
        shutil.rmtree(state(scenario), ignore_errors=True)
        rehearsal(scenario).unlink(missing_ok=True)
    argv = [
        sys.executable,
        "-m",
        "molecule",
        "--base-config",
        str(CONFIG),
        *command,
        "--scenario-name",
        scenario.name,
    ]
    started = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            argv,
            cwd=ROOT / "roles" / scenario.role,
            env=environment(scenario, image, engine),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(SCENARIO_LIMIT_S)
        except subprocess.TimeoutExpired:
            code = 124
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if command[0] == "test":
        remove_nodes(engine, scenario)
    if command[0] == "test" and code == 0 and (found := lies(rehearsal(scenario).read_text().splitlines())):
        code = LIED
        with log.open("a") as out:
            out.write("".join(f"{line}\n" for line in found))
    return Result(scenario, code, time.monotonic() - started, log)


def tell(result: Result) -> None:
    """One line for a result, as soon as it is there."""
    verdict = "FAILED" if result.code else "passed"
    print(f"{verdict} {result.scenario.title} {result.seconds:.0f} s", flush=True)


def first_log(log: Path) -> Path:
    """Where the log of a failed try lies while and after its scenario is tried again."""
    return log.with_suffix(".first.log")


def put_aside(result: Result) -> Result:
    """The same result with its log where a second try leaves it alone."""
    return replace(result, log=result.log.replace(first_log(result.log)))


def second_try(result: Result, image: str, engine: lab.Engine) -> Result:
    """A failed scenario alone on a fresh node: when it passes, the machine was in the way, and both are said."""
    first = put_aside(result)
    print(ending(first), flush=True)
    again = play(result.scenario, ("test",), image, engine)
    if again.code == 0:
        print(unstable(first), flush=True)
    return again


def unstable(first: Result) -> str:
    """What is said of a scenario whose second try passed."""
    return f"UNSTABLE {first.scenario.title}: failed, then passed alone on a fresh node; its first log: {first.log}"


def ending(result: Result) -> str:
    """Why a scenario failed: the end of its log. Said last, where a reader of a long output looks."""
    whys = {124: f"over its limit of {SCENARIO_LIMIT_S} s", LIED: "check mode did not say what happens"}
    why = whys.get(result.code, f"exit code {result.code}")
    tail = result.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    head = f"FAILED {result.scenario.title} ({why}), the end of {result.log}:"
    return "\n".join([head, *(f"    {line}" for line in tail)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 when there were scenarios and all passed, 1 when one failed, 2 for wrong usage."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="ROLE[/SCENARIO]")
    parser.add_argument("-c", "--command", default="test", help="molecule command (default: test)")
    parser.add_argument(
        "-j", "--jobs", type=int, default=AT_ONCE, help=f"scenarios at once (default: {AT_ONCE})"
    )
    options = parser.parse_args(arguments)
    try:
        chosen = select(find(ROOT / "roles"), options.names)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        engine = lab.ensure_engine()
        image = lab.ensure_image(engine=engine)
        known = yaml.safe_load(SECONDS.read_text()) or {}
        for item in chosen:
            first_log(log_of(item)).unlink(missing_ok=True)
        with ThreadPoolExecutor(options.jobs) as pool:
            runs = [
                pool.submit(play, item, options.command.split(), image, engine)
                for item in longest_first(chosen, known)
            ]
            results = []
            for run in as_completed(runs):
                tell(run.result())
                results.append(run.result())
        failed = [result for result in results if result.code]
        if options.command == "test":
            failed = [again for result in failed if (again := second_try(result, image, engine)).code]
    except BringupError as error:
        print(error, file=sys.stderr)
        return int(error.code)
    for result in failed:
        print(ending(result), flush=True)
    print(f"molecule: {len(results) - len(failed)} passed, {len(failed)} failed", flush=True)
    return 0 if results and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
