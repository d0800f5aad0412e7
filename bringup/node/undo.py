"""What a role changes on a node, remembered before the first change, and brought back byte for byte.

One journal a role, `/var/lib/bringup/undo/ROLE.json` (root, 0600: it may hold the text of files). What is in
it was written to the disk before the change that it is about, so a run that is killed can be undone as well.
The first memory of a thing stays: it is what the node had before the role ever came. Where two roles bring the
same thing, both remember what was there before the first of them, and it goes with the last.
"""

from __future__ import annotations

import base64
import grp
import json
import os
import pwd
import re
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from .files import read_text, sync_folder, write_atomic
from .inuse import users

FOLDER = Path("/var/lib/bringup/undo")
UNIT_LINKS = Path("/etc/systemd/system")
SCHEMA_VERSION = 1
NOTHING: Mapping[str, Any] = {"kind": ""}
"""How a journal says that a path was not there."""

NAMES_SHOWN = 4

COMMAND_LIMIT_S = 1200
"""Seconds that one command may take: building kernel modules again after a package is the longest."""

PACKAGE_LOCK_LIMIT_S = 300
"""Seconds to wait for somebody else's package manager."""

QUERY = "${Package}:${Architecture}\t${Version}\t${db:Status-Abbrev}\n"


class UndoFailed(Exception):
    """What could not be brought back, one line a thing; the journal is kept."""


