//! Bytes from ZeroMQ peers: frames do not depend on how they are cut.
//!
//! `make fuzz`, or with sanitizers `cargo +nightly fuzz run zmtp`; the corpus is kept under
//! `fuzz/corpus/zmtp`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| slipstream_fuzzing::zmtp(bytes));
