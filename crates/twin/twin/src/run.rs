//! Interface of a run: options, errors, records, and the callbacks that receive them.

use slipstream_autoscale::{Decision, Observed};
use slipstream_base::{RankId, SimTime};
use slipstream_cpusched::result::SimError;
#[cfg(feature = "journal")]
use slipstream_dispatch as dispatch;
use slipstream_engine::timing::TimingError;
use slipstream_engine::{EngineError, LowerHits};
use slipstream_report::{Objectives, PassRecord};
use slipstream_router::FleetError;
use slipstream_workload::{Request, SourceError};

/// Options of a run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Objectives for goodput.
    pub slo: Objectives,
    /// End the run at this time, with requests in flight.
    pub time_max: SimTime,
    /// Jump over decode passes without other events. The result is the same without.
    pub jump: bool,
    /// Process each token, which an objective on the longest gap of a request needs. Slower.
    pub each_token: bool,
    /// Divides the duration of passes and of transfers, above 0: gives the figures of a live
    /// cluster at this `live.speedup`.
    pub speedup: f64,
    /// Requests in flight at which a run is aborted as unstable: more than accumulate at any engine
    /// that keeps up.
    pub in_flight_max: usize,
    /// The same limit for messages on the network, with `network.messages`.
    pub messages_max: usize,
    /// Threads for independent engines, at least 1: for a router that reads no load, and requests
    /// of which none waits for another. Other runs use one. The result is the same for any number.
    pub threads: u32,
    /// Events, or arrivals of independent engines, between two calls of [`Sink::on_progress`], at most and at
    /// least 1. The result is the same for any number, unless the sink ends the run.
    pub progress_events: u64,
    /// Use one queue for the events of all engines, even independent ones. The result is the same,
    /// slower.
    pub one_queue: bool,
    /// Feed a block index even if the router could query the engines. The result is the same,
    /// slower.
    pub feed_index: bool,
    /// Charge the time of the engine's API server that the timing model states. A live `serve` has a server of its
    /// own instead.
    pub api_time: bool,
    /// Client retries of a request that was refused because no worker could take it, after the
    /// refusal's retry time.
    pub retries: u32,
    /// Inputs and decisions of the dispatcher. Not for runs with independent engines, unless `one_queue`
    /// is set.
    #[cfg(feature = "journal")]
    pub journal: Option<dispatch::journal::Journal>,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            slo: Objectives::default(),
            time_max: SimTime::MAX,
            jump: true,
            each_token: false,
            speedup: 1.0,
            in_flight_max: 1 << 20,
            messages_max: 1 << 20,
            threads: 1,
            progress_events: 1 << 12,
            one_queue: false,
            feed_index: false,
            api_time: true,
            retries: 0,
            #[cfg(feature = "journal")]
            journal: None,
        }
    }
}

/// Why a run could not start, or failed. Correct the cluster or workload file.
#[derive(Debug, thiserror::Error)]
pub enum TwinError {
    /// The router cannot be built.
    #[error(transparent)]
    Fleet(#[from] FleetError),
    /// An engine cannot be built.
    #[error("pool `{pool}`: {source}")]
    Engine {
        /// The pool.
        pool: String,
        /// The cause.
        source: EngineError,
    },
    /// Step times cannot be modelled.
    #[error("pool `{pool}`: {source}")]
    Timing {
        /// The pool.
        pool: String,
        /// The cause.
        source: TimingError,
    },
    /// The workload failed.
    #[error(transparent)]
    Workload(#[from] SourceError),
    /// The network cannot be simulated packet by packet.
    #[error(
        "`network.mode` is \"packets\": {cause}; set `network.mode = \"flows\"`, or simulate a part of the cluster"
    )]
    Network {
        /// The cause.
        cause: String,
    },
    /// Background traffic cannot be sent.
    #[error("`network.background`: {cause}")]
    Background {
        /// The cause.
        cause: String,
    },
    /// The host's threads cannot be simulated.
    #[error("`host.mode` is \"threads\": {0}")]
    Host(#[from] SimError),
    /// `router.policy` is `direct`, which no simulated client can follow.
    #[error(
        "`router.policy` is \"direct\": clients name the worker of each request, and those of a \
         workload name none; set another policy, such as \"kv\""
    )]
    Direct,
    /// A pool is scaled by a function of the program, and there is none.
    #[error(
        "pool `{pool}`: `autoscale.policy` is \"custom\", a Python function that decides (`autoscale=` of \
         `slipstream.simulate`), and this run has none; take another policy, such as \"utilization\""
    )]
    NoFunction {
        /// The pool.
        pool: String,
    },
    /// A pool is scaled by its TTFT, and no request has an objective for it.
    #[error(
        "pool `{pool}`: `autoscale.policy` is \"slo\", and no request has an objective for TTFT, so workers would \
         only be removed; give one (`--slo ttft=1s`, or `slo` of a class of the workload file), or take another policy"
    )]
    NoObjective {
        /// The pool.
        pool: String,
    },
}

