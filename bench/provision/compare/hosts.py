"""Light hosts: one sshd each, in mount, process and name namespaces of its own over one shared root file system.

The root is a Debian made with mmdebstrap; what a host changes lies in an overlay in memory, so that making it new
takes a moment and what was changed can be read from outside. All hosts share one network namespace with an address
each, the controller has another; between the two lies a veth pair, and a second way on which packets are held for the
delay (netem where the kernel has it, else `delay.c`, which does the same between two TUN devices). There is no systemd.
Linux, as root.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.provision.compare import workload
from bench.provision.compare.measure import Group

SUITE = "bookworm"
PACKAGES = "openssh-server,python3,curl,openssl,logrotate,cron,procps,iproute2,sudo,systemd"
CONTROLLER, NODES = "compare-ctl", "compare-nodes"
NETS = {"fast": "10.79", "slow": "10.80"}
MOST = 200
KEX = "curve25519-sha256"
"""How all contenders exchange keys: the library of one knows nothing else, and what OpenSSH 9.2 prefers costs its
client 53 ms more a connection."""

ALIKE = f"-o KexAlgorithms={KEX}"
WEIGHT_BYTES = 1024 * 1024
ROOT_LIMIT_S = 600
COMMAND_LIMIT_S = 60
UP_LIMIT_S = 60
HERE = Path(__file__).resolve().parent

SSHD = """Port 22
HostKey /etc/ssh/compare_key
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM no
UseDNS no
PidFile none
Subsystem sftp /usr/lib/openssh/sftp-server
LogLevel ERROR
"""


def call(*words: str, limit_s: float = COMMAND_LIMIT_S) -> str:
    """What a command prints. Raises SystemExit with what it said when it fails."""
    done = subprocess.run(
        words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit_s, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def _paths() -> set[str]:
    """What contenders bring about, by path."""
    data = workload.read()
    return {thing.path for thing in workload.things(data, dict.fromkeys(data["weights"], ""), "")}


@dataclass
class Hosts:
    """The hosts and their networks. `folder` keeps the root file system and keys from one time to the next."""

    folder: Path
    nodes: Group
    delay_ms: float = 20.0
    _running: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _delay: subprocess.Popen[bytes] | None = None

    @property
    def root(self) -> Path:
        """The root file system that all hosts share."""
        return self.folder / "root"

    @property
    def uppers(self) -> Path:
        """Where each host's changes lie, in memory."""
        return self.folder / "hosts"

    @property
    def key(self) -> Path:
        """The private key that opens every host."""
        return self.folder / "id"

    @property
    def known(self) -> Path:
        """known_hosts of all addresses."""
        return self.folder / "known_hosts"

    def names(self, number: int) -> list[str]:
        """Names of so many hosts."""
        return [f"node-{one:03}" for one in range(1, number + 1)]

    def addresses(self, number: int, net: str) -> dict[str, str]:
        """Name -> address on the network `fast` or `slow`."""
        return {name: f"{NETS[net]}.1.{at}" for at, name in enumerate(self.names(number), 1)}

    # --- once -----------------------------------------------------------------------------------------------

    def prepare(self) -> dict[str, str]:
        """Makes root file system, keys and networks; sha256 of each weight."""
        recipe = f"{SUITE} {PACKAGES}\n{SSHD}{sorted(_paths())}\n"
        mark = self.folder / "made-from"
        if not mark.is_file() or mark.read_text() != recipe:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            self._bootstrap()
            mark.write_text(recipe)
        self._networks()
        self.uppers.mkdir(exist_ok=True)
        if not os.path.ismount(self.uppers):
            call("mount", "-t", "tmpfs", "-o", "size=8g", "compare", str(self.uppers))
        folder = self.root / workload.read()["values"]["weights"].lstrip("/")
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}

    def _bootstrap(self) -> None:
        words = ["mmdebstrap", "--variant=minbase", "--mode=root", f"--include={PACKAGES}"]
        words += ["--dpkgopt=force-unsafe-io", '--aptopt=APT::Install-Recommends "false"']
        mirror = os.environ.get("BRINGUP_LAB_MIRROR", "")
        call(*words, SUITE, str(self.root), *([mirror] if mirror else []), limit_s=ROOT_LIMIT_S)
        host_key = self.root / "etc/ssh/compare_key"
        for key in (self.key, host_key):
            call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "compare", "-f", str(key))
        (self.root / "root/.ssh").mkdir(mode=0o700, exist_ok=True)
        shutil.copyfile(self.key.with_suffix(".pub"), self.root / "root/.ssh/authorized_keys")
        (self.root / "etc/ssh/compare.conf").write_text(SSHD)
        public = " ".join(host_key.with_suffix(".pub").read_text().split()[:2])
        every = [address for net in NETS for address in self.addresses(MOST, net).values()]
        self.known.write_text("".join(f"{address} {public}\n" for address in every))
        data = workload.read()
        folder = self.root / data["values"]["weights"].lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        for seed, name in enumerate(data["weights"]):
            (folder / name).write_bytes(random.Random(seed).randbytes(WEIGHT_BYTES))
        own = _paths()
        for path in own:
            # Folders of the system that only a larger installation has.
            parent = Path(path).parent
            if str(parent) not in own and not path.startswith(("/opt/llm", "/var/log/llm")):
                (self.root / str(parent).lstrip("/")).mkdir(parents=True, exist_ok=True)

    def _networks(self) -> None:
        self.close_networks()
        for name in (CONTROLLER, NODES):
            call("ip", "netns", "add", name)
            call("ip", "-n", name, "link", "set", "lo", "up")
        self._veth("fast", 0)
        if self.delay_ms and not self._netem():
            program = self.folder / "delay"
            call("gcc", "-O2", "-o", str(program), str(HERE / "delay.c"))
            words = [str(program), str(self.delay_ms / 2), CONTROLLER, NODES]
            # Held open: the program ends when this process does.
            self._delay = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert self._delay.stdout is not None
            if self._delay.stdout.readline() != b"ready\n":
                raise SystemExit("delay.c did not start")
            self._addresses("slow", ("delay0", "delay0"))

    def _veth(self, net: str, number: int) -> None:
        ends = (f"cmpa{number}", f"cmpb{number}")
        call("ip", "link", "add", ends[0], "netns", CONTROLLER, "type", "veth",
             "peer", "name", ends[1], "netns", NODES)  # fmt: skip
        self._addresses(net, ends)

    def _netem(self) -> bool:
        """A second veth pair with netem at both ends; False where the kernel has no netem."""
        self._veth("slow", 1)
        half = f"{self.delay_ms / 2}ms"
        for name, end in ((CONTROLLER, "cmpa1"), (NODES, "cmpb1")):
            words = [
                "tc",
                "-n",
                name,
                "qdisc",
                "add",
                "dev",
                end,
                "root",
                "netem",
                "delay",
                half,
                "limit",
                "100000",
            ]
            if subprocess.run(words, capture_output=True, check=False).returncode:
                call("ip", "-n", CONTROLLER, "link", "delete", "cmpa1")
                return False
        return True

    def _addresses(self, net: str, ends: tuple[str, str]) -> None:
        base = NETS[net]
        call("ip", "-n", CONTROLLER, "address", "add", f"{base}.0.1/16", "dev", ends[0])
        lines = [
            f"address add {address}/16 dev {ends[1]}\n" for address in self.addresses(MOST, net).values()
        ]
        subprocess.run(
            ["ip", "-n", NODES, "-batch", "-"],
            input="".join(lines),
            text=True,
            check=True,
            capture_output=True,
        )
        for name, end in zip((CONTROLLER, NODES), ends, strict=True):
            call("ip", "-n", name, "link", "set", end, "txqueuelen", "10000", "up")

    # --- hosts ----------------------------------------------------------------------------------------------

    def up(self, number: int) -> None:
        """So many fresh hosts, which answer on port 22 when this returns."""
        self.down()
        for name in self.names(number):
            self._start(name)
        end = time.monotonic() + UP_LIMIT_S
        waiting = set(self.addresses(number, "fast").values())
        listening = ["ip", "netns", "exec", NODES, "ss", "-Hltn"]
        while waiting and time.monotonic() < end:
            shown = call(*listening)
            waiting = {address for address in waiting if f" {address}:22 " not in shown}
            time.sleep(0.05)
        if waiting:
            raise SystemExit(f"{len(waiting)} hosts do not listen after {UP_LIMIT_S} s")

    def _start(self, name: str) -> None:
        addresses = [self.addresses(MOST, net)[name] for net in NETS]
        if not self.delay_ms:
            addresses = addresses[:1]
        inside = ["unshare", "--mount", "--pid", "--fork", "--uts", "--kill-child"]
        words = [*inside, str(HERE / "host.sh"), name, str(self.root), str(self.uppers / name), *addresses]
        self._running.append(
            subprocess.Popen(
                self.nodes.wrap(["nsenter", f"--net=/var/run/netns/{NODES}", *words]),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        )

    def down(self) -> None:
        """Ends every host and forgets what it changed."""
        for one in self._running:
            one.send_signal(signal.SIGKILL)
        for one in self._running:
            one.wait()
        self._running.clear()
        self.nodes.kill()
        if self.uppers.is_dir():
            for path in self.uppers.iterdir():
                shutil.rmtree(path)

    def close(self) -> None:
        """Ends hosts and networks; the root file system stays."""
        self.down()
        self.close_networks()
        if os.path.ismount(self.uppers):
            call("umount", str(self.uppers))

    def close_networks(self) -> None:
        """Takes the networks away, also those of a run that was killed."""
        if self._delay is not None:
            self._delay.kill()
            self._delay.wait()
        for name in (CONTROLLER, NODES):
            if Path("/var/run/netns", name).exists():
                call("ip", "netns", "delete", name)

    def reach(self) -> dict[str, str]:
        """Ansible's variables of how a host is reached."""
        options = (
            f"-o UserKnownHostsFile={self.known} -o StrictHostKeyChecking=yes -o IdentitiesOnly=yes {ALIKE}"
        )
        return {
            "ansible_user": "root",
            "ansible_ssh_private_key_file": str(self.key),
            "ansible_ssh_common_args": options,
        }

    def ssh(self) -> Sequence[str]:
        """OpenSSH's command line up to the address, without a connection that stays."""
        options = {
            "UserKnownHostsFile": str(self.known),
            "StrictHostKeyChecking": "yes",
            "IdentitiesOnly": "yes",
            "ControlPath": "none",
            "KexAlgorithms": KEX,
        }
        words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        return ["ssh", "-T", "-l", "root", "-i", str(self.key), *words]
