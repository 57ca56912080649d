//! Newtypes for identities, so that a worker cannot be passed where a request is meant.

use std::fmt;

/// A worker: one engine deployment as the router sees it. Dense from 0 in a cluster file's order,
/// so that per-worker state is an array.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkerId(pub u32);

impl WorkerId {
    /// The worker's place in arrays of per-worker state.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for WorkerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "w{}", self.0)
    }
}

/// One data-parallel rank of a worker: an engine with its own scheduler and KV cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RankId {
    /// The worker that the rank belongs to.
    pub worker: WorkerId,
    /// Rank in the worker, from 0.
    pub dp_rank: u16,
}

impl fmt::Display for RankId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/dp{}", self.worker, self.dp_rank)
    }
}

/// A sequence in an engine; unique among those that live at one time in one engine. The driver
/// chooses it (live: the stream id; simulated: the request's number).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "r{}", self.0)
    }
}
