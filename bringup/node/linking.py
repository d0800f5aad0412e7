"""Can what an engine compiles at run time be linked on this node? One line, given to the node's own compiler.

Triton, FlashInfer and their like make small shared libraries when a server starts, and link them with the driver's
library. A file that is there proves nothing (a C library cut to what runs has no start files), so it is tried. What is
made lies in a folder that goes with the test, the compiler's own intermediate files too.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Runner = Callable[[Sequence[str], int], "tuple[int, str]"]

LIMIT_S = 20
"""Seconds that one link may take, its whole process group: it takes 0.1 s, and a hanging file system for ever."""

GRACE_S = 2


class Language(NamedTuple):
    """A language that engines compile: its name, what its compiler may be called, and a program of one line."""

    name: str
    compilers: tuple[str, ...]
    file: str
    source: str


LANGUAGES: Mapping[str, Language] = {
    "c": Language(
        "C",
        ("cc", "gcc", "clang"),
        "one.c",
        "#include <stdlib.h>\nint main(void) { return EXIT_SUCCESS; }\n",
    ),
    "c++": Language(
        "C++",
        ("c++", "g++", "clang++"),
        "one.cc",
        "#include <new>\nint main() { return *new int(0); }\n",
    ),
}

LENIENT = ("-Wl,--unresolved-symbols=ignore-all", "-Wl,--no-as-needed")
"""A stub or a driver's library needs symbols that are of no interest here: is it found?"""

PLACES = ("usr/local/bin", "usr/bin")
FOLDERS = (
    "opt/bringup/cuda/lib",
    *(f"usr/local/cuda*/{base}{end}" for base in ("lib64", "targets/*/lib") for end in ("", "/stubs")),
)
"""Where servers will have the linker look (role cuda_runtime): our links, then the toolkits and their stubs."""

SAID = 300
TELLING = re.compile(r"cannot find|cannot open|unable to|not found|error|No such file|No space|denied", re.I)


def compiler(root: Path, wish: str = "", language: str = "c") -> str | None:
    """The compiler that programs find (`wish`: the one of CC or CXX), None without one."""
    if wish.startswith("/"):
        return wish if (root / wish.lstrip("/")).exists() else None
    known = (wish,) if wish else LANGUAGES[language].compilers
    names = [f"{place}/{name}" for name in known for place in PLACES]
    return next((f"/{name}" for name in names if (root / name).exists()), None)


def folders(root: Path) -> list[str]:
    """Folders of FOLDERS that are there, as the node names them; one under two names counts once."""
    kept: dict[Path, str] = {}
    for pattern in FOLDERS:
        for path in sorted(root.glob(pattern)):
            if path.is_dir():
                kept.setdefault(path.resolve(), f"/{path.relative_to(root)}")
    return list(kept.values())


def link(
    compiler: str, libraries: Iterable[str], where: Iterable[str], runner: Runner, language: str = "c"
) -> tuple[int, str]:
    """Exit code and words of the compiler for a program of one line with `-l` each library, looked for in `where` too;
    124: LIMIT_S were over."""
    program = LANGUAGES[language]
    with tempfile.TemporaryDirectory(prefix="bringup-link-") as made:
        source = Path(made, program.file)
        try:
            source.write_text(program.source, encoding="utf-8")
        except OSError as error:
            return 1, f"{made}: {error.strerror}"
        argv = ["timeout", f"--kill-after={GRACE_S}", str(LIMIT_S), "env", "--unset=LIBRARY_PATH"]
        argv += [f"TMPDIR={made}", "LC_ALL=C", compiler, str(source), "-o", f"{made}/one"]
        argv += [f"-L{folder}" for folder in where]
        return runner([*argv, *LENIENT, *(f"-l{name}" for name in libraries)], LIMIT_S + 2 * GRACE_S)


