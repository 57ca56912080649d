//! Exposition of a set of workers.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Unit;
use slipstream_base::count::MergedHistogram;

use crate::WorkerSet;
use crate::callhome::CallHomeStats;
use crate::stats::{RankStats, ThreadStats};

/// Name, help, and value of a counter.
type Counters<S, const N: usize> = [(&'static str, &'static str, fn(&S) -> f64); N];

/// Of every rank: vLLM's, then our own. vLLM's names and meanings: `vllm/v1/metrics/loggers.py`.
const RANK_COUNTERS: Counters<RankStats, 19> = [
    (
        "vllm:prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache",
        |s| s.prefix_query_tokens.get() as f64,
    ),
    (
        "vllm:prefix_cache_hits",
        "Prompt tokens found in the prefix cache",
        |s| s.prefix_hit_tokens.get() as f64,
    ),
    // vLLM counts what its KV connector finds. Prompts that come from prefill workers are not counted here.
    (
        "vllm:external_prefix_cache_queries",
        "Prompt tokens looked up in host memory, as the GPUs do not cache them",
        |s| s.host_query_tokens.get() as f64,
    ),
    (
        "vllm:external_prefix_cache_hits",
        "Prompt tokens found in host memory",
        |s| s.host_hit_tokens.get() as f64,
    ),
    ("vllm:num_preemptions", "Preemptions", |s| {
        s.preemptions.get() as f64
    }),
    ("slipstream_rank_passes", "Forward passes", |s| {
        s.passes.get() as f64
    }),
    (
        "slipstream_rank_extrapolated_passes",
        "Forward passes outside the table of step times",
        |s| s.extrapolated_passes.get() as f64,
    ),
    (
        "slipstream_rank_prompt_tokens",
        "Prompt tokens of sequences whose prompt was computed here",
        |s| s.prompt_tokens.get() as f64,
    ),
    (
        "slipstream_rank_generation_tokens",
        "Tokens generated",
        |s| s.generation_tokens.get() as f64,
    ),
    (
        "slipstream_rank_finished_stop",
        "Sequences that ended by themselves",
        |s| s.finished_stop.get() as f64,
    ),
    (
        "slipstream_rank_finished_length",
        "Sequences that reached their length",
        |s| s.finished_length.get() as f64,
    ),
    (
        "slipstream_rank_finished_abort",
        "Sequences stopped or killed",
        |s| s.finished_abort.get() as f64,
    ),
    (
        "slipstream_rank_prompts_handed_over",
        "Prompts computed here and fetched by others",
        |s| s.prompts_handed_over.get() as f64,
    ),
    (
        "slipstream_rank_prompts_received",
        "Prompts that came from others",
        |s| s.prompts_received.get() as f64,
    ),
    ("slipstream_rank_refused", "Requests refused", |s| {
        s.refused.get() as f64
    }),
    (
        "slipstream_rank_fast_passes",
        "Passes delivered without a timer",
        |s| s.fast_passes.get() as f64,
    ),
    (
        "slipstream_rank_timed_passes",
        "Passes that waited for their end",
        |s| s.timed_passes.get() as f64,
    ),
    (
        "slipstream_rank_late_anchors",
        "Times too late to catch up",
        |s| s.late_anchors.get() as f64,
    ),
    (
        "slipstream_rank_kv_resyncs",
        "KV snapshots published",
        |s| s.resyncs.get() as f64,
    ),
];

/// Of ranks that draft tokens.
const DRAFT_COUNTERS: Counters<RankStats, 3> = [
    ("vllm:spec_decode_num_drafts", "Drafts verified", |s| {
        s.drafts.get() as f64
    }),
    (
        "vllm:spec_decode_num_draft_tokens",
        "Tokens of those drafts",
        |s| s.draft_tokens.get() as f64,
    ),
    (
        "vllm:spec_decode_num_accepted_tokens",
        "Tokens of those drafts that were accepted",
        |s| s.accepted_tokens.get() as f64,
    ),
];

