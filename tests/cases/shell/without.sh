#!/bin/sh
# A shell that asks only the last command of a pipe how it ended: who left early is nobody's matter.
set -eu
ls -t | head -1
journalctl | grep -q killed
