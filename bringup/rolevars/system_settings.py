"""Plan -> variables of role `system_settings`: kernel values, limits, timers and the clock of a GPU node."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from bringup import ROOT
from bringup.planned import HostPlan, Plan
from bringup.rolevars import entries
from bringup.yamlfile import read_yaml

SETTINGS = "catalog/settings/gpu-node.yml"
SHM_UNIT = "bringup-shm.service"


def variables(host: HostPlan, plan: Plan) -> dict[str, Any]:
    """`system_settings_values` (name, path or pattern, value), `_files`, `_timers`, `_units`, `_clock`;
    nothing for a host without GPUs, or with `node_sysctl: false`."""
    if not host.expected.get("gpus") or not host.site.get("sysctl", True):
        return {
            "system_settings_values": [],
            "system_settings_files": [],
            "system_settings_timers": [],
            "system_settings_units": [],
            "system_settings_shared_memory": "",
            "system_settings_clock": False,
        }
    known = _known()
    kernel, files = _chosen(known, host.site.get("settings") or {})
    return {
        "system_settings_values": [
            *({"name": name, "path": path_of(name), "value": row["value"]} for name, row in kernel.items()),
            *({"name": name, "path": name, "value": row["value"]} for name, row in files.items()),
        ],
        "system_settings_files": [
            entries.file("/etc/sysctl.d/60-bringup.conf", _sysctl_text(kernel)),
            entries.file("/etc/tmpfiles.d/bringup-settings.conf", _tmpfiles_text(files)),
            entries.file("/etc/security/limits.d/60-bringup.conf", _limits_text(known["limits"])),
            entries.file("/etc/apt/apt.conf.d/52bringup-quiet", _apt_text(known["package_runs"])),
            entries.file("/etc/needrestart/conf.d/bringup.conf", _needrestart_text(known["package_runs"])),
            entries.unit(SHM_UNIT, _shm_text(known["shared_memory"])),
        ],
        "system_settings_timers": list(known["quiet_timers"]["names"]),
        "system_settings_units": [SHM_UNIT],
        "system_settings_shared_memory": known["shared_memory"]["value"],
        "system_settings_clock": bool(known["clock"]["value"]),
    }


@cache
def _known() -> dict[str, Any]:
    found: dict[str, Any] = read_yaml(ROOT / SETTINGS, SETTINGS)
    return found


def _chosen(
    known: Mapping[str, Any], wishes: Mapping[str, Any]
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Kernel values and files of /sys, as text, with the site's wishes in them; None takes one away."""
    result = []
    for kind, is_ours in (("kernel", False), ("files", True)):
        rows = {name: dict(row) for name, row in known[kind].items()}
        for name, value in wishes.items():
            if name.startswith("/") is is_ours:
                rows[name] = {"value": value, "why": "The site's wish (node_settings)."}
        result.append(
            {
                name: {**row, "value": str(row["value"])}
                for name, row in rows.items()
                if row["value"] is not None
            }
        )
    return result[0], result[1]


def path_of(name: str) -> str:
    """The file of a kernel value: `vm.swappiness` -> /proc/sys/vm/swappiness (slashes stay as they are)."""
    return f"/proc/sys/{name if '/' in name else name.replace('.', '/')}"


def _comment(row: Mapping[str, Any]) -> str:
    return f"# {' '.join(str(row['why']).split())}\n"


HEAD = "# Written by bringup from the plan: change catalog/settings or node_settings instead of this file.\n"


def _sysctl_text(rows: Mapping[str, Mapping[str, Any]]) -> str:
    return HEAD + "".join(f"{_comment(row)}{name} = {row['value']}\n" for name, row in rows.items())


def _tmpfiles_text(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """At each boot; a path that a machine lacks is passed over (tmpfiles.d(5), type w)."""
    return HEAD + "".join(f"{_comment(row)}w {name} - - - - {row['value']}\n" for name, row in rows.items())


def _limits_text(rows: Mapping[str, Mapping[str, Any]]) -> str:
    lines = [
        f"{_comment(row)}* - {name} {row['value']}\nroot - {name} {row['value']}\n"
        for name, row in rows.items()
    ]
    return HEAD + "".join(lines)


def _apt_text(row: Mapping[str, Any]) -> str:
    setting = f'Unattended-Upgrade::Automatic-Reboot "{row["automatic_reboot"]}";\n'
    return (HEAD + _comment(row)).replace("#", "//") + setting


def _needrestart_text(row: Mapping[str, Any]) -> str:
    lines = [f"$nrconf{{override_rc}}{{qr({pattern})}} = 0;\n" for pattern in row["left_alone"]]
    return HEAD + _comment(row) + "".join(lines)


def _shm_text(row: Mapping[str, Any]) -> str:
    return (
        HEAD
        + _comment(row)
        + (
            "[Unit]\nDescription=Size of /dev/shm\nDefaultDependencies=no\nAfter=local-fs.target\n"
            "Before=multi-user.target\n\n[Service]\nType=oneshot\nRemainAfterExit=yes\n"
            f"ExecStart=/bin/mount -o remount,size={str(row['value']).replace('%', '%%')} /dev/shm\n\n"
            "[Install]\nWantedBy=multi-user.target\n"
        )
    )