/// Of every engine thread.
const THREAD_COUNTERS: Counters<ThreadStats, 13> = [
    (
        "slipstream_engine_thread_received",
        "Requests and controls taken",
        |s| s.received.get() as f64,
    ),
    ("slipstream_engine_thread_frames", "Frames sent", |s| {
        s.frames.get() as f64
    }),
    (
        "slipstream_engine_thread_hosted",
        "Rounds that a shard's thread ran",
        |s| s.hosted.get() as f64,
    ),
    ("slipstream_engine_thread_sleeps", "Times asleep", |s| {
        s.sleeps.get() as f64
    }),
    (
        "slipstream_engine_thread_frames_apart",
        "Times that one shard took no frames: its own waited while other shards took theirs",
        |s| s.apart.get() as f64,
    ),
    (
        "slipstream_engine_thread_given_up",
        "Streams ended because too much waited for their shard",
        |s| s.given_up.get() as f64,
    ),
    (
        "slipstream_engine_thread_stalls",
        "Waits for any shard to take a frame",
        |s| s.stalls.get() as f64,
    ),
    (
        "slipstream_engine_thread_stalled_seconds",
        "Time of those waits",
        |s| s.stalled_ns.get() as f64 / 1e9,
    ),
    (
        "slipstream_engine_thread_orphaned",
        "Streams of shards that are gone",
        |s| s.orphaned.get() as f64,
    ),
    (
        "slipstream_engine_thread_paused",
        "Times a stream had used up its credit",
        |s| s.paused.get() as f64,
    ),
    (
        "slipstream_engine_thread_superseded",
        "Streams whose slot was reused",
        |s| s.superseded.get() as f64,
    ),
    (
        "slipstream_engine_thread_overruns",
        "Streams ended because more input came than there was room for",
        |s| s.overruns.get() as f64,
    ),
    (
        "slipstream_engine_thread_misaddressed",
        "Messages that name no shard",
        |s| s.misaddressed.get() as f64,
    ),
];

/// The workers' part of `/metrics`: by rank under vLLM's names if vLLM has one, and under our
/// own. A scrape reads atomics; no engine thread takes part.
#[derive(Debug)]
pub struct WorkerCollector {
    model: String,
    ranks: Vec<Arc<RankStats>>,
    threads: Vec<Arc<ThreadStats>>,
}

impl WorkerCollector {
    /// A collector for `workers`, which serve `model`.
    pub fn new(workers: &WorkerSet, model: &str) -> WorkerCollector {
        WorkerCollector {
            model: model.to_owned(),
            ranks: workers.ranks().to_vec(),
            threads: workers.thread_stats().collect(),
        }
    }

    fn labels(&self, stats: &RankStats) -> Vec<(&'static str, String)> {
        vec![
            ("model_name", self.model.clone()),
            ("worker", stats.rank.worker.to_string()),
            ("engine", stats.rank.dp_rank.to_string()),
        ]
    }

    fn by_rank(
        &self,
        encoder: &mut DescriptorEncoder<'_>,
        name: &str,
        help: &str,
        kind: MetricType,
        of: impl Fn(&RankStats) -> f64,
    ) -> fmt::Result {
        let mut family = encoder.encode_descriptor(name, help, None, kind)?;
        for stats in &self.ranks {
            let labels = self.labels(stats);
            let mut metric = family.encode_family(&labels)?;
            match kind {
                MetricType::Counter => {
                    metric.encode_counter::<NoLabelSet, f64, f64>(&of(stats), None)?;
                }
                _ => metric.encode_gauge(&of(stats))?,
            }
        }
        Ok(())
    }

    fn by_thread(
        &self,
        encoder: &mut DescriptorEncoder<'_>,
        name: &str,
        help: &str,
        of: impl Fn(&ThreadStats) -> f64,
    ) -> fmt::Result {
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (thread, stats) in self.threads.iter().enumerate() {
            let thread = thread.to_string();
            family
                .encode_family(&[("thread", thread.as_str())])?
                .encode_counter::<NoLabelSet, f64, f64>(&of(stats), None)?;
        }
        Ok(())
    }

    fn handover(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let times = self.threads.iter().map(|stats| &stats.handover.0);
        let MergedHistogram {
            sum,
            count,
            buckets,
        } = MergedHistogram::of(times, 1e9);
        encoder
            .encode_descriptor(
                "slipstream_request_handover",
                "Time of requests from shard to engine thread",
                Some(&Unit::Seconds),
                MetricType::Histogram,
            )?
            .encode_histogram::<NoLabelSet>(sum, count, &buckets, None)
    }
}

