"""`logpipe.py FOLDER`: one service's log, from a FIFO into files cut by size and age, compressed, keeping N.

The writer never reopens anything and never knows. Bytes go FIFO -> newest file in order, and a file is only
changed for the next between two lines, so no line is lost, doubled or torn by a rotation:

    engine-000007-20261129T231117Z.log      being written; `engine.log` is a link to it
    engine-000006-20261128T231100Z.log.gz   earlier ones, each compressed beside and renamed when complete

HUP rotates now, TERM writes out what is held and ends. The FIFO comes as file descriptor 3 from the socket
unit, which keeps it open while this program restarts. When the disk is full, lines are counted and dropped,
and the count is written as soon as there is room: an engine must never hang on its log. So are lines above
`--lines-per-s`, when one is given. `--journal` instead of a folder writes to standard output, the journal.
"""

from __future__ import annotations

import argparse
import calendar
import fcntl
import gzip
import os
import re
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType

LINK = "engine.log"
NAME = re.compile(r"^engine-(\d{6,})-(\d{8}T\d{6}Z)\.log(\.gz)?$")
READ_BYTES = 1 << 16
PIPE_BYTES = 1 << 20
F_SETPIPE_SZ = 1031

LONGEST_LINE = 1 << 20
"""A line longer than this is cut here: memory has a limit."""

PARTIAL_S = 1.0
"""How long the beginning of a line is held back (so that a secret is not torn) before it is written as it is.
"""

BURST_S = 30.0
"""So many seconds' worth of lines may come at once before the limit of lines a second cuts."""

COMPRESS_WAIT_S = 20.0
FILE_MODE = 0o640

HIDDEN = b"[secret]"
PATTERNS = re.compile(
    rb"(?i)((?:authorization: *)?bearer +)[A-Za-z0-9._~+/=-]{8,}|\b(hf_|sk-|ms-)[A-Za-z0-9_-]{16,}"
)


def stamp(now: float) -> str:
    """UTC time as it stands in file names."""
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))


def redact(data: bytes, secrets: Iterable[bytes]) -> bytes:
    """`data` without these secrets and without what looks like a token."""
    for secret in secrets:
        data = data.replace(secret, HIDDEN)
    return PATTERNS.sub(lambda found: (found.group(1) or found.group(2) or b"") + HIDDEN, data)


class Log:
    """A folder of log files: `write` whole lines, `rotate` between them. One writer at a time (a lock file
    holds it).
    """

    def __init__(self, folder: Path, size_bytes: int, age_s: float, keep: int) -> None:
        self.folder, self.size_bytes, self.age_s, self.keep = folder, size_bytes, age_s, keep
        self.work: threading.Thread | None = None
        self.lock, self.again, self.busy = threading.Lock(), False, False
        self.dropped = 0
        self.file = -1
        for part in folder.glob("*.gz.part"):
            part.unlink(missing_ok=True)
        newest = self.files()[-1:]
        try:
            self._open(newest[0] if newest and newest[0].suffix == ".log" else None)
        except OSError:
            # Not ours to go on with: an undo has given the logs that were there to root.
            self._open(None)
        self.tidy()

    def files(self) -> list[Path]:
        """All files of this log, oldest first (a file that is being compressed comes twice)."""
        found = (path for path in self.folder.iterdir() if NAME.match(path.name))
        return sorted(found, key=lambda path: (self._number(path), path.name))

    @staticmethod
    def _number(path: Path) -> int:
        match = NAME.match(path.name)
        return int(match.group(1)) if match else 0

    def _open(self, path: Path | None) -> None:
        """Go on with `path`, or begin the next file; then swing the link."""
        now = time.time()
        if path is None:
            number = max(map(self._number, self.files()), default=0) + 1
            path = self.folder / f"engine-{number:06d}-{stamp(now)}.log"
        with self.lock:
            # Never may the compressing thread see a new file that is not yet known as the one being written.
            handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
            old, self.file, self.path = self.file, handle, path
        if old >= 0:
            os.close(old)
        self.size = os.fstat(handle).st_size
        self.ends_line = self.size == 0 or last_byte(path) == b"\n"
        match = NAME.match(path.name)
        self.opened = calendar.timegm(time.strptime(match.group(2), "%Y%m%dT%H%M%SZ")) if match else now
        self._link()

    def _link(self) -> None:
        beside = self.folder / f".{LINK}"
        # A link that cannot be swung (full disk) is a nuisance for readers, and no reason to stop writing.
        with suppress(OSError):
            beside.unlink(missing_ok=True)
            beside.symlink_to(self.path.name)
            beside.replace(self.folder / LINK)

    def due(self) -> bool:
        """Is the newest file full or too old? Not while it is empty or in mid-line."""
        if self.size == 0 or not self.ends_line:
            return False
        return self.size >= self.size_bytes or time.time() - self.opened >= self.age_s

    def rotate(self) -> bool:
        """Begin a new file; the old one is compressed in the background. False: not now (in mid-line, or no
        room).
        """
        if self.size == 0:
            return True
        if not self.ends_line:
            return False
        try:
            self._open(None)
        except OSError:
            return False
        self.tidy()
        return True

    def write(self, data: bytes) -> None:
        """Append lines, cut where a file is full; a full disk costs these lines (counted), not the engine."""
        while data:
            if self.due():
                self.rotate()
            end = self._fits(data)
            if end == 0 and self.rotate():
                continue
            # No cut now: a line that is longer than a file, or one that has begun in this file.
            end = end or data.find(b"\n") + 1 or len(data)
            self._put(data[:end])
            data = data[end:]

    def _fits(self, data: bytes) -> int:
        """Bytes of `data` (whole lines) that this file takes; 0: it is full. An empty file takes one line."""
        room = self.size_bytes - self.size
        if len(data) <= room:
            return len(data)
        fitting = data.rfind(b"\n", 0, max(0, room)) + 1
        return fitting if fitting or self.size else data.find(b"\n") + 1 or len(data)

    def _put(self, data: bytes) -> None:
        if self.dropped:
            note = f"bringup: {self.dropped} lines were dropped, the log could not be written\n".encode()
            if not self._append(note):
                self.dropped += data.count(b"\n")
                return
            self.dropped = 0
        if not self._append(data):
            self.dropped += data.count(b"\n")

    def _append(self, data: bytes) -> bool:
        """All of `data` or, when the disk is full, none of it."""
        before, view = self.size, memoryview(data)
        try:
            while view:
                done = os.write(self.file, view)
                view = view[done:]
        except OSError:
            os.ftruncate(self.file, before)
            return False
        self.size += len(data)
        self.ends_line = data.endswith(b"\n")
        return True

    def tidy(self) -> None:
        """Compress what is complete and drop what is over `keep`, in a thread; one at a time."""
        with self.lock:
            self.again = True
            if self.busy:
                return
            self.busy = True
        self.work = threading.Thread(target=self._tidy, name="compress", daemon=True)
        self.work.start()

    def _tidy(self) -> None:
        while self._asked_again():
            for path in self._complete():
                # What cannot be compressed now (full disk) is tried again after the next cut.
                with suppress(OSError):
                    compress(path)
            self._drop()

    def _complete(self) -> list[Path]:
        with self.lock:
            return [path for path in self.files() if path.suffix == ".log" and path != self.path]

    def _asked_again(self) -> bool:
        with self.lock:
            self.busy, self.again = self.again, False
            return self.busy

    def _drop(self) -> None:
        old = [path for path in self.files() if path.suffix == ".gz"]
        for path in old[: max(0, len(old) - self.keep)]:
            path.unlink(missing_ok=True)

    def close(self, wait_s: float = COMPRESS_WAIT_S) -> None:
        """Write out, and give the compressing thread `wait_s`; the next start does what it leaves."""
        with suppress(OSError):
            os.fsync(self.file)
        if self.work:
            self.work.join(wait_s)


