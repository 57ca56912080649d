//! Whole runs against known answers.
#![allow(clippy::disallowed_methods)] // it has files

mod changes;
mod common;
mod conservation;
mod days;
mod files;
mod generators;
mod goldens;
mod graphs;
mod idle;
mod known;
mod losses;
mod lossless;
mod messages;
mod ndp;
mod notes;
mod outputs;
mod properties;
mod published;
mod recovery;
mod transports;
