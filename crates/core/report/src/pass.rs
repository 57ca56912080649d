//! Passes of engines, one record each: their work, the queue, the blocks held.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use slipstream_base::{ForwardPassMetrics, SimTime};

use crate::record::{Cell, Column, ColumnType, RecordError, RecordWriter};

/// One pass of one engine.
#[derive(Clone, Copy, Debug)]
pub struct PassRecord<'a> {
    /// Index of the engine over the cluster, from 0: each data-parallel rank is one.
    pub engine: u32,
    /// When it began.
    pub start: SimTime,
    /// When it ended: the time of every token in it.
    pub end: SimTime,
    /// Its rank and number, its work, and the queue at its end.
    pub fpm: &'a ForwardPassMetrics,
    /// Output tokens.
    pub tokens: u32,
    /// KV blocks held by sequences while it ran.
    pub used_blocks: u32,
    /// Sequences preempted for it.
    pub preemptions: u32,
    /// Gaps between its tokens and the previous ones, ns, with counts. First tokens have none.
    pub gaps: &'a [(u64, u32)],
    /// When sequences joined the waiting queue while it ran. They wait at its end.
    pub arrived: &'a [SimTime],
}

impl PassRecord<'_> {
    /// Number of its sequences.
    pub fn sequences(&self) -> u32 {
        self.fpm.scheduled_prefill.requests + self.fpm.scheduled_decode.requests
    }

    /// Sequences that waited at its end, preempted ones included.
    pub fn waiting(&self) -> u32 {
        self.fpm.queued_prefill.requests + self.fpm.queued_decode.requests
    }

    /// Waiting sequences × ns between two times in the pass: those that wait at its end, less the
    /// time before they arrived.
    pub fn waiting_ns(&self, from: SimTime, until: SimTime) -> u128 {
        let whole = u128::from(self.waiting()) * u128::from(until.since(from));
        let before = |&at: &SimTime| u128::from(at.min(until).since(from));
        whole.saturating_sub(self.arrived.iter().map(before).sum())
    }
}

/// Columns of a file of passes, in order; times are ns.
const COLUMNS: [&str; 17] = [
    "worker",
    "dp_rank",
    "counter",
    "start",
    "end",
    "prefill_requests",
    "prefill_tokens",
    "prefill_cached_tokens",
    "decode_requests",
    "decode_kv_tokens",
    "waiting_prefill_requests",
    "waiting_prefill_tokens",
    "waiting_decode_requests",
    "waiting_decode_kv_tokens",
    "output_tokens",
    "used_blocks",
    "preemptions",
];

/// Writes a row per pass.
pub struct PassWriter<W: Write + Send> {
    file: RecordWriter<W>,
}

impl PassWriter<BufWriter<File>> {
    /// Creates (or empties) the file; Parquet if its name ends in `.parquet`, else CSV.
    ///
    /// # Errors
    /// [`RecordError`] if it cannot be created, or is to be Parquet in a build without.
    pub fn create(path: &Path) -> Result<Self, RecordError> {
        let columns = COLUMNS.map(|name| Column::new(name, ColumnType::U64));
        Ok(PassWriter {
            file: RecordWriter::create(path, &columns)?,
        })
    }
}

impl<W: Write + Send> PassWriter<W> {
    /// Writes CSV, beginning with the header line.
    ///
    /// # Errors
    /// [`RecordError`] if `sink` fails.
    pub fn csv(sink: W) -> Result<Self, RecordError> {
        let columns = COLUMNS.map(|name| Column::new(name, ColumnType::U64));
        Ok(PassWriter {
            file: RecordWriter::csv(sink, &columns)?,
        })
    }

    /// Writes one row.
    ///
    /// # Errors
    /// [`RecordError`] if the sink fails.
    pub fn write(&mut self, pass: &PassRecord<'_>) -> Result<(), RecordError> {
        let fpm = pass.fpm;
        let row: [u64; COLUMNS.len()] = [
            fpm.rank.worker.0.into(),
            fpm.rank.dp_rank.into(),
            fpm.counter,
            pass.start.0,
            pass.end.0,
            fpm.scheduled_prefill.requests.into(),
            fpm.scheduled_prefill.tokens,
            fpm.scheduled_prefill_kv_tokens,
            fpm.scheduled_decode.requests.into(),
            fpm.scheduled_decode.kv_tokens,
            fpm.queued_prefill.requests.into(),
            fpm.queued_prefill.tokens,
            fpm.queued_decode.requests.into(),
            fpm.queued_decode.kv_tokens,
            pass.tokens.into(),
            pass.used_blocks.into(),
            pass.preemptions.into(),
        ];
        self.file.write(&row.map(Cell::U64))
    }

    /// Completes the file. No rows may follow.
    ///
    /// # Errors
    /// [`RecordError`] if the last rows could not be written.
    pub fn finish(&mut self) -> Result<(), RecordError> {
        self.file.finish()
    }
}
