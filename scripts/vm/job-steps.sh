#!/bin/sh
# Runs inside the VM: an engine's steps and its API server beside other programs (`load steps`), under EEVDF and under
# slipstream-scx, for the comparison with hosts of the twin (docs/twin.md). Argument: SECONDS each.
# shellcheck disable=SC3045  # the shell of the VM has it
ulimit -l unlimited
state() { cat /sys/kernel/sched_ext/state; }
rows() { # NAME
  for hogs in 1 4 16; do
    /bin/load steps "$2" 5200 40 "$hogs@f" > /tmp/load || exit 1
    echo "$1 hogs $hogs $(tr '\n' ' ' < /tmp/load)"
  done
}
rows eevdf "$1"
slipstream-scx run > /tmp/scx.log 2>&1 &
i=0
while [ "$(state)" != enabled ]; do
  i=$((i + 1)); [ $i -lt 200 ] || { cat /tmp/scx.log; exit 1; }
  usleep 100000
done
rows ours "$1"
[ "$(state)" = enabled ]
