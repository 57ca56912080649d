//! Traces in each format: every request that is read is usable, and every error names its line.
//!
//! `make fuzz`, or with sanitizers `cargo +nightly fuzz run trace`; the corpus is kept under
//! `fuzz/corpus/trace`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| slipstream_fuzzing::trace::check(bytes));
