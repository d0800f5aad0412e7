"""What the tests of a run share, brought up once: a pair of nodes, and a twin of each of two inventories. Tests stand
in the order of the story that they tell. One that fails says how its nodes are at that moment."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from bringup import lab
from tests.e2e import nodestate, rehearsal
from tests.e2e import site as sites

SECTION = "the nodes"
SHOWN = 6000
"""Characters at the end of a first try's failure that are shown."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test of the pair that fails says how the nodes are now."""
    report = yield
    used = getattr(item, "funcargs", {}).get("pair")
    if report.failed and isinstance(used, sites.Site):
        report.sections.append((SECTION, nodestate.of(used)))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A test that needed a second try says why, too."""
    for report in terminalreporter.stats.get("rerun", ()):
        terminalreporter.section(f"first try of {report.nodeid}")
        terminalreporter.write_line(report.longreprtext[-SHOWN:])
        for title, text in report.sections:
            if title == SECTION:
                terminalreporter.write_line(text)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sites.Site]:
    """Two fresh nodes, e2e-01 and e2e-02, of an inventory like the lab's."""
    folder: Path = tmp_path_factory.mktemp("inventories") / "e2e"
    made = sites.make(folder, ("e2e-01", "e2e-02"))
    yield made
    lab.down(list(made.names), say=sites.quiet)


@pytest.fixture(scope="session")
def fresh() -> Iterator[rehearsal.Rehearsal]:
    """A twin of a platform without NVSwitches, as it was born."""
    made = rehearsal.Rehearsal("gh200", "gh200-01")
    made.take_down()
    yield made
    made.take_down()


@pytest.fixture(scope="session")
def grace(fresh: rehearsal.Rehearsal) -> rehearsal.Provisioned:
    """The same, provisioned."""
    return rehearsal.provisioned(fresh)


@pytest.fixture(scope="session")
def board() -> Iterator[rehearsal.Provisioned]:
    """A fresh twin of a platform with NVSwitches, provisioned."""
    made = rehearsal.Rehearsal("h20", "h20-01")
    made.take_down()
    yield rehearsal.provisioned(made)
    made.take_down()
