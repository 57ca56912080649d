//! A run over time, in constant memory: bins widen as the run continues.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::BufWriter;
use std::path::Path;

use slipstream_base::{SimTime, width};
use slipstream_config::cluster::Cluster;

use crate::pass::PassRecord;
use crate::record::{Cell, Column, ColumnType, RecordError, RecordWriter};

/// Widths of bins, ms. Each divides the next, so that bins can be merged; with the last one, 600
/// bins cover 25 days.
const WIDTHS_MS: [u64; 16] = [
    1, 2, 10, 20, 100, 200, 1_000, 2_000, 10_000, 20_000, 60_000, 120_000, 600_000, 1_200_000,
    3_600_000, 86_400_000,
];

/// Limit of bins.
const BINS_MAX: usize = 600;

/// Durations in buckets, 32 per octave: a quantile's error is at most 1.6 %, in a few KiB.
#[derive(Clone, Debug, Default)]
pub struct Sketch {
    /// Bucket of `counts[0]`.
    first: u32,
    counts: Vec<u64>,
    count: u64,
    sum: f64,
}

/// Buckets per octave, as a power of two.
const SUB_BITS: u32 = 5;

impl Sketch {
    fn bucket(ns: u64) -> u32 {
        if ns < 1 << SUB_BITS {
            return width::to_u32(ns);
        }
        let shift = ns.ilog2() - SUB_BITS;
        (shift << SUB_BITS) + width::to_u32(ns >> shift)
    }

    /// The middle of a bucket, ns.
    fn middle(bucket: u32) -> f64 {
        if bucket < 1 << (SUB_BITS + 1) {
            return f64::from(bucket);
        }
        let shift = (bucket >> SUB_BITS) - 1;
        let low = u64::from(bucket - (shift << SUB_BITS)) << shift;
        low as f64 + ((1u64 << shift) - 1) as f64 / 2.0
    }

    /// Adds `count` durations of `ns`.
    pub fn record_n(&mut self, ns: u64, count: u64) {
        self.count += count;
        self.sum += ns as f64 * count as f64;
        *self.slot(Self::bucket(ns)) += count;
    }

    fn slot(&mut self, bucket: u32) -> &mut u64 {
        if self.counts.is_empty() {
            self.first = bucket;
        }
        if bucket < self.first {
            let more = (self.first - bucket) as usize;
            self.counts.splice(0..0, std::iter::repeat_n(0, more));
            self.first = bucket;
        }
        let at = (bucket - self.first) as usize;
        if at >= self.counts.len() {
            self.counts.resize(at + 1, 0);
        }
        &mut self.counts[at]
    }

    /// Adds all durations of `other`.
    pub fn add(&mut self, other: &Sketch) {
        for (at, &count) in other.counts.iter().enumerate() {
            if count > 0 {
                *self.slot(other.first + width::to_u32(at)) += count;
            }
        }
        self.count += other.count;
        self.sum += other.sum;
    }

    /// Number of durations.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Their mean, ns.
    pub fn mean(&self) -> Option<f64> {
        (self.count > 0).then(|| self.sum / self.count as f64)
    }

    /// The duration that `share` of them do not exceed, ns.
    pub fn quantile(&self, share: f64) -> Option<f64> {
        let rank = width::floor_u64((share * self.count as f64).ceil()).clamp(1, self.count.max(1));
        let mut seen = 0;
        for (at, &count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= rank {
                return Some(Self::middle(self.first + width::to_u32(at)));
            }
        }
        None
    }
}

/// Activity of one engine in a bin. Levels are integrals over time: divide by the bin's width.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineBin {
    /// Time in passes, ns.
    pub busy_ns: u64,
    /// Sequences in passes × ns.
    pub running_ns: u128,
    /// Waiting sequences × ns.
    pub waiting_ns: u128,
    /// KV blocks held × ns.
    pub block_ns: u128,
}

impl EngineBin {
    fn add(&mut self, other: &EngineBin) {
        self.busy_ns += other.busy_ns;
        self.running_ns += other.running_ns;
        self.waiting_ns += other.waiting_ns;
        self.block_ns += other.block_ns;
    }
}

