"""The floor's half on a host: brings a list of things about, or finds that nothing is to change. Standard library.

The first line of code is filled by the controller: one program, one round trip. Prints, as JSON, what was changed.
"""

# pathlib takes longer to load than the rest of this takes:
# ruff: noqa: PTH101, PTH103, PTH105, PTH108, PTH114, PTH115, PTH120, PTH123, PTH211

from __future__ import annotations

import grp
import hashlib
import json
import os
import pwd
import stat
import subprocess
import sys

THINGS = "[]"
changed: list[str] = []


def account(thing: dict[str, str]) -> None:
    name = thing["path"]
    try:
        grp.getgrnam(name)
    except KeyError:
        subprocess.run(["groupadd", "--system", name], check=True)
        changed.append("group " + name)
    try:
        pwd.getpwnam(name)
    except KeyError:
        options = ["--system", "--no-create-home", "--home", "/nonexistent", "--shell", "/usr/sbin/nologin"]
        subprocess.run(["useradd", *options, "--gid", name, name], check=True)
        changed.append("user " + name)


def looked(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except FileNotFoundError:
        return None


def read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def rights(thing: dict[str, str], status: os.stat_result | None) -> bool:
    owner = (pwd.getpwnam(thing["owner"]).pw_uid, grp.getgrnam(thing["group"]).gr_gid)
    wrong = False
    if status is None or (status.st_uid, status.st_gid) != owner:
        os.chown(thing["path"], *owner)
        wrong = True
    if status is None or stat.S_IMODE(status.st_mode) != int(thing["mode"], 8):
        os.chmod(thing["path"], int(thing["mode"], 8))
        wrong = True
    return wrong


def folder(thing: dict[str, str]) -> None:
    before = looked(thing["path"])
    if before is None:
        os.makedirs(thing["path"])
    if rights(thing, before):
        changed.append(thing["path"])


def file(thing: dict[str, str]) -> None:
    path, content = thing["path"], thing["content"].encode()
    before = looked(path)
    if before is None or not stat.S_ISREG(before.st_mode) or read(path) != content:
        with open(path + ".new", "wb") as new:
            new.write(content)
            new.flush()
            os.fsync(new.fileno())
        rights({**thing, "path": path + ".new"}, None)
        os.replace(path + ".new", path)
        changed.append(path)
    elif rights(thing, before):
        changed.append(path)


def link(thing: dict[str, str]) -> None:
    path = thing["path"]
    if not os.path.islink(path) or os.readlink(path) != thing["target"]:
        if looked(path):
            os.unlink(path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.symlink(thing["target"], path)
        changed.append(path)


def absent(thing: dict[str, str]) -> None:
    if looked(thing["path"]):
        os.unlink(thing["path"])
        changed.append(thing["path"])


def weight(thing: dict[str, str]) -> None:
    if hashlib.sha256(read(thing["path"])).hexdigest() != thing["sha256"]:
        sys.exit(thing["path"] + " is not what it should be")


for one in json.loads(THINGS):
    globals()[one["kind"]](one)
print(json.dumps(changed))
