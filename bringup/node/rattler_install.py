"""Fills a prefix from package files with rattler. Runs in the environment that has it, not in Ansible's.

python -m rattler_install PREFIX CACHE FILE...       (the files are verified already; links run no scripts)
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence


async def install(prefix: str, cache: str, files: Sequence[str]) -> int:
    """Installs all files; how many packages that were."""
    import rattler  # type: ignore[import-not-found, unused-ignore]

    records = [await rattler.RepoDataRecord.from_package_archive(path) for path in files]
    await rattler.install(
        records, target_prefix=prefix, cache_dir=cache, show_progress=False, execute_link_scripts=False
    )
    return len(records)


if __name__ == "__main__":
    print(
        f"{asyncio.run(install(sys.argv[1], sys.argv[2], sys.argv[3:]))} packages are installed", flush=True
    )
    # Without taking the interpreter down in order: threads of the library may still give objects back to it then,
    # which aborts a process that has done its work.
    os._exit(0)
