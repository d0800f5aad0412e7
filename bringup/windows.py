"""Ranges of the week; the code lies with the programs of the node, where a restart looks at its hours."""

from bringup.node.windows import (
    DAYS,
    MINUTES,
    RANGE,
    Window,
    checked,
    is_open,
    parse,
    until_change,
)

__all__ = ["DAYS", "MINUTES", "RANGE", "Window", "checked", "is_open", "parse", "until_change"]
