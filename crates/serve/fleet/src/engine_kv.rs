//! KV events of real engines: the sizes that they report at start, and the thread that follows each engine for
//! as long as it is a member of the fleet.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use slipstream_base::sync::lock;
use slipstream_base::width::{to_u32, to_usize};
use slipstream_base::{BlockHash, KvDelta, KvOp, RankId, WorkerId};
use slipstream_config::cluster::Cluster;
use slipstream_frontend::upstream::{EngineSpec, Engines, Member};
use slipstream_frontend::{openai::agreement, text::TextModel};
use slipstream_metrics::{Collector, Family, Samples};
use slipstream_planes::tls::ClientTls;
use slipstream_probe::{
    AskError, Client, EngineFacts, KvCounters, KvEventSource, KvFollower, MirrorOptions, ask_client,
};
use slipstream_router::Fleets;
use tokio::sync::{Notify, watch};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::MissedTickBehavior;

use crate::cache_views::CacheViews;

/// Time limit of an engine's answers.
const ASK: Duration = Duration::from_secs(3);

/// Pause before an engine that did not answer is asked again.
const ASK_AGAIN: Duration = Duration::from_secs(2);

/// Pause before an engine is asked again that answered, and cannot be followed: another process may start there.
const ASK_LATER: Duration = Duration::from_secs(30);

/// Interval in which an engine's KV events are compared with the prompts that it answered. The events of a prompt have
/// this time at least to arrive.
const CHECK: Duration = Duration::from_secs(1);

/// Time for the thread to end when the server stops.
const STOP_WITHIN: Duration = Duration::from_millis(250);

/// Blocks of an engine that does not report their number.
pub const BLOCKS_DEFAULT: u64 = 1 << 20;

/// Blocks of an engine at most, as in a cluster file.
pub const BLOCKS_MAX: u64 = 1 << 24;

/// Data-parallel ranks of an engine at most.
const RANKS_MAX: usize = 64;

/// An engine whose events can be followed.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Source {
    /// One publisher per data-parallel rank.
    events: Vec<KvEventSource>,
    /// Tokens per block.
    block_size: Option<u32>,
    /// Of one rank.
    kv_blocks: Option<u64>,
}

/// Why an engine's cache is not known by events.
#[derive(Debug, PartialEq, Eq)]
enum Unknown {
    /// It does not answer, or is loading its model.
    Silent,
    /// It does not fit; why, as a predicate.
    Unfit(String),
}

/// What the engines said at start. An engine that comes later does not change it.
pub struct Sizes(Vec<Option<Source>>);

