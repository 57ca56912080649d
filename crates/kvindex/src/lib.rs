//! Which blocks of KV cache are held where, and how much of a prompt that covers.
//!
//! [`BlockIndex`] follows the engines' own events ([`slipstream_base::KvDelta`]);
//! [`ApproximateIndex`] believes for a while that what was routed somewhere is cached there, for
//! engines that tell nothing.
//!
//! Engines that share blocks tell each other by whole keys, not by 64-bit hashes: [`KeySet`] is what
//! one engine holds and what changed in it, [`KeyMirror`] is somebody's set as its messages tell it,
//! and [`PeerIndex`] finds the longest prefix among many peers. Their messages: `docs/kv-keys.md`.
//!
//! Nothing here does I/O or reads a clock.
//!
//! Owners are dense *target* indexes `0..T`: all ranks of all workers, in an order that the caller
//! chooses.
#![forbid(unsafe_code)]

pub mod approximate;
pub mod block_index;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
pub mod groups;
pub mod key_message;
pub mod key_mirror;
pub mod key_set;
mod owners;
pub mod peer_index;
mod table;

pub use approximate::ApproximateIndex;
pub use block_index::{Applied, BlockIndex};
pub use groups::{Group, Groups, Reach};
pub use key_message::{KeyError, KeyMessage, Knowledge, digest};
pub use key_mirror::KeyMirror;
pub use key_set::{Change, KeySet};
pub use peer_index::{PeerIndex, Taken};
