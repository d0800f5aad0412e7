"""The lab: systemd nodes in Docker containers on this machine (I/O).

A node is a container whose first process is systemd, with sshd, sudo, journald, logrotate and a user `sre`
who logs in by key. No container is privileged. Everything the lab keeps lies in `.lab/` of the checkout:
engine data (where no Docker engine was there before), images, the SSH key, known hosts.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from bringup import ROOT
from bringup.errors import BringupError, Exit, Problem, unknown

LAB = ROOT / ".lab"
RECIPE = ROOT / "tests" / "lab" / "image"
LABEL = "bringup.node"
CHECKOUT_LABEL = "bringup.checkout"
NETWORK = "labnet"
SUBNET = "198.18.5"
USER = "sre"
SUITES = ("bookworm", "trixie")
ARCHES = ("amd64", "arm64")

CAPABILITIES = ("SYS_ADMIN", "NET_ADMIN", "SYS_NICE", "SYS_PTRACE", "IPC_LOCK")
"""What systemd and tuned servers need in a node; never `--privileged`, which hands over the machine."""

ADDRESS_BASE: Mapping[str, int] = {"lab": 10, "e2e": 50, "bench": 100, "twin": 140}
"""Last number of a node's address = base of its kind + its own number: lab-01 is 198.18.5.11."""

APT_LIMIT_S = 900
IMAGE_LIMIT_S = 2400
ENGINE_LIMIT_S = 60
COMMAND_LIMIT_S = 120
BOOT_LIMIT_S = 300
SSH_LIMIT_S = 60
LOCK_LIMIT_S = 2400
TERM_LIMIT_S = 10
HEARTBEAT_S = 10
STARTS_AT_ONCE = 4
NODE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
INOTIFY_INSTANCES = 8192
"""systemd uses 9 a node; the usual limit of 128 is used up by 14 nodes."""

SOCKET_PATH_LIMIT = 100
"""A Unix socket's path has at most 107 bytes on Linux."""

PACKAGE_OF: Mapping[str, str] = {
    "dockerd": "docker.io",
    "iptables": "iptables",
    "ip": "iproute2",
    "mmdebstrap": "mmdebstrap",
    "ssh-keygen": "openssh-client",
}
"""What starting an engine and making an image takes: a program and the distribution's package that has it."""

BRIDGE = re.compile("br-[0-9a-f]{12}")
"""The bridge of a network that a Docker engine has made."""

Say = Callable[[str], None]


class LabError(BringupError):
    """The lab cannot be had, or one of its nodes is not as it should be."""

    code = Exit.FAILED


@dataclass(frozen=True)
class Engine:
    """A Docker engine that answers. `host` is a DOCKER_HOST value; empty means the client's own default."""

    host: str

    def argv(self, *arguments: str) -> list[str]:
        """The docker command line for this engine."""
        return ["docker", *(("-H", self.host) if self.host else ()), *arguments]

    def environment(self) -> dict[str, str]:
        """What a tool of its own (molecule) needs to reach this engine."""
        return {"DOCKER_HOST": self.host} if self.host else {}

    def run(self, *arguments: str, limit: float = COMMAND_LIMIT_S) -> str:
        """Standard output of one docker command. Raises LabError when it fails or takes over `limit` s."""
        return _output(self.argv(*arguments), limit)

    def tries(self, *arguments: str, limit: float = COMMAND_LIMIT_S) -> subprocess.CompletedProcess[str]:
        """One docker command whose failure the caller judges."""
        return _completed(self.argv(*arguments), limit)


@dataclass(frozen=True)
class Node:
    """One node: its name, state (docker's word: running, exited, ...), image tag and address."""

    name: str
    state: str
    image: str
    address: str

    @property
    def running(self) -> bool:
        """Whether the container runs (its boot may still be going on)."""
        return self.state == "running"


def say_to_stderr(text: str) -> None:
    """Progress where the caller has no better place for it."""
    print(f"[lab] {text}", file=sys.stderr, flush=True)


# ---------------------------------------------------------------- pure parts


def node_names(count: int, kind: str = "lab") -> list[str]:
    """`lab-01` ... for `count` nodes. Raises LabError for a count that the address plan has no room for."""
    most = room(kind)
    if not 1 <= count <= most:
        raise LabError(
            Problem(f"{count} nodes", f"the {kind} network has room for 1 to {most}", "Ask for fewer.")
        )
    return [f"{kind}-{number:02d}" for number in range(1, count + 1)]


def room(kind: str) -> int:
    """How many nodes of a kind the address plan has room for."""
    base = ADDRESS_BASE[kind]
    above = [other for other in ADDRESS_BASE.values() if other > base]
    return min([*above, 250]) - base


def address_of(name: str) -> str:
    """The fixed address of a node by its name: lab-02 is 198.18.5.12. Raises LabError for an unknown kind."""
    kind, _, number = name.rpartition("-")
    if kind not in ADDRESS_BASE:
        what, remedy = unknown("kind of node", kind or name, tuple(ADDRESS_BASE))
        raise LabError(Problem(name, what, remedy))
    if not number.isdecimal() or not 1 <= int(number) <= room(kind):
        raise LabError(Problem(name, f"a {kind} node's number is 01 to {room(kind)}", f"Such as {kind}-01."))
    return f"{SUBNET}.{ADDRESS_BASE[kind] + int(number)}"


def published_port(node_address: str) -> int:
    """The loopback port that stands for a node's port 22 where bridge addresses are out of reach (macOS)."""
    return 2200 + int(node_address.rpartition(".")[2])


