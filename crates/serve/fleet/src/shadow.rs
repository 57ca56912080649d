//! The twin of a fleet of real engines, in step with it (`slipstream serve --shadow`).
//!
//! ```text
//!   shards ──► bounded queue ──► thread: twin (virtual time, a little behind) ──► figures ──► /metrics, /ui
//! ```
//!
//! The twin computes a request once its end is known, since its length is, and once all requests that arrived before it
//! have ended. Each request goes to the engine that had it: the twin checks engines, not the router.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Context;
use slipstream_base::sync::{lock, unpoisoned};
use slipstream_base::text::counted;
use slipstream_base::width::to_u32;
use slipstream_base::{Role, SimTime, WorkerId};
use slipstream_config::cluster::Cluster;
use slipstream_frontend::shadow::{ShadowEvent, ShadowFeed, ShadowRequest};
use slipstream_metrics::{Collector, Family, Samples};
use slipstream_planes::clock::monotonic_ns;
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
pub const IN_FLIGHT_MAX: usize = 1 << 14;

/// A twin that follows a fleet, as its owner wires it.
///
/// This crate does not depend on the twin: `serve` and `twin` are products on one floor.
pub struct ShadowOptions {
    /// The twin's cluster: engine `n` of the fleet is its worker `n`.
    pub cluster: Cluster,
    /// Name of the cluster's file, for errors.
    pub name: String,
    /// Ratio of predicted to measured latency, in either direction, beyond which both have parted.
    pub ratio: f64,
    /// Makes the twin.
    pub twin: Box<dyn TwinSource>,
}

/// Makes twins of one cluster.
pub trait TwinSource: Send {
    /// Calls `run` with an idle cluster at time 0 that holds at most [`IN_FLIGHT_MAX`] requests.
    ///
    /// # Errors
    /// The cluster cannot be simulated.
    fn with(&self, run: &mut dyn FnMut(&mut dyn Twin)) -> anyhow::Result<()>;
}

/// A cluster in virtual time that advances as far as its requests are known.
pub trait Twin {
    /// Adds a request that arrives at `request.due` and is computed by `worker`.
    ///
    /// # Errors
    /// It arrived before the time that was reached.
    fn push(&mut self, request: Request, worker: WorkerId) -> Result<(), LateRequest>;

    /// Advances to `to`, and passes requests that end to `ended`.
    ///
    /// # Errors
    /// Why the twin cannot continue.
    fn advance(&mut self, to: SimTime, ended: &mut dyn FnMut(&Prediction)) -> Result<(), String>;
}

/// A request arrived before the time that a twin has reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LateRequest;

/// A request that has ended in the twin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prediction {
    /// [`Request::session`].
    pub id: u64,
    /// The engine refused it, or it failed.
    pub is_refused: bool,
    /// Its arrival.
    pub due: SimTime,
    /// Start of the pass that computed it first.
    pub admitted: SimTime,
    /// Its first token.
    pub first: SimTime,
    /// Its last token.
    pub last: SimTime,
    /// Tokens of the prompt that were cached.
    pub cached_tokens: u32,
    /// Tokens of the answer.
    pub output_tokens: u32,
}

