//! `[autoscale]` of a live server: how many workers each pool should have, published for a deployment to follow.
//!
//! A thread reads the router's loads at each decision; the deciding code is that of the twin
//! ([`slipstream_autoscale`]). The numbers are metrics, and a file and a webhook have a thread each, so that a file
//! system or a receiver that hangs delays neither decisions nor each other. Only the newest number waits for them.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use bytes::Bytes;
use http_body_util::Full;
use hyper::Request;
use hyper::header::CONTENT_TYPE;
use serde_json::json;
use slipstream_autoscale::{Desired, PoolSample, Scalers};
use slipstream_base::sync::{lock, unpoisoned};
use slipstream_base::width::to_u32;
use slipstream_base::{Role, SimTime, WorkerId};
use slipstream_config::cluster::{AutoscaleConfig, AutoscaleOutput, AutoscalePolicy, Cluster};
use slipstream_frontend::upstream::Engines;
use slipstream_frontend::{Frontend, FrontendTotals};
use slipstream_metrics::{Collector, Family};
use slipstream_os::files;
use slipstream_planes::clock::monotonic_ns;
use slipstream_planes::tls::{ClientFiles, ClientTls};
use slipstream_router::Fleets;
use tokio::task::LocalSet;

use crate::client::Client;

/// Version of the document.
const SCHEMA: u32 = 1;

/// Pause before the first further try of a POST; it doubles.
const RETRY_PAUSE: Duration = Duration::from_millis(200);

/// Interval between messages about failures of one kind.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// A pool with `[autoscale]`.
#[derive(Clone, Debug)]
struct ScaledPool {
    name: String,
    role: Role,
    config: AutoscaleConfig,
    /// Requests that a rank computes at a time.
    seqs_per_rank: u64,
    ranks: u64,
    /// Numbers of its workers, if they are modelled.
    workers: std::ops::Range<u32>,
    /// Engines that the cluster file lists.
    listed: u32,
}

/// `[autoscale]` and `[live.autoscale]` of a server that can start.
pub struct Prepared {
    pools: Vec<ScaledPool>,
    output: AutoscaleOutput,
    tls: Option<ClientTls>,
    published: Arc<Published>,
}

/// The state of a live server.
struct Sources {
    fleets: Fleets,
    totals: FrontendTotals,
    workers: Workers,
}

/// The workers of a live server.
pub enum Workers {
    /// Modelled engines, which count their requests: those of each rank now.
    Modelled(Box<dyn Fn() -> Vec<RankRequests> + Send>),
    /// Real ones, which join and leave. The router knows the requests that it sent them.
    Real(Arc<Engines>),
}

/// Requests of a rank of a modelled worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankRequests {
    /// Its worker.
    pub worker: WorkerId,
    /// Requests that it computes.
    pub running: u64,
    /// Requests that wait for it.
    pub waiting: u64,
}

/// Checks the settings. `None`: no pool has `[autoscale]`.
///
/// # Errors
/// A policy that a live server cannot follow, or a file or token that cannot be used.
pub fn prepare(cluster: &Cluster) -> anyhow::Result<Option<Prepared>> {
    let output = cluster.live.autoscale.clone();
    let mut pools = Vec::new();
    let mut first = 0;
    for pool in &cluster.pools {
        let workers = first..first + pool.workers;
        first = workers.end;
        let Some(config) = pool.autoscale else {
            continue;
        };
        anyhow::ensure!(
            config.policy != AutoscalePolicy::Custom,
            "pool `{}`: `autoscale.policy` is \"custom\", a Python function of a simulation; take another policy for a \
             live server",
            pool.name
        );
        anyhow::ensure!(
            config.policy != AutoscalePolicy::Slo || config.ttft_s.is_some(),
            "pool `{}`: `autoscale.policy` is \"slo\", and a live server has no `--slo`: set the objective, such as \
             `autoscale.ttft_s = 1`",
            pool.name
        );
        let engines = pool.engines.as_ref();
        pools.push(ScaledPool {
            name: pool.name.clone(),
            role: pool.role,
            config,
            seqs_per_rank: u64::from(pool.engine.max_num_seqs),
            ranks: u64::from(pool.engine.data_parallel_size),
            workers,
            listed: engines.map_or(pool.workers, |engines| to_u32(engines.urls.len())),
        });
    }
    if pools.is_empty() {
        anyhow::ensure!(
            output.file.is_none() && output.webhook.is_none(),
            "`[live.autoscale]` has a file or a webhook, and no pool has `autoscale.policy`: set one, or remove the section"
        );
        return Ok(None);
    }
    if let Some(file) = &output.file {
        probe(file).with_context(|| {
            format!(
                "`live.autoscale.file`: {} cannot be written",
                file.display()
            )
        })?;
    }
    if let Some(file) = &output.webhook_token_file {
        token(file).map_err(anyhow::Error::msg)?;
        slipstream_os::secrets::warn_if_open(file);
    }
    let is_encrypted = output.webhook.as_ref().is_some_and(|url| url.tls);
    let tls = is_encrypted
        .then(|| ClientTls::load(&ClientFiles::default()))
        .transpose()
        .context("TLS towards `live.autoscale.webhook`")?;
    let published = Arc::new(Published {
        pools: pools
            .iter()
            .map(|pool| PoolCounts {
                name: pool.name.clone(),
                desired: AtomicU64::new(0),
                decisions: AtomicU64::new(0),
            })
            .collect(),
        ..Published::default()
    });
    Ok(Some(Prepared {
        pools,
        output,
        tls,
        published,
    }))
}

