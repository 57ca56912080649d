# Sourced by the benchmarks: starts a cluster as one process or as two, and stops it.
#
#   bin, out      the binary, a scratch folder
#   url, pids     of what runs
#   FRONTEND_CPUS, WORKER_CPUS, CLIENT_CPUS   CPUs to pin to (a list for taskset), if set

pids=()

pin() { # pin CPUS COMMAND…
  if [ -n "$1" ]; then exec taskset -c "$1" "${@:2}"; else exec "${@:2}"; fi
}

await_address() {
  for _ in $(seq 100); do
    if [ -s "$out/address" ] || ! kill -0 "${pids[0]}" 2>/dev/null; then break; fi
    sleep 0.1
  done
  url=$(sed -n 's/^listening on //p' "$out/address")
  if [ -z "$url" ]; then cat "$out/log" >&2; exit 1; fi
}

start_one() { # start_one WORKERS [flags of serve]
  pin "${FRONTEND_CPUS:-}" "$bin" serve --listen 127.0.0.1:0 --speedup "${SPEEDUP:-1000000}" \
    --set "pool.main.workers=$1" "${@:2}" >"$out/address" 2>"$out/log" &
  pids=($!)
  await_address
}

start_two() { # start_two WORKERS [--set …]; FRONTEND_FLAGS and WORKER_FLAGS for one side alone
  # shellcheck disable=SC2086
  pin "${FRONTEND_CPUS:-}" "$bin" frontend --listen 127.0.0.1:0 --discovery "$out/found" \
    --set "pool.main.workers=$1" "${@:2}" ${FRONTEND_FLAGS:-} >"$out/address" 2>"$out/log" &
  pids=($!)
  # shellcheck disable=SC2086
  pin "${WORKER_CPUS:-}" "$bin" worker --discovery "$out/found" --speedup "${SPEEDUP:-1000000}" \
    --set "pool.main.workers=$1" "${@:2}" ${WORKER_FLAGS:-} >"$out/worker" 2>>"$out/log" &
  pids+=($!)
  await_address
  for _ in $(seq 100); do
    if [ "$(ready_ranks)" = "$1" ]; then return; fi
    sleep 0.1
  done
  cat "$out/log" >&2
  exit 1
}

ready_ranks() {
  curl -s "$url/metrics" | awk '/^slipstream_router_ready\{/ { sum += $2 } END { print sum + 0 }'
}

stop_all() {
  for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
  for pid in "${pids[@]}"; do wait "$pid" 2>/dev/null || true; done
  pids=()
  rm -f "$out/address"
}

server_pids() {
  for pid in "${pids[@]}"; do printf -- '--server-pid %s ' "$pid"; done
}

cpu_ticks() { # of all processes of the server: user and system
  for pid in "${pids[@]}"; do cat "/proc/$pid/stat"; done | awk '{ sum += $14 + $15 } END { print sum }'
}

load() { # load NAME CONCURRENCY ISL OSL REQUESTS [flags of bench]; the summary goes to $out/text
  # shellcheck disable=SC2046
  (pin "${CLIENT_CPUS:-}" "$bin" bench "$url" --concurrency "$2" --isl "$3" --osl "$4" \
    --requests "$5" --warmup "$2" $(server_pids) --label "$1" --quiet --out "$out/$1.json" \
    "${@:6}") >"$out/text"
}
