#!/usr/bin/env bash
# Cost of routers in front of the same four modelled engines, with the same client, in turns: `slipstream serve --engine`,
# vllm-router 0.1.17 and smg 1.13.0 (both from PyPI, into .cache; left out with a message if they cannot be installed).
# Per router and round: CPU of the router alone per streamed token (64 streams, a token every 12 ms) and per request
# (128 tokens in, 1 out, 128 clients), its memory, and the latency that it adds for one client at full speed.
#   ROUNDS=N    rounds (default 3)
#   SCALE=N     divides the number of requests (default 1)
#   ONLY="slipstream direct"   these only
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$(realpath "${SLIPSTREAM_BIN:-${CARGO_TARGET_DIR:-target}/release/slipstream}")
rounds=${ROUNDS:-3}
scale=${SCALE:-1}
python=${PYTHON:-python3}
read -ra routers <<<"${ONLY:-direct slipstream vllm-router smg}"
out=$(mktemp -d)
pids=()
router_pid=
stop() { # stop PID...
  for pid in "$@"; do kill "$pid" 2>/dev/null || true; done
  for pid in "$@"; do wait "$pid" 2>/dev/null || true; done
}
cleanup() {
  stop "${pids[@]}" ${router_pid:+"$router_pid"}
  rm -r "$out"
}
trap cleanup EXIT

install_peer() { # install_peer PACKAGE VERSION COMMAND
  local venv=.cache/$1-$2
  if ! "$venv/bin/$3" --help >/dev/null 2>&1; then
    rm -rf "$venv"
    "$python" -m venv "$venv" && "$venv/bin/pip" install --quiet "$1==$2"
  fi
}

free_ports() { # free_ports COUNT
  "$python" - "$1" <<'PYTHON'
import socket, sys
sockets = [socket.socket() for _ in range(int(sys.argv[1]))]
for each in sockets:
    each.bind(("127.0.0.1", 0))
print(*(each.getsockname()[1] for each in sockets))
PYTHON
}

await_http() { # await_http URL PID: answers its list of models
  for _ in $(seq 300); do
    if ! kill -0 "$2" 2>/dev/null; then break; fi
    if curl --silent --fail --max-time 2 "$1/v1/models" >/dev/null; then return; fi
    sleep 0.1
  done
  echo "error: $1 does not answer" >&2
  exit 1
}

start_engines() { # start_engines STEP_NS SPEEDUP: sets urls
  stop "${pids[@]}"
  pids=() urls=()
  local port
  for port in $(free_ports 4); do
    "$bin" serve --listen "127.0.0.1:$port" --speedup "$2" --set model.name=bench \
      --set engine.timing.kind=constant --set "engine.timing.step_ns=$1" \
      --set engine.num_gpu_blocks=16384 --set live.shards=1 >/dev/null 2>&1 &
    pids+=($!)
    urls+=("http://127.0.0.1:$port")
  done
  for at in 0 1 2 3; do await_http "${urls[$at]}" "${pids[$at]}"; done
}

start_router() { # start_router NAME: sets url and router_pid
  local port
  port=$(free_ports 1)
  url=http://127.0.0.1:$port
  case $1 in
    direct)
      url=${urls[0]}
      router_pid=
      return
      ;;
    slipstream)
      "$bin" serve --listen "127.0.0.1:$port" --set live.shards=1 "${urls[@]/#/--engine=}" >"$out/log" 2>&1 &
      ;;
    vllm-router)
      .cache/vllm-router-0.1.17/bin/vllm-router --host 127.0.0.1 --port "$port" \
        --policy round_robin --worker-urls "${urls[@]}" >"$out/log" 2>&1 &
      ;;
    smg)
      .cache/smg-1.13.0/bin/smg launch --host 127.0.0.1 --port "$port" \
        --policy round_robin --worker-urls "${urls[@]}" >"$out/log" 2>&1 &
      ;;
  esac
  router_pid=$!
  await_http "$url" "$router_pid"
}

cpu_ns() { # CPU of the router, all threads, ns
  if [ -z "$router_pid" ]; then
    echo 0
    return
  fi
  "$python" - "$router_pid" <<'PYTHON'
import pathlib, sys
tasks = pathlib.Path(f"/proc/{sys.argv[1]}/task").iterdir()
print(sum(int((task / "schedstat").read_text().split()[0]) for task in tasks))
PYTHON
}

load() { # load NAME WHAT CONCURRENCY REQUESTS ISL OSL: a line of results
  local before after requests=$(($4 / scale > $3 ? $4 / scale : $3))
  "$bin" bench "$url" --model bench --concurrency "$3" --requests "$3" --isl "$5" --osl "$6" >/dev/null # warm
  before=$(cpu_ns)
  "$bin" bench "$url" --model bench --concurrency "$3" --requests "$requests" --isl "$5" --osl "$6" --json >"$out/run.json"
  after=$(cpu_ns)
  "$python" - "$1" "$2" "$requests" "$6" "$before" "$after" "$out/run.json" "${router_pid:-self}" <<'PYTHON'
import json, pathlib, re, sys
name, what, requests, osl, before, after, run, pid = sys.argv[1:]
units = int(requests) * (int(osl) if what == "token" else 1)
run = json.loads(pathlib.Path(run).read_text())
failed = run["requests"]["failed"]
if failed:
    sys.exit(f"{name}: {failed} requests failed: {run['errors']}")
p50 = run["latency"]["e2e_ms"]["p50"]
status = pathlib.Path(f"/proc/{pid}/status").read_text()
rss = int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1024
cpu = (int(after) - int(before)) / 1e3 / units
unit = "token" if what == "token" else "request"
shown = "-" if name == "direct" else f"{cpu:.1f} us per {unit}"
memory = "-" if name == "direct" else f"{rss:.0f} MiB"
print(f"{name:<12} {what:<8} CPU {shown:<22} E2E p50 {f'{p50:.2f} ms':<12} peak RSS {memory}", flush=True)
PYTHON
}

available=()
for name in "${routers[@]}"; do
  case $name in
    vllm-router) install_peer vllm-router 0.1.17 vllm-router || { echo "left out: vllm-router cannot be installed"; continue; } ;;
    smg) install_peer smg 1.13.0 smg || { echo "left out: smg cannot be installed"; continue; } ;;
  esac
  available+=("$name")
done

for round in $(seq "$rounds"); do
  echo "round $round"
  # A token every 12 ms: each one is a wake-up and a write.
  start_engines 12000000 1
  for name in "${available[@]}"; do
    start_router "$name"
    load "$name" token 64 256 128 256
    stop ${router_pid:+"$router_pid"}
  done
  # Engines that take no time: requests, and the latency of one client.
  start_engines 1000 0
  for name in "${available[@]}"; do
    start_router "$name"
    load "$name" request 128 20000 128 1
    load "$name" alone 1 2000 128 1
    stop ${router_pid:+"$router_pid"}
  done
done
