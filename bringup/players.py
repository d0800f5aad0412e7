"""Ansible as a process of ansible-runner's: started, told what to play, and ended (I/O).

It takes longest to start, so it may be started before it is known what it will play, or whether anything; see
`bringup/leash.py` for the other end.
"""

from __future__ import annotations

import json
import os
import queue
import secrets
import shutil
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from bringup import ROOT, leash, runs

FOLDER = ROOT / ".cache" / "players"
JOB_LIMIT_S = 24 * 3600
"""A whole run; first runs copy hundreds of GiB, and every step inside has its own, shorter limit."""

JOIN_LIMIT_S = 15.0


@dataclass(frozen=True)
class Player:
    """An Ansible that has been started. `private`: a folder of its own, which goes with it; `inbox`: its events, and an
    empty one at its end."""

    private: Path
    runner: Any
    thread: threading.Thread
    inbox: queue.SimpleQueue[Mapping[str, Any]]

    def told(self, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        """Plays; with nothing to play it ends. `environment`: what the run adds to its own."""
        text = json.dumps({"argv": list(argv), "environment": dict(environment)})
        runs.write_private(self.private / leash.TOLD, text)

    def close(self) -> None:
        """Waits for its end, which it comes to at once when it was told nothing."""
        if self.private.is_dir() and not (self.private / leash.TOLD).exists():
            self.told((), {})
        self.thread.join(JOIN_LIMIT_S)
        shutil.rmtree(self.private, ignore_errors=True)


def begin(playbook: Path, inventory: Path) -> Player:
    """Starts Ansible for a playbook and an inventory's folder, or for what it is told instead."""
    inbox: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
    FOLDER.mkdir(mode=0o700, parents=True, exist_ok=True)
    _tidy()
    private = FOLDER / f"{os.getpid()}-{secrets.token_hex(8)}"
    runner = _runner(playbook, inventory, private, inbox)

    def work() -> None:
        try:
            runner.run()
        except Exception as error:
            inbox.put({"event": "error", "stdout": f"ERROR: ansible-runner: {error!r}"})
        inbox.put({})

    thread = threading.Thread(target=work, name="ansible-runner", daemon=True)
    thread.start()
    return Player(private, runner, thread, inbox)


def _tidy() -> None:
    """Removes what controllers left that were killed."""
    for path in FOLDER.iterdir():
        pid = path.name.partition("-")[0]
        if pid.isdigit() and not runs.pid_alive(int(pid)):
            shutil.rmtree(path, ignore_errors=True)


class Ahead:
    """Around a run: the Ansible that `begin` started for it, which ends with the body."""

    def __init__(self, playbook: Path) -> None:
        self._playbook = playbook
        self.player: Player | None = None

    def begin(self, inventory: Path) -> None:
        """Most likely something will be played."""
        self.player = begin(self._playbook, inventory)

    def __enter__(self) -> Ahead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.player is not None:
            self.player.close()


def _runner(
    playbook: Path, inventory: Path, private: Path, inbox: queue.SimpleQueue[Mapping[str, Any]]
) -> Any:
    """An ansible-runner that writes nothing but into `private`, and prints nothing."""
    from ansible_runner import interface
    from ansible_runner.runner import pexpect

    # ansible-runner closes the terminal of a process that has ended, and its library would wait a tenth of a second for
    # the kernel to notice that.
    at_once = property(lambda process: 0, lambda process, seconds: None)
    pexpect.pty_spawn.ptyprocess.PtyProcess.delayafterclose = at_once
    private.mkdir(mode=0o700)

    def handle(event: Mapping[str, Any]) -> bool:
        inbox.put(event)
        return False  # and the runner keeps no copy of its own, which would hold unredacted results

    def status(state: Mapping[str, Any], runner_config: Any) -> None:
        if state.get("status") == "running":
            # ansible-runner has just written the whole environment of the process there, secrets and all
            for command in private.glob("artifacts/*/command"):
                command.unlink()

    def never() -> bool:
        return False

    runner = interface.init_runner(
        private_data_dir=str(private),
        project_dir=str(ROOT),
        playbook=str(playbook),
        inventory=str(inventory),
        envvars=_environment(),
        settings={"suppress_output_file": True, "suppress_ansible_output": True, "pexpect_timeout": 1},
        suppress_env_files=True,
        ignore_logging=True,
        quiet=True,
        timeout=JOB_LIMIT_S,
        event_handler=handle,
        status_handler=status,
        cancel_callback=never,
    )
    runner.config.command = [sys.executable, "-m", "bringup.leash", str(private / leash.TOLD)]
    return runner


def _environment() -> dict[str, str]:
    """What Ansible must know when it starts."""
    programs = str(Path(sys.executable).parent)
    config = ROOT / "ansible.cfg"
    return {
        "PATH": os.pathsep.join([programs, os.environ.get("PATH", os.defpath)]),
        "ANSIBLE_NOCOLOR": "1",
        "ANSIBLE_RETRY_FILES_ENABLED": "0",
        # ansible-runner turns the check of host keys off for whoever does not say that it stays on.
        "ANSIBLE_HOST_KEY_CHECKING": "True",
        **({"ANSIBLE_CONFIG": str(config)} if config.is_file() else {}),
    }