/// A bin.
#[derive(Clone, Debug, Default)]
pub struct Bin {
    /// Requests due in it.
    pub due: u64,
    /// Requests whose last token arrived in it.
    pub ended: u64,
    /// Requests that failed in it.
    pub failed: u64,
    /// Prompt tokens of the answered requests that were due in it.
    pub input_tokens: u64,
    /// Those of them found cached.
    pub cached_tokens: u64,
    /// Output tokens of the requests that ended in it; if passes are recorded, of the passes that
    /// ended in it.
    pub output_tokens: u64,
    /// Prompt tokens computed in passes that ended in it.
    pub prefill_tokens: u64,
    /// Preempted sequences.
    pub preemptions: u64,
    /// TTFT of the requests due in it.
    pub ttft: Sketch,
    /// E2E of the requests due in it.
    pub e2e: Sketch,
    /// Gaps before the tokens that arrived in it.
    pub itl: Sketch,
    /// Shape `[engines]`, or empty.
    pub engines: Vec<EngineBin>,
}

impl Bin {
    /// Adds all of `other`.
    pub fn add(&mut self, other: &Bin) {
        self.due += other.due;
        self.ended += other.ended;
        self.failed += other.failed;
        self.input_tokens += other.input_tokens;
        self.cached_tokens += other.cached_tokens;
        self.output_tokens += other.output_tokens;
        self.prefill_tokens += other.prefill_tokens;
        self.preemptions += other.preemptions;
        self.ttft.add(&other.ttft);
        self.e2e.add(&other.e2e);
        self.itl.add(&other.itl);
        if self.engines.len() < other.engines.len() {
            self.engines
                .resize(other.engines.len(), EngineBin::default());
        }
        for (mine, theirs) in self.engines.iter_mut().zip(&other.engines) {
            mine.add(theirs);
        }
    }
}

/// An engine, for the rows of tables and heat maps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineInfo {
    /// `w3`, or `w3.1` if a worker has several ranks.
    pub name: String,
    /// Its pool.
    pub pool: String,
    /// Its worker.
    pub worker: u32,
    /// Its data-parallel rank among those of the worker.
    pub dp_rank: u16,
    /// KV blocks.
    pub blocks: u32,
    /// Limit of sequences per pass.
    pub sequences_max: u32,
}

impl EngineInfo {
    /// The engines of a cluster, in the order of the indexes in passes.
    pub fn of_cluster(cluster: &Cluster) -> Vec<EngineInfo> {
        let mut engines = Vec::new();
        let mut worker = 0;
        for pool in &cluster.pools {
            for _ in 0..pool.workers {
                let ranks = pool.engine.data_parallel_size;
                engines.extend((0..ranks).map(|dp_rank| EngineInfo {
                    name: if ranks == 1 {
                        format!("w{worker}")
                    } else {
                        format!("w{worker}.{dp_rank}")
                    },
                    pool: pool.name.clone(),
                    worker,
                    dp_rank: width::to_u16(dp_rank),
                    blocks: pool.engine.num_gpu_blocks,
                    sequences_max: pool.engine.max_num_seqs,
                }));
                worker += 1;
            }
        }
        engines
    }
}

/// Activity of one engine over the whole run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineTotals {
    /// Passes.
    pub passes: u64,
    /// Time in passes, ns.
    pub busy_ns: u64,
    /// Sequences in passes × ns.
    pub running_ns: u128,
    /// KV blocks held × ns.
    pub block_ns: u128,
    /// Maximum of waiting sequences at the end of a pass.
    pub waiting_max: u32,
    /// Output tokens.
    pub output_tokens: u64,
    /// Prompt tokens computed.
    pub prefill_tokens: u64,
    /// Preempted sequences.
    pub preemptions: u64,
}

/// A request that has ended, ns of the run's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    /// When it was due.
    pub due: u64,
    /// When its first token arrived.
    pub first: u64,
    /// When its last token arrived, or when it failed.
    pub last: u64,
    /// Prompt tokens.
    pub input_tokens: u64,
    /// Those found cached.
    pub cached_tokens: u64,
    /// Answer tokens.
    pub output_tokens: u64,
    /// Whether it was answered.
    pub ok: bool,
}

