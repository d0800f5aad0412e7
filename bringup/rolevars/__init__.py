"""Plan -> role variables: one module a role, each with `variables(host, plan) -> dict`.

Every name that a module returns starts with the name of its role and is declared in that
role's `argument_specs.yml` (a content test holds both).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from bringup.planned import HostPlan, Plan

ROLES = (
    "preflight",
    "system_settings",
    "nvidia_driver",
    "cuda_runtime",
    "engine_env",
    "library_fixes",
    "model_store",
    "log_rotation",
    "engine_service",
    "scheduled_restart",
    "run_stamp",
)
"""The roles of `playbooks/provision.yml`, in the order in which they are played."""


def variables(host: HostPlan, plan: Plan) -> dict[str, Any]:
    """All role variables of one host (JSON-able values; secrets only as names of vault variables)."""
    result: dict[str, Any] = {}
    for role in ROLES:
        result.update(import_module(f"bringup.rolevars.{role}").variables(host, plan))
    return result


def of_plan(plan: Plan) -> dict[str, dict[str, Any]]:
    """Role variables of every host."""
    return {host.name: variables(host, plan) for host in plan.hosts}
