//! Hidden flags that each disable one mechanism, to measure its effect in one binary
//! (docs/live-path.md, `scripts/run.sh bench-stages`). They exist with the feature `bench` only.

use slipstream_frontend::Service;

/// See the module's text.
#[derive(Clone, Copy, clap::Args)]
pub(crate) struct Switches {
    /// Wait by a timer for every pass, also for one whose end is past
    #[cfg(feature = "bench")]
    #[arg(long, hide = true)]
    bench_no_fast_path: bool,
    /// Make every event from owned fields in a buffer and under a subject of its own
    #[cfg(feature = "bench")]
    #[arg(long, hide = true)]
    bench_fresh_buffers: bool,
    /// Lock the stream tables of all shards by one mutex
    #[cfg(feature = "bench")]
    #[arg(long, hide = true)]
    bench_locked_table: bool,
}

#[cfg(feature = "bench")]
impl Switches {
    pub(crate) fn fast_path(self) -> bool {
        !self.bench_no_fast_path
    }

    pub(crate) fn fresh_buffers(self) -> bool {
        self.bench_fresh_buffers
    }

    pub(crate) fn apply(self, service: &mut Service) {
        service.locked_table = self.bench_locked_table;
    }
}

#[cfg(not(feature = "bench"))]
#[allow(clippy::unused_self)] // as with the feature
impl Switches {
    pub(crate) fn fast_path(self) -> bool {
        true
    }

    pub(crate) fn fresh_buffers(self) -> bool {
        false
    }

    pub(crate) fn apply(self, _: &mut Service) {}
}
