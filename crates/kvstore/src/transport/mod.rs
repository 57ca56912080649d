//! How blocks and keys get from one store to another.
//!
//! [`Transport`] is what a caller sees: it submits and polls, and never waits. [`Endpoint`] is the
//! one built in. It moves blocks through shared memory to peers on its host (`unix:` addresses),
//! through TCP to others (`tcp:`), and by NIXL where that is set up (`nixl:`).

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

pub use endpoint::{Endpoint, EndpointOptions, Nixl};

use crate::region::{Region, RegionError};

/// Where a store listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// Blocks cross a socket.
    Tcp(SocketAddr),
    /// Blocks are read in place; for peers on one host.
    Unix(PathBuf),
    /// Messages cross a socket, and blocks are read in place by NIXL.
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

/// A connection that stands, is being made, or was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PeerId {
    /// Dense, and given to another once the connection has ended. Also the peer's place in a
    /// [`slipstream_kvindex::PeerIndex`].
    pub slot: u32,
    pub(crate) generation: u32,
}

/// A transfer, from its submission to its completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TransferId(pub u64);

/// A block to fetch, and where to put it.
#[derive(Clone, Debug)]
pub struct Fetch<'a> {
    /// The block's key.
    pub key: &'a [u8],
    /// First byte in the region.
    pub at: usize,
    /// Bytes of the block; one that has another length is not taken.
    pub len: usize,
}

/// CloseReason a block did not come. Its bytes in the region may be anything; it has to be computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FetchError {
    /// The peer does not hold it.
    Absent,
    /// The peer's block has another length.
    Length,
    /// What came is not what the peer stored.
    Checksum,
    /// It did not come in time.
    Deadline,
    /// The connection ended, or never stood.
    Lost,
}

impl FetchError {
    /// A word for metrics.
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

/// A transfer has ended. Every block that is not among the failed ones is in its place: as many
/// bytes as were asked for, verified.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Completion {
    /// Which one.
    pub transfer: TransferId,
    /// Blocks that it was about.
    pub blocks: u32,
    /// Bytes that came and were verified.
    pub bytes: u64,
    /// Blocks that failed, by their place in the submission, and why; in no particular order.
    pub failed: Vec<(u32, FetchError)>,
    /// From submission to end, ns.
    pub took_ns: u64,
}

/// What happened, oldest first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A transfer ended.
    Done(Completion),
    /// A connection stands, made by either side: both engines' blocks mean the same.
    Up {
        /// The peer.
        peer: PeerId,
        /// Its name.
        name: String,
    },
    /// A connection ended, or was not made. All of its transfers have ended before.
    Down {
        /// The peer it was.
        peer: PeerId,
        /// The reason, for people.
        why: String,
        /// Whether a retry is useless until a setting changes.
        refused: bool,
    },
}

/// CloseReason nothing was submitted. Nothing has changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// As many transfers are under way, or wait to be polled, as may be. Poll, and try again.
    #[error("{max} transfers are under way; poll for completions before submitting more")]
    Full {
        /// How many may be.
        max: usize,
    },
    /// No more connections.
    #[error("{max} peers are connected, which is as many as there may be; raise peers_max")]
    Peers {
        /// How many may be.
        max: usize,
    },
    /// The caller's buffer.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// A batch or a block that no frame can ask for.
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

/// CloseReason a transport cannot start.
#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    /// No address.
    #[error("`{text}` is no address; write tcp://IP:PORT, nixl://IP:PORT or unix:///PATH")]
    Address {
        /// What it was.
        text: String,
    },
    /// The system refused.
    #[error("{address}: {what} failed")]
    Listen {
        /// Where.
        address: String,
        /// What was tried.
        what: &'static str,
        /// CloseReason.
        source: std::io::Error,
    },
    /// Blocks cannot be given away there without NIXL.
    #[error("{address} takes NIXL, which is not set up; pip install 'slipstream[nixl]'")]
    NoNixl {
        /// Where.
        address: String,
    },
    /// NIXL cannot be set up.
    #[error(transparent)]
    Nixl(#[from] crate::nixl::NixlError),
    /// No thread, poll set or the like.
    #[error("the transport's thread cannot start")]
    Start(#[from] std::io::Error),
}

/// What a transport has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TransportStats {
    /// Blocks fetched and verified.
    pub fetched_blocks_total: u64,
    /// Their bytes.
    pub fetched_bytes_total: u64,
    /// Blocks that failed, in the order of [`FetchError`].
    pub failed_total: [u64; 5],
    /// Blocks given to peers.
    pub served_blocks_total: u64,
    /// Their bytes.
    pub served_bytes_total: u64,
    /// Blocks that peers asked for and were not here.
    pub absent_total: u64,
    /// Connections refused, by either side, as blocks do not mean the same.
    pub refused_total: u64,
    /// Connections ended as what came was no frame.
    pub malformed_total: u64,
    /// Messages about keys that were taken.
    pub key_messages_total: u64,
    /// Those that were not, and made this side ask for a snapshot.
    pub key_errors_total: u64,
    /// Stale ones, which were ignored.
    pub key_stale_total: u64,
    /// Connections ended as the peer took too little of what waited for it.
    pub slow_peers_total: u64,
}

/// Gets blocks from peers. No call waits for another thread, a lock that is held for long, or the
/// network.
pub trait Transport: Send + Sync {
    /// Begins to connect; [`Event::Up`] or [`Event::Down`] follows.
    ///
    /// # Errors
    ///
    /// [`SubmitError::Peers`] and [`SubmitError::Full`].
    fn connect(&self, address: &Address) -> Result<PeerId, SubmitError>;

    /// Ends a connection; [`Event::Down`] follows if it stood.
    fn disconnect(&self, peer: PeerId);

    /// Begins to fetch blocks into `region`, of which the places named are the transfer's until it
    /// is done. [`Event::Done`] follows within `deadline`, whatever happens.
    ///
    /// # Errors
    ///
    /// [`SubmitError`]; none of the blocks is fetched then.
    fn fetch(
        &self,
        peer: PeerId,
        region: &Arc<Region>,
        blocks: &[Fetch<'_>],
        deadline: Duration,
    ) -> Result<TransferId, SubmitError>;

    /// Appends up to `max` events to `out`; returns how many.
    fn poll(&self, max: usize, out: &mut Vec<Event>) -> usize;

    /// Counts so far.
    fn stats(&self) -> TransportStats;
}
