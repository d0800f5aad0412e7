"""What a role left on a node, written down when it did so, and looked at again before the next run.

While a role is played, the modules that change the node record what they own (`claim`). At the end of the run
each role's claims are compared with the node, and only when all of them hold do they become its seal
(`/var/lib/bringup/seals/ROLE.json`, root, 0600): the digest of what went in, and the evidence of what is there.
`verify` compares seals with the node again and changes nothing; a file whose size, times and inode are what
they were is not read a second time.

Standard library only and one file alone, because it is also sent to nodes as it is.
"""

from __future__ import annotations

import grp
import hashlib
import json
import os
import pwd
import re
import stat
import sys
from pathlib import Path

TYPE_CHECKING = False
"""As in `typing`: it, `subprocess` and `shutil` take longer to import than most looks take."""

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any, TypeAlias

    Row: TypeAlias = dict[str, Any]

FOLDER = Path("/var/lib/bringup/seals")
ROLE = "BRINGUP_ROLE"
"""Environment variable of a module's process: the role that is played. Without it nothing is recorded."""

OTHERS = "of others"
"""Field of rows of a seal for what somebody else brought before the role came to its end."""

SCHEMA_VERSION = 1
COMMAND_LIMIT_S = 60
LOCK = Path("/run/bringup/run.json")
STARTED = Path("/run/bringup/started")
SERVE = Path("/opt/bringup/lib/serve.py")
DRIVER = Path("/proc/driver/nvidia/version")
ADMIN_UNITS = ("/etc/systemd/system/", "/run/systemd/system/")
BYTECODE = "__pycache__"
TOUCHED_KEPT = 5
UP = ("active", "activating", "reloading")
ON = ("enabled", "static", "generated", "indirect")
UNIT_PROPERTIES = (
    "ActiveState",
    "UnitFileState",
    "NeedDaemonReload",
    "DropInPaths",
    "InvocationID",
    "Listen",
    "Job",
)
RESTARTERS = ("bringup-restart-{}.service", "bringup-drift-{}.service")
"""Units that restart a server politely, by schedule or for its drift; they run until the new server has answered."""

MANAGER_FILES = Path("/proc/1/fd")
FIFO = re.compile(r"(/\S+) \(FIFO\)")

DIGESTS = {"sha256": "content", "content": "content", "record": "record", "runs from": "runs from"}
"""Fields that are digests, and what is said of them."""


# --- recording ----------------------------------------------------------------------------------------------


def claim(rows: Iterable[Mapping[str, Any]]) -> None:
    """Records what the role that is played now owns on this node; nothing outside of a role.

    A row: `kind` and `name` say which thing, `basis` (true) that it was only looked at and decided by, all else
    how it must be (None: as it is when the seal is made). What a row does not have may be anything.
    """
    role = os.environ.get(ROLE, "")
    if not role:
        return
    path = _claims(role)
    known = _recorded(path)
    if not known:
        # What is sealed from now on is what this run brings.
        break_seal(role)
    known.update({f"{row['kind']} {row['name']}": dict(row) for row in rows})
    _write(path, {"run": _run(), "rows": known})


def _run() -> str:
    """The run that holds this node now; after a boot it is the same again."""
    return str(_read(LOCK).get("token", ""))


def _recorded(path: Path) -> dict[str, Row]:
    """What the run that is under way recorded; what an earlier one recorded and did not seal counts no more."""
    found = _read(path)
    return dict(found["rows"]) if found.get("run") == _run() else {}


def path_row(path: Path | str, state: str, **fields: Any) -> Row:
    """A row for a path: `state` file (`sha256`, `mode`, `uid`, `gid`), directory, link (`target`) or absent."""
    return {"kind": "path", "name": str(path), "state": state, **fields}


def unit_row(name: str, on: bool, active: bool | None = None) -> Row:
    """A row for a unit: whether it starts with the node, and whether it runs (None: either)."""
    row: Row = {"kind": "unit", "name": name, "on": on, "enabled": None, "drop-ins": None, "reload": False}
    if active and name.endswith(".socket"):
        row["listens"] = True
    return row if active is None else {**row, "active": active}


def break_seal(role: str) -> None:
    """Removes a role's seal: what it left is to be changed by something else."""
    _seal_file(role).unlink(missing_ok=True)


def _claims(role: str) -> Path:
    return FOLDER / "claims" / f"{role}.json"


def _seal_file(role: str) -> Path:
    return FOLDER / f"{role}.json"


