"""Plan -> variables of role `preflight`: what the node must have before anything is changed on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bringup.planned import HostPlan, Plan

GIB = 1024**3

ENVIRONMENT_BYTES = GIB // 2
"""Room for one environment where nothing better is known; GPU platforms keep far more free by threshold."""


def variables(host: HostPlan, plan: Plan) -> dict[str, Any]:
    """`preflight_expected`, see `bringup.preflight.Expected`."""
    platform = host.expected
    return {
        "preflight_expected": {
            "platform": host.platform,
            "arch": host.arch or platform.get("arch", "any"),
            "gpus": platform.get("gpus"),
            "driver": platform.get("driver"),
            "links": platform.get("links") or {},
            "thresholds": platform.get("thresholds") or {},
            "ports": _ports(host),
            "rooms": _rooms(host),
            "memory": _memory(host, platform.get("host")),
            "numa": list((platform.get("host") or {}).get("numa") or ()),
        }
    }


def _ports(host: HostPlan) -> list[dict[str, Any]]:
    return [
        {"port": service.port, "bind": service.bind, "unit": service.unit, "service": service.name}
        for service in host.services
    ]


def _rooms(host: HostPlan) -> list[dict[str, Any]]:
    models = [(model.folder, model.size, f"model {model.name}") for model in host.models]
    environments = [(env.prefix, ENVIRONMENT_BYTES, f"environment {env.name}") for env in host.environments]
    return [
        {"path": path, "needed": needed, "purpose": purpose}
        for path, needed, purpose in models + environments
    ]


def _memory(host: HostPlan, machine: Mapping[str, Any] | None) -> int:
    """Bytes of memory: what the platform's nodes have, or what the services may use if that is more."""
    nominal = machine["sockets"] * machine["memory_gib_per_socket"] if machine else 0
    used = sum(service.memory_gib or 0 for service in host.services)
    return int(max(nominal, used) * GIB)
