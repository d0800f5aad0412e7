"""The seam: an inventory's `plan.node` turns intent and catalog into the variables of every role.

Ansible, ansible-inventory, AWX and `invoke provision` all come through here and see the same values.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleParserError
from ansible.plugins.inventory import BaseInventoryPlugin

ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

from bringup import handed  # noqa: E402 (the checkout must be on the path first)
from bringup.errors import BringupError  # noqa: E402

DOCUMENTATION = """
name: plan
short_description: Role variables from intent and catalog
description:
  - Reads the hosts.yml, group_vars and host_vars beside it as intent, resolves them with the catalog, and sets
    the variables of every role on every host.
  - A mistake ends here, before any node is contacted, with every problem in one message.
options:
  plugin:
    description: Must be C(plan).
    type: str
    required: true
    choices: [plan]
"""

EXAMPLES = """
# inventories/lab/plan.node
plugin: plan
"""

FILE = "plan.node"


class InventoryModule(BaseInventoryPlugin):
    """Sets role variables on the hosts of the inventory that `plan.node` lies in."""

    NAME = "plan"

    def verify_file(self, path: str) -> bool:
        """Only files called plan.node are ours."""
        return Path(path).name == FILE and bool(super().verify_file(path))

    def parse(self, inventory: Any, loader: Any, path: str, cache: bool = True) -> None:
        """Resolves the plan and adds its hosts with their variables. Raises AnsibleParserError with every
        problem."""
        super().parse(inventory, loader, path, cache)
        try:
            self._read_config_data(path)
            folder = Path(path).resolve().parent
            for host, variables in (handed.given(folder) or _resolved(folder)).items():
                inventory.add_host(host)
                for name, value in variables.items():
                    inventory.set_variable(host, name, value)
        except BringupError as error:
            # Ansible prints a parser's error twice; the problems themselves are said once, here.
            for problem in error.problems:
                self.display.error(str(problem), wrap_text=False)
            # A parser error stops the run (any_unparsed_is_failed).
            raise AnsibleParserError(
                f"{len(error.problems)} problems in intent or catalog, see above."
            ) from None


def _resolved(folder: Path) -> dict[str, dict[str, Any]]:
    from bringup import plan, rolevars

    return rolevars.of_plan(plan.load(str(folder)))
