//! Loads an OpenAI endpoint with a workload, and measures what its clients see.
//!
//! Latency counts from the time a request was *due*, so a slow server cannot hide behind a load
//! generator that waits for it (coordinated omission). Memory is bounded: histograms instead of
//! lists, drag records streamed to disk. The generator uses HTTP and the OpenAI API only, and
//! depends on nothing of the server.
//!
//! - [`http`]: answers parsed as they arrive; [`answer`]: their events and usage.
//! - [`body`]: requests rendered from prompt segments.
//! - [`host`]: how busy the machine is.
//! - [`search`]: the highest load that attains objectives.
//! - [`run`](mod@run): the run itself, on one or more threads of single-threaded runtimes.
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

mod alarm;
pub mod answer;
pub mod body;
mod client;
pub mod host;
pub mod http;
pub mod run;
pub mod search;
mod target;

pub use run::{BenchError, Config, Outcome, Progress, run};
pub use target::{Endpoint, PromptForm, Target};
