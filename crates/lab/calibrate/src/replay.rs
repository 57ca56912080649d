//! Terms of one engine from its requests: a sum over the steps that each request saw, then the twin, which also
//! knows queues.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, ensure};
use slipstream_base::width::to_usize;
use slipstream_config::cluster::{Cluster, TimingConfig};
use slipstream_config::workload_file::{Arrival, Content, OnBadLine, TraceFile, Workload};
use slipstream_perf::fit::quantile;
use slipstream_perf::observed::{self, COUNT, Observation, Terms};
use slipstream_twin::{Options, RequestRecord, Sink};

use crate::fitted::{Fitted, HeldOut};
use crate::records::{self, MeasuredRequest, Parts};

/// Quantities of which the error is stated.
const QUANTITIES: &[&str] = &["TTFT", "TPOT", "E2E"];

/// Fits the terms of the engine of `cluster` to `records`, and again without each of `parts`.
///
/// # Errors
/// Too few records, or records that the engine cannot have.
pub fn fit(
    cluster: &Cluster,
    records: &[MeasuredRequest],
    parts: &Parts,
) -> anyhow::Result<Fitted> {
    records::enough(records)?;
    let engine = &cluster.pools[0].engine;
    let most = records::most_at_once(records);
    ensure!(
        most <= engine.max_num_seqs as usize,
        "{most} requests had tokens at the same time, but `max_num_seqs` is {}: set it to the engine's, or check the \
         units of the times",
        engine.max_num_seqs
    );
    let longest = records.iter().map(|r| r.input + r.output).max();
    ensure!(
        longest.unwrap_or(0) <= engine.max_model_len,
        "a request has {} tokens, but `max_model_len` is {}: set it to the engine's",
        longest.unwrap_or(0),
        engine.max_model_len
    );
    let replay = Replay::new(cluster, records)?;
    let all = replay.terms(|_| true)?;
    let mut without = Vec::new();
    let mut held_out = Vec::new();
    for (part, name) in parts.names.iter().enumerate() {
        let left_out: Vec<usize> = (0..records.len())
            .filter(|&i| parts.of[i] == part)
            .collect();
        if left_out.is_empty() {
            continue;
        }
        let Ok(terms) = replay.terms(|i| parts.of[i] != part) else {
            continue;
        };
        without.push(terms);
        if let Some(times) = replay.run(&terms) {
            held_out.push(HeldOut {
                name: name.clone(),
                count: left_out.len(),
                errors: errors(records, &times, &left_out),
            });
        }
    }
    ensure!(
        without.len() >= 2,
        "no part of the data can be left out: record more, or longer"
    );
    let mut notes = Vec::new();
    if engine.enable_prefix_caching && records.iter().all(|r| r.cached == 0) {
        notes.push(
            "the records state no cached tokens; if prompts shared prefixes, their computation counts as if it had \
             been faster: add a column `cached_tokens`"
                .to_owned(),
        );
    }
    Ok(Fitted {
        errors: observed::jackknife(&all, &without),
        terms: all,
        quantities: QUANTITIES,
        held_out,
        data: format!(
            "{} requests, at most {most} at once, prompts of up to {} tokens",
            records.len(),
            records.iter().map(|r| r.input).max().unwrap_or(0)
        ),
        notes,
    })
}

/// Median error of each request's times, and error of the median time.
fn errors(records: &[MeasuredRequest], times: &[[f64; 2]], chosen: &[usize]) -> Vec<[f64; 2]> {
    let pairs: [Vec<(f64, f64)>; 3] = [
        chosen
            .iter()
            .map(|&i| (times[i][0], records[i].ttft_s))
            .collect(),
        chosen
            .iter()
            .filter_map(|&i| {
                let gaps = f64::from(records[i].output.max(2) - 1);
                Some(((times[i][1] - times[i][0]) / gaps, records[i].tpot_s()?))
            })
            .collect(),
        chosen
            .iter()
            .map(|&i| (times[i][1], records[i].e2e_s))
            .collect(),
    ];
    let of = |pairs: &Vec<(f64, f64)>| {
        if pairs.is_empty() {
            return [0.0, 0.0];
        }
        let each: Vec<f64> = pairs.iter().map(|(s, m)| (s / m - 1.0).abs()).collect();
        let simulated: Vec<f64> = pairs.iter().map(|(s, _)| *s).collect();
        let measured: Vec<f64> = pairs.iter().map(|(_, m)| *m).collect();
        let of_median = quantile(&simulated, 0.5) / quantile(&measured, 0.5) - 1.0;
        [quantile(&each, 0.5), of_median]
    };
    pairs.iter().map(of).collect()
}

