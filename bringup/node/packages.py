"""Packages of the distribution: what can be had, what is there, and installing with a journal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from .undo import PACKAGE_LOCK_LIMIT_S, Journal, installed, run

INSTALL_LIMIT_S = 1200
"""Seconds that one call of the package manager may take: kernel modules are compiled in it."""

WAIT = ("-o", f"DPkg::Lock::Timeout={PACKAGE_LOCK_LIMIT_S}", "-o", "Acquire::Retries=3")
KEEP_FILES = ("-o", "Dpkg::Options::=--force-confdef", "-o", "Dpkg::Options::=--force-confold")
SAID = 900
"""Characters of the package manager's last words that a message holds."""


class PackagesFailed(Exception):
    """What the package manager did not do, and its last words."""


def upstream(version: str) -> str:
    """The part of a package's version that its makers gave: `1:580.105.08-0ubuntu1` -> `580.105.08`."""
    return re.sub(r"-[^-]*$", "", version.partition(":")[2] if ":" in version else version)


def parse_madison(text: str) -> dict[str, list[str]]:
    """Versions that can be had of each package, newest first, from `apt-cache madison`."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) == 3 and fields[1] not in found.setdefault(fields[0], []):
            found[fields[0]].append(fields[1])
    return found


def available(names: Iterable[str]) -> dict[str, list[str]]:
    """Versions that can be had of each package, newest first; one that cannot is not in it."""
    return parse_madison(run(["apt-cache", "madison", *names])[1])


def versions() -> dict[str, str]:
    """Version of each installed package, by its name without architecture."""
    return {name.partition(":")[0]: version for name, version in installed().items()}


def held() -> set[str]:
    """Packages that are held."""
    return {line.partition(":")[0] for line in run(["apt-mark", "showhold"])[1].splitlines()}


def refresh(options: Sequence[str] = ()) -> None:
    """Reads the lists of packages again. Raises PackagesFailed."""
    code, said = run(["apt-get", *WAIT, *options, "update", "-q"], INSTALL_LIMIT_S)
    if code != 0:
        raise PackagesFailed(f"apt-get update ended with {code}: {said[-SAID:]}")


def install(
    names: Sequence[str],
    journal: Journal,
    limit_s: int,
    versions_of: Mapping[str, str] | None = None,
    without: Sequence[str] = (),
    again: bool = False,
) -> None:
    """Installs packages, each at its version where one is given, in place of those in `without`; `again`: also what
    is installed, whose files somebody has taken away.

    Raises PackagesFailed; the journal knows what was changed.
    """
    words = [f"{name}={versions_of[name]}" if versions_of and name in versions_of else name for name in names]
    journal.begin_install()
    argv = ["apt-get", *WAIT, *KEEP_FILES, "install", "-q", "-y", "--no-install-recommends"]
    argv += ["--allow-downgrades", "--allow-change-held-packages", *words, *(f"{name}-" for name in without)]
    argv += ["--reinstall"] if again else []
    code, said = run(argv, limit_s)
    journal.end_install()
    if code != 0:
        raise PackagesFailed(f"apt-get install {' '.join(words)} ended with {code}: {said[-SAID:]}")
