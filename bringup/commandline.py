"""How `invoke` ends: a wrong command line is one message and exit 2, an operator's error has no traceback.

invoke itself exits 1 for an unknown flag and shows a traceback for every exception. `install` wraps the two
steps of its `Program` where that is decided; nothing else of it is touched.
"""

from __future__ import annotations

import inspect
import itertools
import os
import re
import shlex
import stat
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from invoke import exceptions
from invoke.program import Program

from bringup.errors import BringupError, Exit, Problem, UsageError, did_you_mean

TRACEBACK_VARIABLE = "BRINGUP_TRACEBACK"
"""Set it to see the traceback of an internal error."""

_UNKNOWN = re.compile(r"No idea what '(?P<token>.*)' is!")
_remainder: tuple[str, ...] = ()
_twins: str | None = None
_faults: list[str] = []


def remainder() -> str:
    """What stood after `--`, as shell text: one word as it is (it may be a whole line), more with quotes kept."""
    return _remainder[0] if len(_remainder) == 1 else shlex.join(_remainder)


def piped() -> bool:
    """Is standard input a pipe or a file, so that somebody means it to be read?"""
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def install() -> None:
    """Wraps invoke's parsing and executing; calling it twice changes nothing more."""
    if getattr(Program, "bringup_installed", False):
        return
    Program.parse_tasks = _parsing(Program.parse_tasks)  # type: ignore[method-assign, assignment]
    Program.execute = _executing(Program.execute)  # type: ignore[method-assign, assignment]
    Program.bringup_installed = True  # type: ignore[attr-defined]


def show(error: BringupError) -> None:
    """Every problem of an error, one a line, on stderr."""
    for problem in error.problems:
        print(problem, file=sys.stderr)


def _parsing(inner: Callable[[Program], None]) -> Callable[[Program], None]:
    def parse_tasks(self: Program) -> None:
        global _twins, _faults
        try:
            words, _twins, _faults = without_twins(self.core.unparsed)
        except UsageError as error:
            raise exceptions.Exit(str(error), code=int(Exit.USAGE)) from None
        self.core.unparsed = joined(words, set(_task_names(self)))
        # Making contexts takes the help texts out of the tasks, so they are made once.
        contexts = self.collection.to_contexts(ignore_unknown_help=self.config.tasks.ignore_unknown_help)
        self.collection.to_contexts = lambda **_: contexts  # type: ignore[method-assign]
        _refuse_unknown_flags(self, contexts)
        try:
            try:
                inner(self)
            except exceptions.ParseError as error:
                given = _left_out(self, error)
                if not given:
                    raise
                self.core.unparsed = [*self.core.unparsed, *given]
                inner(self)
        except exceptions.ParseError as error:
            raise exceptions.Exit(_message(self, error), code=int(Exit.USAGE)) from None
        except ValueError as error:
            value = str(error).rpartition(":")[2].strip()
            where = _flag_of(self, value.strip("'"))
            raise exceptions.Exit(f"{where}{value} should be a number", code=int(Exit.USAGE)) from None

    return parse_tasks


def _refuse_unknown_flags(program: Program, contexts: Sequence[Any]) -> None:
    """Raises Exit for an unknown flag, which invoke would take for a positional argument's value."""
    words = program.core.unparsed
    context = next((one for one in contexts if words and words[0] in _all_names(one)), None)
    if context is None:
        return
    if "-" in words and context.positional_args:
        # invoke takes a lone hyphen for a flag; here it means standard input
        flag = f"--{context.positional_args[0].name}"
        joined = [word for word, after in itertools.pairwise([*words, ""]) if (word, after) != (flag, "-")]
        program.core.unparsed = words = [f"{flag}=-" if word == "-" else word for word in joined]
    flags = {**program.initial_context.flags, **context.flags, **dict.fromkeys(context.inverse_flags)}
    expecting = False
    for word in words[1:]:
        if expecting:
            expecting = False
            continue
        name, equals, _ = word.partition("=")
        if word.startswith("--") and name not in flags:
            hint = did_you_mean(name, [flag for flag in flags if flag.startswith("--")])
            text = f"{words[0]}: unknown flag {name}. {hint}".rstrip()
            raise exceptions.Exit(f"{text}\nSee: invoke --help {words[0]}", code=int(Exit.USAGE))
        argument = flags.get(name)
        expecting = argument is not None and argument.takes_value and not equals


def _flag_of(program: Program, value: str) -> str:
    """`--flag: ` for the flag that was given a value, "" when it cannot be told."""
    words = list(program.core.unparsed)
    flags = [word.partition("=")[0] for word in words if word.startswith("-") and word.endswith(f"={value}")]
    flags += [flag for flag, word in itertools.pairwise(words) if word == value]
    return f"{flags[0]}: " if flags and flags[0].startswith("-") else ""


def _all_names(context: Any) -> set[str]:
    return {context.name, *context.aliases}


def joined(words: Sequence[str], tasks: set[str]) -> list[str]:
    """`history show X` as invoke wants it, `history.show X`, when there is such a task."""
    if len(words) > 1 and f"{words[0]}.{words[1]}" in tasks:
        return [f"{words[0]}.{words[1]}", *words[2:]]
    return list(words)


