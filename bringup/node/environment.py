"""Builds a locked Python environment beside the old one, and switches to it when it is whole.

An environment is path-bound, so it is built where it will stay: it counts only when its manifest is there,
and the manifest is written last, by a rename. A build that was killed leaves a folder without a manifest,
which the next build removes. Downloads are kept between builds, so nothing is fetched twice.
"""

from __future__ import annotations

import base64
import csv
import ctypes
import hashlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from . import conda, rattler_install, seal
from .files import locked, write_atomic
from .inuse import in_use, users
from .undo import Journal

MANIFEST = "bringup-environment.json"
NAME_FILE = ".bringup-name"
LOCK_FILE = "bringup-lock.txt"
INSTALLER = "rattler_install.py"
UNCOUNTED = (MANIFEST, INSTALLER)
"""Files in an environment that are written after its content was noted."""

SCHEMA_VERSION = 1
BYTECODE = "__pycache__"

BUILD_LIMIT_S = 3600
"""Seconds that installing all packages may take: some engines weigh 10 GB."""

STEP_LIMIT_S = 600
"""Seconds for each other step: making the skeleton, installing a distribution package."""

CHECK_LIMIT_S = 300
"""Seconds for one check: the first import of a big engine compiles thousands of files."""

LOCK_LIMIT_S = 3600
"""Seconds to wait for another build on the same node."""

PR_SET_PDEATHSIG = 1
PACKAGE_LOCK_LIMIT_S = 300
LOG_TAIL_LINES = 12

PIP_SETTINGS = {"PIP_ROOT_USER_ACTION": "ignore", "PIP_NO_INPUT": "1"}

PYTHONS = "/opt/bringup/pythons"
"""Where uv keeps the interpreters that it brings."""


class EnvironmentFailed(Exception):
    """A build that did not end well: the message says which step, why, and where its log is."""


@dataclass(frozen=True)
class Wanted:
    """An environment as it should be.

    `prefix`: where it will stay; `link`: the name that always leads to the current one ("" for none);
    `lock`: text of a list with hashes; `python`: "system", a version such as "3.12" or a path;
    `checks`: commands that must end with 0, a bare name is looked for in the environment first;
    `packages`: of the distribution, installed when the interpreter lacks what makes environments;
    `planned`: prefixes of all environments that this node must have; `keep`: how many others stay;
    `tool_lock`: lock of what provider rattler itself needs; `role`: in whose journal it is kept what was there
    before (bringup/node/undo.py), "" for none.
    """

    name: str
    provider: str
    prefix: str
    lock: str
    digest: str
    python: str = "system"
    link: str = ""
    checks: Sequence[Sequence[str]] = ()
    packages: Sequence[str] = ()
    planned: Sequence[str] = ()
    keep: int = 1
    cache: str = "/var/cache/bringup/packages"
    log: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    tool_lock: str = ""
    role: str = ""


# --- looking ------------------------------------------------------------------------------------------------


