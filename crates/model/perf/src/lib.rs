//! Time of an engine step, and TTFT and TPOT of a deployment at a fixed concurrency.
//!
//! ```text
//!  row of a table ─► Deployment ─► Physics (terms of a step) ─► closed loop ─► TTFT, TPOT
//!                                      ▲                            │
//!                   Profile: overheads, efficiencies ───────────────┤
//!                   Profile: residual on log time, error bands ─────┘
//! ```
//!
//! [`Physics`] computes how long one step takes on given work; [`StepModel`] is what the timing model
//! `calibrated` of the engine looks up. [`Profile`] holds the values fitted to measured deployments, and is data.
//! [`fit`] makes a profile from a table of measured deployments, and scores it on data that the
//! fit did not see. Equations and sources: `docs/step-time.md`; errors: `docs/accuracy.md`.
//!
//! The crate does no I/O: texts go in and come out.
// Casts that could change a number go through `slipstream_base::width`.
#![cfg_attr(
    not(test),
    warn(
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss
    )
)]

mod deployment;
mod elementary;
pub mod fit;
mod linear_algebra;
mod memory;
mod names;
pub mod observed;
mod physics;
mod predict;
mod profile;
mod read;
pub mod report;
mod residual;
mod steps;
mod table;

pub use deployment::{Deployment, Formats, Framework, Parallel, Refusal, Serving};
pub use names::precision_word;
pub use physics::{Load, Moved, Physics, Terms};
pub use predict::{ErrorBars, Estimate, error_bars, not_modelled, predict};
pub use profile::{Distance, Params, Profile, ProfileError};
pub use steps::{LastStep, StepModel};
pub use table::{Row, TableError, read_rows, unknown_columns};
