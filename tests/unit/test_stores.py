"""When models may be fetched, and in which order they go from node to node."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from bringup import catalog, plan, stores
from bringup.errors import HostFailed
from bringup.inventory import Host, Inventory
from bringup.planned import Plan
from bringup.rolevars import model_store

NIGHT = stores.Hours(("22:00-06:00",), stores.GIB, 3600)


def at(hour: int, minute: int = 0) -> datetime:
    return datetime(2026, 3, 2, hour, minute, tzinfo=UTC)


@pytest.mark.parametrize(
    ("hours", "missing", "now", "answer"),
    [
        (NIGHT, 2 * stores.GIB, at(21, 30), (1800, 8 * 3600)),
        (NIGHT, 2 * stores.GIB, at(23), (0, 7 * 3600)),
        (NIGHT, 1000, at(12), (0, 0)),
        (stores.Hours((), 0, 0), 2 * stores.GIB, at(12), (0, 0)),
        (stores.Hours(("00:00-24:00",), 0, 0), 2 * stores.GIB, at(12), (0, 0)),
    ],
    ids=["soon", "now", "small", "no hours", "always"],
)
def test_large_models_wait_for_their_hours_and_small_ones_do_not(
    hours: stores.Hours, missing: int, now: datetime, answer: tuple[float, float]
) -> None:
    assert stores.delay(hours, "demo", missing, now) == answer


def test_hours_that_are_far_away_are_refused_with_when_and_what_to_do() -> None:
    with pytest.raises(HostFailed) as caught:
        stores.delay(NIGHT, "demo", 400 * stores.GIB, at(12))
    assert "400.0 GiB may only be fetched within 22:00-06:00; these hours begin in 10 h 00 min" in str(
        caught.value
    )
    assert "more than 1 h 00 min is not waited for" in str(caught.value)
    assert "node_download_hours" in str(caught.value)


def test_only_what_is_wrong_counts() -> None:
    model = {"files": [{"path": "a", "size": 5}, {"path": "b", "size": 7}]}
    assert stores.missing_bytes(model, {"b": "is missing"}) == 7


def site(racks: list[str | None], **keys: Any) -> Plan:
    service = {"name": "glm", "profile": "h20-141gb-glm-5.1-fp8-sglang-0.5.10-tuned", "port": 8000}
    own = {"node_platform": "h20-141gb", "node_services": [service], **keys}
    hosts = [
        Host(f"n{index}", ("all",), {**own, **({"node_rack": rack} if rack else {})})
        for index, rack in enumerate(racks)
    ]
    return plan.resolve(Inventory("site", Path("site"), tuple(hosts)), catalog.lazy())


@pytest.mark.parametrize(
    ("racks", "order"),
    [
        (["a", "b", "a", "b", "c"], ["n0", "n2", "n1", "n3", "n4"]),
        ([None, None, None], ["n0", "n1", "n2"]),
        (["a", None, "a", None], ["n0", "n2", "n1", "n3"]),
    ],
)
def test_a_model_goes_through_one_rack_after_the_other(racks: list[str | None], order: list[str]) -> None:
    made = site(racks)
    assert model_store.chain(made.hosts[0].models[0], made) == order


def test_the_hours_reach_the_role() -> None:
    made = site([None], node_download_hours=["Sat,Sun 00:00-24:00"])
    assert model_store.variables(made.hosts[0], made)["model_store_hours"] == ["Sat,Sun 00:00-24:00"]
