"""A calendar that systemd would not take is refused before any node is contacted, and no good one is."""

from __future__ import annotations

import subprocess

import pytest

from bringup import calendars


def taken(text: str) -> bool:
    """Does systemd itself take it?"""
    return (
        subprocess.run(["systemd-analyze", "calendar", text], capture_output=True, check=False).returncode
        == 0
    )


@pytest.mark.parametrize(
    "text",
    [
        "*-*-* 04:00:00",
        "04:00",
        "daily",
        "weekly UTC",
        "Mon,Thu",
        "Mon..Fri 04:00",
        "Saturday,Sun 22:30 Europe/Berlin",
        "*-*-01 03:00",
        "*-1,7-1 00:00:00",
        "Mon *-05~07/1 06:00",
        "*:0/15",
        "*-*-* 1..5,23:00:30.5 UTC",
        "10-31 08:00",
    ],
)
def test_a_good_calendar_is_taken_as_systemd_takes_it(text: str) -> None:
    assert taken(text)
    assert calendars.checked(text) == text


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("*-*-* 25:00:00", 'hour 25 in "*-*-* 25:00:00" is not within 0 to 23'),
        ("04:60", "minute 60"),
        ("*-13-01 04:00", "month 13"),
        ("*-*-32", "day 32"),
        ("Mon..Fry 04:00", "is no time such as 04:00"),
        ("Mon 04:00 Europe/Berlni", '"Europe/Berlni" is no time zone'),
        ("dayly", '"dayly" is no time zone'),
        ("4 o'clock", "is no time"),
        ("04:00 *-*-* 05:00", "is no calendar expression"),
        ("", "is no calendar expression"),
    ],
)
def test_a_wrong_calendar_is_refused_with_the_word_that_is_wrong(text: str, why: str) -> None:
    assert not taken(text)
    with pytest.raises(ValueError, match=r"\S") as refused:
        calendars.checked(text)
    assert why in str(refused.value)


def test_a_calendar_is_one_line() -> None:
    with pytest.raises(ValueError, match="is no calendar expression"):
        calendars.checked("Mon\n04:00")


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("*-*-* 04:00:00", "*-*-* 04:00:00 UTC"),
        ("daily", "daily UTC"),
        ("Mon,Thu", "Mon,Thu UTC"),
        ("Mon 04:00", "Mon 04:00 UTC"),
        ("Mon 04:00 Europe/Berlin", "Mon 04:00 Europe/Berlin"),
        ("*-*-* 04:00 UTC", "*-*-* 04:00 UTC"),
    ],
)
def test_a_calendar_without_a_zone_is_in_utc_and_systemd_takes_it(written: str, read: str) -> None:
    assert calendars.with_zone(written) == read
    done = subprocess.run(["systemd-analyze", "calendar", read], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
