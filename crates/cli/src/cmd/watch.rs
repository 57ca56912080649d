//! Optional outputs of `slipstream simulate`: records, a trace, a run over time.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use slipstream_base::width::{floor_u64, to_usize};
use slipstream_base::{RankId, Stage};
use slipstream_config::cluster::Cluster;
use slipstream_config::workload_file::Workload;
use slipstream_report::drag::{DragWriter, TIERS};
use slipstream_report::pass::PassWriter;
use slipstream_report::perfetto::{KvSpan, PerfettoWriter, RequestSpan};
use slipstream_report::series::EngineInfo;
use slipstream_report::table::{counted, grouped, number};
use slipstream_report::{DragRecord, PassRecord, Series};
use slipstream_study::requests::ended;
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

/// An open output file. A failure ends the file, not the run, and is reported at its end.
struct Output<W> {
    path: PathBuf,
    writer: Option<W>,
    failure: Option<anyhow::Error>,
}

impl<W> Output<W> {
    fn open<E: Into<anyhow::Error>>(
        path: Option<&PathBuf>,
        create: impl FnOnce(&Path) -> Result<W, E>,
    ) -> anyhow::Result<Option<Output<W>>> {
        let Some(path) = path else { return Ok(None) };
        let writer = create(path)
            .map_err(Into::into)
            .with_context(|| path.display().to_string())?;
        Ok(Some(Output {
            path: path.clone(),
            writer: Some(writer),
            failure: None,
        }))
    }

    fn with<E: Into<anyhow::Error>>(&mut self, write: impl FnOnce(&mut W) -> Result<(), E>) {
        if let Some(writer) = &mut self.writer
            && let Err(error) = write(writer)
        {
            self.failure = Some(error.into());
            self.writer = None;
        }
    }

    /// The error, in words.
    fn failure(self) -> Option<String> {
        Some(out::incomplete(&self.path, &self.failure?))
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
    drag: Option<Output<DragWriter<BufWriter<File>>>>,
    passes: Option<Output<PassWriter<BufWriter<File>>>>,
    perfetto: Option<Output<PerfettoWriter<BufWriter<File>>>>,
    pub(crate) series: Option<Series>,
    series_path: Option<PathBuf>,
    engine_of: HashMap<RankId, u32>,
    block_size: u32,
    /// Length of the workload, if it is known.
    whole: Whole,
    pub(crate) began: Instant,
    last: Instant,
    shows: bool,
    interrupted: Arc<AtomicBool>,
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
        let engines = EngineInfo::of_cluster(cluster);
        let engine_of = engines
            .iter()
            .zip(0..)
            .map(|(engine, index)| {
                let rank = RankId {
                    worker: slipstream_base::WorkerId(engine.worker),
                    dp_rank: engine.dp_rank,
                };
                (rank, index)
            })
            .collect();
        let perfetto = Output::open(args.perfetto.as_ref(), |path| {
            PerfettoWriter::create(path, &engines)
        })?;
        let over_time = args.html.is_some() || args.series.is_some();
        Ok(Watcher {
            drag: Output::open(args.drag.as_ref(), DragWriter::create)?,
            passes: Output::open(args.passes.as_ref(), PassWriter::create)?,
            perfetto,
            series: over_time.then(|| Series::new(0, engines)),
            series_path: args.series.clone(),
            engine_of,
            block_size: cluster.pools[0].engine.block_size,
            whole: Whole::of(workload),
            began: Instant::now(),
            last: Instant::now(),
            shows,
            interrupted,
        })
    }

    /// Removes the progress line.
    pub(crate) fn clear(&self) {
        if self.shows {
            err!("\r\x1b[K");
        }
    }

    /// Completes the files; returns the errors.
    pub(crate) fn finish(&mut self) -> Vec<String> {
        let mut failures = Vec::new();
        if let Some(mut drag) = self.drag.take() {
            drag.with(DragWriter::finish);
            failures.extend(drag.failure());
        }
        if let Some(mut passes) = self.passes.take() {
            passes.with(PassWriter::finish);
            failures.extend(passes.failure());
        }
        if let Some(mut perfetto) = self.perfetto.take() {
            perfetto.with(PerfettoWriter::finish);
            failures.extend(perfetto.failure());
        }
        if let (Some(series), Some(path)) = (&self.series, &self.series_path)
            && let Err(error) = series.save(path)
        {
            failures.push(out::incomplete(path, &error.into()));
        }
        failures
    }
}

impl Sink for Watcher {
    fn wants_requests(&self) -> bool {
        self.drag.is_some() || self.perfetto.is_some() || self.series.is_some()
    }

