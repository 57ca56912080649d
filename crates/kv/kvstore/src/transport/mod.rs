//! Transfers of blocks and messages about keys between stores.
//!
//! [`BlockTransport`] is the interface for callers: submit and poll, without waiting. [`BlockEndpoint`]
//! implements it. It moves blocks through shared memory to peers on its host (`unix:` addresses),
//! through TCP to others (`tcp:`), and by NIXL if that is set up (`nixl:`).

mod conn;
pub mod endpoint;
mod pull;
mod run;
#[cfg(test)]
mod tests;

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

pub use endpoint::{BlockEndpoint, EndpointOptions, Nixl};

use crate::region::{Region, RegionError};

/// Where a store listens, and how it moves blocks there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// Blocks cross a socket.
    Tcp(SocketAddr),
    /// Blocks are read in place; for peers on one host.
    Unix(PathBuf),
    /// Messages cross a socket, and NIXL reads blocks in place.
    Nixl(SocketAddr),
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Tcp(address) => write!(f, "tcp://{address}"),
            Address::Unix(path) => write!(f, "unix://{}", path.display()),
            Address::Nixl(address) => write!(f, "nixl://{address}"),
        }
    }
}

impl std::str::FromStr for Address {
    type Err = TransportError;

    fn from_str(text: &str) -> Result<Address, TransportError> {
        let bad = || TransportError::Address { text: text.into() };
        if let Some(path) = text.strip_prefix("unix://").filter(|path| !path.is_empty()) {
            return Ok(Address::Unix(path.into()));
        }
        if let Some(nixl) = text.strip_prefix("nixl://") {
            return nixl.parse().map(Address::Nixl).map_err(|_| bad());
        }
        let tcp = text.strip_prefix("tcp://").ok_or_else(bad)?;
        tcp.parse().map(Address::Tcp).map_err(|_| bad())
    }
}

/// Identifies a connection: in progress, up, or ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PeerId {
    /// Dense; reused after the connection has ended. Also the peer's slot in a
    /// [`slipstream_kvindex::PeerIndex`].
    pub slot: u32,
    pub(crate) generation: u32,
}

/// Identifies a transfer, from its submission to its completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TransferId(pub u64);

/// A block to fetch, and its destination.
#[derive(Clone, Debug)]
pub struct Fetch<'a> {
    /// The block's key.
    pub key: &'a [u8],
    /// Offset of the first byte in the region.
    pub at: usize,
    /// Length of the block; a block of another length fails.
    pub len: usize,
}

/// Why a block did not arrive. Its bytes in the region are undefined; the caller recomputes the
/// block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FetchError {
    /// The peer does not hold it.
    Absent,
    /// The peer's block has another length.
    Length,
    /// The received bytes differ from those that the peer stored.
    Checksum,
    /// The deadline passed first.
    Deadline,
    /// The connection ended, or was never up.
    Lost,
}

impl FetchError {
    /// A label for metrics.
    pub fn name(self) -> &'static str {
        match self {
            FetchError::Absent => "absent",
            FetchError::Length => "length",
            FetchError::Checksum => "checksum",
            FetchError::Deadline => "deadline",
            FetchError::Lost => "lost",
        }
    }
}

/// The end of a transfer. Every block that is not in `failed` is at its destination, with the
/// requested length, verified.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The transfer.
    pub transfer: TransferId,
    /// Blocks of the transfer.
    pub blocks: u32,
    /// Bytes received and verified.
    pub bytes: u64,
    /// Blocks that failed, by their index in the submission, and why; in no particular order.
    pub failed: Vec<(u32, FetchError)>,
    /// From submission to end, ns.
    pub took_ns: u64,
}

/// An event of a transport. Events are polled oldest first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TransportEvent {
    /// A transfer ended.
    Done(Completion),
    /// A connection is up, made by either side: the blocks of both stores are compatible.
    Up {
        /// The peer.
        peer: PeerId,
        /// Its name.
        name: String,
    },
    /// A connection ended, or could not be made. All of its transfers have ended before.
    Down {
        /// The peer.
        peer: PeerId,
        /// The reason, for people.
        why: String,
        /// Whether a retry is useless until a setting changes.
        refused: bool,
    },
}