def tried(
    compiler: str | None,
    libraries: Sequence[str],
    where: Sequence[str],
    runner: Runner,
    language: str = "c",
) -> dict[str, Any]:
    """What came of it: `language` (its name), `compiler`, `links` (can it make a program at all? None: there is no
    compiler), `lost` (libraries that cannot be linked), `said` (the telling words of a failure), `version` (of one
    that failed)."""
    found: dict[str, Any] = {
        "language": LANGUAGES[language].name,
        "compiler": compiler,
        "links": None,
        "lost": [],
        "said": "",
        "version": "",
    }
    if compiler is None:
        return found
    code, said = link(compiler, libraries, where, runner, language)
    if code == 0:
        return {**found, "links": True}
    if libraries:
        bare, words = link(compiler, (), where, runner, language)
        if bare == 0:
            lost = [name for name in libraries if link(compiler, (name,), where, runner, language)[0] != 0]
            return {**found, "links": True, "lost": lost or list(libraries), "said": telling(code, said)}
        code, said = bare, words
    version = runner([compiler, "-dumpversion"], LIMIT_S)[1].strip().partition(".")[0]
    found["version"] = version if version.isdecimal() else ""
    return {**found, "links": False, "said": telling(code, said)}


def tried_all(
    row: Mapping[str, Any], where: Sequence[str], runner: Runner, root: Path, libraries: Sequence[str]
) -> dict[str, Any]:
    """`tried` for the languages of a row, up to the first that makes no program: that one's outcome, else the first
    language's, which has the libraries. `wish`: the compiler that the profile names."""
    found: list[dict[str, Any]] = []
    for number, language in enumerate(row["languages"]):
        wish = str((row.get("compilers") or {}).get(language, ""))
        own = compiler(root, wish, language)
        outcome = tried(own, () if number else libraries, where, runner, language)
        found.append({"wish": wish, **outcome})
        if not outcome["links"]:
            return found[-1]
    return found[0]


def telling(code: int, said: str) -> str:
    """Of a compiler's words the lines that say why, without the folder of the test."""
    if code == 124:
        return f"it did not end within {LIMIT_S} s"
    rows = [line.strip() for line in said.splitlines() if line.strip()]
    rows = [row for row in rows if TELLING.search(row) and "ld returned" not in row] or rows[-1:]
    text = re.sub(r"\S*/bringup-link-\w+/", "", "; ".join(dict.fromkeys(rows)))
    return text[:SAID] or f"it ended with {code} and said nothing"


def gather(rows: Iterable[Mapping[str, Any]], runner: Runner, root: Path) -> list[dict[str, Any]]:
    """`tried_all` for each row: `services` (names), `languages`, `libraries`, `compilers` (language -> the profile's
    CC or CXX, "" for the node's) and `folders` (the profile's own LIBRARY_PATH, [] for what role cuda_runtime
    gives)."""
    found = []
    for row in rows:
        where = list(row.get("folders") or ()) or folders(root)
        outcome = tried_all(row, where, runner, root, list(row["libraries"]))
        found.append({"services": list(row["services"]), **outcome})
    return found


# --- what it means ------------------------------------------------------------------------------------------

PARTS: tuple[tuple[str, str, tuple[str, str]], ...] = (
    (
        r"crt[1in]\.o|cannot find -lc\b|libc\.so|stdlib\.h",
        "the C library's development files",
        ("libc6-dev", "glibc-devel"),
    ),
    (
        r"crtbegin|crtend|-lgcc|libgcc",
        "the compiler's own library (libgcc)",
        ("libgcc-{version}-dev", "gcc"),
    ),
    (
        r"-lstdc\+\+|error: new: No such",
        "the C++ library's development files",
        ("libstdc++-{version}-dev", "libstdc++-devel"),
    ),
    (r"\bcc1plus\b", "the compiler's inner program (cc1plus)", ("g++-{version}", "gcc-c++")),
    (r"\bcc1\b", "the compiler's inner program (cc1)", ("gcc-{version}", "gcc")),
    (
        r"(?:execute|exec|find|command:) .?(?:\S*/)?(?:ld|as|collect2)\b",
        "the linker or assembler",
        ("binutils", "binutils"),
    ),
)
"""What the words of a link that failed tell: pattern, what is missing, and its package, as Debian and its kin call it
and as Red Hat, Fedora and SUSE do."""

