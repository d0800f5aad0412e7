"""When nodes may be changed or restarted: ranges of the week such as `Mon..Fri 09:00-17:00 Europe/Berlin`. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone, tzinfo
from zoneinfo import ZoneInfo

DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
RANGE = re.compile(
    r"(?:(?P<days>[A-Za-z.,]+) )?(?P<begin>\d\d:\d\d)-(?P<end>\d\d:\d\d)(?: (?P<zone>[A-Za-z][\w/+-]*))?"
)
MINUTES = 24 * 60


@dataclass(frozen=True)
class Window:
    """A range: the weekdays on which it begins (0: Monday), and minutes of the day; an `end` that is not
    after `begin` lies on the next day.
    """

    days: frozenset[int]
    begin: int
    end: int
    zone: tzinfo

    def is_open(self, now: datetime) -> bool:
        """Is this aware moment in it?"""
        there = now.astimezone(self.zone)
        minute = there.hour * 60 + there.minute
        if self.begin < self.end:
            return there.weekday() in self.days and self.begin <= minute < self.end
        yesterday = (there - timedelta(days=1)).weekday()
        return (there.weekday() in self.days and minute >= self.begin) or (
            yesterday in self.days and minute < self.end
        )


def parse(text: str) -> Window:
    """`[DAYS ]HH:MM-HH:MM[ ZONE]`; DAYS as in `Mon..Fri,Sun` (default: every day), ZONE as in `Europe/Berlin`
    (default: UTC). Raises ValueError that says what is wrong.
    """
    found = RANGE.fullmatch(text)
    if not found:
        raise ValueError(f'"{text}" is no range such as "Mon..Fri 09:00-17:00 Europe/Berlin"')
    try:
        # A small node may have no data of time zones; UTC needs none.
        bare = found["zone"] in (None, "UTC")
        zone = timezone.utc if bare else ZoneInfo(found["zone"])  # noqa: UP017 (nodes have Python 3.9)
    except (KeyError, ValueError, OSError):
        raise ValueError(f'"{found["zone"]}" is no time zone, such as UTC or Europe/Berlin') from None
    return Window(_days(found["days"] or "Mon..Sun"), _minute(found["begin"]), _minute(found["end"]), zone)


def checked(text: str) -> str:
    """The text itself when it is a range. Raises ValueError."""
    parse(text)
    return text


def is_open(texts: Iterable[str], now: datetime) -> bool:
    """Is this moment in one of the ranges? Without any, always."""
    windows = [parse(text) for text in texts]
    return not windows or any(window.is_open(now) for window in windows)


def until_change(texts: Iterable[str], now: datetime) -> float | None:
    """Seconds until the ranges open, or close when they are open now; None when that is not within a week."""
    windows = [parse(text) for text in texts]
    start = now.replace(second=0, microsecond=0)
    before = not windows or any(window.is_open(now) for window in windows)
    for step in range(1, 7 * MINUTES + 1):
        moment = start + timedelta(minutes=step)
        if windows and any(window.is_open(moment) for window in windows) != before:
            return (moment - now).total_seconds()
    return None


def may(hours: Iterable[str], never: Iterable[str], now: datetime) -> bool:
    """Is this moment in one of `hours` (without any: always) and in none of `never`?"""
    shut = list(never)
    return is_open(hours, now) and not (shut and is_open(shut, now))


def until_may_change(
    hours: Iterable[str], never: Iterable[str], now: datetime, limit_s: float
) -> float | None:
    """Seconds until `may` becomes another; None when that is not within `limit_s` (a week at most)."""
    allowed, shut = list(hours), list(never)
    start, before = now.replace(second=0, microsecond=0), may(allowed, shut, now)
    for step in range(1, min(7 * MINUTES, int(limit_s // 60) + 1) + 1):
        moment = start + timedelta(minutes=step)
        if may(allowed, shut, moment) != before:
            seconds = (moment - now).total_seconds()
            return seconds if seconds <= limit_s else None
    return None


def _days(text: str) -> frozenset[int]:
    days: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("..")
        begin, end = _day(first), _day(last or first)
        days.update((begin + step) % 7 for step in range((end - begin) % 7 + 1))
    return frozenset(days)


def _day(word: str) -> int:
    if word not in DAYS:
        raise ValueError(f'"{word}" is no day; days are {", ".join(DAYS)}')
    return DAYS.index(word)


def _minute(text: str) -> int:
    hour, minute = int(text[:2]), int(text[3:])
    if hour * 60 + minute > MINUTES or minute > 59:
        raise ValueError(f'"{text}" is no time of the day')
    return hour * 60 + minute
