//! Terms of one engine from its steps: forward-pass metrics one by one, or vLLM's metrics as means between scrapes.

use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use slipstream_events::FpmMessage;
use slipstream_os::files;
use slipstream_perf::fit::quantile;
use slipstream_perf::observed::{self, COUNT, Observation};
use slipstream_probe::prometheus::Samples;

use crate::fitted::{Fitted, HeldOut};

const PARTS: usize = 5;
const API: usize = COUNT - 1;

/// The steps of a file of forward-pass metrics: one JSON object per line, as `slipstream events tail --json` prints
/// them, or the message alone.
///
/// # Errors
/// It cannot be read, or has too few steps.
pub fn of_recording(path: &Path) -> anyhow::Result<Vec<Observation>> {
    let text = files::read_text(path).with_context(|| format!("reading {}", path.display()))?;
    let seen = recorded(&text).with_context(|| path.display().to_string())?;
    ensure!(
        seen.len() >= 10 * COUNT,
        "{}: {} steps with work; at least {} are needed: record while the engine serves",
        path.display(),
        seen.len(),
        10 * COUNT
    );
    Ok(seen)
}

fn recorded(text: &str) -> anyhow::Result<Vec<Observation>> {
    let mut seen = Vec::new();
    for (at, line) in text.lines().enumerate() {
        if line.trim().is_empty() {
            continue;
        }
        let value: serde_json::Value =
            serde_json::from_str(line).with_context(|| format!("line {}", at + 1))?;
        let event = value.get("event").unwrap_or(&value);
        if event.get("wall_time").is_none() {
            // KV events come in the same stream.
            continue;
        }
        let message: FpmMessage = serde_json::from_value(event.clone())
            .with_context(|| format!("line {}: not forward-pass metrics", at + 1))?;
        let s = message.scheduled_requests;
        if message.wall_time == 0.0 || s.num_prefill_requests + s.num_decode_requests == 0 {
            // An idle engine's heartbeat.
            continue;
        }
        ensure!(
            message.wall_time.is_finite() && message.wall_time > 0.0 && message.wall_time < 3600.0,
            "line {}: `wall_time` is {} s",
            at + 1,
            message.wall_time
        );
        let chunk = s.sum_prefill_tokens as f64 / f64::from(s.num_prefill_requests.max(1));
        let context = s.sum_prefill_kv_tokens as f64 / f64::from(s.num_prefill_requests.max(1));
        // Chunks of one step as if they were of one length.
        let pairs =
            f64::from(s.num_prefill_requests) * chunk * (context + f64::midpoint(chunk, 1.0));
        seen.push(Observation {
            work: [
                1.0,
                s.sum_prefill_tokens as f64,
                pairs,
                f64::from(s.num_decode_requests),
                s.sum_decode_kv_tokens as f64,
                0.0,
            ],
            seconds: message.wall_time,
            part: 0,
        });
    }
    Ok(seen)
}

/// Differences between successive scrapes of vLLM's `/metrics`.
///
/// # Errors
/// A file cannot be read, a counter fell, or there are too few intervals.
pub fn of_metrics(paths: &[PathBuf]) -> anyhow::Result<Vec<Observation>> {
    let mut texts = Vec::new();
    for path in paths {
        let text = files::read_text(path).with_context(|| format!("reading {}", path.display()))?;
        texts.push((path, text));
    }
    let mut totals = Vec::new();
    for (path, text) in &texts {
        totals.push(Counters::read(text).with_context(|| path.display().to_string())?);
    }
    let mut seen = Vec::new();
    for (at, pair) in totals.windows(2).enumerate() {
        let passed = pair[1].since(&pair[0]).with_context(|| {
            let (from, to) = (texts[at].0.display(), texts[at + 1].0.display());
            format!("from {from} to {to}: a counter fell; name the files in order, of one run of the engine")
        })?;
        seen.extend(passed.observations());
    }
    ensure!(
        seen.len() >= 2 * COUNT,
        "{} intervals with traffic; at least {} are needed, of different load: save /metrics every few seconds while \
         the engine serves",
        seen.len(),
        2 * COUNT
    );
    Ok(seen)
}

