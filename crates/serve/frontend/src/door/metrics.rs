//! Counters and histograms of a shard, and their exposition over all shards.
//!
//! Each shard writes its own set and no other thread does, so a count is a load and a store, not a
//! locked instruction; a scrape reads all sets.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Unit;
pub(crate) use slipstream_base::count::{Count, Histogram};
use slipstream_base::count::{MergedHistogram, powers_of_two};
use slipstream_base::{FinishReason, Stage, StageTimes};

use crate::door::budget::Budget;
use crate::door::faults::{FAULTS, Faults};
use crate::door::management::Management;
use crate::door::service::Service;

/// Upper bounds in ns: 1, 2 and 5 in each decade from 1 µs to 500 s. The path's own costs lie at the
/// lower end, waiting for a loaded engine at the upper.
const BOUNDS_NS: [u64; 27] = {
    let mut bounds = [0; 27];
    let mut decade = 1_000;
    let mut i = 0;
    while i < 27 {
        bounds[i] = decade;
        bounds[i + 1] = 2 * decade;
        bounds[i + 2] = 5 * decade;
        decade *= 10;
        i += 3;
    }
    bounds
};

/// Upper bounds in ns for steps that take less than a microsecond: 1, 2 and 5 in each decade from
/// 10 ns to 500 ms.
const BOUNDS_STEP_NS: [u64; 24] = {
    let mut bounds = [0; 24];
    let mut decade = 10;
    let mut i = 0;
    while i < 24 {
        bounds[i] = decade;
        bounds[i + 1] = 2 * decade;
        bounds[i + 2] = 5 * decade;
        decade *= 10;
        i += 3;
    }
    bounds
};

/// Upper bounds for counts of tokens: powers of two from 1 to 2^20.
const BOUNDS_TOKENS: [u64; 21] = powers_of_two();

/// Why a request was turned away before an engine saw it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub(crate) enum Rejection {
    /// 4xx: the request was not valid.
    Invalid,
    /// 401.
    Unauthorized,
    /// 503: every worker over its busy threshold.
    Busy,
    /// 503 or 429: a limit of open streams reached.
    StreamsMax,
    /// 503 or 429: `live.memory_max` reached. 413: the request exceeds it alone.
    Memory,
    /// 503: no worker is ready, or a worker's inbox is full.
    NoWorker,
}

const REJECTIONS: [&str; 6] = [
    "invalid",
    "unauthorized",
    "busy",
    "streams_max",
    "memory_max",
    "no_worker",
];
const FINISH: [&str; 3] = ["stop", "length", "abort"];

/// Stages that the frontend sees, with the one before. A request whose prompt another
/// worker computes has the stages between its admission and the pass of its first token.
pub(crate) const STAGE_PAIRS: [(Stage, Stage); 15] = [
    (Stage::Accept, Stage::Parsed),
    (Stage::Parsed, Stage::Tokenized),
    (Stage::Tokenized, Stage::Routed),
    (Stage::Routed, Stage::Dispatched),
    (Stage::Dispatched, Stage::WorkerRecv),
    (Stage::WorkerRecv, Stage::Admitted),
    (Stage::Admitted, Stage::FirstPassStart),
    (Stage::Admitted, Stage::Prefilled),
    (Stage::Prefilled, Stage::KvSent),
    (Stage::KvSent, Stage::KvReceived),
    (Stage::KvReceived, Stage::FirstPassStart),
    (Stage::FirstPassStart, Stage::FirstPassEnd),
    (Stage::FirstPassEnd, Stage::FrameRecv),
    (Stage::FrameRecv, Stage::Rendered),
    (Stage::Rendered, Stage::Written),
];

/// Numbers of a sequence at its end.
pub(crate) struct FinishedSequence {
    /// Tokens of its prompt, and those of them that were cached.
    pub(crate) prompt: u32,
    pub(crate) cached: u32,
    /// Tokens of its answer, and those that were asked for at most.
    pub(crate) generated: u32,
    pub(crate) max_tokens: u32,
    pub(crate) preemptions: u32,
}

/// Connections of clients.
pub(crate) struct ConnectionCounts {
    pub(crate) accepted: Count,
    pub(crate) open: Count,
    /// Connections ended as their client had no request, or read no answer.
    pub(crate) idle: Count,
    pub(crate) unread: Count,
}

/// How long a shard works on one thing.
pub(crate) struct PollTimes {
    /// CPU time of the longest poll of a task, ns.
    pub(crate) max_ns: Count,
    /// CPU time of polls that took some time.
    pub(crate) long: Histogram,
}

