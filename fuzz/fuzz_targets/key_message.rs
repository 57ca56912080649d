//! Messages about keys, in any order: followers agree with a model of `docs/kv-keys.md`.
//!
//! `make fuzz`, or with sanitizers `cargo +nightly fuzz run key_message`; the corpus is kept under
//! `fuzz/corpus/key_message`, and the checks in `slipstream_kvindex::fuzz`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| slipstream_fuzzing::key_message(bytes));
