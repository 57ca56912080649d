#!/bin/sh
# Runs inside the VM (scripts/vm/run.sh): what slipstream-scx must do on a real kernel. Prints one
# line a check, `ok` or `FAIL`, and a table of wake-up latency under both schedulers.
# shellcheck disable=SC3045  # the shell of the VM has it
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
# shellcheck disable=SC2120  # arguments are for jobs that have some
load() { slipstream-scx run "$@" > /tmp/scx.log 2>&1 & loader=$!; wait_for enabled || { cat /tmp/scx.log; return 1; }; }
unload() { kill -9 $loader; wait_for disabled; }
counters() { slipstream-scx stats --json | tr ',{}' '\n\n\n' > /tmp/counters; }
counter() { sed -n "s/\"$1\":\([0-9]*\)/\1/p" /tmp/counters; }
# Median by mechanism, from the bench's JSON (keys in order of the alphabet): "pipe 6.85" and so on.
medians() {
  sed -n 's/.*"mechanism": "\([a-z]*\)".*/\1/p; s/.*"p50_us": \([0-9.]*\).*/\1/p' "$1" | paste -d' ' - - |
    awk '{ print $2, $1 }'
}
measure() { slipstream sched bench --rounds 2000 --load-pct 0 --json > "$1"; }
linger() { slipstream sched bench --mechanism unix --rounds 300 --warmup 100 --linger-us 500 --load-pct 0 --json > "$1"; }

slipstream sched doctor > /tmp/doctor; found=$?
check "the doctor finds nothing missing" [ $found = 0 ]
[ $found = 0 ] || cat /tmp/doctor
measure /tmp/eevdf.json
linger /tmp/eevdf-linger.json
# `load` (scripts/vm/load.c) prints "name value" lines; `got NAME` reads one of the last run.
run_load() { /bin/load "$@" > /tmp/load || failed=1; }
got() { sed -n "s/^$1 \([0-9]*\).*/\1/p" /tmp/load; }
within() { [ -n "$1" ] && [ "$1" -ge "$2" ] && [ "$1" -le "$3" ]; } # VALUE LEAST MOST
# Of two hogs' CPU time, the first one's share, per mille.
share_of() { a=$(got "$1"); b=$(got "$2"); echo $((1000 * a / (a + b + (a + b == 0)))); }
run_load requests 8 1 500 500 1
eevdf_requests=$(got requests_per_s)
run_load delay 1 0-1 8@0-1
eevdf_delay=$(got late_p50_us)
load; check "passes the verifier and schedules" [ "$(state)" = enabled ]

# ---- counters ----
counters; before=$(counter handoff)
slipstream sched bench --mechanism pipe --warmup 0 --rounds 500 --load-pct 0 > /dev/null
counters; after=$(counter handoff)
check "a pipe's wake-ups are handed over ($before -> $after)" [ "$after" -ge $((before + 900)) ]
before=$after
slipstream sched bench --mechanism futex --warmup 0 --rounds 500 --load-pct 0 > /dev/null
counters; after=$(counter handoff)
check "a futex's are not ($before -> $after)" [ "$after" -lt $((before + 100)) ]
lied=$(counter hint_lied); refused=$(counter hint_refused)
linger /tmp/ours-linger.json
counters
check "a waker that lingers is refused (lied $lied -> $(counter hint_lied), refused $refused -> $(counter hint_refused))" \
  [ "$(counter hint_refused)" -ge $((refused + 100)) ]
measure /tmp/ours.json

# ---- fairness ----
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
# The same without a mask: four tasks a CPU, half of them light, share all CPUs alike.
for i in 1 2 3 4 5 6 7 8; do
  sh -c 'while :; do :; done' & heavies="$heavies $!"
  sh -c 'while :; do :; done' & lights="$lights $!"; renice -n 3 -p $! > /dev/null
done
usleep 200000
total() { sum=0; for pid in "$@"; do sum=$((sum + $(runtime $pid))); done; echo $sum; }
h0=$(total $heavies); l0=$(total $lights); sleep 2; h=$(( $(total $heavies) - h0 )); l=$(( $(total $lights) - l0 ))
share=$((1000 * h / (h + l)))
check "so do sixteen tasks on all CPUs: $share per mille, 662 expected" [ $share -ge 629 -a $share -le 695 ]
kill $lights

# Hogs on every CPU twice over: somebody who sleeps still gets on.
slipstream sched bench --mechanism unix --warmup 0 --rounds 100 --load-pct 0 --json > /tmp/hogs.json
worst=$(sed -n 's/.*"max_us": \([0-9]*\).*/\1/p' /tmp/hogs.json)
# The longest slice, 12 ms, which ends at a tick of 4 ms.
check "hogs delay nobody by more than 16 ms (longest wake-up $worst us)" [ "$worst" -lt 16000 ]
kill $heavies

# ---- an ordinary load: message threads and workers, by futex ----
run_load requests 8 1 500 500 1
requests=$(got requests_per_s)
# The lowest of our runs so far less 5 %: 1,585 to 1,887 were measured. EEVDF has 989 to 1,884, by boot, so it is shown
# and is no yardstick.
check "8 workers: $requests requests/s, EEVDF $eevdf_requests" [ "$requests" -ge 1505 ]

