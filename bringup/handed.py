"""Role variables that a command has worked out, handed to the Ansible that it starts, which need not do it again.

Without such a file (`ansible-playbook`, AWX) the inventory plugin resolves the plan itself; the values are the same.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE = "BRINGUP_ROLE_VARIABLES"
"""Environment variable that names the file; the file belongs to one run and goes with it."""


def text(folder: Path, hosts: Mapping[str, Mapping[str, Any]]) -> str:
    """What the file holds: of which inventory (its folder), and role variables by host."""
    return json.dumps({"folder": str(folder.resolve()), "hosts": hosts}, ensure_ascii=False)


def given(folder: Path) -> dict[str, dict[str, Any]] | None:
    """Role variables by host, when this process was handed those of this inventory."""
    try:
        found = json.loads(Path(os.environ.get(FILE, "")).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return dict(found["hosts"]) if found["folder"] == str(folder.resolve()) else None
