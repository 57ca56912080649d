//! The result of one run: printed, saved and compared by `bench` and `simulate`.
//!
//! The JSON form is stable: within one [`SCHEMA`], fields are only added. Every field's unit is in
//! its name or its doc; fields that were not measured are absent.

mod text;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::latency::Percentiles;
use crate::overload::Overload;

/// Version of the JSON form.
pub const SCHEMA: u32 = 1;

/// One run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RunReport {
    /// [`SCHEMA`] of the writer.
    pub schema: u32,
    /// Name of the run in tables.
    pub label: String,
    /// The target: a URL, or `simulated`.
    pub target: String,
    /// Requested model.
    pub model: String,
    /// Short description of the workload.
    pub workload: String,
    /// Seed of the workload.
    pub seed: u64,
    /// From the first due time to the last answer, s. No figure includes the warm-up.
    pub duration_s: f64,
    /// Counts of requests.
    pub requests: RequestCounts,
    /// Failed requests by category.
    pub errors: BTreeMap<String, ErrorCount>,
    /// Counts of tokens.
    pub tokens: TokenCounts,
    /// Rates over `duration_s`.
    pub throughput: Throughput,
    /// Latencies, ms.
    pub latency: Latencies,
    /// Goodput, if there are objectives.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub goodput: Option<Goodput>,
    /// Requests came faster than they were answered, until they stopped; absent if they did not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overloaded: Option<Overload>,
    /// Each class of the workload, if it has several or one with objectives of its own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub classes: Vec<ClassReport>,
    /// Each model, if the cluster serves several.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub models: Vec<ModelReport>,
    /// GPUs that pools share by turns, if any.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shares: Vec<SharedGpus>,
    /// GPU-hours of the cluster, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<GpuCost>,
    /// The load generator's own cost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client: Option<ProcessCost>,
    /// The server's cost, summed over the watched processes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server: Option<ProcessCost>,
    /// KV transfers between workers, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transfers: Option<Transfers>,
    /// Answers that another worker continued after theirs was lost, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resumed: Option<Resumed>,
    /// Workers that started and stopped by the load, if pools have `[autoscale]`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub autoscale: Option<Autoscale>,
    /// Of a simulated run: how it ended, and its cost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub simulation: Option<Simulation>,
    /// Increase of the server's counters over the run, warm-up included.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<EngineCounts>,
}

/// Counts of requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestCounts {
    /// Sent, without warm-up.
    pub sent: u64,
    /// Answered in full.
    pub succeeded: u64,
    /// Failed, by category in `errors`.
    pub failed: u64,
    /// Sent before the measurement began.
    pub warmup: u64,
    /// Turns never sent because an earlier turn of their session failed or the run was cut short.
    pub abandoned: u64,
    /// Sent, and in flight when the run was cut short.
    #[serde(default)]
    pub unfinished: u64,
    /// Lines of the trace that were skipped as bad.
    pub skipped_lines: u64,
    /// Retried on a new connection or after a `Retry-After`.
    pub retries: u64,
}

/// Failures of one category.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorCount {
    /// Number of failures.
    pub count: u64,
    /// The first one's message.
    pub example: String,
}

/// Counts of tokens over answered requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenCounts {
    /// Prompt tokens: by the server's count, or the workload's.
    pub input: u64,
    /// Answer tokens: by the server's count, or one per event.
    pub output: u64,
    /// Stream events that carried text.
    pub events: u64,
    /// Prompt tokens that the server found cached.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cached: Option<u64>,
}

/// Rates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Throughput {
    /// Answered requests, 1/s.
    pub requests_per_s: f64,
    /// Prompt tokens, 1/s.
    pub input_tokens_per_s: f64,
    /// Answer tokens, 1/s.
    pub output_tokens_per_s: f64,
}

/// Percentiles of each latency, ms; absent if not measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Latencies {
    /// From due time to first token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttft_ms: Option<Percentiles>,
    /// Gaps between successive tokens, over all gaps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub itl_ms: Option<Percentiles>,
    /// (E2E − TTFT) / (OSL − 1), over requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tpot_ms: Option<Percentiles>,
    /// From due time to last token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub e2e_ms: Option<Percentiles>,
    /// From due time to sending: the delay of the load generator itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub send_lag_ms: Option<Percentiles>,
}

