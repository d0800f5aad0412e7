"""On the GPU machine: makes wheels of packages that its own Python has, and the lock of all wheels in a folder.

    python3 bench/hopper/wheels.py pack FOLDER          those that carried.yml takes from the machine
    python3 bench/hopper/wheels.py lock FOLDER LOCK

Run by the machine's own Python; standard library only.
"""

from __future__ import annotations

import hashlib
import re
import sys
import zipfile
from concurrent.futures import ProcessPoolExecutor
from importlib import metadata
from pathlib import Path

TIME = (2020, 1, 1, 0, 0, 0)
READ_BYTES = 1 << 20


def normal(name: str) -> str:
    """A package's name as locks have it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def wheel(name: str, folder: str) -> str:
    """Packs an installed package into FOLDER without compression; its file name. Programs are made anew by whoever
    installs it, so those of the environment stay out."""
    found = metadata.distribution(name)
    files = [file for file in found.files or () if ".." not in file.parts and "__pycache__" not in file.parts]
    tags = re.findall(r"^Tag: (\S+)", found.read_text("WHEEL") or "", re.MULTILINE)
    python, abi, _ = tags[0].split("-")
    platforms = ".".join(dict.fromkeys(tag.rpartition("-")[2] for tag in tags))
    path = Path(folder) / f"{normal(name).replace('-', '_')}-{found.version}-{python}-{abi}-{platforms}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as out:
        for file in sorted(files):
            if file.name in {"INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json"}:
                continue
            entry = zipfile.ZipInfo(str(file), TIME)
            real = Path(str(file.locate()))
            entry.external_attr = (real.stat().st_mode & 0xFFFF) << 16
            entry.file_size = real.stat().st_size
            with real.open("rb") as source, out.open(entry, "w") as target:
                while data := source.read(READ_BYTES):
                    target.write(data)
    return path.name


def row(path: Path) -> str:
    """A wheel's line in a lock."""
    name, version = path.name.split("-")[:2]
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return f"{normal(name)}=={version} \\\n    --hash=sha256:{digest}"


def main(verb: str, folder: str, *rest: str) -> None:
    """See above."""
    with ProcessPoolExecutor() as pool:
        if verb == "pack":
            names = packages()
            for made in pool.map(wheel, names, [folder] * len(names)):
                print(made, flush=True)
        else:
            rows = sorted(pool.map(row, sorted(Path(folder).glob("*.whl"))))
            Path(rest[0]).write_text("\n".join(rows) + "\n", encoding="utf-8")


def packages() -> list[str]:
    """`from_machine` of carried.yml, which is a plain list (the machine's Python need not have a YAML reader)."""
    text = Path(__file__).with_name("carried.yml").read_text(encoding="utf-8")
    return re.findall(r"^  - (\S+)$", text.partition("from_machine:\n")[2].partition("\n#")[0], re.MULTILINE)


if __name__ == "__main__":
    if len(sys.argv) < 3 or "--help" in sys.argv:
        print(__doc__)
        sys.exit(0 if "--help" in sys.argv else 2)
    main(*sys.argv[1:])
