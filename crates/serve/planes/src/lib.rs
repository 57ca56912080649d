//! How requests, tokens and events pass between frontend shards and engine threads.
//!
//! ```text
//!   shard 0 ──ToWorker──►┐                    ┌─► engine thread 0 ─┬─► rank, rank, …
//!   shard 1 ──ToWorker──►┴─ one ring a pair ──┴─► engine thread 1 ─┴─► rank, …
//!      ▲                                              │
//!      └────────────── PassFrame, one ring a pair ◄───┘        events ──► EventSink
//! ```
//!
//! * [`stream`]: the open streams. A slab per shard; a [`StreamAddr`] finds an entry with two
//!   array accesses, and a stale one finds nothing.
//! * [`frame`]: the messages. [`ToWorker`] one way, [`PassFrame`] (the output of one pass, or a
//!   few, for one shard) the other.
//! * [`ring`]: transport inside one process: bounded single-producer rings, recycled frames.
//! * [`bell`]: wake-ups: one costs a system call only if the other side sleeps.
//! * [`events`]: forward-pass metrics and KV deltas for their sinks.
//!
//! The frames are words without pointers, so that the same ones can cross a socket. Nothing here
//! depends on OpenAI, on scheduling or on a runtime: a shard may run on any executor.
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

pub mod bell;
pub mod clock;
pub mod discovery;
pub mod events;
pub mod frame;
pub mod host;
#[cfg(not(loom))]
pub mod link;
pub mod ring;
pub mod stream;
mod sync;
#[cfg(not(loom))]
pub mod tls;
pub mod tombstone;
pub mod wire;

pub use events::EventSink;
pub use frame::{
    End, Entry, FirstPass, Input, PassFrame, Prologue, RefusalReason, Reserved, StartRequest,
    ToWorker, Usage,
};
pub use ring::{Flushed, Plane, PlaneLimits, Polled, SendError, ShardPort, ThreadPort};
pub use stream::{Registration, StreamAddr, StreamId, StreamTable};
