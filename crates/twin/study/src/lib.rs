//! Questions to the twin, as the `slipstream` command and `import slipstream` ask them.
//!
//! The command parses flags and prints; Python's classes hold the same values. Both build a question of this
//! crate, so they give the same answers with the same errors:
//!
//! - [`source`]: where a cluster, a workload and prices come from: a file, or its text, with overrides.
//! - [`run`]: one simulation and its report; [`requests`]: its requests as columns;
//!   [`outputs`]: its files.
//! - [`sweep`]: every combination of values; its configurations can run anywhere, in slices.
//! - [`plan`]: the cheapest cluster; its trials can run anywhere, in batches. [`templates`]: files that deploy it.
//! - [`predict`]: a table of deployments.
//! - [`starter`]: a cluster file and a workload file to begin with.
//! - [`columns`]: results in the layout of Arrow.
//!
//! Questions are plain data (JSON), so that another process can answer a part of one. Results do not depend
//! on the number of threads and processes. This crate reads the files that a question names, and starts
//! threads for its runs. It does not know flags, terminals, Python, or how parts of a question travel.
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

pub mod columns;
pub mod control;
pub mod memory;
mod meter;
pub mod outputs;
pub mod plan;
pub mod predict;
pub mod requests;
pub mod run;
pub mod source;
pub mod starter;
pub mod sweep;
pub mod templates;

pub use control::Control;

pub use slipstream_os::files;

/// Cores available to this process: affinity and the cgroup's quota count.
pub fn cores() -> u32 {
    std::thread::available_parallelism().map_or(1, |n| slipstream_base::width::to_u32(n.get()))
}

/// An error with its causes, without repetition: many an error's text already ends with its cause's.
pub fn chain(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain() {
        let cause = cause.to_string();
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text.push_str(": ");
            text.push_str(&cause);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_is_said_once() {
        let cause = || anyhow::anyhow!("no such file");
        let error = cause()
            .context("reading x: no such file")
            .context("starting");
        assert_eq!(chain(&error), "starting: reading x: no such file");
        assert_eq!(
            chain(&cause().context("reading x")),
            "reading x: no such file"
        );
    }
}