/// What comes from workers, and goes to them.
pub(crate) struct PlaneCounts {
    pub(crate) frames: Count,
    pub(crate) refusals: Count,
    pub(crate) stale_entries: Count,
    /// Entries for streams that their sender does not run.
    pub(crate) foreign_entries: Count,
    /// Tokens beyond those that were requested.
    pub(crate) excess_tokens: Count,
    /// Prompts that were sent to another worker than their answers.
    pub(crate) prompts_apart: Count,
    /// Bytes of keys and values that were sent between workers.
    pub(crate) kv_bytes: Count,
    /// Streams that were about to go to a worker that had just vanished.
    pub(crate) late_starts: Count,
    /// Connections of workers cut for what they sent.
    pub(crate) malformed: Count,
    /// Connections of workers cut for their silence.
    pub(crate) silent: Count,
}

/// Responses that later requests continue.
pub(crate) struct ResponseCounts {
    /// Responses stored for requests that continue them.
    pub(crate) stored: Count,
    /// Responses that were to be stored, and are not any more or never were for lack of room.
    pub(crate) evicted: Count,
}

/// Tokens of all requests.
pub(crate) struct TokenTotals {
    pub(crate) prompt: Count,
    pub(crate) generation: Count,
    pub(crate) cached: Count,
    pub(crate) computed: Count,
}

/// Latencies that clients see, and those of steps on the way.
pub(crate) struct Latencies {
    pub(crate) ttft: Histogram,
    pub(crate) itl: Histogram,
    /// Of a stream that another worker continues: from its last token to the next.
    pub(crate) resume: Histogram,
    pub(crate) e2e: Histogram,
    /// From a routing decision to the request's being on its way.
    pub(crate) pre_send: Histogram,
    /// Opening the streams of a request.
    pub(crate) stream_register: Histogram,
    /// Finding a stream, once a frame.
    #[cfg(feature = "bench")]
    pub(crate) table_access: Histogram,
    /// Finding the connection of a worker.
    pub(crate) call_home_lookup: Histogram,
}

/// Sizes of requests that came to their end, tokens and choices.
pub(crate) struct Lengths {
    pub(crate) prompt: Histogram,
    pub(crate) generation: Histogram,
    pub(crate) generation_max: Histogram,
    pub(crate) choices: Histogram,
    pub(crate) max_tokens: Histogram,
    pub(crate) preemptions: Histogram,
    pub(crate) computed: Histogram,
}

/// Times of the phases of a sequence.
pub(crate) struct PhaseTimes {
    pub(crate) queue: Histogram,
    pub(crate) prefill: Histogram,
    pub(crate) decode: Histogram,
    pub(crate) inference: Histogram,
    pub(crate) per_token: Histogram,
}

/// Counters of one shard.
pub(crate) struct ShardMetrics {
    pub(crate) connections: ConnectionCounts,
    pub(crate) polls: PollTimes,
    pub(crate) plane: PlaneCounts,
    pub(crate) responses: ResponseCounts,
    pub(crate) tokens: TokenTotals,
    pub(crate) latency: Latencies,
    lengths: Lengths,
    phases: PhaseTimes,
    pub(crate) requests: Count,
    pub(crate) streams_open: Count,
    /// Requests in the dispatcher's queue.
    pub(crate) requests_queued: Count,
    pub(crate) streams_paused: Count,
    pub(crate) streams_cut_slow: Count,
    pub(crate) streams_cut_full: Count,
    pub(crate) streams_cut_deadline: Count,
    pub(crate) streams_cut_stop: Count,
    pub(crate) streams_cut_memory: Count,
    pub(crate) streams_cut_idle: Count,
    pub(crate) disconnects: Count,
    /// Streams given to another worker, as theirs did not take them or vanished.
    pub(crate) retries: Count,
    /// Streams whose worker vanished, and that no other could finish.
    pub(crate) streams_lost: Count,
    /// Times that a stream that had begun was given to another worker.
    pub(crate) streams_resumed: Count,
    /// Streams that had begun, and that no other worker continued.
    pub(crate) streams_not_resumed: Count,
    pub(crate) flushes: Count,
    /// Those of them that went past the task of their connection.
    pub(crate) direct_writes: Count,
    rejected: [Count; REJECTIONS.len()],
    finished: [Count; FINISH.len()],
    between_stages: [Histogram; STAGE_PAIRS.len()],
}

