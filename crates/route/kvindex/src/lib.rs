//! Indexes of cached KV blocks: the holders of each block, and the prefix of a prompt that each one holds.
//!
//! [`BlockIndex`] applies the engines' own events ([`slipstream_base::KvDelta`]). [`ApproximateIndex`]
//! serves engines that publish no events: it assumes for a while that blocks are cached on the engine
//! that they were routed to.
//!
//! Engines that share blocks publish whole keys, not 64-bit hashes. [`KeySet`] holds the keys of one
//! engine and its unpublished changes, [`KeyMirror`] is a remote engine's set rebuilt from its messages,
//! and [`PeerIndex`] finds the longest prefix among many peers. Message format: `docs/kv-keys.md`.
//!
//! Nothing here does I/O or reads a clock.
//!
//! Owners are dense *target* indexes `0..T`: all ranks of all workers, in an order that the caller
//! chooses.
#![cfg_attr(test, allow(clippy::disallowed_methods))] // its tests do I/O
// Casts that could change a number go through `slipstream_base::width`.
#![cfg_attr(
    not(test),
    warn(
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss
    )
)]
#![forbid(unsafe_code)]

pub mod approximate;
pub mod block_index;
#[cfg(any(test, feature = "fuzzing"))]
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
