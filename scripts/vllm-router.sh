#!/usr/bin/env bash
# vllm-router 0.1.17 (PyPI) in front of four of our engines: the share of prompt tokens that its
# policies find cached. `kv_aware` routes by the KV events that the engines publish, and must find
# clearly more than round robin. Installs the router into .cache at the first run.
#   REQUESTS=N   of the load, for each policy (default 2,000)
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$(realpath "${SLIPSTREAM_BIN:-${CARGO_TARGET_DIR:-target}/release/slipstream}")
requests=${REQUESTS:-2000}
version=0.1.17
venv=.cache/vllm-router-$version
python=${PYTHON:-python3}
out=$(mktemp -d)
pids=()
stop_all() {
  for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
  for pid in "${pids[@]}"; do wait "$pid" 2>/dev/null || true; done
  pids=()
}
cleanup() {
  stop_all
  rm -r "$out"
}
trap cleanup EXIT

if ! "$venv/bin/vllm-router" --help >/dev/null 2>&1; then
  rm -rf "$venv"
  if ! "$python" -m venv "$venv" || ! "$venv/bin/pip" install --quiet "vllm-router==$version"; then
    echo "skipped: vllm-router $version cannot be installed from PyPI"
    exit 0
  fi
fi
# The tokenizer of the engines, in the form that the router reads.
"$bin" tokenizer export "$out/model" >/dev/null

free_ports() { # free_ports COUNT
  "$python" - "$1" <<'PYTHON'
import socket, sys
sockets = [socket.socket() for _ in range(int(sys.argv[1]))]
for each in sockets:
    each.bind(("127.0.0.1", 0))
print(*(each.getsockname()[1] for each in sockets))
PYTHON
}

await_line() { # await_line FILE PID: the first line of a file that a process writes
  for _ in $(seq 600); do
    if [ -s "$1" ] || ! kill -0 "$2" 2>/dev/null; then break; fi
    sleep 0.1
  done
  head -1 "$1"
}

# 64 prefixes of 768 tokens; an engine's cache of 2,048 blocks of 16 tokens holds 42 of them.
cat >"$out/load.toml" <<TOML
seed = 1
requests = $requests
isl = 800
osl = 16
[arrival]
kind = "closed"
concurrency = 8
[[prefix]]
branches = 64
tokens = 768
TOML

measure() { # measure POLICY [flags of the router]; sets `share`
  local policy=$1 urls=() sources=() port metrics
  for _ in 1 2 3 4; do
    port=$(free_ports 1)
    "$bin" serve --listen 127.0.0.1:0 --speedup 100 --set pool.main.workers=1 \
      --set engine.block_size=16 --set engine.num_gpu_blocks=2048 --set live.events.bus=zmq \
      --set live.events.fpm=false --set "live.events.kv_endpoint=tcp://127.0.0.1:$port" \
      >"$out/address" 2>"$out/log" &
    pids+=($!)
    urls+=("$(await_line "$out/address" $! | sed 's/^listening on //')")
    sources+=(--kv-event-source "${urls[-1]}=tcp://127.0.0.1:$port")
    : >"$out/address"
  done
  if [ "$policy" = kv_aware ]; then
    set -- "$policy" "${sources[@]}" --kv-event-block-size 16 --kv-event-model "$out/model"
  fi
  read -r port metrics < <(free_ports 2)
  "$venv/bin/vllm-router" --host 127.0.0.1 --port "$port" --prometheus-port "$metrics" \
    --worker-urls "${urls[@]}" --policy "$@" >"$out/router.log" 2>&1 &
  pids+=($!)
  for _ in $(seq 600); do
    if curl --silent --fail "http://127.0.0.1:$port/health" >/dev/null; then break; fi
    sleep 0.1
  done
  if ! "$bin" bench "http://127.0.0.1:$port" --workload "$out/load.toml" --quiet \
    --out "$out/$policy.json" >"$out/text"; then
    cat "$out/text" >&2
    tail -20 "$out/router.log" >&2
    exit 1
  fi
  stop_all
  share=$("$python" -c 'import json, sys; tokens = json.load(open(sys.argv[1]))["tokens"]; print(tokens["cached"] / tokens["input"])' "$out/$policy.json")
  printf '%-12s %.3f of the prompt tokens cached\n' "$policy" "$share"
}

measure round_robin
round_robin=$share
measure cache_aware
measure kv_aware
"$python" - "$share" "$round_robin" <<'PYTHON'
import sys
kv_aware, round_robin = map(float, sys.argv[1:])
if kv_aware < round_robin + 0.2:
    sys.exit(f"kv_aware finds {kv_aware:.3f} cached, round robin {round_robin:.3f}: does it read the KV events?")
PYTHON
