//! rt-app files (JSON): either rejected with a place, or a workload.

use slipstream_cpusched::machine::Machine;
use slipstream_cpusched::rtapp;

/// Checks one input.
///
/// # Panics
/// If a promise of the decoder does not hold.
pub fn check(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    let machine = Machine {
        llcs: 2,
        cpus_per_llc: 4,
        threads_per_core: 2,
    };
    if let Err(error) = rtapp::parse(text, machine) {
        assert!(!error.to_string().is_empty());
    }
}
