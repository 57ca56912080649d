//! Stores in one process, over memory, disk and tiers that a test controls.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize};

use slipstream_base::SimTime;
use slipstream_base::mix::draw;
use slipstream_kvindex::KeyMirror;

use super::*;
use crate::tier::TierChange;
use crate::{DiskOptions, DiskTier, MemoryOptions, Profile, clock};

const BLOCK: usize = 4_096;
const LONG: Duration = Duration::from_secs(30);

fn key(n: u64) -> Box<[u8]> {
    let mut key = vec![5; 36];
    key[..8].copy_from_slice(&n.to_le_bytes());
    key.into()
}

fn block(n: u64) -> Vec<u8> {
    (0..BLOCK as u64 / 8)
        .flat_map(|word| draw(n, word).to_le_bytes())
        .collect()
}

fn memory(blocks: usize) -> Arc<MemoryTier> {
    MemoryTier::new(MemoryOptions {
        bytes: blocks * BLOCK,
        block_bytes: BLOCK,
        ttl_ns: None,
    })
    .unwrap()
}

fn disk(folder: &Path) -> Arc<DiskTier> {
    let options = DiskOptions::new(folder, 1 << 30);
    DiskTier::open(clock::now(), clock::unix_ns(), options).unwrap()
}

fn start(blocks: usize, lower: Vec<Arc<dyn Tier>>) -> Store {
    Store::start(StoreOptions {
        lower,
        ..StoreOptions::new(memory(blocks))
    })
    .unwrap()
}

fn put(store: &Store, numbers: std::ops::Range<u64>) -> usize {
    let data: Vec<u8> = numbers.clone().flat_map(block).collect();
    store.put(numbers.map(key).collect(), &data).unwrap()
}

fn load_from(store: &Store, source: &str, numbers: &[u64]) -> LoadEnd {
    let request = LoadRequest {
        job: 7,
        keys: numbers.iter().map(|&n| key(n)).collect(),
        sources: vec![source.to_owned(); numbers.len()],
        into: Region::new(numbers.len() * BLOCK),
        deadline: LONG,
    };
    store.load(request).unwrap();
    let mut ended = store.wait(LONG);
    assert_eq!(ended.len(), 1, "a load ends exactly once");
    let mut ended = ended.remove(0);
    assert_eq!(ended.job, 7);
    ended.failed.sort_unstable();
    let mut out = vec![0; BLOCK];
    for (at, &n) in numbers.iter().enumerate() {
        if !ended.failed.contains(&(at as u32)) {
            ended.into.read(at * BLOCK, &mut out).unwrap();
            assert!(out == block(n), "block {n}");
        }
    }
    ended
}

fn load(store: &Store, numbers: &[u64]) -> LoadEnd {
    load_from(store, "", numbers)
}

#[track_caller]
fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + LONG;
    while !is_so() {
        assert!(Instant::now() < end, "{what}");
        std::thread::yield_now();
    }
}

fn stats(store: &Store, tier: usize) -> TierStats {
    store.stats().tiers[tier].1
}

#[test]
fn blocks_are_written_to_lower_tiers_and_read_back() {
    let dir = tempfile::tempdir().unwrap();
    let store = start(4, vec![disk(dir.path())]);
    // One at a time, so that each is written before memory evicts it.
    for n in 0..10 {
        assert_eq!(put(&store, n..n + 1), 1);
        wait_until("the block is written", || {
            stats(&store, 1).stored_total == n + 1
        });
    }
    assert_eq!(stats(&store, 0).evicted_total, 6);
    assert_eq!(store.stats().dropped_blocks, 0);
    let ended = load(&store, &[0, 9, 99]);
    assert_eq!((&ended.failed[..], ended.reason), (&[2][..], "absent"));
    assert_eq!(
        (stats(&store, 0).hits_total, stats(&store, 1).hits_total),
        (1, 1)
    );
    // The block read from disk is now in memory.
    assert_eq!(load(&store, &[0]).failed, [0u32; 0]);
    assert_eq!(
        (stats(&store, 0).hits_total, stats(&store, 1).hits_total),
        (2, 1)
    );
    store.reset();
    assert_eq!(load(&store, &[0, 9]).failed, [0, 1]);
}

