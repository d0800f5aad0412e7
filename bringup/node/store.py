"""A model's folder: fetched, verified, and ready only when every byte is right.

A folder is ready when `.bringup/ready.json` is in it, which is written last. It holds each file's size, time
of change and sha256, so that a later look costs one stat a file (quick) or one read (deep). A file that is
wrong is fetched again alone. Nothing that is not verified ever has its real name.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import shutil
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from . import contents, download
from . import fetch as fetch_program
from .files import locked, read_text, sweep, sync_folder, write_atomic

if TYPE_CHECKING:
    from io import FileIO

    from .undo import Journal

SCHEMA_VERSION = 1
OURS = ".bringup"
READY = f"{OURS}/ready.json"
INCOMING = f"{OURS}/incoming"
PROGRESS = Path("/run/bringup/progress")

BUFFER_BYTES = 4 * 1024 * 1024
HASH_BYTES = 128 * 1024
"""Read at once to be hashed: it stays in a core's own cache, which is a quarter faster than larger pieces."""

DISK_RESERVE_BYTES = 256 * 1024 * 1024
"""What must stay free beside the model: a full disk stops logs and services."""

LOCK_LIMIT_S = 24 * 3600
"""Seconds to wait for another run that fills the same folder."""

PROGRESS_EVERY_S = 1.0
AT_ONCE = 4
"""Files fetched at the same time."""

CLIENT_STAGE = f"{OURS}/client"
CLIENT_KINDS = ("huggingface", "modelscope")
CLIENT_TOKENS = {"huggingface": "HF_TOKEN", "modelscope": "MODELSCOPE_API_TOKEN"}
CLIENT_SETTINGS = {
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_XET_HIGH_PERFORMANCE": "1",
}
CLIENT_STALL_S = 180.0
"""Seconds without a new byte before a client is ended and plain http is tried."""

CLIENT_LOOK_S = 1.0
HTTP_KINDS = ("http", "node")
HERE_KINDS = (*HTTP_KINDS, "path", "huggingface", "modelscope")
"""Sources that the node can use by itself; "controller" needs the other end."""


class StoreFailed(Exception):
    """Why a model's folder is not ready, in one line a cause."""


@dataclass(frozen=True)
class File:
    """One file of the lock: path inside the folder, bytes, sha256."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Source:
    """Where files come from: kind and locator (an address, a folder, `OWNER/NAME@REVISION`)."""

    kind: str
    locator: str


@dataclass(frozen=True)
class Model:
    """A model as it must lie in `folder`."""

    name: str
    folder: Path
    files: tuple[File, ...]
    sources: tuple[Source, ...] = ()
    expects: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Model:
        """From plain data. Raises StoreFailed for a path that leaves the folder."""
        files = tuple(File(str(row["path"]), int(row["size"]), str(row["sha256"])) for row in data["files"])
        bad = [file.path for file in files if not is_inside(file.path)]
        if bad:
            raise StoreFailed(f"model {data['name']}: its lock has a path that leaves the folder: {bad[0]}")
        if bad := clashes([file.path for file in files]):
            raise StoreFailed(
                f"model {data['name']}: its lock has a path twice, or as file and as folder: {bad[0]}"
            )
        return cls(
            name=str(data["name"]),
            folder=Path(data["folder"]),
            files=files,
            sources=tuple(Source(row["kind"], row["locator"]) for row in data.get("sources", ())),
            expects=data.get("expects") or {},
        )


def is_inside(path: str) -> bool:
    """Is it a plain relative path that stays in its folder and out of ours?"""
    parts = PurePosixPath(path).parts
    return bool(parts) and not path.startswith("/") and ".." not in parts and parts[0] != OURS


def clashes(paths: Sequence[str]) -> list[str]:
    """Paths that are there twice, or that are folders of others."""
    folders = {str(folder) for path in paths for folder in PurePosixPath(path).parents}
    return sorted(path for path, count in Counter(paths).items() if count > 1 or path in folders)


# --- verifying ----------------------------------------------------------------------------------------------


Read = Callable[[int], None]
"""Called with the bytes that were read since the last call, from several threads."""


def sha256_of(path: Path, read: Read | None = None) -> str:
    """A file's sha256, streamed. Raises OSError."""
    digest = hashlib.sha256()
    buffer = bytearray(HASH_BYTES)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
            if read:
                read(count)
    return digest.hexdigest()


