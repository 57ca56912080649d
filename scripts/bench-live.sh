#!/usr/bin/env bash
# The live path at speed-up 1e6, where engines are endlessly fast and all that is left is drag:
# requests/s, tokens/s, server CPU per request and per token, RSS, TTFT and ITL percentiles. First
# as one process (`serve`), then as two (`frontend` and `worker`; their CPU and RSS are summed).
# A plain client (no quick ACKs) on the same machine. SCALE=N divides the number of requests;
# ONLY=one or ONLY=two runs one half.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${SLIPSTREAM_BIN:-${CARGO_TARGET_DIR:-target}/release/slipstream}
scale=${SCALE:-1}
out=$(mktemp -d)
. scripts/live.sh
cleanup() {
  stop_all
  rm -r "$out"
}
trap cleanup EXIT

run() { # run NAME WORKERS CONCURRENCY ISL OSL REQUESTS
  "start_$form" "$2"
  load "$form-$1" "$3" "$4" "$5" $(($6 / scale))
  printf '\n== %s: %s (%s worker(s), c=%s, %s/%s)\n' "$form" "$1" "$2" "$3" "$4" "$5"
  sed 1d "$out/text"
  stop_all
}

printf '%s, %s cores, load %s\n' "$(uname -srm)" "$(nproc)" "$(cut -d' ' -f1-3 /proc/loadavg)"
for form in ${ONLY:-one two}; do
  run latency 1 1 128 32 40000
  run fidelity 1 256 1024 1024 32768
  run peak 1 256 128 1 300000
  for workers in 1 2 4 8; do run "workers-$workers" "$workers" 256 256 32 160000; done
  run streams 8 1024 256 256 65536
  printf '\n== %s, side by side: 1, 2, 4, 8 workers\n' "$form"
  "$bin" bench compare "$out/$form"-workers-{1,2,4,8}.json

  "start_$form" 8
  before=$(cpu_ticks)
  sleep 20
  after=$(cpu_ticks)
  printf '\n== %s: idle, 8 workers: %s ticks of CPU in 20 s (%s ticks are a second)\n' \
    "$form" $((after - before)) "$(getconf CLK_TCK)"
  stop_all
done

# At speed-up 1 a token leaves with its own pass: one write a token and client.
form=two
SPEEDUP=1 start_two 1
load real-time 8 256 64 $((320 / scale))
curl -s "$url/metrics" | awk '
  /^slipstream_flushes_total/ { flushes = $2 }
  /^vllm:generation_tokens_total/ { tokens = $2 }
  END { printf "\n== two: real time, c=8, 256/64: %.3f writes a token\n", flushes / tokens }'
stop_all
