#!/usr/bin/env bash
# The live path at speed-up 1e6, where engines are endlessly fast and all that is left is drag:
# requests/s, tokens/s, server CPU per request and per token, RSS, TTFT and ITL percentiles.
# A plain client (no quick ACKs) on the same machine. SCALE=N divides the number of requests.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${SLIPSTREAM_BIN:-${CARGO_TARGET_DIR:-target}/release/slipstream}
scale=${SCALE:-1}
out=$(mktemp -d)
server=
cleanup() {
  if [ -n "$server" ]; then kill "$server" 2>/dev/null || true; fi
  rm -r "$out"
}
trap cleanup EXIT

start() { # start WORKERS [--set …]
  "$bin" serve --listen 127.0.0.1:0 --speedup 1000000 --set "pool.main.workers=$1" "${@:2}" \
    >"$out/address" 2>"$out/log" &
  server=$!
  for _ in $(seq 100); do
    if [ -s "$out/address" ] || ! kill -0 "$server" 2>/dev/null; then break; fi
    sleep 0.1
  done
  url=$(sed -n 's/^listening on //p' "$out/address")
  if [ -z "$url" ]; then cat "$out/log" >&2; exit 1; fi
}
stop() {
  kill "$server"
  wait "$server" || true
  server=
  : >"$out/address"
}
run() { # run NAME WORKERS CONCURRENCY ISL OSL REQUESTS
  start "$2"
  "$bin" bench "$url" --concurrency "$3" --isl "$4" --osl "$5" --requests $(($6 / scale)) \
    --warmup "$3" --server-pid "$server" --label "$1" --quiet --out "$out/run.json" >"$out/text"
  printf '\n== %s (%s worker(s), c=%s, %s/%s)\n' "$1" "$2" "$3" "$4" "$5"
  sed 1d "$out/text"
  cp "$out/run.json" "$out/$1.json"
  stop
}

printf '%s, %s cores, load %s\n' "$(uname -srm)" "$(nproc)" "$(cut -d' ' -f1-3 /proc/loadavg)"
run latency 1 1 128 32 40000
run fidelity 1 256 1024 1024 32768
run peak 1 256 128 1 300000
for workers in 1 2 4 8; do run "workers-$workers" "$workers" 256 256 32 160000; done
run streams 8 1024 256 256 65536
printf '\n== side by side: 1, 2, 4, 8 workers\n'
"$bin" bench compare "$out"/workers-{1,2,4,8}.json

start 8
before=$(awk '{print $14 + $15}' "/proc/$server/stat")
sleep 20
after=$(awk '{print $14 + $15}' "/proc/$server/stat")
printf '\n== idle, 8 workers: %s ticks of CPU in 20 s (%s ticks are a second)\n' \
  $((after - before)) "$(getconf CLK_TCK)"
stop
