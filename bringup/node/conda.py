"""Conda environments from explicit locks (`@EXPLICIT`, one address with its hash a line), with or without conda.

The packages are fetched and verified here, whatever installs them; the installer then gets files that are on this
node. `rattler` needs no conda: its library comes from the Python index, by a lock of our own. `conda`, `mamba` and
`micromamba` are used where the site has installed them.
"""

from __future__ import annotations

import hashlib
import platform
import re
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MARK = "@EXPLICIT"
SUBDIRS = {"x86_64": "linux-64", "aarch64": "linux-aarch64"}
FETCH_LIMIT_S = 60
"""Seconds without a byte before a connection is given up."""

TRIES = 3
BACK_OFF_S = 2
BLOCK_BYTES = 1 << 20
MIRROR = "CONDA_MIRRORS"
"""Setting with mirrors: `FROM=TO`, parted by blanks; each address that begins with FROM begins with TO instead."""

INSTALLERS = ("conda", "mamba", "micromamba")
HISTORY = Path("conda-meta") / "history"


class CondaFailed(Exception):
    """Why an environment cannot be made from its lock, and what to do."""


@dataclass(frozen=True)
class Package:
    """One line of a lock: its address, and the hash (md5 or sha256, hexadecimal) that its file must have."""

    address: str
    algorithm: str
    digest: str

    @property
    def file_name(self) -> str:
        """The file's name, which says package, version and build."""
        return self.address.rpartition("/")[2]

    @property
    def subdir(self) -> str:
        """`linux-64`, `linux-aarch64` or `noarch`."""
        return self.address.rpartition("/")[0].rpartition("/")[2]


def parse(text: str, machine: str | None = None) -> list[Package]:
    """The packages of an explicit lock. Raises CondaFailed with every line that is wrong."""
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    wanted = [(number, line) for number, line in lines if line and not line.startswith("#")]
    if MARK not in [line for _, line in wanted]:
        raise CondaFailed(
            f"the lock has no line {MARK}: write it with conda list --explicit --md5, or with conda-lock"
        )
    problems, found = [], []
    own = SUBDIRS.get(machine or platform.machine(), "")
    for number, line in wanted:
        if line == MARK:
            continue
        match = re.fullmatch(
            r"(\S+/([^/\s#]+\.(?:conda|tar\.bz2)))#(?:sha256:)?([0-9a-f]{32}|[0-9a-f]{64})", line
        )
        if not match:
            problems.append(f"line {number} is no address of a package with #md5 or #sha256: {line[:80]}")
            continue
        package = Package(match[1], "md5" if len(match[3]) == 32 else "sha256", match[3])
        if package.subdir not in (own, "noarch"):
            problems.append(f"line {number}: {package.file_name} is for {package.subdir}, this node is {own}")
        found.append(package)
    if problems or not found:
        raise CondaFailed("; ".join(problems[:5]) or "the lock names no package")
    return found


def mirrored(address: str, mirrors: str) -> str:
    """The address at the site's mirror; as it is when no mirror has it."""
    for pair in mirrors.split():
        before, _, after = pair.partition("=")
        if after and address.startswith(before):
            return after + address[len(before) :]
    return address


def digest_of(path: Path, algorithm: str) -> str:
    """Hexadecimal hash of a file."""
    total = hashlib.new(algorithm, usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            total.update(block)
    return total.hexdigest()


def fetch(packages: Sequence[Package], cache: Path, mirrors: str, say: Callable[[str], None]) -> list[Path]:
    """Brings every package into the cache, verified, in the lock's order. Raises CondaFailed."""
    cache.mkdir(parents=True, exist_ok=True)
    return [_fetch(package, cache, mirrored(package.address, mirrors), say) for package in packages]


def _fetch(package: Package, cache: Path, address: str, say: Callable[[str], None]) -> Path:
    # By its hash: two channels may have different files of one name.
    target = cache / package.digest[:16] / package.file_name
    if target.is_file() and digest_of(target, package.algorithm) == package.digest:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".{target.name}.part")
    for attempt in range(1, TRIES + 1):
        say(f"fetch {address}")
        try:
            with urllib.request.urlopen(address, timeout=FETCH_LIMIT_S) as answer, beside.open("wb") as file:
                shutil.copyfileobj(answer, file, BLOCK_BYTES)
            break
        except (OSError, ValueError) as error:
            hopeless = isinstance(error, (urllib.error.HTTPError, ValueError)) or address.startswith("file:")
            if hopeless or attempt == TRIES:
                beside.unlink(missing_ok=True)
                reason = getattr(error, "reason", error)
                raise CondaFailed(f"{package.file_name} cannot be fetched from {address}: {reason}") from None
            time.sleep(BACK_OFF_S * attempt)
    got = digest_of(beside, package.algorithm)
    if got != package.digest:
        beside.unlink()
        raise CondaFailed(
            f"{package.file_name} from {address} has {package.algorithm} {got}, the lock says {package.digest}: it is "
            "not installed. Compare with the channel, and make the lock again if the channel was changed."
        )
    beside.replace(target)
    return target


def explicit_text(packages: Sequence[Package], files: Sequence[Path]) -> str:
    """The same lock with the fetched files in place of their addresses; only md5 is known to every installer."""
    rows = [
        f"{path.as_uri()}#{package.digest}" if package.algorithm == "md5" else path.as_uri()
        for package, path in zip(packages, files, strict=True)
    ]
    return "\n".join([MARK, *rows]) + "\n"


def installer(name: str) -> str:
    """The path of conda, mamba or micromamba. Raises CondaFailed when the node has none."""
    usual = (f"/opt/conda/bin/{name}", f"/opt/miniforge3/bin/{name}", f"/usr/local/bin/{name}")
    found = shutil.which(name) or next((path for path in usual if Path(path).is_file()), "")
    if not found:
        raise CondaFailed(
            f"there is no {name} on the node. Install it, or use provider rattler, which needs none"
        )
    return found


def command(program: str, prefix: str, lock: str) -> list[str]:
    """How an installer fills a prefix that is there already from an explicit lock, asking nothing."""
    return [program, "install", "--yes", "--quiet", "--offline", "--prefix", prefix, "--file", lock]


def make_prefix(prefix: Path) -> None:
    """Makes a folder one that installers take for an environment."""
    history = prefix / HISTORY
    history.parent.mkdir(parents=True, exist_ok=True)
    history.touch()


def installed(prefix: Path) -> dict[str, str]:
    """Name and version of each conda package in a prefix, from the names of its records."""
    found = {}
    for record in prefix.glob("conda-meta/*.json"):
        parts = record.stem.rsplit("-", 2)
        if len(parts) == 3:
            found[parts[0]] = f"{parts[1]}-{parts[2]}"
    return dict(sorted(found.items()))


def settings_of(given: Mapping[str, str], cache: str) -> dict[str, str]:
    """Environment variables for conda and its kin: nothing outside of the prefix and the cache is written or read."""
    return {
        "CONDA_PKGS_DIRS": f"{cache}/conda-unpacked",
        "MAMBA_ROOT_PREFIX": f"{cache}/mamba-root",
        "CONDA_ALWAYS_YES": "true",
        "CONDA_CHANNEL_PRIORITY": "strict",
        "CONDA_REGISTER_ENVS": "false",
        **given,
    }