def recipe_digest(files: Mapping[str, bytes], arch: str, suite: str) -> str:
    """12 hex digits that change when any input of a node image does."""
    digest = hashlib.sha256(f"{arch} {suite}\0".encode())
    for name in sorted(files):
        digest.update(f"{name}\0{len(files[name])}\0".encode() + files[name])
    return digest.hexdigest()[:12]


def package_list(text: str) -> list[str]:
    """The package names of packages.txt."""
    return [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]


def pip_conf(settings: str) -> str:
    """A node's /etc/pip.conf out of `pip config list`: addresses and trust, nothing on the machine's disk."""
    kept: dict[str, str] = {}
    for line in settings.splitlines():
        key, _, quoted = line.partition("=")
        name = key.rpartition(".")[2]
        value = quoted.strip("'\"")
        if name in {"index-url", "extra-index-url"}:
            value = " ".join(
                part for part in value.replace("\\n", " ").split() if "://" in part and "file:" not in part
            )
        elif name not in {"trusted-host", "timeout", "default-timeout", "retries"}:
            continue
        if value:
            kept["timeout" if name == "default-timeout" else name] = value
    lines = [f"{name} = {value}" for name, value in sorted(kept.items())]
    return "\n".join(["[global]", "cert = /etc/ssl/certs/ca-certificates.crt", *lines, ""])


def known_hosts_line(name: str, host: str, port: int, key: str) -> str:
    """One known_hosts line: both names of a node and its key (`ssh-ed25519 AAAA...`, without comment)."""
    place = host if port == 22 else f"[{host}]:{port}"
    return f"{name},{place} {' '.join(key.split()[:2])}"


def known_hosts(before: str, mine: Mapping[str, str], others: Collection[str]) -> dict[str, str]:
    """Lines by name: `mine`, and those that a file had (`before`, as `known_hosts_line` writes them) of `others`."""
    rows = ((line.partition(",")[0], line) for line in before.splitlines() if "," in line)
    kept = {name: line for name, line in rows if name in others}
    return dict(sorted({**kept, **mine}.items()))


def ssh_config(nodes: Sequence[tuple[str, str, str, int]], folder: Path) -> str:
    """An ssh_config for nodes given as (name, address, host, port), reached by name and by address."""
    blocks = [
        f"Host {name} {node_address}\n  HostName {host}\n  Port {port}\n"
        for name, node_address, host, port in nodes
    ]
    common = (
        f"Host {SUBNET}.* {' '.join(f'{kind}-*' for kind in ADDRESS_BASE)}\n"
        f"  User {USER}\n"
        f'  IdentityFile "{folder / "id"}"\n'
        "  IdentitiesOnly yes\n"
        f'  UserKnownHostsFile "{folder / "known_hosts"}"\n'
        "  StrictHostKeyChecking yes\n"
    )
    return "".join([*blocks, common])


def docker_run_arguments(
    name: str, image: str, key: str, *, published: bool, extra: Sequence[str] = ()
) -> list[str]:
    """Arguments of `docker` that start one node."""
    node_address = address_of(name)
    capabilities = [word for capability in CAPABILITIES for word in ("--cap-add", capability)]
    port = ["-p", f"127.0.0.1:{published_port(node_address)}:22"] if published else []
    return [
        *("run", "--detach", "--name", name, "--hostname", name),
        *("--label", f"{LABEL}={name}", "--label", f"{CHECKOUT_LABEL}={ROOT}"),
        *("--network", NETWORK, "--ip", node_address, "--cgroupns", "private", *capabilities),
        *("--security-opt", "seccomp=unconfined", "--restart", "unless-stopped"),
        *("--env", f"NODE_AUTHORIZED_KEY={key}", *port, *extra, image),
    ]


# ---------------------------------------------------------------- commands


