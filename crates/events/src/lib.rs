//! The event plane's outside: forward-pass metrics (FPM) and KV events on the wire.
//!
//! ```text
//!   engine thread ── EventPublisher ─► bounded queues ─┐                     ┌─► inside the process
//!     encodes into a buffer of its own     (one a      ├─► event thread ─ Bus ┼─► ZeroMQ: PUB, replay
//!   engine thread ── EventPublisher ─►  kind, thread) ─┘    one a process     └─► NATS
//! ```
//!
//! * [`fpm`], [`kv`]: the messages, in an owned and in a borrowed form with the same bytes, and
//!   their readers, which name the byte that they stumble on.
//! * [`EventPlane`], [`EventPublisher`]: from engine threads to the bus that the cluster file names.
//! * [`bus`]: what a bus is, and the one inside the process; [`zmq`], [`nats`]: the others, and
//!   subscribers to them; [`zmtp`]: ZeroMQ's wire.
//! * [`metrics`]: what was sent and dropped.
//!
//! It is a crate beside `planes` so that neither NATS's client nor the codecs come with the frames
//! and rings that shards and engine threads share. It knows no engine and no router.
#![forbid(unsafe_code)]

mod batch;
pub mod bus;
pub mod fpm;
pub mod kv;
pub mod metrics;
mod msgpack;
pub mod nats;
mod publisher;
pub mod zmq;
pub mod zmtp;

pub use batch::{Batch, Kind, QueueCounters, RankTopics, Record, Topic};
pub use bus::{BusCounters, Event, Hub, HubSubscriber};
pub use fpm::FpmMessage;
pub use kv::{BlockRemoved, BlockStored, KvEvent, KvEventBatch};
pub use msgpack::DecodeError;
pub use publisher::{EventPlane, EventPublisher, PlaneError, PlaneOptions};
