"""Plan -> variables of role `model_store`."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from typing import Any

from bringup import ROOT
from bringup.planned import HostPlan, Plan, PlannedModel

CLIENT_LOCK = "roles/model_store/files/hub-client.txt"
CLIENT_FOLDER = "/opt/bringup/tools"
"""Apart from the engines' environments: those are pruned by what the plan says of engines."""


def variables(host: HostPlan, plan: Plan) -> dict[str, Any]:
    """`model_store_models`: one row a model, with its lock; `model_store_client`: what fetches from hubs;
    `model_store_hours`: when large models may be fetched."""
    models = [{**row(model, host), "chain": chain(model, plan)} for model in host.models]
    hours = list(host.site.get("download_hours") or ())
    return {"model_store_models": models, "model_store_client": client(host), "model_store_hours": hours}


def client(host: HostPlan) -> list[dict[str, str]]:
    """The environment with the hubs' own clients, when a model of this host comes from a hub."""
    kinds = {source.kind for model in host.models for source in model.sources}
    if not kinds & {"huggingface", "modelscope"}:
        return []
    digest = hashlib.sha256((ROOT / CLIENT_LOCK).read_bytes()).hexdigest()
    prefix = f"{CLIENT_FOLDER}/hub-client-{digest[:8]}"
    return [{"lock": CLIENT_LOCK, "digest": digest, "prefix": prefix, "program": f"{prefix}/bin/python"}]


def chain(model: PlannedModel, plan: Plan) -> list[str]:
    """The hosts that need the same files, rack by rack and otherwise in the inventory's order; they hand them
    on to each other, so that each rack's uplink carries them once.

    A model that the controller makes is small and goes to each node from there.
    """
    if model.made_by or model.graft:
        return []
    hosts = [
        other
        for other in plan.hosts
        if any(one.folder == model.folder and one.files == model.files for one in other.models)
    ]
    racks = list(dict.fromkeys(other.site.get("rack") for other in hosts))
    return [other.name for other in sorted(hosts, key=lambda other: racks.index(other.site.get("rack")))]


def row(model: PlannedModel, host: HostPlan) -> dict[str, Any]:
    """One model as the role takes it; a grafted one names the models of the same host that it is made of."""
    return {
        "name": model.name,
        "folder": model.folder,
        "files": _files(model),
        "sources": [asdict(source) for source in model.sources],
        "made_by": model.made_by or "",
        "expects": dict(model.expects),
        "graft": graft(model, host),
    }


def _files(model: PlannedModel) -> list[dict[str, Any]]:
    return [asdict(file) for file in model.files]


def graft(model: PlannedModel, host: HostPlan) -> dict[str, Any]:
    """What the overlay is made of and how; nothing for a model that is not grafted."""
    if not model.graft:
        return {}
    parts = {one.name: one for one in host.models}
    made_of = {
        role: {"name": part.name, "folder": part.folder, "files": _files(part)}
        for role, part in (("base", parts[model.graft.base]), ("delta", parts[model.graft.delta]))
    }
    engines = {one.env_name for one in host.services if one.model == model.name}
    prefixes = [one.prefix for one in host.environments if one.name in engines]
    return {**asdict(model.graft), "dtypes": list(model.graft.dtypes), "engines": prefixes, **made_of}