/// Requests that met every objective.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Goodput {
    /// The objectives as given: `ttft=1s,itl=50ms`.
    pub slo: String,
    /// Requests that met all of them.
    pub met: u64,
    /// `met` over requests sent.
    pub share: f64,
    /// `met` per second.
    pub requests_per_s: f64,
}

/// Requests of one class.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ClassReport {
    /// Name of the class.
    pub name: String,
    /// Requests sent.
    pub sent: u64,
    /// Answered in full.
    pub succeeded: u64,
    /// Failed.
    pub failed: u64,
    /// Prompt tokens of those answered.
    pub input_tokens: u64,
    /// Answer tokens.
    pub output_tokens: u64,
    /// From due time to first token, ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttft_ms: Option<Percentiles>,
    /// Gaps between tokens, ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub itl_ms: Option<Percentiles>,
    /// (E2E − TTFT) / (OSL − 1), ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tpot_ms: Option<Percentiles>,
    /// From due time to last token, ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub e2e_ms: Option<Percentiles>,
    /// Goodput by the class's objectives, or by the run's if it has none of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub goodput: Option<Goodput>,
}

/// Requests for one model.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ModelReport {
    /// As of a class; `name` is the model's.
    #[serde(flatten)]
    pub requests: ClassReport,
    /// Of the tokens that its engines looked up in their prefix caches, the share that they found; `None`: none were.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefix_hit_share: Option<f64>,
}

/// GPUs that pools share by turns (`[share.NAME]`).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SharedGpus {
    /// The NAME.
    pub name: String,
    /// Workers of its largest pool: each is on GPUs of its own, which it shares with one of each other pool.
    pub workers: u32,
    /// Times that a model fell asleep for another one.
    pub swaps: u64,
    /// Time that swaps took, in which no model runs; over all workers, s.
    pub swapping_s: f64,
    /// `swapping_s` over the time of all workers.
    pub swapping_share: f64,
    /// Its pools, in the order of the file.
    pub pools: Vec<SharingPool>,
}

/// A pool that shares GPUs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SharingPool {
    /// Its name.
    pub name: String,
    /// Its model.
    pub model: String,
    /// Share of the time of all workers in which its model was awake.
    pub awake_share: f64,
}

/// Size and cost of a cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GpuCost {
    /// GPUs: workers × tensor-parallel × data-parallel size.
    pub gpus: u64,
    /// `gpus` × the run's duration, h.
    pub hours: f64,
}

/// Figures of a simulation.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Simulation {
    /// Simulated time at its end, s.
    pub simulated_s: f64,
    /// Wall-clock time that it took, s.
    pub wall_s: f64,
    /// Engine passes.
    pub passes: u64,
    /// Passes that were skipped by jumping.
    pub jumped: u64,
    /// Passes beyond the table of step times, whose durations were extrapolated.
    #[serde(default)]
    pub extrapolated: u64,
    /// Digest, 16 hexadecimal digits: equal if two runs were.
    pub digest: String,
    /// Why it ended before the workload, if it did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cut: Option<String>,
    /// How far its latencies are expected to be off, by pool, if step times follow a profile.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub expected_error: Vec<ExpectedError>,
}

/// The band that 80 % of measured deployments fall in, as factors on the simulated latencies.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ExpectedError {
    /// The pool.
    pub pool: String,
    /// Distance from the profile's data: `near`, or the parts that it lacks (docs/accuracy.md).
    pub region: String,
    /// Ends of the band of mean TPOT.
    pub tpot: [f64; 2],
    /// Ends of the band of mean TTFT.
    pub ttft: [f64; 2],
    /// Parts of the deployment that the step times leave out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub not_modelled: Vec<String>,
}

