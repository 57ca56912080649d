#!/usr/bin/env bash
# Compile the loads of the scheduler's tests into .cache/vm/load.
set -euo pipefail
cd "$(dirname "$0")/../.."
. scripts/vm/common.sh
cc=${CC:-}
[ -n "$cc" ] || cc=$(command -v cc || command -v clang-19 || command -v clang) || die "no C compiler"
[ "$VM/load" -nt scripts/vm/load.c ] || "$cc" -O2 -Wall -Wextra -static -pthread -o "$VM/load" scripts/vm/load.c -lm
