//! `slipstream serve --shadow`: the twin of a fleet of real engines, in step with it.
//!
//! ```text
//!   shards ──► bounded queue ──► thread: twin (virtual time, a little behind) ──► figures ──► /metrics, /ui
//! ```
//!
//! The twin computes a request once its end is known, since its length is, and once all requests that arrived before it
//! have ended. Each request goes to the engine that had it: the twin checks engines, not the router.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Context;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use slipstream_base::sync::unpoisoned;
use slipstream_base::text::counted;
use slipstream_base::width::to_u32;
use slipstream_base::{Role, SimTime};
use slipstream_config::cluster::{Cluster, file};
use slipstream_config::doc::Doc;
use slipstream_frontend::shadow::{ShadowEvent, ShadowFeed, ShadowRequest};
use slipstream_planes::clock::monotonic_ns;
use slipstream_twin::{Follower, Options, RequestRecord, Sink};
use slipstream_workload::prompt::{self, Content, PromptSource, Segment};
use slipstream_workload::{Images, Request};

/// Interval at which the twin advances.
const TURN: Duration = Duration::from_millis(250);

/// Requests may be announced this much after their arrival, ns: their prompts are tokenized first.
const ANNOUNCED_NS: u64 = 1_000_000_000;

/// The twin waits for the end of a request for so long, ns, and then goes on without it.
const HOLD_NS: u64 = 300_000_000_000;

/// Time over which figures are means, ns, and requests per engine that they are means of at most.
const WINDOW_NS: u64 = 60_000_000_000;
const WINDOW_REQUESTS: usize = 8192;

/// Requests in a mean that is compared: fewer say little.
const REQUESTS_MIN: usize = 20;

/// Requests in the twin at one time beyond which it cannot keep up, and begins anew.
const IN_FLIGHT_MAX: usize = 1 << 14;

/// Flags of `slipstream serve`.
#[derive(clap::Args)]
pub(super) struct ShadowArgs {
    /// Run the cluster of this file in virtual time on the requests of the real engines, and publish its latencies
    /// beside theirs (`slipstream describe` writes such a file)
    #[arg(long, value_name = "FILE")]
    shadow: Option<PathBuf>,
    /// Ratio of predicted to measured latency, in either direction, beyond which `slipstream_shadow_parted` is 1
    #[arg(long, value_name = "RATIO", default_value_t = 1.5, requires = "shadow", value_parser = ratio)]
    shadow_ratio: f64,
}

fn ratio(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok();
    let usable = number.filter(|ratio| ratio.is_finite() && *ratio > 1.0);
    usable.ok_or_else(|| format!("`{text}` is not a number above 1"))
}

/// A twin that follows a fleet until it is dropped.
pub(super) struct Shadow {
    figures: Arc<Figures>,
    feed: ShadowFeed,
    stop: Option<SyncSender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl ShadowArgs {
    /// Whether a twin is asked for.
    pub(super) fn is_on(&self) -> bool {
        self.shadow.is_some()
    }

    /// Starts the twin of `fleet`, whose blocks at the router have `block_size` tokens, if one is asked for.
    ///
    /// # Errors
    /// The file is not valid, or does not fit the fleet.
    pub(super) fn start(&self, fleet: &Cluster, block_size: u32) -> anyhow::Result<Option<Shadow>> {
        let Some(path) = &self.shadow else {
            return Ok(None);
        };
        let named = || format!("the twin's cluster file (--shadow) {}", path.display());
        let bytes = super::files::read(path).with_context(named)?;
        let doc = Doc::parse(&path.display().to_string(), &bytes);
        let (cluster, _) = file::read(doc, super::files::read).with_context(named)?;
        check(fleet, &cluster).with_context(named)?;
        let (feed, events, dropped) = ShadowFeed::new();
        let figures = Arc::new(Figures {
            ratio: self.shadow_ratio,
            dropped,
            ..Figures::default()
        });
        // Errors in the model of step times are reported at the start.
        let options = options();
        Follower::new(&cluster, &options, super::files::read).with_context(named)?;
        let (stop, stopped) = sync_channel(1);
        let shared = figures.clone();
        let thread = std::thread::Builder::new()
            .name("shadow-twin".into())
            .spawn(move || follow(&cluster, block_size, &events, &stopped, &shared))?;
        Ok(Some(Shadow {
            figures,
            feed,
            stop: Some(stop),
            thread: Some(thread),
        }))
    }
}

impl Shadow {
    /// Where shards put their requests.
    pub(super) fn feed(&self) -> ShadowFeed {
        self.feed.clone()
    }

