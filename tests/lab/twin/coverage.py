"""Which public failure cases preflight names on twins: `python -m tests.lab.twin.coverage CASES.jsonl`.

A case is a line of JSON with `id` and `cause`. Possible is a case whose cause `elsewhere.yml` does not give to others
than the plan: covered is one for which every fault that shows its cause, on every platform that can have it, gets its
code. Faults that need processes or mounts are shown by real twins (tests/e2e/test_twins.py) and counted apart, and so
are cases that the plan names, by a rule of the catalog, before any node is asked.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bringup import catalog, plan, preflight, twins
from bringup.planned import HostPlan, Plan
from bringup.yamlfile import read_yaml
from tests.lab.twin import offline

HERE = Path(__file__).resolve().parent
INVENTORIES = ("h20", "gh200", "h100", "h200", "lab")


@dataclass(frozen=True)
class Coverage:
    """Ids of cases: named offline, shown by real twins only, named by the plan, possible and not named, and found by
    somebody else (word of `elsewhere.yml` -> how many)."""

    covered: tuple[str, ...]
    apart: tuple[str, ...]
    planned: tuple[str, ...]
    missing: tuple[str, ...]
    elsewhere: Mapping[str, int]

    @property
    def possible(self) -> int:
        """Cases with a check before the launch that a twin or a plan can show."""
        return len(self.covered) + len(self.apart) + len(self.planned) + len(self.missing)


def cases(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """All rows."""
    return [json.loads(line) for path in paths for line in path.read_text("utf-8").splitlines() if line]


def elsewhere() -> dict[str, dict[str, Any]]:
    """Cause or case -> who finds it (`by`) and how (`why`); what of the catalog says so, if that is the plan."""
    found: dict[str, dict[str, Any]] = read_yaml(HERE / "elsewhere.yml", "tests/lab/twin/elsewhere.yml")
    return found


def results(inventories: Iterable[str] = INVENTORIES) -> dict[str, bool | None]:
    """Fault -> whether preflight names it on every platform that can have it; None: only a real twin can
    show it."""
    plans = {name: twins.plan_for(plan.load(name)) for name in inventories}
    found: dict[str, bool | None] = {}
    for name, fault in twins.faults().items():
        seen = [
            fault.code in [one.code for one in _verdicts(whole.hosts[0], whole, fault)]
            for whole in plans.values()
            if fault.code and offline.applies(fault, whole.hosts[0])
        ]
        found[name] = all(seen) if seen else None
    return found


def _verdicts(host: HostPlan, whole: Plan, fault: twins.Fault) -> list[preflight.Finding]:
    with offline.folder() as root:
        return offline.verdicts(host, whole, [fault], root)


def by_cause() -> dict[str, list[str]]:
    """Cause -> faults that show it."""
    found: dict[str, list[str]] = {}
    for name, fault in twins.faults().items():
        for cause in fault.causes:
            found.setdefault(cause, []).append(name)
    return found


def is_planned(row: Mapping[str, Any]) -> bool:
    """Whether the catalog has what a row of `elsewhere.yml` says that the plan goes by: `rules` (engine/name, one that
    warns or refuses), `newer` (model/engine with a least version)."""
    rules = {
        f"{file.stem}/{rule['name']}"
        for file in (catalog.FOLDER / "rules").glob("*.yml")
        for rule in read_yaml(file).get("rules", ())
        if rule["severity"] in ("error", "warning")
    }
    models = {file.stem: read_yaml(file) for file in (catalog.FOLDER / "models").glob("*.yml")}
    least = {
        f"{name}/{engine}" for name, model in models.items() for engine in model.get("minimum_engines", ())
    }
    wanted = {*row.get("rules", ()), *row.get("newer", ())}
    return bool(wanted) and wanted <= rules | least


def judged(rows: Iterable[Mapping[str, Any]], shown: Mapping[str, bool | None]) -> Coverage:
    """What becomes of each case, given what preflight said of each fault."""
    causes, others = by_cause(), elsewhere()
    covered, apart, planned, missing, given = [], [], [], [], Counter[str]()
    proven = {name for name, other in others.items() if other["by"] == "plan" and is_planned(other)}
    for row in rows:
        verdicts = [shown[name] for name in causes.get(row["cause"], [])]
        name = row["id"] if row["id"] in others else row["cause"]
        other = others.get(name) if name == row["id"] or not verdicts else None
        if name in proven:
            planned.append(row["id"])
        elif other and other["by"] != "plan":
            given[other["by"]] += 1
        elif not verdicts or False in verdicts:
            missing.append(f"{row['id']} ({row['cause']})")
        elif all(verdict is None for verdict in verdicts):
            apart.append(row["id"])
        else:
            covered.append(row["id"])
    return Coverage(tuple(covered), tuple(apart), tuple(planned), tuple(missing), given)


def main(paths: list[str]) -> int:
    """Prints the table; 1 when a possible case is not covered."""
    shown = results()
    found = judged(cases(map(Path, paths)), shown)
    for case in found.missing:
        print(f"not named: {case}")
    print(
        f"{len(shown)} faults, {sum(one is True for one in shown.values())} named offline on every platform"
    )
    print(
        f"{found.possible} cases can be shown before the launch: {len(found.covered)} named offline, "
        f"{len(found.apart)} by real twins only, {len(found.planned)} by the plan, {len(found.missing)} not named"
    )
    print("the others: " + ", ".join(f"{number} {by}" for by, number in sorted(found.elsewhere.items())))
    return 1 if found.missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
