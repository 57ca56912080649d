#!/usr/bin/env bash
# What each mechanism is worth: the same binary and load with it on and off, in turn, REPEAT times
# (3). Requests/s, and server CPU per request over the whole process, both as the median.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${SLIPSTREAM_BIN:-${CARGO_TARGET_DIR:-target}/release/slipstream}
if ! "$bin" serve --bench-locked-table --print-config >/dev/null 2>&1; then
  echo "$bin has no ablation flags; build it with: cargo build --release --features bench" >&2
  exit 2
fi
scale=${SCALE:-1}
repeat=${REPEAT:-3}
out=$(mktemp -d)
. scripts/live.sh
cleanup() {
  stop_all
  rm -r "$out"
}
trap cleanup EXIT

median() { sort -g | awk '{ v[NR] = $1 } END { print v[int((NR + 1) / 2)] }'; }

stage() { # stage NAME SWITCH FORM WORKERS CONCURRENCY ISL OSL REQUESTS [--set …]
  : >"$out/on"
  : >"$out/off"
  requests=$(($8 / scale))
  for _ in $(seq "$repeat"); do
    for side in on off; do
      flags=()
      if [ "$side" = off ]; then flags=("$2"); fi
      "start_$3" "$4" "${@:9}" "${flags[@]}"
      before=$(cpu_ticks)
      load stage "$5" "$6" "$7" "$requests"
      after=$(cpu_ticks)
      rate=$(sed -n 's/^throughput \([0-9,.]*\) requests.*/\1/p' "$out/text" | tr -d ,)
      awk -v t=$((after - before)) -v hz="$(getconf CLK_TCK)" -v n=$((requests + $5)) -v r="$rate" \
        'BEGIN { printf "%s %.2f\n", r, t / hz / n * 1e6 }' >>"$out/$side"
      stop_all
    done
  done
  on=$(cut -d' ' -f1 "$out/on" | median)
  off=$(cut -d' ' -f1 "$out/off" | median)
  on_cpu=$(cut -d' ' -f2 "$out/on" | median)
  off_cpu=$(cut -d' ' -f2 "$out/off" | median)
  awk -v name="$1" -v a="$on" -v b="$off" -v c="$on_cpu" -v d="$off_cpu" 'BEGIN {
    printf "%-44s %9.0f %9.0f %+7.1f %%  %8.1f %8.1f %+7.1f %%\n",
      name, a, b, (a / b - 1) * 100, c, d, (c / d - 1) * 100 }'
}

printf '%s, %s cores, load %s, median of %s\n\n' "$(uname -srm)" "$(nproc)" \
  "$(cut -d' ' -f1-3 /proc/loadavg)" "$repeat"
printf '%-44s %9s %9s %9s  %8s %8s %9s\n' 'mechanism and load' 'req/s on' off gain 'µs/req on' off gain
events=(--set 'live.events.bus="zmq"')
stage 'no timer for a past deadline, 1024/1024' --bench-no-fast-path one 1 256 1024 1024 8192
stage 'the same, 256/32' --bench-no-fast-path one 1 256 256 32 60000
stage 'reused event buffers (ZeroMQ), 256/32' --bench-fresh-buffers one 1 256 256 32 60000 "${events[@]}"
stage 'a stream table a shard, 8 workers, c=1024' --bench-locked-table one 8 1024 256 32 60000
