//! Whole runs against known answers.

mod common;
mod conservation;
mod known;
mod lossless;
mod ndp;
mod published;
