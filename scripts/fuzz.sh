#!/usr/bin/env bash
# Fuzzes decoders of what comes from outside, each for SECONDS_MAX seconds (60), with coverage, on the
# stable compiler: what `cargo +nightly fuzz run TARGET` does, without its sanitizers.
#   scripts/fuzz.sh [TARGET...]
# Each target begins with fuzz/corpus/TARGET; what it finds goes to fuzz/target/corpus/TARGET
# (`-set_cover_merge=1` takes over what is worth keeping). It needs a C++ compiler, for libFuzzer.
set -euo pipefail
cd "$(dirname "$0")/../fuzz"
host=$(rustc -vV | sed -n 's/^host: //p')
coverage=(--cfg fuzzing -Cpasses=sancov-module -Ccodegen-units=1 -Cdebug-assertions)
for flag in level=4 inline-8bit-counters pc-table trace-compares; do
  coverage+=("-Cllvm-args=-sanitizer-coverage-$flag")
done
# With --target the flags are for the target alone: build scripts have no libFuzzer to call.
RUSTFLAGS="${coverage[*]}" cargo build --release --bins --locked --target "$host"
targets=("$@")
[ $# -gt 0 ] || mapfile -t targets < <(basename --suffix=.rs fuzz_targets/*.rs)
for target in "${targets[@]}"; do
  mkdir -p "target/corpus/$target"
  "target/$host/release/$target" -max_total_time="${SECONDS_MAX:-60}" -max_len=4096 \
    "target/corpus/$target" "corpus/$target"
done
