#!/usr/bin/env bash
# Fuzzes the plane's decoder for SECONDS_MAX seconds (60), with coverage, on the stable compiler: what
# `cargo +nightly fuzz run wire` does, without its sanitizers. It begins with fuzz/corpus/wire; what it
# finds goes to fuzz/target/corpus (`-set_cover_merge=1` takes over what is worth keeping). It needs
# a C++ compiler, for libFuzzer.
set -euo pipefail
cd "$(dirname "$0")/../fuzz"
host=$(rustc -vV | sed -n 's/^host: //p')
coverage=(--cfg fuzzing -Cpasses=sancov-module -Ccodegen-units=1 -Cdebug-assertions)
for flag in level=4 inline-8bit-counters pc-table trace-compares; do
  coverage+=("-Cllvm-args=-sanitizer-coverage-$flag")
done
# With --target the flags are for the target alone: build scripts have no libFuzzer to call.
RUSTFLAGS="${coverage[*]}" cargo build --release --locked --target "$host"
mkdir -p target/corpus
"target/$host/release/wire" -max_total_time="${SECONDS_MAX:-60}" -max_len=4096 target/corpus corpus/wire