    /// Its figures, for `/metrics`.
    pub(super) fn collector(&self) -> ShadowCollector {
        ShadowCollector(self.figures.clone())
    }
}

impl Drop for Shadow {
    fn drop(&mut self) {
        self.stop = None; // the thread sees it at its next turn
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread of the twin ended by panic");
        }
    }
}

/// Whether `twin` has a worker for each engine.
fn check(fleet: &Cluster, twin: &Cluster) -> anyhow::Result<()> {
    let pools = fleet.pools.iter().filter_map(|pool| pool.engines.as_ref());
    let engines: usize = pools.map(|engines| engines.urls.len()).sum();
    anyhow::ensure!(
        !twin.has_engines(),
        "it lists real engines, and the twin's are modelled: write `workers` instead of `engines`, or use the \
         output of `slipstream describe`"
    );
    let workers: u32 = twin.pools.iter().map(|pool| pool.workers).sum();
    anyhow::ensure!(
        workers as usize >= engines,
        "it has {}, and the fleet {}: each engine is the worker of the same number",
        counted(workers.into(), "worker"),
        counted(engines as u64, "engine")
    );
    let has_roles = |cluster: &Cluster| cluster.pools.iter().any(|pool| pool.role != Role::Both);
    anyhow::ensure!(
        !has_roles(fleet) && !has_roles(twin),
        "pools with the role \"prefill\" or \"decode\" cannot be followed: a request has one engine"
    );
    Ok(())
}

fn options() -> Options {
    Options {
        in_flight_max: IN_FLIGHT_MAX,
        ..Options::default()
    }
}

/// Latencies of a request, s.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Times {
    /// `None`: the answer was no stream, and has none.
    ttft: Option<f64>,
    /// Mean time between tokens; `None`: it has fewer than two, or was no stream.
    itl: Option<f64>,
    e2e: f64,
    /// Share of the prompt that was cached.
    hit: Option<f64>,
}

/// A request on both sides.
#[derive(Clone, Copy, Debug)]
struct Pair {
    ended_ns: u64,
    measured: Times,
    predicted: Times,
    /// From its arrival to the pass that computed it first, s.
    queued: f64,
}

/// Means of an engine over the window.
#[derive(Clone, Debug, Default, PartialEq)]
struct EngineFigures {
    requests: usize,
    /// By [`QUANTITIES`]: measured and predicted, of the requests that have both.
    means: [Option<(f64, f64)>; 4],
    queued: Option<f64>,
}

/// Compared quantities.
const QUANTITIES: [&str; 4] = ["ttft", "itl", "e2e", "hits"];

/// Difference of two shares of cached tokens beyond which they have parted.
const HITS_APART: f64 = 0.1;

impl EngineFigures {
    fn of(pairs: &VecDeque<Pair>) -> EngineFigures {
        let mean = |of: fn(&Times) -> Option<f64>| {
            let both = pairs
                .iter()
                .filter_map(|pair| Some((of(&pair.measured)?, of(&pair.predicted)?)));
            let (mut count, mut sums) = (0, (0.0, 0.0));
            for (measured, predicted) in both {
                count += 1;
                sums = (sums.0 + measured, sums.1 + predicted);
            }
            let count = f64::from(count);
            (count > 0.0).then(|| (sums.0 / count, sums.1 / count))
        };
        let queued = pairs.iter().map(|pair| pair.queued).sum::<f64>() / pairs.len() as f64;
        EngineFigures {
            requests: pairs.len(),
            means: [
                mean(|times| times.ttft),
                mean(|times| times.itl),
                mean(|times| Some(times.e2e)),
                mean(|times| times.hit),
            ],
            queued: (!pairs.is_empty()).then_some(queued),
        }
    }

