"""Users that programs run as: no home, no shell, each with a group of its own name (module `node_accounts`)."""

from __future__ import annotations

import grp
import pwd
import shutil
from collections.abc import Sequence
from typing import Any

from . import seal
from .undo import Journal, is_group, is_user, run

HOME = "/nonexistent"
SHELL = "/usr/sbin/nologin"


class AccountsFailed(Exception):
    """Which account could not be made, and what was said."""


def commands(name: str, ours: bool) -> list[list[str]]:
    """What is to be called so that there are a user and a group of this name; one of ours is put right, and one that
    was there before us stays as it is."""
    todo = [] if is_group(name) else [["groupadd", "--system", name]]
    wanted = {"--gid": name, "--home": HOME, "--shell": SHELL}
    if not is_user(name):
        options = [word for pair in wanted.items() for word in pair]
        todo.append(["useradd", "--system", "--no-create-home", *options, name])
    elif ours:
        # Only what differs: a home is not changed while the user's programs run, also when it stays the same.
        now = dict(zip(wanted, _how(name), strict=True))
        wrong = [word for option, value in wanted.items() if now[option] != value for word in (option, value)]
        todo += [["usermod", *wrong, name]] if wrong else []
    return todo


def _how(name: str) -> tuple[str, str, str]:
    """Group, home and shell of a user; "" for a group that is gone."""
    about = pwd.getpwnam(name)
    try:
        group = grp.getgrgid(about.pw_gid).gr_name
    except KeyError:
        group = ""
    return group, about.pw_dir, about.pw_shell


def _claims(name: str, ours: bool) -> list[dict[str, Any]]:
    """What is to stay so."""
    how = {"group": name, "home": HOME, "shell": SHELL} if ours else {}
    return [
        {"kind": "user", "name": name, "uid": None, **how},
        {"kind": "group", "name": name, "gid": None},
    ]


def apply(names: Sequence[str], check_only: bool = False, undo: str = "") -> dict[str, Any]:
    """Makes the accounts that are missing: {changed, done, diff}. Raises AccountsFailed.

    `undo`: the role in whose journal they are kept (bringup/node/undo.py).
    """
    ours = Journal(undo).data["users"] if undo else []
    todo = [command for name in names for command in commands(name, name in ours)]
    done = [f"{'group' if words[0] == 'groupadd' else 'user'} {words[-1]}" for words in todo]
    if not check_only and undo:
        journal = Journal(undo)
        journal.remember_accounts(names)
        ours = journal.data["users"]
    for words in () if check_only else todo:
        code, said = run([shutil.which(words[0], path="/usr/sbin:/sbin") or words[0], *words[1:]])
        if code != 0:
            raise AccountsFailed(f"{' '.join(words)}: {said}")
    if not check_only:
        seal.claim(row for name in names for row in _claims(name, name in ours))
    diff = {"before": "", "after": "\n".join(done) + "\n"} if done else {}
    return {"changed": bool(done), "done": done, "diff": diff}