def _left_out(program: Program, error: exceptions.ParseError) -> list[str]:
    """Empty values for positional arguments that have a default; invoke knows only required ones."""
    context: Any = error.context
    if "did not receive required positional arguments" not in str(error) or context is None:
        return []
    names = inspect.signature(program.collection[context.name].body).parameters
    missing = [argument.name for argument in context.missing_positional_args]
    if any(names[name.replace("-", "_")].default is inspect.Parameter.empty for name in missing):
        return []
    return [f"--{name}=" for name in missing]


TWINS, FAULT = "--twins", "--fault"
"""Options of every command on an inventory: work on twins of its hosts, with faults (docs/twins.md)."""

REAL_ARCH = "real-arch"
"""Value of `--twins`: each twin runs as its host's architecture, under emulation where the machine has another."""


def without_twins(words: Sequence[str]) -> tuple[list[str], str | None, list[str]]:
    """A command line without `--twins[=real-arch]` and `--fault NAME`: the rest, the twins that are meant (None: none;
    "" or `REAL_ARCH`), and the faults.

    Raises UsageError for a `--fault` without a name, and another value of `--twins`.
    """
    rest: list[str] = []
    faults: list[str] = []
    twins: str | None = None
    given = list(words)
    while given:
        word = given.pop(0)
        name, equals, value = word.partition("=")
        if name == TWINS:
            if equals and value != REAL_ARCH:
                raise UsageError(
                    Problem(
                        f"{TWINS}={value}",
                        f"is neither {TWINS} nor {TWINS}={REAL_ARCH}",
                        "Write one of these.",
                    )
                )
            twins = value
        elif name == FAULT:
            if not equals and not given:
                raise UsageError(Problem(FAULT, "needs the name of a fault"))
            faults.append(value if equals else given.pop(0))
        else:
            rest.append(word)
    if faults and twins is None:
        raise UsageError(Problem(FAULT, "is for twins", "Add --twins."))
    return rest, twins, faults


def _dress(program: Program) -> None:
    """Brings the twins up that --twins asks for, and puts their inventory in the place of the one named.

    Raises UsageError for a command without an inventory, and what `twins.dress` raises.
    """
    if _twins is None:
        return
    from bringup import twins

    named = [task for task in program.tasks if "inventory" in task.args and task.args["inventory"].value]
    if not named:
        raise UsageError(Problem(TWINS, "is for commands on an inventory", "Add --inventory NAME."))
    for task in named:
        limit = task.args["limit"].value if "limit" in task.args else None
        inventory = str(task.args["inventory"].value)
        folder = twins.dress(inventory, _faults, limit or None, real_arch=_twins == REAL_ARCH)
        task.args["inventory"].value = str(folder)


def _executing(inner: Callable[[Program], None]) -> Callable[[Program], None]:
    def execute(self: Program) -> None:
        global _remainder
        # invoke joins these words with spaces, which loses their quotes.
        _remainder = tuple(self.argv[self.argv.index("--") + 1 :]) if "--" in self.argv else ()
        try:
            _dress(self)
            inner(self)
        except BringupError as error:
            show(error)
            raise exceptions.Exit(code=int(error.code)) from None
        except exceptions.CollectionNotFound:
            raise
        except KeyboardInterrupt:
            raise exceptions.Exit("Interrupted.", code=int(Exit.INTERRUPTED)) from None
        except BrokenPipeError:
            # The reader of our output (`| head`) has gone; the interpreter must not complain while it closes.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise exceptions.Exit(code=int(Exit.DONE)) from None
        except (exceptions.Exit, exceptions.UnexpectedExit):
            raise
        except Exception as error:
            raise exceptions.Exit(_internal(error), code=int(Exit.INTERNAL)) from None

    return execute


def _internal(error: Exception) -> str:
    if os.environ.get(TRACEBACK_VARIABLE):
        traceback.print_exc()
    last = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"Internal error: {type(error).__name__}: {error} ({last.filename}:{last.lineno}). "
        f"{TRACEBACK_VARIABLE}=1 shows the traceback."
    )


def _message(program: Program, error: exceptions.ParseError) -> str:
    text = str(error)
    context: Any = error.context
    command = getattr(context, "name", None)
    match = _UNKNOWN.search(text)
    missing = re.search(r"'(.+)' did not receive required positional arguments: (.+)", text)
    if missing is not None:
        names = missing[2].replace("'", "")
        return f"{missing[1]}: missing {names}\nSee: invoke --help {missing[1]}"
    if match is None:
        flag = re.search(r"<Argument: ([\w-]+)", text)
        said = f"--{flag[1]} needs a value" if flag and "needed value" in text else text
        return f"{command}: {said}\nSee: invoke --help {command}" if command else said
    token = match["token"]
    tasks = _task_names(program)
    if token.startswith("-"):
        flags = list(getattr(context, "flags", {})) if command else []
        where = f"{command}: " if command else ""
        hint = did_you_mean(token.split("=", 1)[0], flags)
        more = f"See: invoke --help {command}" if command else "See: invoke --list"
        return f"{where}unknown flag {token}. {hint}".rstrip() + f"\n{more}"
    where = f"{command}: unexpected argument" if command else "unknown command"
    hint = did_you_mean(token, tasks)
    more = f"invoke --help {command}" if command else "invoke --list"
    return f'{where} "{token}". {hint}'.rstrip() + f"\nSee: {more}"


def _task_names(program: Program) -> list[str]:
    return [
        *program.collection.task_names,
        *(a for names in program.collection.task_names.values() for a in names),
    ]
