//! The workload file, resolved: requests and their arrival times.
//!
//! Plain values with defaults. The same file and seed give the same requests to `bench`, `simulate`
//! and `drag`. All times are workload time; [`Workload::time_scale`] divides them all when the
//! requests are generated.

mod arrival;
mod class;
mod dist;
mod keys;
mod read;
mod trace;

use crate::doc::{optional, section, value};

pub use arrival::{Arrival, RATE_MAX, RATE_MIN};
pub use class::{Class, IMAGE_TOKENS_MAX, IMAGES_MAX, PrefixLevel, SessionShape};
pub use dist::{Bounds, Dist, Empirical};
pub use keys::rows;
pub(crate) use read::TELLING_KEYS;
pub use read::{TIME_SCALES, read};
pub use trace::{OnBadLine, TimeUnit, TraceColumns, TraceFile};

section! {
    /// A whole workload.
    pub struct Workload, keys WorkloadKeys of "", read by hand {
        /// Seed of all random numbers.
        seed: u64 = value(0).with_description("integer");
        /// Total number of requests, including later turns; the last session is shortened to fit.
        ///
        /// Low: percentiles of few requests say little.
        requests?: u64 = optional().at_least(1).unit("requests")
            .with_default_text("until `duration_s`, or the end of the trace or the timestamps");
        /// Limit of session start times, s of workload time.
        duration_s?: f64 = optional().check(|s| *s >= 1e-9, "at least 1e-9 (1 ns)").with_description("s, 1e-9 or more");
        /// Divides arrival times, think times and `duration_s`: 60 turns an hour into a minute.
        time_scale: f64 = value(1.0).check(|s| TIME_SCALES.contains(s), "from 1e-9 to 1e9").with_description("1e-9 to 1e9");
        /// Only the sessions that begin in this part, which then begins at 0: its start and its length,
        /// s of workload time after `time_scale`. Not for closed loops. No key of a file.
        field window_s: Option<(f64, f64)> = None;
        /// Names of the models that requests may be for, which requests know by their place here; empty: all are for the
        /// only one. No key of a file.
        field served_models: Vec<String> = Vec::new();
        /// Arrivals of sessions.
        field arrival: Arrival = Arrival::Closed { concurrency: 1 };
        /// Prompts and answers.
        field content: Content = Content::Generated(vec![Class::default()]);
    }
}

impl Workload {
    /// Names of the LoRA adapters that its requests use, some perhaps several times.
    pub fn adapters(&self) -> Vec<&str> {
        match &self.content {
            Content::Generated(classes) => {
                let names = classes.iter().flat_map(|class| &class.adapters);
                names.map(String::as_str).collect()
            }
            Content::Trace(_) => Vec::new(),
        }
    }

    /// Names of the models that its classes state, some perhaps several times.
    pub fn models(&self) -> Vec<&str> {
        match &self.content {
            Content::Generated(classes) => {
                let names = classes.iter().flat_map(|class| &class.models);
                names.map(String::as_str).collect()
            }
            Content::Trace(_) => Vec::new(),
        }
    }

    /// Whether its requests may have images.
    pub fn has_images(&self) -> bool {
        match &self.content {
            Content::Generated(classes) => classes.iter().any(|c| c.images != Dist::Exact(0.0)),
            Content::Trace(_) => false,
        }
    }
}

/// Prompts and answers.
#[derive(Clone, Debug, PartialEq)]
pub enum Content {
    /// Drawn from classes; at least one.
    Generated(Vec<Class>),
    /// Read from a file.
    Trace(TraceFile),
}
