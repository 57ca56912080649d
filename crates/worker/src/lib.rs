//! Engines in wall-clock time.
//!
//! A [`Backend`] says what a step gives and when it ends; this crate makes that happen at that time, on a
//! few threads, and carries requests in and tokens out. The modelled
//! [`Engine`](slipstream_engine::Engine) is a backend.
//!
//! ```text
//!   ThreadPort ──requests──► thread ── start, kill ──► Backend      one thread, many ranks;
//!       ▲                      │  ◄── begin/finish ──   │           a heap of deadlines
//!       └──── one frame a ─────┤                        ▼
//!             shard and round  └──────────────► EventSink: FPM of every pass, KV deltas
//! ```
//!
//! * [`Backend`]: what an engine thread drives.
//! * [`WorkerSet`]: starts threads, tells when workers are ready, stops them.
//! * [`timeline`]: modelled time on the wall clock.
//! * [`callhome`]: a worker process's connections to frontends.
//! * [`stats`], [`metrics`]: what the ranks are doing, and its exposition.
//!
//! Data-parallel ranks of a worker run independently: no barrier joins their passes. So do those
//! of a dense model in vLLM; those of a mixture of experts wait for each other, which is not
//! modelled here.
//!
//! It knows no HTTP and no client, and nothing of who routed a request.
#![forbid(unsafe_code)]

mod backend;
pub mod callhome;
mod held;
mod inputs;
mod live;
pub mod metrics;
mod modelled;
mod set;
pub mod stats;
mod thread;
pub mod timeline;

pub use backend::{Backend, Dead, Refused};
pub use set::{JoinError, LiveTiming, Resyncs, StartError, WorkerSet, WorkerSpec, engine_threads};
pub use stats::{RankStats, ThreadStats};
