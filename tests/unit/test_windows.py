"""Change windows: what a range means, over midnight, in time zones, and what is no range."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from bringup import windows

MONDAY = datetime(2026, 11, 30, 8, 30, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "open_"),
    [
        ("08:00-09:00", True),
        ("Mon..Fri 08:00-09:00", True),
        ("Tue..Fri 08:00-09:00", False),
        ("Sat..Mon 08:00-09:00", True),
        ("Wed,Mon 08:30-08:31", True),
        ("Mon 08:00-08:30", False),
        ("Mon 09:00-17:00 Europe/Berlin", True),
        ("Mon 09:31-17:00 Europe/Berlin", False),
        ("Sun 22:00-09:00", True),
        ("Mon 22:00-09:00", False),
        ("Mon 22:00-08:30", False),
        ("00:00-24:00", True),
        ("08:30-08:30", True),
    ],
)
def test_a_range_is_open_exactly_between_its_ends(text: str, open_: bool) -> None:
    assert windows.is_open([text], MONDAY) is open_


def test_without_ranges_it_is_always_open_and_with_more_one_is_enough() -> None:
    assert windows.is_open([], MONDAY)
    assert windows.is_open(["Sat 00:00-01:00", "Mon 08:00-09:00"], MONDAY)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("weekdays", "is no range"),
        ("Mon 9:00-10:00", "is no range"),
        ("Mon..Fry 09:00-10:00", '"Fry" is no day'),
        ("mon 09:00-10:00", '"mon" is no day'),
        ("Mon 25:00-26:00", "is no time of the day"),
        ("Mon 09:75-10:00", "is no time of the day"),
        ("Mon 09:00-10:00 Mars/Olympus", "is no time zone"),
        ("Mon 09:00-10:00 ../../etc/passwd", "is no range"),
        ("", "is no range"),
    ],
)
def test_what_is_no_range_is_said(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        windows.parse(text)


@pytest.mark.parametrize(
    ("texts", "now", "seconds"),
    [
        (["22:00-06:00"], datetime(2026, 3, 2, 21, 59, 30, tzinfo=UTC), 30),
        (["22:00-06:00"], datetime(2026, 3, 2, 23, 0, tzinfo=UTC), 7 * 3600),
        (["Sat 10:00-11:00"], datetime(2026, 3, 2, 10, 0, tzinfo=UTC), 5 * 24 * 3600),
        (["01:00-02:00", "01:30-03:00"], datetime(2026, 3, 2, 1, 0, tzinfo=UTC), 2 * 3600),
        ([], datetime(2026, 3, 2, tzinfo=UTC), None),
        (["00:00-24:00"], datetime(2026, 3, 2, tzinfo=UTC), None),
    ],
)
def test_how_long_until_ranges_open_or_close(texts: list[str], now: datetime, seconds: float | None) -> None:
    assert windows.until_change(texts, now) == seconds
