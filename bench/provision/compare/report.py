"""Medians and ratios of what was measured, as tables, a plot and a verdict on each bar in `docs/performance.md`."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

from bench.provision.compare.contenders import LABELS
from bringup import ROOT

RAW = ROOT / "docs" / "measured" / "provision-compare.jsonl"
ABOUT = ROOT / "docs" / "measured" / "provision-compare-machine.json"
PAGE = ROOT / "docs" / "performance.md"
PLOT = ROOT / "docs" / "measured" / "provision-compare.svg"
BEGIN, END = "<!-- bench.provision.compare: begin -->", "<!-- bench.provision.compare: end -->"
RUN_TITLES: Mapping[str, str] = {
    "first": "first run",
    "again": "nothing to change",
    "one": "one value changed",
}
NET_TITLES: Mapping[str, str] = {"fast": "no delay", "slow": "20 ms there and back"}
COLOURS = ("#b4532a", "#8a6d00", "#2f6f4f", "#1f4e9c", "#555555")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 360, 60, 170, 36, 44

Row = Mapping[str, Any]


# --- the lines ----------------------------------------------------------------------------------------------


def add(row: Row) -> None:
    """Keeps a line."""
    RAW.parent.mkdir(exist_ok=True)
    with RAW.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def forget() -> None:
    """Drops all lines."""
    RAW.unlink(missing_ok=True)


def about(machine: Mapping[str, Any], cannot: Mapping[str, str]) -> None:
    """Keeps what the figures were made on, and who could not take part."""
    ABOUT.write_text(json.dumps({**machine, "cannot": dict(cannot)}, indent=1) + "\n")


def rows() -> list[dict[str, Any]]:
    """All lines; of ours, for each number of hosts and network those of the last commit measured."""
    lines = RAW.read_text(encoding="utf-8").splitlines() if RAW.is_file() else []
    found = [json.loads(line) for line in lines]
    ours = [row for row in found if row["contender"] == "bringup"]
    newest = {(row["nodes"], row["net"]): row["commit"] for row in ours}
    return [
        row
        for row in found
        if row["contender"] != "bringup" or row["commit"] == newest[row["nodes"], row["net"]]
    ]


# --- figures ------------------------------------------------------------------------------------------------


def cpu(row: Row) -> float:
    """CPU seconds on both sides."""
    return float(row["controller_s"] + row["nodes_s"])


def wall(row: Row) -> float:
    """Seconds by the clock."""
    return float(row["wall_s"])


def chosen(found: Iterable[Row], **wanted: Any) -> list[Row]:
    """The rows that have these values."""
    return [row for row in found if all(row[name] == value for name, value in wanted.items())]


def median(found: Sequence[Row], value: Callable[[Row], float]) -> float | None:
    """The median; None where nothing was measured."""
    return statistics.median(map(value, found)) if found else None


def ratio(
    found: Sequence[Row], upper: str, lower: str, value: Callable[[Row], float], **wanted: Any
) -> float | None:
    """Median of one contender's figure over another's, of the same repeat of the same session; where they were never
    measured in one, of their medians."""
    above, below = (chosen(found, contender=name, **wanted) for name in (upper, lower))
    pairs = []
    for row in above:
        same = {"session": row["session"], "repeat": row["repeat"]}
        pairs += [value(row) / value(other) for other in chosen(below, **same)]
    if pairs:
        return statistics.median(pairs)
    return (
        statistics.median(map(value, above)) / statistics.median(map(value, below))
        if above and below
        else None
    )


# --- the page -----------------------------------------------------------------------------------------------


def write() -> None:
    """Writes tables, verdicts and plot from all lines."""
    found = rows()
    PLOT.write_text(plot(found), encoding="utf-8")
    text = PAGE.read_text(encoding="utf-8")
    made = "\n\n".join([BEGIN, *parts(found), END])
    PAGE.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: made, text, flags=re.S), encoding="utf-8")


def parts(found: Sequence[Row]) -> list[str]:
    """Paragraphs and tables."""
    machine = json.loads(ABOUT.read_text(encoding="utf-8"))
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    made = [
        f"Measured on {machine['cpus']} × {machine['cpu']}, kernel {machine['kernel']}, Python {machine['python']}, "
        f'{versions}; controller and hosts share these CPUs. Medians; "2.1 + 0.4" are CPU seconds of the controller '
        "and of all hosts together.",
        *(f"{LABELS[name]} could not take part: {why}" for name, why in machine["cannot"].items()),
        verdicts(found),
        f"![Seconds of a run with nothing to change, by number of hosts](measured/{PLOT.name})",
    ]
    settings = dict.fromkeys((row["net"], row["nodes"]) for row in found)
    for net, nodes in sorted(settings, key=lambda one: (one[0] != "fast", one[1])):
        made.append(table(chosen(found, net=net, nodes=nodes), net, nodes))
    return made


def table(found: Sequence[Row], net: str, nodes: int) -> str:
    """One number of hosts on one network."""
    repeats = len({(row["session"], row["repeat"]) for row in found})
    loads = sorted(row["others"] for row in found)
    ours = chosen(found, contender="bringup")
    commit = f"our commit {ours[-1]['commit']}; " if ours else ""
    head = (
        f"### {_hosts(nodes)}, {NET_TITLES[net]}\n\n"
        f"{repeats} {'turn' if repeats == 1 else 'turns'}; {commit}others used {loads[len(loads) // 2]:.0%} "
        f"of the machine meanwhile (median; {loads[-1]:.0%} at most), so compare CPU seconds rather than "
        "wall seconds.\n\n"
    )
    titles = [f"{title}: wall s | CPU s" for title in RUN_TITLES.values()]
    lines = [
        f"| | {' | '.join(titles)} | first line s | controller MiB |",
        "| --- |" + " --- |" * (2 * len(titles) + 2),
    ]
    for name, label in LABELS.items():
        mine = chosen(found, contender=name)
        if mine:
            cells = [cell for run in RUN_TITLES for cell in _cells(chosen(mine, run=run))]
            again = chosen(mine, run="again") or mine
            first = median(again, lambda row: float(row["first_s"])) or 0
            memory = max(float(row["controller_mib"]) for row in mine)
            lines.append(f"| {label} | {' | '.join(cells)} | {first:.1f} | {memory:.0f} |")
    return head + "\n".join(lines)


def _hosts(number: int) -> str:
    return f"{number} {'host' if number == 1 else 'hosts'}"


def _cells(found: Sequence[Row]) -> tuple[str, str]:
    if not found:
        return "", ""
    sides = [statistics.median(float(row[name]) for row in found) for name in ("controller_s", "nodes_s")]
    return figure(median(found, wall) or 0), f"{figure(sides[0])} + {figure(sides[1])}"


def figure(value: float) -> str:
    """Two digits that mean something."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


