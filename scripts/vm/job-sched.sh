#!/bin/sh
# Runs inside the VM (scripts/vm/run.sh): what slipstream-scx must do on a real kernel. Prints one
# line a check, `ok` or `FAIL`, and tables of wake-up latency under both schedulers.
ulimit -l unlimited
failed=0
check() { # NAME CONDITION...
  name=$1; shift
  if "$@"; then echo "ok   $name"; else echo "FAIL $name"; failed=1; fi
}
state() { cat /sys/kernel/sched_ext/state; }
wait_for() { # STATE; 20 s of the guest's time at most
  i=0
  while [ "$(state)" != "$1" ]; do
    i=$((i + 1)); [ $i -lt 200 ] || return 1
    usleep 100000
  done
}
load() { slipstream-scx run "$@" > /tmp/scx.log 2>&1 & loader=$!; wait_for enabled || { cat /tmp/scx.log; return 1; }; }
unload() { kill -9 $loader; wait_for disabled; }
counter() { slipstream-scx stats --json | tr ',{}' '\n\n\n' | sed -n "s/\"$1\":\([0-9]*\)/\1/p"; }

check "the doctor finds nothing missing" slipstream sched doctor
load; check "passes the verifier and schedules" [ "$(state)" = enabled ]

before=$(counter handoff)
slipstream sched bench --mechanism pipe --rounds 500 --load-pct 0 > /dev/null
after=$(counter handoff)
check "a pipe's wake-ups are handed over ($before -> $after)" [ "$after" -ge $((before + 900)) ]
before=$after
slipstream sched bench --mechanism futex --rounds 500 --load-pct 0 > /dev/null
after=$(counter handoff)
check "a futex's are not ($before -> $after)" [ "$after" -lt $((before + 100)) ]
lied=$(counter hint_lied); refused=$(counter hint_refused)
slipstream sched bench --mechanism unix --rounds 200 --linger-us 500 --load-pct 0 > /dev/null
check "a waker that lingers is refused (lied $lied -> $(counter hint_lied), refused $refused -> $(counter hint_refused))" \
  [ "$(counter hint_refused)" -ge $((refused + 100)) ]

# Two tasks of weights 100 and 51 (nice 0 and 3: 1024 and 526 of sched_prio_to_weight) on one CPU.
taskset 2 sh -c 'while :; do :; done' & heavy=$!
taskset 2 sh -c 'while :; do :; done' & light=$!
renice -n 3 -p $light > /dev/null
usleep 200000
runtime() { cut -d' ' -f1 "/proc/$1/schedstat"; }
h0=$(runtime $heavy); l0=$(runtime $light); sleep 2; h=$(( $(runtime $heavy) - h0 )); l=$(( $(runtime $light) - l0 ))
share=$((1000 * h / (h + l)))
check "two weights share a CPU: $share per mille, 662 expected" [ $share -ge 629 -a $share -le 695 ]
kill $heavy $light

# Hogs on every CPU twice over: somebody who sleeps still gets on.
hogs=
for i in 1 2 3 4 5 6 7 8; do sh -c 'while :; do :; done' & hogs="$hogs $!"; done
slipstream sched bench --mechanism unix --rounds 100 --load-pct 0 --json > /tmp/hogs.json
worst=$(sed -n 's/.*"max_us": \([0-9]*\).*/\1/p' /tmp/hogs.json)
check "hogs delay nobody by more than 1 s (longest wake-up $worst us)" [ "$worst" -lt 1000000 ]
kill $hogs

check "SIGKILL of the loader brings the kernel's scheduler back" unload
cycles=0
while [ $cycles -lt 20 ]; do load && unload || break; cycles=$((cycles + 1)); done
check "20 loads and unloads ($cycles)" [ $cycles = 20 ]
dmesg | grep -iE 'sched_ext.*(error|stall|runtime)|WARNING:|BUG:|Oops|Call Trace' > /tmp/bad
check "the kernel's log is clean" [ ! -s /tmp/bad ]
cat /tmp/bad

for run in kernel slipstream; do
  [ $run = kernel ] || load
  slipstream sched bench --rounds 1000 --load-pct 0
  [ $run = kernel ] || unload
done
exit $failed
