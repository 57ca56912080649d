//! Which worker processes are connected to which shards of this frontend.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use slipstream_base::WorkerId;
use slipstream_base::sync::lock;
use slipstream_planes::clock::monotonic_ns;
use slipstream_planes::tombstone::{STANDS_NS, Tombstones};
use slipstream_planes::wire::{Hello, RankLoad, Reject, RejectReason};
use slipstream_router::Fleets;
use subtle::ConstantTimeEq;

/// State of worker processes, shared by the shards of a frontend. A worker takes requests once
/// the process that runs it is connected to every shard: a router's choice is then good on each.
pub struct Roster {
    /// Of this run of the frontend.
    pub(crate) instance: u64,
    /// Of the cluster; workers of another are rejected.
    pub(crate) fingerprint: u64,
    /// For people.
    pub(crate) name: String,
    /// Data that workers have to send.
    key: [u8; 16],
    shards: usize,
    fleets: Fleets,
    /// By worker. Locked when connections come and go, never for a request.
    workers: Mutex<Vec<Seat>>,
    /// Workers that vanished a moment ago.
    pub(crate) tombstones: Tombstones,
    /// Last reports of worker processes on their ranks.
    loads: Mutex<Vec<RankLoad>>,
    counts: RosterCounts,
}

/// Counters of a roster.
#[derive(Debug, Default)]
struct RosterCounts {
    open: AtomicU64,
    connected: AtomicU64,
    rejected: AtomicU64,
    lost: AtomicU64,
}

/// Counters of a roster, for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RosterTotals {
    /// Connections open now.
    pub open: u64,
    /// Connections greeted.
    pub connected: u64,
    /// Connections turned away.
    pub rejected: u64,
    /// Connections lost.
    pub lost: u64,
    /// Tombstones that stand now.
    pub tombstones: u64,
}

/// The process that runs a worker.
#[derive(Debug, Default)]
struct Seat {
    /// The instance, and its name; `None` while there is none.
    held_by: Option<(u64, String)>,
    /// Shards that it is connected to.
    shards: BTreeSet<u8>,
    ready: bool,
}

impl Roster {
    /// A roster of the cluster of `fleets`, which has `workers` workers in all, for `shards` shards. Workers
    /// have to send `key`.
    pub fn new(
        instance: u64,
        fingerprint: u64,
        name: String,
        fleets: Fleets,
        workers: usize,
        shards: usize,
        key: [u8; 16],
    ) -> Roster {
        Roster {
            instance,
            fingerprint,
            name,
            key,
            shards,
            fleets,
            workers: Mutex::new((0..workers).map(|_| Seat::default()).collect()),
            tombstones: Tombstones::new(workers, STANDS_NS),
            loads: Mutex::default(),
            counts: RosterCounts::default(),
        }
    }

    /// Counters of the roster.
    pub fn totals(&self) -> RosterTotals {
        RosterTotals {
            open: self.counts.open.load(Relaxed),
            connected: self.counts.connected.load(Relaxed),
            rejected: self.counts.rejected.load(Relaxed),
            lost: self.counts.lost.load(Relaxed),
            tombstones: self.tombstones.count(monotonic_ns()) as u64,
        }
    }

    /// Last reports of worker processes on their ranks, by rank.
    pub fn loads(&self) -> Vec<RankLoad> {
        lock(&self.loads).clone()
    }

    pub(crate) fn fleets(&self) -> &Fleets {
        &self.fleets
    }

    /// How many workers the cluster has.
    pub(crate) fn worker_count(&self) -> usize {
        lock(&self.workers).len()
    }

    /// A process said hello to `shard`: seats its workers, or says why not. Nothing is changed
    /// then.
    pub(crate) fn admit(&self, shard: u8, hello: &Hello) -> Result<(), Reject> {
        let seated = self.seat(shard, hello);
        match seated {
            Ok(()) => {
                self.counts.connected.fetch_add(1, Relaxed);
                self.counts.open.fetch_add(1, Relaxed);
            }
            Err(_) => self.on_rejected(),
        }
        seated
    }

    pub(crate) fn on_rejected(&self) {
        self.counts.rejected.fetch_add(1, Relaxed);
    }

