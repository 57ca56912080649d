#!/usr/bin/env bash
# `make test-sched`: build the BPF scheduler and try it on a real kernel in QEMU.
# Skips, with the reason, where the packages or the tools to build cannot be had.
set -euo pipefail
cd "$(dirname "$0")/../.."
. scripts/vm/common.sh
missing=()
command -v clang-19 >/dev/null || command -v clang >/dev/null || missing+=(clang-19 llvm-19)
[ -f /usr/include/libelf.h ] || missing+=(libelf-dev)
[ -f /usr/include/zlib.h ] || missing+=(zlib1g-dev)
command -v pkg-config >/dev/null || missing+=(pkg-config)
if [ ${#missing[@]} -gt 0 ]; then
  if [ "$(id -u)" != 0 ] || ! { apt-get -qq update && DEBIAN_FRONTEND=noninteractive \
    apt-get -qq install -y --no-install-recommends "${missing[@]}" >/dev/null; }; then
    echo "test-sched: SKIPPED: to build the BPF program, install ${missing[*]}" >&2
    exit 0
  fi
fi
rc=0; scripts/vm/setup.sh || rc=$?
[ $rc != 3 ] || { echo "test-sched: SKIPPED (see above)" >&2; exit 0; }
[ $rc = 0 ] || exit $rc
make scx build
cargo test --release --locked --manifest-path crates/scx/loader/Cargo.toml --target-dir target
SMP=4 scripts/vm/run.sh scripts/vm/job-sched.sh target/release/slipstream-scx target/release/slipstream