impl ExpectedError {
    /// One line for tables and pages.
    pub fn line(&self) -> String {
        let percent = |[low, high]: [f64; 2]| {
            format!(
                "{:+.0} to {:+.0} %",
                100.0 * (low - 1.0),
                100.0 * (high - 1.0)
            )
        };
        let mut line = format!(
            "TPOT {}, TTFT {} (80 % of measurements; pool {}, region: {})",
            percent(self.tpot),
            percent(self.ttft),
            self.pool,
            self.region
        );
        if !self.not_modelled.is_empty() {
            line.push_str("; not modelled: ");
            line.push_str(&self.not_modelled.join("; "));
        }
        line
    }
}

/// KV transfers of prompts that one worker computed for another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Transfers {
    /// Number of prompts.
    pub count: u64,
    /// Bytes sent.
    pub bytes: u64,
    /// From start to end of a transfer, ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ms: Option<Percentiles>,
}

/// Workers that started and stopped by the load.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Autoscale {
    /// The pools, in file order.
    pub pools: Vec<ScaledPool>,
    /// Changes, in order of time.
    pub changes: Vec<ScaleChange>,
}

/// A pool whose workers start and stop.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ScaledPool {
    /// Its name.
    pub name: String,
    /// Mean number of workers from the start of the run to its end, those that start or drain included.
    pub workers_mean: f64,
    /// Fewest workers that were wanted.
    pub workers_min: u32,
    /// Most workers that were wanted.
    pub workers_max: u32,
}

/// A change of the number of workers of a pool.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ScaleChange {
    /// When, s.
    pub at_s: f64,
    /// The pool.
    pub pool: String,
    /// Workers that were wanted before.
    pub before: u32,
    /// Workers that were wanted from then on.
    pub wanted: u32,
}

/// Answers that another worker continued after theirs was lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Resumed {
    /// Times that an answer was continued.
    pub count: u64,
    /// Tokens of prompts and answers so far that were to be computed again, cached ones included.
    pub tokens: u64,
    /// Pause that the client saw: from the last token of the lost worker to the next, ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ms: Option<Percentiles>,
}

/// Cost of a process over the run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ProcessCost {
    /// CPU time, user and system, s.
    pub cpu_s: f64,
    /// CPU time per answered request, µs.
    pub cpu_us_per_request: f64,
    /// CPU time per answer token, µs.
    pub cpu_us_per_token: f64,
    /// Peak resident memory, bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rss_peak_bytes: Option<u64>,
}

/// Counters of the engines, summed, as differences over the run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EngineCounts {
    /// Requests preempted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preemptions: Option<f64>,
    /// Prompt tokens looked up in the prefix caches.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefix_query_tokens: Option<f64>,
    /// Those found.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefix_hit_tokens: Option<f64>,
    /// Those found behind them in host memory; absent without such a tier.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_hit_tokens: Option<f64>,
    /// Those found on the disk below host memory; absent without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_hit_tokens: Option<f64>,
    /// Those that another worker had and sent; absent if workers do not fetch from each other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer_hit_tokens: Option<f64>,
    /// Those that another worker had by the index, and no longer when it was asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer_absent_tokens: Option<f64>,
    /// Bytes that workers sent to each other for this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer_bytes: Option<f64>,
    /// Drafts that were verified; absent without speculative decoding.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drafts: Option<f64>,
    /// Tokens of those drafts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draft_tokens: Option<f64>,
    /// Those of them that were accepted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accepted_tokens: Option<f64>,
    /// Those found on the GPUs, in blocks; absent if the size of a block is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefix_hit_blocks: Option<f64>,
}

impl RunReport {
    /// Share of prompt tokens found cached: from the answers, otherwise from the engines' counters.
    pub fn prefix_hit_share(&self) -> Option<f64> {
        let share = |hit: f64, of: f64| (of > 0.0).then(|| hit / of);
        match (self.tokens.cached, &self.engine) {
            (Some(cached), _) => share(cached as f64, self.tokens.input as f64),
            (None, Some(engine)) => share(engine.prefix_hit_tokens?, engine.prefix_query_tokens?),
            (None, None) => None,
        }
    }

    /// The JSON form, indented, with a final newline.
    pub fn to_json(&self) -> String {
        let mut text =
            serde_json::to_string_pretty(self).expect("plain numbers and strings serialize");
        text.push('\n');
        text
    }