/// Starts what [`prepare`] checked, if a pool has `[autoscale]`.
///
/// # Errors
/// A thread cannot be made.
pub fn start(
    prepared: Option<Prepared>,
    fleets: Fleets,
    frontend: &Frontend,
    workers: Workers,
) -> anyhow::Result<Option<LiveAutoscale>> {
    let sources = Sources {
        fleets,
        totals: frontend.totals(),
        workers,
    };
    prepared.map(|prepared| prepared.start(sources)).transpose()
}

impl Prepared {
    /// Its metrics.
    pub fn collector(&self) -> Box<dyn Collector> {
        slipstream_metrics::collector(self.published.clone(), Arc::clone, FAMILIES)
    }

    /// Starts the threads.
    ///
    /// # Errors
    /// One cannot be made.
    fn start(self, sources: Sources) -> anyhow::Result<LiveAutoscale> {
        let file: Newest = Arc::default();
        let webhook: Newest = Arc::default();
        let spawn = |name: &str, run: Box<dyn FnOnce() + Send>| {
            let thread = std::thread::Builder::new().name(name.into());
            thread
                .spawn(run)
                .context("starting a thread of `[autoscale]`")
        };
        if let Some(path) = self.output.file.clone() {
            let (newest, counts) = (file.clone(), self.published.clone());
            // Not joined: the file system may hang.
            spawn(
                "autoscale-file",
                Box::new(move || write_files(&path, &newest, &counts.file)),
            )?;
        }
        if let Some(url) = self.output.webhook.clone() {
            let hook = Webhook {
                server: Client { url, tls: self.tls },
                token_file: self.output.webhook_token_file.clone(),
                timeout: Duration::from_secs_f64(self.output.webhook_timeout_s),
                retries_max: self.output.webhook_retries_max,
            };
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()?;
            let (newest, counts) = (webhook.clone(), self.published.clone());
            // Not joined: a look-up of a name may hang.
            spawn(
                "autoscale-hook",
                Box::new(move || hook.run(&runtime, &newest, &counts.webhook)),
            )?;
        }
        let (stop, stopped) = mpsc::channel::<()>();
        let outputs = [file, webhook];
        let (pools, published) = (self.pools, self.published);
        let decide = {
            let outputs = outputs.clone();
            move || {
                let mut decider = Decider::new(pools, sources, published, now());
                while let Some(next) = decider.scalers.next_decision() {
                    let wait = Duration::from_nanos(next.since(now()));
                    match stopped.recv_timeout(wait) {
                        Err(RecvTimeoutError::Timeout) => {}
                        Ok(()) | Err(RecvTimeoutError::Disconnected) => return,
                    }
                    let document = decider.decide(now());
                    for output in &outputs {
                        output.put(document.clone());
                    }
                }
            }
        };
        let thread = spawn("autoscale", Box::new(decide))?;
        Ok(LiveAutoscale {
            stop: Some(stop),
            thread: Some(thread),
            outputs,
        })
    }
}

