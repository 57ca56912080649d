//! A packet-level network simulator: topologies, queues, transports and collectives.
//!
//! It differs from other simulators by its cost. A packet takes one event per FIFO port, an event
//! is 16 bytes and *is* the packet, routes and ports are computed, and pods run in parallel with
//! the same result on any number of threads. It has no notion of language models.
//!
//! ```text
//!   Scenario ──► Simulation ──► RunResult
//!   (plain        shards: Wheel + ports + endpoints
//!    values)      path table, shared
//! ```
//!
//! Modules in reading order: [`scenario`] (a run), [`topology`] and [`route`] (paths of packets),
//! `event`, `net` and `fabric` (how a packet crosses a port), [`aqm`], `transport` (senders and
//! receivers), `shard`, `layout` and [`sim`] (the loop, windows and threads), [`result`], [`open`] (a network that
//! another simulator feeds).
//!
//! One TCP flow over one link:
//!
//! ```
//! use slipstream_config::doc::Doc;
//! use slipstream_netsim::{Execution, Simulation, config};
//!
//! let file = br#"
//!     edges = [[0, 1]]
//!     hosts = [0, 1]
//!     duration = 1.0
//!     [link]
//!     host_links = false
//!     propagation_ns = 1000
//!     [switch]
//!     port_rate = 1e9
//!     [[flow]]
//!     flow_id = 1
//!     flow_type = "TCP"
//!     graph = [[0, 1]]
//!     traffic = { size = 1250, pkt_size_dist = 1250 }
//! "#;
//! let scenario = config::read(Doc::parse("pair.toml", file))?.scenario;
//! let execution = Execution::default();
//! let mut simulation = Simulation::new(scenario, execution)?;
//! simulation.run(execution, u64::MAX, &mut |_, _| ());
//! // 1,250 bytes at 1 Gb/s, and the delay.
//! assert_eq!(simulation.result().flows[0].delivered_ns, Some(11_000));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
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

mod advice;
pub mod aqm;
pub mod buffer;
pub mod collective;
pub mod config;
pub mod deadlock;
mod error;
mod event;
mod fabric;
pub mod failure;
pub mod flow;
mod layout;
pub mod link;
mod net;
pub mod open;
pub mod output;
pub mod queueing;
pub mod result;
mod retry;
pub mod route;
mod sack;
pub mod scenario;
pub mod scheduled;
pub mod series;
mod shard;
pub mod sim;
pub mod sizes;
mod step;
pub mod topology;
mod transport;
pub mod trim;

pub use error::Error;
pub use result::RunResult;
pub use scenario::Scenario;
pub use sim::{Execution, Simulation};
pub use topology::Topology;