/// Asks the engines `specs`. The inner error is the reason why KV events cannot be used, as a clause.
///
/// # Errors
/// No runtime can be made.
pub fn learn(cluster: &Cluster, specs: &[EngineSpec]) -> anyhow::Result<Result<Sizes, String>> {
    if !cluster.router.kv_events {
        return Ok(Err("`router.kv_events` is false".into()));
    }
    if cluster.model.tokenizer.is_none() {
        return Ok(Err(
            "`model.tokenizer` does not name the model's tokenizer".into()
        ));
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let model = &cluster.model.name;
    let answers = runtime.block_on(async {
        let mut asked = JoinSet::new();
        for (at, spec) in specs.iter().enumerate() {
            let (spec, model) = (spec.clone(), model.clone());
            asked.spawn(async move { (at, ask(&spec, &model).await.ok()) });
        }
        let mut answers = asked.join_all().await;
        answers.sort_by_key(|(at, _)| *at);
        answers
    });
    Ok(Ok(Sizes(answers.into_iter().map(|(_, of)| of).collect())))
}

fn common_divisor(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { common_divisor(b, a % b) }
}

async fn ask(spec: &EngineSpec, model: &str) -> Result<Source, Unknown> {
    let client = client_of(spec)?;
    match ask_client(&client, ASK).await {
        Ok(facts) if facts.models.is_empty() => Err(Unknown::Silent), // it is loading one
        Ok(facts) => source(&facts, model).map_err(Unknown::Unfit),
        Err(AskError::Unreachable { .. }) => Err(Unknown::Silent),
        Err(error) => Err(Unknown::Unfit(error.to_string())),
    }
}

fn client_of(spec: &EngineSpec) -> Result<Client, Unknown> {
    let tls = spec.tls.as_ref();
    let config = tls.map(|tls| tls.config().clone());
    let client = Client::new(&spec.url.to_string(), spec.api_key.as_deref(), config);
    let client = client.map_err(|error| Unknown::Unfit(error.to_string()))?;
    Ok(match tls.and_then(ClientTls::server_name) {
        Some(name) => client.with_server_name(name.clone()),
        None => client,
    })
}

/// The source of an engine's events; otherwise how the engine does not fit, as a predicate.
fn source(facts: &EngineFacts, model: &str) -> Result<Source, String> {
    if !facts.models.iter().any(|of| of.id == model) {
        let listed: Vec<&str> = facts.models.iter().map(|of| of.id.as_str()).collect();
        return Err(format!(
            "lists {}, and `model.tokenizer` is for `{model}` (`model.name`)",
            listed.join(", ")
        ));
    }
    if facts.prefix_caching == Some(false) {
        return Err("has no prefix caching".into());
    }
    // A server that reports others than rank 0 has some of all ranks, which other servers report.
    let is_first = facts.kv_events.first().is_none_or(|of| of.rank == 0);
    let served = match facts.served_ranks {
        None if !is_first => 1,
        _ => facts.ranks(),
    };
    let ranks = facts.kv_events.len().max(served as usize);
    if ranks > RANKS_MAX {
        return Err(format!(
            "has {ranks} data-parallel ranks, and at most {RANKS_MAX} are followed"
        ));
    }
    if facts.kv_events.is_empty() {
        return Err(
            "reports no publisher of KV events; start vLLM with --kv-events-config \
             '{\"enable_kv_cache_events\": true, \"publisher\": \"zmq\"}'"
                .into(),
        );
    }
    Ok(Source {
        events: of_each_rank(&facts.kv_events, to_u32(ranks))?,
        block_size: facts.block_size,
        kv_blocks: facts.kv_blocks,
    })
}

/// The publishers of `ranks` ranks from the first known one on, of which some are known. The port of a rank is that of
/// rank 0, and its number (vLLM: `offset_endpoint_port` in `vllm/distributed/kv_events.py`).
fn of_each_rank(known: &[KvEventSource], ranks: u32) -> Result<Vec<KvEventSource>, String> {
    let first = known.first().cloned().unwrap_or_default();
    (first.rank..first.rank.saturating_add(ranks))
        .map(|rank| {
            if let Some(of) = known.iter().find(|of| of.rank == rank) {
                return Ok(of.clone());
            }
            let offset = i64::from(rank) - i64::from(first.rank);
            let at = |endpoint: &str| {
                let (host, port) = endpoint.rsplit_once(':')?;
                let port = u16::try_from(port.parse::<i64>().ok()? + offset).ok()?;
                Some(format!("{host}:{port}"))
            };
            let no_port = || {
                format!(
                    "publishes at {}, which has no port of rank {rank}",
                    first.endpoint
                )
            };
            Ok(KvEventSource {
                rank,
                endpoint: at(&first.endpoint).ok_or_else(no_port)?,
                replay_endpoint: first.replay_endpoint.as_deref().and_then(at),
                topic: first.topic.clone(),
            })
        })
        .collect()
}

/// Compares the router's tokens with the engine's, text by text. `Ok(false)`: the engine cannot be asked.
///
/// # Errors
/// The first difference, as a predicate, or that it fell silent.
async fn check_tokens(spec: &EngineSpec, text: &TextModel, model: &str) -> Result<bool, Unknown> {
    let client = client_of(spec)?;
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    for sample in agreement::samples(text, model, now.unwrap_or_default().as_secs()) {
        let asked = client
            .post_json("/tokenize", sample.body.clone(), ASK)
            .await;
        let answer = asked.map_err(|_| Unknown::Silent)?;
        match answer.status {
            404 | 405 | 501 => return Ok(false),
            500.. => return Err(Unknown::Silent),
            _ => {}
        }
        let found = sample.compare(answer.status, &answer.body);
        if !found.agrees() {
            return Err(Unknown::Unfit(format!(
                "tokenizes otherwise than `model.tokenizer` ({}: {found}); \
                 `slipstream tokenizer check` shows all",
                sample.name
            )));
        }
    }
    Ok(true)
}

impl Sizes {
    /// Tokens per block of the router: every engine's block is a multiple of it. `None`: not known.
    fn block_size(&self) -> Option<u32> {
        let sizes = self.0.iter().flatten().filter_map(|of| of.block_size);
        sizes.reduce(common_divisor)
    }

    /// `cluster` with the engines' block size and numbers of blocks.
    ///
    /// # Errors
    /// An engine reports blocks of 0 tokens.
    pub fn cluster(&self, cluster: &Cluster) -> anyhow::Result<Cluster> {
        let mut cluster = cluster.clone();
        let mut sources = self.0.iter();
        for pool in &mut cluster.pools {
            let size = self.block_size().unwrap_or(pool.engine.block_size);
            anyhow::ensure!(
                size > 0,
                "an engine of pool `{}` reports blocks of 0 tokens",
                pool.name
            );
            pool.engine.block_size = size;
            let ours = |of: &Source| {
                let per_block = of.block_size.unwrap_or(size).div_ceil(size);
                let blocks = of.kv_blocks?.saturating_mul(per_block.into());
                Some(blocks.saturating_mul(of.events.len() as u64))
            };
            let of_pool = sources.by_ref().take(pool.workers as usize);
            if let Some(blocks) = of_pool.flatten().filter_map(ours).max() {
                pool.engine.num_gpu_blocks = to_u32(blocks.min(BLOCKS_MAX));
            }
        }
        Ok(cluster)
    }
}

/// Follows the engines of a fleet into its index.
struct Followers {
    engines: Arc<Engines>,
    fleets: Fleets,
    text: Arc<TextModel>,
    model: String,
    /// Prompts are tokenized even if no engine is followed: for the record.
    always: bool,
    /// Engines whose events are followed.
    followed: AtomicUsize,
    counters: Shown,
    /// By worker: held by the task of the engine that has it. A slot's next engine waits for the end of the task
    /// of the one before, whose late events would be taken for its own.
    slots: Box<[Arc<tokio::sync::Mutex<()>>]>,
}

/// Starts to follow the engines, present and later ones. With `always`, prompts are tokenized even if none can be
/// followed.
///
/// # Errors
/// The thread or its runtime cannot be made.
pub fn follow(
    cluster: &Cluster,
    engines: Arc<Engines>,
    fleets: Fleets,
    text: Arc<TextModel>,
    always: bool,
) -> std::io::Result<Following> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    engines.set_tokenizes(always);
    let (stop, mut stopped) = watch::channel(false);
    let counters = Shown::default();
    let workers = fleets.workers();
    let followers = Arc::new(Followers {
        engines,
        fleets,
        text,
        model: cluster.model.name.clone(),
        always,
        followed: AtomicUsize::new(0),
        counters: counters.clone(),
        slots: (0..workers).map(|_| Arc::default()).collect(),
    });
    let run = move || {
        runtime.block_on(async move {
            let mut changes = followers.engines.subscribe();
            let mut tasks = JoinSet::new();
            let mut known: BTreeMap<u64, AbortHandle> = BTreeMap::new();
            loop {
                let members = followers.engines.list();
                known.retain(|id, task| {
                    let stays = members.iter().any(|of| of.id() == *id);
                    if !stays {
                        task.abort();
                        followers.shown().remove(id);
                    }
                    stays
                });
                for member in members {
                    known.entry(member.id()).or_insert_with(|| {
                        let url = member.spec().url.to_string();
                        followers.shown().insert(member.id(), (url, Vec::new()));
                        tasks.spawn(followers.clone().follow(member))
                    });
                }
                tokio::select! {
                    _ = stopped.changed() => return, // or its other half was dropped
                    _ = changes.changed() => {}
                    Some(_) = tasks.join_next() => {} // of an engine that was removed
                }
            }
        });
    };
    let thread = std::thread::Builder::new()
        .name("engine-kv".into())
        .spawn(run)?;
    Ok(Following {
        stop,
        thread: Some(thread),
        counters,
    })
}

