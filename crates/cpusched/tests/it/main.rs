//! The simulator against answers known by other means, and the policy on whole hosts.

mod config;
mod deferred;
mod host;
mod promises;
mod queues;
mod sanitized;
