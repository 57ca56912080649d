//! Planned events of a simulated run.

use slipstream_dispatch::{Attempt, Role};

/// Planned events, except ends of passes and arrivals. Requests are identified by slot and ticket:
/// those that have ended are not found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Event {
    /// A request has been read, or is retried: its worker is chosen.
    Route { slot: u32, ticket: u64 },
    /// A request is sent to a node.
    Send { step: Step },
    /// A request reaches a node.
    Deliver { step: Step },
    /// The KV transfer of `tokens` begins.
    Fetch {
        slot: u32,
        attempt: Attempt,
        tokens: u32,
    },
    /// It has ended.
    Received { slot: u32, attempt: Attempt },
    /// A worker sends blocks to another one, by the load's slot.
    PeerSend { fetch: u32 },
    /// They have come.
    PeerReceived { fetch: u32 },
    /// The clients have the tokens of a pass.
    Output { frame: u32 },
    /// The thread of an engine has scheduled its next pass.
    Scheduled { node: u32 },
    /// A fault of the cluster file begins.
    Begin { event: u32 },
    /// It ends.
    End { event: u32 },
    /// A worker has started again, unless it was lost again before.
    Ready { worker: u32, start: u32 },
    /// A worker that lost a GPU ends, unless it started again since.
    Detect { event: u32, start: u32 },
    /// A worker that is to be upgraded had its time to drain.
    Drained { event: u32, worker: u32, start: u32 },
    /// The connections that a partition divides are closed.
    Sever { event: u32 },
    /// The router asks for a snapshot of a cache.
    Resync { node: u32, life: u32 },
    /// The number of workers of a pool is decided; by its index among the pools that are scaled.
    Scale { pool: u32 },
    /// A model that woke up on shared GPUs is awake.
    Swapped { group: u32 },
    /// A turn may have ended.
    Turn { group: u32 },
    /// A worker that was added has started, unless it was stopped before.
    Scaled { worker: u32, start: u32 },
}

/// An attempt of a request, in transit to the node with `role`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Step {
    pub(crate) slot: u32,
    pub(crate) attempt: Attempt,
    pub(crate) role: Role,
    pub(crate) node: u32,
}