/// An engine that is followed. When it is dropped, its cache is not known any more.
struct Followed<'a> {
    of: &'a Followers,
    worker: WorkerId,
}

impl<'a> Followed<'a> {
    fn begin(of: &'a Followers, worker: WorkerId) -> Followed<'a> {
        of.fleets.forget_cache(worker);
        of.followed.fetch_add(1, Relaxed);
        of.engines.set_tokenizes(true);
        Followed { of, worker }
    }
}

impl Drop for Followed<'_> {
    fn drop(&mut self) {
        self.of.fleets.forget_cache(self.worker);
        let left = self.of.followed.fetch_sub(1, Relaxed) - 1;
        self.of.engines.set_tokenizes(left > 0 || self.of.always);
    }
}

impl Followers {
    fn shown(&self) -> MutexGuard<'_, ById> {
        lock(&self.counters)
    }

    /// Follows one engine until its task is aborted.
    async fn follow(self: Arc<Self>, member: Member) {
        let worker = member.spec().worker;
        let Some(slot) = self.slots.get(worker.index()).cloned() else {
            return;
        };
        let _slot = slot.lock().await;
        let mut said = String::new();
        loop {
            self.fleets.set_guessed(worker, true);
            let source = self.await_source(&member, &mut said).await;
            self.follow_source(&member, source).await;
            if let Some(shown) = self.shown().get_mut(&member.id()) {
                shown.1 = Vec::new();
            }
        }
    }

    /// Waits until the events of an engine can be followed.
    async fn await_source(&self, member: &Member, said: &mut String) -> Source {
        loop {
            let pause = match self.source_of(member).await {
                Ok(source) => return source,
                Err(Unknown::Silent) => ASK_AGAIN,
                Err(Unknown::Unfit(why)) => {
                    if *said != why {
                        tracing::warn!(
                            engine = %member.spec().url,
                            "its cache is guessed from the requests sent there, not followed by KV events: it {why}"
                        );
                    }
                    member.set_cache_view(format!("guessed: it {why}"));
                    *said = why;
                    ASK_LATER
                }
            };
            // An engine that comes back is asked at once.
            let _ = tokio::time::timeout(pause, member.came_up()).await;
        }
    }

    async fn source_of(&self, member: &Member) -> Result<Source, Unknown> {
        let source = ask(member.spec(), &self.model).await?;
        if !check_tokens(member.spec(), &self.text, &self.model).await? {
            tracing::info!(
                engine = %member.spec().url,
                "it has no /tokenize, so its tokenizer was not compared with `model.tokenizer`"
            );
        }
        Ok(source)
    }

    /// Follows an engine until it is another one, or its view must begin anew.
    async fn follow_source(&self, member: &Member, source: Source) {
        let worker = member.spec().worker;
        let blocks_max = source.kv_blocks.unwrap_or(BLOCKS_DEFAULT).min(BLOCKS_MAX);
        let merge = Arc::new(Mutex::new(Merge::new(worker, source.events.len())));
        let anew = Arc::new(Notify::new());
        let _followed = Followed::begin(self, worker);
        let mut ranks = JoinSet::new(); // dropped before `_followed`, so nothing is applied after it
        let followers = source.events.iter().map(|events| {
            let options = MirrorOptions {
                model: self.model.clone(),
                block_size: self.fleets.serve.block_size(),
                blocks_max: to_usize(blocks_max),
            };
            let rank = RankId { worker, dp_rank: 0 };
            KvFollower::new(events.clone(), rank, options)
        });
        let followers: Vec<KvFollower> = followers.collect();
        let counters: Vec<_> = followers.iter().map(KvFollower::counters).collect();
        let views = CacheViews::new(self.fleets.clone(), member.clone(), counters.clone());
        for (at, follower) in followers.into_iter().enumerate() {
            let views = views.clone();
            let follower = follower.with_state(move |state| views.update(at, state));
            let (merge, anew, fleets) = (merge.clone(), anew.clone(), self.fleets.clone());
            ranks.spawn(follower.run(move |delta| {
                let mut merge = lock(&merge);
                let applied = merge.merge(at, delta).map(|delta| fleets.on_kv(&delta));
                // The router has forgotten the engine: its connection was refused.
                if applied.is_some_and(|applied| applied.gap) {
                    anew.notify_one();
                }
            }));
        }
        if let Some(shown) = self.shown().get_mut(&member.id()) {
            shown.1 = counters;
        }
        let changed = async {
            loop {
                member.came_up().await;
                match self.source_of(member).await {
                    Ok(now) if now == source => {} // the follower finds out whether it is the same process
                    Err(Unknown::Silent) => {}
                    Ok(_) | Err(Unknown::Unfit(_)) => return,
                }
            }
        };
        let engine_block = source.block_size.unwrap_or(self.fleets.serve.block_size());
        let checked = async {
            let mut ticks = tokio::time::interval(CHECK);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            loop {
                ticks.tick().await;
                views.check(self.fleets.testimony(worker, engine_block));
            }
        };
        tokio::select! {
            () = anew.notified() => {}
            () = changed => {}
            () = checked => {}
            Some(_) = ranks.join_next() => {} // it broke an invariant of its own, and said so
        }
    }
}

