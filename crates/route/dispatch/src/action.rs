//! Actions for the driver.

use slipstream_base::{RankId, SimTime, WorkerId};
use slipstream_router::RouteError;

use crate::Role;

/// Identifies one attempt at one request. Unique within a dispatcher, so that an event
/// planned for an attempt that is over can be recognized.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Attempt(pub u64);

/// An action for the driver to carry out. `id` is the number under which the driver submitted the request.
///
/// The last action of a request is [`Rejected`](Action::Rejected), [`Lost`](Action::Lost) or
/// [`Refused`](Action::Refused), unless the driver itself reported its end or canceled it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Send the request to `rank`, not before `at`. Drop the step if the attempt is over by then
    /// ([`Dispatcher::is_current`](crate::Dispatcher::is_current)).
    Start {
        /// The request.
        id: u32,
        /// The attempt.
        attempt: Attempt,
        /// The part of the request that `rank` computes.
        role: Role,
        /// The destination.
        rank: RankId,
        /// The time. In the past or now: at once.
        at: SimTime,
    },
    /// Remove the request from `rank`: abort it there, or free the blocks held for it.
    Kill {
        /// The request.
        id: u32,
        /// The part of the request that `rank` computes.
        role: Role,
        /// The rank.
        rank: RankId,
    },
    /// Start to send the keys and values of `tokens` of the prompt, not before `at`. Report their arrival
    /// with [`on_transferred`](crate::Dispatcher::on_transferred).
    Transfer {
        /// The request.
        id: u32,
        /// The attempt.
        attempt: Attempt,
        /// The worker that computed them.
        from: WorkerId,
        /// The worker that generates the answer.
        to: WorkerId,
        /// Tokens to send: those that `to` does not have cached.
        tokens: u32,
        /// The time.
        at: SimTime,
    },
    /// Stop the transfer of the request, if it has started.
    CancelTransfer {
        /// The request.
        id: u32,
    },
    /// Notify `rank` that the keys and values of the prompt have arrived.
    Receive {
        /// The request.
        id: u32,
        /// The decode rank.
        rank: RankId,
    },
    /// Ask `rank` to free the blocks that it held for the transfer.
    Release {
        /// The request.
        id: u32,
        /// The prefill rank.
        rank: RankId,
    },
    /// No worker accepts the request, and the queue is full. The request is over.
    Rejected {
        /// The request.
        id: u32,
        /// The error; [`RouteError::retry_may_help`] returns whether the client may retry.
        error: RouteError,
        /// The worker that failed it before, if one did.
        failed: Option<WorkerId>,
    },
    /// Its worker disappeared, and it cannot be retried. The request is over.
    Lost {
        /// The request.
        id: u32,
        /// The worker.
        worker: WorkerId,
        /// Another worker that failed it before, if one did.
        failed: Option<WorkerId>,
        /// Whether its first token had arrived. If not, the client may safely retry.
        begun: bool,
    },
    /// A worker refused it permanently. The request is over.
    Refused {
        /// The request.
        id: u32,
        /// The worker.
        worker: WorkerId,
        /// Another worker that failed it before, if one did.
        failed: Option<WorkerId>,
    },
}

impl Action {
    /// The request that the action refers to.
    pub fn id(&self) -> u32 {
        match *self {
            Action::Start { id, .. }
            | Action::Kill { id, .. }
            | Action::Transfer { id, .. }
            | Action::CancelTransfer { id }
            | Action::Receive { id, .. }
            | Action::Release { id, .. }
            | Action::Rejected { id, .. }
            | Action::Lost { id, .. }
            | Action::Refused { id, .. } => id,
        }
    }
}
