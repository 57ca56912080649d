//! Pages of metrics that engines serve.
//!
//! `make fuzz`, or with sanitizers `cargo +nightly fuzz run metrics_page`; the corpus is kept under
//! `fuzz/corpus/metrics_page`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| slipstream_fuzzing::metrics_page::check(bytes));
