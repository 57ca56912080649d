//! Metrics of a set of workers.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use slipstream_metrics::{Collector, Family, Samples};

use crate::WorkerSet;
use crate::callhome::CallHomeStats;
use crate::stats::{RankStats, ThreadStats};

/// The workers' part of `/metrics`: by rank under vLLM's names if vLLM has one, and under our
/// own. A scrape reads atomics; no engine thread takes part.
pub fn collector(workers: &WorkerSet, model: &str) -> Box<dyn Collector> {
    let workers = Workers {
        model: model.into(),
        ranks: workers.ranks().into(),
        threads: workers.thread_stats().collect(),
    };
    slipstream_metrics::collector(workers, Workers::clone, FAMILIES)
}

/// The connections to frontends in `/metrics` of a worker process.
pub fn call_home_collector(stats: Arc<CallHomeStats>) -> Box<dyn Collector> {
    slipstream_metrics::collector(stats, Arc::clone, CALL_HOME)
}

#[derive(Clone)]
struct Workers {
    model: Arc<str>,
    ranks: Arc<[Arc<RankStats>]>,
    threads: Arc<[Arc<ThreadStats>]>,
}

impl Workers {
    /// Calls `add` with each rank's labels, to which it may add one.
    fn each(&self, mut add: impl FnMut(&mut Vec<(&str, &str)>, &RankStats)) {
        for stats in &*self.ranks {
            let worker = stats.rank.worker.to_string();
            let engine = stats.rank.dp_rank.to_string();
            // `engine` is also the data-parallel rank in vLLM; `worker` is ours.
            let mut labels = vec![
                ("model_name", &*self.model),
                ("worker", &worker),
                ("engine", &engine),
            ];
            add(&mut labels, stats);
        }
    }

    fn by_rank(&self, samples: &mut Samples<'_>, of: fn(&RankStats) -> f64) {
        self.each(|labels, rank| samples.add_real(labels, of(rank)));
    }

    fn by_thread(&self, samples: &mut Samples<'_>, of: fn(&ThreadStats) -> f64) {
        for (thread, stats) in self.threads.iter().enumerate() {
            samples.add_real(&[("thread", &thread.to_string())], of(stats));
        }
    }

    /// Whether any rank drafts tokens. As in vLLM, engines that draft nothing do not have their families.
    fn drafts(&self) -> bool {
        self.ranks
            .iter()
            .any(|rank| rank.speculation.drafts.get() > 0)
    }
}

