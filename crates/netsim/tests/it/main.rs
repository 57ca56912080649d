//! Whole runs against known answers.

mod changes;
mod common;
mod conservation;
mod days;
mod generators;
mod goldens;
mod graphs;
mod idle;
mod known;
mod lossless;
mod ndp;
mod outputs;
mod properties;
mod published;
mod transports;
