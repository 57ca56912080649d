//! Files that are written during a run: drag records, records of passes, a series over time, a trace for Perfetto.

use std::collections::HashMap;
use std::fs::File;
use std::io::BufWriter;
use std::path::{Path, PathBuf};

use anyhow::Context;
use slipstream_base::{RankId, Stage, WorkerId};
use slipstream_config::cluster::Cluster;
use slipstream_report::drag::{DragWriter, TIERS};
use slipstream_report::pass::PassWriter;
use slipstream_report::perfetto::{KvSpan, PerfettoWriter, RequestSpan};
use slipstream_report::series::EngineInfo;
use slipstream_report::{DragRecord, PassRecord, Series};
use slipstream_twin::{RequestRecord, Sink};

use crate::requests::ended;

/// Where a run's records go. Names that end in `.parquet` are Parquet, others CSV.
#[derive(Clone, Copy, Debug, Default)]
pub struct OutputFiles<'a> {
    /// One drag record per request.
    pub drag: Option<&'a Path>,
    /// One record per pass of an engine.
    pub passes: Option<&'a Path>,
    /// The run over time.
    pub series: Option<&'a Path>,
    /// A trace for ui.perfetto.dev.
    pub perfetto: Option<&'a Path>,
}

/// A file that is not complete, and why.
pub type Incomplete = (PathBuf, anyhow::Error);

/// An open output file. A failure ends the file, not the run, and is reported at its end.
struct Output<W> {
    path: PathBuf,
    writer: Option<W>,
    failure: Option<anyhow::Error>,
}

impl<W> Output<W> {
    fn open<E: Into<anyhow::Error>>(
        path: Option<&Path>,
        create: impl FnOnce(&Path) -> Result<W, E>,
    ) -> anyhow::Result<Option<Output<W>>> {
        let Some(path) = path else { return Ok(None) };
        let writer = create(path)
            .map_err(Into::into)
            .with_context(|| path.display().to_string())?;
        Ok(Some(Output {
            path: path.to_owned(),
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

    /// The error, and the file.
    fn failure(self) -> Option<Incomplete> {
        Some((self.path, self.failure?))
    }
}

/// Receives a run's records, and writes its files.
pub struct Outputs {
    drag: Option<Output<DragWriter<BufWriter<File>>>>,
    passes: Option<Output<PassWriter<BufWriter<File>>>>,
    perfetto: Option<Output<PerfettoWriter<BufWriter<File>>>>,
    series: Option<Series>,
    series_path: Option<PathBuf>,
    engine_of: HashMap<RankId, u32>,
    block_size: u32,
}

impl Outputs {
    /// Opens the files. `keeps_series`: the run over time is kept, also without a file of it.
    ///
    /// # Errors
    /// One cannot be made.
    pub fn open(
        files: &OutputFiles<'_>,
        cluster: &Cluster,
        keeps_series: bool,
    ) -> anyhow::Result<Outputs> {
        let engines = EngineInfo::of_cluster(cluster);
        let engine_of = engines
            .iter()
            .zip(0..)
            .map(|(engine, index)| {
                let rank = RankId {
                    worker: WorkerId(engine.worker),
                    dp_rank: engine.dp_rank,
                };
                (rank, index)
            })
            .collect();
        let perfetto = Output::open(files.perfetto, |path| {
            PerfettoWriter::create(path, &engines)
        })?;
        let over_time = keeps_series || files.series.is_some();
        Ok(Outputs {
            drag: Output::open(files.drag, DragWriter::create)?,
            passes: Output::open(files.passes, PassWriter::create)?,
            perfetto,
            series: over_time.then(|| Series::new(0, engines)),
            series_path: files.series.map(Path::to_owned),
            engine_of,
            block_size: cluster.pools[0].engine.block_size,
        })
    }

    /// The run over time, if it is kept.
    pub fn series(&self) -> Option<&Series> {
        self.series.as_ref()
    }

    /// Completes the files; returns those that are not.
    pub fn finish(&mut self) -> Vec<Incomplete> {
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
            failures.push((path.clone(), error.into()));
        }
        failures
    }
}

impl Sink for Outputs {
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
