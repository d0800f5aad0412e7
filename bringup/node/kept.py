"""Keeps what this node has compiled: a program that comes again is not compiled again.

`/run/bringup/code/<digest of the text>-<Python>`, root's only, gone with the next boot. This file stands at the
beginning of each program that a controller sends (`bringup/carrying.py`, `bringup/looking.py`), so it is short,
imports only what Python has built in, and defines names of its own.

Standard library only.
"""

import marshal
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType

FOLDER = "/run/bringup/code"
KEPT = 400
"""Files that stay; a commit's programs are some fifty."""


def compiled(text: str, path: str, digest: str) -> "CodeType":
    """The code of a text (`str`) whose `digest` the controller has worked out; `path` is what tracebacks call it."""
    kept = f"{FOLDER}/{digest}-{sys.hexversion:x}"
    if os.geteuid() == 0:
        try:
            with open(kept, "rb") as file:  # noqa: PTH123 (pathlib costs more than compiling a short text)
                found: CodeType = marshal.loads(file.read())
                return found
        except (OSError, ValueError, EOFError, TypeError):
            code = compile(text, path, "exec")
            keep(kept, code)
            return code
    return compile(text, path, "exec")


def keep(path: str, code: "CodeType") -> None:
    """Beside and renamed; without it all goes on."""
    try:
        os.makedirs(FOLDER, mode=0o700, exist_ok=True)  # noqa: PTH103
        about = os.stat(FOLDER)  # noqa: PTH116
        if about.st_uid or about.st_mode & 0o022:
            return
        beside = f"{path}.{os.getpid()}"
        with open(beside, "wb") as file:  # noqa: PTH123
            file.write(marshal.dumps(code))
        os.rename(beside, path)  # noqa: PTH104
        names = os.listdir(FOLDER)  # noqa: PTH208
        for name in names if len(names) > KEPT else ():
            os.unlink(f"{FOLDER}/{name}")  # noqa: PTH108
    except OSError:
        pass
