//! The subcommands, a module each: `Args` and `run`.

mod cluster_args;
mod fleet_metrics;

pub(crate) mod bench;
pub(crate) mod net;
pub(crate) mod presets;
pub(crate) mod sched;
pub(crate) mod serve;
pub(crate) mod tokenizer;