    fn on_request(&mut self, record: &RequestRecord<'_>) {
        if let Some(drag) = &mut self.drag {
            let record = drag_record(record, self.block_size);
            drag.with(|drag| drag.write(&record));
        }
        if let Some(series) = &mut self.series {
            series.on_request(&ended(record));
        }
        if let (Some(perfetto), Some(rank), None) = (&mut self.perfetto, record.rank, record.error)
            && let Some(&engine) = self.engine_of.get(&rank)
        {
            let name = record.request.name();
            let from = record
                .prefill_rank
                .and_then(|rank| self.engine_of.get(&rank));
            let kv = from
                .zip(record.hops.kv)
                .map(|(&from, (sent, came))| KvSpan {
                    from,
                    received: record.hops.received.0,
                    sent: sent.0,
                    came: came.0,
                });
            perfetto.with(|perfetto| {
                perfetto.request(&RequestSpan {
                    engine,
                    name: &name,
                    id: record.request.id().0,
                    due: record.request.due.0,
                    kv,
                    admitted: record.admitted.0,
                    first: record.first.0,
                    last: record.last.0,
                    input_tokens: record.input_tokens,
                    cached_tokens: record.cached_tokens,
                    output_tokens: record.output_tokens,
                })
            });
        }
    }

    fn wants_passes(&self) -> bool {
        self.passes.is_some() || self.perfetto.is_some() || self.series.is_some()
    }

    fn on_pass(&mut self, pass: &PassRecord<'_>) {
        if let Some(passes) = &mut self.passes {
            passes.with(|passes| passes.write(pass));
        }
        if let Some(perfetto) = &mut self.perfetto {
            perfetto.with(|perfetto| perfetto.pass(pass));
        }
        if let Some(series) = &mut self.series {
            series.on_pass(pass);
        }
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

/// Start time of a simulated run in its records: a time of 0 would count as absent.
const ORIGIN_NS: u64 = 1_000_000_000;

/// Blocks of a prompt that were found, by tier. Without lower tiers their counts are 0.
fn hit_blocks(record: &RequestRecord<'_>, block_size: u32) -> [Option<u32>; TIERS.len()] {
    let lower = &record.lower;
    let (host, disk, peer) = (lower.host_tokens, lower.disk_tokens, lower.peer_tokens);
    let on_gpu = record.cached_tokens.saturating_sub(host + disk + peer);
    [on_gpu, host, disk, peer].map(|tokens| Some(tokens / block_size))
}

fn drag_record(record: &RequestRecord<'_>, block_size: u32) -> DragRecord {
    let request = record.request;
    let mut drag = DragRecord {
        id: request.name(),
        worker: record.rank.map(|rank| rank.worker.0),
        hit_blocks: hit_blocks(record, block_size),
        isl: Some(record.input_tokens),
        osl: Some(record.output_tokens),
        preemptions: Some(record.preemptions),
        retries: Some(record.retries),
        status: record.error.map_or("ok", |error| error.kind).into(),
        ..DragRecord::default()
    };
    drag.times.note(Stage::Due, ORIGIN_NS + request.due.0);
    // For an answer that was interrupted, the part that its client received.
    let is_whole = record.error.is_none();
    if is_whole || record.output_tokens > 0 {
        // KV transfers that are not modelled take no time.
        let hops = &record.hops;
        for (stage, at) in [
            (Stage::Accept, request.due),
            (Stage::Parsed, hops.parsed),
            (Stage::Tokenized, hops.tokenized),
            (Stage::Routed, hops.routed),
            (Stage::Dispatched, hops.dispatched),
            (Stage::WorkerRecv, hops.received),
            (Stage::Admitted, record.admitted),
            (Stage::FirstPassStart, record.first_pass_start),
            (Stage::FirstPassEnd, hops.first_pass_end),
            (Stage::FrameRecv, hops.frame.max(hops.first_pass_end)),
            (Stage::Rendered, record.first),
            (Stage::Written, record.first),
            (Stage::ClientRecv, record.first),
        ] {
            drag.times.note(stage, ORIGIN_NS + at.0);
        }
        if is_whole {
            drag.times
                .note(Stage::LastClientRecv, ORIGIN_NS + record.last.0);
        }
        let (sent, received) = hops.kv.unzip();
        for (stage, at) in [
            (Stage::Prefilled, hops.prefilled),
            (Stage::KvSent, sent),
            (Stage::KvReceived, received),
        ] {
            if let Some(at) = at {
                drag.times.note(stage, ORIGIN_NS + at.0);
            }
        }
    }
    drag
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