BASICS: Mapping[str, list[tuple[str, str]]] = {
    "C": [("gcc", "gcc"), ("libc6-dev", "glibc-devel")],
    "C++": [("g++", "gcc-c++")],
}
"""Packages that bring a compiler of a language, as PARTS names them."""

NO_PACKAGE: tuple[tuple[str, str], ...] = (
    (r"No space left|Read-only", "df -h /tmp"),
    (r"did not end within", "look for a file system that hangs: sudo dmesg | tail"),
)
"""What no package helps against: pattern, remedy."""

INSTALLS: Mapping[str, str] = {
    "debian": "sudo apt-get install --reinstall",
    "fedora": "sudo dnf install",
    "rhel": "sudo dnf install",
    "suse": "sudo zypper install --force",
}
"""How each family of distributions installs packages, also ones whose files somebody has taken away."""


def install(system: Mapping[str, str], names: Iterable[tuple[str, str]], version: str) -> str:
    """The command that brings packages (Debian's name, the others' name) on a distribution."""
    family = next((one for one in (system["id"], *system["like"].split()) if one in INSTALLS), "debian")
    rows = [(debian if family == "debian" else others) for debian, others in names]
    filled = [row.format(version=version) if version else row.replace("-{version}", "") for row in rows]
    return f"{INSTALLS[family]} {' '.join(dict.fromkeys(filled))}"


class Trouble(NamedTuple):
    """Why a server could not compile: code, what is wrong, what was seen, and the step that helps."""

    code: str
    what: str
    evidence: str
    remedy: str


def lost_packages(row: Mapping[str, Any]) -> list[str]:
    """Debian's names of the packages whose files a compiler that links nothing cannot find."""
    parts = [debian for words, _, (debian, _) in PARTS if re.search(words, row["said"])]
    known = [name.format(version=row["version"]) for name in parts if row["version"] or "{" not in name]
    return list(dict.fromkeys(known))


def trouble(row: Mapping[str, Any], system: Mapping[str, str]) -> Trouble | None:
    """What a row of `gather` means on a distribution (`id` and `like` of os-release); None when all is well."""
    who = f"what {' and '.join(row['services'])} compiles at its start fails"
    language = row.get("language") or "C"
    basics = BASICS[language]
    if row["compiler"] is None:
        known = next(one.compilers for one in LANGUAGES.values() if one.name == language)
        variable = "CXX" if language == "C++" else "CC"
        wish = f" {row['wish']}, as {variable} of the profile names it" if row["wish"] else ""
        seen = f"no {', '.join(known)} in {' and '.join(f'/{place}' for place in PLACES)}"
        return Trouble(
            "COMPILER_MISSING",
            f"there is no {language} compiler{wish}: {who}",
            f"{row['wish']} is not there" if row["wish"] else seen,
            install(system, basics, ""),
        )
    if row["links"] is False:
        other = next((remedy for words, remedy in NO_PACKAGE if re.search(words, row["said"])), "")
        parts = [(what, names) for words, what, names in PARTS if re.search(words, row["said"])]
        lacks = f", {' and '.join(what for what, _ in parts)} cannot be found" if parts else ""
        lost = [names for _, names in parts] or [*basics, ("binutils", "binutils")]
        return Trouble(
            "LINK_FAILED",
            f"{row['compiler']} cannot make a program of one line{lacks}: {who}",
            row["said"],
            other or install(system, lost, row["version"]),
        )
    if row["lost"]:
        names = " ".join(f"-l{name}" for name in row["lost"])
        return Trouble(
            "LIBCUDA_LINK",
            f"{names} cannot be linked with what the server's environment has: {who}",
            row["said"],
            "Look at LIBRARY_PATH of the service; play role cuda_runtime again (invoke run fix-libcuda-link)",
        )
    return None
