"""Everything that must be true before a change goes in, in stages, with what each cost.

python -m tests.stages [--only lint --only unit ...]; `invoke test` and `invoke lint` call the same.
Stages that need no node run two at a time while node images are made; those with nodes follow.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from bringup import ROOT, lab
from bringup.errors import BringupError

BINARIES = Path(sys.executable).parent
AT_ONCE = 2
CHECK_LIMIT_S = 900
STAGE_LIMIT_S = 3600


@dataclass(frozen=True)
class Command:
    """One process of a stage: its name, its arguments (a program of the environment first), its limit."""

    name: str
    argv: tuple[str, ...]
    limit_s: float = STAGE_LIMIT_S


@dataclass(frozen=True)
class Outcome:
    """How a command or a stage ended: exit code (124: over its limit), seconds, what it wrote if kept."""

    name: str
    code: int
    seconds: float
    output: str = ""


LINTERS = (
    Command("ansible-lint", ("ansible-lint", "--offline", "--nocolor"), CHECK_LIMIT_S),
    Command("mypy", ("mypy", "bringup", "tasks.py", "plugins", "tests", "bench"), CHECK_LIMIT_S),
    Command("ruff check", ("ruff", "check", "."), CHECK_LIMIT_S),
    Command("ruff format", ("ruff", "format", "--check", "."), CHECK_LIMIT_S),
    Command("yamllint", ("yamllint", "--strict", "."), CHECK_LIMIT_S),
    Command("plans", ("python", "tests/content/renew_plans.py", "--check"), CHECK_LIMIT_S),
)
"""The longest first: two run at a time."""


def _pytest(folder: str, *more: str) -> tuple[Command, ...]:
    return (Command(folder, ("pytest", "-q", "--durations=5", *more, folder)),)


STAGES: Mapping[str, tuple[Command, ...]] = {
    "lint": LINTERS,
    "unit": _pytest("tests/unit"),
    "content": _pytest("tests/content"),
    "parsers": (Command("real parsers", ("python", "tests/parsers/compare.py")),),
    "browser": (Command("reports", ("python", "tests/browser/check.py")),),
    "molecule": (Command("scenarios", ("python", "tests/molecule/run.py")),),
    # On real nodes a failure may be the machine's: a second try tells, and -ra names what needed one.
    "e2e": _pytest("tests/e2e", "--reruns=1", "--reruns-delay=10", "-rR"),
    "arm64": _pytest("tests/arm64", "--reruns=1", "--reruns-delay=10", "-rR"),
    "vllm": (Command("acceptance", ("python", "tests/vllm/run.py")),),
}
ON_REQUEST = ("arm64", "vllm")
"""Only when they are named: the first emulates a node for a quarter of an hour, the second downloads 3 GB."""
NEED_NODES: Mapping[str, str] = {"molecule": "amd64", "e2e": "amd64", "arm64": "arm64"}
"""Stages with nodes, and the architecture of their image."""


def environment() -> dict[str, str]:
    """This process's, with the environment's programs first and no colour in logs."""
    path = f"{BINARIES}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, "PATH": path, "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"}


def run(command: Command, *, keep: bool) -> Outcome:
    """One command from the checkout's root; its output is kept, or goes where this process writes."""
    started = time.monotonic()
    argv = [str(BINARIES / command.argv[0]), *command.argv[1:]]
    try:
        done = subprocess.run(
            argv, cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, timeout=command.limit_s, check=False,
            stdout=subprocess.PIPE if keep else None, stderr=subprocess.STDOUT if keep else None,
        )  # fmt: skip
        code, output = done.returncode, (done.stdout or b"").decode(errors="replace")
    except subprocess.TimeoutExpired as error:
        code, output = 124, (error.stdout or b"").decode(errors="replace")
        output += f"\n{command.name}: over its limit of {command.limit_s:.0f} s\n"
    return Outcome(command.name, code, time.monotonic() - started, output)


def lint() -> int:
    """Every linter; prints what they say; 0 when all pass."""
    outcome = stage("lint", keep=True)
    print(outcome.output.rstrip(), flush=True)
    return outcome.code


def verdict(outcome: Outcome) -> str:
    """One word."""
    return "FAILED" if outcome.code else "passed"


def stage(name: str, *, keep: bool) -> Outcome:
    """One stage: every command of it, two at a time, whichever fails."""
    started = time.monotonic()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        outcomes = list(pool.map(lambda command: run(command, keep=keep), STAGES[name]))
    output = "".join(
        (f"-- {item.name}: {verdict(item)}, {item.seconds:.0f} s\n" if len(outcomes) > 1 else "")
        + (item.output if item.code or len(outcomes) == 1 else "")
        for item in outcomes
    )
    return Outcome(name, int(any(item.code for item in outcomes)), time.monotonic() - started, output)


def table(outcomes: Sequence[Outcome], seconds: float) -> str:
    """The closing table: a line a stage, and the counts that a machine can read."""
    width = max(len(outcome.name) for outcome in outcomes)
    lines = [f"  {item.name:<{width}}  {verdict(item)}  {item.seconds:6.0f} s" for item in outcomes]
    failed = sum(1 for item in outcomes if item.code)
    total = f"  {'all':<{width}}          {seconds:6.0f} s"
    return "\n".join(
        ["== stages", *lines, total, f"stages: {len(outcomes) - failed} passed, {failed} failed"]
    )


def check(only: Sequence[str] = ()) -> int:
    """The stages named in `only` (else all but ON_REQUEST), their table at the end; 0 when all passed.

    Raises BringupError when nodes are needed and cannot be had.
    """
    names = [name for name in STAGES if (name in only if only else name not in ON_REQUEST)]
    started = time.monotonic()
    outcomes: list[Outcome] = []
    bound = [name for name in names if name in NEED_NODES]
    with ThreadPoolExecutor(1) as pool:
        images = {
            arch: pool.submit(lab.ensure_image, arch) for arch in sorted({NEED_NODES[name] for name in bound})
        }
        outcomes += _side_by_side([name for name in names if name not in NEED_NODES])
        for name in bound:
            images[NEED_NODES[name]].result()
            print(f"== {name}", flush=True)
            outcomes.append(stage(name, keep=False))
    outcomes.sort(key=lambda outcome: names.index(outcome.name))
    print(table(outcomes, time.monotonic() - started), flush=True)
    return int(any(outcome.code for outcome in outcomes))


def _side_by_side(names: Sequence[str]) -> list[Outcome]:
    """Stages without nodes, two at a time, each printed whole when it ends."""
    if not names:
        return []
    print(f"== {', '.join(names)}: started, {AT_ONCE} at a time", flush=True)
    outcomes = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        runs: list[Future[Outcome]] = [pool.submit(stage, name, keep=True) for name in names]
        for done in as_completed(runs):
            outcome = done.result()
            print(f"== {outcome.name}\n{outcome.output.rstrip()}", flush=True)
            outcomes.append(outcome)
    return outcomes


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 when every stage passed, 1 when one failed, the error's own when nodes cannot be had."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", action="append", choices=list(STAGES), default=[], help="a stage (again for more)"
    )
    options = parser.parse_args(arguments)
    try:
        return check(options.only)
    except BringupError as error:
        print(error, file=sys.stderr)
        return int(error.code)


if __name__ == "__main__":
    sys.exit(main())
