"""Programs that run on nodes: standard library only, Python 3.10 and up, one file each.

Ansible modules take them in through `plugins/module_utils/bringup_node` (a link to this folder); the
controller imports them as `bringup.node.*`, which is how they are tested.
"""