impl ShardMetrics {
    pub(crate) fn new() -> ShardMetrics {
        let time = || Histogram::new(&BOUNDS_NS);
        let step = || Histogram::new(&BOUNDS_STEP_NS);
        let tokens = || Histogram::new(&BOUNDS_TOKENS);
        ShardMetrics {
            connections: ConnectionCounts {
                accepted: Count::default(),
                open: Count::default(),
                idle: Count::default(),
                unread: Count::default(),
            },
            polls: PollTimes {
                max_ns: Count::default(),
                long: time(),
            },
            plane: PlaneCounts {
                frames: Count::default(),
                refusals: Count::default(),
                stale_entries: Count::default(),
                foreign_entries: Count::default(),
                excess_tokens: Count::default(),
                prompts_apart: Count::default(),
                kv_bytes: Count::default(),
                late_starts: Count::default(),
                malformed: Count::default(),
                silent: Count::default(),
            },
            responses: ResponseCounts {
                stored: Count::default(),
                evicted: Count::default(),
            },
            tokens: TokenTotals {
                prompt: Count::default(),
                generation: Count::default(),
                cached: Count::default(),
                computed: Count::default(),
            },
            latency: Latencies {
                ttft: time(),
                itl: time(),
                resume: time(),
                e2e: time(),
                pre_send: step(),
                stream_register: step(),
                #[cfg(feature = "bench")]
                table_access: step(),
                call_home_lookup: step(),
            },
            lengths: Lengths {
                prompt: tokens(),
                generation: tokens(),
                generation_max: tokens(),
                choices: tokens(),
                max_tokens: tokens(),
                preemptions: tokens(),
                computed: tokens(),
            },
            phases: PhaseTimes {
                queue: time(),
                prefill: time(),
                decode: time(),
                inference: time(),
                per_token: time(),
            },
            requests: Count::default(),
            streams_open: Count::default(),
            requests_queued: Count::default(),
            streams_paused: Count::default(),
            streams_cut_slow: Count::default(),
            streams_cut_full: Count::default(),
            streams_cut_deadline: Count::default(),
            streams_cut_stop: Count::default(),
            streams_cut_memory: Count::default(),
            streams_cut_idle: Count::default(),
            disconnects: Count::default(),
            retries: Count::default(),
            streams_lost: Count::default(),
            streams_resumed: Count::default(),
            streams_not_resumed: Count::default(),
            flushes: Count::default(),
            direct_writes: Count::default(),
            rejected: Default::default(),
            finished: Default::default(),
            between_stages: std::array::from_fn(|_| time()),
        }
    }

    pub(crate) fn on_rejected(&self, why: Rejection) {
        self.rejected[why as usize].add(1);
    }

    /// Counts a sequence that came to its end.
    pub(crate) fn on_finished(&self, reason: FinishReason, sequence: &FinishedSequence) {
        self.finished[reason as usize].add(1);
        self.lengths.prompt.observe(u64::from(sequence.prompt));
        self.lengths
            .generation
            .observe(u64::from(sequence.generated));
        self.lengths
            .max_tokens
            .observe(u64::from(sequence.max_tokens));
        self.lengths
            .preemptions
            .observe(u64::from(sequence.preemptions));
        let computed = u64::from(sequence.prompt.saturating_sub(sequence.cached));
        self.lengths.computed.observe(computed);
    }

    /// Counts a prompt all of whose `n` choices came to their end; the longest has so many tokens.
    pub(crate) fn on_choices(&self, n: u32, generated_max: u32) {
        self.lengths.choices.observe(u64::from(n));
        self.lengths
            .generation_max
            .observe(u64::from(generated_max));
    }

    /// Notes how long a sequence waited, and how long its prompt and its answer took. Choices of a request share the times
    /// up to the first token of any. Phases: vLLM, `vllm/v1/metrics/stats.py`.
    pub(crate) fn on_phases(&self, times: &StageTimes, last_token_ns: u64, generated: u32) {
        let Some((admitted, first)) = times.at(Stage::Admitted).zip(times.at(Stage::FirstPassEnd))
        else {
            return; // it got no token
        };
        let queued = times.at(Stage::WorkerRecv).unwrap_or(admitted);
        self.phases.queue.observe(admitted.saturating_sub(queued));
        self.phases.prefill.observe(first.saturating_sub(admitted));
        self.phases
            .inference
            .observe(last_token_ns.saturating_sub(admitted));
        let shown = times.at(Stage::FrameRecv).unwrap_or(first);
        let decode = last_token_ns.saturating_sub(shown);
        self.phases.decode.observe(decode);
        if generated > 1 {
            self.phases
                .per_token
                .observe(decode / u64::from(generated - 1));
        }
    }

