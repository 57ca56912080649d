#!/bin/sh
# Runs inside the VM with two sockets (scripts/vm/test-sched.sh): what slipstream-scx makes of LLCs,
# SMT, NUMA nodes and CPUs that come and go, and how it refuses what it cannot do.
# shellcheck disable=SC3045  # the shell of the VM has it
ulimit -l unlimited
failed=0
check() { # NAME CONDITION...
  name=$1; shift
  if "$@"; then echo "ok   $name"; else echo "FAIL $name"; failed=1; fi
}
state() { cat /sys/kernel/sched_ext/state; }
wait_for() { # CONDITION...; 20 s of the guest's time at most
  i=0
  while ! "$@"; do
    i=$((i + 1)); [ $i -lt 200 ] || return 1
    usleep 100000
  done
}
is() { [ "$(state)" = "$1" ]; }
load() { slipstream-scx run "$@" > /tmp/scx.log 2>&1 & loader=$!; wait_for is enabled || { cat /tmp/scx.log; return 1; }; }
says() { grep -q "$1" /tmp/scx.log; }
refuses() { # NAME TEXT COMMAND...: it ends with 2 and says so
  name=$1; text=$2; shift 2
  "$@" > /tmp/out 2>&1; rc=$?
  check "$name: $(grep -m 1 "$text" /tmp/out || cat /tmp/out)" [ $rc = 2 -a -n "$(grep "$text" /tmp/out)" ]
}
runtime() { cut -d' ' -f1 "/proc/$1/schedstat"; }
cpu_of() { sed 's/.*) //' "/proc/$1/stat" | cut -d' ' -f37; } # the 39th field, two behind the name

# ---- bad input ----
echo 'nobody:x:65534:65534:nobody:/:/bin/sh' >> /etc/passwd
printf '[class.x]\ncomm = ["a"]\ncpus = "4-99"\n' > /tmp/cpus.toml
refuses "a class of CPUs that are not there" "/tmp/cpus.toml" slipstream-scx run --classes /tmp/cpus.toml
printf '[class.x]\ncomm = ["a"]\nwieght = 3\n' > /tmp/key.toml
refuses "a class with an unknown key" "wieght" slipstream-scx run --classes /tmp/key.toml
printf '[class.x]\ncomm = ["a_name_of_17_char"]\n' > /tmp/name.toml
refuses "a name longer than the kernel keeps" "a_name_of_17_char" slipstream-scx run --classes /tmp/name.toml
refuses "without the capabilities" "CAP_BPF" su -s /bin/sh nobody -c "slipstream-scx run"
refuses "no scheduler to show counters of" "not running" slipstream-scx stats

# ---- LLCs ----
printf '[class.far]\ncomm = ["far"]\ncpus = "4-7"\n' > /tmp/classes.toml
load --classes /tmp/classes.toml
check "two LLCs are seen" says "8 CPUs in 2 LLCs"
check "the host has two NUMA nodes" [ -d /sys/devices/system/node/node1 ]
refuses "a second scheduler" "attached" slipstream-scx run
# Eight hogs of one parent spread over both sockets.
for i in 1 2 3 4 5 6 7 8; do sh -c 'while :; do :; done' & hogs="$hogs $!"; done
usleep 500000
for pid in $hogs; do before="$before $(runtime $pid)"; done
sleep 1
least=1000000000
for pid in $hogs; do
  b=${before# }; b=${b%% *}; before=${before# }; before=${before#* }
  ran=$(( $(runtime $pid) - b )); [ $ran -ge $least ] || least=$ran
done
check "eight hogs have a CPU each (the least ran $((least / 1000000)) ms in 1 s)" [ $least -ge 900000000 ]
kill $hogs; hogs=
# Twelve hogs on eight CPUs have two thirds of one each; a mask across the sockets has both its CPUs.
check_hogs() { # NAME N LEAST MOST, of /tmp/load
  worst=$(sed -n 's/^hog[0-9]* //p' /tmp/load | sort -n | sed -n '1p;$p' | tr '\n' ' ')
  check "$1: $worst per mille each" [ "${worst% * }" -ge "$2" -a "$(echo $worst | cut -d' ' -f2)" -le "$3" ]
}
/bin/load share 2 12@f > /tmp/load
check_hogs "twelve hogs share eight CPUs alike, 667 expected" 600 733
/bin/load share 1 4@3-4 > /tmp/load
check_hogs "four hogs of a mask with one CPU of each socket, 500 expected" 475 525
/bin/load share 2 8@f 8@f:10 > /tmp/load
share=$(awk '/^hog/ { n++; all += $2; if (n <= 8) heavy += $2 } END { printf "%.0f", 1000 * heavy / (all + !all) }' /tmp/load)
check "eight of nice 0 and of nice 10 in both LLCs: $share per mille, 901 expected" [ "$share" -ge 856 -a "$share" -le 946 ]
# Nineteen hogs that may run on three CPUs wait ahead of four free ones, which are due the other five.
/bin/load share 2 4@0-7 19@0-2 > /tmp/load
least=$(sed -n 's/^hog[0-3] \([0-9]*\).*/\1/p' /tmp/load | sort -n | head -1)
check "free hogs behind a crowd of masked ones have a CPU each ($least per mille at least)" [ -n "$least" -a "$least" -ge 950 ]
/bin/load soak 4 2 > /tmp/load
late=$(sed -n 's/^late_max_us \([0-9]*\).*/\1/p' /tmp/load)
check "soak: 1 ms sleeps are late by $late us at most, $(sed -n 's/^raw_max_us //p' /tmp/load) with what real-time sleepers were late by, $(sed -n 's/^control_max_us //p' /tmp/load) at most" [ -n "$late" -a "$late" -le 300000 ]
check "and the scheduler stays" is enabled
# A class of the second socket's CPUs stays there.
printf '#!/bin/sh\nwhile :; do usleep 1000; done\n' > /tmp/far; chmod +x /tmp/far
wrong=0
/tmp/far & far=$!
usleep 100000
i=0; while [ $i -lt 20 ]; do [ "$(cpu_of $far)" -ge 4 ] || wrong=$((wrong + 1)); usleep 20000; i=$((i + 1)); done
check "a class stays on its CPUs ($wrong of 20 looks found it elsewhere)" [ $wrong = 0 ]
kill $far

# ---- CPUs come and go, under load ----
for i in 1 2 3 4; do sh -c 'while :; do usleep 20000; done' & hogs="$hogs $!"; done
for cpu in 3 6; do
  for to in 0 1; do
    : > /tmp/scx.log
    echo $to > /sys/devices/system/cpu/cpu$cpu/online
    wait_for says "slipstream schedules"
    check "CPU $cpu $( [ $to = 0 ] && echo leaves || echo returns ): $(grep schedules /tmp/scx.log | cut -d';' -f1)" is enabled
  done
done
kill $hogs
kill -9 $loader
check "SIGKILL of the loader brings the kernel's scheduler back" wait_for is disabled
dmesg | grep -iE 'sched_ext.*(error|stall|runtime)|WARNING:|BUG:|Oops|Call Trace' > /tmp/bad
check "the kernel's log is clean" [ ! -s /tmp/bad ]
cat /tmp/bad
exit $failed
