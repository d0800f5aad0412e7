"""What a node says of its servers and their restarts, for the text of a test that failed: a log of a machine that is
gone must tell the reason.
"""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor

from bringup import lab
from bringup.errors import BringupError
from tests.e2e.site import Site

LOOK_LIMIT_S = 30
JOURNAL_LINES = 40
MOST = 16_000
"""Characters that are kept of a node; more are left out at the beginning."""

UNITS = "bringup-{0}.service bringup-restart-{0}.service bringup-drift-{0}.service bringup-watch-{0}.service"
PROPERTIES = "Id,ActiveState,SubState,Result,Job,NRestarts,ExecMainStartTimestamp,ExecMainCode,ExecMainStatus"
LOOK = f"""\
date -u +%FT%TZ; uptime
systemctl show {UNITS} --property={PROPERTIES}
echo; systemctl list-jobs --no-pager
systemctl list-timers --all --no-pager 'bringup-*'
head -c 2000 /run/bringup/run.json /run/bringup/restarting/* 2>/dev/null
echo; tail -n 3 /var/lib/bringup/restarts/*.history.jsonl 2>/dev/null
for unit in {UNITS}; do
  echo "-- journal of $unit"; journalctl --unit=$unit --lines={JOURNAL_LINES} --output=short-iso --no-pager --quiet
done
"""
"""Servers, restarts, when they come next, who holds the node, and what each unit said last; {{0}} is a service."""


def of(site: Site) -> str:
    """The state of all nodes of a site, a part each; what cannot be had is said in its place."""
    service = str(site.service()["name"])
    with ThreadPoolExecutor(len(site.names)) as pool:
        found = list(pool.map(lambda name: of_node(name, service), site.names))
    return "\n".join(f"== {name}\n{text}" for name, text in zip(site.names, found, strict=True))


def of_node(name: str, service: str) -> str:
    """The state of one node, at most MOST characters and LOOK_LIMIT_S seconds of it."""
    try:
        engine = lab.find_engine()
        if engine is None:
            return "no engine answers"
        done = engine.tries("exec", name, "sh", "-c", LOOK.format(service), limit=LOOK_LIMIT_S)
    except (BringupError, OSError, subprocess.SubprocessError) as error:
        return f"it cannot be looked at: {error}"
    text = f"{done.stdout}{done.stderr}".strip()
    return text if len(text) <= MOST else f"[...]\n{text[-MOST:]}"
