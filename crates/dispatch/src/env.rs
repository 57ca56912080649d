//! What a driver answers while the dispatcher decides.

use slipstream_base::{Prompt, SimTime, WorkerId};
use slipstream_router::{CachedBlocks, RouteRequest, ViewTurn};

use crate::Role;

/// A request, as far as dispatching depends on it.
#[derive(Clone, Debug)]
pub struct Request {
    /// The prompt, in blocks of the fleet's size.
    pub prompt: Prompt,
    /// Tokens of the answer at most.
    pub max_tokens: u32,
    /// The client's session, kept together with `router.affinity_ttl_s`.
    pub session: Option<u64>,
    /// The worker that the client named.
    pub direct: Option<WorkerId>,
    /// Its input continues after the start. It is computed and answered by one worker.
    pub streams_input: bool,
}

impl Request {
    pub(crate) fn route<'a>(&'a self, exclude: &'a [WorkerId]) -> RouteRequest<'a> {
        RouteRequest {
            prompt: &self.prompt,
            max_tokens: self.max_tokens,
            session: self.session,
            direct: self.direct,
            exclude,
        }
    }
}

/// How a message travels between two workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Via {
    /// From the one to the other.
    Direct,
    /// To the frontend, and on from there.
    Frontend,
}

/// What a driver answers while the dispatcher decides.
pub trait Env {
    /// Request `id`, which was submitted and has no token yet: it is routed again.
    fn request(&self, id: u32) -> Request;

    /// A worker with `role` (`Prefill`, else `Both`) is about to be chosen at `now`. `turn` says by
    /// which view of loads; a driver that delays KV events applies those that are due.
    fn before_route(&mut self, now: SimTime, role: Role, turn: ViewTurn) {
        let _ = (now, role, turn);
    }

    /// Where to look cached blocks up, if not in the fleet's index.
    fn caches(&self, role: Role) -> Option<&dyn CachedBlocks> {
        let _ = role;
        None
    }

    /// Time that an empty message takes, ns.
    fn latency_ns(&self, from: WorkerId, to: WorkerId, via: Via) -> u64 {
        let _ = (from, to, via);
        0
    }
}
