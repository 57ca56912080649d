//! The requests of a workload: one stream from a file and a seed, the same for a live load
//! generator and for a simulation.
//!
//! ```text
//!   workload file ─► Generator ─┐
//!                               ├─► Source ─► Schedule ─► driver (bench: HTTP, twin: virtual time)
//!   trace file ───► Trace ──────┘                ▲             │
//!                                                └── on_done ──┘   next turn, next in closed loop
//! ```
//!
//! - [`draw`]: named streams of random numbers. A draw is a pure function of seed, name and index,
//!   so that a new key in the file, or another thread, does not shift the others.
//! - [`prompt`]: a prompt as segments of named texts, from which words, tokens and block hashes
//!   follow; so bench and twin agree on shared prefixes without passing text around.
//! - [`generate`] and [`trace`]: sources of requests, one in memory at a time.
//! - [`own`]: our format of traces, which [`write`](mod@write) writes; [`mooncake`] writes another one.
//! - [`stats`]: statistics of a stream of requests.
//! - [`schedule`]: due times, follow-up turns and closed loops. No clock: the driver passes `now`.
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

pub mod draw;
mod empirical;
mod error;
mod form;
pub mod generate;
mod hasher;
mod later;
pub mod mooncake;
pub mod own;
pub mod plausible;
pub mod prompt;
mod request;
pub mod schedule;
pub mod source;
pub mod stats;
pub mod trace;
mod turn;
pub mod write;

pub use error::SourceError;
pub use hasher::PromptHasher;
pub use prompt::{Content, PromptSource, Role, Segment, Vocabulary};
pub use request::{Images, Request};
pub use schedule::Schedule;
pub use source::Source;