def _read(path: Path) -> Row:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(path: Path, data: Mapping[str, Any]) -> None:
    """Beside and renamed; it holds digests of secrets, so nobody but root reads it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    FOLDER.chmod(0o700)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(data, file, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


# --- sealing ------------------------------------------------------------------------------------------------


def seal(
    inputs: Mapping[str, str], played: Iterable[str], run: str, at: float
) -> tuple[list[str], dict[str, list[Row]]]:
    """Seals what was recorded: roles that are sealed now, and for each other one what does not hold.

    `inputs`: the digest of what went into each role; one without is not sealed. `played`: roles that came to
    their end, also those that had nothing to do and recorded nothing.
    """
    recorded = {path.stem: _recorded(path) for path in (FOLDER / "claims").glob("*.json")}
    names = [*(role for role, rows in recorded.items() if rows), *played]
    roles = {role: recorded.get(role, {}) for role in names if inputs.get(role)}
    shown = look_up(row for rows in roles.values() for row in rows.values())
    others = _drop_ins_of_others(recorded, shown)
    done, open_ = [], {}
    for role, rows in roles.items():
        evidence, wrong = {}, []
        for key, row in {**rows, **_rows_of_types(rows.values(), others)}.items():
            found = observe(row, shown)
            wrong += differences(row, found)
            evidence[key] = {**row, **found}
            strangers = [path for path in others.get(row["name"], ()) if not _is_of_a_type(path)]
            if row["kind"] == "unit" and strangers:
                wrong.append(_difference(row, "drop-ins", "none of others", strangers))
        if wrong:
            open_[role] = wrong
            break_seal(role)
            continue
        data = {"schema_version": SCHEMA_VERSION, "role": role, "inputs": inputs[role], "run": run, "at": at}
        _write(_seal_file(role), {**data, "rows": evidence})
        done.append(role)
    import shutil

    shutil.rmtree(FOLDER / "claims", ignore_errors=True)
    return done, open_


def _drop_ins_of_others(recorded: Mapping[str, Mapping[str, Row]], shown: Shown) -> dict[str, list[str]]:
    """Unit -> drop-ins of the machine's owner that no role brought, of this run or of an earlier one."""
    sealed = [_read(path).get("rows", {}) for path in sorted(FOLDER.glob("*.json"))]
    ours = {
        row["name"] for rows in (*recorded.values(), *sealed) for row in rows.values() if not row.get(OTHERS)
    }
    found = {name: sorted(set(_drop_ins(state)) - ours) for name, state in shown.units.items()}
    return {name: paths for name, paths in found.items() if paths}


def _is_of_a_type(drop_in: str) -> bool:
    """Is it one for all units of a type (`service.d/x.conf`), which an image or a container brings before we come?
    One for our unit, or for all whose names begin so (`bringup-.service.d`), is not."""
    return "." not in Path(drop_in).parent.name.removesuffix(".d")


def _rows_of_types(rows: Iterable[Row], others: Mapping[str, Sequence[str]]) -> dict[str, Row]:
    """What others say of all units of a type is how this node is: evidence, whose later change is found."""
    names = [str(row["name"]) for row in rows if row["kind"] == "unit"]
    found: dict[str, Row] = {}
    for path in sorted({path for name in names for path in others.get(name, ()) if _is_of_a_type(path)}):
        place = Path(path)
        if place.is_symlink():
            found[f"path {path}"] = {**path_row(path, "link", target=None), OTHERS: True}
            place = place.resolve()
        if place.is_file():
            found[f"path {place}"] = {**path_row(place, "file", sha256=None), OTHERS: True}
    return found


# --- looking again ------------------------------------------------------------------------------------------


def verify() -> dict[str, Row]:
    """Role -> {inputs, run, at, differs, basis} of each seal: what is not as it was left, and what has changed
    of what was only looked at."""
    read = {path.stem: _read(path) for path in sorted(FOLDER.glob("*.json"))}
    seals = {role: data for role, data in read.items() if data.get("schema_version") == SCHEMA_VERSION}
    shown = look_up(row for data in seals.values() for row in data["rows"].values())
    return {role: _verdict(data, shown) for role, data in seals.items()}


def _verdict(data: Row, shown: Shown) -> Row:
    differs: list[Row] = []
    basis: list[Row] = []
    for row in data["rows"].values():
        (basis if row.get("basis") else differs).extend(differences(row, observe(row, shown)))
    known = {name: data.get(name) for name in ("inputs", "run", "at")}
    return {**known, "differs": differs, "basis": basis}


def differences(row: Row, found: Mapping[str, Any]) -> list[Row]:
    """What of a thing is not as its row says; a field that is None there may be anything."""
    return [
        _difference(row, field, row.get(field), value)
        for field, value in found.items()
        if field != "kept" and row.get(field) is not None and row[field] != value
    ]


