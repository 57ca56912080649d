#!/usr/bin/env bash
# The twin: requests per CPU second and peak memory (docs/benchmarks-twin.md). The rows with a trace need
# TRACE=FILE in Mooncake's form. RUNS=N repeats each row; the best CPU time of them is shown, as other
# jobs on the machine only ever add to it.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${SLIPSTREAM_BIN:-${CARGO_TARGET_DIR:-target}/release/slipstream}
runs=${RUNS:-3}
out=$(mktemp -d)
trap 'rm -r "$out"' EXIT

row() { # row NAME FLAGS…
  local name=$1 digest=
  shift
  for run in $(seq "$runs"); do
    "$bin" simulate examples/cluster.toml --threads 1 "$@" --quiet --out "$out/$run.json" \
      >"$out/text"
    local now
    now=$(sed -n 's/.*digest //p' "$out/text")
    if [ "${digest:-$now}" != "$now" ]; then echo "$name: digests differ" >&2; exit 1; fi
    digest=$now
  done
  python3 - "$name" "$digest" "$out"/[0-9]*.json <<'PY'
import json, sys
name, digest, *files = sys.argv[1:]
runs = [json.load(open(f)) for f in files]
best = min(runs, key=lambda r: r["client"]["cpu_s"])
cpu, done = best["client"]["cpu_s"], best["requests"]["succeeded"]
rss = max(r["client"]["rss_peak_bytes"] for r in runs) / 2**20
print(f"{name:<44} {done:>9,} {cpu:>8.3f} {done / cpu:>10,.0f} {cpu / done * 1e6:>8.2f} {rss:>7.1f}  {digest}")
PY
  rm -f "$out"/[0-9]*.json
}

printf '%s, %s cores, load %s\n' "$(uname -srm)" "$(nproc)" "$(cut -d' ' -f1-3 /proc/loadavg)"
printf '%-44s %9s %8s %10s %8s %7s  %s\n' '' requests CPU-s 'req/CPU-s' 'µs/req' MiB digest
plain=(--isl 1024 --osl 128 --set router.policy=round_robin)
for size in 16 64; do
  row "8 workers, round robin, blocks of $size" "${plain[@]}" --set "engine.block_size=$size" \
    --rate 100 --requests 10000
done
for policy in round_robin kv; do
  for workers in 8 64; do
    row "$workers workers, $policy, blocks of 64" "${plain[@]}" --set "router.policy=$policy" \
      --set engine.block_size=64 --set "pool.main.workers=$workers" \
      --rate $((workers * 12)) --requests $((workers * 1250))
  done
done
row '1,000,000 generated requests, 8 workers' "${plain[@]}" --rate 100 --requests 1000000
# Wall time on one thread and on four: what counts is the ratio, on a machine with nothing else to do.
if [ "$(nproc)" -lt 4 ]; then
  echo 'four threads against one: not measurable on fewer than 4 cores'
else
  for threads in 1 4; do
    best=
    for _ in $(seq "$runs"); do
      start=$(date +%s%N)
      "$bin" simulate examples/cluster.toml "${plain[@]}" --threads "$threads" --quiet \
        --set engine.block_size=64 --set pool.main.workers=64 --rate 768 --requests 400000 >"$out/text"
      took=$((($(date +%s%N) - start) / 1000000))
      if [ -z "$best" ] || [ "$took" -lt "$best" ]; then best=$took; fi
    done
    echo "64 workers, round robin, 400,000 requests, $threads threads: $best ms of wall time," \
      "digest $(sed -n 's/.*digest //p' "$out/text")"
  done
fi
if [ -n "${TRACE:-}" ]; then
  row 'trace, 8 workers, kv, blocks of 64' --trace "$TRACE" --set router.policy=kv \
    --set engine.block_size=64 --set model.preset=llama-3.1-70b --set engine.tensor_parallel_size=4
fi