    /// Whether both sides have parted in a quantity; `None`: too few requests say so.
    fn parted(&self, quantity: usize, ratio: f64) -> Option<bool> {
        let (measured, predicted) = self.means[quantity]?;
        if self.requests < REQUESTS_MIN {
            return None;
        }
        if QUANTITIES[quantity] == "hits" {
            return Some((measured - predicted).abs() > HITS_APART);
        }
        Some(predicted > measured * ratio || measured > predicted * ratio)
    }
}

/// Shared with `/metrics`.
#[derive(Debug, Default)]
struct Figures {
    ratio: f64,
    /// By address.
    engines: Mutex<BTreeMap<Arc<str>, EngineFigures>>,
    compared: AtomicU64,
    /// Messages for which there was no room.
    dropped: Arc<AtomicU64>,
    /// By [`SKIPPED`].
    skipped: [AtomicU64; SKIPPED.len()],
    restarts: AtomicU64,
    lag_ns: AtomicU64,
}

/// Why requests are not compared.
const SKIPPED: [&str; 5] = ["unanswered", "moved", "late", "no_worker", "refused"];

#[derive(Clone, Copy)]
enum Skip {
    /// No engine answered it with a token.
    Unanswered,
    /// Several engines had a part of it.
    Moved,
    /// It ended after the twin had passed its arrival.
    Late,
    /// Its engine joined later: the twin has no such worker.
    NoWorker,
    /// The twin's engine refused it.
    Refused,
}

impl Figures {
    fn skip(&self, why: Skip) {
        self.skipped[why as usize].fetch_add(1, Relaxed);
    }
}

/// Requests that the twin knows, and pairs of the window.
struct Comparison<'f> {
    figures: &'f Figures,
    /// Clock of the fleet at the twin's time 0, ns.
    base_ns: u64,
    measured: HashMap<u64, Box<ShadowRequest>>,
    /// By the engine's address: another engine can get its worker.
    pairs: BTreeMap<Arc<str>, VecDeque<Pair>>,
}

impl Sink for Comparison<'_> {
    fn on_request(&mut self, record: &RequestRecord<'_>) {
        let Some(measured) = self.measured.remove(&record.request.session) else {
            return;
        };
        if record.error.is_some() || record.output_tokens == 0 {
            return self.figures.skip(Skip::Refused);
        }
        let seconds = |from: SimTime, to: SimTime| to.since(from) as f64 / 1e9;
        let due = record.request.due;
        let per_gap = |from: SimTime, to: SimTime| {
            let gaps = measured
                .output_tokens
                .checked_sub(1)
                .filter(|&gaps| gaps > 0)?;
            Some(seconds(from, to) / f64::from(gaps))
        };
        let at = |ns: u64| SimTime(ns.saturating_sub(self.base_ns));
        let (first, last) = (at(measured.first_ns), at(measured.last_ns));
        let share = |cached: u32| f64::from(cached) / f64::from(measured.input_tokens.max(1));
        let is_stream = measured.first_ns > 0;
        let pair = Pair {
            ended_ns: measured.last_ns,
            measured: Times {
                ttft: is_stream.then(|| seconds(due, first)),
                itl: per_gap(first, last).filter(|_| is_stream),
                e2e: seconds(due, last),
                hit: measured.cached_tokens.map(share),
            },
            predicted: Times {
                ttft: Some(seconds(due, record.first)),
                itl: per_gap(record.first, record.last),
                e2e: seconds(due, record.last),
                hit: Some(share(record.cached_tokens)),
            },
            queued: seconds(due, record.admitted.max(due)),
        };
        // A client that left, or an answer that broke off: its load counts, its times do not.
        if measured.is_complete {
            self.figures.compared.fetch_add(1, Relaxed);
            let pairs = self.pairs.entry(measured.engine.clone()).or_default();
            if pairs.len() >= WINDOW_REQUESTS {
                pairs.pop_front();
            }
            pairs.push_back(pair);
        }
    }
}

