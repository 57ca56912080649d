//! rt-app files (JSON): either rejected with a place, or a workload.
//!
//! `make fuzz`, or with sanitizers `cargo +nightly fuzz run rt_app`; the corpus is kept under
//! `fuzz/corpus/rt_app`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| slipstream_fuzzing::rt_app::check(bytes));
