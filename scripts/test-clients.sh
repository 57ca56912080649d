#!/usr/bin/env bash
# Official clients and frameworks from PyPI, each in a conversation with `slipstream serve`. The first run installs
# them into target/clients (300 MB); without a network it skips with a message.
#   scripts/test-clients.sh [pytest's arguments]
# SLIPSTREAM_BIN names the binary to test; without it, the debug one is built. CLIENTS_ENV names the environment.
# VLLM_BIN, GUIDELLM_BIN and AIPERF_BIN, or `vllm`, `guidellm` and `aiperf` in PATH: their load tools run too.
# SLIPSTREAM_LOAD_TOOLS=1: GuideLLM and AIPerf are installed into target/clients-load (7 GB; neither needs a GPU).
set -euo pipefail
cd "$(dirname "$0")/.."

env=${CLIENTS_ENV:-target/clients}
stamp=$env/requirements.installed
requirements=python/tests/clients/requirements.txt
if ! cmp --silent "$requirements" "$stamp"; then
    rm -rf "$env"
    "${PYTHON:-python3}" -m venv "$env"
    if ! "$env/bin/pip" install --quiet --disable-pip-version-check --retries 1 \
        --requirement "$requirements"; then
        echo "skipped: the clients cannot be installed; is there a network?" >&2
        exit 0
    fi
    cp "$requirements" "$stamp"
fi

# Each apart: they need different versions of the same packages.
install_tool() {
    local name=$1 requirement=$2 env=target/clients-load/$1
    if [ ! -x "$env/bin/$name" ]; then
        rm -rf "$env"
        "${PYTHON:-python3}" -m venv "$env"
        if ! "$env/bin/pip" install --quiet --disable-pip-version-check --retries 1 "$requirement"; then
            rm -rf "$env"
            echo "$name cannot be installed and is skipped; is there a network?" >&2
            return 1
        fi
    fi
    realpath --no-symlinks "$env/bin/$name"
}
if [ "${SLIPSTREAM_LOAD_TOOLS:-}" = 1 ]; then
    GUIDELLM_BIN=$(install_tool guidellm 'guidellm>=0.8,<0.9' || true)
    AIPERF_BIN=$(install_tool aiperf 'aiperf>=0.13,<0.14' || true)
    export GUIDELLM_BIN AIPERF_BIN
fi

if [ -z "${SLIPSTREAM_BIN:-}" ]; then
    cargo build --quiet --locked --package slipstream-cli
    SLIPSTREAM_BIN=${CARGO_TARGET_DIR:-target}/debug/slipstream
fi
SLIPSTREAM_BIN=$(realpath "$SLIPSTREAM_BIN")
export SLIPSTREAM_BIN
exec "$env/bin/pytest" -p no:cacheprovider python/tests/clients "$@"