fn now() -> SimTime {
    SimTime(monotonic_ns())
}

/// Decides until it is dropped.
pub struct LiveAutoscale {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
    outputs: [Newest; 2],
}

impl Drop for LiveAutoscale {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread of `[autoscale]` ended by panic");
        }
        for output in &self.outputs {
            output.close();
        }
    }
}

/// Decides about the pools, by the state of the server.
struct Decider {
    pools: Vec<ScaledPool>,
    sources: Sources,
    scalers: Scalers,
    published: Arc<Published>,
    /// The last decision about each pool, in the order of `pools`.
    last: Vec<Option<Desired>>,
}

impl Decider {
    fn new(
        pools: Vec<ScaledPool>,
        sources: Sources,
        published: Arc<Published>,
        now: SimTime,
    ) -> Decider {
        let mut scalers = Scalers::new();
        for (pool, counts) in pools.iter().zip(&published.pools) {
            let mut first = sources.sample(pool);
            // Engines that have not answered yet exist nevertheless.
            first.ready = first.ready.max(pool.listed);
            let slots = pool.seqs_per_rank.saturating_mul(pool.ranks);
            scalers.add(&pool.name, pool.config, slots, first, now);
            counts.desired.store(
                first
                    .ready
                    .clamp(pool.config.workers_min, pool.config.workers_max)
                    .into(),
                Relaxed,
            );
        }
        Decider {
            last: vec![None; pools.len()],
            pools,
            sources,
            scalers,
            published,
        }
    }

    /// Makes the decisions that are due, and returns the document.
    fn decide(&mut self, now: SimTime) -> String {
        let (pools, sources) = (&self.pools, &self.sources);
        let decided = self.scalers.decide(now, |name| {
            let pool = pools.iter().find(|pool| pool.name == name);
            pool.map_or_else(PoolSample::default, |pool| sources.sample(pool))
        });
        for desired in decided {
            let at = pools.iter().position(|pool| pool.name == desired.pool);
            let Some(at) = at else { continue };
            let (counts, decision) = (&self.published.pools[at], &desired.decision);
            counts.desired.store(decision.wanted.into(), Relaxed);
            counts.decisions.fetch_add(1, Relaxed);
            if decision.wanted != decision.before {
                tracing::info!(
                    pool = desired.pool,
                    before = decision.before,
                    wanted = decision.wanted,
                    "another number of workers is wanted"
                );
            }
            self.last[at] = Some(desired);
        }
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let policies = self.pools.iter().map(|pool| pool.config.policy);
        document(
            since.map_or(0.0, |since| since.as_secs_f64()),
            policies.zip(&self.last),
        )
    }
}

/// The newest decision about each pool, as JSON.
fn document<'a>(
    at_unix_s: f64,
    decisions: impl Iterator<Item = (AutoscalePolicy, &'a Option<Desired>)>,
) -> String {
    let pools: Vec<_> = decisions
        .filter_map(|(policy, desired)| {
            let desired = desired.as_ref()?;
            let observed = &desired.decision.observed;
            Some(json!({
                "pool": desired.pool,
                "policy": policy.name(),
                "desired": desired.decision.wanted,
                "before": desired.decision.before,
                "ready": observed.ready,
                "waiting": observed.waiting,
                "running": observed.running,
                "arrivals": observed.arrivals,
                "ttft_ratio": observed.ttft_ratio,
            }))
        })
        .collect();
    json!({"schema": SCHEMA, "at_unix_s": at_unix_s, "pools": pools}).to_string()
}