def run(argv: Sequence[str], limit_s: float = COMMAND_LIMIT_S) -> tuple[int, str]:
    """Exit code and everything that was said; 127: there is no such command, 124: it took too long."""
    environment = {**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=limit_s,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 124, f"{argv[0]} took longer than {limit_s:g} s"
    except OSError as error:
        return 127, str(error)
    return done.returncode, done.stdout.decode("utf-8", "replace").strip()


def installed(states: str = "i") -> dict[str, str]:
    """Version of each installed package, by `name:architecture`; states "ic": also those whose settings stayed."""
    found = {}
    for line in run(["dpkg-query", "-W", "-f", QUERY])[1].splitlines():
        name, _, rest = line.partition("\t")
        version, _, status = rest.partition("\t")
        if status[1:2] and status[1:2] in states:
            found[name] = version
    return found


def meaning(text: str) -> str:
    """What a kernel file says: the chosen word of `always [madvise] never`, else the text."""
    chosen = re.search(r"\[([^\]]+)\]", text)
    return chosen.group(1) if chosen else " ".join(text.split())


class Journal:
    """The memory of one role. Every `remember_*` is on the disk when it returns."""

    def __init__(self, role: str, folder: Path | None = None) -> None:
        self.file = (folder or FOLDER) / f"{role}.json"
        self.data: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "role": role,
            "paths": {},
            "trees": [],
            "guarded": [],
            "found": [],
            "users": [],
            "groups": [],
            "sizes": {},
            "values": {},
            "units": {},
            "packages": {"added": [], "replaced": {}},
            "installing": None,
            "holds": [],
            "held": [],
            "after": [],
        }
        self.kept: list[str] = []
        """What `restore` left in its place and why, one line a thing."""
        with suppress(OSError, ValueError):
            self.data.update(json.loads(self.file.read_text(encoding="utf-8")))

    def others(self) -> list[dict[str, Any]]:
        """What the other roles' journals on this node hold."""
        found = []
        for file in sorted(self.file.parent.glob("*.json")):
            if file != self.file:
                with suppress(OSError, ValueError):
                    found.append(json.loads(file.read_text(encoding="utf-8")))
        return found

    def _shared(self, name: str) -> set[str]:
        """The names under `name` that another role has brought as well: they go with that one."""
        return {text for row in self.others() for text in row.get(name, ())}

    def save(self) -> None:
        """To the disk, readable by root only."""
        folder = self.file.parent
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        write_atomic(self.file, json.dumps(self.data, indent=1, sort_keys=True) + "\n", 0o600)
        sync_folder(folder)

    def is_empty(self) -> bool:
        """Has the role changed nothing?"""
        packages = self.data["packages"]
        names = ("paths", "trees", "found", "users", "groups", "sizes", "values", "units", "holds")
        begun = self.data["installing"] is not None
        return not any([*map(self.data.get, names), begun, packages["added"], packages["replaced"]])

    def remember_paths(self, paths: Iterable[Path]) -> None:
        """Files, folders and links as they are now, and which folders above them are not there."""
        fresh = [path for path in dict.fromkeys(paths) if str(path) not in self.data["paths"]]
        if not fresh:
            return
        known = {text: was for row in self.others() for text, was in row["paths"].items()}
        for given in fresh:
            for path in (given, *(above for above in given.parents if _is_made(above, known))):
                self.data["paths"].setdefault(str(path), known.get(str(path)) or look(path))
        self.save()

    def remember_trees(self, trees: Iterable[Path], ours: bool = False) -> None:
        """Folders that are about to be made and filled: an undo removes each whole. One that is there already
        is somebody else's, and stays, unless another role has made it or it is `ours` by its name.
        """
        fresh = [tree for tree in trees if str(tree) not in self.data["trees"]]
        shared = self._shared("trees") if fresh else set()
        for tree in fresh:
            if ours or str(tree) in shared or not os.path.lexists(tree):
                self.remember_paths(_missing_parents(tree))
                self.data["trees"].append(str(tree))
                self.save()

    def remember_content(self, folder: Path, files: Iterable[Path], trees: Iterable[Path] = ()) -> None:
        """A folder whose content is precious, and what a role is about to bring into it: an undo removes no
        more than that, and nothing as long as something uses the folder.
        """
        files = list(files)
        lists = {name: list(self.data[name]) for name in ("guarded", "found")}
        known = {text: was for row in (self.data, *self.others()) for text, was in row["paths"].items()}
        there = [path for path in files if os.path.lexists(path) and known.get(str(path)) != NOTHING]
        self._append("found" if there else "guarded", str(folder))
        if len(there) < len(files):
            self._append("guarded", str(folder))
        if lists != {name: self.data[name] for name in lists}:
            self.save()
        self.remember_paths(path for path in files if path not in there)
        self.remember_trees(trees)

    def _append(self, name: str, text: str) -> None:
        if text not in self.data[name]:
            self.data[name].append(text)

    def remember_accounts(self, names: Iterable[str]) -> None:
        """Users that are about to be made, each with a group of its name; one that is there stays."""
        names = list(names)
        before = {name: list(self.data[name]) for name in ("users", "groups")}
        for kind, is_there in (("users", is_user), ("groups", is_group)):
            fresh = [name for name in names if name not in self.data[kind]]
            shared = self._shared(kind) if fresh else set()
            self.data[kind] += [name for name in fresh if name in shared or not is_there(name)]
        if before != {name: self.data[name] for name in before}:
            self.save()

    def remember_size(self, mount: Path) -> None:
        """The size of a file system in memory before it is changed."""
        if str(mount) not in self.data["sizes"]:
            self.data["sizes"][str(mount)] = size_of(mount)
            self.save()

    def remember_value(self, path: str, text: str) -> None:
        """A kernel setting (a file in /proc/sys or /sys) before it is written."""
        if path not in self.data["values"]:
            self.data["values"][path] = text
            self.save()

    def remember_unit(self, name: str, state: str, active: bool) -> None:
        """A unit before it is enabled, disabled, started or stopped; `state`: its UnitFileState."""
        if name in self.data["units"]:
            return
        links = [*UNIT_LINKS.glob(f"*.wants/{name}"), *UNIT_LINKS.glob(f"*.requires/{name}")]
        self.data["units"][name] = {"state": state, "active": active}
        self.remember_paths(links)
        self.save()

    def remember_holds(self, names: Iterable[str]) -> None:
        """Packages that are about to be held."""
        self.data["holds"] = sorted({*self.data["holds"], *names})
        self.save()

    def remember_after(self, command: Sequence[str]) -> None:
        """A command that must run when all is back, such as `ldconfig`."""
        if list(command) not in self.data["after"]:
            self.data["after"].append(list(command))
            self.save()

    def begin_install(self) -> None:
        """Before packages change: what is installed now. An earlier begin without its end stays."""
        if self.data["installing"] is None:
            self.data["installing"] = installed()
            # What this role holds itself is no state of before.
            others = {*run(["apt-mark", "showhold"])[1].split()} - {*self.data["holds"]}
            self.data["held"] = sorted({*self.data["held"], *others})
            self.save()

    def end_install(self, keep: bool = True) -> None:
        """After packages changed: which came, and what those that were replaced had been."""
        before, after = self.data["installing"] or {}, installed()
        packages = self.data["packages"]
        known = {*packages["added"], *packages["replaced"]}
        for name in sorted({*before, *after}):
            if before.get(name) == after.get(name) or name in known:
                continue
            if name in before:
                packages["replaced"][name] = before[name]
            else:
                packages["added"].append(name)
        self.data["installing"] = None
        if keep:
            self.save()

    # --- back ---------------------------------------------------------------------------------------------

    def restore(
        self, check_only: bool = False, used_by: Callable[[Path], Sequence[str]] = lambda folder: ()
    ) -> list[str]:
        """Brings everything back and forgets it; what was done, one line a thing. Raises UndoFailed.

        `used_by`: who uses a folder whose content is precious (`remember_content`); it stays then, is named in
        `kept`, and the journal goes on to know it.
        """
        if self.is_empty():
            return []
        done: list[str] = []
        failed: list[str] = []
        self._refuse_in_use(done, check_only)
        self._units_off(done, failed, check_only)
        self._packages_back(done, failed, check_only)
        used: list[Path] = []
        if not failed:
            used = self._used(done, used_by, check_only)
            self._trees_off(done, failed, used, check_only)
            self._paths_back(done, failed, used, check_only)
            self._accounts_off(done, failed, check_only)
            self._sizes_back(done, failed, check_only)
            self._values_back(done, failed, check_only)
            self._units_back(done, failed, check_only)
        if failed:
            raise UndoFailed("\n".join(failed))
        if not check_only:
            for command in self.data["after"]:
                run(command)
            self._forget(used)
        return done

    def _forget(self, used: Sequence[Path]) -> None:
        """Ends the journal, but for folders that stay because something uses them."""
        left = {name: self.data[name] for name in ("paths", "trees", "guarded")}
        self.file.unlink(missing_ok=True)
        self.break_seals()
        if used:
            journal = Journal(str(self.data["role"]), self.file.parent)
            near = {
                text
                for text in left["paths"]
                if _is_below(text, used) or any(Path(text) in folder.parents for folder in used)
            }
            journal.data["paths"] = {text: left["paths"][text] for text in sorted(near)}
            journal.data["trees"] = [text for text in left["trees"] if _is_below(text, used)]
            journal.data["guarded"] = list(map(str, used))
            journal.save()
        for folder in (self.file.parent, self.file.parent.parent):
            with suppress(OSError):
                folder.rmdir()

    def break_seals(self) -> None:
        """Removes the role's evidence, and that of a look at the node as it was; also of a role that had nothing to
        change.
        """
        seals = self.file.parent.with_name("seals")
        for folder in (seals / "claims", seals):
            for name in (self.file.name, "preflight.json"):
                (folder / name).unlink(missing_ok=True)
        for folder in (seals / "claims", seals, seals.parent):
            with suppress(OSError):
                folder.rmdir()

    def _refuse_in_use(self, done: list[str], check: bool) -> None:
        going = [Path(tree) for tree in self.data["trees"] if tree not in self._shared("trees")]
        # Those of units that this undo stops are no obstacle.
        stopped = [f"/{name}" for name, before in self.data["units"].items() if not before["active"]]
        running = {
            tree: [pid for pid in pids if not _unit_path(pid).endswith(tuple(stopped))]
            for tree, pids in users(going).items()
        }
        rows = [
            f"processes {', '.join(map(str, pids))} run from {tree}" for tree, pids in running.items() if pids
        ]
        if rows and not check:
            raise UndoFailed(f"{'; '.join(rows)}. Stop their service, then run this again.")
        # A rehearsal of several roles' undo has stopped nothing yet.
        done += [f"refuse as long as {row}" for row in rows]

    def _used(self, done: list[str], used_by: Callable[[Path], Sequence[str]], check: bool) -> list[Path]:
        self.kept += [f"{text}: files that were there before" for text in self.data["found"]]
        used = []
        for folder in map(Path, self.data["guarded"]):
            who = ", ".join(used_by(folder)) if folder.is_dir() else ""
            if who and not check:
                used.append(folder)
                self.kept.append(f"{folder}: {who} uses it. Once nothing does, run this again")
            elif who:
                done.append(f"keep {folder} if {who} still uses it then")
        return used

    def _trees_off(self, done: list[str], failed: list[str], used: Sequence[Path], check: bool) -> None:
        shared = self._shared("trees")
        for text in self.data["trees"]:
            if not Path(text).is_dir() or text in shared or _is_below(text, used):
                continue
            done.append(f"remove {text} and all in it")
            try:
                if not check:
                    remove_tree(Path(text))
            except OSError as error:
                failed.append(f"{text}: {error}")

    def _accounts_off(self, done: list[str], failed: list[str], check: bool) -> None:
        gone = {
            kind: [name for name in self.data[kind] if is_there(name) and name not in self._shared(kind)]
            for kind, is_there in (("users", is_user), ("groups", is_group))
        }
        done += [f"remove user {name}" for name in gone["users"]]
        done += [f"remove group {name}" for name in gone["groups"]]
        if check:
            return
        left = [Path(text) for text, was in self.data["paths"].items() if was == NOTHING]
        uids = {pwd.getpwnam(name).pw_uid for name in gone["users"]}
        gids = {grp.getgrnam(name).gr_gid for name in gone["groups"]}
        hand_over([path for path in left if path.is_dir()], uids, gids)
        for command, name in (
            *(("userdel", name) for name in gone["users"]),
            *(("groupdel", name) for name in gone["groups"]),
        ):
            # userdel takes a group of the user's own along.
            if command == "userdel" or is_group(name):
                self._said([command, name], failed)

    def _sizes_back(self, done: list[str], failed: list[str], check: bool) -> None:
        for mount, size in self.data["sizes"].items():
            if size_of(Path(mount)) == size:
                continue
            done.append(f"size of {mount}: {size} bytes")
            code, said = (0, "") if check else run(["mount", "-o", f"remount,size={size}", mount])
            if code != 0:
                failed.append(f"{mount} does not become {size} bytes: {said}")

    def _systemctl(self, words: Sequence[str], done: list[str], failed: list[str], check: bool) -> None:
        done.append(" ".join(words))
        code, said = (0, "") if check else run(["systemctl", *words])
        if code != 0:
            failed.append(f"systemctl {' '.join(words)}: {said}")

    def _units_off(self, done: list[str], failed: list[str], check: bool) -> None:
        for name, before in self.data["units"].items():
            now, active = unit_state(name)
            if active and not before["active"]:
                self._systemctl(["stop", name], done, failed, check)
            if now == "enabled" and before["state"] not in ("enabled", "enabled-runtime"):
                self._systemctl(["disable", name], done, failed, check)

    def _units_back(self, done: list[str], failed: list[str], check: bool) -> None:
        if not check:
            run(["systemctl", "daemon-reload"])
        # Their restored links enable them; a rehearsal has restored none.
        linked = {
            Path(text).name
            for text, was in self.data["paths"].items()
            if check and was["kind"] == "link" and Path(text).parent.suffix in (".wants", ".requires")
        }
        for name, before in self.data["units"].items():
            now, active = unit_state(name)
            if before["state"] == "enabled" and now not in ("enabled", "") and name not in linked:
                self._systemctl(["enable", name], done, failed, check)
            if before["active"] and not active:
                self._systemctl(["start", name], done, failed, check)
            if not before["state"] and not check:
                # A unit that is no more is not to be listed as failed.
                run(["systemctl", "reset-failed", name])

    def _packages_back(self, done: list[str], failed: list[str], check: bool) -> None:
        if self.data["installing"] is not None:
            self.end_install(keep=not check)
        now = installed()
        holds = [name for name in self.data["holds"] if name not in self.data["held"]]
        if holds:
            done.append(f"unhold {' '.join(holds)}")
            if not check:
                run(["apt-mark", "unhold", *holds])
        packages = self.data["packages"]
        gone = [name for name in packages["added"] if name in installed("ic")]
        back = [
            f"{name}={version}" for name, version in packages["replaced"].items() if now.get(name) != version
        ]
        done += [f"install {word}" for word in back] + [f"purge {name}" for name in gone]
        if check:
            return
        if back:
            # One call, so that what conflicts leaves while what was there before comes back.
            words = ["apt-get", "-o", f"DPkg::Lock::Timeout={PACKAGE_LOCK_LIMIT_S}", "install", "-q", "-y"]
            words += ["--allow-downgrades", "--no-install-recommends", *back]
            self._said([*words, *(f"{name}-" for name in gone if name in now)], failed)
        left = [name for name in gone if name in installed("ic")]
        if left and not failed:
            # dpkg refuses where somebody's package needs one of these; apt would take that away as well.
            self._said(["dpkg", "--purge", *left], failed)
        if back and self.data["held"] and not failed:
            run(["apt-mark", "hold", *self.data["held"]])

    def _said(self, words: Sequence[str], failed: list[str]) -> None:
        code, said = run(words)
        if code != 0:
            failed.append(f"{' '.join(words)}: {said[-600:]}")

    def _paths_back(self, done: list[str], failed: list[str], used: Sequence[Path], check: bool) -> None:
        shared, trees = self._shared("paths"), set(self.data["trees"]) - self._shared("trees")
        whole, gone = [Path(tree) for tree in trees if not _is_below(tree, used)], set(trees)
        # Deepest first, so that a folder is empty when its turn comes.
        for text in sorted(self.data["paths"], key=lambda name: (-name.count("/"), name)):
            path, before = Path(text), self.data["paths"][text]
            if text in shared or _is_below(text, [*used, *whole]) or look(path) == before:
                continue
            if before == NOTHING and (left := _holds(path, gone)):
                self._say_kept(path, left)
                continue
            gone |= {text} if before == NOTHING else set()
            done.append(f"restore {text}" if before["kind"] else f"remove {text}")
            try:
                if not check:
                    put_back(path, before)
            except OSError as error:
                failed.append(f"{text}: {error.strerror}")

    def _say_kept(self, folder: Path, left: Sequence[str]) -> None:
        """A folder that holds what an undo does not touch; one above it is not named again."""
        if not any(line.startswith((f"{folder}/", f"{folder}:")) for line in self.kept):
            more = f" and {len(left) - NAMES_SHOWN} more" if len(left) > NAMES_SHOWN else ""
            self.kept.append(f"{folder}: holds {', '.join(left[:NAMES_SHOWN])}{more}")

    def _values_back(self, done: list[str], failed: list[str], check: bool) -> None:
        for text, before in self.data["values"].items():
            with suppress(OSError):
                if meaning(Path(text).read_text(encoding="utf-8", errors="replace")) == before:
                    continue
            done.append(f"write {before} to {text}")
            try:
                if not check:
                    Path(text).write_text(f"{before}\n", encoding="utf-8")
            except OSError as error:
                failed.append(f"{text}: {error.strerror}")


