"""What provisioning costs, next to plain Ansible."""
