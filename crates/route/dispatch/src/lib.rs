//! The life of a request, from acceptance to its last token.
//!
//! A [`Dispatcher`] owns every request of one frontend shard, or of one simulated frontend. It decides
//! where a request runs, whether it waits, whether another worker computes its prompt, and what
//! happens if a worker refuses it, drains or disappears. It does no I/O and reads no clock: a driver
//! passes inputs and the time, and carries out the [`Action`]s that they produce.
//!
//! ```text
//!   driver ── submit, on_first_token, on_ended, on_worker_gone, … ──► Dispatcher
//!          ◄── poll_action: Start, Kill, Transfer, Receive, Release, Rejected, Lost, … ──┘
//! ```
//!
//! There are two drivers: the frontend's shard, over sockets or rings, and the twin, over virtual time.
//! Tokens do not pass through here: only the first one of a request and its end. If a worker is lost under an
//! answer that has begun, the driver says how many tokens its client has; the prompt and these become the
//! prompt of the rest, which another worker computes.
//!
//! Modules: [`dispatcher`] has the inputs and their rules, [`action`] the actions for the driver,
//! [`env`](mod@env) the driver's answers, `life` the states of a request, and [`ahead`] decisions for
//! requests that do not depend on each other.
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

pub mod action;
pub mod ahead;
pub mod dispatcher;
pub mod env;
#[cfg(feature = "journal")]
pub mod journal;
mod life;

pub use action::{Action, Attempt};
pub use dispatcher::{Dispatcher, QueueRoom, Rules};
pub use env::{Env, Request, Via};
/// The part of a request that a worker computes.
pub use slipstream_base::Role;
