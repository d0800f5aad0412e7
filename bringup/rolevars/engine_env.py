"""Plan -> variables of role `engine_env`."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from bringup.planned import HostPlan, Plan, PlannedEnvironment


def variables(host: HostPlan, plan: Plan) -> dict[str, Any]:
    """`engine_env_environments`: one row an environment; the link that leads to it lies beside it."""
    return {"engine_env_environments": [_row(environment) for environment in host.environments]}


def _row(environment: PlannedEnvironment) -> dict[str, Any]:
    return {
        "name": environment.name,
        "provider": environment.provider,
        "python": environment.python,
        "lock": environment.lock,
        "digest": environment.digest,
        "prefix": environment.prefix,
        "link": str(PurePosixPath(environment.prefix).parent / f"{environment.name}-current"),
        "checks": [list(check) for check in environment.checks],
    }
