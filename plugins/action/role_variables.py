"""Compares the variables of roles with what the roles say of them, all roles in one task and without the node.

Ansible does the same in front of each role, played or not, which costs every host a task for each of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.plugins.action import ActionBase

ROLES = Path(__file__).resolve().parents[2] / "roles"
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _options(path: Path) -> dict[str, Any]:
    """What a role's main entry takes."""
    found: dict[str, Any] = yaml.load(path.read_text(encoding="utf-8"), Loader=LOADER)  # noqa: S506 (a safe one)
    return dict(found["argument_specs"]["main"].get("options") or {})


# Read once, where the plugin is loaded, and not in each worker.
SPECS = {path.parents[1].name: _options(path) for path in ROLES.glob("*/meta/argument_specs.yml")}


class ActionModule(ActionBase):
    """`role_variables: {sealed: {role: [host, ...]}}`: roles that are not played on a host do not count, nor those that
    this run's tags leave out."""

    _supports_check_mode = True
    _requires_connection = False
    _VALID_ARGS = frozenset(("sealed",))

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Failed, with all that is wrong, when a variable is not what its role takes."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        known = task_vars or {}
        only, without = (set(known.get(name) or ()) for name in ("ansible_run_tags", "ansible_skip_tags"))
        sealed, host = self._task.args.get("sealed") or {}, known["inventory_hostname"]
        names = sorted(name for name in SPECS if host not in (sealed.get(name) or ()))
        chosen = [name for name in names if (not only or only & {name, "all"}) and name not in without]
        wrong = [f"role {name}: {text}" for name in chosen for text in self._wrong(name, known)]
        if wrong:
            return {**result, "failed": True, "msg": "\n".join(wrong)}
        return {**result, "changed": False}

    def _wrong(self, role: str, known: Mapping[str, Any]) -> list[str]:
        spec = SPECS[role]
        given = {name: self._templar.template(known[name]) for name in spec if name in known}
        found = ArgumentSpecValidator(spec).validate(given, validate_role_argument_spec=True)
        return list(found.error_messages)
