#!/usr/bin/env bash
# Instructions per operation of each hot path, by callgrind, against benches/instructions.json: exit 1 if one grew by
# more than 3 %. WRITE=1 writes the file. Counts depend on the compiler, so another version only prints them.
set -euo pipefail
cd "$(dirname "$0")/.."
file=benches/instructions.json
. scripts/callgrind.sh
hotpaths

"$bin" | while read -r path; do
  case $path in
    engine*) low=600 high=1800 ;;
    frame* | SSE*) low=100 high=400 ;;
    packet*) low=100 high=300 ;;
    block*) low=200 high=600 ;;
    *) low=20000 high=60000 ;;
  esac
  echo "$path|$(count "$path" $low)|$(count "$path" $high)"
done >"$out/counts"
python3 scripts/instructions.py "$out/counts" "$file" "$(rustc --version)" ${WRITE:+--write}
