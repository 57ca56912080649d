//! Heads of files in which the disk tier keeps blocks, with and without a valid checksum.
//!
//! `make fuzz`, or with sanitizers `cargo +nightly fuzz run block_file`; the corpus is kept under
//! `fuzz/corpus/block_file`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| slipstream_fuzzing::block_file(bytes));
