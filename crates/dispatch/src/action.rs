//! What a driver carries out.

use slipstream_base::{RankId, SimTime, WorkerId};
use slipstream_router::RouteError;

use crate::Role;

/// Names one attempt at one request. Unlike every other attempt of the same dispatcher, so that an event
/// planned for an attempt that is over is recognized.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Attempt(pub u64);

/// A step for the driver to take. `id` is the number by which the driver submitted the request.
///
/// The last action of a request is [`Rejected`](Action::Rejected), [`Lost`](Action::Lost) or
/// [`Refused`](Action::Refused), unless the driver itself reported its end or canceled it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Send the request to `rank`, not before `at`. Drop the step if the attempt is over by then
    /// ([`Dispatcher::is_current`](crate::Dispatcher::is_current)).
    Start {
        /// Which request.
        id: u32,
        /// Which attempt.
        attempt: Attempt,
        /// What `rank` does of it.
        role: Role,
        /// Where to.
        rank: RankId,
        /// When. In the past or now: at once.
        at: SimTime,
    },
    /// Take the request off `rank`: abort it there, or free the blocks held for it.
    Kill {
        /// Which request.
        id: u32,
        /// What `rank` did of it.
        role: Role,
        /// Where.
        rank: RankId,
    },
    /// Begin to send the keys and values of `tokens` of the prompt, not before `at`. Report their arrival
    /// with [`on_transferred`](crate::Dispatcher::on_transferred).
    Transfer {
        /// Which request.
        id: u32,
        /// Which attempt.
        attempt: Attempt,
        /// The worker that computed them.
        from: WorkerId,
        /// The worker that generates the answer.
        to: WorkerId,
        /// Tokens to send: those that `to` does not have.
        tokens: u32,
        /// When.
        at: SimTime,
    },
    /// Stop the transfer of the request, if it has begun.
    CancelTransfer {
        /// Which request.
        id: u32,
    },
    /// Tell `rank` that the keys and values of the prompt have arrived.
    Receive {
        /// Which request.
        id: u32,
        /// The decode rank.
        rank: RankId,
    },
    /// Tell `rank` to free the blocks that it held for the transfer.
    Release {
        /// Which request.
        id: u32,
        /// The prefill rank.
        rank: RankId,
    },
    /// No worker takes the request, and no place in the queue is left. The request is over.
    Rejected {
        /// Which request.
        id: u32,
        /// Why; [`RouteError::retry_may_help`] says whether the client may try again.
        error: RouteError,
        /// The worker that failed it before, if one did.
        failed: Option<WorkerId>,
    },
    /// Its worker disappeared, and it cannot be retried. The request is over.
    Lost {
        /// Which request.
        id: u32,
        /// The worker.
        worker: WorkerId,
        /// Another worker that failed it before, if one did.
        failed: Option<WorkerId>,
        /// Its first token had come. If not, the client may safely send it again.
        begun: bool,
    },
    /// A worker refused it for good. The request is over.
    Refused {
        /// Which request.
        id: u32,
        /// The worker.
        worker: WorkerId,
        /// Another worker that failed it before, if one did.
        failed: Option<WorkerId>,
    },
}

impl Action {
    /// The request that it is about.
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
