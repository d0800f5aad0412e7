"""A run as one HTML file that needs nothing else: timeline, changes with diffs, failures, readable on a
phone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bringup import report, runs
from bringup.events import NO_ROLE, Change, HostOutcome, RoleOutcome
from bringup.progress import elapsed
from bringup.runs import RunRecord

TEMPLATES = Path(__file__).resolve().parent / "templates"
CHANGES_SHOWN = 500
LABEL_PERCENT = 1.4
"""Width of a bar, in percent of the lane, that each letter of its label needs on a desktop's screen."""


def render(record: RunRecord) -> str:
    """The page's text; everything in it is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined)
    states = {name: report.state_of(name, host, record) for name, host in record.hosts.items()}
    return environment.get_template("run.html.j2").render(
        record=record,
        states=states,
        tone="done" if record.exit_code == 0 else "failed",
        summary=report.summary(record),
        next_steps=report.next_steps(record),
        failures=[one for one in record.failures if one.kind in ("failed", "unreachable")],
        answers=[report.answer_line(answer) for answer in record.answers],
        changes=[_change(change) for change in record.changes[:CHANGES_SHOWN]],
        lanes=_lanes(record),
        whole=elapsed(_whole(record)),
        roles=_roles(record),
    )


def write(record: RunRecord, folder: Path | None = None) -> Path:
    """Writes `report.html` into the run's folder and gives its path."""
    path = (folder or runs.FOLDER) / record.id / "report.html"
    runs.write_private(path, render(record))
    return path


def _change(change: Change) -> dict[str, Any]:
    lines = [(_tone(line), line) for line in change.diff.splitlines()]
    return {"host": change.host, "role": change.role, "task": change.task, "lines": lines}


def _tone(line: str) -> str:
    if line.startswith(("+++", "---", "@@")):
        return "dim"
    return {"+": "add", "-": "del"}.get(line[:1], "")


def _shown(host: HostOutcome) -> dict[str, RoleOutcome]:
    """Roles in their order. Tasks outside of any (locks, between roles) have no time of their own beside roles."""
    roles = {title: role for title, role in host.roles.items() if title != NO_ROLE}
    return roles or dict(host.roles)


def _whole(record: RunRecord) -> float:
    """Seconds from the run's begin to the end of its last role."""
    return max([*(role.end_s for host in record.hosts.values() for role in _shown(host).values()), 0.001])


def _lanes(record: RunRecord) -> list[dict[str, Any]]:
    """A bar for each role on each host, in percent of the run's time."""
    whole = _whole(record)
    return [
        {"host": name, "bars": [_bar(title, role, whole) for title, role in _shown(host).items()]}
        for name, host in record.hosts.items()
    ]


def _bar(title: str, role: RoleOutcome, whole: float) -> dict[str, Any]:
    width = round(100 * role.seconds / whole, 2)
    return {
        "left": round(100 * role.begin_s / whole, 2),
        "width": width,
        "tone": "failed" if role.failed else "changed" if role.changed else "",
        "label": title if width > LABEL_PERCENT * len(title) else "",
        "title": f"{title}: {role.seconds:.1f} s, {role.ok} ok, {role.changed} changed",
    }


def _roles(record: RunRecord) -> list[dict[str, Any]]:
    """Each role with the host on which it took longest."""
    rows: dict[str, dict[str, Any]] = {}
    for name, host in record.hosts.items():
        for title, role in _shown(host).items():
            row = rows.setdefault(title, {"role": title, "host": name, "seconds": 0.0, "changed": 0})
            row["changed"] += role.changed
            if role.seconds >= row["seconds"]:
                row.update(host=name, seconds=role.seconds)
    return list(rows.values())
