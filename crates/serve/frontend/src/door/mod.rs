//! The way in: sockets, keys, limits, memory, the access log and metrics. It knows no handler.

pub(crate) mod access;
pub(crate) mod account;
pub(crate) mod alarm;
pub(crate) mod body;
pub(crate) mod budget;
pub(crate) mod clock;
pub(crate) mod connection;
pub(crate) mod faults;
pub(crate) mod helpers;
pub(crate) mod http;
pub(crate) mod io;
pub(crate) mod jobs;
pub(crate) mod limits;
pub(crate) mod listen;
pub(crate) mod management;
pub(crate) mod meter;
pub(crate) mod metrics;
pub(crate) mod otlp;
pub(crate) mod outbox;
pub(crate) mod rates;
pub(crate) mod refusals;
pub(crate) mod service;
pub mod shadow;
pub(crate) mod shard;
pub(crate) mod socket;
pub(crate) mod trace_context;
