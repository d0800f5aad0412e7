"""Makes the wheel that stands in for one version of an engine: its own flags, and the small server.

It installs under the engine's own module and command names, so that the planned launch line starts it. The
bytes are the same for the same input: their hash is in the lock.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import io
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path

from bringup import flagtable

HERE = Path(__file__).resolve().parent
DISTRIBUTION = "bringup_stand_in"
LAUNCHERS: Mapping[str, tuple[str, ...]] = {
    "sglang": ("sglang/__init__.py", "sglang/__main__.py", "sglang/launch_server.py"),
    "vllm": ("vllm/__init__.py", "vllm/__main__.py", "vllm/entrypoints/openai/api_server.py"),
    "ktransformers": ("ktransformers/__init__.py", "ktransformers/server/main.py"),
    "llama-server": ("xllamacpp/__init__.py",),
}
"""The modules that a launch line may name, by engine."""

START = (
    "import sys\n\nfrom bringup_stand_in import server\n\n"
    'if __name__ == "__main__":\n    sys.exit(server.main(sys.argv[1:]))\n'
)
"""What starts the server, under whatever module name."""

DATE = (2026, 1, 1, 0, 0, 0)


@functools.cache
def wheel(engine: str, version: str) -> tuple[str, bytes]:
    """Name and bytes of the wheel. Raises UsageError when the version has no flag table."""
    table = flagtable.path_of(engine, version).read_text(encoding="utf-8")
    flags = json.loads(table)
    flags.pop("env", None)
    for flag in flags["flags"]:
        flag.pop("help", None)
    release = version.replace("+", ".")
    name = f"{DISTRIBUTION}-{release}-py3-none-any.whl"
    info = f"{DISTRIBUTION}-{release}.dist-info"
    files = {
        f"{DISTRIBUTION}/__init__.py": f'ENGINE = "{engine}"\nVERSION = "{version}"\n',
        f"{DISTRIBUTION}/__main__.py": START,
        f"{DISTRIBUTION}/server.py": (HERE / "server.py").read_text(encoding="utf-8"),
        f"{DISTRIBUTION}/flags.json": json.dumps(flags, separators=(",", ":"), sort_keys=True),
        **launchers(engine, version),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: {release}\n"
        f"Summary: stand-in of {engine} {version} for a bringup twin\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: bringup\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{engine} = {DISTRIBUTION}.server:command\n",
    }
    rows = [f"{path},sha256={_digest(text)},{len(text.encode())}\n" for path, text in files.items()]
    files[f"{info}/RECORD"] = "".join(rows) + f"{info}/RECORD,,\n"
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, text in files.items():
            archive.writestr(zipfile.ZipInfo(path, DATE), text, zipfile.ZIP_DEFLATED)
    return name, out.getvalue()


def launchers(engine: str, version: str) -> dict[str, str]:
    """The engine's modules: each says that it is a stand-in, and starts the server."""
    head = f'"""Stand-in of {engine} {version} for a bringup twin."""\n\n'
    made = {}
    for path in LAUNCHERS.get(engine, (f"{engine}/__init__.py",)):
        made[path] = head + (f'__version__ = "{version}"\n' if path.endswith("__init__.py") else START)
    return made


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
