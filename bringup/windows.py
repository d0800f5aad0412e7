"""Ranges of the week; the code lies with the programs of the node, where a restart looks at its hours."""

from bringup.node.windows import (
    DAYS,
    MINUTES,
    RANGE,
    Window,
    checked,
    is_open,
    may,
    parse,
    until_change,
    until_may_change,
)

__all__ = [
    "DAYS",
    "MINUTES",
    "RANGE",
    "Window",
    "checked",
    "is_open",
    "may",
    "parse",
    "until_change",
    "until_may_change",
]
