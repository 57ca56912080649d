//! Step times fitted to measurements, with their errors on parts that the fit did not see.
//!
//! ```text
//!   points (a table of deployments) ─────────────────► a profile of many deployments
//!   load (sends, records) ─► records ─► replay ─┐
//!   steps (metrics of an engine) ───────────────┴────► fitted: the terms of one engine
//! ```
//!
//! - [`points`]: a table of measured deployments.
//! - [`load`]: loads for a running engine, each of which shows one term; [`records`]: requests as their client saw them.
//! - [`replay`]: terms from requests, by the twin, which knows queues; [`steps`]: terms from forward-pass metrics.
//! - [`fitted`]: the terms as a report, and as a section of a cluster file.
//!
//! The crate reads files, loads engines, and returns results as values and text. Times are seconds, terms nanoseconds. Errors are
//! [`anyhow::Error`]s that say what to measure again. The crate does not know flags or terminals: notes and progress go
//! to the caller's functions.
// Casts that could change a number go through `slipstream_base::width`.
#![cfg_attr(
    not(test),
    warn(
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss
    )
)]
#![forbid(unsafe_code)]

pub mod fitted;
pub mod load;
pub mod points;
pub mod records;
pub mod replay;
pub mod steps;

use std::path::Path;

use slipstream_config::cluster::Cluster;

/// Receives a line for the operator.
pub type Note<'n> = &'n dyn Fn(&str);

/// `cluster`, if it is one engine.
///
/// # Errors
/// It has several pools or ranks.
pub fn one_worker(mut cluster: Cluster) -> anyhow::Result<Cluster> {
    anyhow::ensure!(
        cluster.pools.len() == 1,
        "the cluster has {} pools; records of one engine are needed, so name a cluster file with one",
        cluster.pools.len()
    );
    anyhow::ensure!(
        cluster.pools[0].engine.data_parallel_size <= 1,
        "`engine.data_parallel_size` is {}; ranks share one server's time, which is not told apart here: \
         calibrate an engine of one rank",
        cluster.pools[0].engine.data_parallel_size
    );
    cluster.pools[0].workers = 1;
    cluster.pools[0].autoscale = None;
    cluster.events.clear();
    Ok(cluster)
}

/// The name of the file `path`, without its folder.
pub fn name(path: &Path) -> String {
    path.file_name()
        .map_or(String::new(), |n| n.to_string_lossy().into_owned())
}