def stamp_of(folder: Path) -> dict[str, Any]:
    """What was verified the last time: path -> size, mtime_ns, sha256; empty when the folder is not ready."""
    try:
        rows = json.loads(read_text(folder / READY))["files"]
        return {row["path"]: row for row in rows}
    except (ValueError, KeyError, TypeError):
        return {}


def is_untouched(path: Path, file: File, stamped: Mapping[str, Any] | None) -> bool:
    """Has nobody written the file since it was verified? (One stat.)"""
    if not stamped or stamped.get("sha256") != file.sha256 or stamped.get("size") != file.size:
        return False
    try:
        status = path.stat()
    except OSError:
        return False
    return status.st_size == file.size and status.st_mtime_ns == stamped.get("mtime_ns")


def fault(path: Path, file: File, read: Read | None = None) -> str:
    """What is wrong with a file, by reading all of it: "" when nothing is."""
    try:
        size = path.stat().st_size
        if size != file.size:
            return f"has {size} bytes instead of {file.size}"
        return (
            ""
            if sha256_of(path, read) == file.sha256
            else "has other bytes than the lock says (sha256 differs)"
        )
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def verify(model: Model, deep: bool, jobs: int | None = None, read: Read | None = None) -> dict[str, str]:
    """Path -> fault of each wrong file. Quick reads only files that somebody has touched since the stamp."""
    stamp = {} if deep else stamp_of(model.folder)
    # Not at the top: with logging below it, it would be a third of a relay's start.
    from concurrent.futures import ThreadPoolExecutor

    suspects = [
        file for file in model.files if not is_untouched(model.folder / file.path, file, stamp.get(file.path))
    ]
    with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        found = pool.map(lambda file: fault(model.folder / file.path, file, read), suspects)
        return {file.path: text for file, text in zip(suspects, found, strict=True) if text}


def ready_text(model: Model, now: float) -> str:
    """The text of the stamp. Raises OSError when a file went away meanwhile."""
    rows = [
        {
            "path": file.path,
            "size": file.size,
            "sha256": file.sha256,
            "mtime_ns": (model.folder / file.path).stat().st_mtime_ns,
        }
        for file in model.files
    ]
    about = {
        "schema_version": SCHEMA_VERSION,
        "model": model.name,
        "verified_at": round(now, 3),
        "files": rows,
    }
    return json.dumps(about, indent=1) + "\n"


def is_stamped(model: Model) -> bool:
    """Does the stamp say exactly what the lock and the disk say?"""
    stamp = stamp_of(model.folder)
    return len(stamp) == len(model.files) and all(
        is_untouched(model.folder / file.path, file, stamp.get(file.path)) for file in model.files
    )


# --- fetching -----------------------------------------------------------------------------------------------


