"""Shell text that asks every command of a pipe how it ended lets every command end.

A reader that leaves early (`head`, `grep -q`) kills a writer that has more to say. With `pipefail` the whole pipe has
failed then (141), though nothing was wrong: seldom, and on a busy machine.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import yaml

from bringup import ROOT

CASES = ROOT / "tests" / "cases" / "shell"
PIPE = re.compile(r"(?<!\|)\|&?(?!\|)")
ENDS = set("();<>|&\n")
LINES = {"|": 1, ">": 1}
"""Lines between a YAML scalar's mark and its text, by its style."""

MARK = "pipefail"
PLACES = (".ci", ".config", "bench", "bringup", "inventories", "playbooks", "plugins", "roles", "tests")
KINDS = (".yml", ".yaml", ".py", ".sh", ".j2", "")


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Shell text in a file that sets pipefail: the number of its first line, and the text.

    A whole script; in YAML each value by itself; in Python all strings, since a command may be made of several.
    """
    whole = path.read_text()
    if MARK not in whole:
        return
    if path.suffix in (".yml", ".yaml"):
        yield from (found for found in scalars(yaml.compose(whole)) if MARK in found[1])
    elif path.suffix == ".py":
        strings = [node for node in ast.walk(ast.parse(whole)) if isinstance(node, ast.Constant)]
        found = [(node.lineno, node.value) for node in strings if isinstance(node.value, str)]
        yield from (found if any(MARK in text for _, text in found) else [])
    elif whole.startswith("#!") or path.suffix in (".sh", ".j2"):
        yield 1, whole


def scalars(node: yaml.Node | None) -> Iterator[tuple[int, str]]:
    """Every text of a YAML document with the number of its first line."""
    if isinstance(node, yaml.ScalarNode):
        yield node.start_mark.line + 1 + LINES.get(node.style or "", 0), node.value
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from scalars(item)
    elif isinstance(node, yaml.MappingNode):
        for pair in node.value:
            yield from scalars(pair[1])


def command(text: str) -> list[str]:
    """The words of the first command in a shell's text."""
    lexer = shlex.shlex(
        re.sub(r"^(\s|#[^\n]*\n)+", "", text), posix=True, punctuation_chars="".join(sorted(ENDS))
    )
    lexer.commenters = ""
    lexer.whitespace = " \t"
    lexer.whitespace_split = True
    words: list[str] = []
    try:
        for word in lexer:
            if set(word) <= ENDS:
                break
            words.append(word)
    except ValueError:
        # A quote that opened before the pipe: what has been read is the command.
        pass
    return words


def leaves_early(words: Sequence[str]) -> bool:
    """May a command end before it has read all that comes through its pipe?"""
    while words and (words[0] == "sudo" or re.fullmatch(r"\w+=.*", words[0])):
        words = words[1:]
    name, rest = (Path(words[0]).name, words[1:]) if words else ("", [])
    match name:
        case "head":
            return not re.search(r"-[nc] ?-\d", " ".join(rest))
        case "grep" | "egrep" | "fgrep" | "zgrep":
            return any(re.match(r"-(?!-)\w*[qm]|--quiet|--silent|--max-count", word) for word in rest)
        case "awk" | "gawk" | "mawk":
            return any(re.search(r"\bexit\b", re.sub(r"\bEND\s*\{[^}]*\}", "", word)) for word in rest)
        case "sed":
            return any(re.search(r"(^|[;{}\s\d$/])[qQ]\s*\d*\s*([;}]|$)", word) for word in rest)
        case _:
            return name in ("read", "true", ":")


def early(path: Path) -> list[int]:
    """Numbers of the lines of a file with a pipe whose reader may leave early."""
    return sorted(
        first + text.count("\n", 0, pipe.start())
        for first, text in texts(path)
        for pipe in PIPE.finditer(text)
        if leaves_early(command(text[pipe.end() :].replace("\\\n", "  ")))
    )


@pytest.mark.parametrize("case", sorted(CASES.iterdir()), ids=lambda path: path.name)
def test_a_reader_that_leaves_early_is_found(case: Path) -> None:
    marked = [
        number for number, line in enumerate(case.read_text().splitlines(), 1) if line.endswith("# early")
    ]
    assert early(case) == marked


def test_no_pipe_under_pipefail_has_a_reader_that_leaves_early() -> None:
    paths = [ROOT / "inv", *(path for place in PLACES for path in sorted((ROOT / place).rglob("*")))]
    ours = [path for path in paths if path.suffix in KINDS and path.is_file() and CASES not in path.parents]
    assert len([path for path in ours if any(texts(path))]) > 20
    found = [f"{path.relative_to(ROOT)}:{number}" for path in ours for number in early(path)]
    assert found == [], "read the whole: sed -n 1p, awk without exit, grep >/dev/null"
