//! The engine from outside: answers worked out by hand, and runs against a plain model.

mod against_plain;
mod allocations;
mod continued;
mod handovers;
mod jumps;
mod known_answers;
mod plain;
mod rig;
mod vllm;
