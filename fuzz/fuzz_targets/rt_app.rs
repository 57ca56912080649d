//! rt-app files (JSON): either rejected with a place, or a workload.
//!
//! `make fuzz`, or with sanitizers `cargo +nightly fuzz run rt_app`; the corpus is kept under
//! `fuzz/corpus/rt_app`.
#![no_main]

use libfuzzer_sys::fuzz_target;
use slipstream_cpusched::machine::Machine;
use slipstream_cpusched::rtapp;

fuzz_target!(|text: &str| {
    let machine = Machine {
        llcs: 2,
        cpus_per_llc: 4,
        threads_per_core: 2,
    };
    if let Err(error) = rtapp::parse(text, machine) {
        assert!(!error.to_string().is_empty());
    }
});