    /// Records the time between each pair of stages if both are known.
    pub(crate) fn on_stages(&self, times: &StageTimes) {
        for ((from, to), histogram) in STAGE_PAIRS.iter().zip(&self.between_stages) {
            if (*from, *to) == (Stage::Admitted, Stage::FirstPassStart)
                && times.at(Stage::Prefilled).is_some()
            {
                continue;
            }
            if let (Some(from), Some(to)) = (times.at(*from), times.at(*to)) {
                histogram.observe(to.saturating_sub(from));
            }
        }
    }
}

/// Sums over all shards, for the number of workers that a pool should have.
#[derive(Clone)]
pub struct FrontendTotals(pub(crate) Vec<Arc<ShardMetrics>>);

impl fmt::Debug for FrontendTotals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FrontendTotals({} shards)", self.0.len())
    }
}

impl FrontendTotals {
    /// Requests that wait for a worker.
    pub fn queued(&self) -> u64 {
        let each = self.0.iter();
        each.map(|shard| shard.requests_queued.get()).sum()
    }

    /// First tokens since the start, and the sum of the times to them, s. Those of real engines are not measured.
    pub fn first_tokens(&self) -> (u64, f64) {
        self.0.iter().fold((0, 0.0), |(count, sum_s), shard| {
            let own = shard.latency.ttft.count();
            (count + own, sum_s + shard.latency.ttft.sum() as f64 / 1e9)
        })
    }
}

/// Encodes the sum over all shards at each scrape.
pub(crate) struct FrontendCollector {
    pub(crate) shards: Vec<Arc<ShardMetrics>>,
    pub(crate) budget: Arc<Budget>,
    pub(crate) faults: Arc<Faults>,
    pub(crate) management: Arc<Management>,
    /// Labels of vLLM's metrics: `model_name` and `engine`.
    pub(crate) labels: Vec<(&'static str, String)>,
}

/// Labels of vLLM's metrics. `engine` is the number of the only engine, or `all` if the metric is the sum of several.
pub(crate) fn vllm_labels(service: &Service) -> Vec<(&'static str, String)> {
    let ranks: Vec<_> = service
        .fleets
        .each()
        .flat_map(|fleet| fleet.loads())
        .collect();
    let engine = match &ranks[..] {
        [only] => only.rank.dp_rank.to_string(),
        _ => "all".to_owned(),
    };
    vec![("model_name", service.model.clone()), ("engine", engine)]
}

impl fmt::Debug for FrontendCollector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FrontendCollector({} shards)", self.shards.len())
    }
}

impl FrontendCollector {
    fn sum(&self, of: impl Fn(&ShardMetrics) -> &Count) -> u64 {
        // Wrapping: a gauge may be negative in one shard when another did the matching add.
        self.shards
            .iter()
            .fold(0u64, |sum, shard| sum.wrapping_add(of(shard).get()))
    }

    /// Resources of clients, refusals, and the length of uninterrupted work of a shard.
    fn limits(&self, e: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let budget = &self.budget;
        let (memory, load) = (&budget.memory, |count: &AtomicU64| count.load(Relaxed));
        for (name, help, value) in [
            (
                "slipstream_memory_used_bytes",
                "Memory charged to clients: bodies, answers, buffers, connections",
                memory.used(),
            ),
            (
                "slipstream_memory_max_bytes",
                "Limit of that memory (`live.memory_max`)",
                memory.max(),
            ),
        ] {
            e.encode_descriptor(name, help, None, MetricType::Gauge)?
                .encode_gauge(&(value as f64))?;
        }
        e.encode_descriptor(
            "slipstream_memory_refused",
            "Times that memory was refused to a client",
            None,
            MetricType::Counter,
        )?
        .encode_counter::<NoLabelSet, u64, f64>(&memory.refused(), None)?;
        let mut family = e.encode_descriptor(
            "slipstream_connections_closed",
            "Connections closed by a limit, by reason",
            None,
            MetricType::Counter,
        )?;
        for (reason, value) in [
            ("connections_max", load(&budget.refused_connections)),
            (
                "client_connections_max",
                load(&budget.refused_client_connections),
            ),
            ("idle", self.sum(|s| &s.connections.idle)),
            ("unread", self.sum(|s| &s.connections.unread)),
        ] {
            family
                .encode_family(&[("reason", reason)])?
                .encode_counter::<NoLabelSet, u64, f64>(&value, None)?;
        }
        let mut family = e.encode_descriptor(
            "slipstream_faults_injected",
            "Requests with a fault by rate (`[live.faults]`)",
            None,
            MetricType::Counter,
        )?;
        for (fault, count) in FAULTS.into_iter().zip(self.faults.counts()) {
            family
                .encode_family(&[("fault", fault)])?
                .encode_counter::<NoLabelSet, u64, f64>(&count, None)?;
        }
        self.seconds(
            e,
            "slipstream_shard_long_poll",
            "CPU time for which a shard worked on one thing, if over 0.2 ms",
            |s| &s.polls.long,
        )?;
        let max_ns = self.shards.iter().map(|s| s.polls.max_ns.get()).max();
        e.encode_descriptor(
            "slipstream_shard_poll_max",
            "Longest CPU time for which a shard worked on one thing",
            Some(&Unit::Seconds),
            MetricType::Gauge,
        )?
        .encode_gauge(&(max_ns.unwrap_or(0) as f64 / 1e9))
    }

