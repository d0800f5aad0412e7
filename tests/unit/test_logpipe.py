"""The log writer: not one line lost, doubled or torn, whatever happens between two lines."""

from __future__ import annotations

import gzip
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bringup import ROOT
from bringup.node import logpipe

PROGRAM = ROOT / "bringup/node/logpipe.py"
LIMIT_S = 240.0


class Pipe:
    """A running logpipe.py with its FIFO, as the socket unit gives it."""

    def __init__(self, folder: Path, **options: object) -> None:
        self.fifo, self.folder = folder / "fifo", folder / "log"
        self.folder.mkdir()
        os.mkfifo(self.fifo)
        self.options = {"size-bytes": 1 << 30, "age-s": 86400, "keep": 1000, **options}
        # The socket unit holds the FIFO open while the service restarts.
        self.held = os.open(self.fifo, os.O_RDWR | os.O_NONBLOCK)
        self.environment = {**os.environ}
        self.start()

    def start(self) -> None:
        words = [f"--{name}={value}" for name, value in self.options.items()]
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(self.folder), f"--fifo={self.fifo}", *words],
            env=self.environment,
        )

    def stop(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)
        assert self.process.wait(LIMIT_S) in (0, -number)

    def current(self) -> int:
        """Bytes in the newest file; 0 when there is none yet."""
        files = [path for path in logpipe_files(self.folder) if path.suffix == ".log"]
        return files[-1].stat().st_size if files else 0

    def lines(self) -> list[str]:
        """All lines of all files, oldest file first."""
        result: list[str] = []
        for path in logpipe_files(self.folder):
            data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            result += data.decode().splitlines()
        return result

    def has(self, number: int) -> bool:
        """Is this line in a file by now? A file that is being cut while it is read says no."""
        try:
            return any(line.startswith(f"line {number} ") for line in self.lines())
        except OSError:
            return False


def logpipe_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if logpipe.NAME.match(path.name))


def newest(folder: Path) -> int:
    """The number of the newest file."""
    return max((int(path.name.split("-")[1]) for path in logpipe_files(folder)), default=0)


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Pipe]:
    running = Pipe(tmp_path)
    yield running
    running.process.kill()
    running.process.wait()
    os.close(running.held)


@pytest.fixture
def asked() -> Iterator[logpipe.Asked]:
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)}
    yield logpipe.Asked()
    raised = signal.set_wakeup_fd(-1)
    os.close(raised)
    for number, handler in before.items():
        signal.signal(number, handler)


def wait_for(true: object, seconds: float = LIMIT_S) -> None:
    until = time.monotonic() + seconds
    while not true():  # type: ignore[operator]
        assert time.monotonic() < until, "waited too long"
        time.sleep(0.02)


def writer(fifo: Path, count: int, pause_s: float, end: Path | None = None) -> subprocess.Popen[bytes]:
    """A process that opens the log once and writes numbered lines in two halves each.

    It ends after `count` lines, or when the file `end` is there, and leaves in it how many lines it wrote.
    """
    code = (
        "import os,sys,time\n"
        "out=os.open(sys.argv[1],os.O_WRONLY)\n"
        "for n in range(int(sys.argv[2])):\n"
        "    line=f'line {n} {\"x\"*(n%90)}\\n'.encode()\n"
        "    os.write(out,line[:5]); os.write(out,line[5:])\n"
        "    time.sleep(float(sys.argv[3]))\n"
        "    if os.path.exists(sys.argv[4]): break\n"
        "open(sys.argv[4],'w').write(str(n+1))\n"
    )
    words = [str(fifo), str(count), str(pause_s), str(end or fifo.with_name("written"))]
    return subprocess.Popen([sys.executable, "-c", code, *words])


def numbers(lines: list[str]) -> list[int]:
    return [int(line.split()[1]) for line in lines]


def test_a_hundred_rotations_under_load_lose_and_double_no_line(pipe: Pipe) -> None:
    end = pipe.folder.parent / "end"
    load = writer(pipe.fifo, 1_000_000, 0.004, end)
    for _ in range(100):
        wait_for(lambda: pipe.current() > 0)
        before = newest(pipe.folder)
        pipe.process.send_signal(signal.SIGHUP)
        wait_for(lambda before=before: newest(pipe.folder) > before)
    assert load.poll() is None, "the load must outlast the rotations"
    end.touch()
    assert load.wait(LIMIT_S) == 0
    pipe.stop()
    assert numbers(pipe.lines()) == list(range(int(end.read_text())))
    assert newest(pipe.folder) > 100


