//! The simulator against answers known by other means, and the policy on whole hosts.

mod config;
mod deferred;
mod host;
mod queues;
mod promises;
mod sanitized;
