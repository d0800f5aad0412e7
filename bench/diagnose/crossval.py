"""How well the rules do on causes and reports: found, missed, wrong; and without each report's own wording.

    python bench/diagnose/crossval.py

*Cases*: the public cases that the rules were written with. *Held out* and *collected*: public reports that were
collected later (how many were found at first sight is in docs/diagnose.md). *Cross-validation*: each report is judged
without those alternatives of its cause's rule that no other report of that cause uses, so by the wording of other
reports alone; a cause with a single report loses its whole wording. By group: the part of the machine the cause is in.
"""

from __future__ import annotations

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

from bringup import evidence, failures, logtext, verdicts  # noqa: E402  (the path is set above)

CASES = ROOT / "tests" / "cases" / "failures"
SETS = {"cases": "cases-open.jsonl", "held out": "heldout.jsonl", "collected": "collected.jsonl"}


def rows(name: str) -> list[dict[str, Any]]:
    """The cases of a file, without the harmless ones."""
    lines = (CASES / name).read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if row["cause"] != "benign"]


def text_of(row: Mapping[str, Any]) -> str:
    """A case's evidence as one text."""
    return "\n".join(row["evidence"])


def first(text: str, library: failures.Library) -> str | None:
    """The first cause that is more than a note."""
    reading = evidence.read([evidence.of_text("case", text)], library)
    found = verdicts.judge(reading, library, verdicts.Context())
    return next((item.cause for item in found if item.severity != "note"), None)


def score(cases: Iterable[Mapping[str, Any]], library: failures.Library) -> tuple[int, int, int]:
    """Right, wrong and nothing found."""
    verdict = [(row["cause"], first(text_of(row), library)) for row in cases]
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
    library = failures.library()
    sets = {name: rows(file) for name, file in SETS.items()}
    for name, some in sets.items():
        right, wrong, silent = score(some, library)
        print(f"{name:18}{right:4} of {len(some)} first, {wrong} wrong, {silent} nothing")
    reports = [row for some in sets.values() for row in some]
    for name, some in sets.items():
        got = {row["id"]: without_own(row, library, reports) for row in some}
        lost = [row for row in some if got[row["id"]] != row["cause"]]
        wrong = sum(got[row["id"]] is not None for row in lost)
        kept = len(some) - len(lost)
        print(
            f"\ncross-validation of {name}: {kept} of {len(some)} first, {wrong} wrong, {len(lost) - wrong} nothing"
        )
        _by_group(some, lost, library)
        if name == "cases":
            for row in lost:
                print(f"  {row['id']}: {row['cause']} -> {got[row['id']] or 'nothing'}")


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
