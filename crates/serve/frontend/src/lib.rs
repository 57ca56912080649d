//! OpenAI over HTTP, in front of workers that speak frames.
//!
//! ```text
//!              ┌ acceptor ─ one listener, each socket to the shard with the fewest
//!   client ──► shard (a thread): hyper ─ openai ─ text ─ router ─► request ring ─► engine thread
//!          ◄── shard: SSE pieces ◄─ stream table ◄─ frame ring ◄────────────────────┘
//! ```
//!
//! Its layers are folders; each names those above it in this list, and none below (`tests/it/layers.rs`):
//!
//! * `json`: JSON by hand. `wire`: HTTP/1.1 without I/O.
//! * [`text`]: tokenizers, chat templates, detokenization, stop strings.
//! * [`openai`]: OpenAI's, Anthropic's and vLLM's APIs, from bytes to checked requests and back. Neither knows sockets.
//! * `door`: what any request passes, whatever answers it. `shard`: what a thread has. `http`: reads requests within
//!   the limits; `body`: any answer; `jobs`, `helpers`: long work on bodies. `service`, `limits`, `rates`, `budget`,
//!   `connection`: the model, keys, and what clients may take. `account`, `access`, `otlp`, `metrics`: the log of
//!   requests, their spans, counts. `io`, `socket`, `listen`: sockets. `management`, `faults`: state that operators
//!   change.
//! * `tokens`: modelled workers, which answer in tokens. `workers`: a shard's side of them; takes frames apart.
//!   `generate`: from a checked request to a dispatched one; `dispatching`: drives `slipstream-dispatch`, which decides
//!   where a request runs. `reply`: an answer in the making; `replies`: all of a shard's. [`remote`], [`roster`]: worker
//!   processes that have dialed. `messages`, `responses`, `embeddings`, `tokenize`, `duplex`: the other APIs.
//! * [`upstream`]: real engines, which answer in bytes over HTTP.
//! * [`server`]: threads, the listener, connections, shutdown. `plane`: the owner of a shard's dispatcher, `Workers` or
//!   `Upstream`. `handle`: from a request to an answer; `routes`: the paths of a server of modelled workers.
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

pub use door::access::{AccessLog, AccessTarget, Flusher};
pub use door::faults::Faults;
pub use door::limits::Limits;
pub use door::management::{Management, NameError};
pub use door::metrics::FrontendTotals;
pub use door::otlp::{SpanExporter, SpanFlusher};
pub use door::service::{ApiKeys, Origins, Service};
pub use door::shadow;
pub use server::plane::{ShardPlane, WorkerTransport};
#[cfg(feature = "sim")]
pub use server::sim;
pub use server::{Bound, Frontend, StartError};
pub use tokens::kv_network::KvNetwork;
pub use tokens::remote::{PlaneSocket, RemoteLimits, RemotePlane};
pub use tokens::roster::Roster;
pub use tokens::{remote, roster};