/// Counters of vLLM, over all of its ranks.
#[derive(Clone, Copy, Debug, Default)]
struct Counters([f64; 13]);

/// Names in vLLM 0.33 (`vllm/v1/metrics/loggers.py`).
const COUNTERS: [&str; 13] = [
    "vllm:iteration_tokens_total_count",
    "vllm:prompt_tokens_total",
    "vllm:prompt_tokens_cached_total",
    "vllm:generation_tokens_total",
    "vllm:inter_token_latency_seconds_sum",
    "vllm:inter_token_latency_seconds_count",
    "vllm:request_prompt_tokens_sum",
    "vllm:request_prompt_tokens_count",
    "vllm:request_generation_tokens_sum",
    "vllm:time_to_first_token_seconds_sum",
    "vllm:time_to_first_token_seconds_count",
    "vllm:request_queue_time_seconds_sum",
    "vllm:request_prefill_time_seconds_sum",
];
/// Absent in some versions, where it counts as 0.
const OPTIONAL: &str = "vllm:prompt_tokens_cached_total";

impl Counters {
    fn read(text: &str) -> anyhow::Result<Counters> {
        let samples = Samples::parse(text);
        let mut totals = [0.0; COUNTERS.len()];
        for (total, name) in totals.iter_mut().zip(COUNTERS) {
            match samples.sum(name) {
                Some(sum) => *total = sum,
                None if name == OPTIONAL => {}
                None => anyhow::bail!("no `{name}`; is it the whole /metrics of a vLLM?"),
            }
            ensure!(total.is_finite() && *total >= 0.0, "`{name}` is {total}");
        }
        Ok(Counters(totals))
    }

    fn since(&self, before: &Counters) -> Option<Counters> {
        let mut passed = [0.0; COUNTERS.len()];
        for (i, x) in passed.iter_mut().enumerate() {
            *x = self.0[i] - before.0[i];
        }
        passed.iter().all(|x| *x >= 0.0).then_some(Counters(passed))
    }

    /// The mean step that a decode saw, and the mean time of a request outside of steps.
    fn observations(&self) -> Vec<Observation> {
        let [
            steps,
            prompt,
            cached,
            generated,
            gaps_s,
            gaps,
            asked,
            ended,
            written,
            first_s,
            firsts,
            queued_s,
            prefill_s,
        ] = self.0;
        let mut seen = Vec::new();
        let mut push = |work, seconds: f64| {
            if seconds > 0.0 {
                seen.push(Observation {
                    work,
                    seconds,
                    part: 0,
                });
            }
        };
        if steps > 0.0 && gaps > 0.0 && ended > 0.0 {
            let (input, output) = (asked / ended, written / ended);
            let computed = (prompt - cached).max(0.0) / steps;
            let decodes = generated / steps;
            let context = input + output / 2.0;
            let work = [
                1.0,
                computed,
                computed * (input + 1.0) / 2.0,
                decodes,
                decodes * context,
                0.0,
            ];
            push(work, gaps_s / gaps);
        }
        if firsts > 0.0 {
            let mut work = [0.0; COUNT];
            work[API] = 1.0;
            push(work, (first_s - queued_s - prefill_s) / firsts);
        }
        seen
    }
}

