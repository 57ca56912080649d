//! What `slipstream simulate` keeps of a run beside its figures: records, a trace, a run over time.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use slipstream_base::cluster::Cluster;
use slipstream_base::{RankId, Stage};
use slipstream_report::drag::DragWriter;
use slipstream_report::pass::PassWriter;
use slipstream_report::perfetto::{PerfettoWriter, RequestSpan};
use slipstream_report::series::{Ended, EngineInfo};
use slipstream_report::table::{grouped, number};
use slipstream_report::{DragRecord, PassRecord, Series};
use slipstream_twin::{Progress, RequestRecord, Sink};

/// Files that a simulated run can write.
#[derive(clap::Args)]
pub(crate) struct WatchArgs {
    /// Write one drag record a request to this file: CSV, or Parquet if it ends in .parquet
    #[arg(long, value_name = "FILE", help_heading = "What to report")]
    drag: Option<PathBuf>,
    /// Write one record a pass of an engine to this file: CSV, or Parquet if it ends in .parquet
    #[arg(long, value_name = "FILE", help_heading = "What to report")]
    passes: Option<PathBuf>,
    /// Write the run over time to this file: CSV, or Parquet if it ends in .parquet
    #[arg(long, value_name = "FILE", help_heading = "What to report")]
    series: Option<PathBuf>,
    /// Write a trace for ui.perfetto.dev to this file
    #[arg(long, value_name = "FILE", help_heading = "What to report")]
    perfetto: Option<PathBuf>,
    /// Write a page with plots to this file; it needs no network
    #[arg(long, value_name = "FILE", help_heading = "What to report")]
    pub(crate) html: Option<PathBuf>,
}

/// A file being written. A failure ends the file, not the run, and is told at its end.
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

    /// What went wrong, in words.
    fn failure(self) -> Option<String> {
        let (path, error) = (self.path.display(), self.failure?);
        Some(format!(
            "{path}: {error:#}; what it holds is incomplete, the figures are not"
        ))
    }
}

/// Takes what a run tells, and shows how far it is.
pub(crate) struct Watcher {
    drag: Option<Output<DragWriter<BufWriter<File>>>>,
    passes: Option<Output<PassWriter<BufWriter<File>>>>,
    perfetto: Option<Output<PerfettoWriter<BufWriter<File>>>>,
    pub(crate) series: Option<Series>,
    series_path: Option<PathBuf>,
    engine_of: HashMap<RankId, u32>,
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
            began: Instant::now(),
            last: Instant::now(),
            shows,
            interrupted,
        })
    }

    /// Removes the line that shows how far the run is.
    pub(crate) fn clear(&self) {
        if self.shows {
            eprint!("\r\x1b[K");
        }
    }

    /// Completes the files; says what could not be written.
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
            failures.push(format!("{}: {error}", path.display()));
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
            drag.with(|drag| drag.write(&drag_record(record)));
        }
        if let Some(series) = &mut self.series {
            series.on_request(&Ended {
                due: record.request.due.0,
                first: record.first.0,
                last: record.last.0,
                input_tokens: record.input_tokens.into(),
                cached_tokens: record.cached_tokens.into(),
                output_tokens: record.output_tokens.into(),
                ok: record.error.is_none(),
            });
        }
        if let (Some(perfetto), Some(rank), None) = (&mut self.perfetto, record.rank, record.error)
            && let Some(&engine) = self.engine_of.get(&rank)
        {
            let name = record.request.name();
            perfetto.with(|perfetto| {
                perfetto.request(&RequestSpan {
                    engine,
                    name: &name,
                    id: record.request.id().0,
                    due: record.request.due.0,
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
            let simulated = progress.now.as_secs_f64();
            let mut stderr = std::io::stderr().lock();
            // A terminal that went away is no reason to end the run.
            let _ = write!(
                stderr,
                "\r\x1b[K{} s simulated ({}×), {} requests ended, {} under way",
                number(simulated),
                number(simulated / self.began.elapsed().as_secs_f64()),
                grouped(progress.ended),
                grouped(progress.in_flight as u64),
            );
            let _ = stderr.flush();
        }
        !self.interrupted.load(Ordering::Relaxed)
    }
}

/// The moment at which a simulated run begins, in its records: a time of 0 would count as absent.
const ORIGIN_NS: u64 = 1_000_000_000;

fn drag_record(record: &RequestRecord<'_>) -> DragRecord {
    let request = record.request;
    let mut drag = DragRecord {
        id: request.name(),
        worker: record.rank.map(|rank| rank.worker.0),
        isl: Some(record.input_tokens),
        osl: Some(record.output_tokens),
        preemptions: Some(record.preemptions),
        retries: Some(record.retries),
        status: if record.error.is_some() {
            "refused"
        } else {
            "ok"
        }
        .into(),
        ..DragRecord::default()
    };
    drag.times.note(Stage::Due, ORIGIN_NS + request.due.0);
    if record.error.is_none() {
        // Hand-overs that are not modelled take no time.
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
            (Stage::LastClientRecv, record.last),
        ] {
            drag.times.note(stage, ORIGIN_NS + at.0);
        }
    }
    drag
}
