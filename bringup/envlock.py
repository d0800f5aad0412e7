"""Locks of engine environments: what `install.requires` resolves to on an architecture, every file with its
hash.

Resolved by `uv pip compile`, which needs neither that architecture nor that Python here. The lock names no
index: a site's own settings say where packages come from.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from bringup import ROOT, catalog
from bringup.errors import Problem, UsageError

PLATFORMS = {"x86_64": "x86_64-manylinux_2_28", "aarch64": "aarch64-manylinux_2_28"}
RESOLVE_LIMIT_S = 900
SYSTEM_PYTHON = "3.11"
"""For engines that take the node's own Python: the oldest one that nodes have."""


def lock(engine: str, arch: str, root: Path = ROOT) -> tuple[Path, bool]:
    """Resolves an engine's environment for `arch` and writes its lock; its path, and whether it changed.

    Raises UsageError for an unknown engine or architecture, without `uv`, and when there is no resolution.
    """
    if arch not in PLATFORMS:
        raise UsageError(Problem("--arch", f'"{arch}" is not one of {", ".join(PLATFORMS)}'))
    install = catalog.lazy(root / "catalog").engine(engine).install
    path = root / (install.locks.get(arch) or f"catalog/engines/locks/{engine}-{arch}.txt")  # type: ignore[call-overload]
    text = _resolved(install.requires, install.python, arch)
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return path, False
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)
    return path, True


def _resolved(requires: tuple[str, ...], python: str, arch: str) -> str:
    version = SYSTEM_PYTHON if python == "system" else python
    argv = [
        *_uv(),
        *("pip", "compile", "-", "--quiet", "--generate-hashes", "--no-header", "--no-annotate"),
        *("--python-version", version, "--python-platform", PLATFORMS[arch], "--only-binary", ":all:"),
    ]
    try:
        done = subprocess.run(
            argv,
            input="\n".join(requires),
            capture_output=True,
            text=True,
            timeout=RESOLVE_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UsageError(Problem("envs.lock", f"no resolution within {RESOLVE_LIMIT_S} s")) from None
    if done.returncode:
        last = done.stderr.strip()[-1500:]
        raise UsageError(
            Problem(", ".join(requires), f"does not resolve for {arch}, Python {version}:\n{last}")
        )
    return done.stdout


def _uv() -> list[str]:
    """How uv is called: from the path, else from this environment."""
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if beside.is_file() else shutil.which("uv")
    if found is None:
        raise UsageError(Problem("envs.lock", "needs uv, which is not here", "Install it: pip install uv"))
    return [found]
