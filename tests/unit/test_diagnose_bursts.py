"""Storms of alike lines: exact counts, right line numbers, and no different line lost among them."""

from __future__ import annotations

from pathlib import Path

import pytest

from bringup import bursts, diagnose, evidence, failures

STORM = "[{0}.1] NVRM: Xid (PCI:0000:{1:02x}:00): 13, pid={2}, name=python3, Graphics Exception: ESR 0x{0:x}"
LOST = "[{0}.1] NVRM: Xid (PCI:0000:07:00): 79, pid=3, name=python3, GPU has fallen off the bus."


def _storm(lines: int) -> list[str]:
    return [STORM.format(number, number % 8, number % 5) for number in range(lines)]


def test_one_other_fault_in_a_storm_is_found_first_with_its_line() -> None:
    lines = _storm(60_000)
    lines[41_234] = LOST.format(41_234)
    found = {finding.cause: finding for finding in diagnose.of_text("\n".join(lines)).findings}
    assert next(iter(found)) == "gpu-fell-off-bus"
    assert [line.number for line in found["gpu-fell-off-bus"].lines] == [41_235]
    assert found["gpu-fell-off-bus"].count == 1
    assert found["gpu-app-fault"].count == 59_999


def test_every_line_of_a_storm_is_counted_over_chunks() -> None:
    first = diagnose.of_text("\n".join(_storm(70_000))).first
    assert first is not None
    assert (first.cause, first.count) == ("gpu-app-fault", 70_000)


def test_lines_that_differ_in_the_number_asked_for_are_of_different_kinds() -> None:
    tables = failures.library().tables
    one, other = (
        line.lower().encode()
        for line in (STORM.format(1, 1, 1), STORM.format(1, 1, 1).replace(": 13", ": 31"))
    )
    later = STORM.format(99, 1, 1).lower().encode()
    kinds = [bursts.kind_of(line, tables.finder.find(line), tables) for line in (one, other, later)]
    assert kinds[0] != kinds[1]
    assert kinds[0] == kinds[2]


def test_what_is_left_of_a_chunk_are_the_first_and_last_of_each_kind_and_all_others() -> None:
    lines = [f"plain line {number}" for number in range(300)]
    lines += [f"CUDA out of memory, step {number}" for number in range(300)]
    lines[450] = "CUDA out of memory, then something else"
    thinned = bursts.thin("\n".join(lines).encode(), failures.library().tables, lambda kind: 0, keep_last=2)
    assert list(thinned.numbers) == [*range(300, 300 + bursts.ALIKE), 450, 598, 599]
    assert thinned.chunk.decode().splitlines() == [lines[number] for number in thinned.numbers]
    assert [times for _, times in thinned.bursts] == [299 - bursts.ALIKE - 2]


def test_kinds_that_were_read_before_are_left_out_at_once() -> None:
    text = "\n".join(["CUDA out of memory"] * 100).encode()
    thinned = bursts.thin(text, failures.library().tables, lambda kind: bursts.ALIKE)
    assert thinned.numbers == []
    assert [times for _, times in thinned.bursts] == [100]


def test_the_end_of_a_storm_is_kept() -> None:
    reading = evidence.read([evidence.of_text("log", "\n".join(_storm(60_000)))], failures.library())
    numbers = [hit.number for hits in reading.hits.values() for hit in hits.kept()]
    assert max(numbers) == 60_000


def test_forgetting_kinds_loses_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "KINDS", 3)
    first = diagnose.of_text("\n".join(_storm(3_000))).first
    assert first is not None
    assert first.count == 3_000


def test_progress_bars_in_a_storm_are_read(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("\n".join([*_storm(12_000), *(f"{line}\rdone" for line in _storm(12_000))]))
    first = diagnose.of_paths([str(path)]).first
    assert first is not None
    assert first.count == 24_000
