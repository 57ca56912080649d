//! Records of the discovery directory: either rejected, or written as they were read.
//!
//! `make fuzz`, or with sanitizers `cargo +nightly fuzz run record`; the corpus is kept under
//! `fuzz/corpus/record`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| slipstream_fuzzing::record::check(bytes));
