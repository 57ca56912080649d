//! The CPU scheduler's policy and a simulator of hosts that run it.
//!
//! - [`policy`]: the placement policy, one C header (`include/slip_policy.h`) that is compiled
//!   unchanged into this crate and into the BPF program of `slipstream-scx`.
//! - [`machine`]: CPUs in LLCs, and the costs of switching, waking and migrating.
//! - [`workload`]: tasks as scripts of run, send, receive, sleep and lock; ready-made workloads.
//! - [`rtapp`]: workloads read from rt-app's JSON.
//! - [`sched`]: the schedulers compared: ours, which is the BPF program compiled for this crate and
//!   called as the kernel calls it, and a model of EEVDF.
//! - [`sim`]: the event loop. Deterministic: same seed, same result. [`result`] is what a run measured, [`rng`] its
//!   random numbers.
//! - [`jobs`]: a host whose threads work on jobs of a larger simulation, which drives its time.
//! - [`config`]: the TOML file of `slipstream sched sim`, and the runs that it describes.
//! - [`perfetto`]: a trace of the tasks on each CPU, for <https://ui.perfetto.dev>.
//!
//! Nothing here reads a clock or does I/O. It complements scx's own tools: it runs the source
//! text that the kernel runs, on hosts larger than any virtual machine, and with an adjustable cost of
//! waking an idle CPU.
// Casts that could change a number go through `slipstream_base::width`.
#![cfg_attr(
    not(test),
    warn(
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss
    )
)]

pub mod config;
pub mod jobs;
pub mod machine;
pub mod perfetto;
pub mod policy;
pub mod result;
pub mod rng;
pub mod rtapp;
pub mod sched;
pub mod sim;
pub mod workload;