def _difference(row: Row, field: str, expected: Any, found: Any) -> Row:
    thing = f"{row['kind']} {row['name']}"
    if field in DIGESTS:
        # A digest says nothing to anybody, and one of a secret does not leave the node.
        return {
            "what": thing,
            "field": DIGESTS[field],
            "expected": "as it was left",
            "found": "another" if found else "nothing",
        }
    shape = oct if field == "mode" else lambda value: value
    expected, found = (shape(one) if isinstance(one, int) else one for one in (expected, found))
    return {"what": thing, "field": field, "expected": expected, "found": found}


class Shown:
    """What was asked of the system for all things at once."""

    def __init__(self) -> None:
        self.units: dict[str, dict[str, str]] = {}
        self.packages: dict[str, tuple[str, bool]] = {}
        self.gpus = -1


def look_up(rows: Iterable[Mapping[str, Any]]) -> Shown:
    """One question each to systemd, to the package manager and to the driver, where a row needs it."""
    shown = Shown()
    every = list(rows)
    names = [str(row["name"]) for row in every if row["kind"] in ("unit", "server")]
    names += [unit for row in every if row["kind"] == "one of" for unit in row["units"]]
    shown.units = show_units(sorted(set(names)))
    shown.packages = show_packages(sorted({str(row["name"]) for row in every if row["kind"] == "package"}))
    if any(row["kind"] == "gpus" for row in every):
        shown.gpus = len(re.findall(r"^GPU \d+:", run(["nvidia-smi", "-L"]), re.MULTILINE))
    return shown


def run(argv: Sequence[str]) -> str:
    """What a command prints; empty when it cannot be run or takes too long."""
    import subprocess

    environment = {**os.environ, "LC_ALL": "C"}
    try:
        done = subprocess.run(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=COMMAND_LIMIT_S,
            env=environment,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode("utf-8", "replace")


def show_units(names: Sequence[str]) -> dict[str, dict[str, str]]:
    """UNIT_PROPERTIES of each unit."""
    if not names:
        return {}
    text = run(["systemctl", "show", *names, "--property", ",".join(UNIT_PROPERTIES)])
    shown = [properties(block) for block in text.split("\n\n")]
    return {name: shown[number] if number < len(shown) else {} for number, name in enumerate(names)}


def properties(block: str) -> dict[str, str]:
    """What `systemctl show` says of one unit; a property with several lines has their values with a space between."""
    found: dict[str, str] = {}
    for line in block.splitlines():
        name, equals, value = line.partition("=")
        if equals:
            found[name] = f"{found[name]} {value}" if name in found else value
    return found


def is_listening(listen: str) -> bool:
    """Does systemd hold each FIFO that a socket unit's `Listen` names? When the unit's file goes, if only for a moment,
    systemd lets go of it, and calls the socket active all the same once the file is back ("not functional until
    restarted"). True where that cannot be seen.
    """
    fifos = [Path(path) for path in FIFO.findall(listen)]
    if not fifos:
        return True
    try:
        held = {identity(handle) for handle in MANAGER_FILES.iterdir()} - {None}
    except OSError:
        return True
    return all(identity(path) in held for path in fifos)


def identity(path: Path) -> tuple[int, int] | None:
    """Device and inode of what a path leads to; None when that is nothing."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def show_packages(names: Sequence[str]) -> dict[str, tuple[str, bool]]:
    """Version ("" for one that is not installed) and whether it is held, of each package."""
    if not names:
        return {}
    shape = "${Package}\t${Version}\t${db:Status-Abbrev}\n"
    found = {}
    for line in run(["dpkg-query", "-W", "-f", shape, *names]).splitlines():
        name, version, state = (*line.split("\t"), "", "")[:3]
        found[name] = (version if state[1:2] == "i" else "", state[:1] == "h")
    return {name: found.get(name, ("", False)) for name in names}


# --- one thing ----------------------------------------------------------------------------------------------


def observe(row: Mapping[str, Any], shown: Shown) -> Row:
    """How a thing is now: the fields that its row has, and `kept`, by which a file that nobody touched is known."""
    found = KINDS[str(row["kind"])](row, shown)
    return {field: value for field, value in found.items() if field in row or field == "kept"}


def _path(row: Mapping[str, Any], shown: Shown) -> Row:
    path = Path(row["name"])
    try:
        status = path.lstat()
    except OSError:
        return {"state": "absent"}
    if stat.S_ISLNK(status.st_mode):
        return {"state": "link", "target": str(path.readlink())}
    rights = {"mode": stat.S_IMODE(status.st_mode), "uid": status.st_uid, "gid": status.st_gid}
    if stat.S_ISDIR(status.st_mode):
        return {"state": "directory", **rights}
    if not stat.S_ISREG(status.st_mode):
        return {"state": "other", **rights}
    kept = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
    if "sha256" not in row:
        return {"state": "file", **rights}
    if row.get("kept") == kept:
        return {"state": "file", **rights, "sha256": row["sha256"], "kept": kept}
    return {"state": "file", **rights, "sha256": sha256(path), "kept": kept}


def sha256(path: Path) -> str:
    """Digest of a file's content, "" when it cannot be read."""
    total = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 17):
                total.update(block)
    except OSError:
        return ""
    return total.hexdigest()


