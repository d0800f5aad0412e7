"""How a module of ours gets to a node: as one program through the connection's standard input, with nothing of Ansible
in it (`bringup/node/light.py`). The node then takes a third of the time that Ansible's own packing costs it.

It needs what Ansible calls pipelining; where that is off, or a task runs asynchronously, Ansible carries the module as
any other. The module's file is the same both ways.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from bringup import closing, holding, runs
from bringup.node import kept, light

ROOT = Path(__file__).resolve().parents[1]
MODULES = ROOT / "plugins" / "modules"
NODE = Path(light.__file__).parent
KEPT = ROOT / ".cache" / "programs"
ALONG = "node_lock_along"
"""Variable of a play whose modules hold the node for the run themselves; its value is the playbook's name."""

LOCKS = ("node_lock",)
"""Modules that say themselves how the node is to be held."""

PYTHON = "/usr/bin/python3"
NOT_FOUND = (126, 127)
SAID_LINES = 5

IMPORTS = re.compile(
    r"^\s*from +(?:\.|ansible\.module_utils\.bringup_node) +import +([^#\n(]+|\([^)]*\))", re.MULTILINE
)
PARTS = re.compile(r"^\s*from +\.(\w+) +import ", re.MULTILINE)


@cache
def program(name: str, *more: str) -> str:
    """The text of a module with all of its library, without what it is asked; kept by what it is made of. `more`: other
    modules that it may be asked to go on with."""
    modules = {f"modules/{one}": (MODULES / f"{one}.py").read_text(encoding="utf-8") for one in (name, *more)}
    texts: dict[str, str] = {}
    todo = {"nodelock"}.union(*map(_named, modules.values()))
    while todo:
        part = todo.pop()
        texts[part] = (NODE / f"{part}.py").read_text(encoding="utf-8")
        todo |= _named(texts[part]) - set(texts)
    first = Path(light.__file__).read_text(encoding="utf-8")
    parts = [("light", first), *modules.items(), *sorted(texts.items())]
    return _kept(
        "+".join((name, *more)),
        [_header(), *(f"{part}\0{text}" for part, text in parts)],
        lambda: _program(name, parts),
    )


def _program(name: str, parts: Iterable[tuple[str, str]]) -> str:
    return f"{bundle((part, lean(text)) for part, text in parts)}name = {name!r}\n{START}"


def _kept(name: str, made_of: Iterable[str], make: Callable[[], str]) -> str:
    """What `make` makes, read back while this file and what it is made of are the same."""
    total = hashlib.sha256(Path(__file__).read_bytes())
    for text in made_of:
        total.update(text.encode())
    path = KEPT / f"{name}-{total.hexdigest()[:40]}.py"
    with suppress(OSError, ValueError):
        return path.read_text(encoding="utf-8")
    made = make()
    with suppress(OSError):
        KEPT.mkdir(mode=0o700, parents=True, exist_ok=True)
        for old in KEPT.glob(f"{name}-*.py"):
            old.unlink(missing_ok=True)
        runs.write_private(path, made)
    return made


START = """import types, sys
light = sys.modules['light'] = types.ModuleType('light')
exec(compiled(texts['light'], '/bringup/node/light.py', digests['light']), light.__dict__)
"""


def bundle(parts: Iterable[tuple[str, str]]) -> str:
    """The beginning of a program: `texts` and `digests` by the names of its parts, and `compiled` for them
    (`bringup/node/kept.py`)."""
    texts = dict(parts)
    data = [texts, {part: hashlib.sha256(text.encode()).hexdigest()[:40] for part, text in texts.items()}]
    packed = base64.b64encode(zlib.compress(json.dumps(data).encode(), 6)).decode()
    return (
        f"{_header()}import binascii, json, zlib\n"
        f"texts, digests = json.loads(zlib.decompress(binascii.a2b_base64('{packed}')))\n"
    )


@cache
def _header() -> str:
    return Path(kept.__file__).read_text(encoding="utf-8") + "\n"


FOR_TYPES = frozenset(("collections.abc", "typing"))
"""Modules from which most names are only there for annotations, which nothing evaluates."""


@cache
def lean(text: str) -> str:
    """A text of the library without the imports that only annotations need: they would be a fifth of what a node spends
    on a module. Its lines keep their numbers."""
    tree = ast.parse(text)
    if not any(isinstance(row, ast.ImportFrom) and row.module == "__future__" for row in tree.body):
        return text
    used = _evaluated(tree)
    lines = text.split("\n")
    for row in tree.body:
        names = (
            {alias.asname or alias.name for alias in row.names} if isinstance(row, ast.ImportFrom) else set()
        )
        if names and row.module in FOR_TYPES and not names & used:  # type: ignore[attr-defined]
            assert row.end_lineno is not None
            lines[row.lineno - 1 : row.end_lineno] = [""] * (row.end_lineno - row.lineno + 1)
    return "\n".join(lines)


