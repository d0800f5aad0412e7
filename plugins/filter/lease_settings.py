"""Filter `lease_settings`: groups of a node, with its and its peers' addresses -> the settings of its lease
listener.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible.errors import AnsibleFilterError

from bringup.errors import BringupError
from bringup.rolevars.scheduled_restart import lease_settings


def _settings(groups: Any, hostvars: Any, name: str, port: int) -> dict[str, Any]:
    nodes = sorted({node for group in groups for node in group["nodes"]} | {name})
    addresses = {
        node: str(
            hostvars[node].get("scheduled_restart_address") or hostvars[node].get("ansible_host") or node
        )
        for node in nodes
    }
    try:
        return lease_settings(groups, addresses, name, port)
    except BringupError as error:
        raise AnsibleFilterError(str(error)) from None


class FilterModule:
    """What Ansible asks for."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Name -> function."""
        return {"lease_settings": _settings}