/// A run over time.
#[derive(Clone, Debug)]
pub struct Series {
    /// The run's start, ns of its clock.
    origin: u64,
    /// Index into [`WIDTHS_MS`].
    width: usize,
    bins: Vec<Bin>,
    /// The engines, if passes are recorded.
    pub engines: Vec<EngineInfo>,
    /// Activity of each. Shape `[engines]`.
    pub totals: Vec<EngineTotals>,
    /// End of each engine's last pass. Shape `[engines]`.
    ends: Vec<SimTime>,
    /// Time spent in passes by number of sequences, ns, over all engines.
    pub batch_ns: BTreeMap<u32, u128>,
}

impl Series {
    /// An empty series of a run that begins at `origin` on its clock (ns).
    pub fn new(origin: u64, engines: Vec<EngineInfo>) -> Series {
        Series {
            origin,
            width: 0,
            bins: Vec::new(),
            totals: vec![EngineTotals::default(); engines.len()],
            ends: vec![SimTime(0); engines.len()],
            engines,
            batch_ns: BTreeMap::new(),
        }
    }

    /// Width of a bin, ns.
    pub fn width_ns(&self) -> u64 {
        WIDTHS_MS[self.width] * 1_000_000
    }

    /// The bins from the run's start on, each [`width_ns`](Self::width_ns) wide.
    pub fn bins(&self) -> &[Bin] {
        &self.bins
    }

    /// Whether passes are recorded.
    pub fn has_passes(&self) -> bool {
        !self.engines.is_empty()
    }

    /// Index of the bin of a time; bins are merged until there is one.
    fn index(&mut self, at: u64) -> usize {
        let since = at.saturating_sub(self.origin);
        while since / self.width_ns() >= BINS_MAX as u64 && self.width + 1 < WIDTHS_MS.len() {
            self.widen();
        }
        let index = width::to_usize(since / self.width_ns()).min(BINS_MAX - 1);
        if index >= self.bins.len() {
            self.bins.resize_with(index + 1, Bin::default);
        }
        index
    }

    fn bin(&mut self, at: u64) -> &mut Bin {
        let index = self.index(at);
        &mut self.bins[index]
    }

    fn widen(&mut self) {
        let group = width::to_usize(WIDTHS_MS[self.width + 1] / WIDTHS_MS[self.width]);
        self.width += 1;
        let narrow = std::mem::take(&mut self.bins);
        self.bins = narrow
            .chunks(group)
            .map(|bins| {
                let mut wide = bins[0].clone();
                bins[1..].iter().for_each(|bin| wide.add(bin));
                wide
            })
            .collect();
    }

    /// Counts a request.
    pub fn on_request(&mut self, r: &Ended) {
        self.bin(r.due).due += 1;
        if !r.ok {
            self.bin(r.last).failed += 1;
            return;
        }
        let watched = self.has_passes();
        let end = self.bin(r.last);
        end.ended += 1;
        if !watched {
            end.output_tokens += r.output_tokens;
        }
        let bin = self.bin(r.due);
        bin.input_tokens += r.input_tokens;
        bin.cached_tokens += r.cached_tokens;
        bin.ttft.record_n(r.first.saturating_sub(r.due), 1);
        bin.e2e.record_n(r.last.saturating_sub(r.due), 1);
    }

    /// Counts gaps between tokens that arrived at `at` and the previous ones.
    pub fn on_gaps(&mut self, at: u64, ns: u64, count: u64) {
        if count > 0 {
            self.bin(at).itl.record_n(ns, count);
        }
    }

