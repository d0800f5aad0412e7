"""Drift: what a server was after its warm-up is its level, and only what stays past a ratio of it is a sign."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from bringup.node import common, drift, watch

WISHES = {"memory_ratio": 2.0, "latency_ratio": 3.0, "throughput_ratio": 0.5, "for_s": 300}
EVERY_S = 30.0


def signs(looks: list[drift.Look], wishes: dict[str, Any] | None = None) -> list[str]:
    """What each of the looks, 30 s apart, shows: a sign's name, or the empty string."""
    made = drift.Drift(WISHES if wishes is None else wishes)
    found = (made.judge(look, EVERY_S * number) for number, look in enumerate(looks))
    return [str(one["sign"]) if one else "" for one in found]


LEVEL = [drift.Look(memory=100.0, latency=0.2, throughput=40.0, load=4)] * drift.SAMPLES


def test_a_server_that_stays_as_it_was_is_left_alone() -> None:
    assert set(signs(LEVEL * 20)) == {""}


@pytest.mark.parametrize(
    ("sign", "look"),
    [
        ("memory", drift.Look(memory=201.0)),
        ("latency", drift.Look(latency=0.61)),
        ("throughput", drift.Look(throughput=19.0, load=4)),
    ],
)
def test_each_sign_is_one_only_after_its_time(sign: str, look: drift.Look) -> None:
    said = signs([*LEVEL, *[look] * 12])
    assert said[: len(LEVEL) + 10] == [""] * (len(LEVEL) + 10)
    assert said[len(LEVEL) + 10] == sign, "300 s after the first look past the ratio"


def test_one_look_within_the_ratio_begins_the_time_again() -> None:
    bad, good = drift.Look(memory=500.0), drift.Look(memory=150.0)
    assert set(signs([*LEVEL, *[bad] * 10, good, *[bad] * 10])) == {""}


def test_a_sign_that_nobody_asked_for_is_none() -> None:
    looks = [*LEVEL, *[drift.Look(memory=900.0, latency=9.0)] * 30]
    assert set(signs(looks, {"throughput_ratio": 0.5, "for_s": 60})) == {""}


def test_speed_is_compared_among_looks_with_as_many_requests() -> None:
    """Eight at once each get less than four did: that is no drift."""
    crowded = drift.Look(throughput=15.0, load=8)
    assert set(signs([*LEVEL, *[crowded] * 30])) == {""}
    assert [drift.load_of(count) for count in (0, 1, 2, 3, 4, 7, 8)] == [1, 1, 2, 2, 4, 4, 8]


def test_the_meter_measures_idle_tokens_and_the_speed_of_each_request() -> None:
    meter = drift.Meter()
    idle = {"running": 0.0, "waiting": 0.0, "generation_tokens_total": 100.0}
    assert meter.look(idle, 0.3, 50.0, 0.0) == drift.Look(50.0, 0.3, None, 1)
    busy = {"running": 4.0, "waiting": 0.0, "generation_tokens_total": 200.0}
    assert meter.look(busy, 0.9, None, 10.0) == drift.Look(None, None, None, 4)
    later = {**busy, "generation_tokens_total": 1000.0}
    assert meter.look(later, 0.9, None, 20.0) == drift.Look(None, None, 20.0, 4)
    assert meter.look(None, 0.9, 7.0, 30.0) == drift.Look(memory=7.0)


def test_memory_is_what_is_no_cache_of_files(tmp_path: Path) -> None:
    group = tmp_path / "system.slice" / "bringup-words.service"
    group.mkdir(parents=True)
    (group / "memory.stat").write_text(f"anon {3 * 1024**2}\nfile {900 * 1024**2}\nshmem {1024**2}\n")
    assert drift.memory_mib("/system.slice/bringup-words.service", tmp_path) == 4.0
    assert drift.memory_mib("/system.slice/nowhere.service", tmp_path) is None


