"""How well the rules do on causes and reports: found, missed, wrong; and without each report's own wording.

    python -m bench.diagnose.crossval

*Cases*: the public cases that the rules were written with. *Held out* and *collected*: public reports that were
collected later (how many were found at first sight is in docs/diagnose.md). *Cross-validation*: each report is judged
without those alternatives of its cause's rule that no other report of that cause uses, so by the wording of other
reports alone; a cause with a single report loses its whole wording. By group: the part of the machine the cause is in.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bringup import diagnose, evidence, failures, logtext, verdicts  # noqa: E402  (the path is set above)

CASES = ROOT / "tests" / "cases" / "failures"
NONE = "benign"
"""The label of what looks like trouble and is not."""


def rows(path: Path) -> list[dict[str, Any]]:
    """The reports of a file, harmless ones too."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def sets() -> dict[str, list[dict[str, Any]]]:
    """The reports by how they came, the harmless ones as a set of their own."""
    cases, wordings = rows(CASES / "cases-open.jsonl"), rows(CASES / "wordings.jsonl")
    lines = (CASES / "harmless-lines.txt").read_text(encoding="utf-8").splitlines()
    healthy = [
        {"id": f"line {number}", "cause": NONE, "evidence": [line], "source": line}
        for number, line in enumerate(lines, 1)
    ]
    faults = [row for row in wordings if row["cause"] != NONE]
    return {
        "cases": [row for row in cases if row["cause"] != NONE],
        "held out": [row for row in faults if row["id"].startswith("heldout-")],
        "collected": [row for row in faults if not row["id"].startswith("heldout-")],
        "harmless": [row for row in cases + wordings if row["cause"] == NONE] + healthy,
    }


def text_of(row: Mapping[str, Any]) -> str:
    """A case's evidence as one text."""
    return "\n".join(row["evidence"])


def first(text: str) -> str | None:
    """The first cause that is more than a note."""
    found = diagnose.of_text(text).first
    return found.cause if found else None


def score(cases: Iterable[Mapping[str, Any]]) -> tuple[int, int, int]:
    """Right, wrong and nothing found."""
    verdict = [(row["cause"], first(text_of(row))) for row in cases]
    right = sum(want == got for want, got in verdict)
    silent = sum(got is None for _, got in verdict)
    return right, len(verdict) - right - silent, silent


def without_wording(
    row: Mapping[str, Any], library: failures.Library, others: Sequence[str]
) -> tuple[failures.Library, evidence.Reading]:
    """The library without the alternatives of the report's cause that no other text uses, and the report read."""
    text = text_of(row)
    reading = evidence.read([evidence.of_text("case", text)], library)
    failure = library.causes[row["cause"]]
    clauses = []
    for clause in failure.match:
        if clause.line is None:
            clauses.append(clause)
            continue
        kept = [
            part
            for part in logtext.alternatives(clause.line)
            if not _matches(part, text) or any(_matches(part, other) for other in others)
        ]
        if kept:
            clauses.append(clause.model_copy(update={"line": "|".join(kept)}))
            _add_hits(reading, "|".join(kept), text)
    causes = {**library.causes, row["cause"]: failure.model_copy(update={"match": tuple(clauses)})}
    return replace(library, causes=causes), reading


def _add_hits(reading: evidence.Reading, pattern: str, text: str) -> None:
    """The lines of the text that a pattern which is not in the library matches."""
    hits = evidence.Hits()
    for number, line in enumerate(text.splitlines(), 1):
        for record in logtext.records(line.encode()):
            if _matches(pattern, record) and not logtext.is_echo(record):
                hits.add(evidence.Hit("case", number, number, record))
    if hits.count:
        reading.hits[pattern] = hits


def without_own(
    row: Mapping[str, Any], library: failures.Library, reports: Iterable[Mapping[str, Any]]
) -> str | None:
    """The first cause that the rest of the wording gives for a report."""
    others = [
        text_of(other) for other in reports if other["cause"] == row["cause"] and other["id"] != row["id"]
    ]
    reduced, reading = without_wording(row, library, others)
    found = verdicts.judge(reading, reduced, verdicts.Context())
    return next((item.cause for item in found if item.severity != "note"), None)


def _matches(pattern: str, text: str) -> bool:
    return any(re.search(pattern, line, re.IGNORECASE | re.ASCII) for line in text.splitlines())


def main() -> None:
    """Print found, wrong and missed of each set, then cross-validation by group and what it lost."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    library = failures.library()
    some_of = sets()
    harmless = some_of.pop("harmless")
    for name, some in some_of.items():
        right, wrong, silent = score(some)
        print(f"{name:18}{right:4} of {len(some)} first, {wrong} wrong, {silent} nothing")
    alarms = sum(first(text_of(row)) is not None for row in harmless)
    print(f"harmless          {len(harmless) - alarms:4} of {len(harmless)} silent")
    reports = [row for some in some_of.values() for row in some]
    for name, some in some_of.items():
        got = {row["id"]: without_own(row, library, reports) for row in some}
        print(f"\ncross-validation of {name}")
        lost = _line(some, got)
        _by_group(some, lost, library)
        if name == "cases":
            for row in lost:
                print(f"  {row['id']}: {row['cause']} -> {got[row['id']] or 'nothing'}")


def _line(some: Sequence[Mapping[str, Any]], got: Mapping[str, str | None]) -> list[Mapping[str, Any]]:
    """Print how many were right; the reports that were not."""
    lost = [row for row in some if got[row["id"]] != row["cause"]]
    wrong = sum(got[row["id"]] is not None for row in lost)
    kept = len(some) - len(lost)
    print(f"  {kept:4} of {len(some)} first, {wrong} wrong, {len(lost) - wrong} nothing")
    return lost


def _by_group(
    some: Iterable[Mapping[str, Any]], lost: Iterable[Mapping[str, Any]], library: failures.Library
) -> None:
    """Kept reports and causes of each group."""
    areas: dict[str, str] = {cause: failure.area for cause, failure in library.causes.items()}
    total = Counter(areas[row["cause"]] for row in some)
    gone = Counter(areas[row["cause"]] for row in lost)
    causes: dict[str, set[str]] = defaultdict(set)
    for row in some:
        causes[areas[row["cause"]]].add(row["cause"])
    for area in failures.AREAS:
        if total[area]:
            print(
                f"  {area:14}{total[area] - gone[area]:4} of {total[area]:3} reports, {len(causes[area])} causes"
            )


if __name__ == "__main__":
    main()
