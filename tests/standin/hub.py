"""A hub that speaks enough of Hugging Face's interface, and misbehaves when told to.

It is a stand-in and says so in its Server header. `faults` holds for each path what goes wrong, one name a
request, until the list is used up; then it behaves. Names: a status ("401", "429", "503", ...), "stall",
"cut", "truncated", "wrong_bytes", "slow", "no_range", "new_revision".

    python tests/standin/hub.py FOLDER [PORT]      serves FOLDER as the repository "stand/in"
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

REPOSITORY = "stand/in"
REVISION = "0123456789abcdef0123456789abcdef01234567"
OTHER_REVISION = "89abcdef0123456789abcdef0123456789abcdef"
LFS_FROM_BYTES = 1000
STALL_S = 30.0
RETRY_AFTER_S = 1
SLOW_BYTES = 64
SLOW_PAUSE_S = 0.05


@dataclass
class Hub:
    """What is served, how it misbehaves, and what was asked of it (method, path, Range, status)."""

    files: dict[str, bytes]
    faults: dict[str, list[str]] = field(default_factory=dict)
    token: str = ""
    loud: bool = False
    asked: list[tuple[str, str, str, int]] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def next_fault(self, path: str) -> str:
        """The fault of this request, "" for none."""
        with self.lock:
            left = self.faults.get(path, [])
            return left.pop(0) if left else ""


def _other_entry(row: Mapping[str, object], files: Mapping[str, bytes]) -> dict[str, object]:
    """A file as ModelScope lists it."""
    data = files[str(row["path"])]
    sha256 = hashlib.sha256(data).hexdigest()
    return {
        "Path": row["path"],
        "Type": "blob",
        "Size": len(data),
        "Sha256": sha256,
        "Revision": OTHER_REVISION,
    }


class Handler(BaseHTTPRequestHandler):
    """Answers from the server's `hub`."""

    protocol_version = "HTTP/1.1"
    server_version = "hub-stand-in"

    @property
    def hub(self) -> Hub:
        return self.server.hub  # type: ignore[attr-defined, no-any-return]

    def log_message(self, format: str, *args: object) -> None:
        """Quiet in tests, which read `asked`; as a program it says who asked."""
        if self.hub.loud:
            print(self.headers.get("User-Agent", "nobody"), format % args, flush=True)

    def do_HEAD(self) -> None:
        self._answer(False)

    def do_GET(self) -> None:
        self._answer(True)

    def _answer(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        if self.hub.token and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self._status(401, path)
        elif path.endswith("/repo") and "FilePath=" in self.path:
            wanted = parse_qs(urlsplit(self.path).query)["FilePath"][0]
            self._file(f"{path}/resolve/x/{wanted}", body)
        elif path.startswith("/api/"):
            self._api(path, body)
        elif "/resolve/" in path:
            self._file(path, body)
        else:
            self._status(404, path)

    def _note(self, path: str, status: int) -> None:
        with self.hub.lock:
            self.hub.asked.append((self.command, path, self.headers.get("Range", ""), status))

    def _status(self, status: int, path: str, headers: Mapping[str, str] | None = None) -> None:
        self._note(path, status)
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _api(self, path: str, body: bool) -> None:
        """The repository's files, as /api/models/NAME/revision/REV, /tree/REV, or ModelScope's repo/files."""
        files = [self._entry(name, data) for name, data in sorted(self.hub.files.items())]
        about: object = {"id": REPOSITORY, "modelId": REPOSITORY, "sha": REVISION, "siblings": files}
        if "/tree/" in path:
            about = files
        if path.startswith("/api/v1/"):
            about = {"Code": 200, "Data": {"Files": [_other_entry(row, self.hub.files) for row in files]}}
        text = json.dumps(about).encode()
        self._note(path, 200)
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if body:
            self.wfile.write(text)

    @staticmethod
    def _entry(name: str, data: bytes) -> dict[str, object]:
        """A file as Hugging Face lists it: only a large one is in LFS and has a sha256."""
        git = hashlib.sha1(data, usedforsecurity=False).hexdigest()
        row: dict[str, object] = {"rfilename": name, "path": name, "type": "file", "oid": git, "blobId": git}
        row["size"] = len(data)
        if len(data) > LFS_FROM_BYTES:
            sha256 = hashlib.sha256(data).hexdigest()
            row["lfs"] = {"oid": sha256, "sha256": sha256, "size": len(data), "pointerSize": 130}
        return row

    def _file(self, path: str, body: bool) -> None:
        name = path.split("/resolve/", 1)[1].split("/", 1)[1]
        data = self.hub.files.get(name)
        fault = self.hub.next_fault(name) if body else ""
        if data is None:
            self._status(404, path, {"X-Error-Code": "EntryNotFound"})
        elif fault.isdigit():
            self._status(
                int(fault), path, {"Retry-After": str(RETRY_AFTER_S)} if fault in ("429", "503") else {}
            )
        else:
            self._send(path, data, fault, body)

    def _send(self, path: str, data: bytes, fault: str, body: bool) -> None:
        if fault in ("wrong_bytes", "new_revision"):
            data = bytes(byte ^ 1 for byte in data)
        if fault == "truncated":
            data = data[: len(data) // 2]
        start = self._start(len(data)) if fault != "no_range" else 0
        status = 206 if start else 200
        self._note(path, status)
        self.send_response(status)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("X-Repo-Commit", OTHER_REVISION if fault == "new_revision" else REVISION)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Linked-Size", str(len(data)))
        self.send_header("X-Linked-Etag", f'"{hashlib.sha256(data).hexdigest()}"')
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        if body:
            self._body(data[start:], fault)

    def _start(self, size: int) -> int:
        wanted = self.headers.get("Range", "")
        if not wanted.startswith("bytes="):
            return 0
        start = int(wanted.removeprefix("bytes=").split("-")[0] or 0)
        return start if start < size else 0

    def _body(self, data: bytes, fault: str) -> None:
        if fault == "slow":
            for at in range(0, len(data), SLOW_BYTES):
                if self.hub.stop.wait(SLOW_PAUSE_S):
                    break
                self.wfile.write(data[at : at + SLOW_BYTES])
                self.wfile.flush()
            return
        half = data[: len(data) // 2]
        self.wfile.write(half if fault in ("cut", "stall") else data)
        self.wfile.flush()
        if fault == "stall":
            self.hub.stop.wait(STALL_S)
        if fault in ("cut", "stall"):
            self.close_connection = True


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    hub: Hub

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away in the middle is what tests do."""


@contextmanager
def serving(hub: Hub, port: int = 0, host: str = "127.0.0.1") -> Iterator[str]:
    """Serves until the block ends; gives the address."""
    server = _Server((host, port), Handler)
    server.hub = hub
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://{host}:{server.server_address[1]}"
    finally:
        hub.stop.set()
        server.shutdown()
        server.server_close()
        thread.join()


def read_folder(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its path in it."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


if __name__ == "__main__":
    with serving(
        Hub(read_folder(Path(sys.argv[1])), loud=True), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    ) as address:
        print(f"hub stand-in: {address}/{REPOSITORY}", flush=True)
        while True:
            time.sleep(3600)