/// The ranks of an engine as one cache: it holds what some rank holds.
struct Merge {
    rank: RankId,
    ranks: usize,
    /// One bit per rank that holds the block. Unused for one rank.
    held: HashMap<BlockHash, u64>,
    sequence: u64,
}

impl Merge {
    fn new(worker: WorkerId, ranks: usize) -> Merge {
        Merge {
            rank: RankId { worker, dp_rank: 0 },
            ranks,
            held: HashMap::new(),
            sequence: 0,
        }
    }

    /// The engine's change that follows from one of rank `at`; `None`: there is none.
    fn merge(&mut self, at: usize, delta: &KvDelta) -> Option<KvDelta> {
        let mut ops = Vec::new();
        if self.ranks == 1 {
            ops.clone_from(&delta.ops);
        } else {
            let bit = 1_u64 << at;
            for op in &delta.ops {
                match *op {
                    KvOp::Stored { hash, .. } => {
                        let holders = self.held.entry(hash).or_default();
                        if *holders == 0 {
                            ops.push(*op);
                        }
                        *holders |= bit;
                    }
                    KvOp::Removed { hash } => {
                        let holders = self.held.get_mut(&hash);
                        if let Some(holders) = holders {
                            *holders &= !bit;
                            if *holders == 0 {
                                self.held.remove(&hash);
                                ops.push(*op);
                            }
                        }
                    }
                    KvOp::Cleared => self.held.retain(|&hash, holders| {
                        *holders &= !bit;
                        if *holders == 0 {
                            ops.push(KvOp::Removed { hash });
                        }
                        *holders != 0
                    }),
                }
            }
        }
        if ops.is_empty() {
            return None;
        }
        let sequence = self.sequence;
        self.sequence += 1;
        Some(KvDelta {
            rank: self.rank,
            sequence,
            ops,
        })
    }
}

