//! The engine from outside: answers worked out by hand, and runs against a plain model.
#![allow(clippy::disallowed_methods)] // it has threads, clocks or files

mod adapters;
mod against_plain;
mod allocations;
mod continued;
mod disagg;
mod encoder;
mod host_tier;
mod jumps;
mod known_answers;
mod peers;
mod pipeline;
mod plain;
mod rig;
mod speculation;
mod vllm;
