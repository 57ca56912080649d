//! Network files (TOML): either rejected with errors that name a place, or a scenario that is rejected
//! or laid out if it has few flows.
//!
//! `make fuzz`, or with sanitizers `cargo +nightly fuzz run network_file`; the corpus is kept under
//! `fuzz/corpus/network_file`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| slipstream_fuzzing::network_file::check(bytes));
