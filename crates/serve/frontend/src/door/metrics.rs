//! Counters and histograms of a shard, and their families on the page of all shards.
//!
//! Each shard writes its own set and no other thread does, so a count is a load and a store, not a
//! locked instruction; a scrape reads all sets.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use slipstream_base::count::powers_of_two;
pub(crate) use slipstream_base::count::{Count, Histogram};
use slipstream_base::{FinishReason, Stage, StageTimes};
use slipstream_metrics::{Collector, Family, Samples};

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

/// Declares what a shard counts, each count once: kind, field, and its family on the page. A `part` is read by hand.
macro_rules! counters {
    ($(
        $(#[$doc:meta])*
        $Group:ident of |$shard:ident| $path:expr => {
            $($(#[$about:meta])* $kind:ident $field:ident $($name:literal $help:literal)?,)*
        } $(+ { $($more:ident: $More:ty = $new:expr,)* })?
    )*) => {
        $(
            $(#[$doc])*
            pub(crate) struct $Group {
                $($(#[$about])* $(#[doc = $help])? pub(crate) $field: kind!(type $kind),)*
                $($(pub(crate) $more: $More,)*)?
            }

            impl $Group {
                pub(crate) fn new() -> $Group {
                    $Group {
                        $($field: kind!(new $kind),)*
                        $($($more: $new,)*)?
                    }
                }
            }
        )*

        /// The families of all counters.
        const COUNTERS: &[Family<Page>] = &[
            $($($(kind!(family $kind $name $help |$shard: &ShardMetrics| &$path.$field),)?)*)*
        ];
    };
}

/// A kind of [`counters`]: type, new value, family.
macro_rules! kind {
    (type counter) => {
        Count
    };
    (type gauge) => {
        Count
    };
    (type part) => {
        Count
    };
    (type $histogram:ident) => {
        Histogram
    };
    (new seconds) => {
        Histogram::new(&BOUNDS_NS)
    };
    (new steps) => {
        Histogram::new(&BOUNDS_STEP_NS)
    };
    (new tokens) => {
        Histogram::new(&BOUNDS_TOKENS)
    };
    (new $count:ident) => {
        Count::default()
    };
    (family counter $name:literal $help:literal $of:expr) => {
        Family::counter($name, $help, |page: &Page, samples| {
            page.count(samples, $of)
        })
    };
    (family gauge $name:literal $help:literal $of:expr) => {
        Family::gauge($name, $help, |page: &Page, samples| {
            page.gauge(samples, $of)
        })
    };
    (family tokens $name:literal $help:literal $of:expr) => {
        Family::histogram($name, $help, |page: &Page, samples| {
            page.histogram(samples, 1.0, $of)
        })
    };
    (family $times:ident $name:literal $help:literal $of:expr) => {
        Family::histogram($name, $help, |page: &Page, samples| {
            page.histogram(samples, 1e9, $of)
        })
        .in_seconds()
    };
}

counters! {
    /// Connections of clients.
    ConnectionCounts of |shard| shard.connections => {
        counter accepted "slipstream_connections" "Connections accepted",
        gauge open "slipstream_connections_open" "Connections open",
        /// Connections ended as their client had no request, or read no answer.
        part idle,
        part unread,
    }

    /// How long a shard works on one thing.
    PollTimes of |shard| shard.polls => {
        /// CPU time of the longest poll of a task, ns.
        part max_ns,
        seconds long "slipstream_shard_long_poll" "CPU time for which a shard worked on one thing, if over 0.2 ms",
    }

    /// What comes from workers, and goes to them.
    PlaneCounts of |shard| shard.plane => {
        counter frames "slipstream_frames" "Pass frames received",
        counter refusals "slipstream_engine_refusals" "Requests an engine refused",
        counter stale_entries "slipstream_stale_entries" "Frame entries for streams that had ended here (cancelled ones)",
        counter foreign_entries "slipstream_foreign_entries" "Frame entries for streams that their sender does not run",
        counter excess_tokens "slipstream_excess_tokens" "Tokens beyond those that were requested, not shown",
        counter prompts_apart "slipstream_prompts_apart" "Prompts sent to another worker than their answers",
        counter kv_bytes "slipstream_kv_sent_bytes" "Bytes of keys and values sent from worker to worker",
        counter late_starts "slipstream_streams_late" "Streams about to go to a worker that had just vanished",
        counter malformed "slipstream_plane_malformed" "Connections of workers cut for what they sent",
        counter silent "slipstream_plane_silent" "Connections of workers cut for their silence",
    }

    /// Responses that later requests continue.
    ResponseCounts of |shard| shard.responses => {
        counter stored "slipstream_responses_stored" "Responses stored for requests that continue them",
        counter evicted "slipstream_responses_evicted" "Responses not stored, or removed from the store, for lack of room",
    }

    /// Tokens of all requests.
    TokenTotals of |shard| shard.tokens => {
        counter prompt "vllm:prompt_tokens" "Prompt tokens",
        counter generation "vllm:generation_tokens" "Generated tokens",
        counter cached "vllm:prompt_tokens_cached" "Prompt tokens found cached",
        part computed,
    }

    /// Latencies that clients see, and those of steps on the way.
    Latencies of |shard| shard.latency => {
        seconds ttft "vllm:time_to_first_token" "Arrival to first token",
        seconds itl "vllm:inter_token_latency" "Gap between tokens",
        seconds resume "slipstream_stream_resume" "From the last token of a lost worker to the first of the worker that continues",
        seconds e2e "vllm:e2e_request_latency" "Arrival to last token",
        steps pre_send "slipstream_pre_send" "From a routing decision to the request's being on its way",
        steps stream_register "slipstream_stream_register" "Opening the streams of a request",
        steps call_home_lookup "slipstream_call_home_lookup" "Finding the connection of a worker, with the clock's own cost",
    }

    /// Sizes of requests that came to their end, tokens and choices.
    Lengths of |shard| shard.lengths => {
        tokens prompt "vllm:request_prompt_tokens" "Prompt tokens per request",
        tokens generation "vllm:request_generation_tokens" "Generated tokens per request",
        tokens generation_max "vllm:request_max_num_generation_tokens" "Tokens of the longest choice of a prompt",
        tokens choices "vllm:request_params_n" "Choices per prompt, as requested",
        tokens max_tokens "vllm:request_params_max_tokens" "Limit of the answer's tokens, as requested or as fits",
        tokens preemptions "vllm:request_num_preemptions" "Preemptions per request",
        tokens computed "vllm:request_prefill_kv_computed_tokens" "Prompt tokens per request that were not cached",
    }

    /// Times of the phases of a sequence.
    PhaseTimes of |shard| shard.phases => {
        seconds queue "vllm:request_queue_time" "From arrival at an engine to admission",
        seconds prefill "vllm:request_prefill_time" "From admission to the end of the first token's step",
        seconds decode "vllm:request_decode_time" "From the first token to the last",
        seconds inference "vllm:request_inference_time" "From admission to the last token",
        seconds per_token "vllm:request_time_per_output_token" "Time per output token after the first, per request",
    }

    /// Counters of one shard.
    ShardMetrics of |shard| shard => {
        counter requests "slipstream_http_requests" "HTTP requests",
        gauge streams_open "slipstream_streams_open" "Sequences under way",
        gauge requests_queued "slipstream_requests_queued" "Requests that wait in the frontend, as every worker is busy",
        counter streams_paused "slipstream_streams_paused" "Times a stream's rendering waited for its reader",
        part streams_cut_slow,
        part streams_cut_full,
        part streams_cut_deadline,
        part streams_cut_stop,
        part streams_cut_memory,
        part streams_cut_idle,
        counter disconnects "slipstream_client_disconnects" "Clients gone mid-answer",
        counter retries "slipstream_streams_retried" "Streams given to a second worker, as the first did not take them or vanished",
        counter streams_lost "slipstream_streams_lost" "Streams that ended because their worker vanished",
        counter streams_resumed "slipstream_streams_resumed" "Times that a stream that had begun was given to another worker, as its own vanished",
        counter streams_not_resumed "slipstream_streams_not_resumed" "Streams that had begun when their worker vanished, and that no other continued",
        counter flushes "slipstream_flushes" "Body pieces handed to sockets",
        counter direct_writes "slipstream_direct_writes" "Body pieces that shards wrote themselves",
    } + {
        connections: ConnectionCounts = ConnectionCounts::new(),
        polls: PollTimes = PollTimes::new(),
        plane: PlaneCounts = PlaneCounts::new(),
        responses: ResponseCounts = ResponseCounts::new(),
        tokens: TokenTotals = TokenTotals::new(),
        latency: Latencies = Latencies::new(),
        lengths: Lengths = Lengths::new(),
        phases: PhaseTimes = PhaseTimes::new(),
        rejected: [Count; REJECTIONS.len()] = Default::default(),
        finished: [Count; FINISH.len()] = Default::default(),
        between_stages: [Histogram; STAGE_PAIRS.len()] = std::array::from_fn(|_| Histogram::new(&BOUNDS_NS)),
    }
}

impl ShardMetrics {
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

/// What a scrape reads.
#[derive(Clone)]
pub(crate) struct Page {
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

impl Page {
    /// The collectors of a server: sums over its shards, and what is not a shard's.
    pub(crate) fn collectors(self) -> [Box<dyn Collector>; 2] {
        let collector = |table| slipstream_metrics::collector(self.clone(), Page::clone, table);
        [collector(COUNTERS), collector(OTHERS)]
    }

    /// vLLM's labels and `own`.
    fn labels<'a>(&'a self, own: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
        let common = self.labels.iter().map(|(name, value)| (*name, &**value));
        common.chain(own.iter().copied()).collect()
    }

    /// Labels of the only sample of a family: vLLM's have some, so that its dashboards find them.
    fn labels_of(&self, samples: &Samples<'_>) -> Vec<(&str, &str)> {
        let is_vllm = samples.name().starts_with("vllm:");
        if is_vllm {
            self.labels(&[])
        } else {
            Vec::new()
        }
    }

    fn sum(&self, of: impl Fn(&ShardMetrics) -> &Count) -> u64 {
        // Wrapping: a gauge may be negative in one shard when another did the matching add.
        let each = self.shards.iter();
        each.fold(0, |sum: u64, shard| sum.wrapping_add(of(shard).get()))
    }

    fn count(&self, samples: &mut Samples<'_>, of: fn(&ShardMetrics) -> &Count) {
        samples.add(&self.labels_of(samples), self.sum(of));
    }

    fn gauge(&self, samples: &mut Samples<'_>, of: fn(&ShardMetrics) -> &Count) {
        samples.add_integer(&[], self.sum(of).cast_signed());
    }

    /// Over all shards, in units of `per_unit` recorded ones.
    fn histogram(
        &self,
        samples: &mut Samples<'_>,
        per_unit: f64,
        of: fn(&ShardMetrics) -> &Histogram,
    ) {
        let parts = self.shards.iter().map(|shard| of(shard));
        samples.add_merged(&self.labels_of(samples), parts, per_unit);
    }
}

/// Families that have labels of their own, or no shard.
const OTHERS: &[Family<Page>] = &[
    // vLLM's names and meanings, so that its dashboards work.
    Family::counter(
        "vllm:request_success",
        "Sequences finished, by reason",
        |page, samples| {
            for (reason, name) in FINISH.iter().enumerate() {
                let labels = page.labels(&[("finished_reason", name)]);
                samples.add(&labels, page.sum(|s| &s.finished[reason]));
            }
        },
    ),
    Family::counter(
        "vllm:prompt_tokens_by_source",
        "Prompt tokens by source; those of open requests are in none",
        |page, samples| {
            for (source, value) in [
                ("local_compute", page.sum(|s| &s.tokens.computed)),
                ("local_cache_hit", page.sum(|s| &s.tokens.cached)),
                ("external_kv_transfer", 0),
            ] {
                samples.add(&page.labels(&[("source", source)]), value);
            }
        },
    ),
    Family::counter(
        "vllm:mm_cache_queries",
        "Images looked up in a cache: none is modelled",
        |page, samples| samples.add(&page.labels(&[]), 0),
    ),
    Family::counter(
        "vllm:mm_cache_hits",
        "Images found in a cache: none is modelled",
        |page, samples| samples.add(&page.labels(&[]), 0),
    ),
    Family::gauge(
        "vllm:engine_sleep_state",
        "1 for the state in which the engines are: awake, or asleep by a level",
        |page, samples| page.management.sleep_states(&page.labels(&[]), samples),
    ),
    Family::gauge(
        "vllm:lora_requests_info",
        "Adapters with open requests; the value is the time of the scrape, Unix time, s",
        |page: &Page, samples| page.management.open_adapters(samples),
    )
    .only_if(|page| page.management.shows_adapters()),
    // Our own.
    Family::total(
        "slipstream_cached_tokens",
        "Prompt tokens found cached",
        |page| page.sum(|s| &s.tokens.cached),
    ),
    Family::gauge(
        "slipstream_connections_max",
        "Limit of open connections: `live.connections_max`, or what the limit of open files has room for",
        |page, samples| samples.add(&[], page.budget.connections_max().into()),
    ),
    Family::gauge(
        "slipstream_memory_used_bytes",
        "Memory charged to clients: bodies, answers, buffers, connections",
        |page, samples| samples.add(&[], page.budget.memory.used()),
    ),
    Family::gauge(
        "slipstream_memory_max_bytes",
        "Limit of that memory (`live.memory_max`)",
        |page, samples| samples.add(&[], page.budget.memory.max()),
    ),
    Family::total(
        "slipstream_memory_refused",
        "Times that memory was refused to a client",
        |page| page.budget.memory.refused(),
    ),
    Family::counter(
        "slipstream_connections_closed",
        "Connections closed by a limit, by reason",
        |page, samples| {
            let budget = &page.budget;
            for (reason, value) in [
                ("connections_max", budget.refused_connections.load(Relaxed)),
                (
                    "client_connections_max",
                    budget.refused_client_connections.load(Relaxed),
                ),
                ("idle", page.sum(|s| &s.connections.idle)),
                ("unread", page.sum(|s| &s.connections.unread)),
            ] {
                samples.add(&[("reason", reason)], value);
            }
        },
    ),
    Family::counter(
        "slipstream_faults_injected",
        "Requests with a fault by rate (`[live.faults]`)",
        |page, samples| {
            for (fault, count) in FAULTS.into_iter().zip(page.faults.counts()) {
                samples.add(&[("fault", fault)], count);
            }
        },
    ),
    Family::gauge(
        "slipstream_shard_poll_max",
        "Longest CPU time for which a shard worked on one thing",
        |page: &Page, samples| {
            let max_ns = page.shards.iter().map(|s| s.polls.max_ns.get()).max();
            samples.add_real(&[], max_ns.unwrap_or(0) as f64 / 1e9);
        },
    )
    .in_seconds(),
    Family::counter(
        "slipstream_requests_rejected",
        "Requests turned away, by reason",
        |page, samples| {
            for (reason, name) in REJECTIONS.iter().enumerate() {
                samples.add(&[("reason", name)], page.sum(|s| &s.rejected[reason]));
            }
        },
    ),
    Family::counter(
        "slipstream_streams_cut",
        "Streams ended before their time, by reason",
        |page, samples| {
            for (reason, value) in [
                ("slow_reader", page.sum(|s| &s.streams_cut_slow)),
                ("buffer_full", page.sum(|s| &s.streams_cut_full)),
                ("deadline", page.sum(|s| &s.streams_cut_deadline)),
                ("stopping", page.sum(|s| &s.streams_cut_stop)),
                ("memory_max", page.sum(|s| &s.streams_cut_memory)),
                ("idle", page.sum(|s| &s.streams_cut_idle)),
            ] {
                samples.add(&[("reason", reason)], value);
            }
        },
    ),
    Family::histogram(
        "slipstream_hand_over",
        "Time between two stages of a request",
        |page: &Page, samples| {
            for (i, (from, to)) in STAGE_PAIRS.iter().enumerate() {
                let parts = page.shards.iter().map(|s| &s.between_stages[i]);
                samples.add_merged(&[("from", from.name()), ("to", to.name())], parts, 1e9);
            }
        },
    )
    .in_seconds(),
];

#[cfg(test)]
mod tests {
    use super::*;
    use slipstream_metrics::{Format, Registry};

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
        let page = Page {
            shards,
            budget,
            faults: Arc::default(),
            management: Arc::default(),
            labels: vec![("model_name", "m".to_owned()), ("engine", "0".to_owned())],
        };
        for collector in page.collectors() {
            registry.register_collector(collector);
        }
        let text = Format::Text.page(&registry).unwrap();
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