def unit_state(name: str) -> tuple[str, bool]:
    """UnitFileState ("" for no such unit) and whether it runs."""
    _, out = run(["systemctl", "show", name, "--property", "UnitFileState,ActiveState"])
    found = dict(line.split("=", 1) for line in out.splitlines() if "=" in line)
    return found.get("UnitFileState", ""), found.get("ActiveState") in ("active", "activating", "reloading")


def size_of(mount: Path) -> int:
    """Bytes of a file system."""
    room = os.statvfs(mount)
    return room.f_blocks * room.f_frsize


def remove_tree(tree: Path) -> None:
    """Removes a folder: its own files first, so that what says "this is whole" goes before what it is about."""
    for path in sorted(tree.iterdir()):
        if path.is_symlink() or not path.is_dir():
            path.unlink()
    shutil.rmtree(tree)


def _unit_path(pid: int) -> str:
    """The control group of a process, which ends with its unit's name; "" when it is gone."""
    return read_text(Path(f"/proc/{pid}/cgroup")).strip()


def _holds(path: Path, gone: set[str]) -> list[str]:
    """What a folder holds beside what goes; nothing for what is no folder."""
    if path.is_symlink() or not path.is_dir():
        return []
    return sorted(inner.name for inner in path.iterdir() if str(inner) not in gone)