/// A twin that follows a fleet until it is dropped.
pub(crate) struct Shadow {
    figures: Arc<Figures>,
    feed: ShadowFeed,
    stop: Option<SyncSender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Shadow {
    /// Starts the twin of `fleet`, whose blocks at the router have `block_size` tokens.
    ///
    /// # Errors
    /// The cluster is not valid, or does not fit the fleet.
    pub(crate) fn start(
        options: ShadowOptions,
        fleet: &Cluster,
        block_size: u32,
    ) -> anyhow::Result<Shadow> {
        let named = || options.name.clone();
        check(fleet, &options.cluster).with_context(named)?;
        let (feed, events, dropped) = ShadowFeed::new();
        let figures = Arc::new(Figures {
            ratio: options.ratio,
            dropped,
            ..Figures::default()
        });
        // Errors in the model of step times are reported at the start.
        options.twin.with(&mut |_| {}).with_context(named)?;
        let (stop, stopped) = sync_channel(1);
        let shared = figures.clone();
        let thread = std::thread::Builder::new()
            .name("shadow-twin".into())
            .spawn(move || follow(&options, block_size, &events, &stopped, &shared))?;
        Ok(Shadow {
            figures,
            feed,
            stop: Some(stop),
            thread: Some(thread),
        })
    }

    /// Where shards put their requests.
    pub(crate) fn feed(&self) -> ShadowFeed {
        self.feed.clone()
    }

    /// Its figures, for `/metrics`.
    pub(crate) fn collector(&self) -> Box<dyn Collector> {
        slipstream_metrics::collector(self.figures.clone(), Scrape::of, FAMILIES)
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
    fn has_diverged(&self, quantity: usize, ratio: f64) -> Option<bool> {
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
    NoAnswer,
    /// Several engines had a part of it.
    SeveralEngines,
    /// It ended after the twin had passed its arrival.
    LateRequest,
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

impl Comparison<'_> {
    fn on_end(&mut self, record: &Prediction) {
        let Some(measured) = self.measured.remove(&record.id) else {
            return;
        };
        if record.is_refused || record.output_tokens == 0 {
            return self.figures.skip(Skip::Refused);
        }
        let seconds = |from: SimTime, to: SimTime| to.since(from) as f64 / 1e9;
        let due = record.due;
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

    /// Passes the requests that are known to the twin, advances it, and publishes the means.
    ///
    /// # Errors
    /// Why the twin cannot continue.
    fn turn(
        &mut self,
        twin: &mut dyn Twin,
        backlog: &mut Backlog,
        block_size: u32,
        now_ns: u64,
    ) -> Result<(), String> {
        let to_ns = backlog.complete_until_ns(now_ns);
        let lag_ns = now_ns.saturating_sub(to_ns);
        self.figures.lag_ns.store(lag_ns, Relaxed);
        for request in backlog.take_before(to_ns) {
            let worker = request.worker.expect("others were skipped");
            match twin.push(self.request(&request, block_size), worker) {
                Ok(()) => _ = self.measured.insert(request.id, request),
                Err(LateRequest) => self.figures.skip(Skip::LateRequest),
            }
        }
        let to = SimTime(to_ns.saturating_sub(self.base_ns));
        let advanced = twin.advance(to, &mut |record| self.on_end(record));
        self.publish(now_ns);
        advanced
    }

    /// `measured` as a request to the twin.
    fn request(&self, measured: &ShadowRequest, block_size: u32) -> Request {
        Request {
            session: measured.id,
            turn: 0,
            turns: 1,
            due: SimTime(measured.arrival_ns.saturating_sub(self.base_ns)),
            prompt: prompt(measured, block_size),
            output_len: measured.output_tokens,
            ignore_eos: true,
            priority: measured.priority,
            adapter: 0,
            images: Images::default(),
            model: 0,
            class: 0,
        }
    }

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

/// Requests of the fleet that the twin has not received.
#[derive(Default)]
struct Backlog {
    /// By arrival and number: requests under way.
    open: BTreeSet<(u64, u64)>,
    /// Arrivals of these by number.
    arrivals: HashMap<u64, u64>,
    /// By arrival and number: requests that have ended.
    ended: BTreeMap<(u64, u64), Box<ShadowRequest>>,
}

impl Backlog {
    /// Takes the messages of the shards. The twin has `workers` workers.
    fn receive(&mut self, events: &Receiver<ShadowEvent>, workers: u32, figures: &Figures) {
        for event in events.try_iter() {
            match event {
                ShadowEvent::Arrived { id, arrival_ns } => {
                    self.open.insert((arrival_ns, id));
                    self.arrivals.insert(id, arrival_ns);
                }
                ShadowEvent::Ended(request) => {
                    let known = self.arrivals.remove(&request.id);
                    let key = (request.arrival_ns, request.id);
                    self.open.remove(&key);
                    let skip = match request.worker {
                        _ if known.is_none() => Some(Skip::LateRequest),
                        None => Some(Skip::NoAnswer),
                        _ if request.output_tokens == 0 || request.input_tokens == 0 => {
                            Some(Skip::NoAnswer)
                        }
                        _ if request.is_moved => Some(Skip::SeveralEngines),
                        Some(worker) if worker.0 >= workers => Some(Skip::NoWorker),
                        Some(_) => None,
                    };
                    match skip {
                        Some(why) => figures.skip(why),
                        None => _ = self.ended.insert(key, request),
                    }
                }
            }
        }
    }

    /// The time before which all requests have ended, ns. Requests that have been open for too long do not count.
    fn complete_until_ns(&mut self, now_ns: u64) -> u64 {
        while let Some(&(arrival_ns, id)) = self.open.first()
            && arrival_ns + HOLD_NS < now_ns
        {
            self.arrivals.remove(&id);
            self.open.pop_first();
        }
        let first_open = self.open.first().map(|key| key.0);
        let known_ns = now_ns.saturating_sub(ANNOUNCED_NS);
        first_open.map_or(known_ns, |first| first.min(known_ns))
    }

    /// Removes the requests that arrived before `to_ns`, by arrival.
    fn take_before(&mut self, to_ns: u64) -> impl Iterator<Item = Box<ShadowRequest>> {
        let later = self.ended.split_off(&(to_ns, 0));
        std::mem::replace(&mut self.ended, later).into_values()
    }
}

/// Follows the fleet until `stopped` hangs up.
fn follow(
    options: &ShadowOptions,
    block_size: u32,
    events: &Receiver<ShadowEvent>,
    stopped: &Receiver<()>,
    figures: &Figures,
) {
    let workers: u32 = options.cluster.pools.iter().map(|pool| pool.workers).sum();
    let mut backlog = Backlog::default();
    let mut is_stopped = false;
    while !is_stopped {
        let run = options.twin.with(&mut |twin| {
            let base_ns = monotonic_ns().saturating_sub(HOLD_NS);
            let mut both = Comparison {
                figures,
                base_ns,
                measured: HashMap::new(),
                pairs: BTreeMap::new(),
            };
            loop {
                is_stopped = stopped.recv_timeout(TURN) != Err(RecvTimeoutError::Timeout);
                if is_stopped {
                    return;
                }
                let now_ns = monotonic_ns();
                backlog.receive(events, workers, figures);
                if let Err(why) = both.turn(twin, &mut backlog, block_size, now_ns) {
                    tracing::warn!("the twin of the fleet begins anew: {why}");
                    figures.restarts.fetch_add(1, Relaxed);
                    return;
                }
            }
        });
        if let Err(error) = run {
            return tracing::error!("the twin of the fleet ended: {error}");
        }
    }
}

/// The figures at one scrape.
struct Scrape {
    figures: Arc<Figures>,
    engines: BTreeMap<Arc<str>, EngineFigures>,
}

impl Scrape {
    fn of(figures: &Arc<Figures>) -> Scrape {
        Scrape {
            figures: figures.clone(),
            engines: lock(&figures.engines).clone(),
        }
    }

    /// The means of a quantity of [`QUANTITIES`], by its place there.
    fn means(&self, samples: &mut Samples<'_>, quantity: usize) {
        for (engine, of) in &self.engines {
            if let Some((measured, predicted)) = of.means[quantity] {
                samples.add_real(&[("engine", engine), ("side", "measured")], measured);
                samples.add_real(&[("engine", engine), ("side", "predicted")], predicted);
            }
        }
    }
}

const FAMILIES: &[Family<Scrape>] = &[
    Family::gauge(
        "slipstream_shadow_ttft_mean_seconds",
        "Mean time to the first token over a minute, measured and predicted by the twin",
        |of, samples| of.means(samples, 0),
    ),
    Family::gauge(
        "slipstream_shadow_itl_mean_seconds",
        "Mean time between tokens over a minute, measured and predicted by the twin",
        |of, samples| of.means(samples, 1),
    ),
    Family::gauge(
        "slipstream_shadow_e2e_mean_seconds",
        "Mean time to the last token over a minute, measured and predicted by the twin",
        |of, samples| of.means(samples, 2),
    ),
    Family::gauge(
        "slipstream_shadow_hit_ratio",
        "Mean share of prompts that was cached over a minute, measured and predicted by the twin",
        |of, samples| of.means(samples, 3),
    ),
    Family::gauge(
        "slipstream_shadow_queue_mean_seconds",
        "Mean time in the engine's queue over a minute, predicted by the twin",
        |of, samples| {
            for (engine, of) in &of.engines {
                if let Some(value) = of.queued {
                    samples.add_real(&[("engine", engine)], value);
                }
            }
        },
    ),
    Family::gauge(
        "slipstream_shadow_parted",
        "Whether prediction and measurement differ by more than `--shadow-ratio`, or hits by 0.1",
        |of, samples| {
            let ratio = of.figures.ratio;
            for (engine, of) in &of.engines {
                for (at, quantity) in QUANTITIES.iter().enumerate() {
                    if let Some(is_parted) = of.has_diverged(at, ratio) {
                        samples.add(&[("engine", engine), ("of", quantity)], is_parted.into());
                    }
                }
            }
        },
    ),
    Family::gauge(
        "slipstream_shadow_lag_seconds",
        "How far the twin is behind the fleet: it waits for the ends of requests",
        |of, samples| samples.add_real(&[], of.figures.lag_ns.load(Relaxed) as f64 / 1e9),
    ),
    Family::total(
        "slipstream_shadow_requests",
        "Requests that were compared with the twin's",
        |of| of.figures.compared.load(Relaxed),
    ),
    Family::total(
        "slipstream_shadow_dropped",
        "Messages to the twin for which there was no room",
        |of| of.figures.dropped.load(Relaxed),
    ),
    Family::total(
        "slipstream_shadow_restarts",
        "Times that the twin began anew because it could not keep up",
        |of| of.figures.restarts.load(Relaxed),
    ),
    Family::counter(
        "slipstream_shadow_skipped",
        "Requests that the twin did not get, or refused",
        |of, samples| {
            for (why, count) in SKIPPED.iter().zip(&of.figures.skipped) {
                samples.add(&[("reason", why)], count.load(Relaxed));
            }
        },
    ),
];

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
        assert_eq!(few.has_diverged(0, 1.5), None);
        for (measured, predicted, parted) in [
            (1.0, 1.4, false),
            (1.0, 1.6, true),
            (1.6, 1.0, true),
            (1.4, 1.0, false),
        ] {
            let of = figures(measured, predicted, REQUESTS_MIN);
            assert_eq!(
                of.has_diverged(0, 1.5),
                Some(parted),
                "{measured} {predicted}"
            );
            assert_eq!(
                of.has_diverged(1, 1.5),
                None,
                "no time between tokens was measured"
            );
            assert_eq!(of.has_diverged(3, 1.5), Some(false));
        }
        assert_eq!(
            figures(1.0, 2.5, REQUESTS_MIN).has_diverged(3, 100.0),
            Some(true)
        );
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
