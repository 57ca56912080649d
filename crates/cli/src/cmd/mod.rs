//! The subcommands, one module each: `Args` and `run`.

mod axis_args;
mod bench_sweep;
mod cached;
mod client_args;
mod cluster_args;
mod emission;
mod on;
mod plane_args;
mod price_args;
mod progress;
mod shadow;
mod watch;
mod workload_args;

pub(crate) mod bench;
pub(crate) mod calibrate;
pub(crate) mod demo;
pub(crate) mod describe;
pub(crate) mod doctor;
pub(crate) mod drag;
pub(crate) mod events;
pub(crate) mod frontend;
pub(crate) mod init;
pub(crate) mod net;
pub(crate) mod plan;
pub(crate) mod predict;
pub(crate) mod presets;
pub(crate) mod sched;
pub(crate) mod serve;
pub(crate) mod shell;
pub(crate) mod simulate;
pub(crate) mod sweep;
pub(crate) mod tokenizer;
pub(crate) mod top;
pub(crate) mod trace;
pub(crate) mod worker;

pub(crate) use slipstream_os::files;
pub(crate) use slipstream_study::{cores, memory};
