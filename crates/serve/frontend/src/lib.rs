//! OpenAI over HTTP, in front of workers that speak frames.
//!
//! ```text
//!              ┌ acceptor ─ one listener, each socket to the shard with the fewest
//!   client ──► shard (a thread): hyper ─ openai ─ text ─ router ─► request ring ─► engine thread
//!          ◄── shard: SSE pieces ◄─ stream table ◄─ frame ring ◄────────────────────┘
//! ```
//!
//! * [`server`]: threads, the listener, connections, shutdown.
//! * `shard`: what one thread owns; takes frames apart.
//! * [`remote`], [`roster`]: worker processes that have dialed, per shard and over all shards.
//! * `http`: paths, limits, keys; `generate`: from a checked request to a dispatched one.
//! * `dispatching`: the shard as a driver of `slipstream-dispatch`, which decides where a request runs;
//!   `kv_network`: what the keys and values of disaggregated prompts cross.
//! * `reply`: an answer in the making, and its body; `replies`: all of a shard's.
//! * `messages`: Anthropic's API, by way of a chat.
//! * `budget`, `connection`: what clients may take, and whether they read. `helpers`: threads for long
//!   prompts. `meter`: how long a shard works on one thing.
//! * [`openai`]: JSON and SSE as bytes; [`text`]: tokenizer and templates. Neither knows sockets. `script`: an answer whose text is decided before it is generated; `vocab`: one that is
//!   made of some tokens only.
//! * `management`: what vLLM's routes for operators change: adapters, the prefix cache, sleep.
//! * `limits`: rates of API keys. `access`: the log of requests, of which each has an `account`; `otlp`: their spans; `trace_context`: their
//!   traces.
//! * [`upstream`]: real engines, which answer in bytes over HTTP.
//! * `metrics`: counts and histograms. `io`: a socket with a time limit.
//!
//! The frontend knows frames, not engines: nothing here depends on what computes the tokens.
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

mod json;
mod wire;

pub mod text;

pub mod openai;

mod door;

mod tokens;

pub mod upstream;

pub mod server;

pub use door::access::{AccessCollector, AccessLog, AccessTarget, Flusher};
pub use door::faults::Faults;
pub use door::management::{Management, NameError};
pub use door::metrics::FrontendTotals;
pub use door::otlp::{SpanCollector, SpanExporter, SpanFlusher};
pub use door::service::{ApiKeys, KeyCollector, Limits, Origins, Service};
pub use door::{exposition, families, shadow};
#[cfg(feature = "sim")]
pub use server::sim;
pub use server::{Bound, Frontend, StartError};
pub use tokens::kv_network::KvNetwork;
pub use tokens::remote::{PlaneSocket, RemoteLimits, RemotePlane};
pub use tokens::roster::Roster;
pub use tokens::shard::{ShardPlane, WorkerTransport};
pub use tokens::{remote, roster};
