//! The driver's answers while the dispatcher decides.

use std::sync::Arc;

use slipstream_base::{Prompt, SimTime, WorkerId};
use slipstream_router::{CachedBlocks, RouteRequest, ViewTurn};

use crate::Role;

/// The properties of a request that dispatching depends on.
#[derive(Clone, Debug)]
pub struct Request {
    /// The prompt, in blocks of the fleet's size.
    pub prompt: Prompt,
    /// Maximum tokens of the answer.
    pub max_tokens: u32,
    /// The client's session, kept together with `router.affinity_ttl_s`.
    pub session: Option<u64>,
    /// The worker that the client named.
    pub direct: Option<WorkerId>,
    /// The workers that may take it, in rising order; `None`: all.
    pub only: Option<Arc<[WorkerId]>>,
    /// Its input continues after the start. One worker computes and answers it.
    pub streams_input: bool,
    /// One worker computes and answers it, whatever its prompt's length.
    pub whole: bool,
    /// Whether another worker may continue its answer if the one that generates it is lost.
    pub resumes: bool,
    /// Tokens of the answer that its client has, fewer than `max_tokens`. `prompt` and `max_tokens` are those
    /// of the whole request.
    pub answered: u32,
}

impl Request {
    /// The request for the rest of the answer: the tokens so far extend the prompt. `id` names them.
    pub(crate) fn rest(mut self, id: u64) -> Request {
        if self.answered > 0 {
            self.prompt = self.prompt.lengthened(self.answered, id);
            self.max_tokens = self.max_tokens.saturating_sub(self.answered).max(1);
            // The worker that the client named is gone.
            self.direct = None;
        }
        self
    }

    pub(crate) fn route<'a>(&'a self, exclude: &'a [WorkerId]) -> RouteRequest<'a> {
        RouteRequest {
            prompt: &self.prompt,
            max_tokens: self.max_tokens,
            session: self.session,
            direct: self.direct,
            only: self.only.as_deref(),
            exclude,
        }
    }
}

/// The path of a message between two workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Via {
    /// From one worker to the other.
    Direct,
    /// To the frontend, which forwards it.
    Frontend,
}

/// The driver's answers while the dispatcher decides.
pub trait Env {
    /// Request `id`, which was submitted, for another routing decision.
    fn request(&self, id: u32) -> Request;

    /// Called before a worker with `role` (`Prefill`, else `Both`) is chosen for `prompt` at `now`. `turn` selects
    /// the view of loads; a driver that delays KV events applies those that are due.
    fn before_route(&mut self, now: SimTime, role: Role, turn: ViewTurn, prompt: &Prompt) {
        let _ = (now, role, turn, prompt);
    }

    /// The index of cached blocks, if it is not the fleet's.
    fn caches(&self, role: Role) -> Option<&dyn CachedBlocks> {
        let _ = role;
        None
    }

    /// Latency of an empty message, ns.
    fn latency_ns(&self, from: WorkerId, to: WorkerId, via: Via) -> u64 {
        let _ = (from, to, via);
        0
    }
}