    /// Counts a pass. Passes of an engine come in the order of their ends.
    ///
    /// # Panics
    /// If its engine is not in the list that the series was created with.
    pub fn on_pass(&mut self, pass: &PassRecord<'_>) {
        let sequences = pass.sequences();
        let length = pass.end.since(pass.start);
        let prefill_tokens = pass.fpm.scheduled_prefill.tokens;
        // Passes of a pipeline overlap: a moment is in several, but the engine is busy, and its blocks are held, once.
        let last_end = &mut self.ends[pass.engine as usize];
        let alone = (*last_end).clamp(pass.start, pass.end);
        *last_end = pass.end.max(*last_end);
        let alone_ns = pass.end.since(alone);
        let totals = &mut self.totals[pass.engine as usize];
        totals.passes += 1;
        totals.busy_ns += alone_ns;
        totals.running_ns += u128::from(sequences) * u128::from(length);
        totals.block_ns += u128::from(pass.used_blocks) * u128::from(alone_ns);
        totals.waiting_max = totals.waiting_max.max(pass.waiting());
        totals.output_tokens += u64::from(pass.tokens);
        totals.prefill_tokens += prefill_tokens;
        totals.preemptions += u64::from(pass.preemptions);
        *self.batch_ns.entry(sequences).or_default() += u128::from(length);

        let bin = self.bin(pass.end.0);
        bin.output_tokens += u64::from(pass.tokens);
        bin.prefill_tokens += prefill_tokens;
        bin.preemptions += u64::from(pass.preemptions);
        for &(ns, count) in pass.gaps {
            bin.itl.record_n(ns, count.into());
        }
        // The bin of the end exists, so those before it do, and none is merged below.
        let width = self.width_ns();
        let (mut at, end) = (
            pass.start.since(SimTime(self.origin)),
            pass.end.since(SimTime(self.origin)),
        );
        while at < end {
            let index = width::to_usize(at / width).min(self.bins.len() - 1);
            let until = if index + 1 == self.bins.len() {
                end
            } else {
                end.min((index as u64 + 1) * width)
            };
            let bin = &mut self.bins[index];
            if bin.engines.is_empty() {
                bin.engines.resize(self.engines.len(), EngineBin::default());
            }
            let moment = |since: u64| SimTime(self.origin + since);
            let (from, to) = (moment(at).max(alone), moment(until));
            let busy_ns = to.0.saturating_sub(from.0);
            let waiting_ns = if busy_ns > 0 {
                pass.waiting_ns(from, to)
            } else {
                0
            };
            bin.engines[pass.engine as usize].add(&EngineBin {
                busy_ns,
                running_ns: u128::from(sequences) * u128::from(until - at),
                waiting_ns,
                block_ns: u128::from(pass.used_blocks) * u128::from(busy_ns),
            });
            at = until;
        }
    }

    /// Adds the requests that another thread recorded of the same run.
    pub fn add(&mut self, other: &Series) {
        let mut other = other.clone();
        while self.width < other.width {
            self.widen();
        }
        while other.width < self.width {
            other.widen();
        }
        if self.bins.len() < other.bins.len() {
            self.bins.resize_with(other.bins.len(), Bin::default);
        }
        for (mine, theirs) in self.bins.iter_mut().zip(&other.bins) {
            mine.add(theirs);
        }
    }

    /// Writes a row per bin: CSV, or Parquet if the name ends in `.parquet`.
    ///
    /// # Errors
    /// [`RecordError`] if the file cannot be written.
    pub fn save(&self, path: &Path) -> Result<(), RecordError> {
        let mut file = RecordWriter::create(path, &columns(self.has_passes()))?;
        self.write(&mut file)
    }

    fn write(&self, file: &mut RecordWriter<BufWriter<File>>) -> Result<(), RecordError> {
        let width = self.width_ns();
        let seconds = width as f64 / 1e9;
        for (index, bin) in self.bins.iter().enumerate() {
            let ms = |ns: Option<f64>| Cell::from(ns.map(|ns| ns / 1e6));
            let level = |sum: u128| Cell::F64(sum as f64 / width as f64);
            let mut row = vec![
                Cell::F64(index as f64 * seconds),
                Cell::F64(seconds),
                Cell::U64(bin.due),
                Cell::U64(bin.ended),
                Cell::U64(bin.failed),
                Cell::U64(bin.input_tokens),
                Cell::U64(bin.cached_tokens),
                Cell::U64(bin.output_tokens),
            ];
            for sketch in [&bin.ttft, &bin.itl, &bin.e2e] {
                row.push(ms(sketch.mean()));
                row.extend([0.5, 0.9, 0.99].map(|share| ms(sketch.quantile(share))));
            }
            if self.has_passes() {
                let mut sum = EngineBin::default();
                bin.engines.iter().for_each(|engine| sum.add(engine));
                let blocks: u64 = self.engines.iter().map(|e| u64::from(e.blocks)).sum();
                row.extend([
                    Cell::U64(bin.prefill_tokens),
                    Cell::U64(bin.preemptions),
                    Cell::F64(sum.busy_ns as f64 / width as f64 / self.engines.len().max(1) as f64),
                    level(sum.running_ns),
                    level(sum.waiting_ns),
                    Cell::F64(sum.block_ns as f64 / width as f64 / blocks.max(1) as f64),
                ]);
            }
            file.write(&row)?;
        }
        file.finish()
    }
}