impl Sources {
    /// The state of a pool.
    fn sample(&self, pool: &ScaledPool) -> PoolSample {
        let own: Vec<WorkerId> = match &self.workers {
            Workers::Modelled(_) => pool.workers.clone().map(WorkerId).collect(),
            Workers::Real(engines) => {
                let members = engines.list();
                let of_pool = members.iter().filter(|of| of.spec().pool == pool.name);
                of_pool.map(|of| of.spec().worker).collect()
            }
        };
        let (first_tokens_total, ttft_total_s) = self.totals.first_tokens();
        let queued = self.totals.queued();
        let mut sample = PoolSample {
            arrived_total: queued,
            first_tokens_total,
            ttft_total_s,
            ..PoolSample::default()
        };
        // Requests in front of the workers wait for one that answers, or that computes the prompt first.
        if (pool.role != Role::Prefill) != self.fleets.prefill.is_some() {
            sample.waiting += queued;
        }
        let mut ready: Vec<WorkerId> = Vec::new();
        for fleet in self.fleets.each() {
            let answers = Arc::ptr_eq(fleet, &self.fleets.serve);
            for load in fleet.loads() {
                if answers {
                    sample.arrived_total += load.routed_total;
                }
                if !own.contains(&load.rank.worker) {
                    continue;
                }
                if load.ready {
                    ready.push(load.rank.worker);
                }
                if let Workers::Real(_) = self.workers {
                    let running = load.requests.min(pool.seqs_per_rank);
                    sample.running += running;
                    sample.waiting += load.requests - running;
                }
            }
        }
        if let Workers::Modelled(ranks) = &self.workers {
            for rank in ranks().iter().filter(|rank| own.contains(&rank.worker)) {
                sample.running += rank.running;
                sample.waiting += rank.waiting;
            }
        }
        ready.sort_unstable();
        ready.dedup();
        sample.ready = to_u32(ready.len());
        sample
    }
}

/// Counts of a pool.
#[derive(Debug, Default)]
struct PoolCounts {
    name: String,
    desired: AtomicU64,
    decisions: AtomicU64,
}

/// Counts of an output.
#[derive(Debug, Default)]
struct OutputCounts {
    delivered: AtomicU64,
    failed: AtomicU64,
    /// A newer one came before it was delivered.
    replaced: AtomicU64,
    retried: AtomicU64,
}

/// Numbers that are published.
#[derive(Debug, Default)]
struct Published {
    pools: Vec<PoolCounts>,
    file: OutputCounts,
    webhook: OutputCounts,
}

const FAMILIES: &[Family<Arc<Published>>] = &[
    Family::gauge(
        "slipstream_autoscale_desired_workers",
        "Workers that a pool should have (`[autoscale]`)",
        |of, samples| {
            for pool in &of.pools {
                let desired = pool.desired.load(Relaxed).cast_signed();
                samples.add_integer(&[("pool", &pool.name)], desired);
            }
        },
    ),
    Family::counter(
        "slipstream_autoscale_decisions",
        "Decisions about the number of workers of a pool",
        |of, samples| {
            for pool in &of.pools {
                samples.add(&[("pool", &pool.name)], pool.decisions.load(Relaxed));
            }
        },
    ),
    Family::counter(
        "slipstream_autoscale_outputs",
        "Numbers for `live.autoscale.file` and `.webhook`, by outcome",
        |of, samples| {
            for (output, counts) in [("file", &of.file), ("webhook", &of.webhook)] {
                for (outcome, count) in [
                    ("delivered", &counts.delivered),
                    ("failed", &counts.failed),
                    ("replaced", &counts.replaced),
                ] {
                    let labels = [("output", output), ("outcome", outcome)];
                    samples.add(&labels, count.load(Relaxed));
                }
            }
        },
    ),
    Family::total(
        "slipstream_autoscale_webhook_retries",
        "Further tries of a POST to `live.autoscale.webhook`",
        |of| of.webhook.retried.load(Relaxed),
    ),
];

/// The newest document, for one thread that delivers it.
#[derive(Default)]
struct Mailbox {
    state: Mutex<Mail>,
    changed: Condvar,
}

#[derive(Default)]
struct Mail {
    newest: Option<String>,
    /// Documents that a newer one replaced, since they were last read.
    replaced: u64,
    closed: bool,
}

type Newest = Arc<Mailbox>;

impl Mailbox {
    fn change<R>(&self, change: impl FnOnce(&mut Mail) -> R) -> R {
        let mut mail = lock(&self.state);
        let result = change(&mut mail);
        self.changed.notify_all();
        result
    }

    fn put(&self, document: String) {
        self.change(|mail| {
            mail.replaced += u64::from(mail.newest.is_some());
            mail.newest = Some(document);
        });
    }

    /// No further document is delivered.
    fn close(&self) {
        self.change(|mail| mail.closed = true);
    }

