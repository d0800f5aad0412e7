#!/bin/sh
# Boots the node on this machine: node.sh boot FOLDER. FOLDER holds root/ and controller/ (unpacked), wheels/ and a checkout/.
# The node is a root file system of its own whose first process is systemd, in namespaces of its own (processes, mounts, host
# name, IPC, control groups, network), on the machine's own kernel; where the machine has GPUs it sees them, with the driver as a
# distribution's package lays it out (libcuda.so.1, no libcuda.so) and the machine's CUDA toolkit. It is reached by SSH over a
# pair of virtual network cards. node.sh controller FOLDER COMMAND... runs a command beside it, in the controller's file system.
# A node has the first GPU and CPUs 0 to 15, however many the machine has; node.sh admit FOLDER lets all others in, as it runs.
set -eu
verb=$1 folder=$2
here=198.18.7.1 there=198.18.7.2 name=hopper-01
path=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
checkout=$folder/checkout
controller_root=$folder/controller-root
node_root=$folder/node-root
own_gpus=1 own_cpus=16

# lay TARGET LOWER NAME: a writable file system over read-only ones.
lay() {
  mountpoint -q "$1" && return
  mkdir -p "$1" "$folder/$3-upper" "$folder/$3-work"
  mount -t overlay overlay -o "lowerdir=$2,upperdir=$folder/$3-upper,workdir=$folder/$3-work" "$1"
}

controller() {
  lay "$controller_root" "$folder/controller:$folder/root" controller
  for kind in proc sys dev; do
    mountpoint -q "$controller_root/$kind" || {
      mount --rbind "/$kind" "$controller_root/$kind"
      mount --make-rslave "$controller_root/$kind"
    }
  done
  mkdir -p "$controller_root/checkout"
  mountpoint -q "$controller_root/checkout" || mount --bind "$checkout" "$controller_root/checkout"
  mkdir -p "$controller_root/out" "$folder/out"
  mountpoint -q "$controller_root/out" || mount --bind "$folder/out" "$controller_root/out"
  exec chroot "$controller_root" /usr/bin/env -i HOME=/root LANG=C.UTF-8 TERM=dumb NO_COLOR=1 VIRTUAL_ENV=/opt/controller \
    "PATH=/opt/controller/bin:$path" ANSIBLE_LOCALHOST_WARNING=false sh -c 'cd /checkout && exec "$@"' sh "$@"
}

