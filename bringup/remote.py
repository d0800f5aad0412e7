"""Looking at a node over SSH, host keys always checked (I/O).

`run` goes over a Fabric connection that is kept for the whole command: for streams, tunnels and many questions.
`once` asks one question through OpenSSH's own client, which connects for a third of what Fabric costs, and leaves the
connection open where Ansible looks for one, so that a run which then changes the node has it already.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bringup.errors import HostUnreachable, Problem
from bringup.fleet import Host

CONNECT_LIMIT_S = 10
COMMAND_LIMIT_S = 60.0
OUTPUT_LIMIT = 32 * 1024 * 1024
"""Bytes of a command's output that are kept; more is dropped, so that no log can fill the controller."""

CHANGED_KEY = "its host key is not the known one (installed anew? then replace the key in known_hosts)"
CHUNK = 64 * 1024
POLL_S = 0.02

_connections: dict[Host, Any] = {}
_lock = threading.Lock()


@dataclass(frozen=True)
class Ran:
    """How a command on a node ended; `code` 124: it took longer than its limit."""

    code: int
    out: str
    err: str


def connection(host: Host) -> Any:
    """An open Fabric connection, made once a host and command. Raises HostUnreachable with the reason."""
    with _lock:
        known = _connections.get(host)
    if known is not None and known.is_connected:
        return known
    made = _connect(host)
    with _lock:
        _connections[host] = made
    return made


def _connect(host: Host) -> Any:
    import logging

    import paramiko
    from fabric import Connection

    # What went wrong is raised; paramiko's thread would print a traceback of it besides.
    logging.getLogger("paramiko.transport").setLevel(logging.CRITICAL)
    gateway = Connection(host.jump, connect_timeout=CONNECT_LIMIT_S) if host.jump else None
    made = Connection(
        host.address,
        user=host.user,
        port=host.port,
        gateway=gateway,
        connect_timeout=CONNECT_LIMIT_S,
        connect_kwargs={
            "banner_timeout": CONNECT_LIMIT_S,
            "auth_timeout": CONNECT_LIMIT_S,
            **({"key_filename": host.key, "look_for_keys": False} if host.key else {}),
        },
    )
    for opened in filter(None, (made, gateway)):
        if host.check_keys:
            opened.client.set_missing_host_key_policy(paramiko.RejectPolicy())
        opened.client.load_system_host_keys()
    for path in host.known_hosts:
        if Path(path).is_file():
            made.client.load_host_keys(path)
    try:
        made.open()
    except Exception as error:
        raise HostUnreachable(Problem(host.name, f"cannot be reached: {_reason(host, error)}")) from None
    return made


def _reason(host: Host, error: Exception) -> str:
    import socket

    import paramiko

    if isinstance(error, paramiko.BadHostKeyException):
        return CHANGED_KEY
    if isinstance(error, paramiko.AuthenticationException):
        return _refused(host)
    if isinstance(error, paramiko.ssh_exception.NoValidConnectionsError):
        return f"nothing listens on {host.address}:{host.port}"
    if isinstance(error, (TimeoutError, socket.timeout)):
        return f"no answer from {host.address}:{host.port} within {CONNECT_LIMIT_S} s"
    text = str(error) or type(error).__name__
    if "not found in known_hosts" in text:
        return f"its host key is not in {_known(host)}"
    return text


def run(
    host: Host,
    command: str,
    *,
    stdin: str = "",
    limit_s: float = COMMAND_LIMIT_S,
    on_output: Callable[[str], None] | None = None,
    stop: threading.Event | None = None,
) -> Ran:
    """A shell command on the node. `on_output` gets stdout as it comes (and `out` stays empty). `stop`
    ends it early, with code 0.

    Raises HostUnreachable when the node cannot be reached or the connection is lost.
    """
    if host.local:
        return _run_local(command, stdin, limit_s, on_output)
    try:
        channel = connection(host).transport.open_session(timeout=CONNECT_LIMIT_S)
        channel.exec_command(command)
        return _read(channel, stdin.encode(), limit_s, on_output, stop)
    except HostUnreachable:
        raise
    except Exception as error:
        raise HostUnreachable(
            Problem(host.name, f"the connection was lost: {_reason(host, error)}")
        ) from None


def _read(
    channel: Any,
    stdin: bytes,
    limit_s: float,
    on_output: Callable[[str], None] | None,
    stop: threading.Event | None,
) -> Ran:
    """Feeds and reads a channel; fabric's own `run` would send one character every 10 ms."""
    deadline = time.monotonic() + limit_s
    out, err = bytearray(), bytearray()
    channel.settimeout(CONNECT_LIMIT_S)
    channel.sendall(stdin)
    channel.shutdown_write()
    try:
        while True:
            ended = channel.exit_status_ready()
            got = False
            while channel.recv_ready():
                _take(channel.recv(CHUNK), out, on_output)
                got = True
            while channel.recv_stderr_ready():
                _take(channel.recv_stderr(CHUNK), err, None)
                got = True
            if ended and not got:
                break
            if stop is not None and stop.is_set():
                return Ran(0, _text(out), _text(err))
            if time.monotonic() > deadline:
                return Ran(124, _text(out), f"{_text(err)}took longer than {limit_s:g} s")
            if not got:
                time.sleep(POLL_S)
        return Ran(channel.recv_exit_status(), _text(out), _text(err))
    finally:
        channel.close()


def _take(chunk: bytes, kept: bytearray, on_output: Callable[[str], None] | None) -> None:
    if on_output is not None:
        on_output(chunk.decode(errors="replace"))
    elif len(kept) < OUTPUT_LIMIT:
        kept += chunk