    /// The encoder of the one metric of a family: vLLM's have labels, so that its dashboards find them.
    fn only<'e>(
        &'e self,
        name: &str,
        mut family: MetricEncoder<'e>,
        encode: impl Fn(MetricEncoder<'_>) -> fmt::Result,
    ) -> fmt::Result {
        if name.starts_with("vllm:") {
            encode(family.encode_family(&self.labels)?)
        } else {
            encode(family)
        }
    }

    /// Sequences finished, by reason.
    fn successes(&self, e: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let mut family = e.encode_descriptor(
            "vllm:request_success",
            "Sequences finished, by reason",
            None,
            MetricType::Counter,
        )?;
        for (reason, name) in FINISH.iter().enumerate() {
            let value = self.sum(|s| &s.finished[reason]);
            let mut labels = self.labels.clone();
            labels.push(("finished_reason", (*name).to_owned()));
            family
                .encode_family(&labels)?
                .encode_counter::<NoLabelSet, u64, f64>(&value, None)?;
        }
        Ok(())
    }

    /// The limit of connections.
    fn connections_max(&self, e: &mut DescriptorEncoder<'_>) -> fmt::Result {
        e.encode_descriptor(
            "slipstream_connections_max",
            "Limit of open connections: `live.connections_max`, or what the limit of open files has room for",
            None,
            MetricType::Gauge,
        )?
        .encode_gauge(&f64::from(self.budget.connections_max()))
    }

    /// Requests turned away, by reason.
    fn rejections(&self, e: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let mut family = e.encode_descriptor(
            "slipstream_requests_rejected",
            "Requests turned away, by reason",
            None,
            MetricType::Counter,
        )?;
        for (reason, name) in REJECTIONS.iter().enumerate() {
            let value = self.sum(|s| &s.rejected[reason]);
            family
                .encode_family(&[("reason", *name)])?
                .encode_counter::<NoLabelSet, u64, f64>(&value, None)?;
        }
        Ok(())
    }

    /// Streams ended before their time, by reason.
    fn cuts(&self, e: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let mut family = e.encode_descriptor(
            "slipstream_streams_cut",
            "Streams ended before their time, by reason",
            None,
            MetricType::Counter,
        )?;
        let cuts = [
            ("slow_reader", self.sum(|s| &s.streams_cut_slow)),
            ("buffer_full", self.sum(|s| &s.streams_cut_full)),
            ("deadline", self.sum(|s| &s.streams_cut_deadline)),
            ("stopping", self.sum(|s| &s.streams_cut_stop)),
            ("memory_max", self.sum(|s| &s.streams_cut_memory)),
            ("idle", self.sum(|s| &s.streams_cut_idle)),
        ];
        for (reason, value) in cuts {
            family
                .encode_family(&[("reason", reason)])?
                .encode_counter::<NoLabelSet, u64, f64>(&value, None)?;
        }
        Ok(())
    }

    /// Times between stages of a request.
    fn hand_overs(&self, e: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let mut family = e.encode_descriptor(
            "slipstream_hand_over",
            "Time between two stages of a request",
            Some(&Unit::Seconds),
            MetricType::Histogram,
        )?;
        for (i, (from, to)) in STAGE_PAIRS.iter().enumerate() {
            let merged = self.merged(|s| &s.between_stages[i], 1e9);
            family
                .encode_family(&[("from", from.name()), ("to", to.name())])?
                .encode_histogram::<NoLabelSet>(merged.sum, merged.count, &merged.buckets, None)?;
        }
        Ok(())
    }

    /// Prompt tokens, by source.
    fn prompt_sources(&self, e: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let cached = self.sum(|s| &s.tokens.cached);
        let help = "Prompt tokens by source; those of open requests are in none";
        let name = "vllm:prompt_tokens_by_source";
        let mut family = e.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (source, value) in [
            ("local_compute", self.sum(|s| &s.tokens.computed)),
            ("local_cache_hit", cached),
            ("external_kv_transfer", 0),
        ] {
            let mut labels = self.labels.clone();
            labels.push(("source", source.to_owned()));
            family
                .encode_family(&labels)?
                .encode_counter::<NoLabelSet, u64, f64>(&value, None)?;
        }
        Ok(())
    }

