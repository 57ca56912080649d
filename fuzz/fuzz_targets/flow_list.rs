//! Lists of flows, CSV or JSON by the first byte: every flow that is read connects two hosts of the
//! network, and every error names its line.
//!
//! `make fuzz`, or with sanitizers `cargo +nightly fuzz run flow_list`; the corpus is kept under
//! `fuzz/corpus/flow_list`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| slipstream_fuzzing::flow_list::check(bytes));