# The driver and the toolkit of the machine, read-only.
gpus() {
  [ -d /usr/local/nvidia ] || return 0
  mkdir -p "$node_root/usr/local/nvidia"
  mount --rbind -o ro /usr/local/nvidia "$node_root/usr/local/nvidia"
  for library in /usr/local/nvidia/lib64/*.so.[0-9]*; do
    ln -sf "$library" "$node_root/usr/lib/x86_64-linux-gnu/"
  done
  for program in /usr/local/nvidia/bin/nvidia-*; do ln -sf "$program" "$node_root/usr/bin/"; done
  toolkit=$(readlink -f /usr/local/cuda)
  mkdir -p "$node_root$toolkit"
  mount --bind -o ro "$toolkit" "$node_root$toolkit"
  ln -sfn "$toolkit" "$node_root/usr/local/cuda"
}

boot() {
  lay "$node_root" "$folder/root" node
  gpus
  rm -f "$folder/inside"
  mkdir -p "$node_root/srv/carried/wheels" "$node_root/old" "$checkout/.hop/ssh"
  mount --bind -o ro "$folder/wheels" "$node_root/srv/carried/wheels"
  chroot "$node_root" ldconfig
  echo "$name" >"$node_root/etc/hostname"
  printf '127.0.0.1 localhost\n%s %s\n' "$there" "$name" >"$node_root/etc/hosts"
  rm -f "$checkout/.hop/ssh/id" "$checkout/.hop/ssh/id.pub"
  chroot "$folder/root" ssh-keygen -q -t ed25519 -N '' -f /tmp/hopper-key </dev/null
  mv "$folder/root/tmp/hopper-key" "$checkout/.hop/ssh/id"
  mv "$folder/root/tmp/hopper-key.pub" "$checkout/.hop/ssh/id.pub"
  [ "$(gpus_on_bus | wc -l)" -lt 2 ] || no_multicast
  group=$(awk '$3 == "cgroup2" {print $2; exit}' /proc/mounts)/hopper
  mkdir -p "$group"
  ulimit -l unlimited 2>/dev/null || true
  most=$(($(nproc --all) - 1))
  [ $most -lt $own_cpus ] || most=$((own_cpus - 1))
  NODE_AUTHORIZED_KEY=$(cat "$checkout/.hop/ssh/id.pub") setsid sh -c "
    echo 0 >'$group/cgroup.procs'
    exec taskset -c 0-$most unshare --mount --uts --ipc --pid --cgroup --net --fork sh '$0' inside '$folder'
  " </dev/null >"$folder/console.log" 2>&1 &
  limit=100
  until [ -e "$folder/inside" ]; do
    limit=$((limit - 1)); [ $limit -gt 0 ] || { cat "$folder/console.log"; exit 1; }
    sleep 0.1
  done
  first=$(tr -d ' ' <"/proc/$!/task/$!/children")
  echo "$first" >"$checkout/.hop/first"
  ip() { chroot "$folder/root" ip "$@"; }
  ip link del hopper 2>/dev/null || true
  ip link add hopper type veth peer name eth0 netns "$first"
  ip addr add "$here/30" dev hopper
  ip link set hopper up
  in_node() { nsenter --net="/proc/$first/ns/net" chroot "$folder/root" ip "$@"; }
  in_node link set lo up
  in_node addr add "$there/30" dev eth0
  in_node link set eth0 up
  limit=300
  until key=$(cut -d' ' -f1-2 "$folder/node-upper/etc/ssh/ssh_host_ed25519_key.pub" 2>/dev/null) &&
    python3 -c "import socket; socket.create_connection(('$there', 22), 1).recv(3)" 2>/dev/null; do
    limit=$((limit - 1)); [ $limit -gt 0 ] || { tail -n 40 "$folder/console.log"; exit 1; }
    sleep 0.2
  done
  echo "$there $key" >"$checkout/.hop/ssh/known_hosts"
  echo "$name is up: process $first"
}

# The host's other GPUs belong to others, and NVLink multicast can put them out of service: no unit of the node has it, also
# where a profile forgets to say so (SGLang asks for it by itself with two and more ranks).
no_multicast() {
  mkdir -p "$node_root/etc/systemd/system.conf.d"
  echo '[Manager]
DefaultEnvironment=NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1' \
    >"$node_root/etc/systemd/system.conf.d/multicast.conf"
}

# GPUs on the bus, in its order.
gpus_on_bus() {
  for device in /sys/bus/pci/devices/*; do
    case $(cat "$device/vendor" "$device/class" | tr '\n' ' ') in
      "0x10de 0x0300"* | "0x10de 0x0302"*) basename "$device" ;;
    esac
  done
}

# hidden: GPUs that the node has not: "number address" each, the number as its device has it.
hidden() {
  gpus_on_bus | tail -n +$((own_gpus + 1)) | while read -r address; do
    number=$(awk '/^Device Minor:/ {print $3}' "/proc/driver/nvidia/gpus/$address/information")
    echo "$number $address"
  done
}

# Takes GPUs that are not the node's from its files: devices, the bus, the driver's list. The driver's programs would make
# missing devices again, which its parameters forbid as they do in containers.
hide() {
  hidden | grep -q . || return 0
  mount -t tmpfs -o mode=0755 tmpfs mnt
  mkdir mnt/devices mnt/gpus
  cp -a sys/bus/pci/devices/. mnt/devices/
  for address in $(gpus_on_bus); do mkdir "mnt/gpus/$address"; done
  hidden | while read -r number address; do
    rm -rf "dev/nvidia$number" "mnt/devices/$address"
    rmdir "mnt/gpus/$address"
  done
  for address in mnt/gpus/*; do cp "proc/driver/nvidia/gpus/$(basename "$address")/information" "$address/"; done
  sed 's/ModifyDeviceFiles: 1/ModifyDeviceFiles: 0/' proc/driver/nvidia/params >mnt/params
  mount --bind mnt/devices sys/bus/pci/devices
  mount --bind mnt/gpus proc/driver/nvidia/gpus
  mount --bind mnt/params proc/driver/nvidia/params
  umount -l mnt
}

# Gives a node that runs the GPUs and CPUs that were kept from it. Servers that start from now on have them.
admit() {
  first=$(cat "$checkout/.hop/first")
  in_node() { nsenter --mount="/proc/$first/ns/mnt" "$@"; }
  for file in sys/bus/pci/devices proc/driver/nvidia/gpus proc/driver/nvidia/params; do in_node umount "/$file" || true; done
  hidden | while read -r number _; do
    in_node sh -c "umask 0; mknod /dev/nvidia$number c $(stat -c '0x%t 0x%T' "/dev/nvidia$number")"
  done
  taskset -apc "0-$(($(nproc --all) - 1))" "$first"
}

# The first process of the node's namespaces: mounts what a machine has, leaves the machine's own files, becomes systemd.
inside() {
  mount --make-rprivate /
  hostname "$name"
  cd "$node_root"
  mount -t proc proc proc
  mount -t sysfs sysfs sys
  mount -t tmpfs -o mode=0755,nosuid tmpfs dev
  mkdir dev/pts dev/shm dev/mqueue
  mount -t devpts -o newinstance,ptmxmode=0666,mode=0620,gid=5 devpts dev/pts
  mount -t tmpfs -o nosuid,nodev tmpfs dev/shm
  mount -t mqueue mqueue dev/mqueue
  for device in null zero full random urandom tty; do cp -a "/dev/$device" dev/; done
  ln -s pts/ptmx dev/ptmx
  ln -s /proc/self/fd dev/fd
  ln -s /proc/self/fd/0 dev/stdin
  ln -s /proc/self/fd/1 dev/stdout
  ln -s /proc/self/fd/2 dev/stderr
  for device in /dev/nvidia*; do [ ! -e "$device" ] || cp -a "$device" dev/; done
  hide || echo "not all GPUs that it should not have are hidden"
  touch "$folder/inside"
  pivot_root . old
  umount -l /old
  exec /usr/bin/env -i "PATH=$path" container=docker "NODE_AUTHORIZED_KEY=$NODE_AUTHORIZED_KEY" /usr/sbin/node-init
}

shift 2
$verb "$@"
