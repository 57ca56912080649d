//! The cheapest cluster that attains objectives under a workload.
//!
//! ```text
//!  workload ─► Demand ─┐
//!                      ├─► bounds: shapes that cannot attain, workers needed at least
//!  shapes ──► StepTime ┘        │
//!                               ▼
//!                            Search ──trials──► driver (threads) ──► trial::run (twin)
//!                               ▲                                       │
//!                               └────────────── TrialResult ◄──────────────┘
//! ```
//!
//! [`Search`] decides which configurations are simulated, on which part of the workload; it simulates
//! nothing itself. It asks for trials in batches, which the driver may run on any number of threads:
//! batches do not depend on them, so the answer does not either.
//!
//! - [`demand`]: what the requests need, whatever serves them; the busiest part of a workload.
//! - [`bound`]: limits that follow from step times alone, without a simulation.
//! - [`axes`]: what is searched: flags, keys of the cluster file and names in outputs, declared once.
//! - [`space`]: shapes and settings.
//! - [`search`]: which trials to run, and the answer.
//! - [`trial`]: one simulation, ended as soon as it can no longer attain.
//! - [`load`]: a workload at another load.
//! - [`confidence`]: intervals, and the error of step times.
//!
//! The crate opens no file and starts no thread. `docs/plan.md` describes the method and its limits.
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

pub mod axes;
pub mod bound;
pub mod confidence;
pub mod demand;
pub mod load;
pub mod search;
pub mod space;
pub mod trial;

pub use axes::Axes;
pub use demand::Demand;
pub use search::{Choice, Conditions, Evaluate, Search, Trial, TrialResult};
pub use space::{Setting, Shape};
