//! The subcommands, a module each: `Args` and `run`.

pub(crate) mod bench;
pub(crate) mod sched;
pub(crate) mod serve;