/// URL of each engine by its id, and the counters of its ranks once it is followed.
type ById = BTreeMap<u64, (String, Vec<Arc<KvCounters>>)>;

type Shown = Arc<Mutex<ById>>;

/// Engines whose events are followed. That ends when it is dropped.
pub struct Following {
    stop: watch::Sender<bool>,
    thread: Option<JoinHandle<()>>,
    counters: Shown,
}

impl Following {
    /// Its counters, for `/metrics`.
    pub fn collector(&self) -> Box<dyn Collector> {
        slipstream_metrics::collector(self.counters.clone(), |shown| lock(shown).clone(), FAMILIES)
    }
}

impl Drop for Following {
    fn drop(&mut self) {
        let _ = self.stop.send(true); // an error: the thread has ended
        let Some(thread) = self.thread.take() else {
            return;
        };
        // It may be reading a long batch, which ends with the process.
        let end = std::time::Instant::now() + STOP_WITHIN;
        while !thread.is_finished() && std::time::Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
        }
        if thread.is_finished() && thread.join().is_err() {
            tracing::error!("the thread that follows KV events ended by panic");
        }
    }
}

/// The followers' counters at one scrape, by engine: the gauges hold for an engine by their ranks.
const FAMILIES: &[Family<ById>] = &[
    Family::gauge(
        "slipstream_engine_kv_connected",
        "Whether its KV events are received",
        |of, samples| all(of, samples, |rank| rank.connected.load(Relaxed).into()),
    ),
    Family::gauge(
        "slipstream_engine_kv_unusable",
        "Whether its hashes do not identify prefixes",
        |of, samples| any(of, samples, |rank| rank.unusable.load(Relaxed).into()),
    ),
    Family::gauge(
        "slipstream_engine_kv_guessed",
        "Whether its cache is guessed from the requests sent there, not followed by KV events",
        |of, samples| {
            // So is one of which no rank is followed yet.
            each(of, samples, |ranks| {
                let guessed = ranks.iter().map(|rank| rank.guessed.load(Relaxed).into());
                guessed.max().unwrap_or(1)
            });
        },
    ),
    Family::gauge(
        "slipstream_engine_kv_blocks",
        "The engine's blocks that are known",
        |of, samples| sum(of, samples, |rank| rank.held_blocks.load(Relaxed)),
    ),
    Family::counter(
        "slipstream_engine_kv_pauses",
        "Pauses in reading its KV events, which took so long that other engines' events would have waited",
        |of, samples| sum(of, samples, |rank| rank.pauses.load(Relaxed)),
    ),
    Family::counter(
        "slipstream_engine_kv_paused_milliseconds",
        "Time of these pauses, for which its cache was known late",
        |of, samples| sum(of, samples, |rank| rank.paused_ms.load(Relaxed)),
    ),
    Family::counter(
        "slipstream_engine_kv_batches",
        "Batches of KV events applied",
        |of, samples| sum(of, samples, |rank| rank.batches.load(Relaxed)),
    ),
    Family::counter(
        "slipstream_engine_kv_gaps",
        "Gaps in the sequence of its KV events",
        |of, samples| sum(of, samples, |rank| rank.gaps.load(Relaxed)),
    ),
    Family::counter(
        "slipstream_engine_kv_gaps_repaired",
        "Gaps repaired by replay",
        |of, samples| sum(of, samples, |rank| rank.repaired.load(Relaxed)),
    ),
    Family::counter(
        "slipstream_engine_kv_unreadable",
        "Batches that could not be decoded",
        |of, samples| sum(of, samples, |rank| rank.unreadable.load(Relaxed)),
    ),
    Family::counter(
        "slipstream_engine_kv_unreadable_events",
        "KV events that could not be read or placed",
        |of, samples| sum(of, samples, |rank| rank.unreadable_events.load(Relaxed)),
    ),
    Family::counter(
        "slipstream_engine_kv_withheld_replays",
        "Replays not requested because of their rate limit",
        |of, samples| sum(of, samples, |rank| rank.withheld_replays.load(Relaxed)),
    ),
    Family::counter(
        "slipstream_engine_kv_restarts",
        "Times that the view began anew",
        |of, samples| sum(of, samples, |rank| rank.restarts.load(Relaxed)),
    ),
    Family::counter(
        "slipstream_engine_kv_skipped_blocks",
        "Stored blocks that could not be placed",
        |of, samples| sum(of, samples, |rank| rank.skipped_blocks.load(Relaxed)),
    ),
    Family::counter(
        "slipstream_engine_kv_other_blocks",
        "Stored blocks of other memory than the GPU's, or of groups of layers that are not followed",
        |of, samples| sum(of, samples, |rank| rank.other_blocks.load(Relaxed)),
    ),
];