def test_where_the_kernel_does_not_count_by_group_its_processes_own_memory_is_added_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cgroup.procs").write_text("7\n8\n9\n")
    monkeypatch.setattr(common, "PROC", tmp_path / "proc")
    for pid, own in (("7", 3 * 1024), ("8", 1024)):
        (tmp_path / "proc" / pid).mkdir(parents=True)
        text = f"VmRSS:\t  999999 kB\nRssAnon:\t  {own} kB\nRssFile:\t  5 kB\n"
        (tmp_path / "proc" / pid / "status").write_text(text)
    assert drift.memory_mib("/", tmp_path) == 4.0, "and one that has just ended counts nothing"
    (tmp_path / "cgroup.procs").write_text("")
    assert drift.memory_mib("/", tmp_path) is None


def test_this_machines_own_control_group_can_be_read_or_is_not_known() -> None:
    found = drift.memory_mib("/")
    assert found is None or found >= 0


SERVICE = {"name": "words", "unit": "bringup-words", "drift": {"memory_ratio": 2.0, "for_s": 60}}


def test_the_watchdog_asks_once_and_its_levels_outlive_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = [100.0]
    monkeypatch.setattr(drift, "memory_mib", lambda group: memory[0])
    monkeypatch.setattr(drift, "RESTARTS", tmp_path)
    request = tmp_path / drift.REQUEST
    first = watch.Drifting(SERVICE, "start-1", tmp_path)
    for number in range(drift.SAMPLES):
        first.take({"running": 0.0}, 0.1, "/x", EVERY_S * number)
    memory[0] = 300.0
    again = watch.Drifting(SERVICE, "start-1", tmp_path)
    for number in range(drift.SAMPLES):
        again.take({"running": 0.0}, 0.1, "/x", EVERY_S * number)
    assert drift.requested(tmp_path).startswith("drift: its memory is 300 MiB, it was 100 MiB")
    request.unlink()
    again.take({"running": 0.0}, 0.1, "/x", EVERY_S * drift.SAMPLES)
    assert not request.exists(), "not at every look"
    again.take({"running": 0.0}, 0.1, "/x", EVERY_S * drift.SAMPLES + drift.AGAIN_S)
    assert request.exists(), "but again when nothing has come of it"
    other = watch.Drifting(SERVICE, "start-2", tmp_path)
    assert other.drift.values == {}, "another start has its own level"


def test_a_server_that_drifts_again_at_once_is_not_restarted_for_ever(tmp_path: Path) -> None:
    history = tmp_path / "bringup-words.history.jsonl"
    assert not drift.too_soon("bringup-words", restarts=tmp_path)
    rows = [{"reason": "schedule", "at": common.utc()}, {"reason": "drift: x", "at": common.utc(0)}]
    history.write_text("\n".join(map(json.dumps, rows)) + "\nno json\n")
    assert not drift.too_soon("bringup-words", restarts=tmp_path)
    rows.append({"reason": "drift: x", "at": common.utc()})
    history.write_text("\n".join(map(json.dumps, rows)) + "\n")
    assert drift.too_soon("bringup-words", restarts=tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}",
        "[]",
        "no json",
        '{"sign": "memory"}',
        '{"sign": "x", "now": 1, "level": 1, "for_s": 1}',
        '{"sign": "memory", "now": "much", "level": 1, "for_s": 1}',
    ],
)
def test_nothing_but_numbers_is_believed(content: str, tmp_path: Path) -> None:
    (tmp_path / drift.REQUEST).write_text(content)
    with pytest.raises(ValueError, match=r"."):
        drift.requested(tmp_path)


def test_no_link_is_followed_and_an_old_wish_does_not_count(tmp_path: Path) -> None:
    found = {"sign": "memory", "level": 1.0, "now": 3.0, "for_s": 60.0}
    (tmp_path / "other").write_text(json.dumps(found))
    (tmp_path / drift.REQUEST).symlink_to(tmp_path / "other")
    with pytest.raises(ValueError, match="no restart is asked for"):
        drift.requested(tmp_path)
    (tmp_path / drift.REQUEST).unlink()
    drift.ask_restart(found, tmp_path)
    assert drift.requested(tmp_path).startswith("drift: ")
    os.utime(tmp_path / drift.REQUEST, (1.0, 1.0))
    with pytest.raises(ValueError, match="asked for now"):
        drift.requested(tmp_path)
