//! One simulation of a cluster under a workload.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use slipstream_base::SimTime;
use slipstream_config::cluster::Cluster;
use slipstream_config::doc::Settings;
use slipstream_config::workload_file::{Arrival, Workload};
use slipstream_report::html::run::RunPage;
use slipstream_report::overload::Overload;
use slipstream_report::run::{
    Autoscale, EngineCounts, GpuCost, ModelReport, ProcessCost, Resumed, SCHEMA, ScaleChange,
    ScaledPool, SharedGpus, SharingPool, Simulation, Transfers,
};
use slipstream_report::{Objectives, RunReport, Series, Slo};
use slipstream_twin::{Options, Outcome, ShareOutcome, Sink};

use crate::source::{ClusterSource, WorkloadSource};
use crate::{files, memory};

/// The question: how does this cluster answer this workload?
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Question {
    /// The cluster.
    pub cluster: ClusterSource,
    /// The workload.
    pub workload: WorkloadSource,
    /// Objectives for goodput; `None`: those of the workload's classes.
    #[serde(with = "crate::source::as_text")]
    pub slo: Option<Slo>,
    /// Name of the run in tables.
    pub label: Option<String>,
    /// Ends the run at this simulated time.
    pub max_sim_time: Option<Duration>,
    /// Divides modelled time.
    pub speedup: f64,
    /// Threads for independent engines; `None`: one per core.
    pub threads: Option<u32>,
    /// Client retries of a request that no worker took.
    pub retries: u32,
    /// Jump over passes in which nothing happens.
    pub jump: bool,
    /// Charge the time of the engine's API server; not for comparison with a live `serve`, which has its own.
    pub api_time: bool,
}

impl Default for Question {
    fn default() -> Question {
        Question {
            cluster: ClusterSource::default(),
            workload: WorkloadSource::default(),
            slo: None,
            label: None,
            max_sim_time: None,
            speedup: 1.0,
            threads: None,
            retries: 0,
            jump: true,
            api_time: true,
        }
    }
}

/// A run that can start.
#[derive(Debug)]
pub struct Run {
    /// The cluster.
    pub cluster: Cluster,
    /// The origin of its values.
    pub settings: Settings,
    /// The workload.
    pub workload: Workload,
    /// Its short name.
    pub name: String,
    /// Its text, for the page.
    pub workload_text: String,
    /// Name of the run in tables.
    pub label: String,
    /// The objectives as asked for; those of classes are in `options`.
    pub slo: Option<Slo>,
    /// Options of the simulation.
    pub options: Options,
}

impl Question {
    /// Reads the files, and checks everything.
    ///
    /// # Errors
    /// If a file cannot be read, or a value is wrong.
    pub fn prepare(&self) -> anyhow::Result<Run> {
        let (cluster, settings) = self.cluster.resolve_simulated(&[])?;
        let (workload, name) = self.workload.workload(&[])?;
        // Slower than this, steps would last for years.
        anyhow::ensure!(
            (1e-3..=1e12).contains(&self.speedup),
            "--speedup is {:e}, but must be 0.001 to 1e12",
            self.speedup
        );
        let objectives = Objectives::of(&workload, self.slo.clone());
        let options = Options {
            speedup: self.speedup,
            each_token: objectives.read_longest_gap(),
            slo: objectives,
            time_max: time_max(self.max_sim_time),
            jump: self.jump,
            api_time: self.api_time,
            threads: self.threads.unwrap_or_else(crate::cores).max(1),
            retries: self.retries,
            ..Options::default()
        };
        memory::check(&cluster)?;
        memory::check_concurrency(&workload)?;
        Ok(Run {
            workload_text: self.workload.text(self.slo.as_ref())?,
            label: self.label.clone().unwrap_or_else(|| "simulated".into()),
            slo: self.slo.clone(),
            cluster,
            settings,
            workload,
            name,
            options,
        })
    }
}

/// A limit on simulated time.
pub(crate) fn time_max(limit: Option<Duration>) -> SimTime {
    limit.map_or(SimTime::MAX, |d| {
        SimTime(u64::try_from(d.as_nanos()).unwrap_or(u64::MAX))
    })
}

impl Run {
    /// Simulates.
    ///
    /// # Errors
    /// If the run cannot start, or its trace fails.
    pub fn simulate(&self, sink: &mut dyn Sink) -> anyhow::Result<Outcome> {
        let run = slipstream_twin::simulate(
            &self.cluster,
            &self.workload,
            &self.options,
            files::read,
            sink,
        );
        Ok(run?)
    }

