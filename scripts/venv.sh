#!/usr/bin/env bash
# Sets up .venv, with what the Python tests and the lints need. Does nothing if it is up to date.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "error: $python is older than 3.11; name another by PYTHON=..." >&2
    exit 2
fi

# Made anew when the requirements or the interpreter change.
stamp=.venv/requirements.installed
wanted=$("$python" --version; cat python/tests/base/requirements.txt)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
    exit 0
fi
rm -rf .venv
if ! "$python" -m venv .venv; then
    echo "error: no virtual environment could be made; on Debian: apt install python3-venv" >&2
    exit 2
fi
.venv/bin/pip install --quiet --disable-pip-version-check \
    --requirement python/tests/base/requirements.txt
# The class by which Dynamo reads forward-pass metrics. Its dependencies are 700 MB, and one of
# them is not on PyPI; that class needs `msgspec` alone.
.venv/bin/pip install --quiet --disable-pip-version-check --no-deps ai-dynamo==1.6.1 ||
    echo "note: no ai-dynamo 1.6.1; the test of its reader is skipped" >&2
echo "$wanted" >"$stamp"
