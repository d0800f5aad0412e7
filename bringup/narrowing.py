"""A playbook without what a run's tags leave out of it. Pure.

Ansible goes through every play, role and host also where tags leave nothing to do there, and works out all variables
each time; on ten hosts that took a third of a run of one role. What is left here is what it would have played.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

ALWAYS = "always"


def narrowed(plays: Sequence[Mapping[str, Any]], tags: Iterable[str]) -> list[dict[str, Any]]:
    """The plays (as YAML has them) that have a task with one of the tags, or one that is always played, with these
    tasks only. What stands before all tasks of the first play is done before all tasks of the first that is left."""
    wanted = {*tags, ALWAYS}
    left = [{**play, "tasks": _picked(play.get("tasks") or (), wanted)} for play in plays]
    before = [task for play in left for task in _picked(play.pop("pre_tasks", None) or (), wanted)]
    left = [play for play in left if play["tasks"]]
    if before and left:
        left[0] = {**left[0], "pre_tasks": before}
    return left


def _picked(tasks: Iterable[Mapping[str, Any]], wanted: set[str]) -> list[dict[str, Any]]:
    """Tasks with one of the tags; a block with those in it, and with its rescue."""
    found = []
    for task in tasks:
        if "block" in task:
            inner = _picked(task["block"], wanted)
            if inner:
                found.append({**task, "block": inner})
        elif wanted & set(task.get("tags") or ()):
            found.append(dict(task))
    return found
