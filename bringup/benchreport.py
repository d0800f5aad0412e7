"""A bench result as one HTML page: tables and SVG charts, no script, nothing fetched from anywhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from bringup import bench
from bringup.benching import COLUMNS, Against, BenchResult, Measured, TargetResult, beside_lines, rows

WIDTH, HEIGHT = 480, 300
"""Small, so that its letters can still be read on a phone, where it is drawn at three quarters."""
LEFT, RIGHT, TOP, BOTTOM = 62, 26, 26, 44
COLOURS = ("#1b6ca8", "#c8553d", "#3a7d44", "#8e5ea2", "#b8860b", "#2f4b4b", "#a23b72", "#5c6bc0")
"""Distinct without relying on red against green alone; lines are labelled as well."""
TICKS = 5
CDF_POINTS = 200
FRONTIER = "beaten by none in both"

STYLE = """
:root { color-scheme: light dark; --line: #8884; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: .3rem .6rem; text-align: right; }
th:first-child, td:first-child, .verdict th, .verdict td { text-align: left; }
.wide { overflow-x: auto; } .wide td:first-child { white-space: nowrap; }
.verdict td:last-child { min-width: 11rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 0 2rem; }
figure { margin: 1.5rem 0; min-width: 0; } .note, li, h1, h2 { overflow-wrap: anywhere; }
svg { display: block; width: 100%; max-width: 600px; height: auto; }
svg text { font: 13px system-ui, sans-serif; fill: currentColor; }
.legend { display: flex; flex-wrap: wrap; gap: 0 1.2rem; list-style: none; margin: 0; padding: 0; font-size: 13px; }
.legend i { display: inline-block; width: .7em; height: .7em; margin-right: .4em; }
svg .axis { stroke: currentColor; fill: none; } svg .grid { stroke: var(--line); fill: none; }
.better { color: #3a7d44; } .worse { color: #c8553d; } .note { color: gray; }
"""

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """A labelled series of points; `marks` draws the points themselves, `path` joins them. `spans`: for each
    point the lower and upper end of what it varies by, drawn as a thin line."""

    label: str
    points: tuple[Point, ...]
    marks: bool = True
    path: bool = True
    spans: tuple[Point, ...] = ()


# --- charts ------------------------------------------------------------------------------------------------


def ticks(most: float, count: int = TICKS) -> list[float]:
    """Round numbers from 0 to at least `most`."""
    if most <= 0 or not math.isfinite(most):
        return [0.0, 1.0]
    rough = most / count
    scale = 10 ** math.floor(math.log10(rough))
    step = next(factor * scale for factor in (1, 2, 2.5, 5, 10) if factor * scale >= rough * (1 - 1e-9))
    return [step * number for number in range(math.ceil(most / step - 1e-9) + 1)]


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def chart(title: str, across: str, up: str, lines: Sequence[Line]) -> str:
    """A line or scatter chart from nought; the empty string when there is nothing to draw."""
    lines = [line for line in lines if line.points]
    if not lines:
        return ""
    x_ticks = ticks(max(x for line in lines for x, _ in line.points))
    y_ticks = ticks(max(y for line in lines for y in (*_heights(line.points), *_heights(line.spans))))

    def place(point: Point) -> Point:
        x = LEFT + point[0] / x_ticks[-1] * (WIDTH - LEFT - RIGHT)
        return x, HEIGHT - BOTTOM - point[1] / y_ticks[-1] * (HEIGHT - TOP - BOTTOM)

    parts = [*_axes(x_ticks, y_ticks, place), *_captions(title, across, up)]
    for at, line in enumerate(lines):
        parts += _drawn(line, COLOURS[at % len(COLOURS)], place)
    return _svg(title, parts) + _legend([line.label for line in lines])


def _heights(points: Sequence[Point]) -> list[float]:
    return [high for _, high in points]


def _svg(title: str, parts: Sequence[str]) -> str:
    head = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
    return "".join((head, *parts, "</svg>"))


def _text(x: float, y: float, text: str, anchor: str = "middle", turn: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{turn}>{escape(text)}</text>'


def _axes(x_ticks: Sequence[float], y_ticks: Sequence[float], place: Callable[[Point], Point]) -> list[str]:
    floor, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = [f'<path class="axis" d="M{LEFT} {TOP}V{floor}H{right}"/>']
    for value in x_ticks:
        parts.append(_text(place((value, 0))[0], floor + 16, _figure(value)))
    for value in y_ticks:
        y = place((0, value))[1]
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{right}"/>')
        parts.append(_text(LEFT - 6, y + 4, _figure(value), "end"))
    return parts


def _captions(title: str, across: str, up: str) -> list[str]:
    middle = (LEFT + WIDTH - RIGHT) / 2
    turn = f' transform="rotate(-90 14 {HEIGHT / 2:.0f})"'
    return [
        _text(middle, 16, title),
        _text(middle, HEIGHT - 12, across),
        _text(14, HEIGHT / 2, up, turn=turn),
    ]


def _legend(labels: Sequence[str]) -> str:
    """What the colours mean, below a chart: beside it there is no room on a phone."""
    items = (
        f'<li><i style="background:{COLOURS[at % len(COLOURS)]}"></i>{escape(label)}</li>'
        for at, label in enumerate(labels)
    )
    return f'<ul class="legend">{"".join(items)}</ul>'


def _drawn(line: Line, colour: str, place: Callable[[Point], Point]) -> list[str]:
    placed = [place(point) for point in line.points]
    parts = []
    if line.path and len(placed) > 1:
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="2"/>')
    for (across, _), (low, high) in zip(line.points, line.spans, strict=False):
        (x, bottom), (_, top) = place((across, low)), place((across, high))
        parts.append(f'<path d="M{x:.1f} {bottom:.1f}V{top:.1f}" stroke="{colour}" opacity="0.6"/>')
    if line.marks or len(placed) == 1:
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in placed]
    return parts


def waterfall(title: str, steps: Sequence[tuple[str, float]], unit: str = "tok/s") -> str:
    """What each step of a ladder added: a bar from the value before to the value after it, numbered as in the
    list below."""
    if not steps:
        return ""
    scale = ticks(max(value for _, value in steps))
    floor, room = HEIGHT - BOTTOM, WIDTH - LEFT - RIGHT
    wide = room / len(steps)

    def height(value: float) -> float:
        return value / scale[-1] * (floor - TOP)

    parts = [_text(WIDTH / 2, 16, title), f'<path class="axis" d="M{LEFT} {TOP}V{floor}H{LEFT + room:.0f}"/>']
    parts += [_text(LEFT - 6, floor - height(value) + 4, _figure(value), "end") for value in scale]
    before = 0.0
    for at, (label, value) in enumerate(steps):
        x, low, high = LEFT + at * wide, min(before, value), max(before, value)
        colour = COLOURS[0] if value >= before else COLOURS[1]
        tall = max(height(high) - height(low), 1.0)
        hint = escape(f"{label}: {value:g} {unit}")
        parts.append(
            f'<rect x="{x + wide * 0.15:.1f}" y="{floor - height(high):.1f}" width="{wide * 0.7:.1f}" '
            f'height="{tall:.1f}" fill="{colour}"><title>{hint}</title></rect>'
        )
        parts.append(_text(x + wide / 2, floor - height(high) - 5, _figure(value)))
        parts.append(_text(x + wide / 2, floor + 16, str(at + 1)))
        before = value
    names = "".join(f"<li>{escape(label)}</li>" for label, _ in steps)
    return f"{_svg(title, parts)}<ol>{names}</ol>"


# --- what is charted ---------------------------------------------------------------------------------------


def by_concurrency(result: BenchResult) -> list[Line]:
    """Total output tokens a second (median, P10 to P90) against requests at once: one line for each shape that
    has several."""
    lines = []
    for target in result.targets:
        shapes: dict[tuple[int, int], list[tuple[Point, Point]]] = {}
        for item in target.measured:
            if item.load.rate is None and not item.load.note and (summary := item.summary):
                shape = (item.load.prompt_tokens, item.load.output_tokens)
                stats = bench.summarise(summary.values)
                point = (float(item.load.concurrent), stats.median)
                shapes.setdefault(shape, []).append((point, (stats.p10, stats.p90)))
        for (prompt, output), points in shapes.items():
            if len(points) > 1:
                dots, spans = zip(*sorted(points), strict=True)
                lines.append(Line(_label(result, target, f"{prompt}->{output}"), dots, spans=spans))
    return lines


def latencies(result: BenchResult) -> list[Line]:
    """The share of requests answered within a time, one line for each load with several requests."""
    return [
        Line(_label(result, target, item.load.label), _cdf(item.latencies_ms), marks=False)
        for target in result.targets
        for item in target.measured
        if len(item.latencies_ms) > 1
    ]


def _cdf(values: Sequence[float]) -> tuple[Point, ...]:
    ordered = sorted(values)
    count = min(len(ordered), CDF_POINTS)
    shares = [(number + 1) / count for number in range(count)]
    return tuple((bench.percentile(ordered, share), 100 * share) for share in shares)


def pareto(result: BenchResult) -> list[Line]:
    """What one user gets against what all get together, a point for each load; last the frontier, which joins
    those that no other load beats in both."""
    dots = [
        Line(_label(result, target, item.load.label), ((_one_user(item), summary.median),), path=False)
        for target in result.targets
        for item in target.measured
        if item.request_tok_s and (summary := item.summary)
    ]
    best = frontier([dot.points[0] for dot in dots])
    return [*dots, Line(FRONTIER, best, marks=False)] if len(best) > 1 else dots


def frontier(points: Sequence[Point]) -> tuple[Point, ...]:
    """The points that no other one beats in both directions, from left to right."""
    kept = [one for one in points if not any(other != one and _beats(other, one) for other in points)]
    return tuple(sorted(set(kept)))


def _beats(one: Point, other: Point) -> bool:
    return one[0] >= other[0] and one[1] >= other[1]


def _one_user(item: Measured) -> float:
    return bench.percentile(item.request_tok_s, 0.5)


def _label(result: BenchResult, target: TargetResult, text: str) -> str:
    return f"{target.name} {text}" if len(result.targets) > 1 else text


# --- the page ----------------------------------------------------------------------------------------------


def page(
    result: BenchResult,
    *,
    against: Against | None = None,
    ladder: Sequence[tuple[str, float]] = (),
) -> str:
    """The whole page. `ladder`: settings in the order they were tried, with their rates."""
    charts = [
        chart("Output against concurrency, P10 to P90", "requests at once", "tok/s", by_concurrency(result)),
        chart("One user against all (Pareto)", "tok/s of one request", "tok/s of all", pareto(result)),
        chart("Time to the whole answer", "ms", "% of requests", latencies(result)),
        waterfall("What each step added", ladder),
    ]
    ended = f", broken off: {escape(result.broken_off)}" if result.broken_off else ""
    when = f"<p>{escape(result.started)}, {result.took_s:.0f} s{ended}</p>"
    body = [f"<h1>{escape(result.suite)}</h1>", when]
    for target in result.targets:
        body += [f"<h2>{escape(target.name)}</h2>", _fingerprint(target)]
        *columns, _ = COLUMNS
        body += [
            _table(columns, [row[:-1] for row in rows(target)]),
            _list(load_notes(target)),
            _beside(target),
        ]
    if against is not None:
        body.append(_verdict(against))
    figures = "".join(f"<figure>{drawn}</figure>" for drawn in charts if drawn)
    body.append(f'<div class="charts">{figures}</div>')
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(result.suite)}</title><style>{STYLE}</style></head><body>"
    )
    return head + "\n".join(body) + "</body></html>\n"


def _fingerprint(target: TargetResult) -> str:
    engine = f"{target.engine} {target.engine_version}".strip()
    facts: Mapping[str, str] = {"model": target.model, "engine": engine, **target.fingerprint}
    shown = ", ".join(f"{escape(name)} {escape(value)}" for name, value in facts.items() if value)
    return f'<p class="note">{shown}</p>'


def load_notes(target: TargetResult) -> list[str]:
    """What must be known of the loads, each note once with the loads that it is about."""
    about: dict[str, list[str]] = {}
    for load, *_, note in rows(target):
        for part in filter(None, note.split("; ")):
            about.setdefault(part, []).append(load)
    count = len(target.measured)
    return [
        f"{'all loads' if len(loads) == count > 1 else ', '.join(loads)}: {note}"
        for note, loads in about.items()
    ]


def _beside(target: TargetResult) -> str:
    return _list(beside_lines(target))


def _list(lines: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>" if items else ""


def _table(columns: Sequence[str], body: Sequence[Sequence[str]], kind: str = "wide") -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in body)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"
    return f'<div class="{kind}">{table}</div>'


def _verdict(found: Against) -> str:
    lines = [
        (label, item.verdict, f"{item.median:+.1%}", f"{item.tail:+.1%}", item.reason)
        for label, item in found.comparisons.items()
    ]
    kind = found.verdict.replace(" ", "-")
    table = _table(("load", "verdict", "median", "tail", "reason"), lines, "wide verdict")
    return f'<h2 class="{kind}">Verdict: {escape(found.verdict)}</h2>{table}'
