"""`python -m bringup.leash PROGRAM ARGUMENTS...`: becomes a program that ends when the one who started it
dies.

Without it, Ansible would go on by itself after its controller was killed, on nodes that nobody holds a lock
for any more. Linux only (prctl); elsewhere the program is just started.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(words: list[str]) -> None:
    """Asks the kernel for TERM at the parent's death, then becomes the program."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            raise SystemExit(1)  # it died before the kernel knew
    os.execvp(words[0], words)


if __name__ == "__main__":
    main(sys.argv[1:])
