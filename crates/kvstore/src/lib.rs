//! Stores blocks of KV cache outside of an engine, and transfers them.
//!
//! A block is a byte string under a key ([`slipstream_kvindex::KeySet`] tracks keys). It is stored
//! in a [`Tier`]: host memory ([`MemoryTier`]) or disk ([`DiskTier`]). Each has a capacity, LRU
//! eviction, a time to live, and a checksum that every read verifies. A block that fails
//! verification is a miss.
//!
//! Callers never wait: long operations are submitted, and their completion is polled.
//!
//! - [`arena`]: memory that other processes of the host can map; [`region`]: the caller's buffers.
//! - [`tier`]: the trait, [`tier::memory`], [`tier::disk`]; [`measure`]: benchmarks of all of it.
//! - [`transport`]: the trait, and [`BlockEndpoint`], which moves blocks through shared memory, TCP and
//!   [`nixl`], and carries messages about keys; [`handshake`]: whether the blocks of two stores are
//!   compatible; [`content`]: digests of model weights.
//! - [`store`]: the tiers of one rank, its peers, and the threads between them; [`discovery`]: the
//!   records by which stores find each other.
// Casts that could change a number go through `slipstream_base::width`.
#![cfg_attr(
    not(test),
    warn(
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss
    )
)]

pub mod arena;
pub mod clock;
pub mod content;
mod copy;
pub mod discovery;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzz;
pub mod handshake;
mod ledger;
pub mod measure;
pub mod nixl;
pub mod region;
pub mod store;
pub mod tier;
pub mod transport;
mod wire;

pub use arena::Arena;
pub use handshake::{Mismatch, Profile};
pub use nixl::{NixlError, NixlOptions};
pub use region::{Region, RegionError};
pub use store::{PeerDiscovery, PeerOptions, Store, StoreError, StoreOptions};
pub use tier::disk::{DiskOptions, DiskTier};
pub use tier::memory::{MemoryOptions, MemoryTier, Pinned};
pub use tier::{Medium, Tier, TierChange, TierError, TierStats};
pub use transport::{
    Address, BlockEndpoint, BlockTransport, Completion, EndpointOptions, Fetch, FetchError, Nixl,
    PeerId, SubmitError, TransferId, TransportError, TransportEvent, TransportStats,
};

/// The checksum of a block: XXH3, 64 bits, without a seed. It detects accidental damage, not
/// forgery.
pub fn checksum(bytes: &[u8]) -> u64 {
    xxhash_rust::xxh3::xxh3_64(bytes)
}