/// 1 if `is` is 1 of every rank. An engine that is not followed yet has 0.
fn all(engines: &ById, samples: &mut Samples<'_>, is: fn(&KvCounters) -> u64) {
    each(engines, samples, |ranks| {
        ranks.iter().map(|rank| is(rank)).min().unwrap_or(0)
    });
}

/// 1 if `is` is 1 of any rank.
fn any(engines: &ById, samples: &mut Samples<'_>, is: fn(&KvCounters) -> u64) {
    each(engines, samples, |ranks| {
        ranks.iter().map(|rank| is(rank)).max().unwrap_or(0)
    });
}

/// The sum of `of` over an engine's ranks.
fn sum(engines: &ById, samples: &mut Samples<'_>, of: fn(&KvCounters) -> u64) {
    each(engines, samples, |ranks| {
        ranks.iter().map(|rank| of(rank)).sum()
    });
}

fn each(engines: &ById, samples: &mut Samples<'_>, of: impl Fn(&[Arc<KvCounters>]) -> u64) {
    for (url, ranks) in engines.values() {
        samples.add(&[("engine", url)], of(ranks));
    }
}

#[cfg(test)]
mod tests {
    use slipstream_probe::{Parallel, ServedModel};

    use super::*;

    fn facts() -> EngineFacts {
        EngineFacts {
            models: vec![ServedModel {
                id: "m".into(),
                ..ServedModel::default()
            }],
            block_size: Some(32),
            kv_blocks: Some(100),
            kv_events: vec![KvEventSource {
                endpoint: "tcp://gpu1:5557".into(),
                replay_endpoint: Some("tcp://gpu1:6557".into()),
                ..KvEventSource::default()
            }],
            ..EngineFacts::default()
        }
    }

