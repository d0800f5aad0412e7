"""`python -m bringup.leash FILE`: Ansible, as a process that ends when the one who started it dies.

Without that, Ansible would go on by itself after its controller was killed, on nodes that nobody holds a lock for any
more (Linux only: prctl). FILE is where it is told its command line, as JSON, once that is known: it imports all that
it needs before. Nothing to play: it ends.

Ansible forks for every task and host. It runs here, in this interpreter, with what it has imported set aside from the
collector of garbage, which would otherwise touch, and so copy, all of it in every fork.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

# Ansible imports actions in each fork; what ours stand on is there before.
from bringup import carrying, closing, events, narrowing, runs, seal  # noqa: F401
from bringup.node import light

TOLD = "told.json"
PR_SET_PDEATHSIG = 1
COLLECT_EVERY = 50_000
"""New objects between two looks for garbage; Python's own 700 are for small programs."""

AHEAD = ("run_stamp", "node_parts", "node_facts", "node_files", "node_units", "engine_servers", "model_store")
"""Modules of nearly every run: their programs are ready before the first fork."""

AHEAD_OF_LAST = ("node_parts", "node_files")
"""Those that the last call on a node goes along with."""

USED = {"connection": ("ssh", "local"), "shell": ("sh",), "become": ("sudo",)}
"""Plugins of Ansible's that inventories use; others are loaded when one uses them."""

LOOK_EVERY_S = 0.005
TOLD_LIMIT_S = 3600.0
"""For looking at all nodes; each of them has its own, shorter limit."""

KEPT = Path(__file__).resolve().parent.parent / ".cache" / "collections"


def hold() -> None:
    """Asks the kernel for TERM at the parent's death."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            raise SystemExit(1)  # it died before the kernel knew


def remember() -> None:
    """Keeps what Ansible reads of its own list of where modules have moved to (370 kB of YAML at every start), by the
    content; its reader may be replaced for that."""
    from ansible.utils.collection_loader import _collection_finder as finder

    read = finder._meta_yml_to_dict

    def kept(data: bytes | str, content_id: object) -> Mapping[str, Any]:
        raw = data if isinstance(data, bytes) else data.encode()
        path = KEPT / f"{hashlib.sha256(raw).hexdigest()[:40]}.json"
        try:
            found: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            found = read(data, content_id)
            with suppress(OSError):
                KEPT.mkdir(mode=0o700, parents=True, exist_ok=True)
                runs.write_private(path, json.dumps(found))
        return found

    finder._meta_yml_to_dict = kept


def prepare() -> None:
    """Loads what every run needs of Ansible's plugins while nothing is told yet.

    Ansible itself loads all connections, shells and ways to become at every start, to know their settings (paramiko's
    among them, and all of paramiko with it). What is used is loaded when it is used, as one of a collection is, which
    is never among them; so only what our inventories use is loaded here.
    """
    from ansible.parsing.dataloader import DataLoader
    from ansible.plugins import loader
    from ansible.template import Templar, trust_as_template

    for kind, names in USED.items():
        _only(getattr(loader, f"{kind}_loader"), names)
    list(loader.callback_loader.all(class_only=True))
    for name in AHEAD:
        loader.action_loader.get(name, class_only=True)
    loader.strategy_loader.get("linear", class_only=True)
    # The first template compiles as much of Jinja as a run takes.
    Templar(DataLoader(), variables={"hosts": []}).template(
        trust_as_template("{{ hosts | default([]) | length }}")
    )


def _only(plugins: Any, names: Sequence[str]) -> None:
    """Has a loader's classes of all plugins be those of these."""
    every = plugins.all

    def found(*arguments: Any, **options: Any) -> Any:
        if options == {"class_only": True} and not arguments:
            return iter([plugins.get(name, class_only=True) for name in names])
        return every(*arguments, **options)

    plugins.all = found
    found(class_only=True)


def told(path: Path) -> dict[str, Any]:
    """`argv` and `environment`, once they are there."""
    begun = time.monotonic()
    while not path.exists():
        if time.monotonic() - begun > TOLD_LIMIT_S:
            raise SystemExit(f"nothing to play was told within {TOLD_LIMIT_S:g} s")
        time.sleep(LOOK_EVERY_S)
    return dict(json.loads(path.read_text(encoding="utf-8")))


def main(words: list[str]) -> None:
    """Imports Ansible, waits for its command line, and runs it."""
    hold()
    # Ansible imports it to see whether it could; connections are OpenSSH's, and where one is not, it is imported then.
    sys.modules.setdefault("paramiko", light.Later("paramiko"))
    from ansible.cli.playbook import PlaybookCLI

    remember()
    prepare()
    for name in AHEAD:
        carrying.program(name)
    for name in AHEAD_OF_LAST:
        carrying.program(name, narrowing.STAMP)
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_EVERY)
    play = told(Path(words[0]))
    if play["argv"]:
        os.environ.update(play["environment"])
        sys.argv = play["argv"]
        try:
            PlaybookCLI.cli_executor(play["argv"])
        except SystemExit as ended:
            leave(ended.code)


def leave(code: object) -> NoReturn:
    """Ends at once, with what was registered for the end: to take all of Ansible's objects apart takes longer than a
    short play."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    main(sys.argv[1:])