class Progress:
    """A small file that says how far it is, for whoever waits: bytes done, of how many, rate, time left."""

    def __init__(self, model: Model, wanted: Iterable[File], path: Path | None = None) -> None:
        self._path = path or PROGRESS / f"model_store-{model.name}.json"
        self._total = sum(file.size for file in wanted)
        self._done: dict[str, int] = {}
        self._first: int | None = None
        self._started = time.monotonic()
        self._written = 0.0
        self._lock = threading.Lock()
        self._model = model.name

    def of(self, file: File) -> Callable[[int], None]:
        """What a download of this file calls with the bytes that it has."""

        def note(done: int) -> None:
            with self._lock:
                self._done[file.path] = done
                now = time.monotonic()
                if now - self._written >= PROGRESS_EVERY_S:
                    self._written = now
                    self._write(now)

        return note

    def _write(self, now: float) -> None:
        done = sum(self._done.values())
        if self._first is None:
            self._first = done
        rate = (done - self._first) / max(now - self._started, 0.001)
        left = (self._total - done) / rate if rate > 0 else None
        about = {"model": self._model, "done": done, "total": self._total, "bytes_s": round(rate)}
        text = json.dumps({**about, "left_s": None if left is None else round(left)})
        try:
            write_atomic(self._path, text + "\n")
        except OSError:
            self._written = float("inf")

    def end(self) -> None:
        """Nothing is under way any more."""
        self._path.unlink(missing_ok=True)


def room_problem(model: Model, wanted: Sequence[File]) -> str:
    """Why the missing files do not fit, "" when they do; what is there of them already counts."""
    folder = next(path for path in (model.folder, *model.folder.parents) if path.is_dir())
    needed = sum(max(0, file.size - _had(model.folder / file.path)) for file in wanted) + DISK_RESERVE_BYTES
    free = shutil.disk_usage(folder).free
    if not wanted or free >= needed:
        return ""
    what = f"disk of {model.folder} is too full for model {model.name}"
    return f"{what}: {_size(free)} free, {_size(needed)} needed"


def _had(path: Path) -> int:
    """Bytes that a new copy can use or will replace."""
    total = 0
    for candidate in (path, download.partial_of(path)):
        try:
            total += candidate.stat().st_blocks * 512
        except OSError:
            continue
    return total


def _size(count: float) -> str:
    return f"{count / 1024**3:.1f} GiB" if count >= 1024**3 else f"{count / 1024**2:.0f} MiB"


@dataclass(frozen=True)
class Access:
    """What sources need beside their locators: hub addresses ("": that hub is left out), tokens (never logged),
    the cap on the rate, the interpreter of an environment with the hubs' own clients ("": plain http is used), and
    where to write how far it is (None: PROGRESS)."""

    huggingface: str = "https://huggingface.co"
    modelscope: str = "https://modelscope.cn"
    huggingface_token: str = ""
    modelscope_token: str = ""
    client: str = ""
    limits: download.Limits = field(default_factory=download.Limits)
    progress: Path | None = None


def address_of(source: Source, file: File, access: Access) -> str:
    """Where a file is on a hub, a web server or another node."""
    path = quote(file.path)
    if source.kind in HTTP_KINDS:
        return f"{source.locator.rstrip('/')}/{path}"
    name, _, revision = source.locator.partition("@")
    if source.kind == "huggingface":
        return f"{access.huggingface.rstrip('/')}/{name}/resolve/{quote(revision or 'main', safe='')}/{path}"
    base = f"{access.modelscope.rstrip('/')}/models/{name}"
    return f"{base}/resolve/{quote(revision or 'master', safe='')}/{path}"


def headers_of(source: Source, access: Access) -> dict[str, str]:
    """The token of a hub, as a header."""
    token = token_of(source, access)
    return {"Authorization": f"Bearer {token}"} if token else {}


def token_of(source: Source, access: Access) -> str:
    """The token of a hub, without the line's end that files of tokens have."""
    tokens = {"huggingface": access.huggingface_token, "modelscope": access.modelscope_token}
    return tokens.get(source.kind, "").strip()