def _completed(
    argv: Sequence[str], limit: float, *, stdin: bytes | None = None
) -> subprocess.CompletedProcess[str]:
    try:
        done = subprocess.run(
            argv, input=stdin, stdin=subprocess.DEVNULL if stdin is None else None, capture_output=True,
            timeout=limit, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        raise LabError(
            Problem(argv[0], "is not installed", f"Install {argv[0]}, then run this again.")
        ) from None
    except subprocess.TimeoutExpired:
        raise LabError(
            Problem(
                shlex.join(argv[:6]), f"gave no answer within {limit:.0f} s", "Look at the machine's load."
            )
        ) from None
    return subprocess.CompletedProcess(
        done.args, done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
    )


def _output(argv: Sequence[str], limit: float = COMMAND_LIMIT_S) -> str:
    done = _completed(argv, limit)
    if done.returncode:
        text = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
        raise LabError(Problem(shlex.join(argv[:8]), f"failed ({done.returncode}): {' '.join(text[-3:])}"))
    return done.stdout.strip()


def _as_root(argv: Sequence[str]) -> list[str]:
    """`argv` for root: as it is, or through sudo. Raises LabError when neither is to be had."""
    if os.geteuid() == 0:
        return list(argv)
    if not shutil.which("sudo"):
        raise LabError(
            Problem(argv[0], "needs root, and there is no sudo", "Run this as root or install sudo.")
        )
    return ["sudo", *argv]


def _long(argv: Sequence[str], what: str, limit: float, log: Path, say: Say) -> None:
    """A command that takes its time: output into `log`, a line every HEARTBEAT_S.

    Raises LabError with the log's end.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with log.open("ab") as out:
        # A session of its own: mmdebstrap signals its whole process group when it fails.
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while True:
                try:
                    code = process.wait(HEARTBEAT_S)
                    break
                except subprocess.TimeoutExpired:
                    elapsed = time.monotonic() - started
                    if elapsed > limit:
                        raise LabError(
                            Problem(what, f"not done after {limit:.0f} s", f"Its output: {log}.")
                        ) from None
                    say(f"{what}: {elapsed:.0f} s")
        finally:
            if process.poll() is None:
                _kill_session(process)
    if code:
        tail = log.read_text(errors="replace").strip().splitlines()[-4:]
        raise LabError(
            Problem(what, f"failed ({code}): {' | '.join(tail) or 'no output'}", f"Whole output: {log}.")
        )


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that was started in a session of its own, and its children; also one that sudo runs."""
    _signal_group(process.pid, signal.SIGTERM)
    try:
        process.wait(TERM_LIMIT_S)
    except subprocess.TimeoutExpired:
        _signal_group(process.pid, signal.SIGKILL)
        process.wait(TERM_LIMIT_S)


def _signal_group(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return
    except PermissionError:
        _completed(_as_root(["kill", f"-{number.value}", "--", f"-{group}"]), 30)


def alone(name: str, say: Say) -> contextlib.AbstractContextManager[None]:
    """Only one process of this checkout does `name` at a time; see `LOCK_LIMIT_S`."""
    return _locked(name, say)


@contextlib.contextmanager
def _locked(name: str, say: Say) -> Iterator[None]:
    """Only one process of this checkout does `name` at a time; the others wait, with a limit."""
    LAB.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + LOCK_LIMIT_S
    told = False
    with (LAB / f"{name}.lock").open("w") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise LabError(
                        Problem(
                            name, f"another command has held it for {LOCK_LIMIT_S} s", "End that command."
                        )
                    ) from None
                if not told:
                    say(f"waiting for another command that works on the lab's {name}")
                    told = True
                time.sleep(0.5)
        yield


def _write(path: Path, text: str, mode: int = 0o644) -> None:
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    beside.write_text(text, encoding="utf-8")
    beside.chmod(mode)
    beside.replace(path)


# ---------------------------------------------------------------- the engine


def socket_path() -> Path:
    """Where an engine that bringup starts by hand listens."""
    near = LAB / "docker.sock"
    if len(str(near)) <= SOCKET_PATH_LIMIT:
        return near
    return Path("/tmp") / f"bringup-{hashlib.sha256(str(LAB).encode()).hexdigest()[:12]}" / "docker.sock"


def find_engine() -> Engine | None:
    """A Docker engine that answers: DOCKER_HOST, else one that bringup started, else the client's default.

    One that another checkout started is taken too: two engines on one machine take each other's addresses.
    """
    if not shutil.which("docker"):
        return None
    named = os.environ.get("DOCKER_HOST", "")
    own = [f"unix://{socket_path()}"] if socket_path().exists() else []
    hosts = [named] if named else [*own, *_hosts_started_by_hand(), ""]
    return next((engine for engine in map(Engine, hosts) if _answers(engine)), None)


def _hosts_started_by_hand() -> list[str]:
    """Addresses of the dockerd processes that some checkout of bringup started."""
    found = []
    for words in _dockerd_commands():
        with contextlib.suppress(OSError, ValueError, IndexError, KeyError):
            found.append(json.loads(Path(words[words.index("--config-file") + 1]).read_text())["hosts"][0])
    return found


def _dockerd_commands() -> list[list[str]]:
    """The command line of every dockerd that runs on this machine."""
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = os.fsdecode(path.read_bytes()).split("\0")
            if Path(words[0]).name == "dockerd":
                commands.append(words)
    return commands


def _answers(engine: Engine) -> bool:
    try:
        return engine.tries("version", "--format", "{{.Server.Version}}", limit=20).returncode == 0
    except LabError:
        return False


def ensure_engine(say: Say = say_to_stderr) -> Engine:
    """A Docker engine that answers, installed from the distribution and started where there is none.

    Raises LabError with what to do when that is not possible.
    """
    engine = find_engine()
    if engine is None:
        if os.environ.get("DOCKER_HOST"):
            raise LabError(
                Problem(
                    f"DOCKER_HOST={os.environ['DOCKER_HOST']}", "no Docker engine answers there",
                    "Start it, or unset DOCKER_HOST and bringup starts one.",
                )
            )  # fmt: skip
        if sys.platform != "linux":
            raise LabError(
                Problem("Docker", "no engine answers", "Start Docker Desktop, then run this again.")
            )
        with _locked("engine", say):
            engine = find_engine() or _start_engine(say)
    _raise_inotify(say)
    return engine


def _start_engine(say: Say) -> Engine:
    _install(say)
    if Path("/run/systemd/system").is_dir():
        say("starting Docker as a service")
        _output(_as_root(["systemctl", "enable", "--now", "docker.service"]))
        return _wait_for_service(say)
    return _start_by_hand(say)


def _install(say: Say) -> None:
    missing = [package for program, package in PACKAGE_OF.items() if not _program(program)]
    if missing and not _has_apt():
        what = "no engine answers, and this is not a Debian or Ubuntu machine"
        raise LabError(Problem("Docker", what, "Install Docker and start it, then run this again."))
    # Newer releases ship the client apart; a user beside root gets at the socket through an ACL.
    optional = ["debian-archive-keyring", *([] if _program("docker") else ["docker-cli"])]
    if os.geteuid() and not _program("setfacl"):
        missing.append("acl")
    if missing:
        _apt(missing, say, optional)


def _program(name: str) -> str | None:
    """Its path; also where a user beside root does not look."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _has_apt() -> bool:
    return shutil.which("apt-get") is not None and shutil.which("dpkg") is not None


def ensure_program(name: str, package: str, say: Say) -> None:
    """Installs the distribution's package that has a program, when it is not there; without apt it does nothing."""
    if not _program(name) and _has_apt():
        _apt([package], say)


def _known_to_apt(package: str) -> bool:
    shown = _completed(["apt-cache", "policy", package], 60).stdout
    return "Candidate:" in shown and "Candidate: (none)" not in shown


def _apt(packages: Sequence[str], say: Say, optional: Sequence[str] = ()) -> None:
    """Installs `packages`, and those of `optional` that this release has."""
    log = LAB / "apt.log"
    say(f"installing {', '.join(packages)} with apt (about half a minute)")
    base = ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-o", "DPkg::Lock::Timeout=300"]
    _long(_as_root([*base, "update", "-qq"]), "apt-get update", APT_LIMIT_S, log, say)
    chosen = [*packages, *(word for word in optional if _known_to_apt(word))]
    _long(
        _as_root([*base, "install", "-y", "-qq", "--no-install-recommends", *chosen]),
        "apt-get install", APT_LIMIT_S, log, say,
    )  # fmt: skip


def _wait_for_service(say: Say) -> Engine:
    engine = Engine("")
    deadline = time.monotonic() + ENGINE_LIMIT_S
    while time.monotonic() < deadline:
        if _answers(engine):
            return engine
        _open_socket(Path("/var/run/docker.sock"))
        time.sleep(0.5)
    raise LabError(
        Problem(
            "docker.service", f"does not answer within {ENGINE_LIMIT_S} s", "Look at `journalctl -u docker`."
        )
    )


def _open_socket(path: Path) -> None:
    """Lets this user (who has sudo) talk to the engine now, without a new login for a new group."""
    if os.geteuid() and path.exists() and not os.access(path, os.W_OK) and _program("setfacl"):
        _completed(_as_root(["setfacl", "-m", f"u:{os.geteuid()}:rw", str(path)]), 30)


def _start_by_hand(say: Say) -> Engine:
    folder = LAB
    folder.mkdir(parents=True, exist_ok=True)
    where = socket_path()
    where.parent.mkdir(parents=True, exist_ok=True)
    engine = Engine(f"unix://{where}")
    settings = {
        "data-root": str(folder / "data"),
        "exec-root": str(folder / "exec"),
        "pidfile": str(folder / "docker.pid"),
        "hosts": [engine.host],
        "mtu": _mtu(),
        "log-level": "warn",
    }
    _write(folder / "daemon.json", json.dumps(settings, indent=1))
    for attempt in (1, 2):
        _remove_stale()
        say("starting Docker by hand (no systemd here); its data lie in .lab/")
        if _spawn(engine):
            _output(_as_root(["iptables", "-P", "FORWARD", "ACCEPT"]))
            return engine
        say(f"attempt {attempt}: dockerd did not come up")
    tail = (folder / "dockerd.log").read_text(errors="replace").strip().splitlines()[-3:]
    raise LabError(
        Problem("dockerd", f"did not start: {' | '.join(tail)}", f"Whole output: {folder / 'dockerd.log'}.")
    )


def _spawn(engine: Engine) -> bool:
    """Starts dockerd apart from this process; whether it answers within ENGINE_LIMIT_S."""
    with (LAB / "dockerd.log").open("ab") as log:
        process = subprocess.Popen(
            _as_root(["dockerd", "--config-file", str(LAB / "daemon.json")]),
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    deadline = time.monotonic() + ENGINE_LIMIT_S
    while time.monotonic() < deadline and process.poll() is None:
        _open_socket(socket_path())
        if _answers(engine):
            # dockerd outlives this process: nobody waits for it.
            process.returncode = 0
            return True
        time.sleep(0.2)
    if process.poll() is None:
        _kill_session(process)
    return False


def _remove_stale() -> None:
    """Pid files and bridges of an engine that was killed: dockerd takes a reused pid for a running engine."""
    for path, program in (
        (LAB / "docker.pid", "dockerd"),
        (LAB / "exec" / "containerd" / "containerd.pid", "containerd"),
    ):
        if not _runs(path, program):
            _completed(_as_root(["rm", "-f", str(path)]), 30)
    if not _dockerd_commands():
        _remove_bridges()


def _runs(pid_file: Path, program: str) -> bool:
    """Whether the process of a pid file is alive and is `program`."""
    try:
        command = Path("/proc", _text_of_roots(pid_file).strip() or "none", "cmdline").read_bytes()
    except (OSError, ValueError):
        return False
    return program in Path(os.fsdecode(command.split(b"\0")[0])).name


def _text_of_roots(path: Path) -> str:
    try:
        return path.read_text()
    except PermissionError:
        return _completed(_as_root(["cat", str(path)]), 30).stdout


def _remove_bridges() -> None:
    """Removes a bridge that holds the lab's gateway address and that no living engine knows."""
    if not _program("ip"):
        return
    listed = _completed(["ip", "-json", "address", "show", "to", f"{SUBNET}.1/32"], 30).stdout or "[]"
    for name in (str(item.get("ifname", "")) for item in json.loads(listed)):
        if name.startswith("br-"):
            _completed(_as_root(["ip", "link", "delete", name]), 30)


def stale_rules(listed: str, links: Iterable[str]) -> list[list[str]]:
    """The firewall rules (as `iptables -S` prints them) about the lab's addresses that name a bridge which is
    gone. A killed engine leaves them; one that says "all but my bridge" then changes the sender's address
    between nodes, or drops what they send.
    """
    there = set(links)
    rules = [shlex.split(line)[1:] for line in listed.splitlines() if line.startswith("-A ")]
    return [
        rule
        for rule in rules
        if any(word.startswith(f"{SUBNET}.") for word in rule)
        and any(BRIDGE.fullmatch(word) and word not in there for word in rule)
    ]


def _remove_rules() -> None:
    """Removes what `stale_rules` finds."""
    if not _program("iptables"):
        return
    links = [path.name for path in Path("/sys/class/net").iterdir()]
    for table in ("nat", "raw"):
        listed = _completed(_as_root(["iptables", "-w", "-t", table, "-S"]), 30).stdout
        for rule in stale_rules(listed, links):
            _completed(_as_root(["iptables", "-w", "-t", table, "-D", *rule]), 30)


def _mtu() -> int:
    """MTU of the interface with the default route: a bridge with more loses big packets without a word."""
    try:
        rows = [line.split() for line in Path("/proc/net/route").read_text().splitlines()[1:]]
        name = next(row[0] for row in rows if row[1] == "00000000")
        return int(Path("/sys/class/net", name, "mtu").read_text())
    except (OSError, StopIteration, ValueError, IndexError):
        return 1500


def _raise_inotify(say: Say) -> None:
    path = Path("/proc/sys/fs/inotify/max_user_instances")
    if path.exists() and int(path.read_text()) < INOTIFY_INSTANCES:
        set_to = f"fs.inotify.max_user_instances={INOTIFY_INSTANCES}"
        if _completed(_as_root(["sysctl", "-qw", set_to]), 30).returncode:
            say(f"could not set {set_to}: more than about 14 nodes will not boot")


# ---------------------------------------------------------------- the image


def image_tag(arch: str = "amd64", suite: str = "bookworm") -> str:
    """The node image's tag; it changes with the recipe, the machine's authorities and pip's settings."""
    return f"bringup-node:{suite}-{arch}-{recipe_digest(_recipe_files(), arch, suite)}"


def _recipe_files() -> dict[str, bytes]:
    files = {path.name: path.read_bytes() for path in sorted(RECIPE.iterdir()) if path.is_file()}
    return files | _machine_files()


def _machine_files() -> dict[str, bytes]:
    """What nodes take over from this machine: its own certificate authorities, and how pip is to fetch."""
    authorities = Path("/usr/local/share/ca-certificates")
    found = {f"machine/{path.name}": path.read_bytes() for path in sorted(authorities.glob("*.crt"))}
    listed = _completed([sys.executable, "-m", "pip", "config", "list"], 60)
    if listed.returncode == 0:
        found["machine/pip.conf"] = pip_conf(listed.stdout).encode()
    return found


def ensure_image(
    arch: str = "amd64", suite: str = "bookworm", say: Say = say_to_stderr, engine: Engine | None = None
) -> str:
    """The tag of the node image, built (about a minute; emulated: several) when the engine has it not.

    Raises LabError for an unknown arch or suite, or a build that fails, with its log.
    """
    for word, known, kind in ((arch, ARCHES, "architecture"), (suite, SUITES, "suite")):
        if word not in known:
            raise LabError(Problem("node image", *unknown(kind, word, known)))
    engine = engine or ensure_engine(say)
    tag = image_tag(arch, suite)
    if arch != _machine_arch():
        _ensure_emulation(say)
    if engine.tries("image", "inspect", tag).returncode:
        with _locked(f"image-{suite}-{arch}", say):
            if engine.tries("image", "inspect", tag).returncode:
                _make_image(engine, tag, arch, suite, say)
    return tag


def _machine_arch() -> str:
    return {"x86_64": "amd64", "aarch64": "arm64", "arm64": "arm64"}.get(os.uname().machine, "amd64")


def _make_image(engine: Engine, tag: str, arch: str, suite: str, say: Say) -> None:
    started = time.monotonic()
    archive = LAB / "images" / f"{tag.replace(':', '-')}.tar"
    archive.parent.mkdir(parents=True, exist_ok=True)
    if not archive.exists():
        for old in archive.parent.glob(f"bringup-node-{suite}-{arch}-*"):
            old.unlink()
        if not _program("mmdebstrap") and _has_apt():
            _apt(["mmdebstrap"], say, ["debian-archive-keyring"])
        if not _program("mmdebstrap"):
            _build_from_registry(engine, tag, arch, suite, say)
            return
        _bootstrap(archive, tag, arch, suite, say)
    say(f"loading the node image {tag}")
    engine.run("load", "--input", str(archive), limit=IMAGE_LIMIT_S)
    say(f"node image {tag} is there after {time.monotonic() - started:.0f} s")


def _lay_out(folder: Path) -> None:
    """The recipe and what the machine adds to it, as setup.sh finds them in /opt/node."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "machine").mkdir(parents=True)
    for name, content in _recipe_files().items():
        target = folder / name
        target.write_bytes(content)
        target.chmod(0o755 if name in {"setup.sh", "node-init"} else 0o644)
    bundle = Path("/etc/ssl/certs/ca-certificates.crt")
    if bundle.exists():
        shutil.copyfile(bundle, folder / "machine" / "ca-bundle")


def _bootstrap(archive: Path, tag: str, arch: str, suite: str, say: Say) -> None:
    """One mmdebstrap call, and its root file system wrapped as an image for `docker load`."""
    work = LAB / f"build-{suite}-{arch}"
    _lay_out(work / "node")
    emulated = "no" if arch == _machine_arch() else "yes"
    root = work / "root.tar"
    log = LAB / f"image-{suite}-{arch}.log"
    log.unlink(missing_ok=True)
    argv = [
        *("mmdebstrap", f"--arch={arch}", "--variant=apt", "--mode=root"),
        f"--include={','.join(package_list((RECIPE / 'packages.txt').read_text()))}",
        "--dpkgopt=force-unsafe-io",
        '--aptopt=APT::Install-Recommends "false"',
        '--aptopt=Acquire::Check-Valid-Until "false"',
        '--aptopt=Acquire::Languages "none"',
        # Emptied lists make Ansible's apt module skip its update and then find no package.
        "--skip=cleanup/apt/lists",
        '--customize-hook=mkdir -p "$1/opt/node"',
        f"--customize-hook=sync-in {work / 'node'} /opt/node",
        f'--customize-hook=chroot "$1" sh /opt/node/setup.sh {arch} {emulated}',
        *(suite, str(root)),
        *([mirror] if (mirror := os.environ.get("BRINGUP_LAB_MIRROR", "")) else []),
    ]
    say(f"building the node image ({suite}, {arch}) with mmdebstrap: about a minute on two cores")
    _long(_as_root(argv), f"node image ({suite}, {arch})", IMAGE_LIMIT_S, log, say)
    beside = archive.with_suffix(".part")
    wrap_image(root, tag, beside)
    beside.replace(archive)
    shutil.rmtree(work, ignore_errors=True)


def wrap_image(root: Path, tag: str, archive: Path) -> None:
    """Writes `archive`, which `docker load` takes, out of one root file system tar.

    `docker import` cannot set the stop signal, and not every engine has a builder; loading needs neither.
    """
    with root.open("rb") as handle:
        layer = hashlib.file_digest(handle, "sha256").hexdigest()
    environment = package_list((RECIPE / "environment").read_text())
    config = {
        # The machine's own also for an emulated node: by default engines look elsewhere for any other.
        "architecture": _machine_arch(),
        "os": "linux",
        "config": {
            "Cmd": ["/usr/sbin/node-init"],
            "Env": [f"PATH={NODE_PATH}", "container=docker", *environment],
            "StopSignal": "SIGRTMIN+3",
        },
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer}"]},
    }  # fmt: skip
    text = json.dumps(config).encode()
    name = f"{hashlib.sha256(text).hexdigest()}.json"
    manifest = json.dumps([{"Config": name, "RepoTags": [tag], "Layers": ["layer.tar"]}]).encode()
    with tarfile.open(archive, "w") as out:
        for member, content in ((name, text), ("manifest.json", manifest)):
            info = tarfile.TarInfo(member)
            info.size = len(content)
            out.addfile(info, BytesIO(content))
        out.add(root, "layer.tar")


def _build_from_registry(engine: Engine, tag: str, arch: str, suite: str, say: Say) -> None:
    """The same node out of a public base image, where there is no mmdebstrap (macOS, other distributions)."""
    work = LAB / f"build-{suite}-{arch}"
    _lay_out(work)
    say(f"building the node image ({suite}, {arch}) from the public debian:{suite} image")
    _long(
        engine.argv(
            "build", "--build-arg", f"SUITE={suite}", "--build-arg", f"ARCH={arch}", "--tag", tag, str(work)
        ),
        f"node image ({suite}, {arch})", IMAGE_LIMIT_S, LAB / f"image-{suite}-{arch}.log", say,
    )  # fmt: skip
    shutil.rmtree(work, ignore_errors=True)


def _ensure_emulation(say: Say) -> None:
    """qemu-user for arm64 on amd64; C makes sudo work, F makes it work inside containers."""
    mounted = Path("/proc/sys/fs/binfmt_misc")
    rule = Path("/usr/lib/binfmt.d/qemu-aarch64.conf")
    if _has_apt() and not (rule.exists() and _program("arch-test")):
        _apt(["qemu-user-static", "arch-test"], say)
    if not (mounted / "register").exists():
        _output(_as_root(["mount", "-t", "binfmt_misc", "binfmt_misc", str(mounted)]))
    if not (mounted / "qemu-aarch64").exists():
        line = rule.read_text().strip().rpartition(":")[0] + ":OPCF"
        done = _completed(_as_root(["tee", str(mounted / "register")]), 30, stdin=line.encode())
        if done.returncode:
            raise LabError(
                Problem(
                    "arm64 nodes",
                    f"cannot be emulated: {done.stderr.strip()}",
                    "Use amd64 nodes on this machine.",
                )
            )


# ---------------------------------------------------------------- nodes


def published() -> bool:
    """Whether nodes are reached through loopback ports, as Docker Desktop's bridge cannot be reached."""
    return sys.platform != "linux"


def address(name: str) -> tuple[str, int]:
    """(host, port) where a node's sshd answers on this machine."""
    node_address = address_of(name)
    return ("127.0.0.1", published_port(node_address)) if published() else (node_address, 22)


def nodes(engine: Engine | None = None) -> list[Node]:
    """Every node of this checkout's lab, whatever its state, by name; empty without an engine."""
    engine = engine or find_engine()
    if engine is None:
        return []
    shape = "{{.Names}}\t{{.State}}\t{{.Image}}"
    mine = f"label={CHECKOUT_LABEL}={ROOT}"
    listed = engine.run("ps", "--all", "--filter", f"label={LABEL}", "--filter", mine, "--format", shape)
    rows = [line.split("\t") for line in listed.splitlines() if line]
    return sorted(
        (Node(name, state, image, address_of(name)) for name, state, image in rows), key=lambda n: n.name
    )


def ensure_key() -> str:
    """The public half of the lab's SSH key, made on first use in `.lab/id`."""
    path = LAB / "id"
    LAB.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        _output(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "bringup lab", "-f", str(path)])
    return path.with_suffix(".pub").read_text().strip()


def up(
    names: int | Sequence[str] = 2,
    say: Say = say_to_stderr,
    *,
    arch: str = "amd64",
    suite: str = "bookworm",
    extra: Mapping[str, Sequence[str]] | None = None,
) -> list[Node]:
    """Brings nodes up and waits until each has booted and answers SSH; running nodes are kept as they are.

    `names` is a count (lab-01 ...) or names; `extra` gives docker arguments a node by its name.
    Raises LabError when the engine, the image or a node cannot be had.
    """
    wanted = node_names(names) if isinstance(names, int) else list(names)
    for name in wanted:
        address_of(name)
    engine = ensure_engine(say)
    image = ensure_image(arch, suite, say, engine)
    with _locked("nodes", say):
        key = ensure_key()
        _ensure_network(engine)
        there = {node.name: node for node in nodes(engine)}
        _refuse_foreign(engine, [name for name in wanted if name not in there])
        _tell_outdated([there[name] for name in wanted if name in there], image, say)
        todo = [name for name in wanted if name not in there or not there[name].running]
        if todo:
            say(f"starting {_listed(todo)}")
        with ThreadPoolExecutor(STARTS_AT_ONCE) as pool:
            list(
                pool.map(
                    lambda name: _start(engine, name, name in there, image, key, (extra or {}).get(name, ())),
                    todo,
                )
            )
        _wait_all(engine, wanted, say)
        _write_ssh_files(engine)
    return [node for node in nodes(engine) if node.name in wanted]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) < 6 else f"{len(names)} nodes"


def _refuse_foreign(engine: Engine, new: Sequence[str]) -> None:
    shape = f'{{{{.Names}}}}={{{{.Label "{CHECKOUT_LABEL}"}}}}'
    rows = (line.partition("=") for line in engine.run("ps", "--all", "--format", shape).splitlines())
    taken = {name: checkout for name, _, checkout in rows}
    problems = [
        Problem(
            name,
            f"is up already, from {taken[name] or 'something else'}",
            "Run `invoke lab.down` there first.",
        )
        for name in new
        if name in taken
    ]
    if problems:
        raise LabError(problems)


def _tell_outdated(existing: Iterable[Node], image: str, say: Say) -> None:
    old = [node.name for node in existing if node.image != image]
    if old:
        say(f"{', '.join(old)}: made from an older node image; `invoke lab.down` first gives new ones")


def _start(engine: Engine, name: str, exists: bool, image: str, key: str, extra: Sequence[str]) -> None:
    if exists:
        engine.run("start", name)
    else:
        engine.run(*docker_run_arguments(name, image, key, published=published(), extra=extra))


def _ensure_network(engine: Engine) -> None:
    there = engine.tries("network", "inspect", NETWORK).returncode == 0
    if published():
        if not there:
            engine.run("network", "create", "--subnet", f"{SUBNET}.0/24", NETWORK)
        return
    _remove_rules()
    if there:
        return
    if len(_dockerd_commands()) <= 1:
        _remove_bridges()
        _remove_rules()
    option = f"com.docker.network.driver.mtu={_mtu()}"
    engine.run("network", "create", "--subnet", f"{SUBNET}.0/24", "--opt", option, NETWORK)


def _wait_all(engine: Engine, names: Sequence[str], say: Say) -> None:
    """Waits until every node has booted and answers SSH. Raises LabError naming every node that does not."""
    started = time.monotonic()
    problems: list[Problem] = []
    with ThreadPoolExecutor(STARTS_AT_ONCE * 2) as pool:
        waits = {name: pool.submit(_wait_for, engine, name, started + BOOT_LIMIT_S, say) for name in names}
        told = started
        while not all(wait.done() for wait in waits.values()):
            time.sleep(0.05)
            if time.monotonic() - told > HEARTBEAT_S:
                told = time.monotonic()
                left = [name for name, wait in waits.items() if not wait.done()]
                say(f"{len(left)} of {len(names)} nodes still boot ({left[0]} ...): {told - started:.0f} s")
    for wait in waits.values():
        error = wait.exception()
        if isinstance(error, LabError):
            problems += error.problems
        elif error is not None:
            raise error
    if problems:
        raise LabError(problems)
    say(f"{len(names)} node{'s' * (len(names) != 1)} up after {time.monotonic() - started:.1f} s")


def _wait_for(engine: Engine, name: str, deadline: float, say: Say) -> None:
    state = ""
    while time.monotonic() < deadline:
        done = engine.tries("exec", name, "systemctl", "is-system-running", "--wait", limit=BOOT_LIMIT_S)
        state = done.stdout.strip() or done.stderr.strip()
        if state == "degraded":
            listing = ("systemctl", "list-units", "--failed", "--plain", "--no-legend")
            failed = [
                line.split()[0] for line in engine.tries("exec", name, *listing).stdout.splitlines() if line
            ]
            say(f"{name}: booted, with failed units: {', '.join(failed)}")
        if state in {"running", "degraded"}:
            _wait_for_ssh(name)
            return
        time.sleep(0.2)
    raise LabError(
        Problem(
            name, f"has not booted within {BOOT_LIMIT_S} s (systemd says: {state or 'nothing'})",
            f"Look at `docker exec {name} journalctl -b`; `invoke lab.down` removes it.",
        )
    )  # fmt: skip


def _wait_for_ssh(name: str) -> None:
    host, port = address(name)
    deadline = time.monotonic() + SSH_LIMIT_S
    why = "no answer"
    while time.monotonic() < deadline:
        try:
            with socket.create_connection((host, port), timeout=5) as connection:
                connection.settimeout(5)
                if connection.recv(16).startswith(b"SSH-"):
                    return
        except OSError as error:
            why = str(error)
        time.sleep(0.1)
    raise LabError(
        Problem(
            name,
            f"sshd at {host}:{port} does not answer within {SSH_LIMIT_S} s: {why}",
            "Look at `docker ps`.",
        )
    )


def _write_ssh_files(engine: Engine) -> None:
    """`.lab/known_hosts` and `.lab/ssh_config` for every running node; the engine tells the keys.

    Two checkouts may share one lab's folder: what is known of the other's nodes stays.
    """
    running = [node.name for node in nodes(engine) if node.running]
    with ThreadPoolExecutor(STARTS_AT_ONCE) as pool:
        keys = list(
            pool.map(
                lambda name: engine.run("exec", name, "cat", "/etc/ssh/ssh_host_ed25519_key.pub"), running
            )
        )
    mine = {
        name: known_hosts_line(name, *address(name), key) for name, key in zip(running, keys, strict=True)
    }
    path = LAB / "known_hosts"
    lines = known_hosts(path.read_text(encoding="utf-8") if path.exists() else "", mine, _others(engine))
    _write(path, "".join(f"{line}\n" for line in lines.values()))
    _write(LAB / "ssh_config", ssh_config([(name, address_of(name), *address(name)) for name in lines], LAB))


def _others(engine: Engine) -> set[str]:
    """Names of running nodes that other checkouts have on this engine."""
    shape = f'{{{{.Names}}}}\t{{{{.Label "{CHECKOUT_LABEL}"}}}}'
    listed = engine.run("ps", "--filter", f"label={LABEL}", "--format", shape)
    rows = (line.partition("\t") for line in listed.splitlines() if line)
    return {name for name, _, checkout in rows if checkout != str(ROOT)}


def down(
    names: Sequence[str] | None = None, say: Say = say_to_stderr, *, everything: bool = False
) -> list[str]:
    """Removes nodes (all of the lab's when `names` is None) and returns their names.

    `everything` also stops an engine that bringup started by hand and removes its data, images and keys.
    """
    engine = find_engine()
    gone: list[str] = []
    if engine is not None:
        with _locked("nodes", say):
            there = [node.name for node in nodes(engine)]
            gone = there if names is None else [name for name in names if name in there]
            if gone:
                engine.run("rm", "--force", "--volumes", *gone, limit=COMMAND_LIMIT_S + 5 * len(gone))
                say(f"removed {_listed(gone)}")
            if names is None:
                engine.tries("network", "rm", NETWORK)
    if everything:
        _remove_everything(say)
    return gone


def _remove_everything(say: Say) -> None:
    stop_engine(say)
    _completed(_as_root(["rm", "-rf", "--one-file-system", str(LAB)]), COMMAND_LIMIT_S)
    say("removed .lab/: engine data, images and keys")


def stop_engine(say: Say = say_to_stderr) -> None:
    """Stops an engine that bringup started by hand; a service of the distribution is left alone."""
    pid_file = LAB / "docker.pid"
    if not _runs(pid_file, "dockerd"):
        return
    pid = pid_file.read_text().strip()
    say("stopping Docker")
    _output(_as_root(["kill", pid]))
    deadline = time.monotonic() + ENGINE_LIMIT_S
    while _runs(pid_file, "dockerd"):
        if time.monotonic() > deadline:
            raise LabError(
                Problem(
                    "dockerd", f"pid {pid} has not ended within {ENGINE_LIMIT_S} s", f"See {LAB}/dockerd.log."
                )
            )
        time.sleep(0.2)


def reboot(name: str, say: Say = say_to_stderr) -> None:
    """Restarts a node as a power cycle would, and waits until it has booted and answers SSH."""
    engine = _engine_with(name)
    engine.run("restart", "--time", "30", name)
    _wait_all(engine, [name], say)


def disconnect(name: str) -> None:
    """Pulls a node's network cable."""
    _engine_with(name).run("network", "disconnect", NETWORK, name)


def connect(name: str) -> None:
    """Plugs a node's network cable in again, at its own address."""
    _engine_with(name).run("network", "connect", "--ip", address_of(name), NETWORK, name)


def _engine_with(name: str) -> Engine:
    engine = find_engine()
    there = [node.name for node in nodes(engine)]
    if engine is None or name not in there:
        what, remedy = unknown("node", name, there)
        raise LabError(Problem("lab", what, remedy if there else "No node is up: `invoke lab.up`."))
    return engine


def ssh_argv(name: str, *command: str) -> list[str]:
    """The ssh command line that enters a node as `sre`, host key checked. LabError: no such node."""
    _engine_with(name)
    return ["ssh", "-F", str(LAB / "ssh_config"), name, *command]


def ssh(name: str) -> int:
    """An interactive login on a node; its exit code."""
    return subprocess.call(ssh_argv(name))
