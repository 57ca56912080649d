//! The way in: sockets, keys, limits, memory, the access log and metrics. It knows no handler.

pub(crate) mod access;
pub(crate) mod account;
pub(crate) mod budget;
pub(crate) mod connection;
pub mod exposition;
pub mod families;
pub(crate) mod faults;
pub(crate) mod helpers;
pub(crate) mod http;
pub(crate) mod io;
pub(crate) mod limits;
pub(crate) mod management;
pub(crate) mod meter;
pub(crate) mod metrics;
pub(crate) mod otlp;
pub(crate) mod outbox;
pub(crate) mod service;
pub mod shadow;
pub(crate) mod trace_context;
