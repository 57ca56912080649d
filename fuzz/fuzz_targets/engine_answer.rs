//! Answers of real engines, and the requests that continue their streams.
//!
//! `make fuzz`, or with sanitizers `cargo +nightly fuzz run engine_answer`; the corpus is kept under
//! `fuzz/corpus/engine_answer`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| slipstream_fuzzing::engine_answer(bytes));