class Journal:
    """Standard output as a log: systemd's journal keeps, cuts and drops it (a journal of the service's own)."""

    def __init__(self, handle: int = 1) -> None:
        self.handle = handle

    def write(self, data: bytes) -> None:
        """Write lines. Raises OSError when the journal is gone: then this program is started again, with a new one."""
        view = memoryview(data)
        while view:
            view = view[os.write(self.handle, view) :]

    def rotate(self) -> bool:
        """Not our matter."""
        return True

    def due(self) -> bool:
        """Never."""
        return False

    def close(self, wait_s: float = COMPRESS_WAIT_S) -> None:
        """Nothing is held back."""


class Limit:
    """At most so many lines a second, a burst of BURST_S seconds' worth, the rest counted and dropped; 0: all."""

    def __init__(self, lines_per_s: int, now: float) -> None:
        self.rate, self.at, self.room, self.dropped = lines_per_s, now, lines_per_s * BURST_S, 0

    def pass_(self, data: bytes, now: float) -> bytes:
        """Those of these lines that may be written, after a line that says how many were dropped before."""
        if not self.rate:
            return data
        self.room = min(self.rate * BURST_S, self.room + (now - self.at) * self.rate)
        self.at = now
        lines = data.splitlines(keepends=True)
        fitting = min(len(lines), int(self.room))
        said = self._said() if fitting else b""
        self.room -= fitting
        self.dropped += len(lines) - fitting
        return said + b"".join(lines[:fitting])

    def _said(self) -> bytes:
        if not self.dropped:
            return b""
        count, self.dropped = self.dropped, 0
        return f"bringup: {count} lines were dropped, more than {self.rate} a second came\n".encode()

    def rest(self) -> bytes:
        """What is still to be said when a flood has ended and nothing more comes."""
        return self._said()


def last_byte(path: Path) -> bytes:
    """The last byte of a file that is not empty."""
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1)


def compress(path: Path) -> None:
    """`x.log` -> `x.log.gz`, complete before the original goes; a copy that was complete already is taken."""
    target = path.with_name(path.name + ".gz")
    if not target.exists():
        part = path.with_name(path.name + ".gz.part")
        with path.open("rb") as source, part.open("wb") as raw:
            os.fchmod(raw.fileno(), FILE_MODE)
            with gzip.GzipFile(filename=path.name, mode="wb", fileobj=raw, compresslevel=6) as packed:
                shutil.copyfileobj(source, packed, 1 << 20)
            raw.flush()
            os.fsync(raw.fileno())
        part.replace(target)
    path.unlink(missing_ok=True)