impl Comparison<'_> {
    /// Forgets pairs that have left the window, and publishes the means of the others.
    fn publish(&mut self, now_ns: u64) {
        let mut engines = BTreeMap::new();
        self.pairs.retain(|engine, pairs| {
            pairs.retain(|pair| pair.ended_ns + WINDOW_NS > now_ns);
            if !pairs.is_empty() {
                engines.insert(engine.clone(), EngineFigures::of(pairs));
            }
            !pairs.is_empty()
        });
        let published = self.figures.engines.lock();
        *unpoisoned(published) = engines;
    }
}

/// The prompt of `request`, for the twin: a text per block, and one of its own for the rest.
fn prompt(request: &ShadowRequest, block_size: u32) -> PromptSource {
    let whole = request.input_tokens / block_size;
    let shared = request.blocks.iter().take(whole as usize);
    let segment = |text: u64, tokens: u32| Segment {
        content: Content::Text(text),
        tokens,
        role: prompt::Role::User,
    };
    let blocks = to_u32(shared.len());
    let rest = request.input_tokens - blocks * block_size;
    // Texts of blocks are hashes, which do not meet small numbers but by chance.
    let shared = shared.map(|block| segment(block.0, block_size));
    PromptSource::new(shared.chain([segment(request.id, rest)]))
}

/// Follows the fleet until `stopped` hangs up.
fn follow(
    cluster: &Cluster,
    block_size: u32,
    events: &Receiver<ShadowEvent>,
    stopped: &Receiver<()>,
    figures: &Figures,
) {
    let options = options();
    let workers: u32 = cluster.pools.iter().map(|pool| pool.workers).sum();
    let read = |path: &Path| super::files::read(path);
    // By arrival and number: requests under way, and those that the twin has not got.
    let mut open: BTreeSet<(u64, u64)> = BTreeSet::new();
    let mut arrivals: HashMap<u64, u64> = HashMap::new();
    let mut ended: BTreeMap<(u64, u64), Box<ShadowRequest>> = BTreeMap::new();
    'anew: loop {
        let mut follower = match Follower::new(cluster, &options, read) {
            Ok(follower) => follower,
            Err(error) => return tracing::error!("the twin of the fleet ended: {error}"),
        };
        let base_ns = monotonic_ns().saturating_sub(HOLD_NS);
        let mut both = Comparison {
            figures,
            base_ns,
            measured: HashMap::new(),
            pairs: BTreeMap::new(),
        };
        loop {
            match stopped.recv_timeout(TURN) {
                Err(RecvTimeoutError::Timeout) => {}
                _ => return,
            }
            let now_ns = monotonic_ns();
            for event in events.try_iter() {
                match event {
                    ShadowEvent::Arrived { id, arrival_ns } => {
                        open.insert((arrival_ns, id));
                        arrivals.insert(id, arrival_ns);
                    }
                    ShadowEvent::Ended(request) => {
                        let known = arrivals.remove(&request.id);
                        open.remove(&(request.arrival_ns, request.id));
                        let skip = match request.worker {
                            _ if known.is_none() => Some(Skip::Late),
                            None => Some(Skip::Unanswered),
                            _ if request.output_tokens == 0 || request.input_tokens == 0 => {
                                Some(Skip::Unanswered)
                            }
                            _ if request.is_moved => Some(Skip::Moved),
                            Some(worker) if worker.0 >= workers => Some(Skip::NoWorker),
                            Some(_) => None,
                        };
                        match skip {
                            Some(why) => figures.skip(why),
                            None => _ = ended.insert((request.arrival_ns, request.id), request),
                        }
                    }
                }
            }
            while let Some(&(arrival_ns, id)) = open.first()
                && arrival_ns + HOLD_NS < now_ns
            {
                arrivals.remove(&id);
                open.pop_first();
            }
            let first_open = open.first().map(|key| key.0);
            let known_ns = now_ns.saturating_sub(ANNOUNCED_NS);
            let to_ns = first_open.map_or(known_ns, |first| first.min(known_ns));
            figures.lag_ns.store(now_ns.saturating_sub(to_ns), Relaxed);
            let later = ended.split_off(&(to_ns, 0));
            for request in std::mem::replace(&mut ended, later).into_values() {
                let worker = request.worker.expect("others were skipped");
                let due = SimTime(request.arrival_ns.saturating_sub(base_ns));
                let pushed = Request {
                    session: request.id,
                    turn: 0,
                    turns: 1,
                    due,
                    prompt: prompt(&request, block_size),
                    output_len: request.output_tokens,
                    ignore_eos: true,
                    priority: request.priority,
                    adapter: 0,
                    images: Images::default(),
                    model: 0,
                    class: 0,
                };
                match follower.push(pushed, worker) {
                    Ok(()) => _ = both.measured.insert(request.id, request),
                    Err(_) => figures.skip(Skip::Late),
                }
            }
            let to = SimTime(to_ns.saturating_sub(base_ns));
            let why = match follower.advance(to, &mut both) {
                Ok(None) => None,
                Ok(Some(cut)) => Some(cut),
                Err(error) => Some(error.to_string()),
            };
            both.publish(now_ns);
            if let Some(why) = why {
                tracing::warn!("the twin of the fleet begins anew: {why}");
                figures.restarts.fetch_add(1, Relaxed);
                continue 'anew;
            }
        }
    }
}

