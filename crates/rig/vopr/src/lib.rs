//! The live path's own code under a seeded simulator.
//!
//! A schedule is a cluster of frontends and worker processes in one thread and in virtual time, with clients
//! and faults that a seed draws. Shards, dispatchers, routers, stream tables, the wire format, links, the
//! call-home of workers, engine threads and engines are the production code. Sockets, the discovery
//! directory, the clock and the order in which threads run are simulated, so that a seed replays exactly.
//!
//! After every event an oracle checks the invariants of `oracle`; after the faults have healed everything has
//! to finish and nothing may be left.
//!
//! * `plan`: what a seed draws. * `world`: runs a plan, on the processes of `machines`. * `oracle`: the invariants.
//!   `net`: sockets. `client`: requests, and the check of their tokens. * `shrink`: the smallest plan that still fails.
//!
//! The crate is empty without the feature `sim`.
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
#![cfg(feature = "sim")]

pub mod client;
pub mod cluster;
pub mod command;
mod dial;
mod machines;
pub mod net;
mod oracle;
pub mod outcome;
pub mod plan;
#[cfg(feature = "planted")]
pub mod planted;
pub mod rng;
pub mod shrink;
mod tasks;
pub mod world;

pub use outcome::{Failure, Stats};
pub use plan::Plan;
pub use world::run;
