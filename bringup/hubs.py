"""What a hub says of a repository: the commit behind a revision, and every file's size and sha256 (I/O).

Hugging Face keeps a sha256 for large files only (they are in LFS); small ones are fetched and hashed here.
ModelScope gives one for every file.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from bringup.errors import HostFailed, Problem, UsageError
from bringup.node.download import HOPELESS
from bringup.planned import ModelFile

ANSWER_LIMIT_S = 60
SMALL_BYTES = 64 * 1024 * 1024
"""A file without a sha256 on the hub is fetched to make one; one larger than this is refused instead."""

AT_ONCE = 8
COMMIT = re.compile(r"[0-9a-f]{40}")
HUGGINGFACE = "https://huggingface.co"
MODELSCOPE = "https://modelscope.cn"
TOKENS = {"huggingface": "HF_TOKEN", "modelscope": "MODELSCOPE_API_TOKEN"}
"""Variables of the environment that hold tokens."""

NO_MATTER = (
    ".gitattributes",
    "README.md",
    "LICENSE*",
    "configuration.json",
    "*.png",
    "*.jpg",
    "figures/*",
    ".msc",
    ".mdl",
)
"""Files that engines do not load, and that hubs keep differently: they are not locked and not compared."""


@dataclass(frozen=True)
class Listing:
    """A repository at one commit. `sha256` of a file is "" until somebody has read it."""

    hub: str
    repository: str
    commit: str
    files: tuple[ModelFile, ...]


@dataclass(frozen=True)
class Hub:
    """How a hub is reached: its address (or a mirror's) and a token, sent as a header and never shown."""

    kind: str
    address: str
    token: str = ""


def listing(hub: Hub, repository: str, revision: str, include: Sequence[str] = ()) -> Listing:
    """Everything that engines may load of a repository, each file with its sha256, sorted by path.

    `include`: patterns of paths, none for all. Raises HostFailed (the hub) or UsageError (nothing matches).
    """
    read = _huggingface if hub.kind == "huggingface" else _modelscope
    try:
        commit, found = read(hub, repository, revision)
    except (KeyError, TypeError, AttributeError):
        what = f"does not list the files of {repository} as {hub.kind} does: is this the address of one?"
        raise HostFailed(Problem(hub.address, what)) from None
    if COMMIT.fullmatch(revision) and commit != revision:
        what = f"was asked for commit {revision} and answers with {commit}"
        raise HostFailed(Problem(f"{hub.address}/{repository}", what))
    files = [file for file in found if wanted(file.path, include)]
    if not files:
        where = f"{hub.address}/{repository}@{revision}"
        raise UsageError(Problem(where, f"no file matches {', '.join(include) or 'what engines load'}"))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        whole = list(pool.map(lambda file: _with_sha256(hub, repository, commit, file), files))
    return Listing(hub.kind, repository, commit, tuple(sorted(whole, key=lambda file: file.path)))


def wanted(path: str, include: Sequence[str]) -> bool:
    """Do engines load it, and has it been asked for?"""
    if any(fnmatch(path, pattern) for pattern in NO_MATTER):
        return False
    return not include or any(fnmatch(path, pattern) for pattern in include)


def _huggingface(hub: Hub, repository: str, revision: str) -> tuple[str, list[ModelFile]]:
    """https://huggingface.co/docs/hub/api"""
    place = urllib.parse.quote(revision, safe="")
    data = _json(hub, f"/api/models/{repository}/revision/{place}?blobs=true")
    files = [
        ModelFile(row["rfilename"], int(row["size"]), str((row.get("lfs") or {}).get("sha256", "")))
        for row in data["siblings"]
    ]
    return str(data["sha"]), files


def _modelscope(hub: Hub, repository: str, revision: str) -> tuple[str, list[ModelFile]]:
    """What ModelScope's own client reads (https://github.com/modelscope/modelscope, hub/api.py)."""
    query = urllib.parse.urlencode({"Revision": revision, "Recursive": "true"})
    data = _json(hub, f"/api/v1/models/{repository}/repo/files?{query}")
    rows = [row for row in data["Data"]["Files"] if row["Type"] == "blob"]
    files = [ModelFile(row["Path"], int(row["Size"]), str(row.get("Sha256") or "")) for row in rows]
    newest: dict[str, Any] = max(rows, key=lambda row: row.get("CommittedDate", 0), default={})
    return (revision if COMMIT.fullmatch(revision) else str(newest.get("Revision", revision))), files


def address_of(hub: Hub, repository: str, commit: str, path: str) -> str:
    """Where a file of a repository is."""
    models = "models/" if hub.kind == "modelscope" else ""
    place = f"{models}{repository}/resolve/{urllib.parse.quote(commit, safe='')}/{urllib.parse.quote(path)}"
    return f"{hub.address.rstrip('/')}/{place}"


def _with_sha256(hub: Hub, repository: str, commit: str, file: ModelFile) -> ModelFile:
    if file.sha256:
        return file
    where = address_of(hub, repository, commit, file.path)
    if file.size > SMALL_BYTES:
        raise HostFailed(Problem(where, f"has no sha256 on the hub and is {file.size} bytes"))
    data = _read(hub, where)
    if len(data) != file.size:
        raise HostFailed(Problem(where, f"gave {len(data)} bytes, the hub lists {file.size}"))
    return ModelFile(file.path, file.size, hashlib.sha256(data).hexdigest())


def _json(hub: Hub, path: str) -> Any:
    where = hub.address.rstrip("/") + path
    try:
        return json.loads(_read(hub, where))
    except ValueError:
        raise HostFailed(Problem(where, "is no JSON: is this the address of a hub?")) from None


def _read(hub: Hub, where: str) -> bytes:
    token = hub.token.strip()
    headers = {"User-Agent": "bringup", **({"Authorization": f"Bearer {token}"} if token else {})}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(where, headers=headers), timeout=ANSWER_LIMIT_S
        ) as answer:
            data: bytes = answer.read(SMALL_BYTES + 1)
            return data
    except urllib.error.HTTPError as error:
        error.close()
        told = HOPELESS.get(error.code, f"answered {error.code}")
        if error.code in (401, 403) and not hub.token:
            told += f"; there is none in {TOKENS[hub.kind]}"
        raise HostFailed(Problem(where, told)) from None
    except (ValueError, http.client.InvalidURL):
        # What Python says of it may hold the token.
        what = f"has a character that must not be in it, or what is in {TOKENS[hub.kind]} has one"
        raise UsageError(Problem(where, what)) from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        reason = getattr(reason, "strerror", None) or reason
        remedy = f"Behind a mirror: --{hub.kind} ADDRESS; without this hub: --{hub.kind} none"
        raise HostFailed(Problem(where, f"cannot be reached: {reason}", remedy)) from None


def differences(one: Listing, other: Listing) -> list[Problem]:
    """Where two hubs do not have the same bytes under the same path."""
    mine, theirs = ({file.path: file for file in listing.files} for listing in (one, other))
    return [
        Problem(path, f"{one.hub} has {_told(mine, path)}, {other.hub} has {_told(theirs, path)}")
        for path in sorted(mine.keys() | theirs.keys())
        if mine.get(path) != theirs.get(path)
    ]


def _told(files: Mapping[str, ModelFile], path: str) -> str:
    file = files.get(path)
    return f"{file.size} bytes, sha256 {file.sha256[:12]}" if file else "no such file"


def total(files: Iterable[ModelFile]) -> int:
    """Bytes of all files."""
    return sum(file.size for file in files)
