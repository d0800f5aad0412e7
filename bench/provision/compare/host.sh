#!/bin/sh
# Becomes one light host: NAME ROOT FOLDER ADDRESS ... (in mount, process and name namespaces of its own).
# The overlay's changes lie in FOLDER/up. Ends with its sshd.
set -eu
name=$1 root=$2 folder=$3
shift 3
mount --make-rprivate /
mkdir -p "$folder/up" "$folder/work" "$folder/whole"
mount -t overlay "$name" -o "lowerdir=$root,upperdir=$folder/up,workdir=$folder/work" "$folder/whole"
cd "$folder/whole"
mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
mount --rbind /dev dev
mount -t tmpfs tmpfs tmp
mount -t tmpfs tmpfs run
chmod 1777 tmp
# Preflight asks for systemd by this folder, as sd_booted(3) does. It is all that there is of systemd here.
mkdir -p -m 0755 run/sshd run/lock run/systemd/system
hostname "$name"
listen=
for address; do listen="$listen -o ListenAddress=$address"; done
# shellcheck disable=SC2086
exec chroot . env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root /usr/sbin/sshd -D -f /etc/ssh/compare.conf $listen
