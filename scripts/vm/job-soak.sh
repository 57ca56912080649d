#!/bin/sh
# Runs inside the VM (scripts/vm/soak.sh): everything at once for a long time. Arguments: SECONDS SEED.
# shellcheck disable=SC3045  # the shell of the VM has it
ulimit -l unlimited
state() { cat /sys/kernel/sched_ext/state; }
slipstream-scx run > /tmp/scx.log 2>&1 &
i=0
while [ "$(state)" != enabled ]; do
  i=$((i + 1)); [ $i -lt 200 ] || { cat /tmp/scx.log; exit 1; }
  usleep 100000
done
/bin/load soak "$1" "$2" > /tmp/load || exit 1
tr '\n' ' ' < /tmp/load; echo
slipstream-scx stats
late=$(sed -n 's/^late_max_us \([0-9]*\).*/\1/p' /tmp/load)
failed=0
[ "$(state)" = enabled ] || { echo "FAIL the scheduler was ended"; cat /tmp/scx.log; failed=1; }
[ -n "$late" ] && [ "$late" -le 500000 ] || { echo "FAIL a 1 ms sleep was late by $late us"; failed=1; }
dmesg | grep -iE 'sched_ext.*(error|stall|runtime)|WARNING:|BUG:|Oops|Call Trace' && failed=1
exit $failed
