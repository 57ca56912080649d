//! A router in front of real engines as a library: the server, and the control plane that keeps its fleet up to date.
//!
//! ```text
//!   cluster file (reload) ─┐                                 ┌─► OpenAI server: slipstream_frontend
//!   DNS, EndpointSlices ───┼─► engines of the fleet ─────────┤
//!   admin API ─────────────┘     ▲            │              └─► metrics
//!   KV events (engine_kv) ───────┘            └─► requests ──► twin (shadow), numbers of workers (autoscale)
//! ```
//!
//! [`RouterServer::start`] runs all of it from a [`Cluster`](slipstream_config::cluster::Cluster) whose pools list
//! engines; `examples/two_engines.rs` is a program that embeds it. The modules are its parts:
//!
//! - [`membership`]: engines that DNS or Kubernetes list ([`endpoint_slices`]); [`reload`]: engines of the cluster file.
//! - [`engine_kv`]: the engines' KV events, followed into the router's index.
//! - [`autoscale`]: the number of workers that each pool should have, as metrics, a file and a webhook.
//! - [`describe`]: a cluster file from what engines report; [`cached`]: the cache of one engine.
//! - [`shadow`]: a twin that predicts the times of the fleet's requests.
//! - [`live`]: settings that a live cluster cannot follow.
//! - [`server`], [`socket`], [`access_log`], [`spans`], [`metrics`], [`metrics_page`], [`kv_sink`]: parts that servers of modelled engines have as well.
//!
//! Each part that runs is a value with a thread of its own, which ends when the value is dropped; those that stay until
//! the process ends are the access log, the page of metrics, and what listens to SIGHUP (`RouterOptions::file`, the access
//! log), so one router of a process should have them. Nothing here is on the path of a request. Errors at the start are [`anyhow::Error`]s that name the key of the cluster file and the remedy;
//! later faults are logged by `tracing`, counted, and change nothing: the fleet stays as it was. Durations in names end
//! in their unit; times of requests are `CLOCK_MONOTONIC`, ns.
//!
//! The crate does not know flags or terminals, how a request is forwarded (`slipstream_frontend::upstream`), how a worker
//! is chosen (`slipstream_router`), modelled engines, or the twin: its owner passes one ([`shadow::Twin`]).
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

pub mod access_log;
pub mod autoscale;
mod cache_views;
pub mod cached;
mod client;
pub mod describe;
pub mod endpoint_slices;
pub mod engine_kv;
mod keys;
pub mod kv_sink;
pub mod live;
pub mod membership;
pub mod metrics;
pub mod metrics_page;
pub mod reload;
pub mod router;
pub mod server;
pub mod shadow;
pub mod socket;
pub mod spans;

pub use router::{RouterOptions, RouterServer};
pub use slipstream_frontend::Bound;
