"""In which order a node's GPUs are reset, and when they count as well after it: rows of nvidia-smi in, words out."""

from __future__ import annotations

from typing import Any

import pytest

from bringup.node import gpureset

WELL: dict[str, Any] = {"fabric_state": "Completed", "recovery": "None", "remap_pending": "No"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, []),
        # Without switches, or from a driver that does not say, there is nothing to wait for.
        ({"fabric_state": None, "recovery": None, "remap_pending": None}, []),
        ({"fabric_state": "In Progress"}, ["GPU 1 is not in the NVLink fabric: In Progress"]),
        ({"recovery": "Reset"}, ["GPU 1 still asks for: Reset"]),
        ({"remap_pending": "Yes"}, ["GPU 1 still waits for a reset to replace bad memory rows"]),
        ({"recovery": "Reboot", "remap_pending": "Yes"}, ["asks for: Reboot", "replace bad memory rows"]),
    ],
)
def test_a_gpu_is_well_when_it_is_in_the_fabric_and_asks_for_nothing(
    changes: dict[str, Any], said: list[str]
) -> None:
    found = gpureset.unwell([WELL, {**WELL, **changes}], 2)
    assert len(found) == len(said)
    assert all(words in line for words, line in zip(said, found, strict=True))


def test_a_gpu_that_did_not_come_back_is_counted() -> None:
    assert gpureset.unwell([WELL] * 7, 8) == ["7 of 8 GPUs are there"]
    assert gpureset.unwell([], 8) == ["0 of 8 GPUs are there"]


def test_the_fabric_manager_goes_last_and_comes_first() -> None:
    order = gpureset.DOWN
    assert order[-1] == gpureset.FABRIC
    assert order[-2] == gpureset.PERSISTENCE
    assert set(order[: len(gpureset.MONITORS)]) == set(gpureset.MONITORS)
    assert order.index("nvidia-dcgm-exporter.service") < order.index("nvidia-dcgm.service")