def _drop_ins(state: Mapping[str, str]) -> list[str]:
    """Drop-ins that were put there by the machine's owner, not by packages."""
    return [path for path in state.get("DropInPaths", "").split() if path.startswith(ADMIN_UNITS)]


def _unit(row: Mapping[str, Any], shown: Shown) -> Row:
    state = shown.units[row["name"]]
    return {
        "on": state.get("UnitFileState") in ON,
        "enabled": state.get("UnitFileState", ""),
        "active": state.get("ActiveState") in UP,
        "drop-ins": sorted(_drop_ins(state)),
        "reload": state.get("NeedDaemonReload") == "yes",
        "listens": is_listening(state.get("Listen", "")) if "listens" in row else None,
    }


def _server(row: Mapping[str, Any], shown: Shown) -> Row:
    """A server runs, and from the definition that is on the disk; while it is restarted as planned it is as it was.

    What was asked of all things at once may be older than the note of the server's start: what differs is asked anew.
    """
    found = _server_now(row, shown.units)
    if not differences(dict(row), found):
        return found
    units = server_units(row["name"], row["service"])
    sealed = row.get("runs from") is not None
    return dict(row) if sealed and is_restarted(*units.values()) else _server_now(row, units)


def server_units(unit: str, service: str) -> dict[str, dict[str, str]]:
    """UNIT_PROPERTIES of a server's unit, then of those in RESTARTERS."""
    return show_units([unit, *(restarter.format(service) for restarter in RESTARTERS)])


def is_restarted(server: Mapping[str, str], *restarts: Mapping[str, str]) -> bool:
    """Is a server being stopped and started by its planned restart right now? From ActiveState and Job of its unit and
    of those in RESTARTERS.

    systemd has a job for the server from the stop until the new one has answered, and for a stop by hand, but none
    between two tries of a server that fails; a oneshot that runs is `activating`.
    """
    under_way = server.get("Job", "") not in ("", "0")
    return under_way and any(one.get("ActiveState") == "activating" for one in restarts)


def _server_now(row: Mapping[str, Any], units: Mapping[str, Mapping[str, str]]) -> Row:
    """Its state, and what its last start noted that it was made from."""
    state = units[row["name"]]
    noted = _read(STARTED / f"{str(row['name']).rpartition('.')[0]}.json")
    known = noted.get("invocation") and noted.get("invocation") == state.get("InvocationID")
    return {
        "state": state.get("ActiveState", ""),
        "runs from": noted.get("digest", "") if known else "it is not known what",
        "due": _due(str(row["service"])) if row.get("runs from") is None else "",
    }


def _due(service: str) -> str:
    """Why a server must be restarted, as the program that starts it says; asked when the seal is made."""
    try:
        answer = json.loads(run([sys.executable, "-s", str(SERVE), "--current", service]))
    except ValueError:
        return "it cannot be asked"
    return str(answer.get("why", "")) if answer.get("due") else ""


def _one_of(row: Mapping[str, Any], shown: Shown) -> Row:
    return {"active": any(shown.units[unit].get("ActiveState") in UP for unit in row["units"])}


def _package(row: Mapping[str, Any], shown: Shown) -> Row:
    version, held = shown.packages[row["name"]]
    return {"version": version, "held": held}


def _user(row: Mapping[str, Any], shown: Shown) -> Row:
    try:
        found = pwd.getpwnam(row["name"])
    except KeyError:
        return {"uid": "none"}
    group = next((one.gr_name for one in [_group_of(found.pw_gid)] if one), str(found.pw_gid))
    return {"uid": found.pw_uid, "group": group, "home": found.pw_dir, "shell": found.pw_shell}


def _group_of(number: int) -> Any:
    try:
        return grp.getgrgid(number)
    except KeyError:
        return None


def _group(row: Mapping[str, Any], shown: Shown) -> Row:
    try:
        return {"gid": grp.getgrnam(row["name"]).gr_gid}
    except KeyError:
        return {"gid": "none"}


