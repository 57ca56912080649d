//! Publishes forward-pass metrics (FPM) and KV events outside of the process.
//!
//! ```text
//!   engine thread ── EventPublisher ─► bounded queues ─┐                     ┌─► inside the process
//!     encodes into a buffer of its own     (one per    ├─► event thread ─ Bus ┼─► ZeroMQ: PUB, replay
//!   engine thread ── EventPublisher ─►  kind, thread) ─┘    one per process   └─► NATS
//! ```
//!
//! * [`fpm`], [`kv`]: the messages, in an owned and in a borrowed form with the same bytes, and
//!   their readers, whose errors name the byte offset.
//! * [`EventPlane`], [`EventPublisher`]: from engine threads to the configured bus.
//! * [`bus`]: the bus trait, and the bus inside the process; [`zmq`], [`nats`]: the others, and
//!   subscribers to them; [`zmtp`]: ZeroMQ's wire protocol.
//! * [`received`]: events of a subscriber as text and JSON.
//! * [`metrics`]: counters of sent and dropped events.
//!
//! It is separate from `planes`, so that frames and rings, which shards and engine threads share,
//! do not depend on NATS's client and the codecs. It depends on no engine and no router.
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

mod batch;
pub mod bus;
pub mod fpm;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzz;
pub mod kv;
pub mod metrics;
mod msgpack;
#[cfg(feature = "nats")]
pub mod nats;
mod publisher;
pub mod received;
pub mod zmq;
pub mod zmtp;

pub use batch::{Batch, EventKind, EventPosition, QueueCounters, RankTopics, Topic};
pub use bus::{BusCounters, Event, Hub, HubSubscriber, NatsError};
pub use fpm::FpmMessage;
pub use kv::{BlockRemoved, BlockStored, KvEvent, KvEventBatch};
pub use msgpack::DecodeError;
pub use publisher::{EventPlane, EventPublisher, PlaneError, PlaneOptions};
