"""`python -m bringup.runbookdocs` writes docs/runbooks.md: how runbooks run, and what each says in its header."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bringup import ROOT, runbooks
from bringup.runbooks import Runbook

PAGE = ROOT / "docs" / "runbooks.md"
HEAD = """# Runbooks

Made from the runbooks' headers by `python -m bringup.runbookdocs`; edit those.

`invoke run NAME --inventory X` plays one. Every runbook goes the same way:

1. Its header is shown, and the hosts in their order. A disruptive one also shows what is served there now,
   and asks: for the inventory's name when it is more than one host, `y` for one. Without a terminal it
   needs `--yes` (exit 8).
2. Each host is held for the run: two runs never work on one node, whichever controller they come from, and
   however they were started. See [runs.md](runs.md#locks-and-interruptions). Outside of the node's change
   windows it is refused.
3. One host goes first, the canary, then `--serial` at a time. More than `--max-fail` percent failed
   (default 0): the rest is left alone.
4. The step that verifies decides the exit code: 4 when it fails, 7 when what was there before was brought
   back.
5. A failed run prints the command that takes it back on the hosts that failed, and `--resume RUN` goes on
   where a run ended.

`--check` shows what would change. The same file runs without `invoke`, with the same locks and windows:
`ansible-playbook -i inventories/X playbooks/runbooks/NAME.yml`; see [awx.md](awx.md).

## Change windows

```yaml
# inventories/X/group_vars/all.yml
node_change_windows:
  - Mon..Fri 09:00-17:00 Europe/Berlin
  - Sat 22:00-02:00          # begins on Saturday; UTC without a zone
```

Outside of every range nothing is changed, unless `--outside-window REASON` says why it cannot wait; the
reason is in the record. Without ranges a node may be changed at any time. `--check` and looking are always
allowed.

## Writing one

A file `playbooks/runbooks/<verb>-<thing>.yml`: a header with `when`, `effect`, `disruptive`, `undo` (a
command, or `none:` and why), `verify`, `owner` and `duration`; plays with `runbook_serial` and
`runbook_max_fail`, whose first task holds the node and whose last gives it back whatever happens; at least
one task that begins with `Verify:` or `Gate:`. `tests/content/test_runbooks.py` holds it to that, and to being
played, its undo too: by `tests/e2e/test_runbooks.py` on nodes of the lab, or, when it needs GPUs, by
`tests/e2e/test_twins_runbooks.py` on the twin of a node that has eight.

"""


def text(books: Sequence[Runbook] | None = None) -> str:
    """The page."""
    known = runbooks.listed() if books is None else books
    rows = "".join(f"| [{one.name}](#{one.name}) | {_yes(one.disruptive)} | {one.when} |\n" for one in known)
    table = f"## All\n\n| runbook | disrupts | when |\n| --- | --- | --- |\n{rows}\n"
    return HEAD + table + "\n".join(_section(one) for one in known)


def _section(book: Runbook) -> str:
    undo = f"`{book.undo}`" if book.undo.startswith("invoke ") else book.undo
    rows = {
        "When": book.when,
        "Effect": book.effect,
        "Disrupts": _yes(book.disruptive),
        "Undo": undo,
        "Verified by": book.verify,
        "Takes": book.duration,
        "Owner": book.owner,
    }
    return f"## {book.name}\n\n" + "".join(f"- {name}: {said}\n" for name, said in rows.items())


def _yes(said: bool) -> str:
    return "yes" if said else "no"


def write(path: Path = PAGE) -> Path:
    """Writes the page and gives its path."""
    path.write_text(text(), encoding="utf-8")
    return path


if __name__ == "__main__":
    print(write())
