//! The parts of a discrete-event simulation that do not depend on its subject: an event queue and the
//! barrier that lets shards of one simulation run in parallel.
//!
//! - [`Wheel`]: a queue of small `Copy` events in time buckets. A binary heap costs several hundred
//!   ns per event once its events leave the cache. Here an event is appended to a bucket, and a
//!   bucket is counting-sorted once, when it becomes current. Buckets share one pool of small chunks.
//! - [`WindowBarrier`]: one synchronization per window of lookahead, which parks after a short spin.
//!
//! Order is part of the contract: events run by time, and equal times run in the order in which the
//! wheel received them while both were in the same level. The order is a function of the calls
//! made, never of threads or addresses, so that a run repeats exactly.
// This crate has no dependencies, and so its own casts.
#![cfg_attr(
    not(test),
    warn(
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss
    )
)]
#![forbid(unsafe_code)]

mod barrier;
mod chunks;
mod wheel;

pub use barrier::{Spin, WindowBarrier};
pub use wheel::{Timed, Wheel};
