#!/usr/bin/env bash
# Fuzzes decoders of what comes from outside, each for SECONDS_MAX seconds (60), with coverage, on the
# stable compiler: what `cargo +nightly fuzz run TARGET` does, without its sanitizers.
#   scripts/fuzz.sh [TARGET...]
# Each target begins with fuzz/corpus/TARGET; new inputs go to target/fuzz/corpus/TARGET
# (`-set_cover_merge=1` takes over what is worth keeping). It needs a C++ compiler, for libFuzzer.
set -euo pipefail
cd "$(dirname "$0")/../fuzz"
out=$(realpath -m "${CARGO_TARGET_DIR:-../target}/fuzz")
host=$(rustc -vV | sed -n 's/^host: //p')
coverage=(-Cpasses=sancov-module -Ccodegen-units=1 -Cdebug-assertions)
for flag in level=4 inline-8bit-counters pc-table trace-compares; do
  coverage+=("-Cllvm-args=-sanitizer-coverage-$flag")
done
# With --target the flags are for the target alone: build scripts have no libFuzzer to call.
RUSTFLAGS="${coverage[*]}" cargo build --release --bins --locked --target "$host" --target-dir "$out"
targets=("$@")
[ $# -gt 0 ] || mapfile -t targets < <(basename --suffix=.rs fuzz_targets/*.rs)
for target in "${targets[@]}"; do
  mkdir -p "$out/corpus/$target"
  # An input that fails is written to crash-* there.
  "$out/$host/release/$target" -max_total_time="${SECONDS_MAX:-60}" -max_len=4096 \
    -artifact_prefix="$out/" "$out/corpus/$target" "corpus/$target"
done
