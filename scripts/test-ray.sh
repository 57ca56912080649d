#!/usr/bin/env bash
# `sweep` and `plan` on a Ray of two nodes on this machine, of which one is killed. The environment with Ray
# (PyPI, 200 MB) is made in .cache at the first run; without a network the test is skipped.
#   scripts/test-ray.sh [pytest's arguments]
# SLIPSTREAM_BIN names the command to test; without it, the debug one is built.
set -euo pipefail
cd "$(dirname "$0")/.."

version=2.60
venv=$PWD/.cache/ray-$version
scripts/venv.sh
if ! "$venv/bin/python" -c 'import pytest, ray' 2>/dev/null; then
    rm -rf "$venv"
    "${PYTHON:-python3}" -m venv "$venv"
    if ! "$venv/bin/pip" install --quiet --disable-pip-version-check \
        "ray[client]==$version.*" 'pytest>=9,<10'; then
        rm -rf "$venv"
        echo "skipped: ray $version cannot be installed from PyPI"
        exit 0
    fi
fi
VIRTUAL_ENV=$venv .venv/bin/maturin develop --quiet
if [ -z "${SLIPSTREAM_BIN:-}" ]; then
    cargo build --quiet --locked --package slipstream-cli
    SLIPSTREAM_BIN=${CARGO_TARGET_DIR:-target}/debug/slipstream
fi
SLIPSTREAM_BIN=$(realpath "$SLIPSTREAM_BIN")
SLIPSTREAM_PYTHON=$venv/bin/python
export SLIPSTREAM_BIN SLIPSTREAM_PYTHON RAY_USAGE_STATS_ENABLED=0
exec "$venv/bin/pytest" -p no:cacheprovider python/tests/ray "$@"
