"""Errors for the operator: where, what, what to do; each kind has its exit code."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of every command (docs/commands.md prints this table)."""

    DONE = 0
    INTERNAL = 1
    USAGE = 2
    REFUSED = 3
    FAILED = 4
    UNREACHABLE = 5
    PENDING = 6
    GATE = 7
    LOCKED = 8
    INTERRUPTED = 130


EXIT_MEANING: dict[Exit, str] = {
    Exit.DONE: "done",
    Exit.INTERNAL: "internal error",
    Exit.USAGE: "usage, inventory or catalog wrong",
    Exit.REFUSED: "preflight refused",
    Exit.FAILED: "a host failed",
    Exit.UNREACHABLE: "a host could not be reached",
    Exit.PENDING: "drift or pending changes (--check)",
    Exit.GATE: "a gate failed and was rolled back",
    Exit.LOCKED: "locked, refused or not confirmed",
    Exit.INTERRUPTED: "interrupted",
}


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: `where` (file, key, host), `what`, and what to do about it."""

    where: str
    what: str
    remedy: str = ""

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}. {self.remedy}" if self.remedy else text


class BringupError(Exception):
    """Base of every error that an operator may see; never shown with a traceback."""

    code: Exit = Exit.INTERNAL

    def __init__(self, problems: Problem | str | Iterable[Problem]) -> None:
        if isinstance(problems, str):
            problems = Problem("", problems)
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class UsageError(BringupError):
    """Command line, inventory or catalog wrong."""

    code = Exit.USAGE


class PreflightRefused(BringupError):
    """The nodes are not as the plan needs them."""

    code = Exit.REFUSED


class HostFailed(BringupError):
    """A host failed in the middle of something."""

    code = Exit.FAILED


class HostUnreachable(BringupError):
    """A host could not be reached."""

    code = Exit.UNREACHABLE


class GateFailed(BringupError):
    """A measured gate failed."""

    code = Exit.GATE


class Locked(BringupError):
    """Somebody else holds the lock, or the operator did not confirm."""

    code = Exit.LOCKED


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`Did you mean "x"?`, or the empty string when nothing known is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f'Did you mean "{close[0]}"?' if close else ""


def unknown(kind: str, word: str, known: Sequence[str]) -> tuple[str, str]:
    """What and remedy for a name that does not exist: a suggestion, else the known names."""
    listed = ", ".join(sorted(known)[:12]) or "none"
    return f'unknown {kind} "{word}"', did_you_mean(word, known) or f"Known: {listed}."
