#!/bin/sh
# Runs once inside the new root file system, after the packages are there: setup.sh ARCH EMULATED(yes|no). Its files lie in /opt/node.
set -eu
arch=$1
emulated=$2
files=/opt/node

install -m 0755 "$files/node-init" /usr/sbin/node-init
install -m 0644 "$files/node-keys.service" /etc/systemd/system/node-keys.service
install -D -m 0644 "$files/sshd.conf" /etc/ssh/sshd_config.d/10-node.conf
install -D -m 0644 "$files/journald.conf" /etc/systemd/journald.conf.d/10-node.conf
install -d -m 0755 /etc/ssh/authorized_keys.d
install -d -m 2755 -g systemd-journal /var/log/journal
[ "$emulated" = no ] || install -D -m 0644 "$files/qemu-user.conf" /etc/systemd/system/service.d/10-qemu-user.conf

# The machine's own certificate authorities and pip settings, where it has some: a node sees the network as the machine does.
mkdir -p /usr/local/share/ca-certificates
find "$files/machine" -name '*.crt' -exec cp {} /usr/local/share/ca-certificates/ \; 2>/dev/null || true
if [ "$emulated" = no ]; then
  update-ca-certificates >/dev/null 2>&1
elif [ -e "$files/machine/ca-bundle" ]; then
  # Under qemu update-ca-certificates takes minutes: there the machine's bundle is copied.
  install -D -m 0644 "$files/machine/ca-bundle" /etc/ssl/certs/ca-certificates.crt
fi
[ ! -e "$files/machine/pip.conf" ] || install -m 0644 "$files/machine/pip.conf" /etc/pip.conf
cat "$files/environment" >>/etc/environment

# Each node makes its own identity when it boots.
: >/etc/machine-id
rm -f /var/lib/dbus/machine-id /etc/ssh/ssh_host_*
: >/etc/default/locale

systemctl enable node-keys.service ssh.service
systemctl set-default multi-user.target
# Timers that would take apt's lock in the middle of a test, and consoles that a container has not.
systemctl mask apt-daily.timer apt-daily-upgrade.timer fstrim.timer getty.target console-getty.service \
  systemd-ask-password-console.path systemd-ask-password-wall.path

useradd -m -s /bin/bash sre
printf 'sre ALL=(ALL) NOPASSWD: ALL\n' >/etc/sudoers.d/sre
chmod 0440 /etc/sudoers.d/sre
printf '%s\n' "$arch" >/etc/node-arch
rm -rf "$files"
