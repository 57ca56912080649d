#!/bin/sh
# Runs inside the VM (scripts/vm/run.sh): the loader as something that is left running. Prints one line
# a check, `ok` or `FAIL`.
# shellcheck disable=SC3045  # the shell of the VM has it
ulimit -l unlimited
failed=0
check() { # NAME CONDITION...
  name=$1; shift
  if "$@"; then echo "ok   $name"; else echo "FAIL $name"; failed=1; fi
}
state() { cat /sys/kernel/sched_ext/state; }
is() { [ "$(state)" = "$1" ]; }
wait_for() { # CONDITION...; 20 s of the guest's time at most
  i=0
  while ! "$@"; do
    i=$((i + 1)); [ $i -lt 200 ] || return 1
    usleep 100000
  done
}
says() { grep -q "$1" /tmp/scx.log; }
# A background job of a script: the shell starts it with SIGINT ignored.
load() { slipstream-scx run "$@" > /tmp/scx.log 2>&1 & loader=$!; wait_for is enabled || { cat /tmp/scx.log; return 1; }; }

# ---- signals ----
for signal in INT TERM; do
  load; kill -$signal $loader; wait $loader; rc=$?
  check "SIG$signal ends the loader with 0 (it was $rc)" [ $rc = 0 ]
  check "and brings the kernel's scheduler back" wait_for is disabled
done

# ---- output without a reader ----
mkfifo /tmp/pipe
head -n 1 < /tmp/pipe > /tmp/first & reader=$!
slipstream-scx run --stats 1 > /tmp/pipe 2>&1 & loader=$!
wait_for is enabled
wait $reader
sleep 3 # counters are printed meanwhile
check "a reader that went does not end the scheduler" is enabled
kill $loader; wait $loader; rc=$?
check "and SIGTERM ends it with 0 (it was $rc)" [ $rc = 0 ]

# ---- cgroups that come and go ----
cg=/sys/fs/cgroup
echo +cpu > $cg/cgroup.subtree_control
printf '[class.pod]\ncgroup = ["pods/*"]\nweight = 10\n' > /tmp/classes.toml
mkdir $cg/pods
load --classes /tmp/classes.toml
# 600 at a time: one process makes them, another removes them.
n=0
while [ $n -lt 9000 ] && is enabled; do
  seq $((n + 1)) $((n + 600)) | sed "s|^|$cg/pods/p|" > /tmp/pods
  xargs mkdir < /tmp/pods; xargs rmdir < /tmp/pods
  n=$((n + 600))
done
check "$n cgroups came and went" is enabled
check "and the loader lives" kill -0 $loader
check "without a word" [ "$(wc -l < /tmp/scx.log)" -le 8 ]

# ---- settings that are not enforced ----
mkdir $cg/limited
echo "50000 100000" > $cg/limited/cpu.max
if grep -q 'SLIP_HONORS_CPU_MAX *1' /files/intf.h 2>/dev/null; then
  echo "ok   cpu.max is enforced: nothing to warn of"
else
  check "a limit set later is warned of by name" wait_for says "limited: cpu.max 50000 100000"
fi
kill $loader; wait $loader
if ! grep -q 'SLIP_HONORS_CPU_MAX *1' /files/intf.h 2>/dev/null; then
  slipstream-scx run --seconds 1 > /tmp/out 2>&1; rc=$?
  check "a limit of an empty cgroup is warned of by name, not refused ($rc)" \
    [ $rc = 0 -a -n "$(grep 'start there: limited: cpu.max 50000 100000' /tmp/out)" ]
  sleep 60 & sleeper=$!
  echo $sleeper > $cg/limited/cgroup.procs
  slipstream-scx run --seconds 1 > /tmp/out 2>&1; rc=$?
  check "a limit in use is refused by name ($rc)" [ $rc = 2 -a -n "$(grep 'limited: cpu.max' /tmp/out)" ]
  slipstream-scx run --seconds 1 --ignore-cpu-max > /tmp/out 2>&1; rc=$?
  check "unless told to ignore it ($rc)" [ $rc = 0 ]
  kill $sleeper
fi

# ---- the kernel ends the scheduler ----
load
echo S > /proc/sysrq-trigger # the operator's way back to the kernel's scheduler
t0=$(cut -d' ' -f1 /proc/uptime)
wait $loader; rc=$?
t1=$(cut -d' ' -f1 /proc/uptime)
check "SysRq-S ends it with 0 (it was $rc)" [ $rc = 0 ]
check "at once ($t0 -> $t1)" awk "BEGIN { exit !($t1 - $t0 < 0.5) }"
# A task that may only run where a real-time task never sleeps: no scheduler can help it.
if command -v chrt > /dev/null; then
  load
  chrt -f 50 taskset 2 sh -c 'while :; do :; done' & hog=$!
  taskset 2 sh -c 'while :; do :; done' & victim=$!
  wait $loader; rc=$?
  kill -9 $hog $victim
  check "it ends with 3 when the kernel ended the scheduler (it was $rc)" [ $rc = 3 ]
  check "says why" says "the kernel ended the scheduler.*stall"
  check "and prints the kernel's dump" says "^CPU 1"
else
  echo "skip the end by the kernel, with its dump: this busybox has no chrt"
fi
[ $failed = 0 ] || cat /tmp/scx.log
exit $failed