    /// The report of a run that took `wall_s`, with its own `cost` if that was measured.
    ///
    /// # Errors
    /// If the profile of the step times cannot be read again.
    pub fn report(
        &self,
        outcome: &Outcome,
        wall_s: f64,
        cost: Option<ProcessCost>,
    ) -> anyhow::Result<RunReport> {
        let totals = &outcome.totals;
        let objectives = &self.options.slo;
        let cluster = &self.cluster;
        Ok(RunReport {
            schema: SCHEMA,
            label: self.label.clone(),
            target: "simulated".into(),
            model: cluster.model_names(),
            workload: self.name.clone(),
            seed: self.workload.seed,
            duration_s: totals.duration_s(),
            requests: totals.requests,
            errors: totals.errors.clone(),
            tokens: totals.tokens(),
            throughput: totals.throughput(),
            latency: totals.latencies(),
            goodput: totals.goodput(objectives),
            overloaded: self.overload(outcome),
            classes: totals.class_reports(objectives),
            models: outcome
                .models
                .iter()
                .map(|model| ModelReport {
                    requests: totals.part_report(&model.name, &model.totals, objectives),
                    prefix_hit_share: (model.prefix_query_tokens > 0)
                        .then(|| model.prefix_hit_tokens as f64 / model.prefix_query_tokens as f64),
                })
                .collect(),
            shares: self.shares(outcome),
            gpu: Some(GpuCost {
                gpus: cluster.gpus(),
                hours: outcome.gpu_hours(cluster),
            }),
            client: cost,
            server: None,
            simulation: Some(Simulation {
                simulated_s: outcome.ended_at.as_secs_f64(),
                wall_s,
                passes: outcome.passes,
                jumped: outcome.jumped,
                extrapolated: outcome.extrapolated,
                digest: format!("{:016x}", outcome.digest),
                cut: outcome.cut.clone(),
                expected_error: outcome.expected_errors(cluster, files::read)?,
            }),
            transfers: outcome
                .kv_transfers
                .times
                .percentiles()
                .map(|ms| Transfers {
                    count: ms.count,
                    bytes: outcome.kv_transfers.bytes,
                    ms: Some(ms),
                }),
            resumed: outcome.resumes.times.percentiles().map(|ms| Resumed {
                count: ms.count,
                tokens: outcome.resumes.tokens,
                ms: Some(ms),
            }),
            autoscale: outcome.scaling.as_ref().map(|scaling| Autoscale {
                pools: scaling
                    .pools
                    .iter()
                    .map(|pool| ScaledPool {
                        name: pool.name.clone(),
                        workers_mean: pool.worker_s / outcome.ended_at.as_secs_f64().max(1e-9),
                        workers_min: pool.wanted_min,
                        workers_max: pool.wanted_max,
                    })
                    .collect(),
                changes: scaling
                    .changes
                    .iter()
                    .map(|change| ScaleChange {
                        at_s: change.at.as_secs_f64(),
                        pool: change.pool.clone(),
                        before: change.before,
                        wanted: change.wanted,
                    })
                    .collect(),
            }),
            engine: Some(EngineCounts {
                // All pools have blocks of one size; the router would not take them otherwise.
                prefix_hit_blocks: outcome
                    .engine
                    .prefix_hit_tokens
                    .map(|tokens| tokens / f64::from(cluster.pools[0].engine.block_size)),
                ..outcome.engine
            }),
        })
    }

    /// The overload of a run whose requests do not wait for each other.
    fn overload(&self, outcome: &Outcome) -> Option<Overload> {
        match self.workload.arrival {
            Arrival::Closed { .. } => None,
            _ => outcome.totals.overload(),
        }
    }

    fn shares(&self, outcome: &Outcome) -> Vec<SharedGpus> {
        let model = |name: &str| {
            let mut pools = self.cluster.pools.iter();
            let pool = pools.find(|pool| pool.name == name);
            pool.map_or_else(String::new, |pool| pool.model.name.clone())
        };
        let ended_s = outcome.ended_at.as_secs_f64().max(1e-9);
        let share = |share: &ShareOutcome| {
            let over_all = |ns: u64| ns as f64 / 1e9 / (ended_s * f64::from(share.workers.max(1)));
            let pool = |(name, awake_ns): &(String, u64)| SharingPool {
                name: name.clone(),
                model: model(name),
                awake_share: over_all(*awake_ns),
            };
            SharedGpus {
                name: share.name.clone(),
                workers: share.workers,
                swaps: share.swaps,
                swapping_s: share.swapping_ns as f64 / 1e9,
                swapping_share: over_all(share.swapping_ns),
                pools: share.pools.iter().map(pool).collect(),
            }
        };
        outcome.shares.iter().map(share).collect()
    }

    /// The page of a run: its `report`, the run over time if it was recorded, and `facts` in addition to the
    /// digest and the expected error.
    pub fn page(
        &self,
        outcome: &Outcome,
        report: &RunReport,
        series: Option<&Series>,
        facts: Vec<(String, String)>,
    ) -> String {
        let errors = report.simulation.iter().flat_map(|s| &s.expected_error);
        let expected = errors.map(|error| ("expected error".into(), error.line()));
        let digest = ("digest".into(), format!("{:016x}", outcome.digest));
        let overloaded = report
            .overloaded
            .map(|of| format!("overloaded {}", of.line()));
        let facts = facts.into_iter().chain([digest]).chain(expected);
        RunPage {
            title: "Simulated run",
            report,
            distributions: &outcome.totals.distributions(),
            series,
            slo: self.slo.as_ref(),
            events: event_labels(&self.cluster),
            warnings: outcome
                .cut
                .iter()
                .chain(&outcome.extrapolation())
                .chain(&overloaded)
                .cloned()
                .collect(),
            facts: facts.collect(),
            texts: vec![
                ("Cluster, every value".into(), self.settings.to_toml()),
                ("Workload".into(), self.workload_text.clone()),
            ],
        }
        .render()
    }
}

/// Events that the cluster file lists, by time.
fn event_labels(cluster: &Cluster) -> Vec<(f64, String)> {
    let mut all = Vec::new();
    for event in &cluster.events {
        let kind = event.fault.name();
        let name = match &event.workers[..] {
            [] => kind.to_owned(),
            [only] => format!("{kind} w{only}"),
            [first, .., last] => format!("{kind} w{first} … w{last}"),
        };
        if let Some(until_s) = event.until_s {
            all.push((until_s, format!("{name} ends")));
        }
        all.push((event.at_s, name));
    }
    all.sort_by(|a, b| a.0.total_cmp(&b.0));
    all
}
