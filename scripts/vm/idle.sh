#!/usr/bin/env bash
# `scripts/run.sh bench-idle-vm`: memory of the server per idle connection, in a virtual machine: its root may open more
# files than many hosts allow.
#
#   scripts/vm/idle.sh BINARY [CONNECTIONS]   (50,000)
set -euo pipefail
binary=$(readlink -f "${1:?usage: idle.sh BINARY [CONNECTIONS]}"); count=${2:-50000}
cd "$(dirname "$0")/../.."
. scripts/vm/common.sh
scripts/vm/setup.sh
cc=${CC:-}
[ -n "$cc" ] || cc=$(command -v cc || command -v clang-19 || command -v clang) || die "no C compiler"
tmp=$(mktemp -d "${TMPDIR:-/tmp}/slipstream-idle.XXXXXX"); trap 'rm -rf "$tmp"' EXIT
"$cc" -O2 -Wall -Wextra -static -o "$tmp/hold" scripts/vm/hold.c
cp "$binary" "$tmp/slipstream"
scripts/idle-connections.py --write-cases "$tmp"
FILES=$(echo "$tmp"/*.sent "$tmp"/*.expected) JOB_ARGS=$count SMP=2 MEM=${MEM:-4096} TIMEOUT=${TIMEOUT:-3600} \
  scripts/vm/run.sh scripts/vm/job-idle.sh "$tmp/slipstream" "$tmp/hold"
