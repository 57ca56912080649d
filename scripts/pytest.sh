#!/usr/bin/env bash
# Runs the Python tests: real clients against a real server, and the KV connector's parts that need
# no vLLM. Sets up .venv at the first run.
#   scripts/pytest.sh [pytest's arguments]
# SLIPSTREAM_BIN names the binary to test; without it, the debug one is built.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/venv.sh
# The Python package with its extension, as it lies in the tree.
VIRTUAL_ENV=$PWD/.venv .venv/bin/maturin develop --quiet

if [ -z "${SLIPSTREAM_BIN:-}" ]; then
    cargo build --quiet --locked --package slipstream-cli
    SLIPSTREAM_BIN=${CARGO_TARGET_DIR:-target}/debug/slipstream
fi
SLIPSTREAM_BIN=$(realpath "$SLIPSTREAM_BIN")
export SLIPSTREAM_BIN
exec .venv/bin/pytest -p no:cacheprovider python/tests/base "$@"
