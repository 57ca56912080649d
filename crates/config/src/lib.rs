//! The files that a user writes: cluster and workload, read with diagnostics that name file, line
//! and remedy, and the presets of GPUs and models that they refer to.
//!
//! Nothing here does I/O, reads a clock or starts anything: texts go in, checked values come out.
#![forbid(unsafe_code)]

pub mod cluster;
pub mod doc;
pub mod preset;
pub mod workload_file;
