//! Hidden flags that turn one mechanism off each, so that its worth can be measured in one binary
//! (docs/benchmarks.md, `make bench-stages`).

/// See the module's text.
#[derive(Clone, Copy, clap::Args)]
pub(crate) struct Switches {
    /// Wait by a timer for every pass, also for one whose end is past
    #[arg(long, hide = true)]
    pub(crate) bench_no_fast_path: bool,
    /// Make every event from owned fields in a buffer and under a subject of its own
    #[arg(long, hide = true)]
    pub(crate) bench_fresh_buffers: bool,
    /// Lock the stream tables of all shards by one mutex
    #[arg(long, hide = true)]
    pub(crate) bench_locked_table: bool,
}
