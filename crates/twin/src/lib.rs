//! A cluster in virtual time: what `slipstream serve` would do under a workload, without waiting.
//!
//! ```text
//!   Schedule ─► host ─► route (Router) ─► wire ─► add (Engine) ─► passes … ─► wire ─► host ─► tokens
//!      ▲                    │               ▲          │  KV deltas ─► the router's index
//!      │                    └► prefill engine ─────────┘
//!      └──────────────────────────── on_done ◄──────────────────────────────────────────────┘
//! ```
//!
//! Engines, routers and workload are those of the live cluster; this crate only says what time it is.
//! At equal times passes end first (in the order in which they began), then what was planned
//! happens, then requests arrive, then passes begin. A run is a function of cluster, workload and
//! seed: [`Outcome::digest`] is the same on every machine.
//!
//! Modules: `sim` is the queue of events; `parts` builds what the cluster file says, `node` is an
//! engine and what is on it; `hand_over`, `wire`, `host` and `faults` are what lies between and what
//! goes wrong; `lanes` runs engines that have nothing to do with each other on several threads.
//!
//! What is modelled how, and what is not, stands in `docs/twin.md`.
#![forbid(unsafe_code)]

mod faults;
mod hand_over;
mod host;
mod lanes;
mod node;
mod parts;
mod sim;
pub mod sweep;
mod wire;

pub use node::Hops;
pub use sim::{
    Failure, HandOvers, Options, Outcome, Progress, REFUSED, RequestRecord, Sink, TwinError,
    WORKER_LOST, simulate,
};
