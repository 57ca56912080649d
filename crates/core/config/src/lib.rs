//! User-written files: cluster and workload files, read with errors that name file, line and
//! remedy, and the presets of GPUs and models that they refer to.
//!
//! This crate does no I/O, reads no clock and starts nothing: texts go in, checked values come out.
// Casts that could change a number go through `slipstream_base::width`.
#![cfg_attr(
    not(test),
    warn(
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss
    )
)]
#![cfg_attr(test, allow(clippy::disallowed_methods))] // its tests do I/O
#![forbid(unsafe_code)]

pub mod cluster;
pub mod doc;
pub mod preset;
pub mod prices;
pub mod workload_file;
