#!/usr/bin/env bash
# NVIDIA Dynamo 1.6.1's frontend and mocker, and ours: same machine, same client, same load, in turn.
# Ours runs twice: with the tokenizer that Dynamo uses (Hugging Face's `tokenizers`, the same file),
# and with the built-in one, which has the same vocabulary. First at speed-up 1e6, where engines are
# endlessly fast; then at a real pace, with engine steps of 12 ms on both sides.
#
# Installs Dynamo from PyPI into SCRATCH (about 700 MB; kept for the next run). The mocker and our
# worker get the first half of the CPUs, the frontends and the client the second.
#   SCALE=N           divides the requests
#   ONLY=fast, real   one of the two paces
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$(realpath "${SLIPSTREAM_BIN:-${CARGO_TARGET_DIR:-target}/release/slipstream}")
scale=${SCALE:-1}
scratch=${SCRATCH:-${TMPDIR:-/tmp}/slipstream-peer}
python=${PYTHON:-python3}
mkdir -p "$scratch"
out=$(mktemp -d)
. scripts/live.sh
cleanup() {
  stop_all
  rm -r "$out"
}
trap cleanup EXIT
half=$(($(nproc) / 2))
WORKER_CPUS=0-$((half > 0 ? half - 1 : 0))
FRONTEND_CPUS=$half-$(($(nproc) - 1))
CLIENT_CPUS=$FRONTEND_CPUS

if [ ! -x "$scratch/venv/bin/python" ] || ! "$scratch/venv/bin/python" -c 'import dynamo.frontend' 2>/dev/null; then
  "$python" -m venv "$scratch/venv"
  # Without its dependencies: one of them (aisimulate) is a placeholder on PyPI.
  "$scratch/venv/bin/pip" install --quiet --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1
  "$scratch/venv/bin/pip" install --quiet aiohttp certifi 'kubernetes<33' msgspec \
    prometheus-client pyzmq redis tqdm 'transformers>=4.56' zstandard uvloop
fi
if [ ! -f "$scratch/model/config.json" ]; then
  # Our own tokenizer in Hugging Face's form, and a model of Llama's shape around it.
  "$bin" tokenizer export "$scratch/model"
  "$scratch/venv/bin/python" - "$scratch/model" <<'PYTHON'
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
words = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
(folder / "config.json").write_text(json.dumps({
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "hidden_size": 4096, "head_dim": 128, "intermediate_size": 14336, "vocab_size": len(words),
    "max_position_embeddings": 131072, "bos_token_id": 0, "eos_token_id": 1}))
if not (folder / "generation_config.json").exists():
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
PYTHON
fi

if [ ! -f "$scratch/step.npz" ]; then
  # Step times as the mocker reads them: 12 ms for every prompt and every batch.
  "$scratch/venv/bin/python" - "$scratch/step.npz" <<'PYTHON'
import sys
import numpy
ends, ms = numpy.array([1.0, 1e6]), 12.0
numpy.savez(sys.argv[1], prefill_isl=ends, prefill_ttft_ms=numpy.full(2, ms),
    decode_active_kv_tokens=ends, decode_context_length=ends, decode_itl=numpy.full((2, 2), ms))
PYTHON
fi

start_dynamo() { # start_dynamo WORKERS [flags of the mocker]
  rm -rf "$out/kv"
  # Below the ports that the system gives to connections, which the runs before have left in use.
  port=$((20000 + RANDOM % 10000))
  while (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do port=$((20000 + RANDOM % 10000)); done
  export DYN_DISCOVERY_BACKEND=file DYN_FILE_KV="$out/kv" DYN_EVENT_PLANE=zmq DYN_REQUEST_PLANE=tcp \
    DYN_TCP_RPC_HOST=127.0.0.1 DYN_TCP_RESPONSE_STREAM_HOST=127.0.0.1 DYN_EVENT_PLANE_HOST=127.0.0.1 \
    DYN_LOG=error
  pin "$FRONTEND_CPUS" "$scratch/venv/bin/python" -m dynamo.frontend --http-host 127.0.0.1 \
    --http-port "$port" --router-mode kv --kv-cache-block-size 64 >"$out/log" 2>&1 &
  pids=($!)
  pin "$WORKER_CPUS" "$scratch/venv/bin/python" -m dynamo.mocker --model-path "$scratch/model" \
    --model-name mock --block-size 64 --num-workers "$1" "${@:2}" >>"$out/log" 2>&1 &
  pids+=($!)
  url=http://127.0.0.1:$port
  for _ in $(seq 300); do
    if curl -s "$url/v1/models" | grep -q '"mock"'; then return; fi
    sleep 0.1
  done
  tail -20 "$out/log" >&2
  exit 1
}

compare() { # compare NAME WORKERS CONCURRENCY ISL OSL THEIRS OURS (requests)
  start_dynamo "$2" "${dynamo[@]}"
  load "$1-dynamo" "$3" "$4" "$5" $(($6 / scale)) --model mock
  stop_all
  local flags=(--set engine.block_size=64 --set router.policy=kv "${ours[@]}")
  start_two "$2" "${flags[@]}" --set "model.tokenizer=$scratch/model"
  load "$1-same-tokenizer" "$3" "$4" "$5" $((($6 + $7) / 2 / scale))
  stop_all
  start_two "$2" "${flags[@]}"
  load "$1-built-in" "$3" "$4" "$5" $(($7 / scale))
  stop_all
  printf '\n== %s: %s worker(s), c=%s, %s/%s\n' "$1" "$2" "$3" "$4" "$5"
  "$bin" bench compare "$out/$1"-{dynamo,same-tokenizer,built-in}.json
}

printf '%s, %s cores, load %s\n' "$(uname -srm)" "$(nproc)" "$(cut -d' ' -f1-3 /proc/loadavg)"
if [ "${ONLY:-fast}" = fast ]; then
  SPEEDUP=1000000 dynamo=(--speedup-ratio 1000000) ours=()
  compare latency 1 1 128 32 300 20000
  compare fidelity 1 256 1024 1024 1024 16384
  compare peak 1 256 128 1 20000 150000
  for workers in 1 2 4 8; do compare "workers-$workers" "$workers" 256 256 32 8000 80000; done
fi
if [ "${ONLY:-real}" = real ]; then
  SPEEDUP=1 dynamo=(--speedup-ratio 1 --planner-profile-data "$scratch/step.npz")
  ours=(--set engine.timing.kind=constant --set engine.timing.step_ns=12000000)
  compare real-1 1 1 256 64 20 20
  compare real-64 1 64 256 128 1280 1280
  compare real-256 1 256 256 128 5120 5120
fi