# --- bars ---------------------------------------------------------------------------------------------------


def verdicts(found: Sequence[Row]) -> str:
    """Each bar, what was measured, and whether it is met (by CPU seconds, where the bar is a ratio)."""
    lines = ["| bar | by CPU seconds | by the clock | met |", "| --- | --- | --- | --- |"]
    for title, upper, lower, compare, limit, run, nodes in BARS:
        wanted = {"run": run, "nodes": nodes, "net": "fast"}
        by_cpu, by_wall = (ratio(found, upper, lower, value, **wanted) for value in (cpu, wall))
        if by_cpu is None or by_wall is None:
            continue
        good = by_cpu >= limit if compare == "at least" else by_cpu <= limit
        sign = f"{compare} {limit:g}"
        lines.append(f"| {title}: {sign} | {by_cpu:.2f} | {by_wall:.2f} | {_met(good)} |")
    return "\n".join([*lines, *_others(found)])


def _others(found: Sequence[Row]) -> list[str]:
    ours = chosen(found, contender="bringup", nodes=50, net="fast")
    lines = []
    for title, mine in (("nothing to change", chosen(ours, run="again")), ("any run", ours)):
        if mine:
            memory = max(float(row["controller_mib"]) for row in mine)
            first = max(float(row["first_s"]) for row in mine)
            head = f"| 50 hosts, {title}: "
            lines.append(
                f"{head}controller's memory below 500 MiB | {memory:.0f} MiB | | {_met(memory < 500)} |"
            )
            lines.append(f"{head}first line within 4 s | | {first:.1f} s | {_met(first <= 4)} |")
    return [*lines, *_one_value(found)]


def _met(good: bool) -> str:
    return "yes" if good else "**no**"