/// Encodes the figures.
pub(super) struct ShadowCollector(Arc<Figures>);

impl fmt::Debug for ShadowCollector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ShadowCollector")
    }
}

/// Names of the gauges of [`QUANTITIES`], and their help.
const GAUGES: [(&str, &str); 4] = [
    (
        "slipstream_shadow_ttft_mean_seconds",
        "Mean time to the first token over a minute, measured and predicted by the twin",
    ),
    (
        "slipstream_shadow_itl_mean_seconds",
        "Mean time between tokens over a minute, measured and predicted by the twin",
    ),
    (
        "slipstream_shadow_e2e_mean_seconds",
        "Mean time to the last token over a minute, measured and predicted by the twin",
    ),
    (
        "slipstream_shadow_hit_ratio",
        "Mean share of prompts that was cached over a minute, measured and predicted by the twin",
    ),
];

impl Collector for ShadowCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let figures = &*self.0;
        let engines = figures.engines.lock();
        let engines = unpoisoned(engines).clone();
        for (quantity, (name, help)) in GAUGES.iter().enumerate() {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for (engine, of) in &engines {
                let Some((measured, predicted)) = of.means[quantity] else {
                    continue;
                };
                for (side, value) in [("measured", measured), ("predicted", predicted)] {
                    family
                        .encode_family(&[("engine", &**engine), ("side", side)])?
                        .encode_gauge(&value)?;
                }
            }
        }
        let mut queued = encoder.encode_descriptor(
            "slipstream_shadow_queue_mean_seconds",
            "Mean time in the engine's queue over a minute, predicted by the twin",
            None,
            MetricType::Gauge,
        )?;
        for (engine, of) in &engines {
            if let Some(value) = of.queued {
                queued
                    .encode_family(&[("engine", &**engine)])?
                    .encode_gauge(&value)?;
            }
        }
        let mut parted = encoder.encode_descriptor(
            "slipstream_shadow_parted",
            "Whether prediction and measurement differ by more than `--shadow-ratio`, or hits by 0.1",
            None,
            MetricType::Gauge,
        )?;
        for (engine, of) in &engines {
            for (at, quantity) in QUANTITIES.iter().enumerate() {
                if let Some(is_parted) = of.parted(at, figures.ratio) {
                    parted
                        .encode_family(&[("engine", &**engine), ("of", quantity)])?
                        .encode_gauge(&f64::from(u8::from(is_parted)))?;
                }
            }
        }
        encoder
            .encode_descriptor(
                "slipstream_shadow_lag_seconds",
                "How far the twin is behind the fleet: it waits for the ends of requests",
                None,
                MetricType::Gauge,
            )?
            .encode_gauge(&(figures.lag_ns.load(Relaxed) as f64 / 1e9))?;
        for (name, help, count) in [
            (
                "slipstream_shadow_requests",
                "Requests that were compared with the twin's",
                &figures.compared,
            ),
            (
                "slipstream_shadow_dropped",
                "Messages to the twin for which there was no room",
                &*figures.dropped,
            ),
            (
                "slipstream_shadow_restarts",
                "Times that the twin began anew because it could not keep up",
                &figures.restarts,
            ),
        ] {
            encoder
                .encode_descriptor(name, help, None, MetricType::Counter)?
                .encode_counter::<NoLabelSet, u64, f64>(&count.load(Relaxed), None)?;
        }
        let mut skipped = encoder.encode_descriptor(
            "slipstream_shadow_skipped",
            "Requests that the twin did not get, or refused",
            None,
            MetricType::Counter,
        )?;
        for (why, count) in SKIPPED.iter().zip(&figures.skipped) {
            skipped
                .encode_family(&[("reason", *why)])?
                .encode_counter::<NoLabelSet, u64, f64>(&count.load(Relaxed), None)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(measured: f64, predicted: f64) -> Pair {
        let times = |ttft: f64| Times {
            ttft: Some(ttft),
            itl: None,
            e2e: 2.0 * ttft,
            hit: Some(ttft / 10.0),
        };
        Pair {
            ended_ns: 0,
            measured: times(measured),
            predicted: times(predicted),
            queued: 0.25,
        }
    }

    #[test]
    fn sides_part_by_a_ratio_in_either_direction_once_there_are_enough_requests() {
        let figures = |measured: f64, predicted: f64, count: usize| {
            EngineFigures::of(&vec![pair(measured, predicted); count].into())
        };
        let few = figures(1.0, 9.0, REQUESTS_MIN - 1);
        assert_eq!(few.means[0], Some((1.0, 9.0)));
        assert_eq!(few.parted(0, 1.5), None);
        for (measured, predicted, parted) in [
            (1.0, 1.4, false),
            (1.0, 1.6, true),
            (1.6, 1.0, true),
            (1.4, 1.0, false),
        ] {
            let of = figures(measured, predicted, REQUESTS_MIN);
            assert_eq!(of.parted(0, 1.5), Some(parted), "{measured} {predicted}");
            assert_eq!(
                of.parted(1, 1.5),
                None,
                "no time between tokens was measured"
            );
            assert_eq!(of.parted(3, 1.5), Some(false));
        }
        assert_eq!(figures(1.0, 2.5, REQUESTS_MIN).parted(3, 100.0), Some(true));
        assert_eq!(figures(1.0, 1.0, 3).queued, Some(0.25));
        assert_eq!(
            EngineFigures::of(&VecDeque::new()),
            EngineFigures::default()
        );
    }

    #[test]
    fn prompts_share_the_blocks_that_the_router_saw() {
        let request = |id: u64, tokens: u32, blocks: &[u64]| ShadowRequest {
            id,
            input_tokens: tokens,
            blocks: blocks
                .iter()
                .map(|&hash| slipstream_base::BlockHash(hash))
                .collect(),
            ..ShadowRequest::default()
        };
        let hashes = |request: &ShadowRequest| {
            let root = slipstream_base::BlockHash::default();
            let blocks = prompt(request, 16).to_blocks(16, root, request.id).unwrap();
            (blocks.len(), blocks.blocks().to_vec())
        };
        let (one, two) = (
            request(1, 50, &[71, 72, 73]),
            request(2, 70, &[71, 72, 99, 98]),
        );
        assert_eq!((hashes(&one).0, hashes(&two).0), (50, 70));
        assert_eq!(hashes(&one).1[..2], hashes(&two).1[..2]);
        assert_ne!(hashes(&one).1[2], hashes(&two).1[2]);
        // More blocks than the engine counted tokens: those of the text are guesses.
        assert_eq!(hashes(&request(3, 20, &[71, 72, 73])).0, 20);
    }
}
