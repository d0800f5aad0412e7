#!/bin/sh
# On the GPU machine: device.sh receive N takes the part in .hop/partN; device.sh run SECONDS WAIT [STEP...] goes up the ladder,
# or takes those steps of it; device.sh wait SECONDS waits for a ladder that still goes on. Results are in $OUT (results.tar.gz,
# console.txt) all along.
set -eu
folder=${HOPPER_FOLDER:-/srv/hopper}
checkout=$(cd "$(dirname "$0")/../.." && pwd)
verb=$1
mkdir -p "$folder/wheels" "$folder/out"
cd "$checkout"

# unpack NAME OFFSET BYTES: an archive out of the stream, beside everything else.
unpack() {
  target=$folder/${1%%.*}
  mkdir -p "$target"
  { until [ "$1" = unpacker.tar ] || [ -e "$folder/unpacker.done" ]; do sleep 0.1; done
    until [ "$1" = unpacker.tar ] || [ "$1" = root.tar.zst ] || [ -e "$folder/root.done" ]; do sleep 0.1; done
    tail -c "+$(($2 + 1))" "$folder/stream" | head -c "$3" >"$folder/$1"
    case $1 in
      unpacker.tar) tar -xf "$folder/$1" -C "$target" ;;
      *) "$folder/unpacker/ld-linux-x86-64.so.2" --library-path "$folder/unpacker" "$folder/unpacker/zstd" -dcq --long=28 "$folder/$1" |
        tar -x -C "$target" -p ;;
    esac
    touch "$folder/${1%%.*}.done"
  } >>"$folder/unpack.log" 2>&1
}

pack() {
  python3 bench/hopper/wheels.py pack "$folder/wheels"
  touch "$folder/pack.done"
}

receive() {
  [ "$1" != 0 ] || { : >"$folder/stream"; setsid sh "$0" pack >"$folder/wheels.log" 2>&1 </dev/null & }
  cat ".hop/part$1/part" >>"$folder/stream"
  python3 - ".hop/part$1/parts.json" "$folder" <<'X' >"$folder/todo"
import json, os, sys
said, folder = json.load(open(sys.argv[1])), sys.argv[2]
have, at = os.path.getsize(f"{folder}/stream"), 0
for row in said["archives"]:
    end = at + row["bytes"]
    if end <= have and not os.path.exists(f"{folder}/{row['name']}.seen"):
        open(f"{folder}/{row['name']}.seen", "w").close()
        print(row["name"], at, row["bytes"])
    at = end
X
  while read -r name at bytes; do
    setsid sh "$0" unpack "$name" "$at" "$bytes" </dev/null >/dev/null 2>&1 &
  done <"$folder/todo"
  ls -la "$folder"
}

run() {
  for name in root controller wheels pack; do
    limit=600
    until [ -e "$folder/$name.done" ]; do
      limit=$((limit - 1)); [ $limit -gt 0 ] || { echo "$name is not there"; cat "$folder/unpack.log" "$folder/wheels.log"; exit 1; }
      sleep 0.1
    done
  done
  # A checkout of its own: each transfer brings this one back to what it was. Where there is a commit's archive, it is that one.
  if [ ! -d "$folder/checkout" ]; then
    mkdir -p "$folder/checkout.new"
    if [ -e .hop/commit/checkout.tar ]; then cat .hop/commit/checkout.tar; else tar -c --exclude=./.hop --exclude=./.git --exclude=./.venv --exclude=./.lab --exclude=./runs .; fi |
      tar -x -C "$folder/checkout.new"
    mv "$folder/checkout.new" "$folder/checkout"
  fi
  rm -f "$folder/out/done"
  python3 bench/hopper/wheels.py lock "$folder/wheels" "$folder/checkout/catalog/engines/locks/sglang-0.5.15.post1-x86_64.txt"
  kill -0 "$(cat "$folder/checkout/.hop/first" 2>/dev/null)" 2>/dev/null || sh bench/hopper/node.sh boot "$folder"
  seconds=$1 wait=$2
  shift 2
  for step in "$@"; do
    set -- "$@" --only "$step"
    shift
  done
  setsid sh bench/hopper/node.sh controller "$folder" python -m bench.hopper.ladder /out --until "$seconds" "$@" \
    </dev/null >"$folder/out/console.txt" 2>&1 &
  wait_for "$wait"
}

wait_for() {
  end=$(($(date +%s) + $1))
  until [ -e "$folder/out/done" ] || [ "$(date +%s)" -ge "$end" ]; do
    sleep 2
    cp "$folder/out/"[a-z]* "$OUT/" 2>/dev/null || true
  done
  cp "$folder/out/"[a-z]* "$OUT/"
  tail -n 60 "$OUT/console.txt"
}

shift
case $verb in
  pack) pack ;;
  unpack) unpack "$@" ;;
  receive) receive "$@" ;;
  run) run "$@" ;;
  wait) wait_for "$@" ;;
  *) echo "receive N | run SECONDS WAIT [STEP...] | wait SECONDS"; exit 2 ;;
esac
