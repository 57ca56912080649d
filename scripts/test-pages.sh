#!/usr/bin/env bash
# Checks every page by axe-core in a headless Chromium. The first run installs axe-core into target/axe by npm; without
# npm, a network or a browser it skips with a message.
#   scripts/test-pages.sh
# The notebook is checked, too, if .venv has nbconvert.
# SLIPSTREAM_BIN names the binary to test; AXE_JS an axe.min.js.
set -euo pipefail
cd "$(dirname "$0")/.."

axe=${AXE_JS:-target/axe/node_modules/axe-core/axe.min.js}
if [ ! -f "$axe" ]; then
    mkdir -p target/axe
    if ! npm install --silent --no-audit --no-fund --prefix target/axe 'axe-core@^4.10'; then
        echo "skipped: axe-core cannot be installed; are there npm and a network?" >&2
        exit 0
    fi
fi
status=0
scripts/pages.py axe "$axe" || status=$?
if [ "$status" = 0 ] && .venv/bin/python -c 'import nbconvert, plotly' 2>/dev/null; then
    page=$(mktemp -d)
    trap 'rm -r "$page"' EXIT
    (cd examples && ../.venv/bin/jupyter nbconvert --log-level ERROR --to html --execute --output-dir "$page" capacity.ipynb)
    scripts/pages.py notebook "$page/capacity.html"
fi
# 77: there is no browser.
[ "$status" = 77 ] || exit "$status"
