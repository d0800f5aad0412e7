"""Users that programs run as: no home, no shell, each with a group of its own name (module `node_accounts`)."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Any

from .undo import Journal, is_group, is_user, run

HOME = "/nonexistent"
SHELL = "/usr/sbin/nologin"


class AccountsFailed(Exception):
    """Which account could not be made, and what was said."""


def commands(name: str) -> list[list[str]]:
    """What is to be called so that there are a user and a group of this name; one that is there stays as it is."""
    missing = [] if is_group(name) else [["groupadd", "--system", name]]
    if not is_user(name):
        words = ["useradd", "--system", "--gid", name, "--home-dir", HOME, "--no-create-home"]
        missing.append([*words, "--shell", SHELL, name])
    return missing


def apply(names: Sequence[str], check_only: bool = False, undo: str = "") -> dict[str, Any]:
    """Makes the accounts that are missing: {changed, done, diff}. Raises AccountsFailed.

    `undo`: the role in whose journal they are kept (bringup/node/undo.py).
    """
    todo = [command for name in names for command in commands(name)]
    done = [f"{'user' if words[0] == 'useradd' else 'group'} {words[-1]}" for words in todo]
    if not check_only and undo:
        Journal(undo).remember_accounts(names)
    for words in () if check_only else todo:
        code, said = run([shutil.which(words[0], path="/usr/sbin:/sbin") or words[0], *words[1:]])
        if code != 0:
            raise AccountsFailed(f"{' '.join(words)}: {said}")
    diff = {"before": "", "after": "\n".join(done) + "\n"} if done else {}
    return {"changed": bool(done), "done": done, "diff": diff}