#[test]
fn closing_writes_queued_blocks_and_counts_the_rest() {
    let dir = tempfile::tempdir().unwrap();
    let store = start(600, vec![disk(dir.path())]);
    put(&store, 0..500);
    store.close();
    assert_eq!(store.stats().dropped_blocks, 0);
    let again = disk(dir.path()); // the folder is free
    assert_eq!(again.stats().blocks, 500);
    let closed = load(&store, &[1]);
    assert_eq!((&closed.failed[..], closed.reason), (&[0][..], "closed"));

    let slow = Arc::new(Switched::new(memory(600)));
    slow.is_stalled.store(true, Ordering::SeqCst);
    let store = Store::start(StoreOptions {
        lower: vec![slow.clone()],
        close_max: Duration::ZERO,
        ..StoreOptions::new(memory(600))
    })
    .unwrap();
    put(&store, 0..500);
    wait_until("the writers are busy", || {
        slow.writing.load(Ordering::SeqCst) == WRITERS
    });
    slow.is_stalled.store(false, Ordering::SeqCst);
    store.close();
    let written = slow.inner.stats().stored_total;
    assert!((WRITERS as u64..500).contains(&written), "{written}");
    assert_eq!(store.stats().dropped_blocks, 500 - written);
}

#[test]
fn each_load_that_meets_a_close_ends_once() {
    for _ in 0..300 {
        let store = start(1, Vec::new());
        let (begun, is_closed) = (AtomicUsize::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_closed.load(Ordering::SeqCst) {
                    let request = LoadRequest {
                        job: 7,
                        keys: vec![key(1)],
                        sources: vec![String::new()],
                        into: Region::new(BLOCK),
                        deadline: LONG,
                    };
                    store.load(request).unwrap();
                    begun.fetch_add(1, Ordering::SeqCst);
                }
            });
            while begun.load(Ordering::SeqCst) == 0 {
                std::hint::spin_loop();
            }
            store.close();
            is_closed.store(true, Ordering::SeqCst);
        });
        assert_eq!(store.wait(Duration::ZERO).len(), begun.into_inner());
    }
}

#[test]
fn a_failing_tier_costs_no_block_of_the_others() {
    let broken = Arc::new(Switched::new(memory(64)));
    broken.is_failing.store(true, Ordering::SeqCst);
    let below = memory(64);
    let store = start(4, vec![broken.clone(), below.clone()]);
    for n in 0..20 {
        put(&store, n..n + 1);
        wait_until("the block is written", || {
            below.stats().stored_total == n + 1
        });
    }
    assert_eq!(load(&store, &(0..20).collect::<Vec<_>>()).failed, [0u32; 0]);
    assert_eq!(broken.inner.stats().blocks, 0);
    // The tier works again: from here on it is used.
    broken.is_failing.store(false, Ordering::SeqCst);
    put(&store, 30..31);
    wait_until("the block is written", || {
        broken.inner.stats().stored_total == 1
    });
}

#[test]
fn detaching_keeps_blocks_in_lower_tiers_and_stops_using_them() {
    let below = memory(64);
    let store = start(8, vec![below.clone()]);
    put(&store, 0..3);
    wait_until("the blocks are written", || below.stats().stored_total == 3);
    store.detach().unwrap();
    assert_eq!(load(&store, &[0, 1, 2]).failed, [0, 1, 2]);
    put(&store, 5..6);
    assert_eq!(load(&store, &[5]).failed, [0u32; 0]);
    store.close();
    assert_eq!(below.keys().len(), 3, "earlier blocks only");
}

