"""Breaks inventories and catalogs in thousands of ways: `python tests/fuzz_loaders.py [N] [SEED]`.

Whatever is done to a file, its reader gives a plan or a UsageError in which every problem says where and
what. Anything else is a fault of the reader: it is printed with the broken text, and the program ends with 1.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bringup import inventory, plan  # noqa: E402 (the checkout must be on the path first)
from bringup.catalog import KINDS, Catalog  # noqa: E402
from bringup.errors import UsageError  # noqa: E402
from bringup.inventory import Host, Inventory  # noqa: E402

COUNT = 10_000
NASTY: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**70, 1e308, float("nan"), float("inf"), "", " ", "{{ x }}", "../..",
    "100% $HOME",
    "\u202e\u00fc", "a" * 5000, "--tp", [], [None], [[]], {}, {"": None}, {"a": {"b": []}}, {1: 2}, "0",
    "yes", "\n",
)  # fmt: skip
SCRAPS = (
    "*a", "&a [*a]", "<<: *x", "!!python/object:os.system {}", "!vault |\n  x", "\t", "\u0000", "{",
    "]", ": ", "- ", "#", "\ufeff", "? a", "2020-01-01", "0x1f", "1_000", "~", "!!binary QQ==",
    "a: 1\na: 2\n", "%YAML 1.1\n---\n",
)  # fmt: skip


def broken(text: str, dice: random.Random) -> str:
    """A YAML text with one to three things done to it: to its data, or to its letters."""
    for _ in range(dice.randint(1, 3)):
        change: Callable[[str, random.Random], str] = dice.choice((of_data, of_data, of_data, of_letters))
        text = change(text, dice)
    return text


def of_data(text: str, dice: random.Random) -> str:
    """A key renamed, taken out, doubled elsewhere, or given another value."""
    try:
        data = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError):
        return of_letters(text, dice)
    places = list(containers(data))
    if not places:
        return of_letters(text, dice)
    place = dice.choice(places)
    key = dice.choice(list(place) if isinstance(place, dict) else list(range(len(place))))
    deed = dice.randrange(4)
    if deed == 0:
        place[key] = dice.choice(NASTY)
    elif deed == 1:
        del place[key]
    elif deed == 2 and isinstance(place, dict):
        place[typo(str(key), dice)] = place.pop(key)
    else:
        other = dice.choice(places)
        place[key] = dice.choice(list(other.values()) if isinstance(other, dict) else other)
    try:
        return yaml.safe_dump(data, allow_unicode=True, sort_keys=False)
    except (yaml.YAMLError, RecursionError, TypeError):
        return text


def containers(data: Any, depth: int = 0) -> list[Any]:
    """Every mapping and list inside that is not empty."""
    if depth > 8 or not isinstance(data, (dict, list)) or not data:
        return []
    inner = data.values() if isinstance(data, dict) else data
    return [data, *(found for value in inner for found in containers(value, depth + 1))]


def typo(word: str, dice: random.Random) -> str:
    """A word with one letter wrong."""
    at = dice.randrange(len(word) + 1)
    return word[:at] + dice.choice("abz_-9 ") + word[at + dice.randrange(2) :]


def of_letters(text: str, dice: random.Random) -> str:
    """A piece cut out, put in, or the text ended early."""
    at = dice.randrange(len(text) + 1)
    deed = dice.randrange(3)
    if deed == 0:
        return text[:at] + dice.choice(SCRAPS) + text[at:]
    return text[:at] if deed == 1 else text[:at] + text[at + dice.randint(1, 20) :]


class Fuzz:
    """A scratch copy of catalog and inventories, of which one file at a time is broken."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        leave = shutil.ignore_patterns("failures", "rules", "suites", "make")
        shutil.copytree(ROOT / "catalog", folder / "catalog", ignore=leave)
        shutil.copytree(ROOT / "inventories", folder / "inventories")
        self.known = Catalog(folder / "catalog")
        self.used = users(self.known)

    def once(self, dice: random.Random) -> str | None:
        """Breaks one file and reads it. Returns what was wrong with the reader, or None."""
        kinds = (("inventories", "**/*.yml"), *((f"catalog/{kind}", "*.yml") for kind in KINDS))
        name, pattern = dice.choice((kinds[0], kinds[0], *kinds))
        path = dice.choice(sorted((self.folder / name).glob(pattern)))
        whole = path.read_text(encoding="utf-8")
        text = broken(whole, dice)
        path.write_text(text, encoding="utf-8", errors="replace")
        try:
            self.read(path)
        except UsageError as error:
            return fault(error) and f"{fault(error)}\n{path}\n{text}"
        except Exception:
            return f"{traceback.format_exc()}\n{path}\n{text}"
        finally:
            path.write_text(whole, encoding="utf-8")
        return None

    def read(self, path: Path) -> None:
        """Whatever reads this file in earnest. Raises UsageError for what is wrong."""
        if "inventories" in path.parts:
            top = path.relative_to(self.folder / "inventories").parts[0]
            plan.resolve(inventory.read(str(self.folder / "inventories" / top)), self.known)
            return
        kind, name = path.parent.name, path.stem
        known = Catalog(self.folder / "catalog")
        profile, platform = (name, None) if kind == "profiles" else self.used.get((kind, name), (None, None))
        if profile is None:
            known.entry(kind, name)
            return
        platform = platform or known.profile(profile).platforms[0]
        service = {"name": "s", "profile": profile, "port": 8000}
        host = Host("h", (), {"node_platform": platform, "node_services": [service]})
        plan.resolve(Inventory("fuzz", self.folder, (host,)), known)


def users(known: Catalog) -> dict[tuple[str, str], tuple[str, str | None]]:
    """For each entry a profile that uses it, and the platform to use it on."""
    found: dict[tuple[str, str], tuple[str, str | None]] = {}
    for name in known.names("profiles"):
        profile = known.profile(name)
        for platform in profile.platforms:
            found["platforms", platform] = (name, platform)
        found["engines", profile.engine] = found["models", profile.model] = (name, profile.platforms[0])
    return found


def fault(error: UsageError) -> str | None:
    """What is wrong with an error: each problem says where and what, and no text is Python's."""
    if not error.problems:
        return "no problem in it"
    for problem in error.problems:
        if not problem.what or not problem.where:
            return f"says not where or what: {problem!r}"
        if "Traceback" in str(problem) or "object at 0x" in str(problem):
            return f"shows Python: {problem}"
    return None


def run(count: int, seed: int) -> list[str]:
    """Faults found in `count` tries."""
    dice = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        fuzz = Fuzz(Path(folder))
        return [found for _ in range(count) if (found := fuzz.once(dice))]


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:3]]
    faults = run(numbers[0] if numbers else COUNT, numbers[1] if len(numbers) > 1 else 1)
    print("\n\n".join(faults[:5]))
    print(f"{len(faults)} faults", file=sys.stderr)
    sys.exit(1 if faults else 0)
