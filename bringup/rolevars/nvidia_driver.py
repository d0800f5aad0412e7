"""Plan -> variables of role `nvidia_driver`: what the platform needs and what the site wants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bringup import ROOT, systemd
from bringup.planned import HostPlan, Plan
from bringup.rolevars import entries
from bringup.yamlfile import read_text

SETTINGS_UNIT = "bringup-gpu-settings.service"
KEYRING = "/etc/apt/keyrings/bringup-driver.asc"
REPOSITORY = "/etc/apt/sources.list.d/bringup-driver-repository.sources"
SMI = "/usr/bin/nvidia-smi"
DEFAULT_POWER = (
    f"/bin/sh -c '{SMI} --query-gpu=index,power.default_limit --format=csv,noheader,nounits | "
    'grep "^[0-9][0-9]*, " | '
    f'while IFS=", " read -r gpu watts; do {SMI} --id=$$gpu --power-limit=$$watts; done\''
)
"""Each GPU's own limit again: nvidia-smi has no option for that, and a limit outlives the unit that set it."""

HEAD = "# Written by bringup from the plan: provision again instead of editing.\n"
NEVER_UNATTENDED = ("^nvidia-", "^libnvidia-", "^linux-modules-nvidia-", "^cuda-drivers")


def variables(host: HostPlan, plan: Plan) -> dict[str, Any]:
    """`nvidia_driver_gpus` (0: nothing is done), `_wish`, `_files`, `_units`, `_archive`, `_services`."""
    gpus, driver = host.expected.get("gpus"), host.expected.get("driver") or {}
    site: Mapping[str, Any] = host.site.get("driver") or {}
    if not gpus or not site.get("manage", True):
        return {
            "nvidia_driver_gpus": 0,
            "nvidia_driver_wish": {},
            "nvidia_driver_files": [],
            "nvidia_driver_units": [],
            "nvidia_driver_archive": "",
            "nvidia_driver_services": [],
        }
    return {
        "nvidia_driver_gpus": gpus["count"],
        "nvidia_driver_wish": {
            "version": site.get("version") or "",
            "minimum": driver.get("minimum") or "",
            "recommended": driver.get("recommended") or "",
            "open_modules": bool(driver.get("open_modules")),
            "fabric": bool(driver.get("fabric_manager")),
            "modules": site.get("modules") or "dkms",
        },
        "nvidia_driver_files": [*_files(host, site), *_repository(site.get("repository"))],
        "nvidia_driver_units": [SETTINGS_UNIT],
        "nvidia_driver_archive": site.get("archive") or "",
        "nvidia_driver_services": [
            {
                "name": service.name,
                "unit": service.unit,
                "drain_s": service.restart.drain_s,
                "stop_timeout_s": service.stop_timeout_s,
            }
            for service in host.services
            if service.gpus
        ],
    }


def _files(host: HostPlan, site: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = "".join(f'  "{pattern}";\n' for pattern in NEVER_UNATTENDED)
    unattended = f"{HEAD.replace('#', '//')}Unattended-Upgrade::Package-Blacklist {{\n{rows}}};\n"
    nouveau = f"{HEAD}blacklist nouveau\nblacklist nova_core\noptions nouveau modeset=0\n"
    files = [
        entries.file("/etc/modprobe.d/bringup-nouveau.conf", nouveau),
        entries.file("/etc/apt/apt.conf.d/52bringup-driver", unattended),
        # Not validated: its program comes with the packages, after the files.
        entries.file(systemd.unit_file(SETTINGS_UNIT), settings_text(site)),
    ]
    if _memory_is_a_node(host):
        drop_in = "/etc/systemd/system/nvidia-persistenced.service.d/50-bringup.conf"
        files.append(entries.file(drop_in, PERSISTENCE_AS_ROOT))
    return files


PERSISTENCE_AS_ROOT = HEAD + (
    "# GPU memory is a memory node here, which only root may bring online (Grace Hopper tuning guide).\n"
    "[Service]\nExecStart=\n"
    "ExecStart=/usr/bin/nvidia-persistenced --user root --persistence-mode --verbose\n"
)


def _memory_is_a_node(host: HostPlan) -> bool:
    machine = host.expected.get("host") or {}
    return any(node.get("gpu_memory") for node in machine.get("numa") or ())


def settings_text(site: Mapping[str, Any]) -> str:
    """The unit that sets persistence, clocks and power at each boot, and takes the last two back when stopped."""
    clocks, power = site.get("clocks_mhz"), site.get("power_w")
    commands = [f"ExecStart={SMI} --persistence-mode=1"]
    if power:
        commands.append(f"ExecStart={SMI} --power-limit={power}")
        commands.append(f"ExecStop={DEFAULT_POWER}")
    if clocks:
        commands.append(f"ExecStart={SMI} --lock-gpu-clocks={clocks[0]},{clocks[1]}")
        commands.append(f"ExecStop={SMI} --reset-gpu-clocks")
    lines = "\n".join(commands)
    return (
        f"{HEAD}[Unit]\nDescription=Persistence, clocks and power of the GPUs\n"
        "After=nvidia-persistenced.service nvidia-fabricmanager.service\n\n"
        f"[Service]\nType=oneshot\nRemainAfterExit=yes\nTimeoutStartSec=180\n{lines}\n\n"
        "[Install]\nWantedBy=multi-user.target\n"
    )


def _repository(wish: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    if not wish:
        return [{"path": path, "state": "absent"} for path in (KEYRING, REPOSITORY)]
    parts = f"Components: {' '.join(wish['components'])}\n" if wish["components"] else ""
    source = f"Types: deb\nURIs: {wish['uri']}\nSuites: {wish['suite']}\n{parts}Signed-By: {KEYRING}\n"
    key = read_text(ROOT / wish["key"], f"node_driver.repository.key: {wish['key']}")
    return [
        entries.file(KEYRING, key),
        entries.file(REPOSITORY, HEAD + source),
    ]