    /// Of caches that modelled engines do not have.
    fn absent_caches(&self, e: &mut DescriptorEncoder<'_>) -> fmt::Result {
        for (name, help) in [
            (
                "vllm:mm_cache_queries",
                "Images looked up in a cache: none is modelled",
            ),
            (
                "vllm:mm_cache_hits",
                "Images found in a cache: none is modelled",
            ),
        ] {
            e.encode_descriptor(name, help, None, MetricType::Counter)?
                .encode_family(&self.labels)?
                .encode_counter::<NoLabelSet, u64, f64>(&0, None)?;
        }
        Ok(())
    }

    fn counter(
        &self,
        encoder: &mut DescriptorEncoder<'_>,
        name: &str,
        help: &str,
        of: impl Fn(&ShardMetrics) -> &Count,
    ) -> fmt::Result {
        let family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        let sum = self.sum(of);
        self.only(name, family, |mut metric| {
            metric.encode_counter::<NoLabelSet, u64, f64>(&sum, None)
        })
    }

    fn gauge(
        &self,
        encoder: &mut DescriptorEncoder<'_>,
        name: &str,
        help: &str,
        of: impl Fn(&ShardMetrics) -> &Count,
    ) -> fmt::Result {
        let value = self.sum(of).cast_signed();
        encoder
            .encode_descriptor(name, help, None, MetricType::Gauge)?
            .encode_gauge(&value)
    }

    /// Over all shards, in units of `per_unit` recorded ones.
    fn merged(&self, of: impl Fn(&ShardMetrics) -> &Histogram, per_unit: f64) -> MergedHistogram {
        MergedHistogram::of(self.shards.iter().map(|shard| of(shard)), per_unit)
    }

    fn seconds(
        &self,
        encoder: &mut DescriptorEncoder<'_>,
        name: &str,
        help: &str,
        of: impl Fn(&ShardMetrics) -> &Histogram,
    ) -> fmt::Result {
        let merged = self.merged(of, 1e9);
        let family =
            encoder.encode_descriptor(name, help, Some(&Unit::Seconds), MetricType::Histogram)?;
        self.only(name, family, |mut metric| {
            metric.encode_histogram::<NoLabelSet>(merged.sum, merged.count, &merged.buckets, None)
        })
    }

    fn tokens(
        &self,
        encoder: &mut DescriptorEncoder<'_>,
        name: &str,
        help: &str,
        of: impl Fn(&ShardMetrics) -> &Histogram,
    ) -> fmt::Result {
        let merged = self.merged(of, 1.0);
        let family = encoder.encode_descriptor(name, help, None, MetricType::Histogram)?;
        self.only(name, family, |mut metric| {
            metric.encode_histogram::<NoLabelSet>(merged.sum, merged.count, &merged.buckets, None)
        })
    }
}

type CountOf = fn(&ShardMetrics) -> &Count;
type HistogramOf = fn(&ShardMetrics) -> &Histogram;

