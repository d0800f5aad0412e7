"""`python -m bringup.leash ansible-playbook ARGUMENTS...`: Ansible, as a process that ends when the one who started it
dies.

Without it, Ansible would go on by itself after its controller was killed, on nodes that nobody holds a lock for any
more (Linux only: prctl). Ansible forks for every task and host: it runs here, in this interpreter, with what it has
imported set aside from the collector of garbage, which would otherwise touch, and so copy, all of it in every fork.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
COLLECT_EVERY = 50_000
"""New objects between two looks for garbage; Python's own 700 are for small programs."""


def hold() -> None:
    """Asks the kernel for TERM at the parent's death."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            raise SystemExit(1)  # it died before the kernel knew


def main(words: list[str]) -> None:
    """Runs `ansible-playbook` with its arguments."""
    hold()
    from ansible.cli.playbook import PlaybookCLI

    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_EVERY)
    sys.argv = words
    PlaybookCLI.cli_executor(words)


if __name__ == "__main__":
    main(sys.argv[1:])
