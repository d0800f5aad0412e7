"""Plan -> variables of role `engine_service`: each server's unit, environment, description and watchdog."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from bringup import systemd
from bringup.node.drafting import counted
from bringup.planned import HostPlan, Plan, Service
from bringup.rolevars import entries

PROGRAMS = ("common", "serve", "gate", "drafting", "trail", "watch", "drift", "leftovers", "llama_serve")
"""Programs in /opt/bringup/lib that servers need; `llama_serve` is an engine that comes as a library."""

READY_STAMP = ".bringup/ready.json"
"""In a model's folder: written last, when every file in it has been verified."""


def variables(host: HostPlan, plan: Plan) -> dict[str, Any]:
    """`engine_service_services` (what the module needs of each), `_files`, `_units`, `_users` and `_keys`."""
    files = _common_files() if host.services else []
    for service in host.services:
        files += _files(service, host)
    return {
        "engine_service_services": [_row(service, host) for service in host.services],
        "engine_service_files": files,
        "engine_service_units": [unit for service in host.services for unit in _units(service)],
        "engine_service_users": sorted({service.user for service in host.services}),
        "engine_service_keys": [entries.key(service) for service in host.services if service.api_key],
    }


def _common_files() -> list[dict[str, Any]]:
    return [
        *entries.library(PROGRAMS),
        entries.folder("/etc/bringup"),
        entries.folder(str(systemd.SERVICES)),
        entries.folder(str(systemd.STATE)),
        *(
            entries.folder(str(systemd.STATE / name), whole=True)
            for name in ("services", "starts", "crashes")
        ),
    ]


def _files(service: Service, host: HostPlan) -> list[dict[str, Any]]:
    return [
        *(
            entries.folder(path, owner=service.user, group=service.user, whole=True)
            for path in systemd.writable(service)
        ),
        entries.file(str(systemd.SERVICES / f"{service.name}.env"), systemd.environment_text(service)),
        entries.file(str(systemd.SERVICES / f"{service.name}.json"), _json(description(service, host))),
        entries.unit(f"{service.unit}.service", systemd.unit_text(service, host), _log_units(service)),
        entries.unit(f"{systemd.watch_unit(service)}.service", systemd.watch_unit_text(service)),
    ]


def _log_units(service: Service) -> dict[str, str]:
    """The units of the service's log, which role `log_rotation` brings."""
    name = systemd.log_unit(service)
    return {
        f"{name}.socket": systemd.log_socket_text(service),
        f"{name}.service": systemd.log_unit_text(service),
    }


def _json(data: Any) -> str:
    return json.dumps(data, ensure_ascii=False, indent=1, sort_keys=True) + "\n"


def definition(service: Service, host: HostPlan) -> list[str]:
    """Files that a running server was made from: when one of them is another, it is due for a restart."""
    ours = [word for word in service.argv if word.startswith(f"{systemd.LIBRARY}/")]
    found = [
        systemd.unit_file(f"{service.unit}.service"),
        str(systemd.SERVICES / f"{service.name}.env"),
        systemd.key_file(service),
        model_stamp(service, host),
        *ours,
        *(entries.drop_in(service, name) for name in ("cuda", "libraries") if service.gpus),
    ]
    return [path for path in found if path]


def model_stamp(service: Service, host: HostPlan) -> str | None:
    """The file that says that the service's model is complete; None when the host has no such model."""
    folders = [model.folder for model in host.models if model.name == service.model]
    return f"{folders[0]}/{READY_STAMP}" if folders else None


def address(bind: str) -> str:
    """The address at which the node itself reaches a server bound so."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bind, bind)


def description(service: Service, host: HostPlan) -> dict[str, Any]:
    """What the node's programs know of a service (/etc/bringup/services/<name>.json); no secrets."""
    return {
        "schema_version": 1,
        "name": service.name,
        "unit": service.unit,
        "profile": service.profile,
        "engine": service.engine,
        "engine_version": service.engine_version,
        "served_name": service.served_name,
        "bind": service.bind,
        "address": address(service.bind),
        "port": service.port,
        "user": service.user,
        "group": service.user,
        "own_user": sum(one.user == service.user for one in host.services) == 1,
        "program": service.argv[0],
        "endpoints": asdict(service.endpoints),
        "gpus": list(service.gpus),
        "fabric": bool(service.gpus and (host.expected.get("links") or {}).get("nvswitches")),
        "writable": list(systemd.writable(service)),
        "warm_up": [asdict(step) for step in service.warm_up],
        "start_timeout_s": service.start_timeout_s,
        "stop_timeout_s": service.stop_timeout_s,
        "probe_timeout_s": service.probe_timeout_s,
        "drain_s": service.restart.drain_s,
        "postpone_s": service.restart.postpone_s,
        "watch_every_s": systemd.WATCH_EVERY_S,
        "prefill_s": systemd.PREFILL_S,
        "stall_s": systemd.STALL_S,
        "hours": list(service.restart.hours),
        "never": list(service.restart.never),
        "hours_wait_s": service.restart.hours_wait_s,
        "drift": asdict(service.restart.drift) if service.restart.drift.watched else {},
        "key_file": systemd.key_file(service),
        "log_path": systemd.log_file(service),
        "log_namespace": systemd.log_namespace(service),
        "log_markers": dict(service.log_markers),
        "metrics_names": dict(service.metrics_names),
        "drafting": drafting(service),
        "context_tokens": service.context_tokens,
        "model_stamp": model_stamp(service, host),
        "definition": definition(service, host),
        "is_stand_in": service.is_stand_in,
    }


def drafting(service: Service) -> dict[str, Any]:
    """What the gate must see accepted; {}: the service drafts nothing, nobody wants to know, or the engine does not
    count it."""
    wanted = service.drafts and service.drafting.accept_length_at_least > 0
    counts = service.endpoints.metrics and counted(service.metrics_names)
    return asdict(service.drafting) if wanted and counts else {}


def _row(service: Service, host: HostPlan) -> dict[str, Any]:
    return {
        "name": service.name,
        "unit": service.unit,
        "definition": definition(service, host),
        "start_timeout_s": service.start_timeout_s,
        "stop_timeout_s": service.stop_timeout_s,
        "drain_s": service.restart.drain_s,
    }


def _units(service: Service) -> list[dict[str, Any]]:
    """Server and watchdog; servers are started by module `engine_servers`, which waits for their tokens."""
    name = f"{systemd.watch_unit(service)}.service"
    programs = [str(systemd.LIBRARY / f"{program}.py") for program in ("watch", "drift", "common")]
    settings = str(systemd.SERVICES / f"{service.name}.json")
    return [
        {"name": f"{service.unit}.service", "enabled": True, "started": None, "restart_on": []},
        {
            "name": name,
            "enabled": True,
            "started": True,
            "restart_on": [systemd.unit_file(name), settings, *programs],
        },
    ]