def fetch(model: Model, file: File, access: Access, progress: Callable[[int], None]) -> str:
    """Brings one file from the first source that has it right; returns which, and what failed before it.

    Raises StoreFailed with every source's reason.
    """
    reasons: list[str] = []
    target = model.folder / file.path
    for source, client in _ways(model, access):
        try:
            if source.kind == "path":
                copy(Path(source.locator) / file.path, target, file, progress)
            elif client and not partial_is_begun(target):
                by_client(model, source, file, access, progress)
            else:
                address = address_of(source, file, access)
                wanted = download.Wanted(address, target, file.size, file.sha256, headers_of(source, access))
                download.fetch(wanted, access.limits, progress)
            way = f"{source.kind} client" if client else source.kind
            return way + (f" (after {'; '.join(reasons)})" if reasons else "")
        except (download.DownloadFailed, StoreFailed, OSError) as error:
            if getattr(error, "cause", "") in ("disk", "hours"):
                raise StoreFailed(f"{file.path}: {error}") from None
            reasons.append(str(error))
    raise StoreFailed(f"{file.path}: " + ("; ".join(reasons) or "no source has it"))


def _ways(model: Model, access: Access) -> list[tuple[Source, bool]]:
    """The sources that this node can use, in order, and whether by the hub's client: that first, then http.

    The clients know no cap on the rate, so with one plain http is used.
    """
    found = []
    by_clients = access.client and not access.limits.bytes_s
    for source in model.sources:
        if source.kind in CLIENT_KINDS and not getattr(access, source.kind):
            continue
        if by_clients and source.kind in CLIENT_KINDS:
            found.append((source, True))
        if source.kind in HERE_KINDS:
            found.append((source, False))
    return found


def partial_is_begun(target: Path) -> bool:
    """Has plain http begun with this file? Then it goes on: the client cannot use what is there."""
    return download.partial_of(target).exists()


def by_client(
    model: Model, source: Source, file: File, access: Access, progress: Callable[[int], None]
) -> None:
    """One file by the hub's own client, verified when it is there. Raises StoreFailed.

    The client works in a folder of its own, which it resumes; it is ended when that folder stops growing.
    """
    stage = model.folder / CLIENT_STAGE / source.kind
    stage.mkdir(parents=True, exist_ok=True)
    name, _, revision = source.locator.partition("@")
    request = {
        "kind": source.kind,
        "endpoint": getattr(access, source.kind).rstrip("/"),
        "repository": name,
        "revision": revision,
        "path": file.path,
        "folder": str(stage),
    }
    token = token_of(source, access)
    environment = {
        **os.environ,
        **CLIENT_SETTINGS,
        "HF_HOME": str(stage / "home"),
        "MODELSCOPE_CACHE": str(stage / "home"),
        **({CLIENT_TOKENS[source.kind]: token} if token else {}),
    }
    argv = [access.client, "-c", inspect.getsource(fetch_program)]
    code, said = run_client(argv, request, environment, stage, progress, access.limits)
    if access.limits.is_over():
        raise download.DownloadFailed(download.HOURS_OVER, "hours")
    if code:
        raise StoreFailed(f"{source.kind} client: {said or f'ended with {code}'}")
    arrived = stage / file.path
    if reason := fault(arrived, file):
        arrived.unlink(missing_ok=True)
        raise StoreFailed(f"{source.kind} client: {file.path} {reason}")
    target = model.folder / file.path
    target.parent.mkdir(parents=True, exist_ok=True)
    arrived.chmod(0o644)
    with arrived.open("rb") as content:
        os.fsync(content.fileno())
    arrived.replace(target)


def run_client(
    argv: Sequence[str],
    request: Mapping[str, str],
    environment: Mapping[str, str],
    stage: Path,
    progress: Callable[[int], None],
    limits: download.Limits,
) -> tuple[int, str]:
    """Exit code and last line of what a client said; 124 when its folder stopped growing or only drips (over
    CLIENT_STALL_S), or when the hours for downloads end."""
    with subprocess.Popen(
        list(argv),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=dict(environment),
        text=True,
    ) as process:
        first = last = _grown(stage)
        since = time.monotonic()
        text: str | None = json.dumps(request)
        while True:
            try:
                _, said = process.communicate(text, timeout=CLIENT_LOOK_S)
                lines = said.strip().splitlines()
                return process.returncode, lines[-1] if lines else ""
            except subprocess.TimeoutExpired:
                text = None
            size = _grown(stage)
            progress(max(0, size - first))
            why = download.HOURS_OVER if limits.is_over() else ""
            if time.monotonic() - since > CLIENT_STALL_S:
                why = why or _too_slow(size - last, time.monotonic() - since, limits)
                last, since = size, time.monotonic()
            if why:
                process.kill()
                process.communicate()
                return 124, why


