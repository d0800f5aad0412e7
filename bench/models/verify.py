"""How fast a model's files are verified, against `openssl dgst -sha256` on the same files.

    .venv/bin/python bench/models/verify.py [--gib 10] [--files 4] [--folder FOLDER]

The files are sparse, so the disk is not what is measured. Compared is CPU time a byte (this process against as many
of openssl as there are cores, one after the other), which other work on the machine disturbs less than the clock.
Prints one JSON object: seconds, CPU seconds and peak memory of a deep look, openssl's seconds and CPU seconds, and
milliseconds of a quick look. On a busy machine begin with `chrt -r 5`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bringup.node import store  # noqa: E402 (the checkout must be on the path first)


def cpu(who: int) -> float:
    """CPU seconds so far, of this process or of its children that have ended."""
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def by_openssl(paths: Sequence[Path], at_once: int) -> list[tuple[str, str]]:
    """Path and sha256 of each file, by so many processes of openssl at once as we have threads.

    Two threads of one core do less than twice what one does, so only the same number of them compares.
    """
    running = [
        subprocess.Popen(
            ["openssl", "dgst", "-sha256", "-r", *map(str, paths[start::at_once])],
            stdout=subprocess.PIPE,
            text=True,
        )
        for start in range(min(at_once, len(paths)))
    ]
    lines = [line for process in running for line in process.communicate()[0].splitlines()]
    return [(path.strip(" *"), digest) for digest, _, path in (line.partition(" ") for line in lines)]


def measured(folder: Path, gib: float, files: int) -> dict[str, Any]:
    """Makes a model of sparse files and looks at it deeply, by openssl, and quickly."""
    size = int(gib * 1024**3) // files
    paths = [folder / f"part-{number}.bin" for number in range(files)]
    for number, path in enumerate(paths):
        with path.open("wb") as file:
            file.write(bytes([number]))
            file.truncate(size)
    # Whoever reads first pays for the pages.
    subprocess.run(["cat", *map(str, paths)], stdout=subprocess.DEVNULL, check=True)
    before, began = cpu(resource.RUSAGE_CHILDREN), time.monotonic()
    sums = dict(by_openssl(paths, os.cpu_count() or 1))
    theirs, their_wall = cpu(resource.RUSAGE_CHILDREN) - before, time.monotonic() - began
    rows = tuple(store.File(path.name, size, sums[str(path)]) for path in paths)
    model = store.Model("bench", folder, rows)
    before, began = cpu(resource.RUSAGE_SELF), time.monotonic()
    wrong = store.verify(model, deep=True)
    ours, wall = cpu(resource.RUSAGE_SELF) - before, time.monotonic() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    store.finish(model)
    began = time.monotonic()
    wrong = {**wrong, **store.verify(model, deep=False)}
    quick = time.monotonic() - began
    return {
        "wrong": wrong,
        "deep_s": round(wall, 2),
        "deep_cpu_s": round(ours, 2),
        "openssl_s": round(their_wall, 2),
        "openssl_cpu_s": round(theirs, 2),
        "of_openssl_a_core": round(theirs / ours, 3),
        "peak_mib": round(peak, 1),
        "quick_ms": round(quick * 1000, 2),
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=10)
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--folder", help="where the files lie (default: the folder for temporary files)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        result = measured(Path(folder), given.gib, given.files)
    about = {"schema_version": 1, "gib": given.gib, "files": given.files, "cores": os.cpu_count()}
    print(json.dumps({**about, "load_1m": round(os.getloadavg()[0], 1), **result}))
    sys.exit(1 if result["wrong"] else 0)


if __name__ == "__main__":
    main()
