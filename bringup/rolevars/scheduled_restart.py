"""Plan -> variables of role `scheduled_restart`: timers, and who of which group is asked before a restart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from bringup import systemd
from bringup.errors import Problem, UsageError
from bringup.planned import HostPlan, Plan, Service
from bringup.rolevars import entries

PROGRAMS = ("common", "restart", "lease", "drain", "drift", "windows")
LEASE_UNIT = "bringup-lease.service"
LEASE_STATE = "/var/lib/bringup-lease"
"""Where the listener keeps who restarts (StateDirectory= of its unit)."""

MARGIN_S = 600


def variables(host: HostPlan, plan: Plan) -> dict[str, Any]:
    """`scheduled_restart_groups` (name, service, unit, nodes), `_files`, `_units`; alone in its group: no
    listener.
    """
    groups = [
        {
            "name": f"{plan.inventory}/{service.name}",
            "service": service.name,
            "unit": service.unit,
            "nodes": nodes,
        }
        for service in host.services
        if len(nodes := group_of(service, plan)) > 1
    ]
    files = entries.library(PROGRAMS) if host.services else []
    files += [entries.folder(str(systemd.STATE / "restarts"), whole=True)] if host.services else []
    for service in host.services:
        files += _files(service)
    units = [unit for service in host.services for unit in _units(service)]
    if groups:
        own = {"owner": systemd.LEASE_USER, "group": systemd.LEASE_USER}
        files.append(entries.folder(LEASE_STATE, **own, whole=True))
        files.append(entries.unit(LEASE_UNIT, systemd.lease_unit_text()))
        units.append(_lease_unit())
    return {
        "scheduled_restart_groups": groups,
        "scheduled_restart_files": files,
        "scheduled_restart_units": units,
    }


def group_of(service: Service, plan: Plan) -> list[str]:
    """Hosts of the inventory that have a service of the same name: one of them restarts at a time."""
    return sorted(host.name for host in plan.hosts if any(one.name == service.name for one in host.services))


def longest_s(service: Service) -> int:
    """All that a restart may take: waiting for its hours, postponing, waiting for the lease, draining,
    stopping, starting and warming up.
    """
    restart = service.restart
    start = 2 * service.start_timeout_s + systemd.GATE_MARGIN_S + service.stop_timeout_s
    hours = restart.hours_wait_s if restart.hours or restart.never else 0
    return hours + 2 * restart.postpone_s + restart.drain_s + start + MARGIN_S


def _files(service: Service) -> list[dict[str, Any]]:
    name, drift = systemd.restart_unit(service), systemd.drift_unit(service)
    longest = longest_s(service)
    timer = f"{name}.timer" if service.restart.calendar else None
    found = [entries.unit(f"{name}.service", systemd.restart_unit_text(service, longest, timer))]
    if timer:
        found.append(entries.unit(timer, systemd.restart_timer_text(service)))
    if service.restart.drift.watched:
        text = systemd.restart_unit_text(service, longest, f"{drift}.path", "--drift")
        found.append(entries.unit(f"{drift}.service", text))
        beside = {f"{drift}.service": text}
        found.append(entries.unit(f"{drift}.path", systemd.drift_path_text(service), beside))
    return found


def _units(service: Service) -> list[dict[str, Any]]:
    names = [f"{systemd.restart_unit(service)}.timer"] if service.restart.calendar else []
    names += [f"{systemd.drift_unit(service)}.path"] if service.restart.drift.watched else []
    return [
        {"name": name, "enabled": True, "started": True, "restart_on": [systemd.unit_file(name)]}
        for name in names
    ]


def _lease_unit() -> dict[str, Any]:
    changed = [systemd.unit_file(LEASE_UNIT), "/etc/bringup/lease.json"]
    changed += [str(systemd.LIBRARY / f"{program}.py") for program in ("lease", "common")]
    return {"name": LEASE_UNIT, "enabled": True, "started": True, "restart_on": changed}


def lease_settings(
    groups: Iterable[Mapping[str, Any]], addresses: Mapping[str, str], name: str, port: int
) -> dict[str, Any]:
    """The listener's settings file on node `name`; `addresses`: node -> address at which its peers reach it.

    Raises UsageError when two nodes have one address: each would take the other's word for its own.
    """
    seen: dict[str, str] = {}
    for node, address in sorted(addresses.items()):
        if address in seen:
            what = f"is reached at {address}, as {seen[address]} is"
            remedy = "Set scheduled_restart_address to the address at which the nodes reach each other."
            raise UsageError(Problem(node, what, remedy))
        seen[address] = node
    return {
        "schema_version": 1,
        "name": name,
        "bind": addresses[name],
        "port": port,
        "groups": {
            group["name"]: {
                "name": group["service"],
                "unit": group["unit"],
                "peers": {node: addresses[node] for node in group["nodes"]},
            }
            for group in groups
        },
    }