    #[test]
    fn an_engine_that_does_not_fit_is_refused_with_the_reason() {
        assert!(source(&facts(), "m").is_ok());
        let why = |facts, model| source(&facts, model).err().unwrap();
        assert!(why(facts(), "other").contains("lists m"));
        let without = EngineFacts {
            kv_events: Vec::new(),
            ..facts()
        };
        assert!(why(without, "m").contains("--kv-events-config"));
        let uncached = EngineFacts {
            prefix_caching: Some(false),
            ..facts()
        };
        assert!(why(uncached, "m").contains("prefix caching"));
    }

    #[test]
    fn each_rank_has_the_port_that_its_number_adds() {
        let ranks_served = |count, served_ranks, known: Vec<KvEventSource>| {
            let facts = EngineFacts {
                parallel: Parallel {
                    data: Some(count),
                    ..Parallel::default()
                },
                served_ranks,
                kv_events: known,
                ..facts()
            };
            let events = source(&facts, "m").map(|of| of.events);
            events.map(|all| all.into_iter().map(|of| of.endpoint).collect::<Vec<_>>())
        };
        let ranks = |count, known| ranks_served(count, None, known);
        let three = ["tcp://gpu1:5557", "tcp://gpu1:5558", "tcp://gpu1:5559"];
        assert_eq!(ranks(3, facts().kv_events).unwrap(), three);
        let second = KvEventSource {
            rank: 1,
            endpoint: "tcp://gpu2:7000".into(),
            ..KvEventSource::default()
        };
        let known = [facts().kv_events, vec![second.clone()]].concat();
        let mixed = ["tcp://gpu1:5557", "tcp://gpu2:7000", "tcp://gpu1:5559"];
        assert_eq!(ranks(3, known).unwrap(), mixed);
        // Of the ranks of several servers, those that this one answers for.
        assert_eq!(ranks(2, vec![second.clone()]).unwrap(), ["tcp://gpu2:7000"]);
        assert_eq!(
            ranks_served(8, Some(2), vec![second]).unwrap(),
            ["tcp://gpu2:7000", "tcp://gpu2:7001"]
        );
        assert_eq!(
            ranks_served(8, Some(1), facts().kv_events).unwrap(),
            three[..1]
        );
        assert!(
            ranks(65, facts().kv_events)
                .unwrap_err()
                .contains("at most 64")
        );
        let last = KvEventSource {
            endpoint: "tcp://gpu1:65535".into(),
            ..KvEventSource::default()
        };
        assert!(ranks(2, vec![last]).unwrap_err().contains("rank 1"));
    }

