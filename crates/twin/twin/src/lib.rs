//! A cluster in virtual time: the behavior of `slipstream serve` under a workload, without waiting.
//!
//! ```text
//!   Schedule ─► host ─► route (Router) ─► wire ─► add (Engine) ─► passes … ─► wire ─► host ─► tokens
//!      ▲                    │               ▲          │  KV deltas ─► the router's index
//!      │                    └► prefill engine ─────────┘
//!      └──────────────────────────── on_done ◄──────────────────────────────────────────────┘
//! ```
//!
//! Engines, routers and workload are those of the live cluster; this crate only advances time. At
//! equal times passes end first (in the order in which they began), then planned events happen,
//! then requests arrive, then passes begin. A run is a function of cluster, workload and seed:
//! [`Outcome::digest`] is the same on every machine.
//!
//! Modules: `sim` is the run, in parts of its own, and `agenda` its queue of events; `parts` builds the cluster of the file;
//! `node` is an engine and `flight` a request on it; `planned` runs decode passes late; `env` is what a dispatcher sees.
//!
//! Each feature keeps its state, gets the parts of the run that it needs, and does not know the run: `peers`, `wire` and
//! `host` model blocks that workers fetch from each other, the network (`packets` packet by packet, `collectives` steps of
//! workers on several hosts) and the frontend's processors, `threads` those of a host whose threads a CPU scheduler runs;
//! `faults` and `scaling` are the states of `[[event]]` and `[autoscale]`; `lockstep` holds ranks together
//! that share experts; `models` keeps the routers of several models apart, `share` lets them take turns on the same GPUs; `lanes` runs independent engines on several threads; `follow` runs beside a live fleet;
//! `expected` takes the expected error from the profile of the step times.
//!
//! `docs/twin.md` describes the models and their limits.
// Casts that could change a number go through `slipstream_base::width`.
#![cfg_attr(
    not(test),
    warn(
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss
    )
)]
#![forbid(unsafe_code)]

mod agenda;
mod collectives;
mod effect;
mod env;
mod event;
mod expected;
mod faults;
mod flight;
mod follow;
mod host;
mod lanes;
mod lockstep;
mod models;
mod node;
mod outcome;
mod pace;
mod packets;
mod parts;
mod peer_index;
mod peers;
mod planned;
mod requests;
mod run;
mod scaling;
mod share;
mod sim;
pub mod sweep;
mod tally;
mod threads;
mod wire;

pub use follow::{Follower, LateRequest};
pub use outcome::{
    KvTransfers, ModelOutcome, Outcome, PoolSizeChange, PoolTime, Resumes, Scaling, ShareOutcome,
};
pub use run::{
    FRONTEND_LOST, Failure, Hops, Options, Progress, REFUSED, RequestRecord, Sink, TwinError,
    WORKER_LOST,
};
pub use sim::simulate;
pub use slipstream_autoscale::{Decision, Observed};
