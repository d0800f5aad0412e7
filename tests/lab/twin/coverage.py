"""Which known failures preflight names on twins: `python -m tests.lab.twin.coverage CASES.jsonl`.

A case is a line of JSON with `id` and `cause`. Possible is a case whose cause some fault can show on a twin;
covered is one for which every such fault, on every platform that can have it, gets its code. Faults that need
processes or mounts are shown by real twins (tests/e2e/test_twins.py) and counted apart.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from bringup import plan, preflight, twins
from bringup.planned import HostPlan, Plan
from tests.lab.twin import offline

INVENTORIES = ("h20", "gh200", "h100", "h200")


def results() -> dict[str, bool | None]:
    """Fault -> whether preflight names it on every platform that can have it; None: only a real twin can
    show it."""
    plans = {name: twins.plan_for(plan.load(name)) for name in INVENTORIES}
    found: dict[str, bool | None] = {}
    for name, fault in twins.faults().items():
        seen = [
            fault.code in [one.code for one in _verdicts(plans[inventory].hosts[0], plans[inventory], fault)]
            for inventory in INVENTORIES
            if fault.code and offline.applies(fault, plans[inventory].hosts[0])
        ]
        found[name] = all(seen) if seen else None
    return found


def _verdicts(host: HostPlan, whole: Plan, fault: twins.Fault) -> list[preflight.Finding]:
    with tempfile.TemporaryDirectory() as folder:
        return offline.verdicts(host, whole, [fault], Path(folder))


def by_cause(shown: Mapping[str, bool | None]) -> dict[str, list[str]]:
    """Cause -> faults that show it."""
    found: dict[str, list[str]] = {}
    for name, fault in twins.faults().items():
        for cause in fault.causes:
            found.setdefault(cause, []).append(name)
    return found


def main(paths: list[str]) -> int:
    """Prints the table; 1 when a possible case is not covered."""
    shown = results()
    causes = by_cause(shown)
    covered = possible = apart = 0
    rows = [
        json.loads(line)
        for path in paths
        for line in Path(path).read_text(encoding="utf-8").splitlines()
        if line
    ]
    for row in rows:
        names = causes.get(row["cause"], [])
        verdicts = [shown[name] for name in names]
        if not names:
            continue
        possible += 1
        if all(verdict is None for verdict in verdicts):
            apart += 1
        elif False in verdicts:
            print(
                f"{row['id']}: {row['cause']}: not named: {', '.join(n for n in names if shown[n] is False)}"
            )
        else:
            covered += 1
    print(
        f"{len(shown)} faults, {sum(value is True for value in shown.values())} named offline on every platform"
    )
    print(
        f"{len(rows)} cases: {possible} can be shown by a twin, {covered} named offline, {apart} by real twins only"
    )
    return 0 if covered + apart == possible else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
