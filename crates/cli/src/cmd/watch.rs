//! Optional outputs of `slipstream simulate`: flags of its files, and its progress.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use slipstream_base::width::{floor_u64, to_usize};
use slipstream_config::cluster::Cluster;
use slipstream_config::workload_file::Workload;
use slipstream_report::table::{counted, grouped, number};
use slipstream_report::{PassRecord, Series};
use slipstream_study::outputs::{OutputFiles, Outputs};
use slipstream_twin::{Progress, RequestRecord, Sink};

use crate::out;

/// Output files of a simulated run.
#[derive(clap::Args)]
pub(crate) struct WatchArgs {
    /// Write one drag record per request to this file: CSV, or Parquet if it ends in .parquet
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    drag: Option<PathBuf>,
    /// Write one record per engine pass to this file: CSV, or Parquet if it ends in .parquet
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    passes: Option<PathBuf>,
    /// Write the run over time to this file: CSV, or Parquet if it ends in .parquet
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    series: Option<PathBuf>,
    /// Write a trace for ui.perfetto.dev to this file
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    perfetto: Option<PathBuf>,
    /// Write a self-contained HTML page with plots to this file
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub(crate) html: Option<PathBuf>,
}

impl WatchArgs {
    /// The files, by flag.
    pub(crate) fn files(&self) -> [(&'static str, Option<&Path>); 5] {
        [
            ("drag", self.drag.as_deref()),
            ("passes", self.passes.as_deref()),
            ("series", self.series.as_deref()),
            ("perfetto", self.perfetto.as_deref()),
            ("html", self.html.as_deref()),
        ]
    }

    fn outputs(&self) -> OutputFiles<'_> {
        OutputFiles {
            drag: self.drag.as_deref(),
            passes: self.passes.as_deref(),
            series: self.series.as_deref(),
            perfetto: self.perfetto.as_deref(),
        }
    }
}

/// Expected length of a run, as far as its workload determines it.
#[derive(Clone, Copy, Debug, Default)]
struct Whole {
    requests: Option<u64>,
    /// Simulated time until which sessions begin, s.
    arrivals_s: Option<f64>,
}

impl Whole {
    fn of(workload: &Workload) -> Whole {
        Whole {
            requests: workload.requests,
            arrivals_s: workload.duration_s.map(|s| s / workload.time_scale),
        }
    }

    /// Progress of the run, 0 to 1; `None` if not known.
    fn share(self, progress: &Progress) -> Option<f64> {
        let of_requests = self
            .requests
            .map(|all| progress.ended as f64 / all.max(1) as f64);
        let of_time = self
            .arrivals_s
            .map(|all| progress.now.as_secs_f64() / all.max(1e-9));
        // By the limit that is reached first.
        let shares = of_requests.into_iter().chain(of_time);
        shares.reduce(f64::max).map(|share| share.clamp(0.0, 1.0))
    }
}

/// The progress line.
fn progress_line(progress: &Progress, whole: Whole, wall_s: f64) -> String {
    const WIDTH: usize = 20;
    let simulated = progress.now.as_secs_f64();
    let mut line = String::new();
    let mut left = String::new();
    if let Some(share) = whole.share(progress) {
        let full = to_usize(floor_u64(share * WIDTH as f64));
        line.push('[');
        line.extend((0..WIDTH).map(|at| if at < full { '#' } else { '-' }));
        line = line + "] " + &number(share * 100.0) + " %, ";
        // An early estimate would be meaningless.
        if share > 0.02 {
            let seconds = wall_s * (1.0 - share) / share;
            left = format!(", {} s to go", number(seconds));
        }
    }
    line + &format!(
        "{} s simulated ({}×), {} ended, {} in flight{left}",
        number(simulated),
        number(simulated / wall_s.max(1e-9)),
        counted(progress.ended, "request"),
        grouped(progress.in_flight as u64),
    )
}

/// Receives a run's records, and prints progress.
pub(crate) struct Watcher {
    outputs: Outputs,
    /// Length of the workload, if it is known.
    whole: Whole,
    pub(crate) began: Instant,
    last: Instant,
    shows: bool,
    interrupted: Arc<AtomicBool>,
}

impl Watcher {
    /// Opens the files.
    pub(crate) fn new(
        args: &WatchArgs,
        cluster: &Cluster,
        workload: &Workload,
        shows: bool,
        interrupted: Arc<AtomicBool>,
    ) -> anyhow::Result<Watcher> {
        Ok(Watcher {
            outputs: Outputs::open(&args.outputs(), cluster, args.html.is_some())?,
            whole: Whole::of(workload),
            began: Instant::now(),
            last: Instant::now(),
            shows,
            interrupted,
        })
    }

    /// The run over time, if it is kept.
    pub(crate) fn series(&self) -> Option<&Series> {
        self.outputs.series()
    }

    /// Removes the progress line.
    pub(crate) fn clear(&self) {
        if self.shows {
            err!("\r\x1b[K");
        }
    }

    /// Completes the files; returns the errors.
    pub(crate) fn finish(&mut self) -> Vec<String> {
        let failures = self.outputs.finish().into_iter();
        failures
            .map(|(path, error)| out::incomplete(&path, &error))
            .collect()
    }
}

impl Sink for Watcher {
    fn wants_requests(&self) -> bool {
        self.outputs.wants_requests()
    }

    fn on_request(&mut self, record: &RequestRecord<'_>) {
        self.outputs.on_request(record);
    }

    fn wants_passes(&self) -> bool {
        self.outputs.wants_passes()
    }

    fn on_pass(&mut self, pass: &PassRecord<'_>) {
        self.outputs.on_pass(pass);
    }

    fn on_progress(&mut self, progress: Progress) -> bool {
        if self.shows && self.last.elapsed() > Duration::from_millis(100) {
            self.last = Instant::now();
            let line = progress_line(&progress, self.whole, self.began.elapsed().as_secs_f64());
            let mut stderr = std::io::stderr().lock();
            // A closed terminal must not end the run.
            let _ = write!(stderr, "\r\x1b[K{line}");
            let _ = stderr.flush();
        }
        !self.interrupted.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use slipstream_base::SimTime;

    #[test]
    fn the_line_says_how_far_a_run_is_if_anybody_knows() {
        let progress = Progress {
            now: SimTime::from_secs_f64(30.0),
            ended: 250,
            in_flight: 12,
        };
        let line = |requests, arrivals_s| {
            let whole = Whole {
                requests,
                arrivals_s,
            };
            progress_line(&progress, whole, 2.0)
        };
        assert_eq!(
            line(Some(1_000), None),
            "[#####---------------] 25.0 %, 30.0 s simulated (15.0×), 250 requests ended, \
             12 in flight, 6.00 s to go"
        );
        // The time limit is reached before the request limit.
        assert!(line(Some(1_000), Some(40.0)).contains("] 75.0 %,"));
        assert!(line(None, None).starts_with("30.0 s simulated (15.0×)"));
    }
}