class Asked:
    """What signals have asked for: `cut` (HUP), `stop` (TERM, INT). `wake` is readable when one has come."""

    def __init__(self) -> None:
        self.stop = self.cut = False
        self.wake, raised = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(raised, warn_on_full_buffer=False)
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._take)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self.cut = True
        else:
            self.stop = True


class Pump:
    """Reads a FIFO for ever and hands whole lines to a log."""

    def __init__(
        self,
        source: int,
        log: Log | Journal,
        secrets: Iterable[bytes],
        asked: Asked,
        lines_per_s: int = 0,
    ) -> None:
        self.source, self.log, self.secrets, self.asked = source, log, tuple(secrets), asked
        self.limit = Limit(lines_per_s, time.monotonic())
        self.rest = b""
        self.since = 0.0

    def take(self, data: bytes) -> None:
        """Write the whole lines of what has come; hold the last, unfinished one."""
        if not self.rest:
            self.since = time.monotonic()
        data = self.rest + data
        end = data.rfind(b"\n") + 1
        if end == 0 and len(data) > LONGEST_LINE:
            end = len(data)
        if end:
            self.since = time.monotonic()
            self._write(data[:end])
        self.rest = data[end:]

    def _write(self, data: bytes) -> None:
        self.log.write(self.limit.pass_(redact(data, self.secrets), time.monotonic()))

    def flush(self) -> None:
        """Write the unfinished line as it is."""
        if self.rest:
            self._write(self.rest)
            self.rest = b""

    def step(self, wait_s: float) -> bool:
        """Wait for bytes at most `wait_s` and take them; False when there were none."""
        ready, _, _ = select.select([self.source, self.asked.wake], [], [], wait_s)
        if self.asked.wake in ready:
            os.read(self.asked.wake, READ_BYTES)
        if self.source not in ready:
            return False
        try:
            data = os.read(self.source, READ_BYTES)
        except BlockingIOError:
            return False
        if data:
            self.take(data)
        return bool(data)

    def between(self) -> None:
        """What is due between two reads: an old unfinished line, a rotation that was asked for or has come of
        age.
        """
        if self.rest and time.monotonic() - self.since > PARTIAL_S:
            self.flush()
        if self.asked.cut:
            # In mid-line the cut stays asked for, and comes with the line's end. Cleared before: a signal
            # that comes meanwhile is not lost.
            self.asked.cut = False
            self.asked.cut = not self.log.rotate() or self.asked.cut
        elif self.log.due():
            self.log.rotate()

    def run(self) -> None:
        """Until TERM; then what is in the FIFO at that moment is written too."""
        while not self.asked.stop:
            if not self.step(PARTIAL_S) and not self.rest:
                self.log.write(self.limit.rest())
            self.between()
        while self.step(0.0):
            pass
        self.flush()
        self.log.write(self.limit.rest())
        self.log.close()


def open_source(fifo: str | None) -> int:
    """File descriptor 3 from the socket unit, or a FIFO by name (open for writing too: it never ends)."""
    if fifo:
        handle = os.open(fifo, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    elif os.environ.get("LISTEN_FDS") == "1":
        handle = 3
    else:
        raise OSError("no FIFO: start it through its socket unit, or give --fifo")
    # A smaller pipe (an unprivileged user's limit) works as well, with less room for a burst.
    with suppress(OSError):
        fcntl.fcntl(handle, F_SETPIPE_SZ, PIPE_BYTES)
    return handle


def secrets_of(folder: str | None) -> list[bytes]:
    """The values of the unit's credentials, longest first; ones below 8 bytes would hide too much."""
    values = [path.read_bytes().strip() for path in Path(folder).iterdir()] if folder else []
    return sorted((value for value in values if len(value) >= 8), key=len, reverse=True)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="logpipe.py", description="a service's log from a FIFO into rotated files"
    )
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--journal", action="store_true", help="write to standard output instead")
    parser.add_argument("--fifo", help="read this FIFO instead of file descriptor 3")
    parser.add_argument("--size-bytes", type=int, default=64 << 20)
    parser.add_argument("--age-s", type=float, default=86_400)
    parser.add_argument("--keep", type=int, default=14)
    parser.add_argument("--lines-per-s", type=int, default=0, help="lines above it are dropped; 0: none are")
    options = parser.parse_args(words)
    if bool(options.folder) == options.journal:
        parser.error("needs a folder or --journal")
    os.umask(0o027)
    asked = Asked()
    try:
        log: Log | Journal = Journal()
        if options.folder:
            log = Log(options.folder, options.size_bytes, options.age_s, options.keep)
        secrets = secrets_of(os.environ.get("CREDENTIALS_DIRECTORY"))
        pump = Pump(open_source(options.fifo), log, secrets, asked, options.lines_per_s)
    except OSError as error:
        print(f"bringup: the log cannot be written: {error}", file=sys.stderr)
        return 1

    pump.run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
