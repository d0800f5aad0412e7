"""Our flag tables and our reading of command lines against the engines' own parsers.

    python tests/parsers/compare.py                         SGLang 0.5.10.post1 (6 MB to download; in CI)
    python tests/parsers/compare.py vllm-0.33.0 --tree DIR  any table; DIR: unpacked wheel or site-packages

Names must agree wholly, choices and the number of values for at least 98 in 100 flags, and so must the
verdict (taken or refused) on a few hundred command lines made from the table: good values, wrong ones, none,
too many, abbreviations, "=" forms.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bringup import flags, flagtable  # noqa: E402
from bringup.flagcheck import download  # noqa: E402
from bringup.flags import FlagContext, parser_findings  # noqa: E402
from bringup.flagtable import Flag, FlagTable  # noqa: E402

CACHE = ROOT / ".cache" / "parsers"
IN_CI = ("sglang-0.5.10.post1",)
LIBRARIES = ("msgspec==0.23.0", "pydantic==2.14.4", "regex==2026.11.19")
"""What the newer engines make their records with; SGLang 0.5.10.post1 needs none of them."""
LIMIT_S = 300
CHOICES_BAR = NARGS_BAR = VERDICTS_BAR = 0.98
SAMPLE = 4
"""Every how-many-th flag gets the costlier lines; the parser of 500 flags takes milliseconds a line."""


@dataclass(frozen=True)
class Score:
    """`same` of `total` agree; `differ` names the others."""

    what: str
    same: int
    total: int
    bar: float
    differ: tuple[str, ...]

    @property
    def good(self) -> bool:
        return self.total > 0 and self.same >= self.bar * self.total

    def __str__(self) -> str:
        share = 100 * self.same / max(self.total, 1)
        text = f"{'ok  ' if self.good else 'FAIL'} {self.what}: {self.same} of {self.total} ({share:.2f} %)"
        return text + (f"; differ: {', '.join(self.differ[:20])}" if self.differ else "")


def tree_of(engine: str, version: str) -> Path:
    """The wheel's Python files, downloaded once into .cache/parsers."""
    target = CACHE / f"{engine}-{version}"
    if target.is_dir():
        return target
    CACHE.mkdir(parents=True, exist_ok=True)
    wheel = download(engine, version, CACHE)
    part = target.with_suffix(".part")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(part, [name for name in archive.namelist() if name.endswith(".py")])
    part.rename(target)
    wheel.unlink()
    return target


def libraries() -> Path:
    """A folder with the libraries of LIBRARIES, installed once."""
    target = CACHE / "site"
    if not target.is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(target), *LIBRARIES]
        subprocess.run(command, check=True, timeout=LIMIT_S)
    return target