def hand_over(folders: Iterable[Path], uids: set[int], gids: set[int]) -> None:
    """Gives what stays of users and groups that go to root: their numbers may soon be somebody else's."""
    for folder in folders if uids or gids else ():
        for path in (folder, *folder.rglob("*")):
            status = path.lstat()
            uid, gid = (0 if status.st_uid in uids else -1), (0 if status.st_gid in gids else -1)
            if (uid, gid) != (-1, -1):
                # Changing the owner takes the set-group-ID bit of a folder away.
                os.chown(path, uid, gid, follow_symlinks=False)
                if not path.is_symlink():
                    path.chmod(stat.S_IMODE(status.st_mode))


def is_user(name: str) -> bool:
    """Is there a user of this name?"""
    try:
        return bool(pwd.getpwnam(name))
    except KeyError:
        return False


def is_group(name: str) -> bool:
    """Is there a group of this name?"""
    try:
        return bool(grp.getgrnam(name))
    except KeyError:
        return False


def _missing_parents(path: Path) -> list[Path]:
    return [folder for folder in path.parents if _is_made(folder, {})]


def _is_made(folder: Path, known: Mapping[str, Mapping[str, Any]]) -> bool:
    """Is a folder not there yet, or there only since another role came?"""
    return known.get(str(folder)) == NOTHING or not (folder.exists() or folder.is_symlink())