/// The requests as the twin replays them.
struct Replay<'a> {
    cluster: Cluster,
    workload: Workload,
    records: &'a [MeasuredRequest],
    /// Deleted at the end.
    _trace: Scratch,
}

/// A file that is deleted when it is dropped.
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

impl<'a> Replay<'a> {
    fn new(cluster: &Cluster, records: &'a [MeasuredRequest]) -> anyhow::Result<Replay<'a>> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        const TOKENS_PER_ID: u32 = 512;
        let mut text = String::new();
        for (at, r) in records.iter().enumerate() {
            // Cached tokens are not computed; no two prompts share a block.
            let input = r.computed();
            let ids: Vec<u64> = (0..u64::from(input.div_ceil(TOKENS_PER_ID)))
                .map(|block| (at as u64) << 24 | block)
                .collect();
            let _ = writeln!(
                text,
                "{{\"timestamp\": {:.6}, \"input_length\": {input}, \"output_length\": {}, \"hash_ids\": {ids:?}}}",
                r.arrival_s * 1e3,
                r.output
            );
        }
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!(
            "slipstream-calibrate-{}-{number}.jsonl",
            std::process::id()
        ));
        let mut file =
            fs::File::create_new(&path).with_context(|| format!("creating {}", path.display()))?;
        let trace = Scratch(path.clone());
        std::io::Write::write_all(&mut file, text.as_bytes())
            .with_context(|| format!("writing {}", path.display()))?;
        let mut cluster = cluster.clone();
        cluster.pools[0].engines = None;
        Ok(Replay {
            cluster,
            workload: Workload {
                arrival: Arrival::Trace,
                content: Content::Trace(TraceFile {
                    path,
                    on_bad_line: OnBadLine::Stop,
                    tokens_per_id: Some(TOKENS_PER_ID),
                    ..TraceFile::default()
                }),
                ..Workload::default()
            },
            records,
            _trace: trace,
        })
    }

    /// The terms by the records that `uses` chooses; the others are replayed, but do not count.
    fn terms(&self, uses: impl Fn(usize) -> bool) -> anyhow::Result<Terms> {
        let engine = &self.cluster.pools[0].engine;
        let seen = observations(self.records, engine.max_num_batched_tokens);
        let chosen: Vec<Observation> = seen
            .iter()
            .filter(|(i, _)| uses(*i))
            .map(|(_, o)| *o)
            .collect();
        let mut start = observed::fit(&chosen)?;
        // An engine whose every request waited was never seen alone.
        if start[API] == 0.0 {
            let shortest = self.records.iter().map(|r| r.ttft_s);
            start[API] = 1e9 * 0.1 * shortest.fold(f64::INFINITY, f64::min);
        }
        let n = self.records.len();
        let mut measured = Vec::with_capacity(2 * n);
        let mut kinds = Vec::with_capacity(2 * n);
        let mut counted = Vec::with_capacity(2 * n);
        for (i, r) in self.records.iter().enumerate() {
            let tpot = r.tpot_s().filter(|tpot| *tpot > 0.0);
            measured.extend([r.ttft_s.ln(), tpot.map_or(0.0, f64::ln)]);
            kinds.extend([0, 1]);
            counted.extend([uses(i), uses(i) && tpot.is_some()]);
        }
        let mut model = |terms: &Terms| {
            let times = self.run(terms)?;
            let logs = times
                .iter()
                .zip(self.records)
                .flat_map(|(&[first, last], r)| {
                    let gaps = f64::from(r.output.max(2) - 1);
                    let tpot = (last - first) / gaps;
                    [first.max(1e-9).ln(), tpot.max(1e-9).ln()]
                });
            Some(logs.collect())
        };
        Ok(observed::refine(
            &start, &measured, &kinds, &counted, &mut model,
        ))
    }

    /// TTFT and E2E of each record by the twin, s; `None` if a request failed there.
    fn run(&self, terms: &Terms) -> Option<Vec<[f64; 2]>> {
        let mut cluster = self.cluster.clone();
        cluster.pools[0].engine.timing = timing(terms);
        let mut times = Times(vec![[0.0; 2]; self.records.len()], 0);
        let read = |path: &Path| fs::read(path);
        slipstream_twin::simulate(
            &cluster,
            &self.workload,
            &Options::default(),
            read,
            &mut times,
        )
        .ok()?;
        (times.1 == self.records.len()).then_some(times.0)
    }
}

