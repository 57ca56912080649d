#!/usr/bin/env bash
# What publishing costs a loaded server: CPU of `serve` at speed-up 1e6 with each bus on and off, in
# turn and several times over, so that what else the machine does falls on all alike. A subscriber
# takes every event. ROUNDS=N, SCALE=N (divides the number of requests), CASES="none zmq …".
# NATS is left out where there is no nats-server in PATH or .venv/bin.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${SLIPSTREAM_BIN:-${CARGO_TARGET_DIR:-target}/release/slipstream}
rounds=${ROUNDS:-5}
scale=${SCALE:-1}
PATH=$PATH:$PWD/.venv/bin
out=$(mktemp -d)
pids=()
cleanup() {
  for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
  rm -r "$out"
}
trap cleanup EXIT

cases=${CASES:-none in-process zmq zmq-alone zmq-kv}
if command -v nats-server >/dev/null; then
  nats-server --addr 127.0.0.1 --port 24222 >/dev/null 2>&1 &
  pids+=($!)
  if [ -z "${CASES:-}" ]; then cases="$cases nats"; fi
else
  echo "no nats-server: NATS is left out"
fi

wait_for() { # wait_for FILE PATTERN
  for _ in $(seq 200); do
    if grep -q "$2" "$1" 2>/dev/null; then return; fi
    sleep 0.05
  done
  echo "no '$2' in $1:" >&2
  cat "$1" "$out"/log >&2
  exit 1
}

run() { # run CASE LOAD WORKERS CONCURRENCY ISL OSL REQUESTS ROUND
  local bus=${1%%-*} listen=() kv=false
  case $1 in
    in-process) bus=in-process ;;
    *-kv) kv=true ;;
  esac
  # What the run before printed is not what this one waits for.
  rm -f "$out/address" "$out/tail"
  "$bin" serve --listen 127.0.0.1:0 --speedup 1000000 --set "pool.main.workers=$3" \
    --set "live.events.bus=$bus" --set "live.events.kv=$kv" \
    --set live.events.fpm_endpoint=tcp://127.0.0.1:25556 \
    --set live.events.kv_endpoint=tcp://127.0.0.1:25557 \
    --set live.events.nats_url=nats://127.0.0.1:24222 >"$out/address" 2>"$out/log" &
  local server=$! tail=
  pids+=("$server")
  wait_for "$out/address" '^listening on'
  local url
  url=$(sed -n 's/^listening on //p' "$out/address")
  case $1 in
    zmq-alone | in-process | none) ;;
    zmq*)
      listen=(--endpoint tcp://127.0.0.1:25556)
      if $kv; then for ((w = 0; w < $3; w++)); do listen+=(--endpoint tcp://127.0.0.1:$((25557 + w))); done; fi
      ;;
    nats*) listen=(--bus nats --url nats://127.0.0.1:24222) ;;
  esac
  if [ ${#listen[@]} -gt 0 ]; then
    "$bin" events tail --quiet "${listen[@]}" >"$out/heard" 2>"$out/tail" &
    tail=$!
    pids+=("$tail")
    wait_for "$out/tail" '^subscribed to'
  fi
  "$bin" bench "$url" --concurrency "$4" --isl "$5" --osl "$6" --requests $(($7 / scale)) \
    --warmup "$4" --server-pid "$server" --quiet --out "$out/run.json" >/dev/null
  local heard="-" dropped
  dropped=$(curl -s "$url/metrics" | awk '/^slipstream_events_(dropped|subscriber_dropped|refused)/ {n += $2} END {print n + 0}')
  kill "$server"
  wait "$server" || true
  if [ -n "$tail" ]; then
    # The publisher is gone, so the tail ends by itself on ZeroMQ; NATS needs a word.
    kill -INT "$tail" 2>/dev/null || true
    wait "$tail" || true
    heard=$(cut -d' ' -f1,5 "$out/heard")
  fi
  printf '%s %s %s %s %s\n' "$2" "$1" \
    "$(sed -n 's/.*"cpu_us_per_token": *\([0-9.]*\).*/\1/p' "$out/run.json" | tail -1)" "$dropped" "$heard" >>"$out/results"
}

printf '%s, %s cores, load %s, %s rounds\n' "$(uname -srm)" "$(nproc)" "$(cut -d' ' -f1-3 /proc/loadavg)" "$rounds"
for round in $(seq "$rounds"); do
  for case in $cases; do
    run "$case" decode 1 256 1024 1024 8192 "$round"
    run "$case" workers-8 8 256 256 32 131072 "$round"
  done
done
python3 - "$out/results" <<'PYTHON'
import statistics, sys

runs = {}
for line in open(sys.argv[1]):
    load, case, cpu, dropped, *heard = line.split()
    runs.setdefault((load, case), []).append((float(cpu), int(dropped), heard))
print(f"{'load':12}{'bus':14}{'us/token':>10}{'spread':>16}{'to none':>9}{'dropped':>9}  heard, missing (last run)")
for (load, case), found in runs.items():
    cpu = sorted(c for c, _, _ in found)
    # Run by run against `none` of the same round.
    ratio = statistics.median(c / n for (c, _, _), (n, _, _) in zip(found, runs[load, "none"]))
    print(f"{load:12}{case:14}{statistics.median(cpu):10.3f}{cpu[0]:9.3f}-{cpu[-1]:.3f}{ratio:9.3f}"
          f"{sum(d for _, d, _ in found):9}  {' '.join(found[-1][2])}")
PYTHON