def ask(engine: str, folders: list[Path], lines: list[list[str]]) -> dict[str, Any]:
    """The real parser's options and its verdicts on lines."""
    program = Path(__file__).with_name("real.py")
    command = [sys.executable, "-S", str(program), engine, *map(str, folders)]
    done = subprocess.run(
        command, input=json.dumps(lines), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    if done.returncode:
        raise SystemExit(f"the parser of {engine} did not load:\n{done.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def lines_of(table: FlagTable) -> Iterator[list[str]]:
    """Command lines that a parser takes, and ones that it refuses, from the table itself."""
    base = [word for flag in table.flags if flag.required for word in (flag.name, "/m")]
    for position, flag in enumerate(flag for flag in table.flags if flag.dest != "help"):
        good = _good(flag)
        yield [*base, flag.name, *good]
        if position % SAMPLE:
            continue
        for make in (_wrong, _none, _attached, _shortened, _too_many, _misspelt):
            words = make(flag, good)
            if words is not None:
                yield [*base, *words]
    for flag in table.flags:
        for name in flag.negatives[:1]:
            yield [*base, name]


_VALUES = {
    "int": "3",
    "float": "0.5",
    "json": '{"a": 1}',
    "json_or_str": "name",
    "human_int": "8k",
    "human_int_or_auto": "auto",
}


def _good(flag: Flag) -> list[str]:
    if flag.nargs == 0:
        return []
    value = str(flag.choices[0]) if flag.choices else _VALUES.get(flag.kind, "/some/value")
    value = "{}" if flag.keys else value
    return [value] * (flag.nargs if isinstance(flag.nargs, int) else 1)


def _wrong(flag: Flag, good: list[str]) -> list[str] | None:
    if not good or not (flag.choices or flag.kind in ("int", "float", "json", "human_int")):
        return None
    return [flag.name, *["no-such-value"] * len(good)]


def _none(flag: Flag, good: list[str]) -> list[str] | None:
    return [flag.name] if good else None


def _attached(flag: Flag, good: list[str]) -> list[str] | None:
    return [f"{flag.name}={good[0] if good else 'true'}"] if len(good) < 2 else None


def _shortened(flag: Flag, good: list[str]) -> list[str] | None:
    return [flag.name[:-2], *good] if len(flag.name) > 6 else None


def _too_many(flag: Flag, good: list[str]) -> list[str] | None:
    return [flag.name, *good, "stray"]


def _misspelt(flag: Flag, good: list[str]) -> list[str] | None:
    return [flag.name + "-x", *good]


_PARSER_ERRORS = (
    "FLAG_UNKNOWN FLAG_OTHER_ENGINE FLAG_REMOVED FLAG_TOO_NEW FLAG_AMBIGUOUS FLAG_STRAY FLAG_VALUE FLAG_TYPE "
    "FLAG_CHOICE FLAG_REQUIRED"
).split()


def refused(table: FlagTable, words: list[str]) -> bool:
    """Whether we say that the parser stops at this line."""
    found = parser_findings(table, words, FlagContext())
    return any(finding.severity == "error" and finding.code in _PARSER_ERRORS for finding in found)


def scores(table: FlagTable, real: dict[str, Any], lines: list[list[str]]) -> list[Score]:
    """Every comparison of a table with its engine's parser."""
    theirs = {option["name"]: option for option in real["options"]}
    ours = table.options
    every, both = sorted(theirs.keys() | ours.keys()), sorted(theirs.keys() & ours.keys())
    named = Score(
        "names", len(both), len(every), 1.0, tuple(n for n in every if n not in theirs or n not in ours)
    )
    chosen = _score("choices", both, CHOICES_BAR, lambda n: _choices(ours[n]) == _set(theirs[n]["choices"]))
    counted = _score("values taken", both, NARGS_BAR, lambda n: _nargs(ours[n]) == theirs[n]["nargs"])
    pairs = list(zip(lines, real["verdicts"], strict=True))
    wrong = tuple(" ".join(words[-2:]) for words, said in pairs if bool(said) != refused(table, words))
    judged = Score("verdicts on lines", len(pairs) - len(wrong), len(pairs), VERDICTS_BAR, wrong)
    return [named, chosen, counted, judged]


def _score(what: str, names: list[str], bar: float, same: Callable[[str], bool]) -> Score:
    differ = tuple(name for name in names if not same(name))
    return Score(what, len(names) - len(differ), len(names), bar, differ)


def _choices(flag: Flag) -> set[str] | None:
    return None if flag.choices is None or flag.open_choices else {str(choice) for choice in flag.choices}


def _set(values: list[str] | None) -> set[str] | None:
    return None if values is None else set(values) - {"None"}


def _nargs(flag: Flag) -> int | str | None:
    return flag.nargs


def compare(name: str, tree: Path | None) -> list[Score]:
    """Compare one table (`engine-version`), against `tree` or the downloaded wheel."""
    engine, version = flagtable.split_name(name)
    table = flags.load_table(engine, version)
    folders = [tree or tree_of(engine, version)]
    if name not in IN_CI:
        folders.append(libraries())
    lines = list(lines_of(table))
    model = [["/m", *words] if engine == "vllm" else words for words in lines]
    return scores(table, ask(engine, folders, model), lines)


def main() -> int:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("table", nargs="*", default=list(IN_CI), help="engine-version; default: those of CI")
    options.add_argument(
        "--tree", type=Path, help="an unpacked wheel, or the site-packages of an environment"
    )
    chosen = options.parse_args()
    passed = failed = 0
    for name in chosen.table:
        start = time.monotonic()
        print(name)
        for score in compare(name, chosen.tree):
            print(f"  {score}")
            passed, failed = passed + score.good, failed + (not score.good)
        print(f"  {time.monotonic() - start:.1f} s")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    raise SystemExit(main())
