"""A read-only hub for sites without the internet: serves models that are ready, as the hubs' clients ask.

Answers what `huggingface_hub` and `modelscope` need to fetch files, and `/NAME/PATH` for plain http. Only files
that were verified and that nobody has touched since are given away. It writes nothing and asks nobody.

    python -m bringup.node.depot SPEC.json
    {"listen": [ADDRESS, PORT], "models": [{"name": ..., "folder": ..., "files": [{path, size, sha256}, ...],
     "commit": ..., "repositories": [OWNER/NAME, ...]}, ...], "allowed": [ADDRESS or NETWORK, ...]}

Only addresses in `allowed` are answered (none given: all). With a token, in the environment (DEPOT_TOKEN) or as
the systemd credential `depot-token`, callers must send it as they send a hub's.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import os
import re
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from . import store
from .files import read_text

VARIABLE = "DEPOT_TOKEN"
CREDENTIAL = "depot-token"
COMMIT = re.compile(r"[0-9a-f]{40}")
RANGE = re.compile(r"bytes=(\d+)-(\d*)")
IDLE_LIMIT_S = 120
"""Seconds that a client may take nothing."""

HUGGINGFACE = re.compile(r"/api/models/(?P<repository>[^/]+/[^/]+)(/(revision|tree)/(?P<revision>[^/]+))?.*")
MODELSCOPE = re.compile(r"/api/v1/models/(?P<repository>[^/]+/[^/]+)(?P<rest>/.*)?")
RESOLVE = re.compile(r"/(models/)?(?P<repository>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)")


@dataclass(frozen=True)
class Shelf:
    """A model that is given away, under its own name and those of its repositories, at one commit."""

    model: store.Model
    commit: str
    repositories: tuple[str, ...]

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Shelf:
        """From plain data. Raises StoreFailed."""
        return cls(store.Model.of(row), str(row["commit"]), tuple(row["repositories"]))

    def file(self, path: str) -> store.File | None:
        """The file of the lock, None when the lock has no such file."""
        return next((file for file in self.model.files if file.path == path), None)

    def is_right(self, file: store.File) -> bool:
        """Was it verified, and has nobody touched it since?"""
        stamp = store.stamp_of(self.model.folder)
        return store.is_untouched(self.model.folder / file.path, file, stamp.get(file.path))

    def has(self, revision: str) -> bool:
        """Does a revision mean the commit that is here? A branch's name does."""
        return revision == self.commit or not COMMIT.fullmatch(revision)


@dataclass(frozen=True)
class Doors:
    """Who may ask: callers from these networks (none: from everywhere) that send this token ("": without)."""

    networks: tuple[Any, ...] = ()
    token: str = field(default="", repr=False)

    @classmethod
    def of(cls, allowed: Iterable[str], token: str = "") -> Doors:
        """From addresses and networks as text. Raises ValueError, which names what is neither."""
        return cls(tuple(ipaddress.ip_network(text, strict=False) for text in allowed), token)

    def may_come(self, address: str) -> bool:
        """Is an address within the networks?"""
        caller = ipaddress.ip_address(address.removeprefix("::ffff:").partition("%")[0])
        return not self.networks or any(caller in network for network in self.networks)

    def has_token(self, authorization: str, cookie: str) -> bool:
        """Did the caller send the token, as Hugging Face's client does (a header) or ModelScope's (a cookie)?"""
        sent = [authorization.removeprefix("Bearer ").strip()]
        sent += [text.partition("=")[2].strip() for text in cookie.split(";") if "m_session_id=" in text]
        return not self.token or any(hmac.compare_digest(text.encode(), self.token.encode()) for text in sent)


def merged(shelves: Sequence[Shelf], revision: str) -> Shelf | None:
    """What a repository has at a revision, when several models are parts of it; None when nothing is there."""
    fitting = [shelf for shelf in shelves if shelf.has(revision)]
    if len(fitting) < 2:
        return fitting[0] if fitting else None
    first = fitting[0]
    files = {
        file.path: file for shelf in fitting if shelf.commit == first.commit for file in shelf.model.files
    }
    model = replace(first.model, files=tuple(sorted(files.values(), key=lambda file: file.path)))
    return replace(first, model=model)


