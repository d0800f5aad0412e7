"""Plan -> variables of role `library_fixes`: each server on GPUs, its environment and its drop-in."""

from __future__ import annotations

from typing import Any

from bringup.planned import HostPlan, Plan
from bringup.rolevars import entries


def variables(host: HostPlan, plan: Plan) -> dict[str, Any]:
    """`library_fixes_services`: name, prefix and drop_in of each server on GPUs."""
    prefixes = {environment.name: environment.prefix for environment in host.environments}
    return {
        "library_fixes_services": [
            {
                "name": service.name,
                "prefix": prefixes[service.env_name],
                "drop_in": entries.drop_in(service, "libraries"),
            }
            for service in host.services
            if service.gpus and service.env_name in prefixes
        ]
    }
