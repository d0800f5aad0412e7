"""From a log to the cause and the command that fixes it (docs/diagnose.md)."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bringup.errors import Exit, Problem, UsageError, unknown

if TYPE_CHECKING:
    from rich.console import Console

    from bringup import failures
    from bringup.verdicts import Context, Finding, Line

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Diagnosis:
    """What was found, most likely first, and what was read."""

    findings: tuple[Finding, ...]
    unusual: tuple[Line, ...] = ()
    lines: int = 0
    size: int = 0
    sources: tuple[str, ...] = field(default=())

    @property
    def first(self) -> Finding | None:
        """The first finding that is more than a note."""
        return next((item for item in self.findings if item.severity != "note"), None)

    @property
    def exit(self) -> Exit:
        """FAILED when a cause was found, else DONE; notes alone are nothing."""
        return Exit.FAILED if self.first else Exit.DONE

    def as_json(self) -> dict[str, Any]:
        """The object `--json` prints: schema_version, findings, unusual lines, what was read."""
        return {
            "schema_version": SCHEMA_VERSION,
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "unusual": [dataclasses.asdict(line) for line in self.unusual],
            "read": {"lines": self.lines, "bytes": self.size, "sources": list(self.sources)},
        }


def of_text(text: str, context: Context | None = None) -> Diagnosis:
    """The causes in a text: a log, a command's output, a failed play's messages."""
    return of_sources({"text": text}, context)


def of_sources(sources: Mapping[str, str], context: Context | None = None) -> Diagnosis:
    """The causes in named texts that belong together, such as a node's journal, kernel log and facts."""
    from bringup import evidence

    return _of([evidence.of_text(name, text) for name, text in sources.items()], context)


def of_paths(paths: Iterable[str], context: Context | None = None) -> Diagnosis:
    """The causes in files, folders, archives and (`-`) standard input, streamed.

    Raises UsageError with every path that cannot be read.
    """
    from bringup import evidence

    return _of(evidence.open_paths(paths, sys.stdin.buffer), context)


def _of(sources: Any, context: Context | None) -> Diagnosis:
    from bringup import evidence, failures, verdicts

    library = failures.library()
    names: list[str] = []
    reading = evidence.read(_named(sources, names), library)
    findings = verdicts.judge(reading, library, context or verdicts.Context())
    unusual = verdicts.unusual(reading, findings)
    return Diagnosis(findings, unusual, reading.lines, reading.size, tuple(names))


def _named(sources: Any, names: list[str]) -> Any:
    """The sources, their names noted as they come."""
    for source in sources:
        names.append(source[0])
        yield source


def explain(cause: str) -> failures.Failure:
    """All that is known about a cause. Raises UsageError with a suggestion for an unknown one."""
    from bringup import failures

    causes = failures.library().causes
    if cause not in causes:
        raise UsageError(Problem("--explain", *unknown("cause", cause, list(causes))))
    return causes[cause]


def show(diagnosis: Diagnosis, console: Console) -> None:
    """The findings on a terminal: the first in full, the others shorter, harmless ones only counted."""
    notes = [item for item in diagnosis.findings if item.severity == "note"]
    causes = [item for item in diagnosis.findings if item.severity != "note"]
    if not causes:
        console.print(f"No known cause in {diagnosis.lines} lines.", highlight=False)
    for number, finding in enumerate(causes, 1):
        _show_finding(number, finding, console)
    if diagnosis.unusual and not causes:
        console.print("\nUnusual lines that no rule knows:", highlight=False)
        for line in diagnosis.unusual:
            _show_line(line, console)
    if notes:
        names = ", ".join(item.cause for item in notes)
        console.print(f"\nHarmless: {names}", highlight=False, style="dim")


def _show_finding(number: int, finding: Finding, console: Console) -> None:
    from rich.markup import escape

    style = "red" if finding.severity == "error" else "yellow"
    times = f", {finding.count} lines" if finding.count > 1 else ""
    kind = "" if finding.kind == "root" else ", follows from another"
    console.print(
        f"\n[bold {style}]{number}. {escape(finding.title)}[/] [dim]({finding.cause}, "
        f"{finding.confidence:.0%} sure{times}{kind})[/]",
        highlight=False,
    )
    for line in finding.lines:
        _show_line(line, console)
    rows = [("Means", finding.meaning), ("Check", finding.check), ("Do", finding.remedy)]
    if finding.runbook:
        rows.append(("Runbook", f"invoke run {finding.runbook}"))
    rows.append(("Source", finding.sources[0]))
    for name, text in rows:
        console.print(f"  [bold]{name}[/]: {escape(text)}", highlight=False)


def _show_line(line: Line, console: Console) -> None:
    from rich.markup import escape

    place = f"{line.source}:{line.number}"
    console.print(f"  [dim]{escape(place)}[/] {escape(line.text[:400])}", highlight=False, soft_wrap=True)
