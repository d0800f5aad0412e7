#!/bin/bash
# Lines that end in "# early" are those whose last reader leaves before the writer has ended.
set -euo pipefail
newest=$(ls -t | head -1)  # early
oldest=$(ls -t | tail -1)
list | head -n 3  # early
list | head -n -3
list |& head -c 100  # early
head -c 100 /dev/zero | tr '\0' a
if journalctl --no-pager | grep -q 'killed'; then echo yes; fi  # early
until ss -ltnH | LC_ALL=C grep --quiet .; do sleep 0.1; done  # early
sudo journalctl | sudo grep -Eq 'a|b'  # early
journalctl | grep -m1 killed  # early
journalctl | grep killed -q  # early
journalctl | grep killed >/dev/null
journalctl | grep -c killed || head -1 list
grep -q killed list
first="$(ldconfig -p | awk '/libstdc/ {print $NF; exit}')"  # early
first="$(ldconfig -p | awk '/libstdc/ && !seen++ {print $NF}')"
ldconfig -p | awk '{sum += $1} END {exit sum > 3}'
list | sed -n '1p;q'  # early
list | sed 5q  # early
list | sed '/end/{p;q}'  # early
list | sed -n 1,5p
list | sed 's/q/exit/; s/a/q/'
list | read -r first  # early
list | while read -r line; do echo "$line"; done
list |  # early
  head -1
list | sort \
  | /usr/bin/head -1  # early
list | sort | uniq && head -1 list
