//! Scenarios from TOML, as users write them.

use slipstream_config::doc::Doc;
use slipstream_netsim::config::{self, Config};
use slipstream_netsim::output::{self, Cost};
use slipstream_netsim::{Execution, RunResult, Simulation};

pub(crate) fn config(toml: &str) -> Config {
    config::read(Doc::parse("test.toml", toml.as_bytes())).unwrap_or_else(|e| panic!("{e}"))
}

pub(crate) fn run_on(toml: &str, threads: u32) -> RunResult {
    let execution = Execution {
        threads,
        ..Execution::default()
    };
    let mut simulation =
        Simulation::new(config(toml).scenario, execution).unwrap_or_else(|e| panic!("{e}"));
    simulation.run(execution, u64::MAX, &mut |_, _| ());
    simulation.result()
}

pub(crate) fn run(toml: &str) -> RunResult {
    run_on(toml, 1)
}

/// The error of `toml`, from reading it or from the set-up.
pub(crate) fn error(toml: &str) -> String {
    match config::read(Doc::parse("test.toml", toml.as_bytes())) {
        Err(diagnostics) => diagnostics.to_string(),
        Ok(config) => match Simulation::new(config.scenario, Execution::default()) {
            Err(error) => error.to_string(),
            Ok(_) => panic!("accepted: {toml}"),
        },
    }
}

/// A shipped example.
pub(crate) fn example(name: &str) -> String {
    let path = format!(
        "{}/../../../examples/net/{name}",
        env!("CARGO_MANIFEST_DIR")
    );
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// Two switches with one host each, connected by one link of `rate` bit/s and 1 us.
pub(crate) fn pair(rate: &str, switch: &str, flow: &str) -> String {
    format!(
        "edges = [[0, 1]]\nhosts = [0, 1]\nduration = 100.0\n\
         [link]\nhost_links = false\npropagation_ns = 1000\n\
         [switch]\nport_rate = {rate}\n{switch}\n{flow}\n"
    )
}

/// The run as `--json` prints it.
pub(crate) fn json(name: &str, config: &Config, result: &RunResult) -> serde_json::Value {
    let mut out = Vec::new();
    let cost = Cost::default();
    output::write_json(&mut out, name, config, result, &cost, false)
        .expect("writing to a Vec cannot fail");
    serde_json::from_slice(&out).expect("JSON")
}
