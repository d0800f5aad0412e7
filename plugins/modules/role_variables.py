#!/usr/bin/python
"""Options of the action of the same name, which does all of it on the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
module: role_variables
short_description: Compare the variables of all roles with what the roles take
description:
  - One task for all roles that are played on a host, before the node is asked anything.
options:
  sealed:
    description: Role, and the hosts on which it is not played.
    type: dict
    default: {}
author: bringup
"""
