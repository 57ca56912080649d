//! Bytes from another store: either rejected, or frames that are written as they were read.
//!
//! `make fuzz`, or with sanitizers `cargo +nightly fuzz run kv_wire`; the corpus is kept under
//! `fuzz/corpus/kv_wire`, and the checks in `slipstream_kvstore::fuzz`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| slipstream_fuzzing::kv_wire(bytes));