    fn seat(&self, shard: u8, hello: &Hello) -> Result<(), Reject> {
        let reject = |reason, message| Err(Reject { reason, message });
        // First: a peer without it learns nothing else.
        if !bool::from(hello.key.ct_eq(&self.key)) {
            return reject(
                RejectReason::Key,
                "the process does not know the key in this frontend's record; give it the frontend's \
                 --discovery directory"
                    .into(),
            );
        }
        if hello.fingerprint != self.fingerprint {
            return reject(
                RejectReason::Cluster,
                format!(
                    "{} was started from another cluster file than {}; models, pools, engines and \
                     `live.events` must be the same",
                    hello.name, self.name
                ),
            );
        }
        if hello.shard != shard {
            return reject(
                RejectReason::WrongShard,
                format!(
                    "this is shard {shard}, not {}; look at the discovery directory again",
                    hello.shard
                ),
            );
        }
        let mut workers = lock(&self.workers);
        let mut named = BTreeSet::new();
        for announced in &hello.workers {
            let worker = announced.worker;
            let Some(seat) = workers.get(worker.index()) else {
                return reject(
                    RejectReason::Cluster,
                    format!("the cluster has {} workers, and no {worker}", workers.len()),
                );
            };
            if !named.insert(worker) {
                return reject(
                    RejectReason::Protocol,
                    format!("{worker} is announced twice; announce each worker once"),
                );
            }
            match &seat.held_by {
                Some((instance, holder))
                    if *instance != hello.instance && !slipstream_base::planted!("two-holders") =>
                {
                    return reject(
                        RejectReason::WorkerTaken,
                        format!(
                            "{worker} is run by {holder} already; this process may have it when \
                             that one ends; to share the work, give them different --index"
                        ),
                    );
                }
                Some(_) if seat.shards.contains(&shard) => {
                    return reject(
                        RejectReason::WorkerTaken,
                        format!("{} is connected to shard {shard} already", hello.name),
                    );
                }
                _ => {}
            }
        }
        for announced in &hello.workers {
            let seat = &mut workers[announced.worker.index()];
            seat.held_by = Some((hello.instance, hello.name.clone()));
            seat.shards.insert(shard);
            seat.ready |= announced.ready;
            self.settle(announced.worker, seat);
        }
        Ok(())
    }

    /// A worker of `instance` takes requests from now on, or no longer does.
    pub(crate) fn on_ready(&self, instance: u64, worker: WorkerId, ready: bool) {
        let mut workers = lock(&self.workers);
        let Some(seat) = workers.get_mut(worker.index()) else {
            return;
        };
        if seat.held_by.as_ref().is_some_and(|(by, _)| *by == instance) {
            seat.ready = ready;
            self.settle(worker, seat);
        }
    }

    /// The connection of `instance` to `shard` is gone. Its workers take no requests until it is
    /// back on every shard; the state of their caches is forgotten.
    pub(crate) fn on_lost(&self, shard: u8, instance: u64, of: &[WorkerId]) {
        self.counts.lost.fetch_add(1, Relaxed);
        self.counts.open.fetch_sub(1, Relaxed);
        let now = monotonic_ns();
        let mut workers = lock(&self.workers);
        for &worker in of {
            let Some(seat) = workers.get_mut(worker.index()) else {
                continue;
            };
            if seat.held_by.as_ref().is_none_or(|(by, _)| *by != instance) {
                continue;
            }
            if !slipstream_base::planted!("kept-seat") {
                seat.shards.remove(&shard);
            }
            self.tombstones.raise(worker.index(), now);
            self.settle(worker, seat);
            if feeds_index(shard) {
                self.fleets.on_worker_lost(worker);
            }
            if seat.shards.is_empty() {
                *seat = Seat::default();
            }
        }
        drop(workers);
        lock(&self.loads).retain(|load| !of.contains(&load.rank.worker));
    }

    /// Keeps what a process says of its ranks.
    pub(crate) fn on_load(&self, load: RankLoad) {
        let mut loads = lock(&self.loads);
        match loads.binary_search_by_key(&load.rank, |known| known.rank) {
            Ok(at) => loads[at] = load,
            Err(at) => loads.insert(at, load),
        }
    }

    /// Makes the fleet agree with the seat.
    fn settle(&self, worker: WorkerId, seat: &Seat) {
        let whole = seat.shards.len() == self.shards;
        if whole {
            self.tombstones.clear(worker.index());
        }
        self.fleets.set_ready(worker, whole && seat.ready);
    }
}