const API: usize = COUNT - 1;

/// Step times of `terms`.
fn timing(terms: &Terms) -> TimingConfig {
    let [base, prefill, pair, decode, context, api] = *terms;
    TimingConfig::Linear {
        base_ns: base,
        per_prefill_token_ns: prefill,
        per_prefill_pair_ns: pair,
        per_decode_token_ns: decode,
        per_sequence_ns: 0.0,
        per_context_token_ns: context,
        api_ns: api,
        // Prompts take time of their own in steps: requests do not tell the two apart.
        api_prompt_token_ns: 0.0,
    }
}

/// TTFT and E2E by request, s, and the number of requests that ended well.
struct Times(Vec<[f64; 2]>, usize);

impl Sink for Times {
    fn on_request(&mut self, r: &RequestRecord<'_>) {
        let s = |until: slipstream_base::SimTime| until.since(r.request.due) as f64 / 1e9;
        if let (Some(times), None) = (self.0.get_mut(to_usize(r.request.session)), r.error) {
            *times = [s(r.first), s(r.last)];
            self.1 += 1;
        }
    }
}

/// Requests as sums of work: of each, the steps from its first token to its last; if its prompt was computed
/// alone, also the time to the first. With the index of the request.
fn observations(records: &[MeasuredRequest], budget: u32) -> Vec<(usize, Observation)> {
    let mut seen = Vec::new();
    let longest = records.iter().map(|r| r.e2e_s).fold(0.0, f64::max);
    for (i, r) in records.iter().enumerate() {
        let (first, last) = (r.first_s(), r.last_s());
        // Sorted by arrival: others that overlap are near.
        let from = records.partition_point(|o| o.arrival_s < r.arrival_s - longest);
        let to = records.partition_point(|o| o.arrival_s < last);
        let others = || (from..to).filter(|&j| j != i).map(|j| &records[j]);
        let alone = others().all(|o| o.last_s() <= r.arrival_s || o.arrival_s >= first);
        if alone {
            let tokens = r.computed();
            let mut work = [0.0; COUNT];
            work[0] = f64::from(tokens.div_ceil(budget));
            work[1] = f64::from(tokens);
            work[2] = pairs(r);
            work[API] = 1.0;
            seen.push((i, observation(work, r.ttft_s, r.part)));
        }
        if r.output < 4 || last <= first {
            continue;
        }
        let steps = f64::from(r.output - 1);
        let own = f64::from(r.input) + f64::from(r.output) / 2.0;
        let mut work = [steps, 0.0, 0.0, steps, steps * own, 0.0];
        for o in others() {
            if (first..last).contains(&o.first_s()) {
                work[1] += f64::from(o.computed());
                work[2] += pairs(o);
            }
            let (begin, end) = (o.first_s().max(first), o.last_s().min(last));
            if end > begin && o.output > 1 {
                let each = f64::from(o.output - 1) / (o.last_s() - o.first_s());
                let tokens = each * (end - begin);
                let written = each * (f64::midpoint(begin, end) - o.first_s());
                work[3] += tokens;
                work[4] += tokens * (f64::from(o.input) + written);
            }
        }
        seen.push((i, observation(work, last - first, r.part)));
    }
    seen
}

fn observation(work: [f64; COUNT], seconds: f64, part: usize) -> Observation {
    Observation {
        work,
        seconds,
        part,
    }
}

/// (Query, key) pairs of a prompt.
fn pairs(r: &MeasuredRequest) -> f64 {
    let tokens = f64::from(r.computed());
    tokens * f64::from(r.cached) + tokens * (tokens + 1.0) / 2.0
}
