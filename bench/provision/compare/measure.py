"""One command measured: wall, CPU of the controller and of the nodes, memory, and when it first says something (I/O).

CPU and memory are those of two control groups (version 1 or 2), so that every process that a command starts counts,
also one that stays, and a node's processes count for the nodes.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
SAMPLE_S = 0.1
END_LIMIT_S = 10.0


class Group:
    """A control group of this machine for CPU time and memory."""

    def __init__(self, name: str) -> None:
        unified = (CGROUPS / "cgroup.controllers").is_file()
        self._cpu = CGROUPS / name if unified else CGROUPS / "cpuacct" / name
        self._memory = CGROUPS / name if unified else CGROUPS / "memory" / name
        self._unified = unified
        for folder in (self._cpu, self._memory):
            folder.mkdir(exist_ok=True)
        if unified:
            with suppress(OSError):
                (CGROUPS / "cgroup.subtree_control").write_text("+cpu +memory")

    def wrap(self, words: Sequence[str]) -> list[str]:
        """The command line that runs another one in this group."""
        folders = dict.fromkeys((self._cpu, self._memory))
        join = "; ".join(f"echo $$ >{folder}/cgroup.procs" for folder in folders)
        return ["sh", "-c", f"{join}; exec {shlex.join(words)}"]

    def cpu_s(self) -> float:
        """CPU seconds of all its processes so far, ended ones too."""
        if self._unified:
            rows = dict(line.split() for line in (self._cpu / "cpu.stat").read_text().splitlines())
            return int(rows["usage_usec"]) / 1e6
        return int((self._cpu / "cpuacct.usage").read_text()) / 1e9

    def memory(self) -> int:
        """Bytes that its processes hold now, each page once, without files' cache."""
        rows = dict(line.split() for line in (self._memory / "memory.stat").read_text().splitlines())
        return int(rows["anon" if self._unified else "rss"])

    def pids(self) -> list[int]:
        """Processes in it."""
        return [int(line) for line in (self._cpu / "cgroup.procs").read_text().split()]

    def kill(self) -> None:
        """Ends all its processes. Raises SystemExit when they do not go."""
        end = time.monotonic() + END_LIMIT_S
        while pids := self.pids():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > end:
                raise SystemExit(f"{self._cpu}: processes do not end: {pids}")
            time.sleep(0.02)

    def remove(self) -> None:
        """Takes the group away."""
        self.kill()
        for folder in dict.fromkeys((self._cpu, self._memory)):
            with suppress(OSError):
                folder.rmdir()


@dataclass(frozen=True)
class Sample:
    """Figures of one run: seconds, MiB (peaks), and the share of the machine's CPUs that others used meanwhile.

    `first_s`: until the first line that tells of a node or of the outcome.
    """

    wall_s: float
    controller_s: float
    nodes_s: float
    first_s: float
    controller_mib: float
    nodes_mib: float
    others: float

    def row(self) -> dict[str, float]:
        """As plain numbers."""
        return {name: round(value, 3) for name, value in asdict(self).items()}


def busy_s() -> float:
    """CPU seconds that this machine has spent on anything but waiting."""
    words = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return (sum(words[:3]) + sum(words[5:7])) / os.sysconf("SC_CLK_TCK")


class _Peaks(threading.Thread):
    """Samples the memory of both groups."""

    def __init__(self, groups: Sequence[Group]) -> None:
        super().__init__(daemon=True)
        self._groups, self._over = groups, threading.Event()
        self.peaks = [0] * len(groups)

    def run(self) -> None:
        while not self._over.wait(SAMPLE_S):
            self.peaks = [
                max(peak, group.memory()) for peak, group in zip(self.peaks, self._groups, strict=True)
            ]

    def end(self) -> list[int]:
        """Peaks in bytes."""
        self._over.set()
        self.join()
        return self.peaks


def measured(
    words: Sequence[str],
    *,
    folder: Path,
    environment: Mapping[str, str],
    namespace: str,
    useful: str,
    groups: tuple[Group, Group],
    limit_s: float,
) -> tuple[Sample, int, str]:
    """Runs a command in the controller's group and network; figures, exit code, and all that it printed.

    `useful`: regular expression of a line that tells of a node or of the outcome. Raises SystemExit after `limit_s`.
    """
    controller, nodes = groups
    argv = controller.wrap(["nsenter", f"--net=/var/run/netns/{namespace}", *words])
    lines: list[str] = []
    first = 0.0
    before = (controller.cpu_s(), nodes.cpu_s(), busy_s())
    peaks = _Peaks(groups)
    peaks.start()
    begun = time.monotonic()
    process = subprocess.Popen(
        argv,
        cwd=folder,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    alarm = threading.Timer(limit_s, process.kill)
    alarm.start()
    assert process.stdout is not None
    pattern = re.compile(useful)
    ended = threading.Thread(target=process.wait, daemon=True)
    ended.start()

    def read() -> None:
        nonlocal first
        assert process.stdout is not None
        for line in process.stdout:
            if not first and pattern.search(line):
                first = time.monotonic() - begun
            lines.append(line)

    # What stays behind (OpenSSH's shared connections) may hold the pipe open: the command's end is what counts.
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    ended.join()
    wall = time.monotonic() - begun
    reader.join(1.0)
    alarm.cancel()
    after = (controller.cpu_s(), nodes.cpu_s(), busy_s())
    used = [late - early for late, early in zip(after, before, strict=True)]
    peak = peaks.end()
    if wall >= limit_s:
        raise SystemExit(f"{' '.join(words)}: took longer than {limit_s:g} s\n{''.join(lines)[-3000:]}")
    others = (used[2] - used[0] - used[1]) / (wall * (os.cpu_count() or 1))
    figures = Sample(
        wall, used[0], used[1], first or wall, peak[0] / 2**20, peak[1] / 2**20, max(0.0, others)
    )
    return figures, process.returncode, "".join(lines)