    /// Reads the JSON form.
    ///
    /// # Errors
    /// [`RunError`] if `text` is not such a form, or has a later schema.
    pub fn from_json(text: &str) -> Result<RunReport, RunError> {
        let run: RunReport = serde_json::from_str(text)?;
        if run.schema != SCHEMA {
            return Err(RunError::Schema { found: run.schema });
        }
        Ok(run)
    }
}

/// Why a saved run could not be read. A retry does not help.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// Not the JSON form of a run.
    #[error("not a saved run: {0}; create one with `slipstream bench --out FILE`")]
    Json(#[from] serde_json::Error),
    /// Written by a version with another schema.
    #[error("the file has schema {found}, this program reads {SCHEMA}; run the bench again")]
    Schema {
        /// Its `schema`.
        found: u32,
    },
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::latency::TOO_FEW;

    pub(crate) fn sample() -> RunReport {
        let p = |p50: f64| {
            Some(Percentiles {
                count: 1_000,
                mean: p50 * 1.1,
                min: p50 / 2.0,
                p50,
                p75: p50 * 1.2,
                p90: p50 * 1.5,
                p95: p50 * 1.6,
                p99: p50 * 2.0,
                max: p50 * 3.0,
            })
        };
        RunReport {
            schema: SCHEMA,
            label: "kv".into(),
            target: "http://127.0.0.1:8000".into(),
            model: "m".into(),
            workload: "closed loop of 4".into(),
            seed: 1,
            overloaded: None,
            duration_s: 12.5,
            requests: RequestCounts {
                sent: 1_000,
                succeeded: 998,
                failed: 2,
                ..RequestCounts::default()
            },
            errors: [(
                "http 503".to_owned(),
                ErrorCount {
                    count: 2,
                    example: "every worker is busy".to_owned(),
                },
            )]
            .into(),
            tokens: TokenCounts {
                input: 1_024_000,
                output: 128_000,
                events: 128_000,
                cached: Some(512_000),
            },
            throughput: Throughput {
                requests_per_s: 79.84,
                input_tokens_per_s: 81_920.0,
                output_tokens_per_s: 10_240.0,
            },
            latency: Latencies {
                ttft_ms: p(100.0),
                itl_ms: p(10.0),
                tpot_ms: p(10.5),
                e2e_ms: p(1_400.0),
                send_lag_ms: p(0.05),
            },
            goodput: Some(Goodput {
                slo: "ttft=1s".into(),
                met: 900,
                share: 0.9,
                requests_per_s: 72.0,
            }),
            classes: Vec::new(),
            models: Vec::new(),
            shares: Vec::new(),
            gpu: None,
            transfers: None,
            resumed: None,
            autoscale: None,
            simulation: None,
            client: Some(ProcessCost {
                cpu_s: 0.2,
                cpu_us_per_request: 200.4,
                cpu_us_per_token: 1.5625,
                rss_peak_bytes: Some(20 << 20),
            }),
            server: None,
            engine: Some(EngineCounts {
                preemptions: Some(3.0),
                ..EngineCounts::default()
            }),
        }
    }

    #[test]
    fn a_saved_run_reads_back_the_same() {
        let run = sample();
        assert_eq!(RunReport::from_json(&run.to_json()).unwrap(), run);
    }

    #[test]
    fn other_schemas_and_other_json_are_refused() {
        let later = sample()
            .to_json()
            .replacen("\"schema\": 1", "\"schema\": 2", 1);
        let error = RunReport::from_json(&later).unwrap_err().to_string();
        assert!(error.contains("schema 2"), "{error}");
        let error = RunReport::from_json("{}").unwrap_err().to_string();
        assert!(error.contains("--out"), "{error}");
    }

    /// A run with every field measured.
    fn whole() -> RunReport {
        let run = sample();
        let percentiles = run.latency.ttft_ms;
        RunReport {
            classes: vec![ClassReport {
                name: "chat".into(),
                ttft_ms: percentiles,
                itl_ms: percentiles,
                tpot_ms: percentiles,
                e2e_ms: percentiles,
                goodput: run.goodput.clone(),
                ..ClassReport::default()
            }],
            models: vec![ModelReport {
                requests: ClassReport {
                    name: "qwen3-8b".into(),
                    ttft_ms: percentiles,
                    ..ClassReport::default()
                },
                prefix_hit_share: Some(0.5),
            }],
            shares: vec![SharedGpus {
                pools: vec![SharingPool::default()],
                ..SharedGpus::default()
            }],
            gpu: Some(GpuCost::default()),
            server: run.client,
            transfers: Some(Transfers {
                count: 3,
                bytes: 4,
                ms: percentiles,
            }),
            resumed: Some(Resumed {
                count: 2,
                tokens: 700,
                ms: percentiles,
            }),
            autoscale: None,
            simulation: Some(Simulation {
                cut: Some("interrupted".into()),
                ..Simulation::default()
            }),
            engine: Some(EngineCounts {
                preemptions: Some(3.0),
                prefix_query_tokens: Some(5.0),
                prefix_hit_tokens: Some(4.0),
                host_hit_tokens: Some(2.0),
                disk_hit_tokens: Some(1.0),
                peer_hit_tokens: Some(3.0),
                peer_absent_tokens: Some(1.0),
                peer_bytes: Some(96.0),
                drafts: Some(4.0),
                draft_tokens: Some(8.0),
                accepted_tokens: Some(6.0),
                prefix_hit_blocks: Some(1.0),
            }),
            ..run
        }
    }

    /// The JSON form is stable: this test fails if a field disappears or is renamed, and if a new
    /// one has no description.
    #[test]
    fn every_field_is_described() {
        fn names(value: &serde_json::Value, path: &str, out: &mut Vec<String>) {
            match value {
                serde_json::Value::Object(fields) => {
                    for (name, value) in fields {
                        out.push(format!("{path}{name}"));
                        names(value, &format!("{path}{name}."), out);
                    }
                }
                serde_json::Value::Array(items) => {
                    for item in items {
                        names(item, path, out);
                    }
                }
                _ => {}
            }
        }
        let json = serde_json::from_str(&whole().to_json()).unwrap();
        let mut fields = Vec::new();
        names(&json, "", &mut fields);
        fields.retain(|field| !field.starts_with("errors.http"));
        fields.sort();
        insta::assert_snapshot!(fields.join("\n"));
        let doc = include_str!("../../../../docs/results.md");
        let words: std::collections::HashSet<&str> = doc
            .split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'))
            .collect();
        for field in &fields {
            let name = field.rsplit('.').next().unwrap();
            assert!(words.contains(name), "docs/results.md lacks `{field}`");
        }
    }

    #[test]
    fn of_few_requests_there_is_no_tail() {
        let mut run = sample();
        assert!(!run.render().contains("too few"));
        run.latency.ttft_ms.as_mut().unwrap().count = 12;
        let text = run.render();
        let row = text.lines().find(|line| line.starts_with("TTFT")).unwrap();
        let cells: Vec<&str> = row.split_ascii_whitespace().collect();
        // p75 and p90 of twelve are below the largest; p95 and p99 are the largest.
        assert_eq!(cells, ["TTFT", "110", "100", "120", "150", "-", "-", "300"]);
        assert!(text.ends_with(&format!("{TOO_FEW}\n")), "{text}");
    }

    #[test]
    fn one_is_told_as_one() {
        let mut run = sample();
        run.requests = RequestCounts {
            sent: 1,
            succeeded: 1,
            skipped_lines: 1,
            ..RequestCounts::default()
        };
        run.gpu = Some(GpuCost {
            gpus: 1,
            hours: 1.0,
        });
        run.engine.as_mut().unwrap().preemptions = Some(1.0);
        let text = run.render();
        assert!(
            text.contains("1 of 1 request answered in 12.5 s, 1 trace line skipped\n"),
            "{text}"
        );
        assert!(
            text.contains(" 1 preemption\n") && text.contains(" on 1 GPU\n"),
            "{text}"
        );
    }

    #[test]
    fn what_people_see() {
        insta::assert_snapshot!(sample().render());
    }
}