def manifest(prefix: Path) -> dict[str, Any]:
    """What a finished environment says about itself; empty when it is not finished."""
    try:
        found = json.loads((prefix / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def is_ready(wanted: Wanted) -> bool:
    """Is it finished, of this digest, with the packages it was made with, and does its interpreter start?"""
    prefix = Path(wanted.prefix)
    about = manifest(prefix)
    if about.get("digest") != wanted.digest or about.get("packages") != packages(prefix):
        return False
    if "content" in about and about["content"] != fingerprint(prefix) and not is_only_touched(prefix, about):
        return False
    return _quiet([str(prefix / "bin" / "python"), "-B", "-c", ""]) == 0


def fingerprint(prefix: Path) -> str:
    """One digest of all that is in an environment, by names, rights, sizes and times."""
    return seal.fingerprint(prefix, UNCOUNTED)


def is_linked(wanted: Wanted) -> bool:
    """Does the link lead to the environment?"""
    link = Path(wanted.link)
    return not wanted.link or (link.is_symlink() and str(link.readlink()) == wanted.prefix)


def superseded(wanted: Wanted) -> list[Path]:
    """Environments in the same folder that may go: not planned, used by no process, named by no unit.

    The newest `keep` of them stay, to go back to; what a build that was killed has left always goes.
    """
    planned = {Path(path) for path in (*wanted.planned, wanted.prefix)}
    others = [path for path in environments(Path(wanted.prefix).parent) if path not in planned]
    finished = [path for path in others if manifest(path)]
    finished.sort(key=lambda path: manifest(path).get("built", 0), reverse=True)
    doomed = [*finished[wanted.keep :], *(path for path in others if not manifest(path))]
    held = in_use(doomed)
    return [path for path in doomed if path not in held]


def environments(folder: Path) -> list[Path]:
    """The environments in a folder, finished or not; other folders are none of our business."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if not path.is_symlink() and (path / NAME_FILE).is_file())


# --- making -------------------------------------------------------------------------------------------------


def ensure(wanted: Wanted, check_only: bool = False) -> dict[str, Any]:
    """Brings the environment to what is wanted. Returns `changed`, `built`, `switched`, `pruned`, `prefix`.

    With `check_only` it only says what it would do. Raises EnvironmentFailed; then what was there before is
    there still, and the link still leads to it.
    """
    about = Path(wanted.prefix) / MANIFEST
    if check_only:
        build_due = not is_ready(wanted)
        mended = not build_due and not _is_ours(about)
        return _outcome(wanted, build_due, not is_linked(wanted), superseded(wanted), mended)
    lock = Path(wanted.prefix).parent / ".lock"
    _remember(wanted, [lock, *([Path(wanted.link)] if wanted.link else [])])
    with locked(lock, LOCK_LIMIT_S):
        built = not is_ready(wanted)
        if built:
            build(wanted)
        mended = not _is_ours(about)
        note_content(Path(wanted.prefix))
        switched = not is_linked(wanted)
        if switched:
            switch(Path(wanted.link), wanted.prefix)
        pruned = superseded(wanted)
        for path in pruned:
            remove(path)
        seal.claim(_claims(wanted))
        return _outcome(wanted, built, switched, pruned, mended)


def is_only_touched(prefix: Path, about: Mapping[str, Any]) -> bool:
    """Are only times of files others than noted, and every file still the one that its package brought?

    What conda's packages bring is not compared: an environment with any is not taken for whole.
    """
    if conda.installed(prefix) or about.get("shape") != seal.fingerprint(prefix, UNCOUNTED, times=False):
        return False
    for record in prefix.glob("lib/python3*/site-packages/*.dist-info/RECORD"):
        with record.open(encoding="utf-8", newline="") as file:
            for name, digest, *_ in csv.reader(file):
                path = record.parent.parent / name
                if digest and BYTECODE not in path.parts and digest != _wheel_digest(path):
                    return False
    return True


def _wheel_digest(path: Path) -> str:
    """A file's digest as wheels write it."""
    digest = bytes.fromhex(seal.sha256(path))
    return f"sha256={base64.urlsafe_b64encode(digest).rstrip(b'=').decode()}"


def note_content(prefix: Path) -> None:
    """Completes the manifest with what is there; an environment from before that was done counts as it is found. One
    that others have made theirs, or may write, is ours again."""
    about = manifest(prefix)
    noted = {"content": fingerprint(prefix), "shape": seal.fingerprint(prefix, UNCOUNTED, times=False)}
    if {**about, **noted} != about or not _is_ours(prefix / MANIFEST):
        about.update(noted)
        write_atomic(prefix / MANIFEST, json.dumps(about, indent=1, sort_keys=True) + "\n")


def _claims(wanted: Wanted) -> list[dict[str, Any]]:
    """What is to stay so: the whole environment, its manifest, the link, and the packages it was made with."""
    prefix = Path(wanted.prefix)
    digest = seal.sha256(prefix / MANIFEST)
    rows = [
        {"kind": "tree", "name": wanted.prefix, "but": UNCOUNTED, "content": fingerprint(prefix)},
        seal.path_row(prefix / MANIFEST, "file", **_rights(), sha256=digest),
    ]
    if wanted.link:
        rows.append(seal.path_row(wanted.link, "link", target=wanted.prefix))
    names = seal.show_packages(wanted.packages)
    return rows + [
        {"kind": "package", "name": name, "version": version, "basis": True}
        for name, (version, _) in names.items()
        if version
    ]


def _rights() -> dict[str, int]:
    """Whose the manifest is, and who may write it."""
    return {"mode": 0o644, "uid": os.geteuid(), "gid": os.getegid()}


def _is_ours(path: Path) -> bool:
    status = path.stat()
    found = {"mode": stat.S_IMODE(status.st_mode), "uid": status.st_uid, "gid": status.st_gid}
    return found == _rights()


def _remember(wanted: Wanted, paths: Sequence[Path] = (), trees: Sequence[str] = ()) -> None:
    """Keeps in the role's journal what is there now, before it is changed."""
    if wanted.role:
        journal = Journal(wanted.role)
        journal.remember_paths(paths)
        journal.remember_trees(map(Path, trees))


def _outcome(
    wanted: Wanted, built: bool, switched: bool, pruned: Sequence[Path], mended: bool
) -> dict[str, Any]:
    return {
        "changed": bool(built or switched or pruned or mended),
        "built": built,
        "switched": switched,
        "pruned": [str(path) for path in pruned],
        "prefix": wanted.prefix,
    }


def build(wanted: Wanted) -> None:
    """Makes the environment. It is there when this returns, and not at all when it raises."""
    prefix = Path(wanted.prefix)
    _check_possible(wanted)
    remove(prefix)
    # After what an earlier build had left there is gone: that is no state of before.
    _remember(wanted, trees=[wanted.prefix, wanted.cache])
    prefix.mkdir(parents=True, mode=0o755)
    (prefix / NAME_FILE).write_text(f"{wanted.name}\n", encoding="utf-8")
    (prefix / LOCK_FILE).write_text(wanted.lock, encoding="utf-8")
    started = time.time()
    log = Log(Path(wanted.log or f"{wanted.prefix}.log"))
    try:
        PROVIDERS[wanted.provider](wanted, log)
        for check in wanted.checks:
            log.run(
                in_environment(prefix, check), CHECK_LIMIT_S, f"check {' '.join(check)}", _path_first(prefix)
            )
        _write_manifest(wanted, started)
    except BaseException:
        remove(prefix)
        raise


def _check_possible(wanted: Wanted) -> None:
    if wanted.provider not in PROVIDERS:
        known = ", ".join(PROVIDERS)
        raise EnvironmentFailed(
            f'environment {wanted.name}: no provider "{wanted.provider}". Known: {known}.'
        )
    running = users([Path(wanted.prefix)]).get(Path(wanted.prefix), [])
    if running:
        pids = ", ".join(map(str, running))
        raise EnvironmentFailed(
            f"environment {wanted.name} is damaged ({wanted.prefix}) and processes run from it ({pids}). "
            "Stop their service, then run this again."
        )


def _write_manifest(wanted: Wanted, started: float) -> None:
    prefix = Path(wanted.prefix)
    about = {
        "schema_version": SCHEMA_VERSION,
        "name": wanted.name,
        "digest": wanted.digest,
        "provider": wanted.provider,
        "lock_sha256": hashlib.sha256(wanted.lock.encode()).hexdigest(),
        "python": _python_version(prefix),
        "built": started,
        "seconds": round(time.time() - started, 1),
        "packages": packages(prefix),
    }
    write_atomic(prefix / MANIFEST, json.dumps(about, indent=1, sort_keys=True) + "\n")


def packages(prefix: Path) -> dict[str, str]:
    """Name and version of each Python and each conda package in an environment, from their records."""
    found = {f"conda:{name}": version for name, version in conda.installed(prefix).items()}
    for folder in prefix.glob("lib/python3*/site-packages/*.dist-info"):
        name, _, version = folder.name.removesuffix(".dist-info").rpartition("-")
        found[name.lower().replace("_", "-")] = version
    return dict(sorted(found.items()))


def _python_version(prefix: Path) -> str:
    answer = subprocess.run(
        [str(prefix / "bin" / "python"), "-c", "import platform; print(platform.python_version())"],
        capture_output=True,
        text=True,
        timeout=STEP_LIMIT_S,
        check=False,
    )
    return answer.stdout.strip()


def in_environment(prefix: Path, command: Sequence[str]) -> list[str]:
    """A command with its program looked for in the environment first."""
    inside = prefix / "bin" / command[0]
    return [str(inside), *command[1:]] if inside.exists() else list(command)


def _path_first(prefix: Path) -> dict[str, str]:
    path = os.environ.get("PATH", "/usr/bin:/bin")
    return {"PATH": f"{prefix / 'bin'}:{path}", "VIRTUAL_ENV": str(prefix), "PYTHONNOUSERSITE": "1"}


def switch(link: Path, prefix: str) -> None:
    """Points the link at the environment; at no moment is there no link."""
    link.parent.mkdir(parents=True, exist_ok=True)
    beside = link.with_name(f".{link.name}.{os.getpid()}")
    beside.symlink_to(prefix)
    beside.replace(link)


def remove(path: Path) -> None:
    """Removes an environment: its manifest first, so that half of it never counts as whole."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        with suppress(FileNotFoundError):
            (path / MANIFEST).unlink()
        shutil.rmtree(path)


# --- commands with a log ------------------------------------------------------------------------------------


class Log:
    """The file that a build writes while it works, for whoever waits; and the commands that write it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def say(self, text: str) -> None:
        """One line with the time."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {text}\n")

    def run(
        self, argv: Sequence[str], limit_s: int, what: str, environment: Mapping[str, str] | None = None
    ) -> None:
        """Runs a command to its end. Raises EnvironmentFailed with the last lines of what it printed."""
        self.say(f"{what}: {' '.join(argv)}")
        start = self.path.stat().st_size
        with self.path.open("ab") as file:
            process = subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd="/",
                env={**os.environ, **(environment or {})},
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                raise EnvironmentFailed(f"{what} took longer than {limit_s} s. Log: {self.path}") from None
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if code != 0:
            raise EnvironmentFailed(f"{what} ended with {code}: {self.tail(start)} Log: {self.path}")

    def tail(self, start: int) -> str:
        """The last lines since byte `start`, on one line."""
        with self.path.open("rb") as file:
            file.seek(start)
            lines = file.read().decode("utf-8", "replace").splitlines()
        return " | ".join(line.strip() for line in lines[-LOG_TAIL_LINES:] if line.strip())


def die_with_parent() -> None:
    """In a child: the kernel kills it when its parent dies, so that no orphan writes on into a new build."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _quiet(argv: Sequence[str]) -> int:
    """Exit code of a command whose output nobody needs; 127 when it cannot be run."""
    try:
        done = subprocess.run(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=STEP_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return 127
    return done.returncode


# --- providers ----------------------------------------------------------------------------------------------


def interpreter(wanted: Wanted) -> str:
    """The Python that the environment is made with. Raises EnvironmentFailed when it is not there."""
    if "/" in wanted.python:
        candidates = [wanted.python]
    elif wanted.python == "system":
        candidates = ["/usr/bin/python3", "python3", sys.executable]
    else:
        candidates = [f"python{wanted.python}", "/usr/bin/python3", "python3"]
    for candidate in candidates:
        found = shutil.which(candidate)
        if found and (wanted.python == "system" or "/" in wanted.python or _is_version(found, wanted.python)):
            return found
    raise EnvironmentFailed(
        f"environment {wanted.name}: there is no Python {wanted.python} on the node. "
        f"Install python{wanted.python} and python{wanted.python}-venv, or use provider uv."
    )


def _is_version(program: str, version: str) -> bool:
    test = f"import sys; sys.exit('{version}' != '%d.%d' % sys.version_info[:2])"
    return _quiet([program, "-c", test]) == 0


def with_pip(wanted: Wanted, log: Log) -> None:
    """A venv, filled by pip from the lock; every file's hash must be in it."""
    python = interpreter(wanted)
    _install_missing(wanted, python, log)
    log.run([python, "-m", "venv", wanted.prefix], STEP_LIMIT_S, "make the environment")
    argv = [f"{wanted.prefix}/bin/python", "-m", "pip", "install", "--require-hashes"]
    argv += ["--requirement", f"{wanted.prefix}/{LOCK_FILE}", "--cache-dir", wanted.cache]
    argv += ["--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    log.run(argv, BUILD_LIMIT_S, "install the packages", {**PIP_SETTINGS, **wanted.settings})


def with_uv(wanted: Wanted, log: Log) -> None:
    """The same by uv, which also brings a Python that the distribution lacks."""
    uv = shutil.which("uv") or shutil.which("/usr/local/bin/uv")
    if not uv:
        raise EnvironmentFailed(
            f"environment {wanted.name}: there is no uv on the node. Install it, or use provider pip."
        )
    python = "/usr/bin/python3" if wanted.python == "system" else wanted.python
    settings = {"UV_CACHE_DIR": f"{wanted.cache}/uv", "UV_PYTHON_INSTALL_DIR": PYTHONS, **wanted.settings}
    _remember(wanted, trees=[settings["UV_PYTHON_INSTALL_DIR"]])
    make = [uv, "venv", "--allow-existing", "--python", python, wanted.prefix]
    log.run(make, STEP_LIMIT_S, "make the environment", settings)
    sync = [uv, "pip", "sync", "--require-hashes", "--python", f"{wanted.prefix}/bin/python"]
    log.run([*sync, f"{wanted.prefix}/{LOCK_FILE}"], BUILD_LIMIT_S, "install the packages", settings)


TOOLS = "/opt/bringup/tools"
"""Environments of what makes environments; nothing else looks into this folder."""


def with_conda(wanted: Wanted, log: Log) -> None:
    """A prefix filled by conda, mamba or micromamba from files that were fetched and verified here."""
    prefix = Path(wanted.prefix)
    with _conda_errors(wanted):
        program = conda.installer(wanted.provider)
        listed = conda.parse(wanted.lock)
        files = _fetched(wanted, listed, log)
    lock = prefix / "conda-files.txt"
    lock.write_text(conda.explicit_text(listed, files), encoding="utf-8")
    conda.make_prefix(prefix)
    settings = conda.settings_of(wanted.settings, wanted.cache)
    log.run(conda.command(program, wanted.prefix, str(lock)), BUILD_LIMIT_S, "install the packages", settings)


def with_rattler(wanted: Wanted, log: Log) -> None:
    """The same with no conda at all: rattler's library from the Python index, in an environment of its own."""
    if not wanted.tool_lock:
        raise EnvironmentFailed(
            f"environment {wanted.name}: provider rattler needs the lock of its own library."
        )
    with _conda_errors(wanted):
        files = _fetched(wanted, conda.parse(wanted.lock), log)
    digest = hashlib.sha256(wanted.tool_lock.encode()).hexdigest()
    tool = Wanted(
        name="rattler",
        provider="pip",
        prefix=f"{TOOLS}/rattler-{digest[:8]}",
        lock=wanted.tool_lock,
        digest=digest,
        packages=wanted.packages,
        checks=[["python", "-c", "import rattler"]],
        cache=wanted.cache,
        log=wanted.log,
        settings=wanted.settings,
        keep=0,
        role=wanted.role,
    )
    ensure(tool)
    program = Path(tool.prefix) / INSTALLER
    program.write_text(_source(rattler_install), encoding="utf-8")
    argv = [f"{tool.prefix}/bin/python", "-s", str(program), wanted.prefix, f"{wanted.cache}/rattler"]
    log.run([*argv, *map(str, files)], BUILD_LIMIT_S, "install the packages")


def _fetched(wanted: Wanted, listed: Sequence[conda.Package], log: Log) -> list[Path]:
    return conda.fetch(listed, Path(wanted.cache) / "conda", wanted.settings.get(conda.MIRROR, ""), log.say)


@contextmanager
def _conda_errors(wanted: Wanted) -> Iterator[None]:
    try:
        yield
    except conda.CondaFailed as error:
        raise EnvironmentFailed(f"environment {wanted.name}: {error}.") from None


def _source(module: ModuleType) -> str:
    """A module's text, also when it lies in the archive that Ansible sends."""
    get_source = getattr(module.__loader__, "get_source", None)
    text = get_source(module.__name__) if get_source else None
    if text is None:
        raise EnvironmentFailed(f"the text of {module.__name__} cannot be had")
    return str(text)


PROVIDERS = {
    "pip": with_pip,
    "uv": with_uv,
    "rattler": with_rattler,
    **dict.fromkeys(conda.INSTALLERS, with_conda),
}
"""How each provider fills a prefix from a lock; a new one is a function more."""


def _install_missing(wanted: Wanted, python: str, log: Log) -> None:
    """Installs the distribution's packages when the interpreter cannot make environments without them."""
    if _quiet([python, "-c", "import ensurepip, venv"]) == 0:
        return
    apt = shutil.which("apt-get")
    if not apt or not wanted.packages:
        raise EnvironmentFailed(
            f"environment {wanted.name}: {python} cannot make environments. Install its venv package."
        )
    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    wait = ["-o", f"DPkg::Lock::Timeout={PACKAGE_LOCK_LIMIT_S}"]
    log.run([apt, *wait, "update", "-q"], STEP_LIMIT_S, "look for packages", quiet)
    install = [apt, *wait, "install", "-q", "-y", "--no-install-recommends", *wanted.packages]
    journal = Journal(wanted.role) if wanted.role else None
    if journal:
        journal.begin_install()
    log.run(install, STEP_LIMIT_S, f"install {' '.join(wanted.packages)}", quiet)
    if journal:
        journal.end_install()
