"""A playbook without what a run's tags leave out of it. Pure.

Ansible goes through every play, role and host also where tags leave nothing to do there, and works out all variables
each time; on ten hosts that took a third of a run of one role. What is left here is what it would have played.

Where the last role is one call of a module, the last call on its hosts goes along with it (`ALONG`): the node writes
down what was done, seals it and is given back at once, which saves a task on every host. It does so where the role
changed something; a host on which it did not come about gets the call by itself, as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

ALWAYS = "always"
ALONG = "run_stamp_along"
"""Variable of a play whose last role has the last call along (`Along`)."""

DONE_GROUP = "run_stamp_done"
"""Group of the hosts that had it."""

STAMP = "run_stamp"
LOOPS = ("loop", "until")
NOT_YET = f"{{{{ groups['all'] | difference(groups['{DONE_GROUP}'] | default([])) }}}}"

Parts = Callable[[str, str], Any]
"""(role, "tasks" or "defaults") -> what its main file there says."""


def narrowed(plays: Sequence[Mapping[str, Any]], tags: Iterable[str], parts: Parts) -> list[dict[str, Any]]:
    """The plays (as YAML has them) that have a task with one of the tags, or one that is always played, with these
    tasks only. What stands before all tasks of the first play is done before all tasks of the first that is left."""
    wanted = {*tags, ALWAYS}
    left = [{**play, "tasks": _picked(play.get("tasks") or (), wanted)} for play in plays]
    before = [task for play in left for task in _picked(play.pop("pre_tasks", None) or (), wanted)]
    left = [play for play in left if play["tasks"]]
    if before and left:
        left[0] = {**left[0], "pre_tasks": before}
    return _with_last_along(left, parts)


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


def _with_last_along(plays: list[dict[str, Any]], parts: Parts) -> list[dict[str, Any]]:
    """The plays with `ALONG` in the one before the last, where that can be; else as they are."""
    if len(plays) < 2:
        return plays
    *first, before, last = plays
    stamp, role = _last_role(last), _last_role(before)
    if stamp is None or role is None or before["hosts"] != last["hosts"] or _role(stamp) != STAMP:
        return plays
    if not _is_one_call(parts(_role(role), "tasks")):
        return plays
    (task,) = parts(STAMP, "tasks")
    along = {
        "role": _role(role),
        "options": task[STAMP],
        "defaults": parts(STAMP, "defaults"),
        "vars": stamp.get("vars") or {},
    }
    before = {**before, "vars": {**(before.get("vars") or {}), ALONG: along}}
    return [*first, before, {**last, "hosts": NOT_YET}]


def _last_role(play: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The task that imports a whole role, when it is a play's last."""
    tasks = play["tasks"]
    task: Mapping[str, Any] = (tasks[-1].get("block") or tasks)[-1]
    whole = task.get("ansible.builtin.import_role")
    return task if whole and "tasks_from" not in whole else None


def _role(task: Mapping[str, Any]) -> str:
    return str(task["ansible.builtin.import_role"]["name"])


def _is_one_call(tasks: Sequence[Mapping[str, Any]]) -> bool:
    """Is a role one task, done once?"""
    return len(tasks) == 1 and not any(word in LOOPS or word.startswith("with_") for word in tasks[0])
