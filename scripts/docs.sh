#!/usr/bin/env bash
# Builds README and the pages of docs/ as a site in target/site, and checks that every link in it leads to a file.
# MDBOOK names mdbook if it is not on PATH.
set -euo pipefail
cd "$(dirname "$0")/.."
mdbook=${MDBOOK:-mdbook}
if ! command -v "$mdbook" >/dev/null; then
  echo "error: mdbook is not installed; cargo install mdbook --no-default-features --features search, or name it by MDBOOK" >&2
  exit 2
fi
rm -rf target/site
mkdir -p target/site
scripts/book.py target/book
"$mdbook" build
# Pages link to these, which are outside of docs/.
cp -R examples target/site/
printf '<!doctype html><meta http-equiv="refresh" content="0; url=docs/index.html"><a href="docs/index.html">Slipstream</a>\n' \
  >target/site/index.html
python3 scripts/links.py target/site
scripts/pages.py fresh docs/ui.png
echo "target/site/index.html"
