#!/usr/bin/python
"""Makes CUDA usable for servers that compile, and asks the GPUs (`bringup/node/cuda.py`)."""

from __future__ import annotations

DOCUMENTATION = r"""
module: cuda_runtime
short_description: Links that the linker lacks, the toolkit in the servers' environment, and a check of the GPUs
description:
  - Installs a compiler where a server compiles at run time and the node has none that makes a program.
  - Makes libcuda.so, libcudart.so and libnvrtc.so in a folder of our own, only where the linker finds none.
  - Gives each server the toolkit's compiler on its PATH, CUDA_HOME and LIBRARY_PATH, unless its plan sets them.
  - Links a line of C with each such server's environment.
  - Starts CUDA in a process of its own and compares what the GPUs say with what is expected.
options:
  services:
    description: Servers. C(name), C(drop_in), C(environment_file), C(keeps) (variables that are not touched), and
      C(languages) and C(links) (what it compiles and links at run time), C(compilers) and C(folders) of the profile.
    type: list
    elements: dict
    default: []
  homes:
    description: Folders (or patterns) of toolkits beside the usual ones.
    type: list
    elements: str
    default: []
  packages:
    description: Packages of a compiler, installed where a server compiles and the node's compiler makes no program.
    type: list
    elements: str
    default: []
  expected:
    description: C(gpus), C(sm), C(host_gbps), C(memory_gbps); 0 or empty for what does not matter.
    type: dict
    required: true
  check_gpus:
    description: Whether the GPUs are asked.
    type: bool
    default: true
  bandwidth:
    description: Whether copies are timed too. Not on a node that serves.
    type: bool
    default: false
author: bringup
"""

RETURN = r"""
done:
  description: Packages and files that were brought, one a line.
  returned: success
  type: list
toolkit:
  description: The newest toolkit's folder; empty for none.
  returned: success
  type: str
links:
  description: Links that were needed, name and target.
  returned: success
  type: dict
smoke:
  description: What CUDA said of the GPUs.
  returned: success
  type: dict
timed:
  description: What a tool on the node timed, C(tool) and C(rows), a row a GPU. Empty without one, or C(bandwidth).
  returned: success
  type: dict
"""

from ansible.module_utils.basic import AnsibleModule  # noqa: E402 (documentation comes first)
from ansible.module_utils.bringup_node import cuda, packages, place  # noqa: E402


def main() -> None:
    """Bring links and environment to what is wanted, then ask the GPUs."""
    module = AnsibleModule(
        argument_spec={
            "services": {"type": "list", "elements": "dict", "default": []},
            "homes": {"type": "list", "elements": "str", "default": []},
            "packages": {"type": "list", "elements": "str", "default": []},
            "expected": {"type": "dict", "required": True},
            "check_gpus": {"type": "bool", "default": True},
            "bandwidth": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    try:
        outcome = cuda.apply(module.params, module.check_mode)
    except (place.PlaceFailed, packages.PackagesFailed, OSError) as error:
        module.fail_json(msg=str(error))
    problems = outcome.pop("problems")
    if problems and not module.check_mode:
        module.fail_json(msg="; ".join(problems), **outcome)
    module.exit_json(**outcome)


if __name__ == "__main__":
    main()
