"""What a host's file system has become, read from the overlay of its changes: equal trees have equal fingerprints."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

OWN = (
    "root/.ansible",
    "root/.cache",
    "etc/bringup",
    "var/lib/bringup",
    "var/log/bringup",
    "srv/weights/.bringup",
    # Each call of useradd and groupadd keeps the file before it, and how often they are called differs.
    "etc/passwd-",
    "etc/group-",
    "etc/shadow-",
    "etc/gshadow-",
    "etc/subuid-",
    "etc/subgid-",
    "etc/.pwd.lock",
    "var/log/lastlog",
    "var/log/wtmp",
    "var/log/btmp",
    "var/log/faillog",
)
"""What contenders and the system keep for themselves: their temporary files, our seals and journals, backups."""


def lines(upper: Path, root: Path) -> dict[str, str]:
    """Path -> what it is now, of everything that differs from the shared root file system."""
    found: dict[str, str] = {}
    for folder, names, files in os.walk(upper):
        here = Path(folder)
        for name in [*names, *files]:
            path = here / name
            about = str(path.relative_to(upper))
            if not any(about == own or about.startswith(f"{own}/") for own in OWN):
                now = _one(path)
                if now != _one(root / about):
                    found[about] = now
    return found


def fingerprint(upper: Path, root: Path) -> str:
    """One digest of `lines`."""
    text = "\n".join(f"{path}\0{now}" for path, now in sorted(lines(upper, root).items()))
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def _one(path: Path) -> str:
    """Kind, owner, group, mode, and content or target."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return "absent"
    rights = f"{status.st_uid}:{status.st_gid} {stat.S_IMODE(status.st_mode):04o}"
    if stat.S_ISLNK(status.st_mode):
        return f"link {path.readlink()}"
    if stat.S_ISDIR(status.st_mode):
        return f"folder {rights}"
    if stat.S_ISREG(status.st_mode):
        return f"file {rights} {hashlib.sha256(path.read_bytes()).hexdigest()}"
    # Overlayfs notes with a device 0:0 that a name of the lower file system is gone.
    if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
        return "absent"
    return f"other {rights}"