fn columns(passes: bool) -> Vec<Column> {
    use ColumnType::{F64, U64};
    let mut columns: Vec<Column> = [
        ("from_s", F64),
        ("width_s", F64),
        ("due", U64),
        ("ended", U64),
        ("failed", U64),
        ("input_tokens", U64),
        ("cached_tokens", U64),
        ("output_tokens", U64),
    ]
    .map(|(name, kind)| Column::new(name, kind))
    .into();
    for latency in ["ttft", "itl", "e2e"] {
        for figure in ["mean", "p50", "p90", "p99"] {
            columns.push(Column::new(format!("{latency}_ms_{figure}"), F64));
        }
    }
    if passes {
        columns.extend(
            [
                ("prefill_tokens", U64),
                ("preemptions", U64),
                ("busy_share", F64),
                ("running", F64),
                ("waiting", F64),
                ("kv_used_share", F64),
            ]
            .map(|(name, kind)| Column::new(name, kind)),
        );
    }
    columns
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use slipstream_base::ForwardPassMetrics;
    use slipstream_base::fpm::{DecodeStats, PrefillStats};

    use super::*;

    const MS: u64 = 1_000_000;

    fn engine() -> EngineInfo {
        EngineInfo {
            name: "w0".into(),
            pool: "main".into(),
            worker: 0,
            dp_rank: 0,
            blocks: 100,
            sequences_max: 8,
        }
    }

    fn pass(series: &mut Series, start: u64, end: u64, sequences: u32, used_blocks: u32) {
        let fpm = ForwardPassMetrics {
            scheduled_decode: DecodeStats {
                requests: sequences,
                ..DecodeStats::default()
            },
            ..ForwardPassMetrics::default()
        };
        series.on_pass(&PassRecord {
            engine: 0,
            start: SimTime(start),
            end: SimTime(end),
            fpm: &fpm,
            tokens: sequences,
            used_blocks,
            preemptions: 0,
            gaps: &[(end - start, sequences)],
            arrived: &[],
        });
    }

    /// Two stages: the second pass begins 1 ms after the first, the third when that has ended.
    #[test]
    fn passes_that_overlap_make_an_engine_busy_once() {
        let mut series = Series::new(0, vec![engine()]);
        pass(&mut series, 0, 2 * MS, 3, 10);
        pass(&mut series, MS, 3 * MS, 2, 20);
        pass(&mut series, 2 * MS, 4 * MS, 3, 30);
        let at = |bin: usize| series.bins()[bin].engines[0];
        for bin in 0..4 {
            assert_eq!(at(bin).busy_ns, MS, "{bin}");
        }
        let ms = u128::from(MS);
        assert_eq!((at(1).running_ns, at(1).block_ns), (5 * ms, 10 * ms));
        assert_eq!((at(3).running_ns, at(3).block_ns), (3 * ms, 30 * ms));
        let totals = series.totals[0];
        assert_eq!((totals.busy_ns, totals.block_ns), (4 * MS, 70 * ms));
        assert_eq!(totals.running_ns, 16 * ms);
    }

    /// Two wait at the end of a pass of 4 ms; one of them came 2.5 ms after it began.
    #[test]
    fn sequences_wait_from_their_arrival_on() {
        let mut series = Series::new(MS, vec![engine()]);
        let fpm = ForwardPassMetrics {
            queued_prefill: PrefillStats {
                requests: 2,
                ..PrefillStats::default()
            },
            ..ForwardPassMetrics::default()
        };
        series.on_pass(&PassRecord {
            engine: 0,
            start: SimTime(MS),
            end: SimTime(5 * MS),
            fpm: &fpm,
            tokens: 0,
            used_blocks: 0,
            preemptions: 0,
            gaps: &[],
            arrived: &[SimTime(3_500_000)],
        });
        let waiting: Vec<u128> = series
            .bins()
            .iter()
            .filter_map(|bin| bin.engines.first())
            .map(|engine| engine.waiting_ns)
            .collect();
        let ms = u128::from(MS);
        assert_eq!(waiting, [ms, ms, ms + ms / 2, 2 * ms]);
        assert_eq!(series.totals[0].waiting_max, 2);
    }

    #[test]
    fn a_pass_is_shared_out_among_the_bins_that_it_covers() {
        let mut series = Series::new(0, vec![engine()]);
        // 1.5 ms to 3.25 ms: half of bin 1, all of bin 2, a quarter of bin 3.
        pass(&mut series, 1_500_000, 3_250_000, 4, 10);
        let busy: Vec<u64> = series
            .bins()
            .iter()
            .map(|bin| bin.engines.first().map_or(0, |e| e.busy_ns))
            .collect();
        assert_eq!(busy, [0, 500_000, MS, 250_000]);
        assert_eq!(series.bins()[2].engines[0].running_ns, 4 * u128::from(MS));
        assert_eq!(series.bins()[2].engines[0].block_ns, 10 * u128::from(MS));
        assert_eq!(series.bins()[3].output_tokens, 4);
        assert_eq!(series.batch_ns[&4], 1_750_000);
    }

    #[test]
    fn requests_count_where_they_were_due_and_where_they_ended() {
        let mut series = Series::new(5 * MS, Vec::new());
        series.on_request(&Ended {
            due: 6 * MS,
            first: 9 * MS,
            last: 12 * MS,
            input_tokens: 30,
            cached_tokens: 16,
            output_tokens: 5,
            ok: true,
        });
        let bins = series.bins();
        assert_eq!((bins[1].due, bins[1].input_tokens), (1, 30));
        assert_eq!((bins[7].ended, bins[7].output_tokens), (1, 5));
        let ttft = bins[1].ttft.quantile(0.5).unwrap();
        assert!((ttft / 3e6 - 1.0).abs() < 0.016, "{ttft}");
    }

    proptest! {
        #[test]
        fn joining_bins_loses_nothing(
            times in prop::collection::vec((0u64..1_000_000, 1u64..100_000), 1..60),
        ) {
            let mut series = Series::new(0, vec![engine()]);
            let mut at = 0;
            for &(pause_us, length_us) in &times {
                let start = at + pause_us * 1_000;
                at = start + length_us * 1_000;
                pass(&mut series, start, at, 2, 3);
            }
            prop_assert!(series.bins().len() <= BINS_MAX);
            let busy: u64 = series.bins().iter().flat_map(|b| &b.engines).map(|e| e.busy_ns).sum();
            prop_assert_eq!(busy, times.iter().map(|t| t.1 * 1_000).sum::<u64>());
            let gaps: u64 = series.bins().iter().map(|b| b.itl.count()).sum();
            prop_assert_eq!(gaps, 2 * times.len() as u64);
            let width = series.width_ns();
            for bin in series.bins() {
                for engine in &bin.engines {
                    prop_assert!(engine.busy_ns <= width);
                    prop_assert_eq!(engine.running_ns, 2 * u128::from(engine.busy_ns));
                }
            }
        }

        #[test]
        fn sketches_are_off_by_two_percent_at_most(
            mut values in prop::collection::vec(0u64..1 << 50, 1..200),
            share in 0.0f64..1.0,
            cut in 0usize..200,
        ) {
            let (mut left, mut right) = (Sketch::default(), Sketch::default());
            for (i, &v) in values.iter().enumerate() {
                if i < cut { left.record_n(v, 1) } else { right.record_n(v, 1) }
            }
            left.add(&right);
            values.sort_unstable();
            let rank = ((share * values.len() as f64).ceil() as usize).clamp(1, values.len());
            let exact = values[rank - 1] as f64;
            let got = left.quantile(share).unwrap();
            prop_assert!((got - exact).abs() <= exact * 0.016 + 1.0, "{} for {}", got, exact);
        }
    }
}