/// The page, in its order. vLLM's names and meanings: `vllm/v1/metrics/loggers.py`.
const FAMILIES: &[Family<Workers>] = &[
    Family::gauge(
        "vllm:num_requests_running",
        "Sequences running",
        |of, samples| {
            of.by_rank(samples, |rank| rank.running.get() as f64);
        },
    ),
    Family::gauge(
        "vllm:num_requests_waiting",
        "Sequences waiting",
        |of, samples| {
            of.by_rank(samples, |rank| rank.waiting.get() as f64);
        },
    ),
    Family::gauge(
        "vllm:kv_cache_usage_perc",
        "Share of the KV cache held by sequences, 0 to 1",
        |of, samples| of.by_rank(samples, RankStats::kv_usage),
    ),
    Family::counter(
        "vllm:spec_decode_num_drafts",
        "Drafts verified",
        |of: &Workers, samples| of.by_rank(samples, |rank| rank.speculation.drafts.get() as f64),
    )
    .only_if(Workers::drafts),
    Family::counter(
        "vllm:spec_decode_num_draft_tokens",
        "Tokens of those drafts",
        |of: &Workers, samples| of.by_rank(samples, |rank| rank.speculation.tokens.get() as f64),
    )
    .only_if(Workers::drafts),
    Family::counter(
        "vllm:spec_decode_num_accepted_tokens",
        "Tokens of those drafts that were accepted",
        |of: &Workers, samples| of.by_rank(samples, |rank| rank.speculation.accepted.get() as f64),
    )
    .only_if(Workers::drafts),
    Family::gauge(
        "vllm:num_requests_waiting_by_reason",
        "Sequences waiting, by reason: modelled engines defer none",
        |of, samples| {
            of.each(|labels, rank| {
                labels.push(("reason", "capacity"));
                samples.add(labels, rank.waiting.get());
                labels[3].1 = "deferred";
                samples.add(labels, 0);
            });
        },
    ),
    Family::histogram(
        "vllm:iteration_tokens_total",
        "Tokens per engine step: computed ones of prompts, and generated ones",
        |of, samples| {
            of.each(|labels, rank| samples.add_merged(labels, [&rank.pass_tokens.0], 1.0));
        },
    ),
    Family::gauge(
        "slipstream_rank_ready",
        "Whether the rank takes requests",
        |of, samples| of.by_rank(samples, |rank| u8::from(rank.is_ready()).into()),
    ),
    Family::counter(
        "vllm:prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache",
        |of, samples| of.by_rank(samples, |rank| rank.prefix_query_tokens.get() as f64),
    ),
    Family::counter(
        "vllm:prefix_cache_hits",
        "Prompt tokens found in the prefix cache",
        |of, samples| of.by_rank(samples, |rank| rank.prefix_hit_tokens.get() as f64),
    ),
    // vLLM counts what its KV connector finds. Prompts that come from prefill workers are not counted here.
    Family::counter(
        "vllm:external_prefix_cache_queries",
        "Prompt tokens looked up in host memory, as the GPUs do not cache them",
        |of, samples| of.by_rank(samples, |rank| rank.host.query_tokens.get() as f64),
    ),
    Family::counter(
        "vllm:external_prefix_cache_hits",
        "Prompt tokens found in host memory",
        |of, samples| of.by_rank(samples, |rank| rank.host.hit_tokens.get() as f64),
    ),
    Family::counter("vllm:num_preemptions", "Preemptions", |of, samples| {
        of.by_rank(samples, |rank| rank.preemptions.get() as f64);
    }),
    Family::counter("slipstream_rank_passes", "Forward passes", |of, samples| {
        of.by_rank(samples, |rank| rank.passes.get() as f64);
    }),
    Family::counter(
        "slipstream_rank_extrapolated_passes",
        "Forward passes outside the table of step times",
        |of, samples| of.by_rank(samples, |rank| rank.extrapolated_passes.get() as f64),
    ),
    Family::counter(
        "slipstream_rank_prompt_tokens",
        "Prompt tokens of sequences whose prompt was computed here",
        |of, samples| of.by_rank(samples, |rank| rank.prompt_tokens.get() as f64),
    ),
    Family::counter(
        "slipstream_rank_generation_tokens",
        "Tokens generated",
        |of, samples| of.by_rank(samples, |rank| rank.generation_tokens.get() as f64),
    ),
    Family::counter(
        "slipstream_rank_finished_stop",
        "Sequences that ended by themselves",
        |of, samples| of.by_rank(samples, |rank| rank.finished_stop.get() as f64),
    ),
    Family::counter(
        "slipstream_rank_finished_length",
        "Sequences that reached their length",
        |of, samples| of.by_rank(samples, |rank| rank.finished_length.get() as f64),
    ),
    Family::counter(
        "slipstream_rank_finished_abort",
        "Sequences stopped or killed",
        |of, samples| of.by_rank(samples, |rank| rank.finished_abort.get() as f64),
    ),
    Family::counter(
        "slipstream_rank_prompts_handed_over",
        "Prompts computed here and fetched by others",
        |of, samples| of.by_rank(samples, |rank| rank.prompts_handed_over.get() as f64),
    ),
    Family::counter(
        "slipstream_rank_prompts_received",
        "Prompts that came from others",
        |of, samples| of.by_rank(samples, |rank| rank.prompts_received.get() as f64),
    ),
    Family::counter(
        "slipstream_rank_refused",
        "Requests refused",
        |of, samples| of.by_rank(samples, |rank| rank.refused.get() as f64),
    ),
    Family::counter(
        "slipstream_rank_fast_passes",
        "Passes delivered without a timer",
        |of, samples| of.by_rank(samples, |rank| rank.fast_passes.get() as f64),
    ),
    Family::counter(
        "slipstream_rank_timed_passes",
        "Passes that waited for their end",
        |of, samples| of.by_rank(samples, |rank| rank.timed_passes.get() as f64),
    ),
    Family::counter(
        "slipstream_rank_late_anchors",
        "Times too late to catch up",
        |of, samples| of.by_rank(samples, |rank| rank.late_anchors.get() as f64),
    ),
    Family::counter(
        "slipstream_rank_kv_resyncs",
        "KV snapshots published",
        |of, samples| of.by_rank(samples, |rank| rank.resyncs.get() as f64),
    ),
    Family::counter(
        "slipstream_engine_thread_received",
        "Requests and controls taken",
        |of, samples| of.by_thread(samples, |thread| thread.received.get() as f64),
    ),
    Family::counter(
        "slipstream_engine_thread_frames",
        "Frames sent",
        |of, samples| of.by_thread(samples, |thread| thread.frames.get() as f64),
    ),
    Family::counter(
        "slipstream_engine_thread_hosted",
        "Rounds that a shard's thread ran",
        |of, samples| of.by_thread(samples, |thread| thread.hosted.get() as f64),
    ),
    Family::counter(
        "slipstream_engine_thread_sleeps",
        "Times asleep",
        |of, samples| of.by_thread(samples, |thread| thread.sleeps.get() as f64),
    ),
    Family::counter(
        "slipstream_engine_thread_frames_apart",
        "Times that one shard took no frames: its own waited while other shards took theirs",
        |of, samples| of.by_thread(samples, |thread| thread.apart.get() as f64),
    ),
    Family::counter(
        "slipstream_engine_thread_given_up",
        "Streams ended because too much waited for their shard",
        |of, samples| of.by_thread(samples, |thread| thread.given_up.get() as f64),
    ),
    Family::counter(
        "slipstream_engine_thread_stalls",
        "Waits for any shard to take a frame",
        |of, samples| of.by_thread(samples, |thread| thread.stalls.get() as f64),
    ),
    Family::counter(
        "slipstream_engine_thread_stalled_seconds",
        "Time of those waits",
        |of, samples| of.by_thread(samples, |thread| thread.stalled_ns.get() as f64 / 1e9),
    ),
    Family::counter(
        "slipstream_engine_thread_orphaned",
        "Streams of shards that are gone",
        |of, samples| of.by_thread(samples, |thread| thread.orphaned.get() as f64),
    ),
    Family::counter(
        "slipstream_engine_thread_paused",
        "Times a stream had used up its credit",
        |of, samples| of.by_thread(samples, |thread| thread.paused.get() as f64),
    ),
    Family::counter(
        "slipstream_engine_thread_superseded",
        "Streams whose slot was reused",
        |of, samples| of.by_thread(samples, |thread| thread.superseded.get() as f64),
    ),
    Family::counter(
        "slipstream_engine_thread_overruns",
        "Streams ended because more input came than there was room for",
        |of, samples| of.by_thread(samples, |thread| thread.overruns.get() as f64),
    ),
    Family::counter(
        "slipstream_engine_thread_misaddressed",
        "Messages that name no shard",
        |of, samples| of.by_thread(samples, |thread| thread.misaddressed.get() as f64),
    ),
    Family::histogram(
        "slipstream_request_handover",
        "Time of requests from shard to engine thread",
        |of: &Workers, samples| {
            let times = of.threads.iter().map(|thread| &thread.handover.0);
            samples.add_merged(&[], times, 1e9);
        },
    )
    .in_seconds(),
];