/// Why a submission failed. It had no effect.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// The limit of transfers, in flight or not yet polled, is reached. Poll, then retry.
    #[error("{max} transfers are in flight; poll for completions before submitting more")]
    Full {
        /// The limit.
        max: usize,
    },
    /// The limit of connections is reached.
    #[error("limit of {max} connected peers reached; raise peers_max")]
    Peers {
        /// The limit.
        max: usize,
    },
    /// The caller's buffer cannot be leased.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// The batch or a block is too large for one frame.
    #[error(
        "a batch of {blocks} blocks, the longest key of {key_bytes} bytes, is too large; split it"
    )]
    TooLarge {
        /// Blocks of the batch.
        blocks: usize,
        /// Bytes of the longest key.
        key_bytes: usize,
    },
}

/// Why a transport cannot start.
#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    /// The text is not an address.
    #[error("`{text}` is not an address; write tcp://IP:PORT, nixl://IP:PORT or unix:///PATH")]
    Address {
        /// The text.
        text: String,
    },
    /// A system call failed.
    #[error("{address}: {what} failed")]
    Listen {
        /// The address.
        address: String,
        /// The operation.
        what: &'static str,
        /// The I/O error.
        source: std::io::Error,
    },
    /// Blocks cannot be served at this address without NIXL.
    #[error("{address} needs NIXL, which is not set up; pip install 'slipstream[nixl]'")]
    NoNixl {
        /// The address.
        address: String,
    },
    /// NIXL cannot be set up.
    #[error(transparent)]
    Nixl(#[from] crate::nixl::NixlError),
    /// A thread or a poll set cannot be created.
    #[error("the transport's thread cannot be started")]
    Start(#[from] std::io::Error),
}

/// Counters of a transport.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TransportStats {
    /// Blocks fetched and verified.
    pub fetched_blocks_total: u64,
    /// Bytes of these.
    pub fetched_bytes_total: u64,
    /// Blocks that failed, in the order of [`FetchError`].
    pub failed_total: [u64; 5],
    /// Blocks served to peers.
    pub served_blocks_total: u64,
    /// Bytes of these.
    pub served_bytes_total: u64,
    /// Blocks that peers requested and this side did not hold.
    pub absent_total: u64,
    /// Connections that either side refused because blocks are not compatible.
    pub refused_total: u64,
    /// Connections ended by a malformed frame.
    pub malformed_total: u64,
    /// Messages about keys that were applied.
    pub key_messages_total: u64,
    /// Messages about keys that could not be applied, and made this side request a snapshot.
    pub key_errors_total: u64,
    /// Stale messages about keys, which were ignored.
    pub key_stale_total: u64,
    /// Connections ended because the peer read too slowly.
    pub slow_peers_total: u64,
}

/// Fetches blocks from peers. No call waits for another thread, a long-held lock, or the network.
pub trait BlockTransport: Send + Sync {
    /// Starts to connect; [`TransportEvent::Up`] or [`TransportEvent::Down`] follows.
    ///
    /// # Errors
    ///
    /// [`SubmitError::Peers`] and [`SubmitError::Full`].
    fn connect(&self, address: &Address) -> Result<PeerId, SubmitError>;

    /// Ends a connection; [`TransportEvent::Down`] follows if it was up.
    fn disconnect(&self, peer: PeerId);

    /// Starts to fetch blocks into `region`. The transfer owns the destinations of the blocks until
    /// it ends. [`TransportEvent::Done`] follows within `deadline` in every case.
    ///
    /// # Errors
    ///
    /// [`SubmitError`]; no block is fetched then.
    fn fetch(
        &self,
        peer: PeerId,
        region: &Arc<Region>,
        blocks: &[Fetch<'_>],
        deadline: Duration,
    ) -> Result<TransferId, SubmitError>;

    /// Appends up to `max` events to `out`; returns how many.
    fn poll(&self, max: usize, out: &mut Vec<TransportEvent>) -> usize;

    /// Counters.
    fn stats(&self) -> TransportStats;
}
