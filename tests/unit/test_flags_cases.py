"""Every launch line in tests/cases/flags gets exactly the verdicts written beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bringup.flagcheck import check_line
from bringup.yamlfile import read_yaml

FOLDER = Path(__file__).resolve().parents[1] / "cases" / "flags"


def _runs() -> list[Any]:
    found = []
    for path in sorted(FOLDER.glob("*.yml")):
        case = read_yaml(path)
        for run in case["runs"]:
            name = f"{path.stem}-{run.get('version', 'newest')}-{run.get('gpu', 'any')}"
            found.append(pytest.param(case["line"], run, id=name))
    return found


@pytest.mark.parametrize(("line", "run"), _runs())
def test_a_launch_line_gets_its_verdicts(line: str, run: dict[str, Any]) -> None:
    report = check_line(line, run["engine"], run.get("version"), run.get("gpu"))
    said = [f"{item.severity} {item.code} {item.flag}" for item in report.findings]
    assert said == run["findings"]


@pytest.mark.parametrize(("line", "run"), _runs())
def test_every_finding_says_what_and_who_says_so(line: str, run: dict[str, Any]) -> None:
    for item in check_line(line, run["engine"], run.get("version"), run.get("gpu")).findings:
        assert item.what
        assert item.source
        assert item.severity != "error" or item.reason or item.instead