def _evaluated(tree: ast.AST) -> set[str]:
    """Names that a text uses outside of its annotations."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found.add(node.id)
    return found


def _named(text: str) -> set[str]:
    """Files of the library that a text imports."""
    words = {word for names in IMPORTS.findall(text) for word in re.findall(r"\w+", names)}
    return {word for word in {*words, *PARTS.findall(text)} if (NODE / f"{word}.py").is_file()}


def call(
    options: Mapping[str, Any],
    check: bool,
    lock: holding.Wanted | None = None,
    last: Mapping[str, Any] | None = None,
) -> str:
    """The end of a program: what is asked, how the node is to be held before, and what to go on with when that changed
    something (`light.run`). Values that JSON has not become text, as Ansible's tagged ones do."""
    more: dict[str, Any] = {"lock": dict(lock)} if lock else {}
    more |= {"last": dict(last)} if last else {}
    request = json.dumps({"options": dict(options), "check": check, **more}, default=str)
    return f"light.run(name, texts, digests, compiled, json.loads({request!r}))\n"


def answer(name: str, code: int, out: str, err: str) -> dict[str, Any]:
    """What a module said; a failure with the last lines of what came instead when it said nothing."""
    for line in reversed(out.splitlines()):
        if line.startswith(light.MARK):
            found: dict[str, Any] = json.loads(line.removeprefix(light.MARK))
            return found
    said = "; ".join((err.strip() or out.strip()).splitlines()[-SAID_LINES:]) or "no output"
    return {"failed": True, "msg": f"{name} ended without an answer (exit {code}): {said}", "rc": code}


def interpreter(known: Mapping[str, Any]) -> str:
    """The node's Python: what the inventory says, when that is a path."""
    given = str(known.get("ansible_python_interpreter") or "")
    return given if given.startswith("/") else PYTHON


class Carried:
    """Beside Ansible's `ActionBase`, in front of it: `_execute_module` takes this way where it is open.

    In a play with `node_lock_along` (the playbook's name), every call holds the node for the run before its module does
    anything, so that no call of its own is needed for it; `--skip-tags lock` and check mode hold nothing.
    """

    ONE_CALL = False
    """Whether an action is one call of its module, so that the last call on the node can go along with it."""

    def _execute_module(
        self, module_name: Any = None, module_args: Any = None, task_vars: Any = None, **more: Any
    ) -> dict[str, Any]:
        """As in ActionBase, for modules of this checkout."""
        me: Any = self
        known = task_vars or {}
        name = str(module_name or me._task.action)
        options = me._task.args if module_args is None else module_args
        lock = self._lock(known) if name not in LOCKS else None
        carried = not (more or me._task.async_val) and me._connection.is_pipelining_enabled(False)
        last = closing.along(known, lock, me._templar) if carried and self.ONE_CALL else None
        if carried and (found := self._asked(name, options, known, lock, last)):
            return closing.parted(found) if last else found
        if lock and (refused := self._held_apart(lock, known)):
            return refused
        given: dict[str, Any] = super()._execute_module(  # type: ignore[misc]
            module_name=name, module_args=options, task_vars=task_vars, **more
        )
        return given

    def _asked(
        self,
        name: str,
        options: Any,
        known: Mapping[str, Any],
        lock: holding.Wanted | None,
        last: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        """What the node says; nothing when it has no such Python."""
        me: Any = self
        command = f"{me._compute_environment_string()} {interpreter(known)} -I -S -".strip()

        def ask(wanted: holding.Wanted | None) -> dict[str, Any]:
            text = program(name, *([last["name"]] if last else []))
            text += call(options, me._task.check_mode, wanted, last)
            done = me._low_level_execute_command(command, in_data=text.encode("utf-8", "surrogateescape"))
            return {} if done["rc"] in NOT_FOUND else answer(name, done["rc"], done["stdout"], done["stderr"])

        return holding.through(ask, lock) if lock else ask(None)

    def _held_apart(self, lock: holding.Wanted, known: Mapping[str, Any]) -> dict[str, Any]:
        """Holds the node by a call of its own, where Ansible carries the module; nothing, or why it is not held."""

        def ask(wanted: holding.Wanted) -> dict[str, Any]:
            options = {"state": "held", **wanted}
            found: dict[str, Any] = super(Carried, self)._execute_module(  # type: ignore[misc]
                module_name=LOCKS[0], module_args=options, task_vars=known
            )
            return found

        found = holding.through(ask, lock)
        return found if found.get("failed") else {}

    def _lock(self, known: Mapping[str, Any]) -> holding.Wanted | None:
        """How this play holds the node; None where it holds nothing by its modules."""
        me: Any = self
        playbook = str(known.get(ALONG) or "")
        if not playbook or me._task.check_mode or "lock" in (known.get("ansible_skip_tags") or ()):
            return None
        # Workers are children of ansible-playbook: its life is the run's.
        return holding.wanted(known, holding.identity(os.getppid(), playbook))
