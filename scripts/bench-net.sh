#!/usr/bin/env bash
# Runs the network benchmarks and prints tables for benches/results/: runs, and
# spinning at the barrier. CPU seconds are the figure to trust on a shared machine; wall seconds
# depend on what else runs, so run it on a quiet one. Best of RUNS (default 3) by CPU. Fails if a
# digest is not in docs/benchmarks-net.md: an optimized build must give the results of the tests.
set -euo pipefail
bin=${1:-./target/release/slipstream}
runs=${RUNS:-3}
cores=$(nproc)
scratch=$(mktemp -d)
wrong=0
trap 'rm -r "$scratch"' EXIT
printf '%s, %s cores, load %s, %s, %s\n\n' "$(sed -n 's/^model name.*: //p' /proc/cpuinfo | head -1)" "$cores" \
  "$(cut -d' ' -f1 /proc/loadavg)" "$(rustc --version | cut -d' ' -f1,2)" "$(git describe --always --dirty)"
if awk -v cores="$cores" '{ exit !($1 > cores / 4) }' /proc/loadavg; then
  echo 'warning: other programs are running; the wall seconds below are not fit to publish' >&2
fi
echo '| run | threads | events | ns/event | set-up s | CPU s | wall s | MiB | digest |'
echo '| --- | --- | --- | --- | --- | --- | --- | --- | --- |'
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
print("| %s | %s | %s | %.1f | %.4f | %.3f | %.3f | %d | %s |" % (
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
  row "E5-shaped, k = $k" 1 "$scratch/k$k.toml"
done
# Wall (CPU) seconds of E5 by how often a thread checks the barrier before it parks.
spins=(0 30 300 3000 30000)
threads=$((cores < 4 ? cores : 4))
if [ "$threads" -gt 1 ]; then
  printf '\nE5 on %s threads, wall (CPU) seconds:\n\n| checks before parking |' "$threads"
  printf ' %s |' "${spins[@]}"
  printf '\n| --- |%s\n| wall (CPU) s |' "$(printf ' --- |%.0s' "${spins[@]}")"
  for spin in "${spins[@]}"; do
    for _ in $(seq "$runs"); do
      "$bin" net run --json --totals --threads "$threads" --spin "$spin" examples/net/e5.toml
    done | python3 -c '
import json, sys
best = min((json.loads(line)["cost"] for line in sys.stdin), key=lambda cost: cost["run_s"])
print(" %.3f (%.2f) |" % (best["run_s"], best["run_cpu_s"]), end="", flush=True)'
  done
  echo
fi
exit "$wrong"