def test_files_are_cut_by_size_and_only_so_many_are_kept(tmp_path: Path) -> None:
    pipe = Pipe(tmp_path, **{"size-bytes": 2000, "keep": 3})
    assert writer(pipe.fifo, 600, 0.0).wait(LIMIT_S) == 0
    wait_for(lambda: pipe.has(599))
    pipe.stop()
    os.close(pipe.held)
    files = logpipe_files(pipe.folder)
    assert len([path for path in files if path.suffix == ".gz"]) == 3
    found = numbers(pipe.lines())
    assert found == list(range(found[0], 600))
    assert all(len(gzip.decompress(path.read_bytes())) <= 2000 for path in files if path.suffix == ".gz")


def test_a_restart_of_the_log_service_loses_nothing(pipe: Pipe) -> None:
    load = writer(pipe.fifo, 1500, 0.001)
    for _ in range(3):
        time.sleep(0.3)
        pipe.stop()
        time.sleep(0.2)
        pipe.start()
    assert load.wait(LIMIT_S) == 0
    # A stop that comes before the program listens for it ends it at once, and the rest stays in the FIFO.
    wait_for(lambda: pipe.has(1499))
    pipe.stop()
    assert numbers(pipe.lines()) == list(range(1500))


def test_an_old_file_is_cut_by_its_age_when_something_is_in_it(tmp_path: Path) -> None:
    log = logpipe.Log(tmp_path, size_bytes=1000, age_s=0.0, keep=5)
    assert not log.due()
    log.write(b"one\n")
    assert log.due()
    log.write(b"two\n")
    log.close()
    assert [
        gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        for path in log.files()
    ] == [b"one\n", b"two\n"]


def test_a_newest_file_that_cannot_be_gone_on_with_is_left_and_the_next_begun(tmp_path: Path) -> None:
    """As after an undo, which gives logs to root, and another provision. (A folder: root may write any file.)"""
    (tmp_path / "engine-000007-20261130T112627Z.log").mkdir()
    log = logpipe.Log(tmp_path, 1 << 20, 3600, 5)
    log.write(b"one\n")
    log.close()
    assert [path.name[:13] for path in logpipe_files(tmp_path)] == ["engine-000007", "engine-000008"]
    assert (tmp_path / "engine.log").read_bytes() == b"one\n"


def test_the_link_names_the_newest_file(tmp_path: Path) -> None:
    log = logpipe.Log(tmp_path, 1000, 1000, 5)
    log.write(b"one\n")
    assert log.rotate()
    log.write(b"two\n")
    log.close()
    assert (tmp_path / "engine.log").read_text() == "two\n"


def test_a_line_without_its_end_is_never_cut_in_two_files(tmp_path: Path) -> None:
    log = logpipe.Log(tmp_path, 10, 1000, 5)
    log.write(b"a long beginning")
    assert not log.rotate()
    log.write(b" and its end\n")
    assert log.rotate()
    log.close()
    packed = next(path for path in log.files() if path.suffix == ".gz")
    assert gzip.decompress(packed.read_bytes()) == b"a long beginning and its end\n"


def test_what_a_crash_left_half_done_is_finished_at_the_next_start(tmp_path: Path) -> None:
    (tmp_path / "engine-000001-20260101T000000Z.log").write_bytes(b"one\n")
    (tmp_path / "engine-000002-20260101T000001Z.log").write_bytes(b"two\n")
    (tmp_path / "engine-000002-20260101T000001Z.log.gz").write_bytes(gzip.compress(b"two\n"))
    (tmp_path / "engine-000003-20260101T000002Z.log.gz.part").write_bytes(b"half")
    (tmp_path / "engine-000003-20260101T000002Z.log").write_bytes(b"three\n")
    log = logpipe.Log(tmp_path, 1000, 1e12, 5)
    log.close()
    assert [path.name for path in log.files()] == [
        "engine-000001-20260101T000000Z.log.gz",
        "engine-000002-20260101T000001Z.log.gz",
        "engine-000003-20260101T000002Z.log",
    ]