def _too_slow(bytes_: int, seconds: float, limits: download.Limits) -> str:
    """Why a client that brought so little is given up, "" when it is not."""
    if bytes_ / seconds >= limits.slowest_bytes_s:
        return ""
    if bytes_ <= 0:
        return f"no byte for {CLIENT_STALL_S:g} s"
    return f"fewer than {limits.slowest_bytes_s:g} bytes a second"


def _grown(folder: Path) -> int:
    """Bytes in a folder."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            total += path.lstat().st_blocks * 512
    return total


def copy(origin: Path, target: Path, file: File, progress: Callable[[int], None] = lambda done: None) -> None:
    """A file from a path, verified while it is copied. Raises StoreFailed."""
    partial = download.partial_of(target)
    digest = hashlib.sha256()
    done = 0
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        with origin.open("rb", buffering=0) as come, partial.open("wb", buffering=0) as go:
            while chunk := _read_from(come, origin):
                go.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                progress(done)
            os.fsync(go.fileno())
    except OSError as error:
        raise StoreFailed(f"{error.filename or partial}: {error.strerror}") from None
    if done != file.size or digest.hexdigest() != file.sha256:
        partial.unlink()
        raise StoreFailed(f"{origin} is not the file that the lock says ({done} bytes, sha256 differs)")
    partial.chmod(0o644)
    partial.replace(target)


def _read_from(come: FileIO, origin: Path) -> bytes:
    """The next piece. Raises StoreFailed, which names the file that could not be read: errors of writing do not."""
    try:
        return come.read(BUFFER_BYTES)
    except OSError as error:
        raise StoreFailed(f"{origin}: {error.strerror}") from None


def fetch_all(model: Model, wanted: Sequence[File], access: Access) -> dict[str, str]:
    """All wanted files, some at a time; returns where each came from.

    Raises StoreFailed with every file's reason; what came stays.
    """
    from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

    progress = Progress(model, wanted, access.progress)
    failed: list[str] = []
    came: dict[str, str] = {}

    def one(file: File) -> None:
        try:
            came[file.path] = fetch(model, file, access, progress.of(file))
        except StoreFailed as error:
            failed.append(str(error))
            raise

    try:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            running = [pool.submit(one, file) for file in wanted]
            wait(running, return_when=FIRST_EXCEPTION)
            for future in running:
                future.cancel()
        for future in running:
            error = None if future.cancelled() else future.exception()
            if error is not None and not isinstance(error, StoreFailed):
                raise error
    finally:
        progress.end()
    if failed:
        raise StoreFailed(f"model {model.name} could not be fetched: " + " | ".join(failed))
    return came


def remember(model: Model, journal: Journal) -> None:
    """Keeps in a role's journal what is about to come, so that an undo takes that away and no more."""
    names = [model.folder / file.path for file in model.files]
    journal.remember_content(model.folder, [*names, *map(download.partial_of, names)], [model.folder / OURS])


# --- all together -------------------------------------------------------------------------------------------


def look(model: Model, deep: bool) -> dict[str, Any]:
    """What is wrong and what is to be done, changing nothing."""
    faults = verify(model, deep)
    here = any(source.kind in HERE_KINDS for source in model.sources)
    return {
        "changed": bool(faults) or not is_stamped(model),
        "ready": not faults and is_stamped(model),
        "faults": faults,
        "fetched": [],
        "send": [] if here else sorted(faults),
        "incoming": "",
    }


