"""A conda channel in a folder, with its explicit lock: small stand-in packages in the real format.

python -m tests.standin.channel FOLDER [VERSION]     makes FOLDER/{linux-64,linux-aarch64,noarch} and FOLDER/lock.txt

`python` hands over to the node's own Python, `engine` holds a file with the prefix in it, `libstdcxx` a library.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PLACEHOLDER = "/opt/placehold_placehold_placehold_placehold_placehold_placehold"
SUBDIRS = ("linux-64", "linux-aarch64")


@dataclass(frozen=True)
class Made:
    """One package: its files (path -> text) and which of them are programs."""

    name: str
    version: str
    depends: Sequence[str]
    files: Mapping[str, str]
    subdir: str


def packages(version: str) -> list[Made]:
    """All packages of the channel; `version` is the engine's."""
    engine = {
        "bin/engine": f"#!/bin/sh\necho stand-in engine {version}\n",
        "share/engine/where": f"{PLACEHOLDER}/share/engine\n",
    }
    made = [Made("engine", version, ["python >=3", "libstdcxx >=16"], engine, "noarch")]
    for subdir in SUBDIRS:
        program = {"bin/python": '#!/bin/sh\nexec /usr/bin/python3 "$@"\n'}
        made.append(Made("python", "3.12.99", [], program, subdir))
        made.append(
            Made("libstdcxx", "16.2.0", [], {"lib/libstdc++.so.6": f"a stand-in for {subdir}\n"}, subdir)
        )
    return made


def write(package: Made, channel: Path) -> Path:
    """The package's file; the same bytes for the same input."""
    paths = []
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:bz2") as tar:

        def add(name: str, text: str, mode: int = 0o644) -> None:
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(text.encode()), mode
            tar.addfile(info, io.BytesIO(text.encode()))

        for name, text in package.files.items():
            add(name, text, 0o755 if name.startswith("bin/") else 0o644)
            row = {
                "_path": name,
                "path_type": "hardlink",
                "sha256": hashlib.sha256(text.encode()).hexdigest(),
                "size_in_bytes": len(text.encode()),
            }
            placed = {"prefix_placeholder": PLACEHOLDER, "file_mode": "text"} if PLACEHOLDER in text else {}
            paths.append({**row, **placed})
        noarch = {"noarch": "generic"} if package.subdir == "noarch" else {}
        index = {
            "name": package.name,
            "version": package.version,
            "build": "0",
            "build_number": 0,
            "depends": list(package.depends),
            "subdir": package.subdir,
            **noarch,
        }
        add("info/index.json", json.dumps(index))
        add("info/paths.json", json.dumps({"paths": paths, "paths_version": 1}))
        add("info/files", "\n".join(package.files) + "\n")
    target = channel / package.subdir / f"{package.name}-{package.version}-0.tar.bz2"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(out.getvalue())
    return target


def lock(files: Sequence[Path], address: str, subdir: str) -> str:
    """The explicit lock for one architecture."""
    rows = [
        f"{address}/{path.parent.name}/{path.name}#{hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()}"
        for path in files
        if path.parent.name in (subdir, "noarch")
    ]
    return "\n".join([f"# platform: {subdir}", "@EXPLICIT", *rows]) + "\n"


def make(channel: Path, version: str, address: str) -> str:
    """Makes the channel; the lock for x86_64 with its packages at `address`."""
    files = [write(package, channel) for package in packages(version)]
    return lock(files, address, "linux-64")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    text = make(folder, sys.argv[2] if len(sys.argv) > 2 else "1.0", "https://channel.example/demo")
    (folder / "lock.txt").write_text(text)
