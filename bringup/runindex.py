"""An index of the runs, so that thousands of them are listed at once: `runs/index.sqlite`.

It holds nothing of its own: whatever is missing or older than its record is read again, and a broken or
removed file is made anew. Records are the truth, and only they are in the chain.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from bringup import runs
from bringup.errors import UsageError
from bringup.runs import RunRecord

NAME = "index.sqlite"
VERSION = 1
WAIT_S = 10.0
TABLE = """create table if not exists runs (
  id text primary key, read_ns integer, name text, inventory text, status text, exit_code integer, who text,
  begun text, seconds real, "commit" text, plan_digest text, hosts integer, changed integer
)"""


def listed(
    inventory: str | None = None, limit: int = 20, folder: Path | None = None, *, name: str | None = None
) -> list[RunRecord]:
    """The newest `limit` records (of an inventory, of runs of this name), newest first; an unreadable one is
    left out."""
    base = folder or runs.FOLDER
    if not base.is_dir():
        return []
    with closing(_opened(base)) as index:
        refresh(index, base)
        found = index.execute(
            "select id from runs where (?1 is null or inventory = ?1) and (?2 is null or name = ?2)"
            " order by id desc limit ?3",
            (inventory, name, limit),
        ).fetchall()
    return [runs.read(row[0], base) for row in found]


def refresh(index: sqlite3.Connection, base: Path) -> int:
    """Reads records that are new or changed, and forgets those that are gone; how many were read."""
    times = {path.parent.name: path.stat().st_mtime_ns for path in base.glob("*/record.json")}
    known = dict(index.execute("select id, read_ns from runs").fetchall())
    index.executemany("delete from runs where id = ?", [(one,) for one in known if one not in times])
    rows = [_row(one, at, base) for one, at in times.items() if known.get(one) != at]
    index.executemany(
        f"insert or replace into runs values ({', '.join('?' * 13)})", [row for row in rows if row]
    )
    index.commit()
    return len(rows)


def _row(run_id: str, at: int, base: Path) -> tuple[object, ...] | None:
    try:
        record = runs.read(run_id, base)
    except UsageError:
        return None
    return (
        record.id,
        at,
        record.name,
        record.inventory,
        record.status,
        record.exit_code,
        record.who,
        record.begun,
        record.seconds,
        record.commit,
        record.plan_digest,
        len(record.hosts),
        record.changed,
    )


def _opened(base: Path) -> sqlite3.Connection:
    """The index, made anew when it is broken or of another version."""
    path = base / NAME
    index = sqlite3.connect(path, timeout=WAIT_S)
    try:
        if index.execute("pragma user_version").fetchone()[0] not in (0, VERSION):
            raise sqlite3.DatabaseError("another version")
    except sqlite3.DatabaseError:
        index.close()
        path.unlink(missing_ok=True)
        index = sqlite3.connect(path, timeout=WAIT_S)
    path.chmod(0o600)
    index.execute(TABLE)
    index.execute(f"pragma user_version = {VERSION}")
    return index
