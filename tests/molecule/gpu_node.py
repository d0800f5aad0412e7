"""Prints, as JSON, the variables of a role for a host with GPUs: what a plan would give.

python -m tests.molecule.gpu_node ROLE [CHANGES]       CHANGES: JSON merged into `expected` and `site`
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

from bringup.planned import HostPlan, Plan
from tests.molecule.servers import plan as serving

EXPECTED: Mapping[str, Any] = {
    "title": "two made-up GPUs",
    "arch": "x86_64",
    "gpus": {"count": 2, "names": ["Demo GPU"], "memory_gib": 80, "sm": "9.0"},
    "driver": {"minimum": "570", "recommended": "580.105.08", "open_modules": True, "fabric_manager": True},
}


def host(changes: Mapping[str, Mapping[str, Any]]) -> tuple[HostPlan, Plan]:
    """A host that serves one model on made-up GPUs."""
    made = serving(["node"], {"gpus": [0, 1], "compiles": ("c", "c++"), "links": ("cuda",)})
    expected = {**EXPECTED, **changes.get("expected", {})}
    site = {"sysctl": True, **changes.get("site", {})}
    one = replace(made.hosts[0], platform="demo", expected=expected, site=site)
    return one, replace(made, hosts=(one,))


def main(words: list[str]) -> None:
    """Print the variables."""
    changes = json.loads(words[1]) if len(words) > 1 else {}
    one, whole = host(changes)
    print(json.dumps(import_module(f"bringup.rolevars.{words[0]}").variables(one, whole)))


if __name__ == "__main__":
    main(sys.argv[1:])
