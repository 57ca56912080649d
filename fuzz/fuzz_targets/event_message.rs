//! MessagePack of engines: KV events that are applied to a view of bounded size, and forward-pass metrics.
//!
//! `make fuzz`, or with sanitizers `cargo +nightly fuzz run event_message`; the corpus is kept under
//! `fuzz/corpus/event_message`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| slipstream_fuzzing::event_message::check(bytes));
