"""What the service promises, measured on lab nodes: rolling restarts, rotations, reboots."""
