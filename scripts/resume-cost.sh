#!/usr/bin/env bash
# Instructions per streamed token, from a worker's engine to the bytes of the answer, by callgrind: with streams that
# another worker could continue (router.resumes_max = 3), and without (0). Virtual time, so that counts repeat.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/callgrind.sh
hotpaths --features sim

# What answers of any length need is the same in both runs, and cancels out.
for path in "streamed token, no resume" "streamed token"; do
  read -r few few_tokens < <(count "$path" 200)
  read -r many many_tokens < <(count "$path" 1000)
  awk -v path="$path" -v more=$((many - few)) -v tokens=$((many_tokens - few_tokens)) \
    'BEGIN { printf "%-28s %8.1f instructions per token\n", path, more / tokens }'
done
