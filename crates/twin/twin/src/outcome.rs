//! The outcome of a run, in total, per model and per pool.

use slipstream_base::SimTime;
use slipstream_base::text::{counted, grouped};
use slipstream_config::cluster::Cluster;
use slipstream_report::run::EngineCounts;
use slipstream_report::{Latency, Totals};

/// The result of a run.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Latencies and counts, as the load generator keeps them.
    pub totals: Totals,
    /// Counters of the engines, summed.
    pub engine: EngineCounts,
    /// Simulated time at the end.
    pub ended_at: SimTime,
    /// Passes that engines ran, those jumped over included.
    pub passes: u64,
    /// Passes that were skipped by jumping.
    pub jumped: u64,
    /// Passes beyond the table of step times, whose durations were extrapolated.
    pub extrapolated: u64,
    /// Prompts that one worker computed for another.
    pub kv_transfers: KvTransfers,
    /// Answers that a worker continued after another one was lost.
    pub resumes: Resumes,
    /// Each model by itself, if there are several.
    pub models: Vec<ModelOutcome>,
    /// GPUs that pools shared by turns.
    pub shares: Vec<ShareOutcome>,
    /// Digest of every request's times, targets and hits: equal if two runs were.
    pub digest: u64,
    /// Changes by autoscaling, and their cost; `None` if no pool has `[autoscale]`.
    pub scaling: Option<Scaling>,
    /// Why the run ended before the workload, if it did.
    pub cut: Option<String>,
}

impl Outcome {
    /// GPU-hours: of all workers of `cluster` over the duration, or of those that existed in pools with
    /// `[autoscale]`.
    pub fn gpu_hours(&self, cluster: &Cluster) -> f64 {
        let (gpu_s, gpus_max) = self
            .scaling
            .as_ref()
            .map_or((0.0, 0), |scaling| (scaling.gpu_s, scaling.gpus_max));
        let fixed = cluster.gpus().saturating_sub(gpus_max);
        (fixed as f64 * self.totals.duration_s() + gpu_s) / 3600.0
    }

    /// Note about extrapolated step times.
    pub fn extrapolation(&self) -> Option<String> {
        (self.extrapolated > 0).then(|| {
            format!(
                "{} of {} ({:.1} %) are outside the table of step times: their lengths were extrapolated from \
                 its nearest rows; add rows for them to `engine.timing.path`",
                grouped(self.extrapolated),
                counted(self.passes, "pass"),
                100.0 * self.extrapolated as f64 / self.passes.max(1) as f64
            )
        })
    }
}

/// Prompts computed by one worker for another.
#[derive(Clone, Debug, Default)]
pub struct KvTransfers {
    /// Bytes of keys and values that crossed the network.
    pub bytes: u64,
    /// Durations of KV transfers.
    pub times: Latency,
}

/// Answers that a worker continued after another one was lost.
#[derive(Clone, Debug, Default)]
pub struct Resumes {
    /// From the last token of the lost worker to the first of the one that continued.
    pub times: Latency,
    /// Tokens of prompts and answers so far that were to be computed again, cached ones included.
    pub tokens: u64,
}

/// Figures of one model of several.
#[derive(Clone, Debug)]
pub struct ModelOutcome {
    /// Its name.
    pub name: String,
    /// Latencies and counts of its requests.
    pub totals: Totals,
    /// Tokens of prompts that were looked up in the prefix caches of its engines.
    pub prefix_query_tokens: u64,
    /// Those of them that were found there.
    pub prefix_hit_tokens: u64,
}

/// GPUs that pools shared by turns.
#[derive(Clone, Debug)]
pub struct ShareOutcome {
    /// The NAME of `[share.NAME]`.
    pub name: String,
    /// Sets of GPUs: workers of its largest pool.
    pub workers: u32,
    /// Times that a model fell asleep for another one.
    pub swaps: u64,
    /// Time that swaps took, over all workers, ns.
    pub swapping_ns: u64,
    /// Its pools, in the order of the file, with the time that their models were awake, over all workers, ns.
    pub pools: Vec<(String, u64)>,
}

/// Changes of the number of workers in a run, and their cost.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Scaling {
    /// Changes, in order.
    pub changes: Vec<PoolSizeChange>,
    /// GPU time of the pools with `[autoscale]`, from the start of each worker to its stop, s.
    pub gpu_s: f64,
    /// GPUs of those pools if all of their workers ran.
    pub gpus_max: u64,
    /// Those pools, in file order.
    pub pools: Vec<PoolTime>,
}

/// The workers of a pool over a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PoolTime {
    /// Its name.
    pub name: String,
    /// Sum over the workers of the time between start and stop, s.
    pub worker_s: f64,
    /// Fewest workers that were wanted.
    pub wanted_min: u32,
    /// Most workers that were wanted.
    pub wanted_max: u32,
}

/// A change of the workers of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolSizeChange {
    /// When.
    pub at: SimTime,
    /// The pool.
    pub pool: String,
    /// Workers that were wanted before.
    pub before: u32,
    /// Workers that are wanted now.
    pub wanted: u32,
}
