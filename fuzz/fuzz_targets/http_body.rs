//! Bodies of HTTP requests: either rejected with a status and a reason, or a request.
//!
//! `make fuzz`, or with sanitizers `cargo +nightly fuzz run http_body`; the corpus is kept under
//! `fuzz/corpus/http_body`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| slipstream_fuzzing::http_body::check(bytes));