/// Metrics of the page: name, help, and where a shard counts.
enum Row {
    Counter(&'static str, &'static str, CountOf),
    Gauge(&'static str, &'static str, CountOf),
    /// Of nanoseconds.
    Seconds(&'static str, &'static str, HistogramOf),
    Tokens(&'static str, &'static str, HistogramOf),
    /// Metrics that have labels of their own, or no shard.
    Several(fn(&FrontendCollector, &mut DescriptorEncoder<'_>) -> fmt::Result),
}

/// The page, in its order.
const PAGE: &[Row] = &[
    // vLLM's names and meanings, so that its dashboards work.
    Row::Seconds("vllm:time_to_first_token", "Arrival to first token", |s| {
        &s.latency.ttft
    }),
    Row::Seconds("vllm:inter_token_latency", "Gap between tokens", |s| {
        &s.latency.itl
    }),
    Row::Seconds(
        "slipstream_stream_resume",
        "From the last token of a lost worker to the first of the worker that continues",
        |s| &s.latency.resume,
    ),
    Row::Seconds("vllm:e2e_request_latency", "Arrival to last token", |s| {
        &s.latency.e2e
    }),
    Row::Tokens(
        "vllm:request_prompt_tokens",
        "Prompt tokens per request",
        |s| &s.lengths.prompt,
    ),
    Row::Tokens(
        "vllm:request_generation_tokens",
        "Generated tokens per request",
        |s| &s.lengths.generation,
    ),
    Row::Counter("vllm:prompt_tokens", "Prompt tokens", |s| &s.tokens.prompt),
    Row::Counter("vllm:generation_tokens", "Generated tokens", |s| {
        &s.tokens.generation
    }),
    Row::Several(FrontendCollector::successes),
    Row::Seconds(
        "vllm:request_queue_time",
        "From arrival at an engine to admission",
        |s| &s.phases.queue,
    ),
    Row::Seconds(
        "vllm:request_prefill_time",
        "From admission to the end of the first token's step",
        |s| &s.phases.prefill,
    ),
    Row::Seconds(
        "vllm:request_decode_time",
        "From the first token to the last",
        |s| &s.phases.decode,
    ),
    Row::Seconds(
        "vllm:request_inference_time",
        "From admission to the last token",
        |s| &s.phases.inference,
    ),
    Row::Seconds(
        "vllm:request_time_per_output_token",
        "Time per output token after the first, per request",
        |s| &s.phases.per_token,
    ),
    Row::Tokens(
        "vllm:request_max_num_generation_tokens",
        "Tokens of the longest choice of a prompt",
        |s| &s.lengths.generation_max,
    ),
    Row::Tokens(
        "vllm:request_params_n",
        "Choices per prompt, as requested",
        |s| &s.lengths.choices,
    ),
    Row::Tokens(
        "vllm:request_params_max_tokens",
        "Limit of the answer's tokens, as requested or as fits",
        |s| &s.lengths.max_tokens,
    ),
    Row::Tokens(
        "vllm:request_num_preemptions",
        "Preemptions per request",
        |s| &s.lengths.preemptions,
    ),
    Row::Tokens(
        "vllm:request_prefill_kv_computed_tokens",
        "Prompt tokens per request that were not cached",
        |s| &s.lengths.computed,
    ),
    Row::Counter(
        "vllm:prompt_tokens_cached",
        "Prompt tokens found cached",
        |s| &s.tokens.cached,
    ),
    Row::Several(FrontendCollector::prompt_sources),
    Row::Several(FrontendCollector::absent_caches),
    Row::Several(|page, e| page.management.encode(e, &page.labels)),
    // Our own.
    Row::Seconds(
        "slipstream_pre_send",
        "From a routing decision to the request's being on its way",
        |s| &s.latency.pre_send,
    ),
    Row::Seconds(
        "slipstream_stream_register",
        "Opening the streams of a request",
        |s| &s.latency.stream_register,
    ),
    #[cfg(feature = "bench")]
    Row::Seconds(
        "slipstream_table_access",
        "Finding a stream, measured once a frame, with the clock's own cost",
        |s| &s.latency.table_access,
    ),
    Row::Seconds(
        "slipstream_call_home_lookup",
        "Finding the connection of a worker, with the clock's own cost",
        |s| &s.latency.call_home_lookup,
    ),
    Row::Counter("slipstream_http_requests", "HTTP requests", |s| &s.requests),
    Row::Counter("slipstream_connections", "Connections accepted", |s| {
        &s.connections.accepted
    }),
    Row::Several(FrontendCollector::connections_max),
    Row::Gauge("slipstream_connections_open", "Connections open", |s| {
        &s.connections.open
    }),
    Row::Several(FrontendCollector::limits),
    Row::Gauge("slipstream_streams_open", "Sequences under way", |s| {
        &s.streams_open
    }),
    Row::Gauge(
        "slipstream_requests_queued",
        "Requests that wait in the frontend, as every worker is busy",
        |s| &s.requests_queued,
    ),
    Row::Counter(
        "slipstream_cached_tokens",
        "Prompt tokens found cached",
        |s| &s.tokens.cached,
    ),
    Row::Several(FrontendCollector::rejections),
    Row::Counter(
        "slipstream_streams_paused",
        "Times a stream's rendering waited for its reader",
        |s| &s.streams_paused,
    ),
    Row::Several(FrontendCollector::cuts),
    Row::Counter(
        "slipstream_client_disconnects",
        "Clients gone mid-answer",
        |s| &s.disconnects,
    ),
    Row::Counter(
        "slipstream_engine_refusals",
        "Requests an engine refused",
        |s| &s.plane.refusals,
    ),
    Row::Counter(
        "slipstream_stale_entries",
        "Frame entries for streams that had ended here (cancelled ones)",
        |s| &s.plane.stale_entries,
    ),
    Row::Counter(
        "slipstream_foreign_entries",
        "Frame entries for streams that their sender does not run",
        |s| &s.plane.foreign_entries,
    ),
    Row::Counter(
        "slipstream_excess_tokens",
        "Tokens beyond those that were requested, not shown",
        |s| &s.plane.excess_tokens,
    ),
    Row::Counter("slipstream_frames", "Pass frames received", |s| {
        &s.plane.frames
    }),
    Row::Counter(
        "slipstream_streams_retried",
        "Streams given to a second worker, as the first did not take them or vanished",
        |s| &s.retries,
    ),
    Row::Counter(
        "slipstream_streams_lost",
        "Streams that ended because their worker vanished",
        |s| &s.streams_lost,
    ),
    Row::Counter(
        "slipstream_streams_resumed",
        "Times that a stream that had begun was given to another worker, as its own vanished",
        |s| &s.streams_resumed,
    ),
    Row::Counter(
        "slipstream_streams_not_resumed",
        "Streams that had begun when their worker vanished, and that no other continued",
        |s| &s.streams_not_resumed,
    ),
    Row::Counter(
        "slipstream_responses_stored",
        "Responses stored for requests that continue them",
        |s| &s.responses.stored,
    ),
    Row::Counter(
        "slipstream_responses_evicted",
        "Responses not stored, or removed from the store, for lack of room",
        |s| &s.responses.evicted,
    ),
    Row::Counter(
        "slipstream_prompts_apart",
        "Prompts sent to another worker than their answers",
        |s| &s.plane.prompts_apart,
    ),
    Row::Counter(
        "slipstream_kv_sent_bytes",
        "Bytes of keys and values sent from worker to worker",
        |s| &s.plane.kv_bytes,
    ),
    Row::Counter(
        "slipstream_streams_late",
        "Streams about to go to a worker that had just vanished",
        |s| &s.plane.late_starts,
    ),
    Row::Counter(
        "slipstream_plane_malformed",
        "Connections of workers cut for what they sent",
        |s| &s.plane.malformed,
    ),
    Row::Counter(
        "slipstream_plane_silent",
        "Connections of workers cut for their silence",
        |s| &s.plane.silent,
    ),
    Row::Counter("slipstream_flushes", "Body pieces handed to sockets", |s| {
        &s.flushes
    }),
    Row::Counter(
        "slipstream_direct_writes",
        "Body pieces that shards wrote themselves",
        |s| &s.direct_writes,
    ),
    Row::Several(FrontendCollector::hand_overs),
];

impl Collector for FrontendCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let e = &mut encoder;
        PAGE.iter().try_for_each(|row| match *row {
            Row::Counter(name, help, of) => self.counter(e, name, help, of),
            Row::Gauge(name, help, of) => self.gauge(e, name, help, of),
            Row::Seconds(name, help, of) => self.seconds(e, name, help, of),
            Row::Tokens(name, help, of) => self.tokens(e, name, help, of),
            Row::Several(encode) => encode(self, e),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use prometheus_client::encoding::text::encode;
    use prometheus_client::registry::Registry;

    #[test]
    fn shards_are_summed_and_buckets_are_cumulative() {
        let shards = vec![Arc::new(ShardMetrics::new()), Arc::new(ShardMetrics::new())];
        shards[0].latency.ttft.observe(1_500); // between 1 and 2 µs
        shards[1].latency.ttft.observe(1_000); // a bound belongs to its bucket
        shards[1].latency.ttft.observe(u64::MAX / 2);
        shards[0].on_rejected(Rejection::Busy);
        shards[1].on_rejected(Rejection::Busy);
        let mut registry = Registry::default();
        let budget = Budget::new(crate::Limits::default());
        registry.register_collector(Box::new(FrontendCollector {
            shards,
            budget,
            faults: Arc::default(),
            management: Arc::default(),
            labels: vec![("model_name", "m".to_owned()), ("engine", "0".to_owned())],
        }));
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        let ttft = |le: &str| {
            let key = format!(
                "vllm:time_to_first_token_seconds_bucket{{le=\"{le}\",model_name=\"m\",engine=\"0\"}} "
            );
            text.lines()
                .find_map(|l| l.strip_prefix(&key))
                .map(str::to_owned)
        };
        assert_eq!(
            ttft("1e-6").or(ttft("0.000001")).as_deref(),
            Some("1"),
            "{text}"
        );
        assert_eq!(ttft("2e-6").or(ttft("0.000002")).as_deref(), Some("2"));
        assert_eq!(ttft("+Inf").as_deref(), Some("3"));
        assert!(
            text.contains("slipstream_requests_rejected_total{reason=\"busy\"} 2"),
            "{text}"
        );
    }
}
