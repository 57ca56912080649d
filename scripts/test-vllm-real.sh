#!/usr/bin/env bash
# The vLLM connector with models that compute, on a CPU: answers with it are the model's own, also
# after its weights have changed. Skips where there is no environment; SETUP=1 makes one (3 GB).
#   scripts/test-vllm-real.sh [pytest's arguments]
# SLIPSTREAM_VLLM_REAL_ENV names an environment that is there.
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
# shellcheck disable=SC1091
. "$folder/bin/activate"
maturin develop --release --quiet
exec pytest -p no:cacheprovider --quiet python/tests/vllm_real "$@"
