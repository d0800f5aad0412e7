"""`invoke flags` and `invoke flags.table`: check a pasted launch line; make an engine version's table."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bringup import ROOT, flags, flagtable, launchline
from bringup.errors import Exit, Problem, UsageError, unknown
from bringup.flags import Finding, FlagContext, ModelFacts
from bringup.launchline import LaunchLine

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA_VERSION = 1
DOWNLOAD_LIMIT_S = 900
"""Longest download of a wheel, seconds; the largest are some 400 MB."""

PROGRAMS = {"llama-server": ROOT / "bringup" / "node" / "llama_serve.py"}
"""Engines whose command line is a program of ours."""

_STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}


@dataclass(frozen=True)
class Report:
    """The verdict on one launch line. `version`: the table's; `sm`: compute capability (None: unknown)."""

    engine: str
    version: str
    gpu: str | None
    sm: int | None
    model: str | None
    findings: tuple[Finding, ...]

    @property
    def exit(self) -> Exit:
        """DONE, or USAGE when the engine would not start as asked."""
        return Exit.USAGE if flags.worst(self.findings) == "error" else Exit.DONE

    def count(self, severity: str) -> int:
        return sum(finding.severity == severity for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """One object for stdout. The line itself is not repeated: it may hold a key."""
        return {
            "schema_version": SCHEMA_VERSION,
            "engine": self.engine,
            "version": self.version,
            "gpu": self.gpu,
            "sm": self.sm,
            "model": self.model,
            "errors": self.count("error"),
            "warnings": self.count("warning"),
            "notes": self.count("note"),
            "findings": [asdict(finding) for finding in self.findings],
        }

    def show(self, console: Console) -> None:
        """Print every finding, worst first, and one closing line."""
        from rich.text import Text

        for finding in self.findings:
            head = Text(f"{finding.severity:<8}", style=_STYLES[finding.severity])
            head.append(f"{finding.code:<18}", style="bold").append(
                f"{finding.flag}: {finding.what}", style="default"
            )
            console.print(head, soft_wrap=True)
            for label, text in (
                ("why", finding.reason),
                ("instead", finding.instead),
                ("source", finding.source),
            ):
                if text:
                    console.print(Text(f"          {label}: {text}", style="dim"), soft_wrap=True)
        on = f" on {self.gpu}" if self.gpu else ""
        said = ", ".join(
            f"{self.count(word)} {word}{'' if self.count(word) == 1 else 's'}"
            for word in ("error", "warning", "note")
        )
        console.print(Text(f"{self.engine} {self.version}{on}: {said}"), soft_wrap=True)


def check_line(
    line: str | Sequence[str], engine: str | None = None, version: str | None = None, gpu: str | None = None
) -> Report:
    """Check a launch line as pasted, or as words. `gpu`: a GPU or platform name (h20, gh200-2x) or sm90.

    Engine and version are taken from the text when not given (an image's tag); else the version is the newest
    known.
    Raises UsageError when the text cannot be read or the engine is not known.
    """
    found = launchline.parse(line)
    name = _engine(found, engine)
    table, extra = _table(name, version, found)
    context = FlagContext(
        sm=compute_capability(gpu),
        platform=gpu,
        model=model_facts(found.model),
        complete=found.complete,
        shell=isinstance(line, str),
    )
    argv = _argv(found, table)
    findings = [*extra, *flags.check(table, argv, found.env, context), *_quotes(found)]
    findings = sorted(findings, key=lambda item: ("error", "warning", "note").index(item.severity))
    return Report(name, table.version, gpu, context.sm, found.model, tuple(findings))


def _engine(found: LaunchLine, asked: str | None) -> str:
    known = flagtable.tables()
    if asked is not None and found.engine not in (None, asked):
        raise UsageError(
            Problem(
                "--engine",
                f"is {asked}, the line starts {found.engine}",
                "Leave --engine out, or correct the line.",
            )
        )
    name = asked or found.engine
    if name is None:
        raise UsageError(
            Problem("launch line", "does not say which engine it is for", f"Add --engine {'|'.join(known)}.")
        )
    if name not in known:
        raise UsageError(Problem("--engine", *unknown("engine", name, list(known))))
    return name


def _table(engine: str, asked: str | None, found: LaunchLine) -> tuple[flagtable.FlagTable, list[Finding]]:
    """The table to judge by; an image's tag without a table falls back to the nearest one, and says so."""
    if asked is not None:
        return flags.load_table(engine, asked), []
    known = flagtable.tables()[engine]
    if found.version is None or found.version in known:
        return flags.load_table(engine, found.version or known[-1]), []
    version = nearest(found.version, known)
    what = f"there is no table of {found.version}; judged by {version}"
    remedy = f"invoke flags.table --engine {engine} --version {found.version}"
    finding = Finding("LINE_VERSION", "warning", found.image or engine, what, "", remedy, "catalog/flags")
    return flags.load_table(engine, version), [finding]


def nearest(version: str, known: Sequence[str]) -> str:
    """The newest known version that is not newer than `version`, else the oldest. `known` is sorted."""
    key = flagtable.version_key
    older = [item for item in known if key(item) <= key(version)]
    return older[-1] if older else known[0]


def _argv(found: LaunchLine, table: flagtable.FlagTable) -> list[str]:
    """The flags; a positional model counts as the model flag when the parser requires that."""
    argv = list(found.argv)
    needs = next(
        (flag for flag in table.flags if flag.required and flag.dest in ("model_path", "model")), None
    )
    if needs is not None and found.model is not None and launchline.model_flag(argv) is None:
        return [needs.name, found.model, *argv]
    return argv


def _quotes(found: LaunchLine) -> list[Finding]:
    if not found.curly:
        return []
    return [
        Finding(
            "LINE_QUOTES",
            "warning",
            "quotes",
            "are typographic; they are read as plain ones here",
            "a shell takes them as part of the value",
            "replace them with ' or \"",
            "the POSIX shell's quoting",
        )
    ]


@lru_cache(maxsize=1)
def _known() -> dict[str, Any]:
    from bringup.yamlfile import read_yaml

    data = read_yaml(ROOT / "catalog" / "rules" / "_known.yml", "catalog/rules/_known.yml")
    assert isinstance(data, dict)
    return data


def compute_capability(gpu: str | None) -> int | None:
    """Compute capability times ten of a GPU or platform name; None for a machine without one.

    Raises UsageError for a name that is not known.
    """
    if gpu is None:
        return None
    number = re.fullmatch(r"(?:sm_?|SM_?)?(\d{1,2})\.?(\d)", gpu)
    if number:
        return int(number[1] + number[2])
    words = re.split(r"[^a-z0-9]+", gpu.lower())
    names = _known()["gpus"]
    for sm, members in names.items():
        if any(str(member) in words for member in members):
            return int(sm)
    if "cpu" in words or "lab" in words:
        return None
    every = sorted(str(member) for members in names.values() for member in members)
    what, remedy = unknown("GPU", gpu, every)
    raise UsageError(Problem("--gpu", what, f"{remedy} A compute capability works too, such as sm90."))


def model_facts(model: str | None) -> ModelFacts:
    """What a model's name or path says about it; facts of models that are not known stay None."""
    if model is None:
        return ModelFacts()
    facts: dict[str, Any] = {}
    for entry in _known()["models"]:
        if re.search(entry["match"], model, re.IGNORECASE):
            facts.update(entry["facts"])
    return ModelFacts(name=model, **facts)


def renew(engine: str, version: str | None = None, wheel: Path | None = None) -> Path:
    """Make or renew an engine version's table; returns its path. Without `wheel` the version's wheel is
    downloaded; the engine that a program of ours starts is read from that program.

    Raises UsageError when the wheel is of another engine or version, or cannot be had.
    """
    if wheel is not None:
        return flagtable.write(flagtable.generate(wheel, engine, version))
    if version is None:
        raise UsageError(Problem("flags.table", "needs --version or --wheel"))
    if engine in PROGRAMS:
        return flagtable.write(flagtable.generate(PROGRAMS[engine], engine, version))
    with tempfile.TemporaryDirectory(prefix="bringup-wheel-") as folder:
        return flagtable.write(flagtable.generate(download(engine, version, Path(folder)), engine, version))


def download(engine: str, version: str, folder: Path) -> Path:
    """An engine's wheel from the package index pip is set up for. Raises UsageError when there is none."""
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"),
        *("--only-binary=:all:", "--python-version", "3.12", "--dest", str(folder)),
        *(word for tag in _PLATFORMS for word in ("--platform", tag)),
        f"{engine}=={version}",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise UsageError(
            Problem(f"{engine} {version}", f"the wheel did not come within {DOWNLOAD_LIMIT_S} s", _BY_HAND)
        ) from None
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["no wheel came"]
        raise UsageError(Problem(f"{engine} {version}", lines[-1].removeprefix("ERROR: "), _BY_HAND))
    return wheels[0]


_PLATFORMS = (
    "any",
    "manylinux2014_x86_64",
    *(f"manylinux_2_{n}_x86_64" for n in (17, 24, 27, 28, 31, 34, 35)),
)
_BY_HAND = "Download the wheel by other means and give it with --wheel."
