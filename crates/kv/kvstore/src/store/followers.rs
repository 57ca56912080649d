//! Tracks the keys of the peers of all ranks of an engine, without fetching blocks: for schedulers.

use std::cmp::Reverse;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use slipstream_base::BlockHash;
use slipstream_base::sync::lock;
use slipstream_discovery::Session;
use slipstream_kvindex::PeerIndex;

use super::links::{PeerLinks, PeerOptions};
use super::{StoreError, discovered};
use crate::clock;
use crate::transport::Nixl;

/// Interval at which the index and the connections are updated.
const PAUSE: Duration = Duration::from_millis(5);
/// Keys of removed peers that are swept from the index at a time.
const SWEEP_MAX: usize = 8_192;

/// Follows the keys of peers, rank by rank.
pub struct PeerKeys {
    ranks: Arc<Vec<Rank>>,
    stop: Arc<AtomicBool>,
    session: Mutex<Option<Session>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// The connections of one rank to the same rank of all peers.
struct Rank {
    links: Arc<PeerLinks>,
    index: Arc<PeerIndex>,
}

/// A peer whose ranks are all connected.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// The peer's name on all ranks of this engine.
    pub name: Arc<str>,
    /// For each rank, its slot in the index.
    slots: Vec<usize>,
    /// Leading keys of the look-up that all its ranks hold.
    pub blocks: usize,
}

impl PeerKeys {
    /// Connects to the peers of each rank, and keeps at most `keys_max` keys per rank, of all peers
    /// together.
    ///
    /// # Errors
    ///
    /// [`StoreError`].
    pub fn start(ranks: Vec<PeerOptions>, keys_max: usize) -> Result<PeerKeys, StoreError> {
        let (mut started, mut discoveries) = (Vec::new(), Vec::new());
        for mut options in ranks {
            options.nixl = Nixl::Keys;
            let discovery = options.discovery.clone();
            let (links, index) = PeerLinks::start(options, None, Some(keys_max))?;
            let links = Arc::new(links);
            if let Some(discovery) = discovery {
                discoveries.push((discovery, Arc::downgrade(&links)));
            }
            let index = index.expect("index_keys was given");
            started.push(Rank { links, index });
        }
        let session = if discoveries.is_empty() {
            None
        } else {
            Some(discovered::start(discoveries, None)?)
        };
        let (ranks, stop) = (Arc::new(started), Arc::new(AtomicBool::new(false)));
        let (mine, stopped) = (Arc::clone(&ranks), Arc::clone(&stop));
        let thread = std::thread::Builder::new().name("kv-peers".into());
        let thread = thread.spawn(move || {
            while !stopped.load(Ordering::Acquire) {
                for rank in &*mine {
                    rank.links.poll(|_| {});
                    while rank.index.tick(clock::now(), SWEEP_MAX) {}
                }
                std::thread::park_timeout(PAUSE);
            }
        });
        Ok(PeerKeys {
            ranks,
            stop,
            session: Mutex::new(session),
            thread: Mutex::new(Some(thread.map_err(StoreError::Thread)?)),
        })
    }

    /// Ranks of this engine.
    pub fn ranks(&self) -> usize {
        self.ranks.len()
    }

    /// The peers whose ranks are all connected, sorted by the number of leading keys of `keys` that
    /// all their ranks hold.
    pub fn candidates(&self, keys: &[BlockHash]) -> Vec<Candidate> {
        let mut found = Vec::new();
        let mut overlaps = Vec::new();
        for (rank, Rank { links, index }) in self.ranks.iter().enumerate() {
            overlaps.resize(index.peers(), 0);
            index.overlap(keys, &mut overlaps);
            let connected = links.connected();
            if rank == 0 {
                found.extend(connected.into_iter().map(|(name, slot)| Candidate {
                    name,
                    slots: vec![slot],
                    blocks: overlaps[slot] as usize,
                }));
                continue;
            }
            found.retain_mut(|candidate| {
                let slot = connected.iter().find(|(name, _)| *name == candidate.name);
                slot.is_some_and(|&(_, slot)| {
                    candidate.slots.push(slot);
                    candidate.blocks = candidate.blocks.min(overlaps[slot] as usize);
                    true
                })
            });
        }
        // Stable, so ties keep their order.
        found.sort_by_key(|candidate| Reverse(candidate.blocks));
        found
    }

    /// Whether that rank of a candidate holds a key.
    pub fn holds(&self, candidate: &Candidate, rank: usize, key: BlockHash) -> bool {
        self.ranks[rank].index.holds(candidate.slots[rank], key)
    }

    /// Whether the keys of each reachable peer are known.
    pub fn is_settled(&self) -> bool {
        let mut ranks = self.ranks.iter();
        ranks.all(|rank| rank.links.is_settled() && !rank.index.awaits_snapshot())
    }

    /// The links of each rank.
    pub fn links(&self) -> impl Iterator<Item = &PeerLinks> {
        self.ranks.iter().map(|rank| &*rank.links)
    }

    /// Ends the thread; connections end when this is dropped.
    pub fn close(&self) {
        self.stop.store(true, Ordering::Release);
        drop(lock(&self.session).take());
        if let Some(thread) = lock(&self.thread).take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

impl Drop for PeerKeys {
    fn drop(&mut self) {
        self.close();
    }
}
