"""Plan -> variables of role `log_rotation`: a FIFO and a log service for each server, into files or a journal."""

from __future__ import annotations

from typing import Any

from bringup import systemd
from bringup.planned import HostPlan, Plan, Service
from bringup.rolevars import entries


def variables(host: HostPlan, plan: Plan) -> dict[str, Any]:
    """`log_rotation_services` (names), `_files` (for `node_files`), `_units` and `_keys`."""
    services = host.services
    files = [entries.folder(str(systemd.LOGS)), *entries.library(("logpipe",))] if services else []
    for service in services:
        files += _files(service)
    return {
        "log_rotation_services": [service.name for service in services],
        "log_rotation_files": files,
        "log_rotation_units": [unit for service in services for unit in _units(service)],
        "log_rotation_keys": [entries.key(service) for service in services if service.api_key],
    }


def _files(service: Service) -> list[dict[str, Any]]:
    name = systemd.log_unit(service)
    units = [
        entries.unit(f"{name}.socket", systemd.log_socket_text(service)),
        entries.unit(f"{name}.service", systemd.log_unit_text(service)),
    ]
    if service.logs.mode == "journal":
        return [entries.file(journal_file(service), systemd.journal_text(service)), *units]
    return [
        {"path": journal_file(service), "state": "absent"},
        # The group may read: operators who are in it follow a log without becoming root.
        entries.folder(str(systemd.LOGS / service.name), owner=systemd.LOG_USER, group="adm", mode="2750"),
        *units,
    ]


def journal_file(service: Service) -> str:
    """Where journald reads the settings of the service's own journal; there in journal mode only."""
    return f"/etc/systemd/journald@{service.unit}.conf"


def _units(service: Service) -> list[dict[str, Any]]:
    name = systemd.log_unit(service)
    program = str(systemd.LIBRARY / "logpipe.py")
    return [
        # Never restarted: the engine holds its other end, and what is in it would be lost.
        {"name": f"{name}.socket", "enabled": True, "started": True, "restart_on": []},
        {
            "name": f"{name}.service",
            "enabled": True,
            "started": True,
            "restart_on": [systemd.unit_file(f"{name}.service"), program],
        },
        *([_journal_unit(service)] if service.logs.mode == "journal" else []),
    ]


def _journal_unit(service: Service) -> dict[str, Any]:
    """The service's own journald: its clients stay connected while it starts again with other limits."""
    name = f"systemd-journald@{systemd.log_namespace(service)}.service"
    return {"name": name, "enabled": True, "started": True, "restart_on": [journal_file(service)]}
