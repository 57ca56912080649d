#!/usr/bin/env bash
# One workload against the same eight modelled workers twice: KV-aware routing, then round robin.
#   SHORT=1      half a minute
#   TRACE=FILE   the first 1,000 requests of a trace in Mooncake's JSONL form instead
#   SPEEDUP=N    modelled seconds per second (default: as many as this host keeps time with, up to
#                10, with TRACE 6)
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${SLIPSTREAM_BIN:-${CARGO_TARGET_DIR:-target}/release/slipstream}
out=$(mktemp -d)
server=
cleanup() {
  if [ -n "$server" ]; then kill "$server" 2>/dev/null || true; fi
  rm -r "$out"
}
trap cleanup EXIT

if [ -n "${TRACE:-}" ]; then
  speedup_max=6
  # Traces hold prompts of up to 128k tokens: a model that takes them, on four GPUs each.
  cluster=(examples/cluster.toml --set model.preset=llama-3.1-70b --set engine.tensor_parallel_size=4)
  load=(--trace "$TRACE" --requests "${REQUESTS:-1000}")
  what="the first ${REQUESTS:-1000} requests of $TRACE"
  who="Llama 3.1 70B on 4 x H100 each"
else
  speedup_max=10
  cluster=(examples/cluster.toml)
  requests=6000
  if [ -n "${SHORT:-}" ]; then requests=1200; fi
  load=(--workload examples/demo.workload.toml --requests "$requests")
  what="$requests requests of examples/demo.workload.toml"
  who="Qwen3 32B on 2 x H100 each"
fi

# On a busy host every wake-up waits for a CPU, and compressed times would show that alone.
if [ -n "${SPEEDUP:-}" ]; then
  speedup=$SPEEDUP
elif ! speedup=$("$bin" drag "${cluster[@]}" "${load[@]}" --speedup "auto:$speedup_max" --print-speedup); then
  echo "hint: SPEEDUP=1 make demo runs all the same" >&2
  exit 2
elif awk "BEGIN { exit !($speedup < 1) }"; then
  echo "error: this host is so busy that the demo would take $(awk "BEGIN { print 1 / $speedup }") times real time" >&2
  echo "hint: stop other jobs; SPEEDUP=1 make demo runs all the same, and its times mean little" >&2
  exit 2
fi

printf 'Eight modelled workers (%s), over real HTTP on this machine.\n' "$who"
printf 'Load: %s, %s times as fast as they would come.\n\n' "$what" "$speedup"
for policy in kv round_robin; do
  "$bin" serve "${cluster[@]}" --listen 127.0.0.1:0 --speedup "$speedup" \
    --set "router.policy=$policy" >"$out/address" &
  server=$!
  # The server prints its address once it can be used; a bounded wait for that line.
  for _ in $(seq 100); do
    if [ -s "$out/address" ] || ! kill -0 "$server" 2>/dev/null; then break; fi
    sleep 0.1
  done
  url=$(sed -n 's/^listening on //p' "$out/address")
  if [ -z "$url" ]; then
    echo "the server did not start; its messages are above" >&2
    exit 1
  fi
  printf '\n== %s routing\n' "${policy//_/ }"
  "$bin" bench "$url" "${load[@]}" --time-scale "$speedup" --label "${policy//_/ }" \
    --server-pid "$server" --out "$out/$policy.json"
  kill "$server"
  wait "$server" || true
  server=
  : >"$out/address"
done
printf '\n== side by side\n'
"$bin" bench compare "$out/kv.json" "$out/round_robin.json"

# The same cluster, load and compression in virtual time.
began=$(date +%s%N)
for policy in kv round_robin; do
  "$bin" simulate "${cluster[@]}" "${load[@]}" --set "router.policy=$policy" \
    --speedup "$speedup" --time-scale "$speedup" --label "its twin" --quiet \
    --out "$out/$policy.twin.json" >"$out/text"
done
twin_ms=$((($(date +%s%N) - began) / 1000000))
for policy in kv round_robin; do
  printf '\n== %s routing: live, and its twin in virtual time (slipstream simulate)\n' "${policy//_/ }"
  "$bin" bench compare "$out/$policy.json" "$out/$policy.twin.json"
done
printf '\nThe twin took %s ms for both policies.\n' "$twin_ms"
cat <<TEXT

Times are as clients measured them here, where modelled time runs ${speedup} times as fast: 1 ms stands
for ${speedup} ms of the modelled GPUs.
TEXT
if [ -z "${TRACE:-}" ]; then
  cat <<TEXT
KV routing sends a question to the worker that has its document cached; round robin makes every
worker read every document.
TEXT
fi