impl Collector for WorkerCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        use MetricType::{Counter, Gauge};
        let e = &mut encoder;
        // Names and meanings: vLLM, `vllm/v1/metrics/loggers.py`. `engine` is also the data-parallel
        // rank there; `worker` is ours.
        self.by_rank(
            e,
            "vllm:num_requests_running",
            "Sequences running",
            Gauge,
            |s| s.running.get() as f64,
        )?;
        self.by_rank(
            e,
            "vllm:num_requests_waiting",
            "Sequences waiting",
            Gauge,
            |s| s.waiting.get() as f64,
        )?;
        let help = "Share of the KV cache held by sequences, 0 to 1";
        self.by_rank(
            e,
            "vllm:kv_cache_usage_perc",
            help,
            Gauge,
            RankStats::kv_usage,
        )?;
        // As in vLLM, engines that draft nothing do not have them.
        if self.ranks.iter().any(|s| s.drafts.get() > 0) {
            for (name, help, of) in DRAFT_COUNTERS {
                self.by_rank(e, name, help, Counter, of)?;
            }
        }
        let help = "Sequences waiting, by reason: modelled engines defer none";
        let name = "vllm:num_requests_waiting_by_reason";
        let mut family = e.encode_descriptor(name, help, None, Gauge)?;
        for stats in &self.ranks {
            for (reason, waiting) in [("capacity", stats.waiting.get()), ("deferred", 0)] {
                let mut labels = self.labels(stats);
                labels.push(("reason", reason.to_owned()));
                family
                    .encode_family(&labels)?
                    .encode_gauge(&(waiting as f64))?;
            }
        }
        let help = "Tokens per engine step: computed ones of prompts, and generated ones";
        let name = "vllm:iteration_tokens_total";
        let mut family = e.encode_descriptor(name, help, None, MetricType::Histogram)?;
        for stats in &self.ranks {
            let MergedHistogram {
                sum,
                count,
                buckets,
            } = MergedHistogram::of([&stats.pass_tokens.0], 1.0);
            family
                .encode_family(&self.labels(stats))?
                .encode_histogram::<NoLabelSet>(sum, count, &buckets, None)?;
        }
        // Our own.
        self.by_rank(
            e,
            "slipstream_rank_ready",
            "Whether the rank takes requests",
            Gauge,
            |s| f64::from(u8::from(s.is_ready())),
        )?;
        for (name, help, of) in RANK_COUNTERS {
            self.by_rank(e, name, help, Counter, of)?;
        }
        for (name, help, of) in THREAD_COUNTERS {
            self.by_thread(e, name, help, of)?;
        }
        self.handover(e)
    }
}

/// The connections to frontends in `/metrics` of a worker process.
#[derive(Debug)]
pub struct CallHomeCollector(pub Arc<CallHomeStats>);

/// Name, help, and the counter.
type OfPlane = (&'static str, &'static str, fn(&CallHomeStats) -> &AtomicU64);

impl Collector for CallHomeCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let stats = &self.0;
        encoder
            .encode_descriptor(
                "slipstream_callhome_open",
                "Connections to shards, open now",
                None,
                MetricType::Gauge,
            )?
            .encode_gauge(&(stats.open.load(Relaxed) as f64))?;
        let counters: [OfPlane; 10] = [
            ("connected", "Connections greeted", |s| &s.connected),
            ("failed", "Attempts that failed before a greeting", |s| {
                &s.failed
            }),
            ("rejected", "Greetings that were rejected", |s| &s.rejected),
            ("lost", "Connections that ended", |s| &s.lost),
            (
                "silent",
                "Of those: the peer was silent or did not read",
                |s| &s.silent,
            ),
            (
                "malformed",
                "Of those: the peer sent bytes that are no frame",
                |s| &s.malformed,
            ),
            ("links_short", "Times that no link was free", |s| {
                &s.links_short
            }),
            (
                "refused",
                "Requests refused as an engine thread's inbox was full",
                |s| &s.refused,
            ),
            ("frames", "Frames of passes sent", |s| &s.frames),
            ("pass_bytes", "Bytes of passes sent", |s| &s.pass_bytes),
        ];
        for (name, help, of) in counters {
            encoder
                .encode_descriptor(
                    &format!("slipstream_callhome_{name}"),
                    help,
                    None,
                    MetricType::Counter,
                )?
                .encode_counter::<NoLabelSet, u64, f64>(&of(stats).load(Relaxed), None)?;
        }
        Ok(())
    }
}
