//! A cluster in virtual time: what `slipstream serve` would do under a workload, without waiting.
//!
//! ```text
//!   Schedule ─► route (Router) ─► add (Engine) ─► passes … ─► first token, last token
//!      ▲                             │  KV deltas ─► the router's index
//!      └──────────── on_done ◄───────┘
//! ```
//!
//! Engines, router and workload are those of the live cluster; this crate only says what time it is.
//! One event queue holds the ends of passes; at equal times passes end first (in the order in which
//! they began), then requests arrive, then passes begin. A run is a function of cluster, workload and
//! seed: [`Outcome::digest`] is the same on every machine.
//!
//! What is not modelled yet stands in `docs/twin.md`.
#![forbid(unsafe_code)]

mod lanes;
mod node;
mod sim;
pub mod sweep;

pub use sim::{Options, Outcome, Progress, RequestRecord, Sink, TwinError, simulate};