#[test]
fn messages_cover_the_keys_of_all_tiers() {
    let below = Arc::new(Switched::new(memory(64)));
    let store = Store::start(StoreOptions {
        lower: vec![below.clone()],
        publish_tiers: true,
        ..StoreOptions::new(memory(2))
    })
    .unwrap();
    for n in 0..5 {
        put(&store, n..n + 1);
        wait_until("the block is written", || {
            below.inner.stats().stored_total == n + 1
        });
    }
    let (mut all, mut tiers) = (
        KeyMirror::default(),
        [KeyMirror::default(), KeyMirror::default()],
    );
    wait_until("the messages cover it", || {
        while let Some(message) = store.take_message() {
            all.apply(&message).unwrap();
        }
        while let Some((medium, message)) = store.take_tier_message() {
            tiers[usize::from(medium == Medium::Disk)]
                .apply(&message)
                .unwrap();
        }
        all.keys().len() == 5 && !tiers[0].keys().contains(&key(0))
    });
    assert!((0..5).all(|n| all.keys().contains(&key(n))));
    store.reset();
    wait_until("all keys are removed", || {
        while let Some(message) = store.take_message() {
            all.apply(&message).unwrap();
        }
        all.keys().is_empty()
    });
}

#[test]
fn invalid_requests_are_refused() {
    let two = Store::start(StoreOptions {
        block_bytes: vec![BLOCK, BLOCK / 2],
        ..StoreOptions::new(memory(8))
    })
    .unwrap();
    let of_group = |group: u32| -> Box<[u8]> {
        let mut key = key(1).into_vec();
        key.extend(group.to_be_bytes());
        key.into()
    };
    let data = vec![1; BLOCK + BLOCK / 2];
    assert_eq!(two.put(vec![of_group(0), of_group(1)], &data).unwrap(), 2);
    let error = two.put(vec![of_group(2)], &data).unwrap_err().to_string();
    assert!(error.contains("none of 2 groups"), "{error}");
    let error = two.put(vec![of_group(1)], &data).unwrap_err().to_string();
    assert_eq!(error, "the buffer has 6144 bytes, but 1 blocks have 2048");
    let no_source = LoadRequest {
        job: 1,
        keys: vec![of_group(1)],
        sources: vec![],
        into: Region::new(BLOCK / 2),
        deadline: LONG,
    };
    let error = two.load(no_source).unwrap_err().to_string();
    assert_eq!(error, "0 sources for 1 keys; give one source per key");
    for sizes in [vec![], vec![BLOCK, 0], vec![BLOCK, 2 * BLOCK]] {
        let options = StoreOptions {
            block_bytes: sizes,
            ..StoreOptions::new(memory(8))
        };
        assert!(Store::start(options).is_err());
    }
}

fn peers(name: &str, folder: &Path, listen: bool, model: &str) -> PeerOptions {
    let listens = format!("unix://{}/{name}.sock", folder.display());
    PeerOptions {
        name: name.into(),
        profile: Profile {
            model: model.into(),
            ..Profile::default()
        },
        listen: if listen {
            vec![listens.parse().unwrap()]
        } else {
            vec![]
        },
        discovery: Some(PeerDiscovery {
            folder: folder.join("peers"),
            engine: name.into(),
            rank: 0,
            identity: [("model".to_owned(), model.to_owned())].into(),
            nixl: false,
        }),
        ..PeerOptions::default()
    }
}

fn with_peers(peers: PeerOptions, lower: Vec<Arc<dyn Tier>>) -> Store {
    Store::start(StoreOptions {
        peers: Some(peers),
        lower,
        ..StoreOptions::new(memory(8))
    })
    .unwrap()
}

