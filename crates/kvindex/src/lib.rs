//! Which blocks of KV cache are held where, and how much of a prompt that covers.
//!
//! [`BlockIndex`] follows the engines' own events ([`slipstream_base::KvDelta`]);
//! [`ApproximateIndex`] believes for a while that what was routed somewhere is cached there, for
//! engines that tell nothing. Neither does I/O or reads a clock.
//!
//! Owners are dense *target* indexes `0..T`: all ranks of all workers, in an order that the caller
//! chooses.
#![forbid(unsafe_code)]

pub mod approximate;
pub mod block_index;
mod owners;
mod table;

pub use approximate::ApproximateIndex;
pub use block_index::{Applied, BlockIndex};