# ---- weights, beside a task that runs freely elsewhere ----
# Shares of sched_ext's weights, which are sched_prio_to_weight over 10.24, rounded: 932:100, 100:1, 100:11.
run_load share 1 1@1:-10 1@1 1@f
share=$(share_of hog0 hog1)
check "nice -10 and 0 on one CPU: $share per mille, 903 expected" within "$share" 858 948
run_load share 1 1@1 1@1:19 1@f
share=$(share_of hog0 hog1)
check "nice 0 and 19 on one CPU: $share per mille, 990 expected" within "$share" 941 1000
run_load share 1 4@f 4@f:10
share=$((1000 * ($(got hog0) + $(got hog1) + $(got hog2) + $(got hog3)) / 4000))
check "four of nice 0 and of nice 10 on all CPUs: $share per mille, 901 expected" within "$share" 856 946

# ---- masks ----
run_load leave 1 0 4@0-1
check "no CPU of a mask idles beside waiting tasks: $(sed -n 's/^cpus //p' /tmp/load) of 2 CPUs" grep -q '^cpus \(1.9[5-9]\|2.0\)' /tmp/load
run_load leave 1 0 9@0-2
check "nor of three: $(sed -n 's/^cpus //p' /tmp/load) of 3 CPUs" grep -q '^cpus \(2.9[2-9]\|3.0\)' /tmp/load
run_load delay 1 0-1 8@0-1
check "a sleeper beside hogs of its mask is late by $(got late_p50_us) us (EEVDF $eevdf_delay), $(got late_max_us) at most" \
  [ "$(got late_p50_us)" -le 1000 -a "$(got late_max_us)" -le 12000 ]

# ---- a real-time hog takes a CPU of the mask for good ----
run_load share 2 1@1:rt 4@1-2
for i in 1 2 3 4; do
  check "beside a real-time hog on one of its two CPUs hog $i has $(got hog$i) per mille, 250 expected" within "$(got hog$i)" 237 263
done
check "and the scheduler stays" [ "$(state)" = enabled ]
# One that comes back every 3 ms: the task that it preempts must not have the CPU back each time.
run_load share 2 1@1:rt:naps 2@1 1@2-3:rt:naps 4@2-3
for i in 1 2 4 5 6 7; do
  check "beside real-time naps hog $i has $(got hog$i) per mille, 490 expected" within "$(got hog$i)" 460 515
done

# ---- everything at once ----
run_load soak 4 1
check "soak: 1 ms sleeps are late by $(got late_p99_us) us (p99), $(got late_max_us) at most, $(got raw_max_us) with what real-time sleepers were late by, $(got control_max_us) at most" [ "$(got late_max_us)" -le 300000 ]
check "and the scheduler stays" [ "$(state)" = enabled ]

# ---- coming and going ----
check "SIGKILL of the loader brings the kernel's scheduler back" unload
cycles=0
while [ $cycles -lt 20 ]; do load && unload || break; cycles=$((cycles + 1)); done
check "20 loads and unloads ($cycles)" [ $cycles = 20 ]
dmesg | grep -iE 'sched_ext.*(error|stall|runtime)|WARNING:|BUG:|Oops|Call Trace' > /tmp/bad
check "the kernel's log is clean" [ ! -s /tmp/bad ]
cat /tmp/bad

# ---- a CPU of the mask is offline when the scheduler comes ----
echo 0 > /sys/devices/system/cpu/cpu3/online
load
run_load pair 1 0 1-3
check "a pipe to a task of CPUs 1 to 3 without CPU 3: $(got round_count) rounds, the longest $(got round_max_us) us" \
  within "$(got round_max_us)" 1 20000
check "and the scheduler stays" [ "$(state)" = enabled ]
unload
echo 1 > /sys/devices/system/cpu/cpu3/online

# ---- latencies ----
# Goals: EEVDF's median over ours, per mille. They are shown, and are no test: EEVDF's differs from boot
# to boot (pipe 9.9 to 12.2 us, eventfd 9.4 or 11.6). Ours repeats within 6 % (futex 14 %) by the clock that counts
# instructions, so what fails is more than 10 % above what it takes, ns.
echo
echo "wake-up p50, us    EEVDF     ours   EEVDF/ours   goal"
row() { # NAME EEVDF OURS GOAL MOST
  ratio=$(awk "BEGIN { printf \"%d\", 1000 * $2 / $3 }")
  verdict=ok; [ "$ratio" -ge "$4" ] || verdict=missed
  awk "BEGIN { exit !(1000 * $3 <= $5) }" || { verdict=FAIL; failed=1; }
  awk "BEGIN { printf \"%-16s %7.2f  %7.2f   %10.2f   %4.2f  $verdict\n\", \"$1\", $2, $3, $ratio / 1000, $4 / 1000 }"
}
medians /tmp/eevdf.json > /tmp/eevdf; medians /tmp/ours.json > /tmp/ours
while read -r name goal most; do
  row "$name" "$(sed -n "s/^$name //p" /tmp/eevdf)" "$(sed -n "s/^$name //p" /tmp/ours)" "$goal" "$most"
done <<G
pipe 1600 7550
unix 1400 10350
tcp 1150 26330
epoll 1150 27960
eventfd 900 13050
futex 900 12850
G
# A waker that goes on for 500 us: at most 10 % worse, once learned.
row "unix, lingering" "$(medians /tmp/eevdf-linger.json | cut -d' ' -f2)" "$(medians /tmp/ours-linger.json | cut -d' ' -f2)" 909 10830
exit $failed
