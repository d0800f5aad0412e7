"""Plan -> variables of role `preflight`: what the node must have before anything is changed on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bringup import systemd
from bringup.planned import HostPlan, Plan, PlannedModel
from bringup.rolevars import engine_service, entries, system_settings

GIB = 1024**3

ENVIRONMENT_BYTES = GIB // 2
"""Room for one environment where nothing better is known; GPU platforms keep far more free by threshold."""

HUBS: Mapping[str, tuple[str, int]] = {
    "huggingface": ("huggingface.co", 443),
    "modelscope": ("modelscope.cn", 443),
}
PACKAGE_INDEX = ("", 443)
"""The node's own settings name the index (or the proxy before it); where they do not, none is asked for."""

DRIVER_MENDS = (
    "DRIVER_MISSING",
    "DRIVER_TOO_OLD",
    "DRIVER_NOT_OPEN",
    "DRIVER_LIBRARY_MISMATCH",
    "NOUVEAU_LOADED",
    "FABRIC_MANAGER_DOWN",
    "FABRIC_MANAGER_MISMATCH",
    "GPU_PERSISTENCE_OFF",
)
"""What role nvidia_driver does away with: it installs, keeps nouveau out, and boots behind a gate of its own."""

LINK_MENDS = ("LIBCUDA_LINK", "COMPILER_MISSING", "LINK_FAILED")
"""What role cuda_runtime does away with: it installs a compiler, makes links, and links a line with both."""

MODEL_MENDS = ("MODEL_DAMAGED", "MODEL_MTP_MISSING")
"""What role model_store does away with: it fetches or makes again what is not as the lock says."""

SETTINGS_MENDS = ("SETTINGS_DIFFER", "SHM_SMALL", "CLOCK_NOT_KEPT")


def variables(host: HostPlan, plan: Plan) -> dict[str, Any]:
    """`preflight_expected`, see `bringup.expected.Expected`."""
    platform = host.expected
    driver = host.site.get("driver") or {}
    settings = system_settings.variables(host, plan)["system_settings_values"]
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
            "units": [f"{service.unit}.service" for service in host.services],
            "limits": {"open_files": systemd.OPEN_FILES, "tasks": systemd.TASKS} if host.services else {},
            "sets": _sets(host),
            "settings": settings,
            "addresses": _addresses(host),
            "caches": [
                {"path": path, "user": service.user}
                for service in host.services
                for path in systemd.writable(service)
            ],
            "models": [_model(model, host) for model in host.models],
            "linking": _linking(host),
            "logs": [log for service in host.services if (log := systemd.log_file(service))],
            "devices": [
                {"service": service.name, "user": service.user, "gpus": list(service.gpus)}
                for service in host.services
                if service.gpus
            ],
            "memory_nodes": _memory_nodes(host),
            "clocks_mhz": list(driver.get("clocks_mhz") or ()),
            "power_w": driver.get("power_w") or 0,
            "mends": _mends(host, settings),
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


def _memory_nodes(host: HostPlan) -> str:
    nodes = [one.placement.memory_nodes for one in host.services if one.placement.memory_nodes]
    return ",".join(dict.fromkeys(nodes))


def _sets(host: HostPlan) -> list[str]:
    """Variables that every service sets itself: what systemd's own environment says of them does not count."""
    each = [set(service.environment) for service in host.services]
    return sorted(set.intersection(*each)) if each else []


def _model(model: PlannedModel, host: HostPlan) -> dict[str, Any]:
    drafting = [one.name for one in host.services if one.drafts == "mtp" and one.model == model.name]
    prefixes = list(model.expects.get("tensors") or {})
    return {
        "name": model.name,
        "folder": model.folder,
        "stamp": f"{model.folder}/{engine_service.READY_STAMP}",
        "files": [{"path": file.path, "size": file.size} for file in model.files],
        "expects": dict(model.expects),
        "mtp": {"prefix": prefixes[0], "services": drafting} if drafting and prefixes else {},
    }


def _linking(host: HostPlan) -> list[dict[str, Any]]:
    """What services on GPUs link at run time, each way once: libraries, and what a profile has of its own."""
    rows: list[dict[str, Any]] = []
    for service in host.services:
        one = entries.linking(service)
        if not (one["languages"] and service.gpus):
            continue
        asked = {"libraries": one.pop("links"), **one}
        same = next((row for row in rows if {**row, "services": []} == {**asked, "services": []}), None)
        if same:
            same["services"].append(service.name)
        else:
            rows.append({"services": [service.name], **asked})
    return rows


def _addresses(host: HostPlan) -> list[dict[str, Any]]:
    """Where downloads come from that the node makes itself. A model with a source of another kind needs none."""
    rows: list[dict[str, Any]] = []
    for model in host.models:
        if model.sources and all(source.kind in HUBS for source in model.sources):
            stamp = f"{model.folder}/{engine_service.READY_STAMP}"
            rows += [
                {"host": at, "port": port, "purpose": f"model {model.name}", "unless": stamp}
                for at, port in (HUBS[source.kind] for source in model.sources)
            ]
    for environment in host.environments:
        if environment.provider in ("pip", "uv"):
            purpose = f"environment {environment.name}"
            at, port = PACKAGE_INDEX
            rows.append(
                {"host": at, "port": port, "purpose": purpose, "unless": environment.prefix, "kind": "pip"}
            )
    return rows


def _mends(host: HostPlan, settings: list[dict[str, Any]]) -> dict[str, str]:
    """Code of a finding -> the role that does away with it, as far as the intent lets the role do so."""
    found = dict.fromkeys(MODEL_MENDS, "model_store") if host.models else {}
    if not host.expected.get("gpus"):
        return found
    found |= dict.fromkeys(LINK_MENDS, "cuda_runtime")
    found |= dict.fromkeys(SETTINGS_MENDS, "system_settings") if settings else {}
    if (host.site.get("driver") or {}).get("manage", True):
        found |= dict.fromkeys(DRIVER_MENDS, "nvidia_driver")
        if (host.site.get("driver") or {}).get("power_w"):
            found["GPU_POWER_CAP"] = "nvidia_driver"
    return found
