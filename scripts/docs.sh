#!/usr/bin/env bash
# Builds the pages of docs/ as a site in target/site, and checks that every link in it leads to a file.
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
"$mdbook" build
# Pages link to these, which are outside of docs/: mdbook writes `.html` for `.md`.
cp -R examples target/site/
mkdir -p target/site/benches/results
for page in README ARCHITECTURE CONTRIBUTING CHANGELOG SECURITY benches/results/README; do
  {
    printf '<!doctype html><meta charset="utf-8"><title>%s</title><meta name="color-scheme" content="light dark"><pre style="white-space: pre-wrap; max-width: 60rem">' "$page"
    sed 's/&/\&amp;/g; s/</\&lt;/g' "$page.md"
    printf '</pre>\n'
  } >"target/site/$page.html"
done
printf '<!doctype html><meta http-equiv="refresh" content="0; url=docs/index.html"><a href="docs/index.html">Slipstream</a>\n' \
  >target/site/index.html
python3 scripts/links.py target/site
echo "target/site/index.html"