    /// Waits for a document; `None`: it is closed. Also how many were replaced before it.
    fn take(&self) -> Option<(String, u64)> {
        let mut mail = lock(&self.state);
        loop {
            if mail.closed {
                return None;
            }
            if let Some(document) = mail.newest.take() {
                return Some((document, std::mem::take(&mut mail.replaced)));
            }
            mail = unpoisoned(self.changed.wait(mail));
        }
    }

    /// Whether a newer document waits, or none is wanted any more.
    fn is_outdated(&self) -> bool {
        let mail = lock(&self.state);
        mail.newest.is_some() || mail.closed
    }
}

/// Messages about failures, at most one per [`LOG_INTERVAL`].
#[derive(Default)]
struct Complaints {
    last: Option<Instant>,
    unsaid: u64,
}

impl Complaints {
    /// The number of failures that were not logged since the last message, if this one is to be logged.
    fn may_log(&mut self, now: Instant) -> Option<u64> {
        let since = |last: Instant| now.saturating_duration_since(last);
        if self.last.is_some_and(|last| since(last) < LOG_INTERVAL) {
            self.unsaid += 1;
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.unsaid))
    }
}

fn write_files(path: &Path, newest: &Mailbox, counts: &OutputCounts) {
    let mut complaints = Complaints::default();
    while let Some((document, replaced)) = newest.take() {
        counts.replaced.fetch_add(replaced, Relaxed);
        match replace(path, &document) {
            Ok(()) => {
                counts.delivered.fetch_add(1, Relaxed);
            }
            Err(error) => {
                counts.failed.fetch_add(1, Relaxed);
                if let Some(more) = complaints.may_log(Instant::now()) {
                    tracing::warn!(
                        more,
                        "the numbers of workers cannot be written to {} (live.autoscale.file): {error}",
                        path.display()
                    );
                }
            }
        }
    }
}

/// The file that is renamed to `path`.
fn temporary(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.new", std::process::id()));
    path.with_file_name(name)
}

/// Replaces the file as a whole: a reader finds the old or the new content.
fn replace(path: &Path, document: &str) -> std::io::Result<()> {
    let temporary = temporary(path);
    let write = || {
        let mut file = std::fs::File::create(&temporary)?;
        file.write_all(document.as_bytes())?;
        file.write_all(b"\n")?;
        file.sync_all()?;
        std::fs::rename(&temporary, path)
    };
    write().inspect_err(|_| {
        let _ = std::fs::remove_file(&temporary); // it may not exist
    })
}

/// Whether the file can be replaced.
fn probe(path: &Path) -> anyhow::Result<()> {
    anyhow::ensure!(!path.is_dir(), "it is a folder");
    let temporary = temporary(path);
    std::fs::File::create(&temporary)?;
    std::fs::remove_file(&temporary)?;
    Ok(())
}

/// Largest file with a token, bytes.
pub const TOKEN_FILE_BYTES_MAX: u64 = 64 << 10;

/// The token in `file`.
fn token(file: &Path) -> Result<String, String> {
    let fault = |why: String| {
        let file = file.display();
        format!("the token {file} (live.autoscale.webhook_token_file): {why}")
    };
    let text = files::reread_text(file, TOKEN_FILE_BYTES_MAX);
    let text = text.map_err(|error| fault(error.to_string()))?;
    let token = text.trim();
    if token.is_empty() || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(fault(
            "it must be one line of printable ASCII without spaces".into(),
        ));
    }
    Ok(token.to_owned())
}

/// The receiver of POSTs.
struct Webhook {
    server: Client,
    token_file: Option<PathBuf>,
    timeout: Duration,
    retries_max: u32,
}

impl Webhook {
    fn run(&self, runtime: &tokio::runtime::Runtime, newest: &Mailbox, counts: &OutputCounts) {
        let mut complaints = Complaints::default();
        while let Some((document, replaced)) = newest.take() {
            counts.replaced.fetch_add(replaced, Relaxed);
            let deliver = self.deliver(&document, newest, counts);
            let Err(why) = LocalSet::new().block_on(runtime, deliver) else {
                counts.delivered.fetch_add(1, Relaxed);
                continue;
            };
            counts.failed.fetch_add(1, Relaxed);
            if let Some(more) = complaints.may_log(Instant::now()) {
                tracing::warn!(
                    more,
                    "{} (live.autoscale.webhook) did not take the numbers of workers: {why}",
                    self.server.url
                );
            }
        }
    }