def meaning(text: str) -> str:
    """What a kernel file says: the chosen word of `always [madvise] never`, else the text."""
    chosen = re.search(r"\[([^\]]+)\]", text)
    return chosen.group(1) if chosen else " ".join(text.split())


def _value(row: Mapping[str, Any], shown: Shown) -> Row:
    path = Path(row["name"])
    if row.get("writable") is False:
        return {"writable": os.access(path, os.W_OK)}
    try:
        return {"value": meaning(path.read_text(encoding="utf-8", errors="replace"))}
    except OSError:
        return {"value": "cannot be read"}


def _memory(row: Mapping[str, Any], shown: Shown) -> Row:
    try:
        room = os.statvfs(row["name"])
    except OSError:
        return {"bytes": 0}
    size = room.f_blocks * room.f_frsize
    return {"bytes": row["bytes"] if size >= (row["bytes"] or 0) else size}


def _listing(row: Mapping[str, Any], shown: Shown) -> Row:
    return {"paths": sorted(map(str, Path("/").glob(str(row["name"]).lstrip("/"))))}


def _kernel(row: Mapping[str, Any], shown: Shown) -> Row:
    return {"release": os.uname().release}


def _driver(row: Mapping[str, Any], shown: Shown) -> Row:
    try:
        text = DRIVER.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {"runs": ""}
    match = re.search(r"Kernel Module(?: for \S+)?\s+(\d[\d.]+)", text)
    return {"runs": match[1] if match else ""}


def _gpus(row: Mapping[str, Any], shown: Shown) -> Row:
    return {"count": shown.gpus}


def _tree(row: Mapping[str, Any], shown: Shown) -> Row:
    """A folder and all below it, without what Python leaves when it runs: by names, rights, sizes and times."""
    return {"content": fingerprint(Path(row["name"]), row["but"])}


def fingerprint(folder: Path, but: Sequence[str] = (), times: bool = True) -> str:
    """One digest of a folder's names, owners, rights, sizes, times and link targets; contents are not read.

    `but`: names in the folder itself that do not count; `times`: whether times of files do. Those of folders never
    do, as bytecode comes and goes beside what it was made from, nor those of inodes, which change with other names of
    the same file.
    """
    total = hashlib.sha256()
    todo = [str(folder)]
    while todo:
        here = todo.pop()
        try:
            with os.scandir(here) as found:
                entries = sorted(found, key=lambda entry: entry.name)
        except OSError as error:
            total.update(f"{here}\0{error.errno}\n".encode("utf-8", "surrogateescape"))
            continue
        for entry in entries:
            if entry.name == BYTECODE or (here == str(folder) and entry.name in but):
                continue
            status = entry.stat(follow_symlinks=False)
            line = [entry.path, status.st_mode, status.st_uid, status.st_gid]
            if entry.is_symlink():
                line.append(str(Path(entry.path).readlink()))
            elif entry.is_dir(follow_symlinks=False):
                todo.append(entry.path)
            else:
                line += [status.st_size, status.st_mtime_ns if times else 0]
            total.update(("\0".join(map(str, line)) + "\n").encode("utf-8", "surrogateescape"))
    return total.hexdigest()


def _model(row: Mapping[str, Any], shown: Shown) -> Row:
    """A model by its ready record: the record itself, and every file that it names, by size and time."""
    folder = Path(row["name"])
    record = folder / ".bringup" / "ready.json"
    touched = []
    for file in _read(record).get("files", ()):
        try:
            status = (folder / file["path"]).stat()
        except OSError:
            touched.append(file["path"])
            continue
        if [status.st_size, status.st_mtime_ns] != [file["size"], file["mtime_ns"]]:
            touched.append(file["path"])
    return {"record": sha256(record), "touched": touched[:TOUCHED_KEPT]}


KINDS: dict[str, Callable[[Mapping[str, Any], Shown], Row]] = {
    "path": _path,
    "unit": _unit,
    "server": _server,
    "one of": _one_of,
    "package": _package,
    "user": _user,
    "group": _group,
    "value": _value,
    "memory": _memory,
    "listing": _listing,
    "kernel": _kernel,
    "driver": _driver,
    "gpus": _gpus,
    "tree": _tree,
    "model": _model,
}
"""Kinds of things that roles own; a new kind is a function more, which says how one is now."""


def main(request: Mapping[str, Any]) -> None:
    """Prints, as JSON, the verdict on each seal and who holds the node: what `bringup.sealcheck` asks for."""
    holder = _read(LOCK)
    json.dump({"seals": verify(), "held": holder.get("token", "")}, sys.stdout)