def _is_below(text: str, folders: Sequence[Path]) -> bool:
    """Is a path one of the folders, or in one of them?"""
    return any(text == str(folder) or text.startswith(f"{folder}/") for folder in folders)


def look(path: Path) -> dict[str, Any]:
    """A path as the journal keeps it: kind ("" for nothing), rights, content (base64) or a link's target."""
    try:
        status = path.lstat()
    except OSError:
        return {"kind": ""}
    if stat.S_ISLNK(status.st_mode):
        return {"kind": "link", "target": str(path.readlink())}
    rights = {"uid": status.st_uid, "gid": status.st_gid, "mode": stat.S_IMODE(status.st_mode)}
    if stat.S_ISDIR(status.st_mode):
        return {"kind": "directory", **rights}
    return {"kind": "file", **rights, "content": base64.b64encode(path.read_bytes()).decode()}


def put_back(path: Path, before: Mapping[str, Any]) -> None:
    """Makes a path what `look` had seen. A folder that others have filled since stays. Raises OSError."""
    kind = before["kind"]
    if not kind:
        _remove(path)
        return
    if kind == "directory":
        path.mkdir(parents=True, exist_ok=True)
        os.chown(path, before["uid"], before["gid"])
        path.chmod(before["mode"])
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.undo")
    if kind == "link":
        beside.symlink_to(before["target"])
    else:
        beside.write_bytes(base64.b64decode(before["content"]))
        os.chown(beside, before["uid"], before["gid"])
        beside.chmod(before["mode"])
    beside.replace(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        with suppress(OSError):
            path.rmdir()
    else:
        path.unlink(missing_ok=True)
