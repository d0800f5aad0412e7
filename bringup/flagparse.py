"""Reading a command line as argparse would, from a flag table instead of the engine's parser."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bringup.flagtable import Flag, FlagTable

_NEGATIVE_NUMBER = re.compile(r"^-\d+$|^-\d*\.\d+$")
_HUMAN_INT = re.compile(r"(\d+)(?:\.\d+)?[kKmMgGtT]")
_SHELL_VARIABLE = re.compile(r"\$\{?[A-Za-z_]\w*|\$\(|`")


@dataclass(frozen=True, slots=True)
class Given:
    """One option of a command line: how it was `spelled`, the `flag` meant (None: unknown) and its words.

    `attached` says that the value came with "="; `key` is the dotted part of `--flag.key value`;
    `matches` lists the candidates of an ambiguous abbreviation; `option` is the full name meant.
    """

    spelled: str
    flag: Flag | None
    words: tuple[str, ...]
    attached: bool = False
    key: str = ""
    negated: bool = False
    matches: tuple[str, ...] = ()
    option: str = ""


@dataclass(frozen=True, slots=True)
class Parsed:
    """A command line against a table: options in order, and words that belong to none."""

    given: tuple[Given, ...]
    strays: tuple[str, ...]

    def of(self, dest: str) -> list[Given]:
        return [item for item in self.given if item.flag is not None and item.flag.dest == dest]


def parse(table: FlagTable, argv: Sequence[str]) -> Parsed:
    """Split `argv` into options and values, with argparse's rules for prefixes, "=", nargs and "--"."""
    given: list[Given] = []
    strays: list[str] = []
    position = 0
    while position < len(argv):
        word = argv[position]
        position += 1
        if word == "--":
            strays += argv[position:]
            break
        if not is_option(table, word):
            strays.append(word)
            continue
        item = _identify(table, word)
        if item.flag is None and not item.attached:
            taken = _values_after(table, argv, position, "*")
        elif item.attached:
            taken = 0
        else:
            taken = _values_after(table, argv, position, _nargs(item))
        words = (*item.words, *argv[position : position + taken])
        given.append(replace(item, words=words))
        position += taken
    return Parsed(tuple(given), tuple(strays))


def _nargs(item: Given) -> int | str | None:
    if item.key:
        return None
    assert item.flag is not None
    return 0 if item.negated else item.flag.nargs


def _values_after(table: FlagTable, argv: Sequence[str], start: int, nargs: int | str | None) -> int:
    """How many words from `start` on an option with `nargs` takes."""
    most = nargs if isinstance(nargs, int) else len(argv) if nargs in ("*", "+") else 1
    count = 0
    while count < most and start + count < len(argv) and not _ends_values(table, argv[start + count]):
        count += 1
    return count


def _ends_values(table: FlagTable, word: str) -> bool:
    return word == "--" or is_option(table, word)


def is_option(table: FlagTable, word: str) -> bool:
    """Whether argparse reads a word as an option: `-5` and words with spaces are values."""
    if len(word) < 2 or word[0] != "-":
        return False
    name = word.split("=", 1)[0]
    if word in table.options or name in table.options:
        return True
    if _NEGATIVE_NUMBER.match(word):
        return False
    return " " not in word or bool(_candidates(table, _spelling(table, name)))


def _spelling(table: FlagTable, name: str) -> str:
    """vLLM's parser reads underscores before the first dot as dashes."""
    if not (table.underscores and name.startswith("--")):
        return name
    head, dot, tail = name.partition(".")
    return "--" + head[2:].replace("_", "-") + dot + tail


def _candidates(table: FlagTable, name: str) -> list[str]:
    if not (table.prefixes and name.startswith("--")):
        return []
    return [option for option in table.options if option.startswith(name)]


def _identify(table: FlagTable, word: str) -> Given:
    if word in table.options:
        return _known(table, word, word, (), False)
    name, equals, value = word.partition("=")
    words = (value,) if equals else ()
    spelling = _spelling(table, name)
    if spelling in table.options:
        return _known(table, name, spelling, words, bool(equals))
    head, dot, key = spelling.partition(".")
    if table.dotted and dot and head in table.options:
        return Given(name, table.options[head], words, bool(equals), key=key.rstrip("+"), option=head)
    if not name.startswith("--"):
        return _short(table, word) or Given(name, None, words, bool(equals))
    found = _candidates(table, spelling)
    if len(found) == 1:
        return _known(table, name, found[0], words, bool(equals))
    return Given(name, None, words, bool(equals), matches=tuple(sorted(found)))


def _known(table: FlagTable, spelled: str, option: str, words: tuple[str, ...], attached: bool) -> Given:
    flag = table.options[option]
    return Given(spelled, flag, words, attached, negated=option in flag.negatives, option=option)


def _short(table: FlagTable, word: str) -> Given | None:
    """`-O3` is `-O 3`."""
    flag = table.options.get(word[:2])
    if flag is None or len(word) < 3:
        return None
    return Given(word[:2], flag, (word[2:].removeprefix("="),), attached=True)


def _is_int(text: str) -> bool:
    try:
        int(text)
    except ValueError:
        return False
    return True


def _is_float(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _is_json_or_str(text: str) -> bool:
    return not re.match(r"(?s)^\s*{.*}\s*$", text) or _is_json(text)


def _is_human_int(text: str) -> bool:
    found = _HUMAN_INT.fullmatch(text.strip())
    if found is None:
        return _is_int(text)
    return not ("." in text and text.strip()[-1].isupper())


def _is_human_int_or_auto(text: str) -> bool:
    return text.strip() == "-1" or text.strip().lower() == "auto" or _is_human_int(text)


_CHECKS: dict[str, tuple[Callable[[str], bool], str]] = {
    "int": (_is_int, "a whole number"),
    "float": (_is_float, "a number"),
    "json": (_is_json, "JSON"),
    "json_or_str": (_is_json_or_str, "JSON or a name"),
    "human_int": (_is_human_int, "a whole number, or one such as 8k (8000) or 8K (8192)"),
    "human_int_or_auto": (_is_human_int_or_auto, 'a whole number, one such as 8k or 8K, or "auto"'),
}


def is_variable(text: str) -> bool:
    """Whether a word still holds a shell variable or substitution, so that its value is not known here."""
    return bool(_SHELL_VARIABLE.search(text))


def wrong_type(flag: Flag, text: str) -> str:
    """What the value should be, or "" when it is that."""
    if flag.optional and text in ("", "None"):
        return ""
    check, wanted = _CHECKS.get(flag.kind, (None, ""))
    return "" if check is None or check(text) else wanted


def wrong_choice(flag: Flag, text: str) -> bool:
    """Whether a value is none of the flag's choices (numbers compare as numbers)."""
    if not flag.choices or flag.open_choices or (flag.optional and text in ("", "None")):
        return False
    word = text.lower().replace("-", "_") if flag.kind == "name" else text
    return not any(str(choice) == word or _same_number(choice, word) for choice in flag.choices)


def _same_number(choice: Any, text: str) -> bool:
    return (
        isinstance(choice, (int, float))
        and not isinstance(choice, bool)
        and _is_float(text)
        and (float(text) == choice)
    )
