"""Plan -> variables of role `model_store`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from bringup.planned import HostPlan, Plan, PlannedModel


def variables(host: HostPlan, plan: Plan) -> dict[str, Any]:
    """`model_store_models`: one row a model, with its lock."""
    return {"model_store_models": [{**row(model), "chain": chain(model, plan)} for model in host.models]}


def chain(model: PlannedModel, plan: Plan) -> list[str]:
    """The hosts that need the same files, in the inventory's order; they hand them on to each other.

    A model that the controller makes is small and goes to each node from there.
    """
    if model.made_by:
        return []
    return [
        other.name
        for other in plan.hosts
        if any(one.folder == model.folder and one.files == model.files for one in other.models)
    ]


def row(model: PlannedModel) -> dict[str, Any]:
    """One model as the role takes it."""
    return {
        "name": model.name,
        "folder": model.folder,
        "files": [asdict(file) for file in model.files],
        "sources": [asdict(source) for source in model.sources],
        "made_by": model.made_by or "",
        "expects": dict(model.expects),
    }