def ensure(model: Model, access: Access, deep: bool = False, owner: int | None = None) -> dict[str, Any]:
    """Brings the folder to what the lock says, or asks for what only the controller has.

    Returns `changed`, `ready`, `faults` (path -> what was wrong), `fetched` (paths), `came` (path -> where
    from, and what failed before), and when files must come from the controller `send` (paths) with `incoming`
    (the folder to put them into, owned by uid `owner`).
    Raises StoreFailed; then the folder is not ready, and what came right stays.
    """
    if not model.files:
        raise StoreFailed(
            f"model {model.name} has no lock. Make one: invoke models.lock --model {model.name}"
        )
    with locked(model.folder.parent / f".{model.folder.name}.lock", LOCK_LIMIT_S, keep=False):
        taken = _take_incoming(model)
        faults = verify(model, deep)
        wanted = [file for file in model.files if file.path in faults]
        answer: dict[str, Any] = {"faults": faults, "fetched": taken, "came": {}, "send": [], "incoming": ""}
        if wanted:
            (model.folder / READY).unlink(missing_ok=True)
            if problem := room_problem(model, wanted):
                raise StoreFailed(problem)
            if not any(source.kind in HERE_KINDS for source in model.sources):
                incoming = _open_incoming(model, owner)
                send = [file.path for file in wanted]
                return {**answer, "changed": True, "ready": False, "send": send, "incoming": str(incoming)}
            answer["came"] = fetch_all(model, wanted, access)
            answer["fetched"] = taken + [file.path for file in wanted]
        changed = bool(answer["fetched"]) or not is_stamped(model)
        if changed:
            finish(model)
        return {**answer, "changed": changed, "ready": True}


def finish(model: Model) -> None:
    """Looks into the files and writes the stamp; what an earlier lock had and this one has not goes.

    Raises StoreFailed when the files make no sense.
    """
    problems = contents.check_model(model.folder, [file.path for file in model.files], model.expects)
    if problems:
        (model.folder / READY).unlink(missing_ok=True)
        raise StoreFailed(f"model {model.name} is complete and makes no sense: " + "; ".join(problems))
    for folder in (INCOMING, CLIENT_STAGE):
        shutil.rmtree(model.folder / folder, ignore_errors=True)
    for file in model.files:
        download.partial_of(model.folder / file.path).unlink(missing_ok=True)
    for name in stamp_of(model.folder).keys() - {file.path for file in model.files}:
        (model.folder / name).unlink(missing_ok=True)
    sweep(model.folder / READY)
    write_atomic(model.folder / READY, ready_text(model, time.time()))
    sync_folder(model.folder)


def _open_incoming(model: Model, owner: int | None) -> Path:
    """A folder that the login user may write to: files arrive there and are verified from there."""
    incoming = model.folder / INCOMING
    shutil.rmtree(incoming, ignore_errors=True)
    incoming.mkdir(parents=True)
    if owner is not None:
        os.chown(incoming, owner, -1)
    incoming.chmod(0o700)
    return incoming


def incoming_name(index: int) -> str:
    """What the file with this place in the lock is called while it arrives."""
    return f"{index:06d}"


def _take_incoming(model: Model) -> list[str]:
    """Files that arrived take their place if they are right. Raises StoreFailed for one that is not."""
    taken = []
    for index, file in enumerate(model.files):
        arrived = model.folder / INCOMING / incoming_name(index)
        if arrived.is_file() and not arrived.is_symlink():
            if reason := fault(arrived, file):
                arrived.unlink()
                raise StoreFailed(f"model {model.name}: {file.path} as it came from the controller {reason}")
            target = model.folder / file.path
            target.parent.mkdir(parents=True, exist_ok=True)
            os.chown(arrived, os.geteuid(), os.getegid())
            arrived.chmod(0o644)
            arrived.replace(target)
            taken.append(file.path)
    return taken
