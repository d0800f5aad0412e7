"""Writes down what each inventory resolves to; run as a program. The diff is the change on the nodes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bringup import inventory, plan, preview  # noqa: E402 (the checkout must be on the path first)

FOLDER = ROOT / "tests" / "plans"
HEAD = (
    "# What the inventory resolves to; written by tests/content/renew_plans.py. Its diff is what changes.\n"
)
COLUMNS = 110


def text(name: str) -> str:
    """An inventory's record."""
    data: Any = preview.record(plan.load(name))
    return HEAD + yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=COLUMNS)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in inventory.known():
        (FOLDER / f"{name}.yml").write_text(text(name), encoding="utf-8")
        print(f"tests/plans/{name}.yml")
