//! Reports of a running inference engine: facts, load, and the contents of its KV cache.
//!
//! * [`ask`]: which engine answers at a URL, the models it serves, its block size and KV blocks:
//!   [`EngineFacts`].
//! * [`load`]: running and waiting requests and KV cache use, from `/metrics`: [`EngineLoad`].
//! * [`KvFollower`]: subscribes to an engine's KV events over ZeroMQ and yields
//!   [`KvDelta`](slipstream_base::KvDelta)s with our own block hashes, for a router's index.
//!
//! Each of them has a part without I/O ([`facts::learn`], [`load::read`], [`KvMirror`]) and a part
//! that owns sockets. Every body, wait and map is bounded. This crate knows no router, no frontend
//! and no tokenizer.
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

mod ask;
pub mod facts;
mod follow;
mod http;
pub mod load;
mod mirror;
pub mod prometheus;
mod readability;

pub use ask::{AskError, ask, ask_client};
pub use facts::{Asked, EngineFacts, KvEventSource, Outcome, Parallel, ServedModel};
pub use follow::{KvCounters, KvFollower, ViewState};
pub use http::{Answer, BODY_BYTES_MAX, Client, FetchError, UrlError};
pub use load::{EngineLoad, LoadError};
pub use mirror::{KvMirror, MirrorCounts, MirrorOptions, media_parent};
pub use readability::Reading;
