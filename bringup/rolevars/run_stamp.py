"""Plan -> variables of role `run_stamp`."""

from __future__ import annotations

from typing import Any

from bringup.planned import HostPlan, Plan, Service


def variables(host: HostPlan, plan: Plan) -> dict[str, Any]:
    """`run_stamp_summary`: what a person on the node wants to know of the plan; no secrets, no times."""
    return {
        "run_stamp_summary": {
            "inventory": plan.inventory,
            "host": host.name,
            "platform": host.platform,
            "plan": plan.digest,
            "services": [_service(service) for service in host.services],
            "models": [{"name": model.name, "folder": model.folder} for model in host.models],
            "environments": [{"name": env.name, "prefix": env.prefix} for env in host.environments],
        }
    }


def _service(service: Service) -> dict[str, Any]:
    return {
        "name": service.name,
        "unit": service.unit,
        "profile": service.profile,
        "engine": f"{service.engine} {service.engine_version}",
        "model": service.model,
        "address": f"{service.bind}:{service.port}",
    }
