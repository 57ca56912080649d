//! The CPU scheduler of the host that we are on: what it is, what it could be, and how fast it wakes
//! a thread.
//!
//! - [`topology`]: SMT, last-level caches and NUMA nodes, from sysfs.
//! - [`classes`]: which threads belong together and how they are to be treated, from a TOML file.
//! - [`cgroups`]: the class of each cgroup as they come and go, and the CPU limits set on them.
//! - [`btf`]: as much of the kernel's type information as [`doctor`] needs.
//! - [`doctor`]: whether our `sched_ext` scheduler can run here, and what to do if not.
//! - [`link`]: ways for one thread to wake another; [`wake`]: how long each takes;
//!   [`load`]: wake-up latency of workers at a given load.
//!
//! Needs no clang and no privileges; runs under any scheduler. The loader of the BPF program is the
//! separate package in `loader/`, which builds `slipstream-scx`.
#![forbid(unsafe_code)]

pub mod btf;
pub mod cgroups;
pub mod classes;
pub mod doctor;
pub mod link;
pub mod load;
pub mod topology;
pub mod wake;