def test_a_full_disk_costs_counted_lines_and_never_the_writer() -> None:
    class Full(logpipe.Log):
        def __init__(self) -> None:
            self.size, self.dropped, self.size_bytes, self.age_s, self.opened = 0, 0, 1000, 1e12, 0.0
            self.ends_line, self.room, self.kept = True, False, b""

        def _append(self, data: bytes) -> bool:
            self.kept += data if self.room else b""
            return self.room

    log = Full()
    log.write(b"one\ntwo\n")
    log.write(b"three\n")
    log.room = True
    log.write(b"four\n")
    assert log.kept == b"bringup: 3 lines were dropped, the log could not be written\nfour\n"


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        (b"GET / Authorization: Bearer abcdefgh12345678\n", b"GET / Authorization: Bearer [secret]\n"),
        (b"token hf_abcdefghijklmnopqrstuv used\n", b"token hf_[secret] used\n"),
        (b"the key is correct horse battery\n", b"the key is [secret]\n"),
        (b"nothing to hide: sk-8\n", b"nothing to hide: sk-8\n"),
    ],
)
def test_secrets_never_reach_the_file(written: bytes, kept: bytes) -> None:
    assert logpipe.redact(written, [b"correct horse battery"]) == kept


def test_a_secret_that_comes_in_two_pieces_is_hidden_too(tmp_path: Path, asked: logpipe.Asked) -> None:
    log = logpipe.Log(tmp_path, 1000, 1e9, 5)
    pump = logpipe.Pump(0, log, [b"topsecretvalue"], asked)
    pump.take(b"key=topsec")
    pump.take(b"retvalue\n")
    log.close()
    assert (tmp_path / "engine.log").read_bytes() == b"key=[secret]\n"


# ---------------------------------------------------------------- how much is logged


def numbered(first: int, count: int) -> bytes:
    return b"".join(f"line {number}\n".encode() for number in range(first, first + count))


def test_lines_above_the_limit_are_counted_and_the_count_is_written() -> None:
    limit = logpipe.Limit(10, now=0.0)
    burst = int(10 * logpipe.BURST_S)
    assert limit.pass_(numbered(0, burst), 0.0) == numbered(0, burst), "a burst is no flood"
    assert limit.pass_(numbered(0, 50), 0.0) == b""
    said = b"bringup: 50 lines were dropped, more than 10 a second came\n"
    assert limit.pass_(numbered(7, 3), 1.0) == said + numbered(7, 3)
    assert limit.pass_(numbered(0, 9), 1.2) == numbered(0, 9)
    assert limit.rest() == b""


def test_without_a_limit_every_line_is_written() -> None:
    limit = logpipe.Limit(0, now=0.0)
    many = numbered(0, 100_000)
    assert limit.pass_(many, 0.0) == many


def test_a_flood_that_ends_is_said_although_nothing_more_comes(tmp_path: Path) -> None:
    running = Pipe(tmp_path, **{"lines-per-s": 1})
    try:
        os.set_blocking(running.held, True)
        os.write(running.held, numbered(0, 1000))

        def counted() -> int:
            lines = running.lines()
            dropped = sum(int(line.split()[1]) for line in lines if "were dropped" in line)
            return dropped + sum(line.startswith("line ") for line in lines)

        wait_for(lambda: counted() == 1000)
        assert any("lines were dropped, more than 1 a second came" in line for line in running.lines())
    finally:
        running.process.kill()
        running.process.wait()
        os.close(running.held)


def test_in_journal_mode_lines_go_to_standard_output_without_secrets(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    (tmp_path / "credentials").mkdir()
    (tmp_path / "credentials" / "api_key").write_text("canary-0123456789\n")
    command = [sys.executable, str(PROGRAM), "--journal", f"--fifo={fifo}"]
    environment = {**os.environ, "CREDENTIALS_DIRECTORY": str(tmp_path / "credentials")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as program:
        assert program.stdout is not None
        with fifo.open("wb") as writer:
            writer.write(b"api_key='canary-0123456789'\n")
        first = program.stdout.readline()
        program.terminate()
    assert first == b"api_key='[secret]'\n"


@pytest.mark.parametrize("words", [["--journal", "/x"], []])
def test_it_writes_to_one_place(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        logpipe.main(words)
