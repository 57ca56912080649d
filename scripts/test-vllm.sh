#!/usr/bin/env bash
# The vLLM connector on vLLM's real scheduler, on a CPU. Makes the environment at the first run
# (scripts/vllm/env.sh: about 1.1 GB to download).
#   scripts/test-vllm.sh [pytest's arguments]
# VLLM_VERSION names the release to test with; SLIPSTREAM_VLLM_ENV an environment that is there.
# BENCH=kv_steps (or 1) or BENCH=kv_layers runs that harness in python/bench instead, with the arguments given.
set -euo pipefail
cd "$(dirname "$0")/.."

version=${VLLM_VERSION:-0.33.0}
folder=${SLIPSTREAM_VLLM_ENV:-.venv-vllm/$version}
[ -n "${SLIPSTREAM_VLLM_ENV:-}" ] || scripts/vllm/env.sh "$folder" "$version"
# shellcheck disable=SC1091
. "$folder/bin/activate"

export VLLM_TARGET_DEVICE=cpu VLLM_LOGGING_LEVEL=${VLLM_LOGGING_LEVEL:-ERROR}
maturin develop --release --quiet
if [ -n "${BENCH:-}" ]; then
    [ "$BENCH" != 1 ] || BENCH=kv_steps
    exec python "python/bench/$BENCH.py" "$@"
fi
mypy
# The server that reads generated bodies next to vLLM's request classes.
if [ -z "${SLIPSTREAM_BIN:-}" ]; then
    cargo build --quiet --locked --package slipstream-cli
    SLIPSTREAM_BIN=$(realpath "${CARGO_TARGET_DIR:-target}/debug/slipstream")
    export SLIPSTREAM_BIN
fi
exec pytest -p no:cacheprovider --quiet python/tests/vllm "$@"
