//! Bytes from the request plane: either rejected, or frames that can be read to their end and
//! written back unchanged.
//!
//! `make fuzz`, or with sanitizers `cargo +nightly fuzz run wire`; the corpus is kept under
//! `fuzz/corpus/wire`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| slipstream_fuzzing::wire::check(bytes));