const CALL_HOME: &[Family<Arc<CallHomeStats>>] = &[
    Family::gauge(
        "slipstream_callhome_open",
        "Connections to shards, open now",
        |of, samples| samples.add(&[], of.open.load(Relaxed)),
    ),
    Family::total(
        "slipstream_callhome_connected",
        "Connections greeted",
        |of| of.connected.load(Relaxed),
    ),
    Family::total(
        "slipstream_callhome_failed",
        "Attempts that failed before a greeting",
        |of| of.failed.load(Relaxed),
    ),
    Family::total(
        "slipstream_callhome_rejected",
        "Greetings that were rejected",
        |of| of.rejected.load(Relaxed),
    ),
    Family::total("slipstream_callhome_lost", "Connections that ended", |of| {
        of.lost.load(Relaxed)
    }),
    Family::total(
        "slipstream_callhome_silent",
        "Of those: the peer was silent or did not read",
        |of| of.silent.load(Relaxed),
    ),
    Family::total(
        "slipstream_callhome_malformed",
        "Of those: the peer sent bytes that are no frame",
        |of| of.malformed.load(Relaxed),
    ),
    Family::total(
        "slipstream_callhome_links_short",
        "Times that no link was free",
        |of| of.links_short.load(Relaxed),
    ),
    Family::total(
        "slipstream_callhome_refused",
        "Requests refused as an engine thread's inbox was full",
        |of| of.refused.load(Relaxed),
    ),
    Family::total(
        "slipstream_callhome_frames",
        "Frames of passes sent",
        |of| of.frames.load(Relaxed),
    ),
    Family::total(
        "slipstream_callhome_pass_bytes",
        "Bytes of passes sent",
        |of| of.pass_bytes.load(Relaxed),
    ),
];
