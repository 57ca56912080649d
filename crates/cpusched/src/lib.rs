//! The CPU scheduler's policy and a simulator of hosts that run it.
//!
//! - [`policy`]: the placement policy, one C header (`include/slip_policy.h`) that is compiled
//!   unchanged into this crate and into the BPF program of `slipstream-scx`.
//! - [`machine`]: CPUs in LLCs, and what switching, waking and moving cost.
//! - [`workload`]: tasks as scripts of run, send, receive, sleep and lock; ready-made workloads.
//! - [`rtapp`]: workloads read from rt-app's JSON.
//! - [`sched`]: the schedulers compared: ours, which is the BPF program compiled for this crate and
//!   called as the kernel calls it, and a model of EEVDF.
//! - [`sim`]: the event loop. Deterministic: same seed, same result.
//! - [`config`]: the TOML file of `slipstream sched sim`, and the runs that it asks for.
//! - [`perfetto`]: a trace of who ran where, for <https://ui.perfetto.dev>.
//!
//! Nothing here reads a clock or does I/O. Why it exists beside scx's own tools: it runs the very
//! text that the kernel runs, at sizes that no virtual machine reaches, and with the cost of waking
//! an idle CPU as a number that can be turned.

pub mod config;
pub mod machine;
pub mod perfetto;
pub mod policy;
pub mod rtapp;
pub mod sched;
pub mod sim;
pub mod workload;
