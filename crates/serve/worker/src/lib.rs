//! Engines in wall-clock time.
//!
//! A [`Backend`] determines the result of a step and its end. This crate delivers it at that time, on a
//! few threads, and passes requests in and tokens out. The modelled
//! [`Engine`](slipstream_engine::Engine) is a backend.
//!
//! ```text
//!   ThreadPort ──requests──► thread ── start, kill ──► Backend      one thread, many ranks;
//!       ▲                      │  ◄── begin/finish ──   │           a heap of deadlines
//!       └──── one frame per ───┤                        ▼
//!             shard and round  └──────────────► EventSink: FPM of every pass, KV deltas
//! ```
//!
//! * [`Backend`]: the interface that an engine thread drives.
//! * [`WorkerSet`]: starts threads, reports when workers are ready, stops them.
//! * [`timeline`]: modelled time on the wall clock.
//! * [`callhome`]: a worker process's connections to frontends.
//! * [`stats`], [`metrics`]: the counters of the ranks, and their exposition.
//!
//! Data-parallel ranks of a worker run independently: no barrier joins their passes. The same holds
//! for a dense model in vLLM; ranks of a mixture of experts wait for each other, which is not
//! modelled here.
//!
//! It does not know HTTP, clients, or the routing of requests.
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

mod backend;
pub mod callhome;
mod calm;
mod fan_out;
mod held;
mod inputs;
mod live;
pub mod metrics;
mod modelled;
mod rank;
mod set;
#[cfg(feature = "sim")]
pub mod sim;
pub mod stats;
mod thread;
pub mod timeline;

pub use backend::{Backend, Dead, Refused};
pub use set::{JoinError, LiveTiming, Resyncs, StartError, WorkerSet, WorkerSpec, engine_threads};
pub use stats::{RankStats, ThreadStats};
