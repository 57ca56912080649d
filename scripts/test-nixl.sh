#!/usr/bin/env bash
# Blocks by NIXL between two processes, on the library that its PyPI package brings: the tests of
# the transport in Rust, and stores in Python. Makes .venv-nixl at the first run (about 70 MB to
# download), and skips where that cannot be done. It takes no GPU and no PyTorch.
#   scripts/test-nixl.sh [pytest's arguments]
# SLIPSTREAM_NIXL_LIBRARY names another libnixl_capi.so to test with.
set -euo pipefail
cd "$(dirname "$0")/.."

version=1.5.1
folder=.venv-nixl
stamp=$folder/ready-$version
if [ ! -f "$stamp" ]; then
    rm -rf "$folder"
    "${PYTHON:-python3}" -m venv "$folder"
    pip() { "$folder/bin/pip" install --quiet --disable-pip-version-check "$@"; }
    pip 'maturin>=1.9,<2' 'pytest>=9,<10'
    # Its dependencies are NumPy and PyTorch, for a Python module that is not imported here.
    if ! pip --no-deps "nixl-cu13==$version"; then
        echo "skipped: nixl-cu13 $version cannot be installed here; there are wheels for Linux on x86-64 and aarch64"
        exit 0
    fi
    touch "$stamp"
fi
# shellcheck disable=SC1091
. "$folder/bin/activate"
maturin develop --release --quiet
SLIPSTREAM_NIXL_LIBRARY=${SLIPSTREAM_NIXL_LIBRARY:-$(python -c 'from slipstream.nixl import find_library; print(find_library())')}
export SLIPSTREAM_NIXL_LIBRARY
echo "NIXL's library: $SLIPSTREAM_NIXL_LIBRARY"

cargo test --quiet --locked --package slipstream-kvstore transport
pytest -p no:cacheprovider --quiet python/tests/nixl "$@"
echo "the same with UCX_TLS=tcp:"
UCX_TLS=tcp exec pytest -p no:cacheprovider --quiet python/tests/nixl "$@"