def _one_value(found: Sequence[Row]) -> list[str]:
    """The run after one changed value: only what depends on it, and in how much time."""
    lines = []
    for nodes in sorted({row["nodes"] for row in found}):
        ours = chosen(found, contender="bringup", net="fast", nodes=nodes)
        one, again = chosen(ours, run="one"), chosen(ours, run="again")
        if not one or not again:
            continue
        only = all(set(row["roles"]) <= {"preflight", "work_schedule", "run_stamp"} for row in one)
        role = statistics.median(float(row["roles"].get("work_schedule", 0)) for row in one)
        took, base = median(one, wall) or 0, median(again, wall) or 0
        allowed = 2 * base + role
        good = only and took < allowed
        lines.append(
            f"| {_hosts(nodes)}, one value changed: only its role played, below 2 × {base:.1f} s + {role:.1f} s of the "
            f"role | {'only it' if only else 'others too'} | {took:.1f} s | {_met(good)} |"
        )
    return lines


BARS = (
    ("10 hosts, nothing to change: pyinfra / ours", "pyinfra", "bringup", "at least", 5, "again", 10),
    ("10 hosts, nothing to change: Ansible / ours", "default", "bringup", "at least", 50, "again", 10),
    ("10 hosts, nothing to change: ours / one script", "bringup", "floor", "at most", 1.5, "again", 10),
    ("10 hosts, first run: ours / pyinfra", "bringup", "pyinfra", "at most", 0.6, "first", 10),
    ("50 hosts, nothing to change: pyinfra / ours", "pyinfra", "bringup", "at least", 4, "again", 50),
    ("50 hosts, nothing to change: Ansible / ours", "default", "bringup", "at least", 40, "again", 50),
    ("50 hosts, nothing to change: ours / one script", "bringup", "floor", "at most", 1.8, "again", 50),
)
"""Title, contender above and below the line, direction, limit, run, hosts."""


# --- the plot -----------------------------------------------------------------------------------------------


def plot(found: Sequence[Row]) -> str:
    """Wall seconds of a run with nothing to change over the number of hosts, both in powers of ten."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for name in LABELS:
        mine = chosen(found, contender=name, run="again", net="fast")
        for nodes in sorted({row["nodes"] for row in mine}):
            lines.setdefault(name, []).append((nodes, median(chosen(mine, nodes=nodes), wall) or 0))
    points = [point for line in lines.values() for point in line]
    across = _decades([x for x, _ in points])
    up = _decades([y for _, y in points])
    parts = [*_grid(across, up), _words(LEFT, 20, "Nothing to change: seconds by number of hosts", "start")]
    for at, (name, line) in enumerate(lines.items()):
        colour = COLOURS[at % len(COLOURS)]
        places = [(_at(x, across, LEFT, WIDTH - RIGHT), _at(y, up, HEIGHT - BOTTOM, TOP)) for x, y in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
        end = places[-1]
        parts.append(_words(end[0] + 8, end[1] + 4, LABELS[name].replace("`", ""), "start", colour))
    style = "<style>text{font:12px system-ui,sans-serif}</style>"
    back = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}">'
    return "\n".join([head, style, back, *parts, "</svg>", ""])


def _decades(values: Sequence[float]) -> tuple[int, int]:
    return math.floor(math.log10(min(values))), max(
        math.ceil(math.log10(max(values))), math.floor(math.log10(min(values))) + 1
    )


def _at(value: float, decades: tuple[int, int], low: float, high: float) -> float:
    share = (math.log10(value) - decades[0]) / (decades[1] - decades[0])
    return low + share * (high - low)


def _grid(across: tuple[int, int], up: tuple[int, int]) -> list[str]:
    made = []
    for power in range(across[0], across[1] + 1):
        x = _at(10.0**power, across, LEFT, WIDTH - RIGHT)
        made.append(f'<line x1="{x}" x2="{x}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#dddddd"/>')
        made.append(_words(x, HEIGHT - BOTTOM + 18, f"{10**power:g}"))
    for power in range(up[0], up[1] + 1):
        y = _at(10.0**power, up, HEIGHT - BOTTOM, TOP)
        made.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" stroke="#dddddd"/>')
        made.append(_words(LEFT - 8, y + 4, f"{10.0**power:g} s", "end"))
    return made


def _words(x: float, y: float, text: str, anchor: str = "middle", colour: str = "#222222") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'
