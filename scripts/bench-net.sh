#!/usr/bin/env bash
# Runs the network benchmarks and prints a table. CPU seconds are the figure to trust on a shared
# machine; wall seconds depend on what else runs. Best of RUNS (default 3) by CPU. Fails if a digest
# is not the one in docs/benchmarks-net.md: the binary that users run must come to what it did.
set -euo pipefail
bin=${1:-./target/release/slipstream}
runs=${RUNS:-3}
cores=$(nproc)
scratch=$(mktemp -d)
wrong=0
trap 'rm -r "$scratch"' EXIT
printf '%-34s %7s %12s %8s %9s %9s %9s %7s  %s\n' \
  run threads events ns/event 'setup s' 'CPU s' 'wall s' MiB digest
# Prints the best of several runs: NAME THREADS FILE [--set …]
row() {
  local name=$1 threads=$2
  shift 2
  for _ in $(seq "$runs"); do
    "$bin" net run --json --totals --threads "$threads" "$@"
  done >"$scratch/runs"
  for digest in $(grep -o '"digest":"[0-9a-f]*"' "$scratch/runs" | cut -d'"' -f4 | sort -u); do
    if ! grep -q "$digest" docs/benchmarks-net.md; then
      echo "error: $name comes to digest $digest, which docs/benchmarks-net.md does not have" >&2
      wrong=1
    fi
  done
  python3 -c '
import json, sys
name, threads = sys.argv[1:]
best = min((json.loads(line) for line in sys.stdin), key=lambda r: r["cost"]["run_cpu_s"])
cost, events = best["cost"], best["totals"]["events"]
print("%-34s %7s %12s %8.1f %9.4f %9.3f %9.3f %7d  %s" % (
    name, threads, f"{events:,}", cost["run_cpu_s"] * 1e9 / events, cost["setup_s"],
    cost["run_cpu_s"], cost["run_s"], cost["rss_bytes_max"] >> 20, best["digest"]))' "$name" "$threads" <"$scratch/runs"
}
row 'f32' 1 examples/net/f32.toml
row 'exp' 1 examples/net/exp.toml
row 'NDP permutation, 1,024 hosts' 1 examples/net/ndp-permutation.toml
for threads in 1 2 3 4; do
  if [ "$threads" -le "$cores" ]; then row 'E5' "$threads" examples/net/e5.toml; fi
done
for k in 8 16 32; do
  sed "s/k = 32,/k = $k,/; s/hosts_per_edge = 16/hosts_per_edge = $((k / 2))/; \
    s/flow_count = 8192/flow_count = $((k * k * k / 4))/" examples/net/e5.toml >"$scratch/k$k.toml"
  row "E5-shaped, k=$k" 1 "$scratch/k$k.toml"
done
exit "$wrong"