/// Times of a request's stages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hops {
    /// Read and checked by the frontend.
    pub parsed: SimTime,
    /// Its prompt tokenized and hashed.
    pub tokenized: SimTime,
    /// Its worker chosen.
    pub routed: SimTime,
    /// Passed to the network.
    pub dispatched: SimTime,
    /// Received by a worker: the first that computes anything for it.
    pub received: SimTime,
    /// The pass with its first token ended.
    pub first_pass_end: SimTime,
    /// That pass's frame reached the frontend.
    pub frame: SimTime,
    /// End of its prompt's computation, if another worker computed it.
    pub prefilled: Option<SimTime>,
    /// Start and end of its KV transfer, if another worker computed the prompt.
    pub kv: Option<(SimTime, SimTime)>,
}

impl Hops {
    /// All stages at `now`.
    pub(crate) fn at(now: SimTime) -> Hops {
        Hops {
            parsed: now,
            tokenized: now,
            routed: now,
            dispatched: now,
            received: now,
            first_pass_end: now,
            frame: now,
            prefilled: None,
            kv: None,
        }
    }
}

/// A request that has ended, for records.
#[derive(Clone, Copy, Debug)]
pub struct RequestRecord<'a> {
    /// The request.
    pub request: &'a Request,
    /// Rank that generated its answer, at least in part; `None` if it was refused.
    pub rank: Option<RankId>,
    /// Rank that computed its prompt, if it is another one.
    pub prefill_rank: Option<RankId>,
    /// Times of its stages; all equal if they are not modelled.
    pub hops: Hops,
    /// When it left the waiting queue for the first time.
    pub admitted: SimTime,
    /// When the pass that computed its first token began.
    pub first_pass_start: SimTime,
    /// When its first token arrived.
    pub first: SimTime,
    /// When its last token arrived, or when it failed.
    pub last: SimTime,
    /// Tokens of the prompt.
    pub input_tokens: u32,
    /// Of the prompt, found in the KV cache.
    pub cached_tokens: u32,
    /// Those of them that were not on the GPU.
    pub lower: LowerHits,
    /// Tokens of its answer; if it failed, those that had arrived.
    pub output_tokens: u32,
    /// Number of preemptions.
    pub preemptions: u32,
    /// Number of retries: by its client, or because its worker was lost.
    pub retries: u32,
    /// Why it failed, if it did.
    pub error: Option<Failure<'a>>,
}

/// Why a request has no answer, or an incomplete one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failure<'a> {
    /// [`REFUSED`], [`WORKER_LOST`] or [`FRONTEND_LOST`].
    pub kind: &'static str,
    /// The message for the client.
    pub message: &'a str,
}

/// No worker took the request.
pub const REFUSED: &str = "refused";
/// The worker that computed the request was lost, and a retry was not possible.
pub const WORKER_LOST: &str = "worker lost";
/// The frontend that had the request was lost.
pub const FRONTEND_LOST: &str = "frontend lost";

/// Progress of a run.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// Simulated time.
    pub now: SimTime,
    /// Requests that have ended.
    pub ended: u64,
    /// Requests in flight.
    pub in_flight: usize,
}

/// Receives the records of a run. Every method does nothing by default.
pub trait Sink {
    /// A request ended.
    fn on_request(&mut self, record: &RequestRecord<'_>) {
        let _ = record;
    }

    /// The first token of an answer arrived at `now`. Not called in runs with several threads.
    fn on_first(&mut self, request: &Request, now: SimTime) {
        let _ = (request, now);
    }

    /// Whether [`on_request`](Self::on_request) is needed. Read once, at the start.
    fn wants_requests(&self) -> bool {
        true
    }

    /// Whether [`on_pass`](Self::on_pass) is needed. Read once, at the start.
    fn wants_passes(&self) -> bool {
        false
    }

    /// A pass of an engine. Those of one engine arrive in order; jumped passes are reported when
    /// the first of them begins, before events elsewhere during that time.
    fn on_pass(&mut self, pass: &PassRecord<'_>) {
        let _ = pass;
    }

    /// A decision about the number of workers of `pool`, which has `[autoscale]`.
    fn on_scale(&mut self, pool: &str, decision: &Decision) {
        let _ = (pool, decision);
    }

    /// Whether [`recommend`](Self::recommend) decides about pools with policy `custom`. Read once, at the start.
    fn recommends(&self) -> bool {
        false
    }

    /// The number of workers that `pool` needs in the state `observed`; `wanted` are wanted now. The bounds and the
    /// cooldown of its `[autoscale]` apply.
    fn recommend(&mut self, pool: &str, now: SimTime, observed: &Observed, wanted: u32) -> u32 {
        let _ = (pool, now, observed);
        wanted
    }

    /// Called periodically. False ends the run; requests that have ended by then count.
    fn on_progress(&mut self, progress: Progress) -> bool {
        let _ = progress;
        true
    }
}

/// No records.
impl Sink for () {
    fn wants_requests(&self) -> bool {
        false
    }
}

pub(crate) fn failure<'a>(kind: &'static str, message: &'a str) -> Failure<'a> {
    Failure { kind, message }
}
