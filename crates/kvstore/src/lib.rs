//! Blocks of KV cache outside of an engine: where they are stored, and how they are transferred.
//!
//! A block is some bytes under a key ([`slipstream_kvindex::KeySet`] has the keys). It is stored in a
//! [`Tier`]: host memory ([`MemoryTier`]) or disk ([`DiskTier`]), each with a cap, LRU, a time to
//! live, and a checksum that every read verifies. What cannot be verified is a miss.
//!
//! Callers never wait here: what takes time is submitted, and its end is polled.
//!
//! - [`arena`]: memory that other processes of the host can map; [`region`]: the caller's buffers.
//! - [`tier`]: the trait, [`tier::memory`], [`tier::disk`]; [`measure`]: what it all costs on this host.
//! - [`transport`]: the trait, and [`Endpoint`], which moves blocks through shared memory, TCP and
//!   [`nixl`], and carries messages about keys; [`handshake`]: whether two stores' blocks mean the same;
//!   [`content`]: which weights a model has.
//! - [`store`]: the tiers of one rank, its peers, and the threads between them; [`discovery`]: what stores
//!   publish to find each other.

pub mod arena;
pub mod clock;
pub mod content;
mod copy;
pub mod discovery;
#[cfg(any(test, fuzzing))]
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
    Address, Completion, Endpoint, EndpointOptions, Event, Fetch, FetchError, Nixl, PeerId,
    SubmitError, TransferId, Transport, TransportError, TransportStats,
};

/// What verifies a block: XXH3, 64 bits, without a seed. It finds what was damaged by accident, not
/// what was forged.
pub fn checksum(bytes: &[u8]) -> u64 {
    xxhash_rust::xxh3::xxh3_64(bytes)
}

/// Takes a lock even if its last holder panicked: it guards plain data.
fn held<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}
