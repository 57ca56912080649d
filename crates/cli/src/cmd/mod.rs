//! The subcommands, a module each: `Args` and `run`.

mod cluster_args;
mod fleet_metrics;

pub(crate) mod serve;
