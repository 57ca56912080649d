#!/usr/bin/env bash
# Instructions per streamed token, from a worker's engine to the bytes of the answer, by callgrind: with streams that
# another worker could continue (router.resumes_max = 3), and without (0). Virtual time, so that counts repeat.
set -euo pipefail
cd "$(dirname "$0")/.."
if ! command -v valgrind >/dev/null; then
  echo "skipped: valgrind is not installed (apt install valgrind)" >&2
  exit 0
fi
cargo build --release --locked --quiet --package slipstream-hotpaths --features sim
bin=${CARGO_TARGET_DIR:-target}/release/slipstream-hotpaths
out=$(mktemp -d)
trap 'rm -r "$out"' EXIT

# "INSTRUCTIONS OPERATIONS" of ROUNDS of PATH.
count() {
  valgrind --tool=callgrind --callgrind-out-file=/dev/null "$bin" "$1" "$2" >"$out/operations" 2>"$out/log" ||
    { cat "$out/log" >&2; return 1; }
  printf '%s %s\n' "$(sed -n 's/.*Collected : //p' "$out/log")" "$(cat "$out/operations")"
}

# What answers of any length need is the same in both runs, and cancels out.
for path in "streamed token, no resume" "streamed token"; do
  read -r few few_tokens < <(count "$path" 200)
  read -r many many_tokens < <(count "$path" 1000)
  awk -v path="$path" -v more=$((many - few)) -v tokens=$((many_tokens - few_tokens)) \
    'BEGIN { printf "%-28s %8.1f instructions per token\n", path, more / tokens }'
done