#[test]
fn peers_are_discovered_and_serve_blocks_of_all_their_tiers() {
    let dir = tempfile::tempdir().unwrap();
    let below = memory(64);
    let a = with_peers(peers("a", dir.path(), true, "m"), vec![below.clone()]);
    let other = with_peers(peers("other", dir.path(), true, "n"), vec![]);
    put(&other, 3..4);
    for n in 0..20 {
        put(&a, n..n + 1);
        wait_until("the block is written", || {
            below.stats().stored_total == n + 1
        });
    }
    let b = with_peers(peers("b", dir.path(), false, "m"), vec![]);
    wait_until("a is connected", || {
        load_from(&b, "a", &[19]).failed.is_empty()
    });
    // Blocks 0 to 11 are only in the lower tier of `a`. Fetched blocks are not stored here.
    assert_eq!(load_from(&b, "a", &[0, 5, 19]).failed, [0u32; 0]);
    let lost = load_from(&b, "other", &[3]);
    assert_eq!((&lost.failed[..], lost.reason), (&[0][..], "lost"));
    let stats = b.stats().peers.unwrap();
    assert_eq!(
        stats.found_total, 1,
        "a peer of another model is not connected"
    );
    assert!(stats.transport.fetched_blocks_total >= 4);

    let keys = PeerKeys::start(vec![peers("scheduler", dir.path(), false, "m")], 1_000).unwrap();
    let wanted: Vec<_> = (0..20)
        .map(|n| slipstream_kvindex::digest(&key(n)))
        .collect();
    wait_until("its keys are known", || {
        let found = keys.candidates(&wanted);
        found
            .first()
            .is_some_and(|best| &*best.name == "a" && best.blocks == 20)
    });
    keys.close();

    drop(a);
    wait_until("it has left", || b.stats().peers.unwrap().left_total == 1);
    let lost = load_from(&b, "a", &[0]);
    assert_eq!((&lost.failed[..], lost.reason), (&[0][..], "lost"));
    drop((b, other));
    let left = std::fs::read_dir(dir.path().join("peers")).unwrap().count();
    assert_eq!(left, 0, "records are removed");
}

#[test]
fn an_address_that_peers_cannot_reach_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut peers = peers("a", dir.path(), true, "m");
    peers.listen = vec!["tcp://0.0.0.0:0".parse().unwrap()];
    let options = StoreOptions {
        peers: Some(peers),
        ..StoreOptions::new(memory(8))
    };
    let error = Store::start(options).err().unwrap().to_string();
    assert!(
        error.contains("cannot reach an engine at tcp://0.0.0.0"),
        "{error}"
    );
}

/// A tier that fails or stalls on request.
struct Switched {
    inner: Arc<MemoryTier>,
    is_failing: AtomicBool,
    is_stalled: AtomicBool,
    writing: AtomicUsize,
}

impl Switched {
    fn new(inner: Arc<MemoryTier>) -> Switched {
        Switched {
            inner,
            is_failing: AtomicBool::new(false),
            is_stalled: AtomicBool::new(false),
            writing: AtomicUsize::new(0),
        }
    }

    fn check(&self) -> Result<(), TierError> {
        if self.is_failing.load(Ordering::SeqCst) {
            return Err(TierError::Disk {
                path: "/broken".into(),
                what: "writing",
                source: io::ErrorKind::StorageFull.into(),
            });
        }
        Ok(())
    }
}

impl Tier for Switched {
    fn medium(&self) -> Medium {
        Medium::Disk
    }

    fn epoch(&self) -> u64 {
        self.inner.epoch()
    }

    fn put_in(
        &self,
        epoch: u64,
        now: SimTime,
        key: &[u8],
        bytes: &[u8],
    ) -> Result<bool, TierError> {
        self.check()?;
        self.writing.fetch_add(1, Ordering::SeqCst);
        while self.is_stalled.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        self.inner.put_in(epoch, now, key, bytes)
    }

    fn get(&self, now: SimTime, key: &[u8], out: &mut [u8]) -> Result<bool, TierError> {
        self.check()?;
        self.inner.get(now, key, out)
    }

    fn len_of(&self, now: SimTime, key: &[u8]) -> Option<usize> {
        self.inner.len_of(now, key)
    }

    fn remove(&self, key: &[u8]) -> bool {
        self.inner.remove(key)
    }

    fn expire(&self, now: SimTime, count_max: usize) -> usize {
        self.inner.expire(now, count_max)
    }

    fn take_changes(&self, out: &mut Vec<TierChange>) -> bool {
        self.inner.take_changes(out)
    }

    fn keys(&self) -> Vec<Box<[u8]>> {
        self.inner.keys()
    }

    fn stats(&self) -> TierStats {
        self.inner.stats()
    }

    fn clear(&self) {
        self.inner.clear();
    }
}
