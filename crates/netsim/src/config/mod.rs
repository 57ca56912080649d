//! Reads a TOML file into a [`Scenario`]: Days' files as they are, and our own keys beside them.
//!
//! Every mistake is reported with its line; a key that nobody knows is one. Keys that steer the
//! execution of Days' engine are accepted and named in [`Config::notes`].

mod flows;
mod network;

use std::path::{Path, PathBuf};

use slipstream_base::doc::{Doc, Mistakes, Table};

use crate::scenario::Scenario;

/// A file's content.
#[derive(Clone, Debug)]
pub struct Config {
    /// What to simulate.
    pub scenario: Scenario,
    /// Folder for `sources.csv`, `sinks.csv` and `switches.csv`, if the file names one.
    pub log_path: Option<PathBuf>,
    /// What was accepted without effect, for people.
    pub notes: Vec<String>,
}

/// Knobs of Days' executor: no meaning here.
const EXECUTION: &[&str] = &[
    "ui_interval",
    "progress",
    "log_interval",
    "num_threads",
    "threading",
    "concurrency_level",
    "hot_workers",
    "time_quantum_ns",
    "mailbox_capacity",
    "tracing_active",
    "tracing_interval",
];

/// Reads `doc`.
///
/// # Errors
/// All mistakes together, each with its place. What only shows when paths are laid (hosts that are
/// cut off, flows that wait in a circle) is found by [`crate::Simulation::new`].
pub fn read(doc: Doc) -> Result<Config, Mistakes> {
    read_with(doc, &|path| {
        Err(format!("{} is not read here", path.display()))
    })
}

/// Reads `doc`, and through `load` the files that it names (distributions of sizes).
///
/// # Errors
/// As [`read`].
pub fn read_with(
    doc: Doc,
    load: &dyn Fn(&Path) -> Result<String, String>,
) -> Result<Config, Mistakes> {
    let (config, _) = doc.read(|root| {
        let mut notes = Vec::new();
        for key in EXECUTION {
            if root.has(key) {
                notes.push(format!(
                    "`{key}` steers the execution of Days' engine and has no effect here"
                ));
            }
        }
        if root.has("app_source") {
            root.table("app_source", |t| {
                for key in [
                    "req_channel_capacity",
                    "initial_delay",
                    "run_interval",
                    "chunk_size",
                ] {
                    if t.has(key) {
                        notes.push(format!(
                            "`app_source.{key}` steers Days' source actors and has no effect here"
                        ));
                    }
                }
            });
        }
        let seed: u64 = root.get("seed").or(1);
        let duration_s: f64 = root
            .get("duration")
            .check(|&d| d > 0.0 && d < 1e9, "above 0 and below 1e9 s")
            .or(1500.0);
        let network = network::read(root);
        let reader = flows::Reader::new(&network, seed, duration_s, load);
        let flows = reader.read(root);
        let report_s: Option<f64> = root
            .get("report_interval")
            .check(|&s| s > 0.0, "above 0 s")
            .optional();
        Config {
            log_path: root
                .has("log_path")
                .then(|| root.path("log_path").or("output".into())),
            notes,
            scenario: Scenario {
                seed,
                duration_ns: ns(duration_s),
                topology: network.topology,
                links: network.links,
                queue: network.queue,
                spray_paths: network.spray_paths,
                sample_ns: report_s.map(|s| ns(s).max(1)),
                failures: network.failures,
                notice_ns: network.notice_ns,
                flows,
            },
        }
    })?;
    Ok(config)
}

/// Seconds to ns.
fn ns(seconds: f64) -> u64 {
    (seconds * 1e9).round() as u64
}

/// Notes `error` as a mistake about `key`.
fn note(table: &Table<'_>, key: &str, error: &crate::Error) {
    table.mistake(key, error.to_string(), "see docs/netsim.md");
}
