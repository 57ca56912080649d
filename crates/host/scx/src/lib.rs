//! The CPU scheduler of this host: requirements of ours, and wake-up latency under the current one.
//!
//! - [`topology`]: SMT, last-level caches and NUMA nodes, from sysfs.
//! - [`classes`]: groups of threads and their scheduling parameters, from a TOML file.
//! - [`cgroups`]: the class of each cgroup as they are created and removed, and their CPU limits.
//! - [`btf`]: the part of the kernel's type information that [`doctor`] needs.
//! - [`doctor`]: whether our `sched_ext` scheduler can run here, and the remedies if not.
//! - [`link`]: ways for one thread to wake another; [`wake`]: the latency of each;
//!   [`load`]: wake-up latency of workers at a given load.
//!
//! Needs no clang and no privileges; runs under any scheduler. The loader of the BPF program is the
//! separate package in `loader/`, which builds `slipstream-scx`.
// Casts that could change a number are written as conversions that cannot.
#![cfg_attr(
    not(test),
    warn(
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss
    )
)]
#![forbid(unsafe_code)]

pub mod btf;
pub mod cgroups;
pub mod classes;
pub mod doctor;
pub mod link;
pub mod load;
pub mod topology;
pub mod wake;
