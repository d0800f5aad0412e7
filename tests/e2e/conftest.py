"""One pair of nodes for the whole run; its tests stand in the order of the story they tell."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bringup import lab
from tests.e2e import site as sites


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sites.Site]:
    """Two fresh nodes, e2e-01 and e2e-02, of an inventory like the lab's."""
    folder: Path = tmp_path_factory.mktemp("inventories") / "e2e"
    made = sites.make(folder, ("e2e-01", "e2e-02"))
    yield made
    lab.down(list(made.names), say=sites.quiet)
