//! Network files (TOML): either rejected with errors that name a place, or a scenario that is rejected
//! or laid out if it has few flows.

use slipstream_config::doc::Doc;
use slipstream_netsim::config::{self, Resources};
use slipstream_netsim::{Execution, Simulation};

/// Larger networks are valid, but their layout takes too long for a fuzzer.
const SMALL: u32 = 4_096;

/// Checks one input.
///
/// # Panics
/// If a promise of the decoder does not hold.
pub fn check(bytes: &[u8]) {
    let resources = Resources {
        open: &|path| Err(format!("{} is not there", path.display())),
        memory_bytes_max: 16 << 20,
    };
    match config::read_with(Doc::parse("net.toml", bytes), &resources) {
        Err(mistakes) => assert!(!mistakes.to_string().is_empty()),
        Ok(config) => {
            let (hosts, nodes) = {
                let topology = &config.scenario.topology;
                (topology.host_count(), topology.node_count())
            };
            if hosts <= SMALL && nodes <= SMALL && config.scenario.flows.len() <= SMALL as usize {
                let execution = Execution {
                    memory_bytes_max: 64 << 20,
                    ..Execution::default()
                };
                if let Err(error) = Simulation::new(config.scenario, execution) {
                    assert!(!error.to_string().is_empty());
                }
            }
        }
    }
}
