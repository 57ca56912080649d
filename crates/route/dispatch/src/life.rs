//! The states of a request.

use slipstream_base::{RankId, WorkerId};
use slipstream_router::ActiveSequence;

use crate::{Attempt, Role};

/// An open request.
pub(crate) struct Life {
    pub(crate) state: State,
    pub(crate) attempt: Attempt,
    /// Workers that disappeared or gave it up before its first token; after it, the last one that did.
    pub(crate) failed_on: Vec<WorkerId>,
    /// Times that it was placed anew.
    pub(crate) retries: u8,
    /// Of these, times after its first token.
    pub(crate) resumed: u8,
    /// A token of it has arrived, from this worker or an earlier one.
    pub(crate) begun: bool,
    /// Another worker may continue its answer.
    pub(crate) resumes: bool,
    /// Input was sent that cannot be sent again.
    pub(crate) pinned: bool,
    /// The client named its worker, or not every worker serves its model.
    pub(crate) named: bool,
    /// One worker computes and answers it from now on: its prompt was to come from another one, and did not.
    pub(crate) whole: bool,
}

/// State of a request.
pub(crate) enum State {
    /// No request has this number.
    Free,
    /// Its workers are being chosen.
    Routing,
    /// In the queue: every worker is busy.
    Waiting,
    /// One worker computes its prompt; no token has come.
    Placed(Placed),
    /// Two workers share it: the keys and values of its prompt have not reached the decode worker.
    Apart(Box<Apart>),
    /// Its first token of this attempt has come.
    Streaming(Placed),
}

/// A request at the worker that generates its answer.
pub(crate) struct Placed {
    pub(crate) rank: RankId,
    /// `Both`, or `Decode` if another worker computed its prompt.
    pub(crate) role: Role,
    pub(crate) active: ActiveSequence,
}

/// A request at two workers.
pub(crate) struct Apart {
    pub(crate) decode: RankId,
    pub(crate) decode_active: ActiveSequence,
    pub(crate) prefill: RankId,
    pub(crate) prefill_active: ActiveSequence,
    pub(crate) prompt_tokens: u32,
    /// Tokens that are cached at the decode rank, and are not sent.
    pub(crate) cached_tokens: u32,
    pub(crate) stage: Stage,
}

/// The event that a request at two workers waits for. With pull the order is `Prefilling`, `Reserving`,
/// `Transferring`; with push the first two are swapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// The prefill rank computes the prompt.
    Prefilling,
    /// The decode rank reserves blocks for it.
    Reserving,
    /// Its keys and values cross the network.
    Transferring,
}

impl Life {
    pub(crate) const FREE: Life = Life {
        state: State::Free,
        attempt: Attempt(0),
        failed_on: Vec::new(),
        retries: 0,
        resumed: 0,
        begun: false,
        resumes: false,
        pinned: false,
        named: false,
        whole: false,
    };

    /// Whether it may not go to every worker: less limited requests may find room before it.
    pub(crate) fn is_limited(&self) -> bool {
        self.named || !self.failed_on.is_empty()
    }

    /// The workers that have a part of the request.
    pub(crate) fn workers(&self) -> impl Iterator<Item = WorkerId> {
        let ranks = match &self.state {
            State::Free | State::Routing | State::Waiting => [None, None],
            State::Placed(placed) | State::Streaming(placed) => [Some(placed.rank), None],
            State::Apart(apart) => [Some(apart.decode), Some(apart.prefill)],
        };
        ranks.into_iter().flatten().map(|rank| rank.worker)
    }
}
