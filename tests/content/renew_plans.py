"""Writes down what each inventory resolves to; run as a program. The diff is the change on the nodes.

    python tests/content/renew_plans.py [--check]

With --check nothing is written: every inventory is resolved, and one that resolves to something else than its
record, or not at all, ends in exit 1.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bringup import inventory, plan, preview  # noqa: E402 (the checkout must be on the path first)
from bringup.errors import BringupError  # noqa: E402

FOLDER = ROOT / "tests" / "plans"
HEAD = (
    "# What the inventory resolves to; written by tests/content/renew_plans.py. Its diff is what changes.\n"
)
COLUMNS = 110


def text(name: str) -> str:
    """An inventory's record."""
    data: Any = preview.record(plan.load(name))
    return HEAD + yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=COLUMNS)


def differing() -> list[str]:
    """What is wrong with the records, one line each; empty when every inventory resolves as recorded."""
    found = []
    for name in inventory.known():
        path = FOLDER / f"{name}.yml"
        try:
            now = text(name)
        except BringupError as error:
            found += [str(problem) for problem in error.problems]
            continue
        if not path.is_file() or path.read_text(encoding="utf-8") != now:
            found.append(f"inventories/{name} resolves to something else than {path.relative_to(ROOT)} says")
    return found


def main() -> int:
    """Checks or writes the records."""
    if "--check" in sys.argv[1:]:
        found = differing()
        print("\n".join([*found, f"{len(inventory.known())} inventories resolved"]))
        return 1 if found else 0
    FOLDER.mkdir(exist_ok=True)
    for name in inventory.known():
        (FOLDER / f"{name}.yml").write_text(text(name), encoding="utf-8")
        print(f"tests/plans/{name}.yml")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
