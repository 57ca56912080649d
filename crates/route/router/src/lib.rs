//! Chooses the worker of each request, and accounts for the load of each worker.
//!
//! ```text
//!   frontend shard ── Router::route(now, request) ──► Routed { target, hit_blocks, active }
//!                          │ policy, rng                                │ on_first_token, drop
//!                          ▼                                            ▼
//!                        Fleet: load line of each target, readiness, block index, sessions
//!                          ▲
//!   engine thread ── Fleet::on_kv(delta)
//! ```
//!
//! One [`Fleet`] is shared by all shards; each shard has a [`Router`] of its own. Neither does I/O
//! or reads a clock, so the simulator runs the same objects: used by one thread, the same calls
//! and seed give the same choices. Costs and knobs: `docs/routing.md`.
//!
//! Modules: [`fleet`] is the shared state ([`Fleets`]: one for prompts, one for answers),
//! [`router`] a decision from request to accounting, [`policy`] the routing policies, [`active`]
//! the load of live sequences; `order` spares a decision to look at every load.
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
#![cfg_attr(test, allow(clippy::disallowed_methods))] // its tests route

pub mod active;
pub mod fleet;
mod fleets;
mod order;
pub mod policy;
pub mod router;
mod session;
mod view;
mod witness;

pub use active::ActiveSequence;
pub use fleet::{CachedBlocks, Counters, Fleet, FleetError, Hits, Load, TargetConfig};
pub use fleets::Fleets;
pub use order::LoadKey;
pub use policy::{Candidates, Rng, RoutePolicy, WorkerView};
pub use router::{Chosen, RouteError, RouteRequest, Routed, Router, Score};
pub use view::ViewTurn;
pub use witness::Testimony;
