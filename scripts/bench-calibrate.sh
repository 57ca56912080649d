#!/usr/bin/env bash
# A real vLLM that computes on a CPU, calibrated on one load and predicted at five others: prints the errors of
# TTFT, ITL and E2E (p50, p99). Skips without an environment; SETUP=1 makes it (3 GB).
#   ROUNDS=3 OUT=table.md scripts/bench-calibrate.sh
# SLIPSTREAM_VLLM_REAL_ENV names an environment that is there, SLIPSTREAM the binary.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=${SLIPSTREAM_VLLM_REAL_ENV:-.venv-vllm/real}
if [ -n "${SETUP:-}" ]; then
    scripts/vllm/env-real.sh "$folder"
fi
if [ ! -x "$folder/bin/python" ]; then
    echo "skipped: $folder has no vLLM that computes on a CPU; SETUP=1 makes it (3 GB)"
    exit 0
fi
SLIPSTREAM_BIN=$(realpath "${SLIPSTREAM:-target/release/slipstream}")
export SLIPSTREAM_BIN
# shellcheck disable=SC1091
. "$folder/bin/activate"
exec python python/tests/engines/calibrated.py --rounds "${ROUNDS:-3}" ${OUT:+--out "$OUT"}
