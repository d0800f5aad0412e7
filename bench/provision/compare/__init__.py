"""Provisioning beside its alternatives: the same end state by stock Ansible, Mitogen, pyinfra, ours and one script."""
