#!/bin/bash
# Writes down all files of a node (type, rights, owner, link target, BLAKE2 sum), its users and the units that run of
# ours to FILE, or compares with it.
#   tree.sh write FILE    tree.sh compare FILE
# Logs, caches, the books of the package manager and of those who keep users, built kernel modules, what a twin
# writes for itself, what a boot makes and what Docker writes at each start (hosts) are left out: no undo should touch them.
set -euo pipefail
books() {
  cd /
  places=(etc usr opt srv var/lib boot)
  skip='^/?(etc/(twin(/.*)?|hosts( |$)|apt/sources\.list\.d/twin\.list|ld\.so\.cache|.*\.dpkg-new|machine-id|mtab|(passwd|shadow|group|gshadow|subuid|subgid)-)|var/lib/(dpkg|apt|systemd|private|ucf|logrotate|dbus|twin)(/.*)?|var/lib/(systemd|private)|etc/\.pwd\.lock|(usr|opt/bringup/envs)/.*/__pycache__(/.*)?|usr/lib/modules/.*)'
  find "${places[@]}" -xdev \( -type f -o -type l -o -type d \) -printf '%p %y %m %U:%G %l\n' | grep -Ev "$skip" | sort
  find "${places[@]}" -xdev -type f -print0 | grep -zEv "$skip" | sort -z | xargs -0 b2sum
  systemctl list-units --all --plain --no-legend 'bringup-*' 'systemd-journald@*' | awk '$3 != "inactive" {print $1, $3}'
  nft list tables 2>/dev/null || true
}
case "$1" in
  write) books > "$2" ;;
  compare) books | diff "$2" - && echo same ;;
esac
