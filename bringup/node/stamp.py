"""What a node was planned to be (`plan.json`), and which runs it has seen (`runs/`).

`plan.json` is configuration: it changes when the plan does. A run's stamp is a record, like a line in a log:
it is written by every run and is no change, or else no second run could ever say "nothing to do".
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import seal
from .files import read_text, write_atomic
from .undo import Journal

SCHEMA_VERSION = 1
MODE = 0o644
ROLE = "run_stamp"
STAMP = re.compile(r"\d{8}T\d{6}Z-.*\.json")


def plan_text(summary: Mapping[str, Any]) -> str:
    """The text of `plan.json`: the same for the same plan."""
    return json.dumps({"schema_version": SCHEMA_VERSION, **summary}, indent=1, sort_keys=True) + "\n"


def stamp_name(run: str, now: float) -> str:
    """The file name of a run's stamp; names sort by time."""
    safe = re.sub(r"[^A-Za-z0-9._-]", "-", run)[:80] or "run"
    return f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(now))}-{safe}.json"


def stamp_path(folder: Path, run: str, now: float) -> Path:
    """Where a stamp goes; playbooks of one ansible-playbook are one run, and two may end within a second."""
    first = path = folder / stamp_name(run, now)
    number = 1
    while path.exists():
        number += 1
        path = first.with_name(f"{first.stem}-{number}.json")
    return path


def old_stamps(names: list[str], keep: int) -> list[str]:
    """The stamps that go when the newest `keep` stay; other files are not ours to remove."""
    ours = sorted(name for name in names if STAMP.fullmatch(name))
    return ours[: max(len(ours) - keep, 0)]


def ensure(
    plan_file: Path,
    runs: Path,
    summary: Mapping[str, Any],
    run: Mapping[str, Any],
    keep: int,
    check_only: bool = False,
    now: float | None = None,
    records: Sequence[Path] = (),
) -> dict[str, Any]:
    """Writes both. Returns `changed` (of the plan only), `before` and `after` texts, and the stamp's path.

    `run`: `id`, `by`, `commit`, `controller`, `plan` (digest); what is "" stays so. `records`: folders that hold
    nothing but what runs leave on a node, `runs` beside them, which an undo removes.
    """
    before, after = read_text(plan_file), plan_text(summary)
    is_so = before == after and _rights(plan_file) == (MODE, os.geteuid(), os.getegid())
    answer = {"changed": not is_so, "before": before, "after": after, "stamp": ""}
    if check_only:
        return answer
    journal = Journal(ROLE)
    journal.remember_paths([plan_file])
    journal.remember_trees([runs, *records], ours=True)
    if not is_so:
        write_atomic(plan_file, after, MODE)
    digest = hashlib.sha256(after.encode()).hexdigest()
    rights = {"mode": MODE, "uid": os.geteuid(), "gid": os.getegid()}
    seal.claim([seal.path_row(plan_file, "file", **rights, sha256=digest)])
    at = time.time() if now is None else now
    stamp = stamp_path(runs, str(run.get("id", "")), at)
    text = {"schema_version": SCHEMA_VERSION, "at": round(at, 3), "changed_plan": before != after, **run}
    write_atomic(stamp, json.dumps(text, indent=1, sort_keys=True) + "\n")
    for name in old_stamps([path.name for path in runs.iterdir()], keep):
        (runs / name).unlink(missing_ok=True)
    return {**answer, "stamp": str(stamp)}


def _rights(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid
