"""The checks of this checkout (`invoke lint`, `invoke test`): the stages of tests/stages.py, as a process
of its own.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence

from bringup import ROOT, report
from bringup.errors import Exit


def stages(only: Sequence[str], *, as_json: bool = False) -> Exit:
    """Runs these stages (all without any), their output as it comes; FAILED when one failed."""
    argv = [sys.executable, "-m", "tests.stages", *(word for name in only for word in ("--only", name))]
    begun = time.monotonic()
    done = subprocess.run(argv, cwd=ROOT, check=False, stdout=sys.stderr if as_json else None)
    if as_json:
        report.print_json(
            {
                "stages": list(only) or "all",
                "passed": done.returncode == 0,
                "seconds": time.monotonic() - begun,
            }
        )
    # argparse ends a wrong stage name with 2, as we do; 1 is "a stage failed"
    return (
        Exit.FAILED
        if done.returncode == 1
        else Exit(done.returncode)
        if done.returncode in set(Exit)
        else Exit.INTERNAL
    )