def _text(kept: bytearray) -> str:
    return kept.decode(errors="replace")


ASKING = (
    "BatchMode=yes",
    f"ConnectTimeout={CONNECT_LIMIT_S}",
    "LogLevel=ERROR",
    "ControlMaster=auto",
    "ServerAliveInterval=10",
    "ServerAliveCountMax=3",
    "PreferredAuthentications=publickey",
)
SHARED = ("ControlPersist=120s",)
"""As `ansible.cfg` has it (a test holds both): Ansible finds the connection that a look has opened."""

QUICK = ("ControlPersist=20s", "KexAlgorithms=^curve25519-sha256")
"""For what may be read by anybody who records it today and can break that key exchange one day: looks at seals, and
servers' answers to our prompt. OpenSSH 8.5 to 9.8 spend five times as much on the one they prefer."""

CONTROL_FOLDER = Path("~/.ansible/cp")
"""Where Ansible keeps its connections."""

SSH_PORT = 22
LOST = 255
"""The exit code of `ssh` when it is not the command that failed."""

ENDS: Sequence[tuple[str, Callable[[Host], str]]] = (
    ("host identification has changed", lambda host: CHANGED_KEY),
    ("host key verification failed", lambda host: f"its host key is not in {_known(host)}"),
    ("permission denied (", lambda host: _refused(host)),
    ("connection refused", lambda host: f"nothing listens on {host.address}:{host.port}"),
    ("timed out", lambda host: f"no answer from {host.address}:{host.port} within {CONNECT_LIMIT_S} s"),
)
"""What OpenSSH says, in lower case, and what that means; the first that is found."""


def once(
    host: Host, command: str, *, stdin: str = "", limit_s: float = COMMAND_LIMIT_S, quick: bool = False
) -> Ran:
    """A shell command on the node, asked by OpenSSH. `quick`: over a connection that Ansible does not use after it,
    whose keys are exchanged as fast as can be. Raises HostUnreachable when the node cannot be reached."""
    if host.local:
        return _run_local(command, stdin, limit_s, None)
    folder = Path(os.environ.get("ANSIBLE_SSH_CONTROL_PATH_DIR") or CONTROL_FOLDER).expanduser()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = f"ControlPath={folder}/{control_name(host)}{'q' if quick else ''}"
    ways = [one for one in (QUICK if quick else SHARED) if not _has(host, one)]
    argv = [*ssh_argv(host, (*ASKING, *ways, path)), "--", command]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        out, err = process.communicate(stdin.encode(), timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return Ran(124, "", f"took longer than {limit_s:g} s")
    said = err.decode(errors="replace")
    if process.returncode == LOST and not out:
        raise HostUnreachable(Problem(host.name, f"cannot be reached: {_said(host, said)}"))
    return Ran(process.returncode, out.decode(errors="replace"), said)


def _has(host: Host, option: str) -> bool:
    """Does the inventory say it itself?"""
    return option.partition("=")[0].lower() in dict(host.options)


def control_name(host: Host) -> str:
    """How Ansible calls a host's connection."""
    port = host.port if host.port != SSH_PORT else None
    return hashlib.sha1(f"{host.address}-{port}-{host.user}".encode(), usedforsecurity=False).hexdigest()[:10]


def _said(host: Host, text: str) -> str:
    low = text.lower()
    for sign, meaning in ENDS:
        if sign in low:
            return meaning(host)
    lines = text.strip().splitlines()
    return lines[-1] if lines else "ssh ended without a word"


def _known(host: Host) -> str:
    return ", ".join(host.known_hosts) or "~/.ssh/known_hosts"


def _refused(host: Host) -> str:
    return f"user {host.user or 'default'} may not log in with {host.key or 'the default keys'}"


def _run_local(command: str, stdin: str, limit_s: float, on_output: Callable[[str], None] | None) -> Ran:
    try:
        done = subprocess.run(
            ["sh", "-c", command], input=stdin, capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        return Ran(124, "", f"took longer than {limit_s:g} s")
    if on_output is not None:
        on_output(done.stdout)
        return Ran(done.returncode, "", done.stderr)
    return Ran(done.returncode, done.stdout, done.stderr)


def ssh_argv(host: Host, given: Sequence[str] = ()) -> list[str]:
    """The `ssh` command line that reaches a host as Ansible does, with options (`Key=value`) that win over the
    inventory's."""
    argv = ["ssh", "-p", str(host.port), *(word for option in given for word in ("-o", option))]
    if host.key:
        argv += ["-i", host.key, "-o", "IdentitiesOnly=yes"]
    if host.known_hosts:
        argv += ["-o", "UserKnownHostsFile=" + " ".join(map(shlex.quote, host.known_hosts))]
    if not host.check_keys:
        argv += ["-o", "StrictHostKeyChecking=no"]
    if host.jump:
        argv += ["-J", host.jump]
    for key, value in host.options:
        if key not in ("controlmaster", "controlpersist", "controlpath"):
            argv += ["-o", f"{key}={value}"]
    return [*argv, f"{host.user}@{host.address}" if host.user else host.address]


def shell(host: Host) -> int:
    """A shell on the node in this terminal; its exit code."""
    if host.local:
        return subprocess.run([os.environ.get("SHELL", "sh")], check=False).returncode
    return subprocess.run(ssh_argv(host), check=False, stdin=sys.stdin).returncode


def close_all() -> None:
    """Closes every connection of this command."""
    with _lock:
        for made in _connections.values():
            made.close()
        _connections.clear()