    /// Sends a document, again if that fails, until a newer one waits.
    async fn deliver(
        &self,
        document: &str,
        newest: &Mailbox,
        counts: &OutputCounts,
    ) -> Result<(), String> {
        let mut pause = RETRY_PAUSE;
        let mut tries = 0;
        loop {
            let post = tokio::time::timeout(self.timeout, self.post(document)).await;
            let fault = match post {
                Ok(Ok(())) => return Ok(()),
                Ok(Err(fault)) => fault,
                Err(_) => format!("no answer within {:?}", self.timeout),
            };
            if tries == self.retries_max {
                return Err(fault);
            }
            tokio::time::sleep(pause).await;
            pause *= 2;
            tries += 1;
            if newest.is_outdated() {
                return Err(fault);
            }
            counts.retried.fetch_add(1, Relaxed);
        }
    }

    async fn post(&self, document: &str) -> Result<(), String> {
        let token = self.token_file.as_deref().map(token).transpose()?;
        let path = match &*self.server.url.prefix {
            "" => "/",
            path => path,
        };
        let body = Full::new(Bytes::copy_from_slice(document.as_bytes()));
        let request = Request::post(path)
            .header(CONTENT_TYPE, "application/json")
            .body(body)
            .map_err(|error| error.to_string())?;
        let answer = self.server.send(request, token.as_deref()).await;
        match answer.map_err(|error| error.to_string())?.status() {
            status if status.is_success() => Ok(()),
            status => Err(format!("it answers {status}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use slipstream_autoscale::{Decision, Observed};

    use super::*;

    #[test]
    fn the_newest_document_is_delivered_and_the_others_are_counted() {
        let newest = Mailbox::default();
        for document in ["1", "2", "3"] {
            newest.put(document.into());
        }
        assert!(newest.is_outdated());
        assert_eq!(newest.take(), Some(("3".into(), 2)));
        assert!(!newest.is_outdated());
        newest.put("4".into());
        assert_eq!(newest.take(), Some(("4".into(), 0)));
        newest.put("5".into());
        newest.close();
        assert_eq!(newest.take(), None);
    }

    #[test]
    fn the_document_has_the_newest_decision_of_each_pool() {
        let desired = Desired {
            pool: "main".into(),
            decision: Decision {
                at: SimTime(5),
                observed: Observed {
                    ready: 2,
                    waiting: 7,
                    running: 16,
                    slots: 8,
                    ttft_ratio: None,
                    arrivals: 40,
                },
                before: 2,
                wanted: 3,
            },
        };
        let each = [Some(desired), None];
        let text = document(1.5, [AutoscalePolicy::Queue; 2].into_iter().zip(&each));
        let read: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(
            read,
            json!({"schema": 1, "at_unix_s": 1.5, "pools": [{
                "pool": "main", "policy": "queue", "desired": 3, "before": 2, "ready": 2, "waiting": 7, "running": 16,
                "arrivals": 40, "ttft_ratio": null,
            }]})
        );
    }

    #[test]
    fn a_file_is_replaced_as_a_whole_and_leaves_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("desired.json");
        probe(&path).unwrap();
        assert!(!path.exists());
        replace(&path, "{\"a\": 1}").unwrap();
        let held = std::fs::File::open(&path).unwrap();
        replace(&path, "{}").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "{}\n");
        // A reader that had it open has the old content.
        assert_eq!(std::io::read_to_string(held).unwrap(), "{\"a\": 1}\n");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
        // A folder is in the way, and none is there.
        let (taken, missing) = (folder.path().join("taken"), folder.path().join("no/file"));
        std::fs::create_dir(&taken).unwrap();
        for path in [&taken, &missing] {
            assert!(probe(path).is_err());
            assert!(replace(path, "{}").is_err());
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
    }

    #[test]
    fn one_failure_per_minute_is_logged() {
        let mut complaints = Complaints::default();
        let start = Instant::now();
        let mut at = |s: u64| complaints.may_log(start + Duration::from_secs(s));
        assert_eq!(
            [at(0), at(1), at(59), at(60), at(61)],
            [Some(0), None, None, Some(2), None]
        );
    }
}
