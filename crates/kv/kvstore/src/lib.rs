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
//! - [`tier`]: the trait, [`tier::memory`], [`tier::disk`].
//! - [`transport`]: the trait, and [`BlockEndpoint`], which moves blocks through shared memory, TCP and
//!   [`nixl`], and carries messages about keys; [`handshake`]: whether the blocks of two stores are
//!   compatible; [`content`]: digests of model weights.
//! - [`store`]: the tiers of one rank, its peers, and the threads between them; [`discovery`]: the
//!   records by which stores find each other.
//!
//! A block on its way into a store and back:
//!
//! ```
//! use std::time::Duration;
//!
//! use slipstream_kvstore::store::LoadRequest;
//! use slipstream_kvstore::{MemoryOptions, MemoryTier, Region, Store, StoreOptions};
//!
//! let memory = MemoryTier::new(MemoryOptions {
//!     bytes: 1 << 20,
//!     block_bytes: 4096,
//!     ttl_ns: None,
//! })?;
//! let store = Store::start(StoreOptions::new(memory))?;
//! let key: Box<[u8]> = [1; 32].into();
//! assert_eq!(store.put(vec![key.clone()], &[42; 4096])?, 1);
//!
//! store.load(LoadRequest {
//!     job: 1,
//!     keys: vec![key],
//!     sources: vec![String::new()], // this store
//!     into: Region::new(4096),
//!     deadline: Duration::from_secs(10),
//! })?;
//! let ended = store.wait(Duration::from_secs(10)).remove(0);
//! assert!(ended.failed.is_empty(), "{}", ended.reason);
//! let mut block = [0; 4096];
//! ended.into.read(0, &mut block)?;
//! assert_eq!(block, [42; 4096]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
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
pub use tier::{Medium, Setting, Settings, Tier, TierChange, TierError, TierStats, open_lower};
pub use transport::{
    Address, BlockEndpoint, BlockTransport, Completion, EndpointOptions, Fetch, FetchError, Nixl,
    PeerId, SubmitError, TransferId, TransportError, TransportEvent, TransportStats,
};

/// The checksum of a block: XXH3, 64 bits, without a seed. It detects accidental damage, not
/// forgery.
pub fn checksum(bytes: &[u8]) -> u64 {
    xxhash_rust::xxh3::xxh3_64(bytes)
}
