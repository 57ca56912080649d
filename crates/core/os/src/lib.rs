//! What a process reads from its operating system: configuration files, secrets, memory, CPU time, limits.
//!
//! - [`files`]: files that a configuration names, read at the start, or again while a process runs.
//! - [`secrets`]: files of keys.
//! - [`memory`]: memory of the host and of this process's control groups, bytes.
//! - [`doctor`]: whether a server can run on this host, as [`checks`].
//! - [`process`]: CPU time, resident memory and open files of a process.
//!
//! Functions return figures of `/proc` and of system calls, `None` if the system lacks one, or
//! [`std::io::Error`]. The crate does not know what a file contains, or which settings a figure decides.
// Casts that could change a number go through `slipstream_base::width`.
#![cfg_attr(
    not(test),
    warn(
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss
    )
)]
#![forbid(unsafe_code)]

mod cgroup_memory;
pub mod checks;
pub mod doctor;
pub mod files;
pub mod memory;
pub mod process;
pub mod secrets;