/// Whether KV deltas are to come to `shard`: one does, as all shards share the index.
pub(crate) fn feeds_index(shard: u8) -> bool {
    shard == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering::SeqCst;

    use slipstream_base::{RankId, mix};
    use slipstream_config::cluster::RouterConfig;
    use slipstream_planes::wire::Announced;
    use slipstream_planes::{Registration, StreamTable};
    use slipstream_router::{Fleet, fleet::TargetConfig};

    fn roster(workers: u32, shards: usize) -> Roster {
        let targets = (0..workers).map(|worker| TargetConfig {
            rank: RankId {
                worker: WorkerId(worker),
                dp_rank: 0,
            },
            kv_blocks: 8,
            prefix_caching: true,
        });
        let fleet = Fleet::new(RouterConfig::default(), 16, targets.collect()).unwrap();
        let workers = workers as usize;
        Roster::new(1, 7, "here".into(), fleet.into(), workers, shards, KEY)
    }

    fn hello(instance: u64, shard: u8, workers: &[u32], ready: bool) -> Hello {
        Hello {
            instance,
            fingerprint: 7,
            shard,
            deadline_ms: 1000,
            clock: 1,
            name: format!("process {instance}"),
            workers: workers
                .iter()
                .map(|&worker| Announced {
                    worker: WorkerId(worker),
                    ranks: 1,
                    ready,
                })
                .collect(),
            key: KEY,
        }
    }

    const KEY: [u8; 16] = [7; 16];

    #[test]
    fn who_does_not_know_the_key_gets_no_seat_and_learns_nothing() {
        let roster = roster(2, 1);
        for key in [[0; 16], [8; 16]] {
            let wrong = Hello {
                key,
                fingerprint: 99,
                ..hello(1, 0, &[0, 1], true)
            };
            let rejected = roster.admit(0, &wrong).unwrap_err();
            assert_eq!(rejected.reason, RejectReason::Key);
            assert!(rejected.message.contains("--discovery"), "{rejected}");
        }
        assert_eq!(ready(&roster), [false, false]);
        roster.admit(0, &hello(2, 0, &[0, 1], true)).unwrap();
        assert_eq!(ready(&roster), [true, true]);
    }

    fn ready(roster: &Roster) -> Vec<bool> {
        let targets = 0..roster.fleets.serve.targets().len();
        targets
            .map(|target| roster.fleets.serve.is_ready(target))
            .collect()
    }

    #[test]
    fn a_worker_takes_requests_once_it_is_on_every_shard_and_ready() {
        let roster = roster(2, 2);
        roster.admit(0, &hello(9, 0, &[1], false)).unwrap();
        roster.admit(1, &hello(9, 1, &[1], false)).unwrap();
        assert_eq!(ready(&roster), [false, false]);
        roster.on_ready(8, WorkerId(1), true);
        assert_eq!(
            ready(&roster),
            [false, false],
            "another instance has no say"
        );
        roster.on_ready(9, WorkerId(1), true);
        assert_eq!(ready(&roster), [false, true]);
        roster.on_lost(1, 9, &[WorkerId(1)]);
        assert_eq!(ready(&roster), [false, false]);
        assert_eq!(roster.totals().tombstones, 1);
        roster.admit(1, &hello(9, 1, &[1], true)).unwrap();
        assert_eq!(ready(&roster), [false, true]);
        let totals = roster.totals();
        assert_eq!((totals.open, totals.lost, totals.tombstones), (2, 1, 0));
    }

    #[test]
    fn two_processes_cannot_run_one_worker() {
        let roster = roster(2, 1);
        roster.admit(0, &hello(1, 0, &[0], true)).unwrap();
        let taken = roster.admit(0, &hello(2, 0, &[1, 0], true)).unwrap_err();
        assert_eq!(taken.reason, RejectReason::WorkerTaken);
        assert!(taken.message.contains("process 1"), "{taken}");
        assert_eq!(ready(&roster), [true, false], "nothing was changed");
        let twice = roster.admit(0, &hello(1, 0, &[0], true)).unwrap_err();
        assert_eq!(twice.reason, RejectReason::WorkerTaken);
        // Once the first is gone the second may have it.
        roster.on_lost(0, 1, &[WorkerId(0)]);
        roster.admit(0, &hello(2, 0, &[1, 0], true)).unwrap();
        assert_eq!(ready(&roster), [true, true]);
        // Late reports of the first no longer count.
        roster.on_lost(0, 1, &[WorkerId(0)]);
        assert_eq!(ready(&roster), [true, true]);
    }

    #[test]
    fn strangers_are_told_why_they_are_rejected() {
        let roster = roster(2, 1);
        let check = |hello: &Hello, reason, part: &str| {
            let reject = roster.admit(0, hello).unwrap_err();
            assert_eq!(reject.reason, reason);
            assert!(reject.message.contains(part), "{reject}");
        };
        let mut other = hello(1, 0, &[0], true);
        other.fingerprint = 8;
        check(&other, RejectReason::Cluster, "another cluster file");
        check(
            &hello(1, 3, &[0], true),
            RejectReason::WrongShard,
            "shard 0, not 3",
        );
        check(&hello(1, 0, &[0, 2], true), RejectReason::Cluster, "no w2");
        check(&hello(1, 0, &[0, 0], true), RejectReason::Protocol, "twice");
        assert_eq!(roster.totals().rejected, 4);
        assert_eq!(ready(&roster), [false, false]);
    }

    /// The process of a worker, and on how many shards, as the threads of the test saw it: kept apart from
    /// the roster, and in its order.
    struct Holders(Vec<AtomicU64>);

    impl Holders {
        fn seated(&self, worker: u32, instance: u64) {
            let cell = &self.0[worker as usize];
            let update = |held: u64| {
                let (by, shards) = (held >> 32, held & 0xffff_ffff);
                assert!(shards == 0 || by == instance, "w{worker} has two holders");
                Some(instance << 32 | (shards + 1))
            };
            cell.fetch_update(SeqCst, SeqCst, update).unwrap();
        }

        fn leaving(&self, worker: u32) {
            self.0[worker as usize].fetch_sub(1, SeqCst);
        }
    }

    /// Shards that register streams while worker processes call home and vanish, all at once: no
    /// worker has two holders, no stream is left, and in the end the roster is as the connections
    /// are. (What shards share without a lock, tombstones and bells: under loom, in `planes`.)
    #[test]
    fn shards_register_while_processes_call_home_and_vanish() {
        const SHARDS: u8 = 6;
        const WORKERS: u32 = 8;
        const ROUNDS: u32 = 2000;
        let roster = roster(WORKERS, usize::from(SHARDS));
        let holders = Holders((0..WORKERS).map(|_| AtomicU64::new(0)).collect());
        let start = std::sync::Barrier::new(usize::from(SHARDS));
        let shard = |shard: u8| {
            let table = StreamTable::new(shard, 64);
            let mut streams: Vec<Option<Registration<u32>>> = (0..64).map(|_| None).collect();
            // By worker: the instance connected here.
            let mut seated = [None; WORKERS as usize];
            start.wait();
            for round in 0..ROUNDS {
                let draw = mix::draw(u64::from(shard), u64::from(round));
                let worker = (draw % u64::from(WORKERS)) as u32;
                let at = worker as usize;
                // Two processes want each worker.
                let instance = 1 + u64::from(worker) * 2 + (draw >> 8) % 2;
                match ((draw >> 16) % 4, seated[at]) {
                    (0, None) => {
                        let hello = hello(instance, shard, &[worker], true);
                        if roster.admit(shard, &hello).is_ok() {
                            holders.seated(worker, instance);
                            seated[at] = Some(instance);
                        }
                    }
                    (1, Some(instance)) => {
                        holders.leaving(worker);
                        roster.on_lost(shard, instance, &[WorkerId(worker)]);
                        // Established streams of that worker end here; others are left alone.
                        for stream in &mut streams {
                            stream.take_if(|s| s.with(|of| *of == worker));
                        }
                        seated[at] = None;
                    }
                    (2, Some(_)) if !roster.tombstones.stands(at, monotonic_ns()) => {
                        let free = streams.iter_mut().find(|stream| stream.is_none());
                        *free.expect("streams are dropped as often") =
                            Some(table.register(worker).unwrap());
                    }
                    _ => drop(streams[(draw >> 24) as usize % 64].take()),
                }
                if table.len() == 64 {
                    streams.fill_with(|| None);
                }
            }
            streams.clear();
            assert!(table.is_empty(), "no stream is left");
            seated
        };
        let seated: Vec<_> = std::thread::scope(|scope| {
            let shards = (0..SHARDS).map(|n| scope.spawn(move || shard(n)));
            let shards: Vec<_> = shards.collect();
            shards.into_iter().map(|s| s.join().unwrap()).collect()
        });
        let connections = seated.iter().flatten().flatten().count();
        assert_eq!(roster.totals().open, connections as u64);
        for worker in 0..WORKERS as usize {
            let whole = seated.iter().all(|shard| shard[worker].is_some());
            assert_eq!(ready(&roster)[worker], whole, "w{worker}");
        }
        // A process that is missing at a shard comes there, and takes requests at once.
        for worker in 0..WORKERS {
            let at = worker as usize;
            let holder = seated.iter().find_map(|shard| shard[at]).unwrap_or(99);
            for shard in (0..SHARDS).filter(|&shard| seated[usize::from(shard)][at].is_none()) {
                roster
                    .admit(shard, &hello(holder, shard, &[worker], true))
                    .unwrap();
            }
        }
        assert!(ready(&roster).iter().all(|&ready| ready));
        assert_eq!(roster.totals().tombstones, 0, "who returned is not mourned");
    }
}
