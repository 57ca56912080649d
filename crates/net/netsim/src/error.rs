//! Errors that prevent a run.

use thiserror::Error as ThisError;

/// Why a scenario cannot run. A retry does not help; each text names the remedy.
#[derive(Debug, Clone, PartialEq, Eq, ThisError)]
#[non_exhaustive]
pub enum Error {
    /// The parameters do not form a valid topology.
    #[error("topology: {0}")]
    Topology(String),
    /// A rate, capacity, size or time that cannot be simulated.
    #[error("{0}")]
    Value(String),
    /// A flow that cannot run.
    #[error("flow {flow}: {what}")]
    Flow {
        /// The flow's number in the file.
        flow: u64,
        /// The fault and its remedy.
        what: String,
    },
    /// Flows depend on each other in a cycle.
    #[error("flows wait for each other in a circle: {0}; break one `starts_after`")]
    Cycle(String),
    /// The run would exceed the memory limit.
    #[error(
        "the run needs about {need_mib} MiB ({what}), more than the {have_mib} MiB at hand; \
         lower the number of flows, paths or hosts"
    )]
    Memory {
        /// Estimated need, MiB.
        need_mib: u64,
        /// Limit, MiB.
        have_mib: u64,
        /// The largest component.
        what: String,
    },
}