    #[test]
    fn an_engine_holds_what_some_rank_holds() {
        let mut merge = Merge::new(WorkerId(3), 2);
        let rank = RankId::default();
        let stored = |n| KvOp::Stored {
            hash: BlockHash(n),
            parent: BlockHash::default(),
        };
        let removed = |n| KvOp::Removed { hash: BlockHash(n) };
        let mut apply = |at, ops: Vec<KvOp>| {
            let delta = KvDelta {
                rank,
                sequence: 0,
                ops,
            };
            merge.merge(at, &delta)
        };
        let first = apply(0, vec![stored(1), stored(2)]).unwrap();
        assert_eq!((first.rank.worker, first.sequence), (WorkerId(3), 0));
        assert_eq!(first.ops, [stored(1), stored(2)]);
        assert_eq!(apply(1, vec![stored(2)]), None, "it is held already");
        assert_eq!(apply(0, vec![removed(2)]), None, "rank 1 holds it");
        let both = apply(1, vec![removed(2), stored(5), stored(6)]).unwrap();
        assert_eq!(both.sequence, 1, "without gaps");
        assert_eq!(both.ops, [removed(2), stored(5), stored(6)]);
        assert_eq!(apply(1, vec![removed(9), removed(1)]), None, "not its own");
        assert_eq!(apply(0, vec![stored(6)]), None);
        let cleared = apply(1, vec![KvOp::Cleared]).unwrap();
        assert_eq!(cleared.ops, [removed(5)], "rank 0 keeps the others");
    }

    #[test]
    fn blocks_of_the_router_divide_those_of_all_engines() {
        let of = |block_size| {
            let facts = EngineFacts {
                block_size,
                ..facts()
            };
            source(&facts, "m").ok()
        };
        let size = |sizes: &[Option<u32>]| {
            Sizes(sizes.iter().map(|&size| of(size)).collect()).block_size()
        };
        assert_eq!(size(&[Some(32), Some(48), None]), Some(16));
        assert_eq!(size(&[Some(32)]), Some(32));
        assert_eq!(size(&[None]), None);
        let mut two = of(Some(16)).unwrap();
        two.events.push(KvEventSource::default());
        let known = Sizes(vec![of(Some(32)), None, Some(two)]);
        let mut cluster = Cluster::default();
        cluster.pools[0].workers = 3;
        let cluster = known.cluster(&cluster).unwrap();
        let engine = &cluster.pools[0].engine;
        assert_eq!((engine.block_size, engine.num_gpu_blocks), (16, 200));
    }
}
