"""systemd's calendar expressions (systemd.time(7)), as far as a wrong one can be told without systemd. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from zoneinfo import ZoneInfo

SHORTHANDS = frozenset("minutely hourly daily weekly monthly yearly annually quarterly semiannually".split())
WEEKDAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
TIME = (("hour", 0, 23), ("minute", 0, 59), ("second", 0, 59))
DATE = (("year", 1970, 2199), ("month", 1, 12), ("day", 1, 31))
PART = re.compile(r"\*|\d+(\.\d+)?(\.\.\d+)?")
ZONE = re.compile(r"[A-Za-z][A-Za-z0-9_+-]*(/[A-Za-z0-9_+/-]+)?")


def checked(text: str) -> str:
    """The expression itself. Raises ValueError that says which word of it systemd would not take."""
    words = text.split()
    if words and _is_zone(words[-1]):
        _check_zone(words.pop())
    if len(words) == 1 and words[0].lower() in SHORTHANDS:
        return text
    if words and _is_days(words[0]):
        words.pop(0)
    for word in words:
        names, values = (TIME, word.split(":")) if ":" in word else (DATE, re.split("[-~]", word))
        if not 2 <= len(values) <= 3:
            raise ValueError(f'"{word}" in "{text}" is no time such as 04:00 and no date such as *-*-01')
        _check(text, values, names if names is TIME else names[-len(values) :])
    if len(words) > 2 or not text or text != " ".join(text.split()):
        raise ValueError(f'"{text}" is no calendar expression such as "Mon..Fri 04:00 Europe/Berlin"')
    return text


def with_zone(text: str) -> str:
    """The expression as it is when it names its zone, else in UTC."""
    return text if _is_zone(text.split()[-1]) else f"{text} UTC"


def _is_zone(word: str) -> bool:
    return bool(ZONE.fullmatch(word)) and word.lower() not in SHORTHANDS and not _is_days(word)


def _is_days(word: str) -> bool:
    """Are these days of the week (`Mon`, `Mon..Fri,Sun`)?"""
    names = re.split(r"\.\.|,|-", word.lower().rstrip(","))
    return all(len(name) >= 3 and any(name in (day, day[:3]) for day in WEEKDAYS) for name in names)


def _check_zone(word: str) -> None:
    try:
        ZoneInfo(word)
    except (KeyError, ValueError, OSError):
        raise ValueError(
            f'"{word}" is no time zone, such as UTC or Europe/Berlin, and no day of the week'
        ) from None


def _check(text: str, values: Sequence[str], names: Sequence[tuple[str, int, int]]) -> None:
    for value, (name, least, most) in zip(values, names, strict=False):
        for part in value.split(","):
            start, _, step = part.partition("/")
            if not PART.fullmatch(start) or (step and not PART.fullmatch(step)):
                raise ValueError(f'"{part}" in "{text}" is no {name}')
            for number in re.findall(r"\d+", start.partition(".")[0] + " " + start.partition("..")[2]):
                if not least <= int(number) <= most:
                    raise ValueError(f'{name} {number} in "{text}" is not within {least} to {most}')