class Handler(BaseHTTPRequestHandler):
    """Answers from the server's `shelves`."""

    protocol_version = "HTTP/1.1"
    server_version = "bringup-depot"
    timeout = IDLE_LIMIT_S

    def log_message(self, format: str, *args: object) -> None:
        """Who asked for what, as the client names itself."""
        print(self.address_string(), self.headers.get("User-Agent", "-"), format % args, flush=True)

    def do_HEAD(self) -> None:
        """What a GET would say of itself."""
        self._answer()

    def do_GET(self) -> None:
        """Answers one request."""
        self._answer()

    def _refusal(self) -> tuple[int, str]:
        """Why this caller gets nothing: a status and a word; 0 when it may."""
        doors: Doors = self.server.doors  # type: ignore[attr-defined]
        if not doors.may_come(self.client_address[0]):
            return 403, "NotAllowed"
        if not doors.has_token(self.headers.get("Authorization", ""), self.headers.get("Cookie", "")):
            return 401, "GatedRepo"
        return 0, ""

    def _answer(self) -> None:
        status, why = self._refusal()
        if status:
            self._none(why, status)
            return
        parts = urlsplit(self.path)
        path = unquote(parts.path)
        if found := MODELSCOPE.fullmatch(path):
            wanted = parse_qs(parts.query).get("FilePath", [""])[0]
            shelves = self._shelves(found["repository"])
            if wanted:
                self._give(shelves, wanted)
            else:
                # The other hub's commits are not known here; the lock says whether the bytes are the same.
                self._list(shelves, "master", _modelscope)
        elif found := HUGGINGFACE.fullmatch(path):
            told = _tree if "/tree/" in path else _huggingface
            self._list(self._shelves(found["repository"]), found["revision"] or "main", told)
        elif found := RESOLVE.fullmatch(path):
            shelves = self._shelves(found["repository"])
            fitting = [shelf for shelf in shelves if found[1] or shelf.has(found["revision"])]
            if shelves and not fitting:
                self._none("RevisionNotFound")
            else:
                self._give(fitting, found["path"])
        else:
            name, _, rest = path.lstrip("/").partition("/")
            self._give(self._shelves(name), rest)

    def _shelves(self, name: str) -> Sequence[Shelf]:
        """The models under a name: several can be parts of one repository."""
        known: Mapping[str, Sequence[Shelf]] = self.server.shelves  # type: ignore[attr-defined]
        return known.get(name, ())

    def _none(self, why: str, status: int = 404) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", why)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _list(self, shelves: Sequence[Shelf], revision: str, told: Any) -> None:
        shelf = merged(shelves, revision)
        if shelf is None:
            self._none("RevisionNotFound" if shelves else "RepoNotFound")
            return
        text = json.dumps(told(shelf)).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(text)

    def _give(self, shelves: Sequence[Shelf], path: str) -> None:
        found = next(((shelf, file) for shelf in shelves if (file := shelf.file(path))), None)
        if found is None:
            self._none("EntryNotFound" if shelves else "RepoNotFound")
            return
        shelf, file = found
        if not shelf.is_right(file):
            self._none("NotVerified", 503)
            return
        first, last = self._range(file.size)
        if first and first >= file.size:
            self._none("RangeNotSatisfiable", 416)
            return
        ranged = "Range" in self.headers and file.size > 0
        self.send_response(206 if ranged else 200)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("ETag", f'"{file.sha256}"')
        self.send_header("X-Repo-Commit", shelf.commit)
        self.send_header("X-Linked-Size", str(file.size))
        self.send_header("X-Linked-Etag", f'"{file.sha256}"')
        if ranged:
            self.send_header("Content-Range", f"bytes {first}-{last}/{file.size}")
        self.send_header("Content-Length", str(last - first + 1))
        self.end_headers()
        if self.command == "GET" and file.size:
            with (shelf.model.folder / path).open("rb") as content:
                self.connection.sendfile(content, first, last - first + 1)

    def _range(self, size: int) -> tuple[int, int]:
        """First and last byte that are asked for."""
        found = RANGE.fullmatch(self.headers.get("Range", ""))
        if not found:
            return 0, size - 1
        return int(found[1]), min(int(found[2] or size - 1), size - 1)


def _huggingface(shelf: Shelf) -> dict[str, Any]:
    """https://huggingface.co/docs/hub/api"""
    name = shelf.repositories[0] if shelf.repositories else shelf.model.name
    rows = [{"rfilename": row["path"], **row} for row in _tree(shelf)]
    return {"id": name, "modelId": name, "sha": shelf.commit, "private": False, "siblings": rows}


def _tree(shelf: Shelf) -> list[dict[str, Any]]:
    return [
        {
            "type": "file",
            "path": file.path,
            "size": file.size,
            "oid": file.sha256,
            "lfs": {"oid": file.sha256, "sha256": file.sha256, "size": file.size, "pointerSize": 130},
        }
        for file in shelf.model.files
    ]


def _modelscope(shelf: Shelf) -> dict[str, Any]:
    """What ModelScope's own client reads (https://github.com/modelscope/modelscope, hub/api.py)."""
    rows = [
        {
            "Path": file.path,
            "Name": file.path.rpartition("/")[2],
            "Type": "blob",
            "Size": file.size,
            "Sha256": file.sha256,
            "Revision": shelf.commit,
        }
        for file in shelf.model.files
    ]
    return {"Code": 200, "Success": True, "Data": {"Files": rows}}


class Server(ThreadingHTTPServer):
    """Serves shelves under every name that they have."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(
        self, address: tuple[str, int], shelves: Iterable[Shelf], doors: Doors | None = None
    ) -> None:
        self.doors = doors or Doors()
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.shelves: dict[str, list[Shelf]] = {}
        for shelf in shelves:
            for name in dict.fromkeys((shelf.model.name, *shelf.repositories)):
                self.shelves.setdefault(name, []).append(shelf)
        super().__init__(address, Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is its own affair."""


def serve(listen: Sequence[Any], shelves: Iterable[Shelf], doors: Doors | None = None) -> None:
    """Serves until it is interrupted."""
    with Server((str(listen[0]), int(listen[1])), shelves, doors) as server:
        server.serve_forever()


def token() -> str:
    """The token that callers must send: from a systemd credential or the environment, "" for none."""
    credential = Path(os.environ.get("CREDENTIALS_DIRECTORY", "/nowhere"), CREDENTIAL)
    return (read_text(credential) or os.environ.get(VARIABLE, "")).strip()


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    serve(
        given["listen"],
        [Shelf.of(row) for row in given["models"]],
        Doors.of(given.get("allowed", ()), token()),
    )
