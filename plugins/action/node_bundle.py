"""Takes secrets out of what a node told, and writes the bundle on the controller."""

from __future__ import annotations

import io
import os
import sys
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase

ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

from bringup import redact  # noqa: E402 (the checkout must be on the path first)
from bringup.carrying import Carried  # noqa: E402


class ActionModule(Carried, ActionBase):
    """`node_bundle: {dest: FILE.tar.gz}`: one round trip, and an archive without secrets on the controller."""

    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Where the archive is, how many files it holds and how big it is."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        if self._task.check_mode:
            return {**result, "changed": False, "count": 0}
        answer = self._execute_module(module_name="node_bundle", module_args={}, task_vars=task_vars)
        if answer.get("failed"):
            return {**result, **answer}
        dest = Path(str(self._task.args["dest"]))
        files = {name: redact.text(str(text)) for name, text in answer["files"].items()}
        try:
            _write(dest, files)
        except OSError as error:
            return {**result, "failed": True, "msg": f"{dest}: {error.strerror}"}
        note = f"support bundle: {dest} ({len(files)} files, {dest.stat().st_size // 1024} KiB)"
        return {**result, "changed": False, "dest": str(dest), "count": len(files), "bringup_notes": [note]}


def _write(dest: Path, files: Mapping[str, str]) -> None:
    """Writes the archive beside and renames it; only its owner may read it."""
    dest.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    beside = dest.with_name(f".{dest.name}.{os.getpid()}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    folder = dest.name.removesuffix(".tar.gz")
    with os.fdopen(descriptor, "wb") as stream, tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for name, text in files.items():
            data = text.encode()
            entry = tarfile.TarInfo(f"{folder}/{name}")
            entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
            archive.addfile(entry, io.BytesIO(data))
    beside.replace(dest)
