"""Compares the variables of roles with what the roles say of them: all roles and hosts in one task, without a node.

Ansible does the same in front of each role, played or not, which costs every host a task for each of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.plugins.action import ActionBase

ROLES = Path(__file__).resolve().parents[2] / "roles"
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _options(role: str) -> dict[str, Any]:
    """What a role's main entry takes."""
    text = (ROLES / role / "meta" / "argument_specs.yml").read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.load(text, Loader=LOADER)  # noqa: S506 (a safe one)
    return dict(found["argument_specs"]["main"].get("options") or {})


class ActionModule(ActionBase):
    """`role_variables: {sealed: {role: [host, ...]}}` with `run_once`: all hosts of the play count. Roles that are not
    played on a host do not, nor those that this run's tags leave out."""

    _supports_check_mode = True
    _requires_connection = False
    _VALID_ARGS = frozenset(("sealed",))

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Failed, with all that is wrong on all hosts, when a variable is not what its role takes."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        known = task_vars or {}
        only, without = (set(known.get(name) or ()) for name in ("ansible_run_tags", "ansible_skip_tags"))
        sealed = self._task.args.get("sealed") or {}
        specs = {
            path.name: _options(path.name)
            for path in sorted(ROLES.iterdir())
            if (not only or only & {path.name, "all"}) and path.name not in without
        }
        wrong: dict[str, list[str]] = {}
        for host in known["ansible_play_hosts"]:
            for role, spec in specs.items():
                if host not in (sealed.get(role) or ()):
                    for text in self._wrong(spec, known["hostvars"][host]):
                        wrong.setdefault(f"role {role}: {text}", []).append(host)
        if wrong:
            return {**result, "failed": True, "msg": "\n".join(map(_told, wrong, wrong.values()))}
        return {**result, "changed": False}

    def _wrong(self, spec: Mapping[str, Any], known: Mapping[str, Any]) -> list[str]:
        given = {name: known[name] for name in spec if name in known}
        found = ArgumentSpecValidator(spec).validate(given, validate_role_argument_spec=True)
        return list(found.error_messages)


def _told(text: str, hosts: Sequence[str]) -> str:
    more = f" and {len(hosts) - 1} more" if len(hosts) > 1 else ""
    return f"{hosts[0]}{more}: {text}"
