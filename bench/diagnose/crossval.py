"""How well the rules do on causes and reports: found, missed, wrong; and without each rule's wording of a case.

    python bench/diagnose/crossval.py

Three figures. *Cases*: the public cases that the rules were written with. *Held out*: public reports that were
collected after the rules were written (the first sight is in docs/diagnose.md). *Cross-validation*: for each case,
every clause whose only use among a cause's cases and samples is this case is taken away, and the case is judged by
what is left: the wording of the other cases and the rule's general alternatives.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bringup import evidence, failures, logtext, verdicts  # noqa: E402  (the path is set above)

CASES = ROOT / "tests" / "cases" / "failures"


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
    row: Mapping[str, Any], causes: Mapping[str, failures.Failure], cases: list[dict[str, Any]]
) -> dict[str, failures.Failure]:
    """The causes, without the alternatives that only this case uses in the rule of its cause."""
    cause = row["cause"]
    failure = causes[cause]
    others = [text_of(other) for other in cases if other["cause"] == cause and other["id"] != row["id"]]
    clauses = []
    for clause in failure.match:
        if clause.line is None:
            clauses.append(clause)
            continue
        kept = [
            part
            for part in logtext.alternatives(clause.line)
            if not _matches(part, text_of(row)) or any(_matches(part, text) for text in others)
        ]
        if kept:
            clauses.append(clause.model_copy(update={"line": "|".join(kept)}))
    return {**causes, cause: failure.model_copy(update={"match": tuple(clauses)})}


def _matches(pattern: str, text: str) -> bool:
    return any(re.search(pattern, line, re.IGNORECASE | re.ASCII) for line in text.splitlines())


def main() -> None:
    """Print the three figures and what cross-validation lost."""
    causes = failures.load()
    library = failures.compile_library(causes)
    cases = rows("cases-open.jsonl")
    for name, some in (("cases", cases), ("held out", rows("heldout.jsonl"))):
        right, wrong, silent = score(some, library)
        print(f"{name:18}{right:4} of {len(some)} first, {wrong} wrong, {silent} nothing")
    lost = []
    for row in cases:
        got = first(text_of(row), failures.compile_library(without_wording(row, causes, cases)))
        if got != row["cause"]:
            lost.append((row["id"], row["cause"], got))
    groups = {row["cause"] for row in cases}
    whole = groups - {cause for _, cause, _ in lost}
    wrong = sum(got is not None for _, _, got in lost)
    kept = len(cases) - len(lost)
    print(
        f"{'cross-validation':18}{kept:4} of {len(cases)} first, {wrong} wrong, {len(lost) - wrong} nothing"
    )
    print(f"{'':18}{len(whole):4} of {len(groups)} causes keep every case")
    for case, cause, got in lost:
        print(f"  {case}: {cause} -> {got or 'nothing'}")


if __name__ == "__main__":
    main()
