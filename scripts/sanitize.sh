#!/usr/bin/env bash
# Tests of the crates with threads, sockets and shared memory under AddressSanitizer or ThreadSanitizer.
#   scripts/sanitize.sh address|thread [cargo test's arguments]
# It takes a nightly compiler with the source of the standard library:
#   rustup toolchain install nightly --profile minimal --component rust-src
set -euo pipefail
cd "$(dirname "$0")/.."
sanitizer=${1:?address or thread}
shift
host=$(rustc -vV | sed -n 's/^host: //p')
# The standard library is built too: ThreadSanitizer has to see its locks and channels.
if [ ! -d "$(rustc +nightly --print sysroot)/lib/rustlib/src/rust/library" ]; then
  echo "rust-src is missing: rustup component add rust-src --toolchain nightly" >&2
  exit 1
fi
# With --target the flags are for the target alone: build scripts and macros stay as they are.
export RUSTFLAGS="-Zsanitizer=$sanitizer -Cdebuginfo=1"
# A report ends its test; leaks are reported too (not under a debugger).
export ASAN_OPTIONS="abort_on_error=1:detect_stack_use_after_return=1:${ASAN_OPTIONS:-}"
export TSAN_OPTIONS="halt_on_error=1:second_deadlock_stack=1:suppressions=$PWD/scripts/tsan-suppressions.txt:${TSAN_OPTIONS:-}"
exec cargo +nightly test -Zbuild-std --locked --target "$host" \
  --target-dir "${CARGO_TARGET_DIR:-target}/sanitize-$sanitizer" \
  --package slipstream-kvstore --package slipstream-planes --lib --tests "$@"
