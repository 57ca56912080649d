//! Workload files (TOML): either rejected with errors that name a place, or a workload that is printed as a file
//! with the same meaning.
//!
//! `make fuzz`, or with sanitizers `cargo +nightly fuzz run workload_file`; the corpus is kept under
//! `fuzz/corpus/workload_file`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| slipstream_fuzzing::workload_file::check(bytes));