/// Fits the terms to steps.
///
/// # Errors
/// Too few steps.
pub fn fit(observations: &[Observation]) -> anyhow::Result<Fitted> {
    let n = observations.len();
    let mut steps: Vec<Observation> = observations.to_vec();
    for (i, step) in steps.iter_mut().enumerate() {
        step.part = i * PARTS / n.max(1);
    }
    // Of a term that every step has alike, nothing is seen.
    for (i, what, mend) in [
        (
            1,
            "prompt tokens per step",
            "record while prompts of different lengths arrive",
        ),
        (3, "sequences per step", "record at several concurrencies"),
    ] {
        let of: Vec<f64> = steps
            .iter()
            .filter(|o| o.work[0] > 0.0)
            .map(|o| o.work[i])
            .collect();
        let (low, high) = if of.is_empty() {
            (0.0, 0.0)
        } else {
            (quantile(&of, 0.02), quantile(&of, 0.98))
        };
        ensure!(
            high > 1.2 * low && high > 0.0,
            "{what}: {low:.0} in nearly all of the recording, so their time cannot be separated from that of the others; {mend}"
        );
    }
    let terms = observed::fit(&steps)?;
    let mut without = Vec::new();
    let mut held_out = Vec::new();
    for part in 0..PARTS {
        let kept: Vec<Observation> = steps.iter().filter(|o| o.part != part).copied().collect();
        let out: Vec<&Observation> = steps
            .iter()
            .filter(|o| o.part == part && o.work[0] > 0.0)
            .collect();
        let Ok(found) = observed::fit(&kept) else {
            continue;
        };
        without.push(found);
        if out.is_empty() {
            continue;
        }
        let each: Vec<f64> = out
            .iter()
            .map(|o| (o.predicted(&found) / o.seconds - 1.0).abs())
            .collect();
        let predicted: Vec<f64> = out.iter().map(|o| o.predicted(&found)).collect();
        let measured: Vec<f64> = out.iter().map(|o| o.seconds).collect();
        held_out.push(HeldOut {
            name: format!("fifth {} of the recording", part + 1),
            count: out.len(),
            errors: vec![[
                quantile(&each, 0.5),
                quantile(&predicted, 0.5) / quantile(&measured, 0.5) - 1.0,
            ]],
        });
    }
    ensure!(
        without.len() >= 2,
        "no part of the data can be left out: record for longer"
    );
    let mut notes = Vec::new();
    if terms[API] == 0.0 {
        notes.push(
            "the time of a request outside of steps (`api_ns`) is not in this data: TTFT will be too short by it; \
             --engine and --requests measure it"
                .to_owned(),
        );
    }
    Ok(Fitted {
        errors: observed::jackknife(&terms, &without),
        terms,
        quantities: &["step"],
        held_out,
        data: format!("{n} observations"),
        notes,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRUE: [f64; COUNT] = [3e6, 2e4, 1.0, 1.5e5, 40.0, 0.0];

    /// 300 steps of known length, as recorded.
    fn recording() -> String {
        let mut text = String::new();
        for i in 0..300_u64 {
            let (prompts, decodes) = (i % 3, i * 7 % 13 + 1);
            let (tokens, context) = (
                prompts * (50 + i * 37 % 400),
                decodes * (100 + i * 11 % 900),
            );
            let chunk = tokens as f64 / prompts.max(1) as f64;
            let pairs = tokens as f64 * f64::midpoint(chunk, 1.0);
            let ns = TRUE[0]
                + TRUE[1] * tokens as f64
                + TRUE[2] * pairs
                + TRUE[3] * decodes as f64
                + TRUE[4] * context as f64;
            let event = serde_json::json!({
                "version": 1, "worker_id": "w0", "dp_rank": 0, "counter_id": i, "wall_time": ns / 1e9,
                "scheduled_requests": {
                    "num_prefill_requests": prompts, "sum_prefill_tokens": tokens, "var_prefill_length": 0.0,
                    "sum_prefill_kv_tokens": 0, "num_decode_requests": decodes,
                    "sum_decode_kv_tokens": context, "var_decode_kv_tokens": 0.0},
                "queued_requests": {
                    "num_prefill_requests": 0, "sum_prefill_tokens": 0, "var_prefill_length": 0.0,
                    "num_decode_requests": 0, "sum_decode_kv_tokens": 0, "var_decode_kv_tokens": 0.0},
            });
            text.push_str(
                &serde_json::json!({"topic": "t", "sequence": i, "event": event}).to_string(),
            );
            text.push('\n');
        }
        text
    }

    #[test]
    fn terms_of_recorded_steps_come_back() {
        let fitted = fit(&recorded(&recording()).unwrap()).unwrap();
        for (i, (found, expected)) in fitted.terms.iter().zip(TRUE).enumerate().take(5) {
            assert!(
                (found / expected - 1.0).abs() < 0.02,
                "{i}: {found} {expected}"
            );
        }
        assert_eq!(fitted.held_out.len(), PARTS);
        assert!(fitted.held_out.iter().all(|part| part.errors[0][0] < 0.01));
        assert!(fitted.notes[0].contains("api_ns"));
    }

    #[test]
    fn recordings_without_different_loads_are_refused() {
        let steps = recorded(&recording()).unwrap();
        let alike: Vec<Observation> = steps
            .iter()
            .map(|o| Observation {
                work: [1.0, 0.0, 0.0, 4.0, 4000.0, 0.0],
                ..*o
            })
            .collect();
        let error = fit(&alike).err().unwrap().to_string();
        assert!(error.contains("prompt tokens per step"), "{error}");
        let text = recording().replacen("\"wall_time\":0.0", "\"wall_time\":-0.0", 1);
        let error = format!("{:#}", recorded(&text).unwrap_err());
        assert!(error.contains("line 1: `wall_time`"), "{error}");
        assert!(recorded("{\"event\": {\"wall_time\": 1}}\n").is_err());
    }

    /// Scrapes of a vLLM whose steps have known length.
    fn scrape(totals: &[f64; COUNTERS.len()]) -> String {
        let lines = COUNTERS.iter().zip(totals);
        let lines = lines.map(|(name, total)| format!("{name}{{engine=\"0\"}} {total}"));
        lines.collect::<Vec<String>>().join("\n")
    }

    #[test]
    fn terms_of_scrapes_come_back() {
        let folder = tempfile::tempdir().unwrap();
        let mut totals = [0.0; COUNTERS.len()];
        let mut paths = Vec::new();
        for i in 0..60 {
            let path = folder.path().join(format!("{i}.prom"));
            std::fs::write(&path, scrape(&totals)).unwrap();
            paths.push(path);
            let steps = 100.0;
            let (computed, decodes) = (f64::from(i * 37 % 50) * 3.0, f64::from(i * 7 % 13 + 1));
            let (input, output) = (
                50.0 + f64::from(i * 53 % 300),
                20.0 + f64::from(i * 31 % 90),
            );
            let gap = (TRUE[0]
                + TRUE[1] * computed
                + TRUE[2] * computed * (input + 1.0) / 2.0
                + TRUE[3] * decodes
                + TRUE[4] * decodes * (input + output / 2.0))
                / 1e9;
            let gaps = steps * decodes;
            let added = [
                steps,
                computed * steps,
                0.0,
                gaps,
                gap * gaps,
                gaps,
                10.0 * input,
                10.0,
                10.0 * output,
                10.0 * 0.305,
                10.0,
                10.0 * 0.1,
                10.0 * 0.2,
            ];
            for (total, add) in totals.iter_mut().zip(added) {
                *total += add;
            }
        }
        let fitted = fit(&of_metrics(&paths).unwrap()).unwrap();
        for i in [0, 1, 3] {
            let (found, expected) = (fitted.terms[i], TRUE[i]);
            assert!(
                (found / expected - 1.0).abs() < 0.05,
                "{i}: {found} {expected}"
            );
        }
        assert!(
            (fitted.terms[API] / 5e6 - 1.0).abs() < 0.01,
            "{:?}",
            fitted.terms
        );
        let error = format!("{:#}", of_metrics(&paths[..3]).unwrap_err());
        assert!(error.contains("intervals with traffic"), "{error}");
        paths.swap(3, 9);
        let error = format!("{:#}", of_metrics(&paths).unwrap_err());
        assert!(error.contains("a counter fell"), "{error}");
        std::fs::write(&paths[0], "up 1\n").unwrap();
        let error = format!("{:#}", of_metrics(&paths).unwrap_err());
        assert!(
            error.contains("vllm:iteration_tokens_total_count"),
            "{error}"
        );
    }
}
