#!/bin/sh
# Runs inside the VM: the closed loop of examples/sched/schbench.toml under EEVDF and under slipstream-scx, for
# the comparison with the simulator (docs/sched.md). Argument: SECONDS each.
# shellcheck disable=SC3045  # the shell of the VM has it
ulimit -l unlimited
state() { cat /sys/kernel/sched_ext/state; }
cpus=$(grep -c ^processor /proc/cpuinfo)
rows() { # NAME
  # Load, and the mean sleep of a worker that is busy for 507.8 us per request.
  for row in 50:507800 70:217629 90:56422 100:0; do
    /bin/load closed "$cpus" "${row#*:}" 500000 "$2" > /tmp/load || exit 1
    echo "$1 ${row%:*} $(tr '\n' ' ' < /tmp/load)"
  done
}
# The kernel has work of its own in the first second after it has booted.
/bin/load closed "$cpus" 217629 500000 "$1" > /dev/null
rows eevdf "$1"
slipstream-scx run > /tmp/scx.log 2>&1 &
i=0
while [ "$(state)" != enabled ]; do
  i=$((i + 1)); [ $i -lt 200 ] || { cat /tmp/scx.log; exit 1; }
  usleep 100000
done
rows ours "$1"
[ "$(state)" = enabled ]
