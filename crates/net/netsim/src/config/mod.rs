//! Reads a TOML file into a [`Scenario`]: unmodified files of Days, and our own keys.
//!
//! Every error is reported with its line, including unknown keys. Keys without effect on results
//! are accepted and listed in [`Config::notes`]. Keys of Days whose effect is not modeled are
//! refused. `dialect` decides between two meanings of a key.

mod classes;
mod collectives;
mod dialect;
mod discipline;
mod flow_list;
mod flow_set;
mod flows;
mod network;
mod order;
mod pfc;
mod roce;
mod switch;
mod template;
mod units;

use std::io::BufRead;
use std::path::{Path, PathBuf};

use slipstream_base::width::round_u64;
use slipstream_config::cluster::file::{NETWORK_KEYS, TELLING_KEYS};
use slipstream_config::doc::{Diagnostics, Doc, Origin, Table};

pub use dialect::Dialect;

use crate::error::Error;
use crate::scenario::Scenario;

/// A first file, whose comments name the keys that most files need.
pub const STARTER: &str = include_str!("starter.toml");

/// Opens a file that a configuration refers to; the error is the reason.
pub type Open<'a> = dyn Fn(&Path) -> Result<Box<dyn BufRead>, String> + 'a;

/// Files and memory that a reader may use.
pub struct Resources<'a> {
    /// Opens the files that the configuration refers to.
    pub open: &'a Open<'a>,
    /// Memory limit for flows, bytes: flows that exceed it are refused before they are created.
    pub memory_bytes_max: u64,
}

/// The contents of a configuration file.
#[derive(Clone, Debug)]
pub struct Config {
    /// The run.
    pub scenario: Scenario,
    /// Folder for `sources.csv`, `sinks.csv` and `switches.csv`, if the file gives one.
    pub log_path: Option<PathBuf>,
    /// The dialect that the file was read in.
    pub dialect: Dialect,
    /// Why this dialect was chosen.
    pub dialect_because: String,
    /// Set if the choice of the dialect changes results and the file does not specify it.
    pub dialect_note: Option<String>,
    /// Keys accepted without effect, and settings that may surprise, for people.
    pub notes: Vec<String>,
    /// By table of traffic: the index of its first flow, and its position.
    origins: Vec<(usize, Origin)>,
}

impl Config {
    /// An error of the set-up with the position of the table at fault, or else with the name of the
    /// file.
    pub fn located(&self, file: &str, error: &Error) -> String {
        let of_flow = |id: u64| {
            let index = self.scenario.flows.iter().position(|flow| flow.id == id)?;
            let table = self.origins.partition_point(|(first, _)| *first <= index);
            Some(&self.origins.get(table.checked_sub(1)?)?.1)
        };
        let origin = match error {
            Error::Flow { flow, .. } => of_flow(*flow),
            _ => None,
        };
        match origin {
            Some(origin) => format!("{origin}: {error}"),
            None => format!("{file}: {error}"),
        }
    }
}

/// Keys of Days that do not change results.
const EXECUTION: &[&str] = &[
    "csv_logging",
    "legacy_e5_metrics",
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
/// All errors together, each with its location. Errors that appear only at set-up (hosts without a
/// path, flows that depend on each other in a cycle) are reported by [`crate::Simulation::new`].
pub fn read(doc: Doc) -> Result<Config, Diagnostics> {
    read_with(
        doc,
        &Resources {
            open: &|path| Err(format!("{} is not read here", path.display())),
            memory_bytes_max: u64::MAX,
        },
    )
}

/// Reads `doc`, and the files that it refers to (distributions of sizes, lists of flows).
///
/// # Errors
/// As [`read`].
pub fn read_with(doc: Doc, resources: &Resources<'_>) -> Result<Config, Diagnostics> {
    doc.refuse_kind(
        &NETWORK_KEYS,
        &TELLING_KEYS,
        "this is a cluster file, not a file of `slipstream net run`",
        "give it to `slipstream simulate`",
    )?;
    let (mut config, _) = doc.read(|root| {
        let chosen = dialect::choose(root);
        let mut notes = Vec::new();
        for key in EXECUTION {
            if root.has(key) {
                notes.push(format!(
                    "`{key}` does not change results: it steers the execution or logs of Days"
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
            .check(|&d| ns(d) > 0, "at least 1e-9 s: times are whole ns")
            .or(1500.0);
        refuse_workload(root);
        let mut network = network::read(root, chosen.dialect, &mut notes);
        let reader = flows::Reader::new(&network, chosen.dialect, seed, duration_s, resources);
        let (made, origins) = reader.read(root, &mut notes);
        let flows = classes::settle(root, chosen.dialect, made, &mut network.queue, &mut notes);
        let report_s: Option<f64> = root
            .get("report_interval")
            .check(|&s| s > 0.0, "above 0 s")
            .check(|&s| ns(s) > 0, "at least 1e-9 s: times are whole ns")
            .optional();
        Config {
            log_path: root
                .has("log_path")
                .then(|| root.path("log_path").or("output".into())),
            dialect: chosen.dialect,
            dialect_because: chosen.because,
            dialect_note: chosen.note,
            notes,
            origins,
            scenario: Scenario {
                seed,
                duration_ns: ns(duration_s),
                topology: network.topology,
                links: network.links,
                queue: network.queue,
                spray_paths: network.spray_paths,
                sample_ns: report_s.map(|s| ns(s).max(1)),
                failures: network.failures,
                convergence_ns: network.convergence_ns,
                flows,
            },
        }
    })?;
    config
        .notes
        .extend(crate::advice::on_scenario(&config.scenario));
    Ok(config)
}

/// `[workload.aicb]`: traces of training, which Days runs by SimAI's rules.
fn refuse_workload(root: &Table<'_>) {
    if root.any("workload", |_| true) {
        root.refuse(
            "workload",
            "is not read: its AICB trace needs SimAI's communicator groups, sizes and NVLink delays, \
             none of which is modeled here",
            "write its collectives as [[collective]] and its computation as [[compute]]",
        );
    }
}

/// Seconds to ns.
fn ns(seconds: f64) -> u64 {
    round_u64(seconds * 1e9)
}

/// Reports `error` about `key`.
fn note(table: &Table<'_>, key: &str, error: &crate::Error) {
    table.error(key, error.to_string(), "see docs/netsim.md");
}
