"""Plan -> variables of role `cuda_runtime`: servers on GPUs, and what CUDA must say of the GPUs."""

from __future__ import annotations

from typing import Any

from bringup import systemd
from bringup.planned import HostPlan, Plan
from bringup.rolevars import entries


def variables(host: HostPlan, plan: Plan) -> dict[str, Any]:
    """`cuda_runtime_expected` (empty: no GPUs, nothing is done) and `cuda_runtime_services`."""
    gpus = host.expected.get("gpus")
    if not gpus:
        return {"cuda_runtime_expected": {}, "cuda_runtime_services": []}
    links, limits = host.expected.get("links") or {}, host.expected.get("thresholds") or {}
    effective = gpus.get("hbm_effective_gbps") or 0
    local = links.get("host_local_gbps") or 0
    # What is said of NVLink is both directions together; a copy goes one way.
    peer = (links.get("nvlink_gbps") or 0) / 2 if gpus["count"] > 1 else 0
    return {
        "cuda_runtime_expected": {
            "gpus": gpus["count"],
            "sm": gpus.get("sm") or "",
            "host_gbps": round(local * limits.get("host_link_share", 0.85), 1),
            "peer_gbps": round(peer * limits.get("nvlink_share", 0.75), 1),
            "memory_gbps": round(effective * limits.get("hbm_share_of_effective", 0.9), 1),
        },
        "cuda_runtime_services": [
            {
                "name": service.name,
                "drop_in": entries.drop_in(service, "cuda"),
                "environment_file": str(systemd.SERVICES / f"{service.name}.cuda.env"),
                "keeps": sorted(service.environment),
                **entries.linking(service),
            }
            for service in host.services
            if service.gpus
        ],
    }
