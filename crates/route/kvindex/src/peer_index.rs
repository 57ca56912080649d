//! Index of the blocks of many peers, fed by their messages, for prefix look-ups that never wait.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use hashbrown::HashTable;
use slipstream_base::sync::lock;
use slipstream_base::width::to_u32;
use slipstream_base::{BlockHash, SimTime};

use crate::key_message::{KeyError, KeyMessage, Knowledge, Order, digest};
use crate::owners::{Owners, Padded};

/// Keys whose table entries are prefetched together before they are changed; see `block_index.rs`.
const TOUCHED: usize = 16;
/// Old keys removed for each key that a message brings. With two, a peer's old keys are removed
/// before as many new ones have arrived.
const SWEPT_PER_KEY: usize = 2;

/// The keys of each peer, as digests ([`digest`]).
///
/// One or more threads feed it ([`PeerIndex::apply`], [`PeerIndex::tick`]), under one lock per
/// peer. Readers ([`PeerIndex::overlap`]) take no lock and never wait. A peer whose keys are not all
/// known counts as holding nothing. The cost of a call is bounded by its arguments, so a
/// resync is spread over the messages that bring it.
///
/// A digest stands for a key but is not the key: a hit names a peer to request the block from. The peer
/// compares whole keys.
pub struct PeerIndex {
    owners: Owners,
    peers: Box<[Padded<Mutex<Peer>>]>,
    /// One bit per peer: all of its keys are known.
    known: Box<[AtomicU64]>,
    /// One bit per peer: it is connected.
    connected: Box<[AtomicU64]>,
    /// Keys per peer to allocate at connection. A table that grew in the middle of a resync would take
    /// longer for that step than for all its keys.
    keys_each: usize,
    /// A peer that is silent for longer is dropped, ns.
    silence_ns_max: u64,
    dropped: AtomicU64,
}

/// State of a peer, used by the feeding threads.
#[derive(Default)]
struct Peer {
    order: Order,
    last_message: SimTime,
    connected: bool,
    /// Digests entered in the table, each with the snapshot count at its last publication.
    held: Held,
}

/// The result of applying a message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// Keys that the peer newly holds.
    pub added: u32,
    /// Keys that the peer no longer holds.
    pub removed: u32,
    /// Keys that found no room; they count as not held.
    pub dropped: u32,
}

impl PeerIndex {
    /// An index of up to `peers` peers that hold at most `keys_total` keys in total. A peer is dropped
    /// after `silence_ns_max` without a message. Memory: 32 bytes per key up to 64 peers, and
    /// 30 for each key that connected peers may hold.
    pub fn new(peers: usize, keys_total: usize, silence_ns_max: u64) -> PeerIndex {
        let owners = Owners::exact(peers, keys_total);
        let bits = || (0..owners.words()).map(|_| AtomicU64::new(0)).collect();
        PeerIndex {
            peers: (0..peers).map(|_| Padded::default()).collect(),
            known: bits(),
            connected: bits(),
            keys_each: keys_total.div_ceil(peers.max(1)),
            silence_ns_max,
            dropped: AtomicU64::new(0),
            owners,
        }
    }

    /// Maximum number of peers.
    pub fn peers(&self) -> usize {
        self.peers.len()
    }

    /// Records a connection to `peer`. Its keys are unknown until its snapshot is complete.
    ///
    /// # Panics
    /// If `peer` is not below [`PeerIndex::peers`]; the same holds for all calls that name a peer.
    pub fn connect(&self, now: SimTime, peer: usize) {
        let mut state = self.peer(peer);
        state.last_message = now;
        state.connected = true;
        state.held.reserve(self.keys_each);
        self.distrust(peer, &mut state);
        set_bit(&self.connected, peer, true);
    }

    /// Drops `peer`, which counts as holding nothing from now on. Its index may be reused once
    /// [`PeerIndex::tick`] has nothing left to do.
    pub fn forget(&self, peer: usize) {
        let mut state = self.peer(peer);
        self.lose(peer, &mut state);
        // A new peer at this index starts its own sequence.
        state.order = Order::default();
    }

    fn lose(&self, peer: usize, state: &mut Peer) {
        state.connected = false;
        set_bit(&self.connected, peer, false);
        self.distrust(peer, state);
    }

    fn distrust(&self, peer: usize, state: &mut Peer) {
        set_bit(&self.known, peer, false);
        state.order.distrust();
        state.held.start_over();
    }

    /// Records that a message without keys arrived from `peer` at `now`.
    pub fn on_message(&self, now: SimTime, peer: usize) {
        self.peer(peer).last_message = now;
    }

    /// Applies a message that arrived from `peer` at `now`.
    ///
    /// # Errors
    ///
    /// After any error except [`KeyError::Stale`], the peer counts as holding nothing until its next
    /// snapshot; request one.
    pub fn apply(&self, now: SimTime, peer: usize, message: &[u8]) -> Result<Taken, KeyError> {
        let mut state = self.peer(peer);
        state.last_message = now;
        let taken = KeyMessage::read(message)
            .and_then(|message| Ok((message, state.order.take(&message)?)));
        let (message, begins) = match taken {
            Ok(taken) => taken,
            Err(error) => {
                if error.loses_trust() {
                    self.distrust(peer, &mut state);
                }
                return Err(error);
            }
        };
        if begins {
            set_bit(&self.known, peer, false);
            state.held.start_over();
        }
        if !state.connected {
            state.connected = true; // it was silent, and is active again
            set_bit(&self.connected, peer, true);
        }
        let mut taken = Taken::default();
        self.each(message.added(), |digest| {
            if state.held.add(digest) {
                taken.added += 1;
                taken.dropped += u32::from(self.owners.insert(digest, peer).is_err());
            }
        });
        self.each(message.removed(), |digest| {
            if state.held.remove(digest) {
                taken.removed += 1;
                self.owners.remove(digest, peer);
            }
        });
        if taken.dropped > 0 {
            let dropped = u64::from(taken.dropped);
            self.dropped.fetch_add(dropped, Ordering::Relaxed);
        }
        self.sweep(
            peer,
            &mut state,
            SWEPT_PER_KEY * message.added().len().max(TOUCHED),
        );
        Ok(taken)
    }

    /// Calls `f` with the digest of each key, after a prefetch of its table entry.
    fn each<'a>(
        &self,
        keys: impl ExactSizeIterator<Item = &'a [u8]>,
        mut f: impl FnMut(BlockHash),
    ) {
        let mut digests = [BlockHash(0); TOUCHED];
        let mut keys = keys.map(digest);
        while keys.len() > 0 {
            let count = keys.len().min(TOUCHED);
            digests[..count].fill_with(|| keys.next().expect("as many as counted"));
            self.owners.touch(digests[..count].iter().copied());
            digests[..count].iter().copied().for_each(&mut f);
        }
    }

    /// Drops peers that were silent for too long, and removes up to about `keys_max` keys of each peer that
    /// was dropped or restarted its snapshot. Call it periodically. Returns whether work is left.
    pub fn tick(&self, now: SimTime, keys_max: usize) -> bool {
        let mut left = false;
        for peer in 0..self.peers.len() {
            let mut state = self.peer(peer);
            if state.connected && now.since(state.last_message) > self.silence_ns_max {
                self.lose(peer, &mut state);
            }
            self.sweep(peer, &mut state, keys_max);
            left |= state.held.unswept > 0;
        }
        left
    }

    /// Visits up to `count` keys published before the last snapshot began, and removes those that it did
    /// not repeat from the table. The peer's keys count as known when none is left.
    fn sweep(&self, peer: usize, state: &mut Peer, count: usize) {
        for _ in 0..count.min(state.held.unswept) {
            if let Some(digest) = state.held.sweep_one() {
                self.owners.remove(digest, peer);
            }
        }
        let known = state.held.unswept == 0 && state.order.knowledge() == Knowledge::All;
        set_bit(&self.known, peer, known);
    }

    fn peer(&self, peer: usize) -> MutexGuard<'_, Peer> {
        let state = &self.peers[peer].0;
        lock(state)
    }

    /// For each peer, the number of leading keys that it holds without a break. Shape of `out`: `[peers]`.
    /// Exact, except for keys that share a digest. For a peer whose snapshot begins during the call, the
    /// result may be too small.
    ///
    /// # Panics
    /// If the length of `out` is not the number of peers.
    pub fn overlap(&self, keys: &[BlockHash], out: &mut [u32]) {
        self.owners
            .overlap(keys, out, |word| self.known[word].load(Ordering::Acquire));
    }

    /// Whether `peer` is known to hold the key; as exact as [`PeerIndex::overlap`].
    pub fn holds(&self, peer: usize, key: BlockHash) -> bool {
        bit(&self.known, peer) && self.owners.holds(peer, key)
    }

    /// Whether all keys of `peer` are known.
    pub fn is_known(&self, peer: usize) -> bool {
        bit(&self.known, peer)
    }

    /// Whether the keys of some connected peer are not all known yet: a later look-up may find more.
    pub fn awaits_snapshot(&self) -> bool {
        self.known
            .iter()
            .zip(&self.connected)
            .any(|(known, connected)| {
                connected.load(Ordering::Acquire) & !known.load(Ordering::Acquire) != 0
            })
    }

    /// Keys that found no room since the index was created.
    pub fn dropped_total(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }
    /// Size of the table, bytes.
    /// Memory of the table, bytes.
    pub fn bytes(&self) -> usize {
        self.owners.bytes()
    }
}

fn bit(words: &[AtomicU64], at: usize) -> bool {
    words[at / 64].load(Ordering::Acquire) >> (at % 64) & 1 == 1
}

fn set_bit(words: &[AtomicU64], at: usize, value: bool) {
    if bit(words, at) == value {
        return; // the usual case; without a write, the line stays in its readers' caches
    }
    let (word, bit) = (&words[at / 64], 1 << (at % 64));
    if value {
        word.fetch_or(bit, Ordering::Release);
    } else {
        word.fetch_and(!bit, Ordering::Release);
    }
}

/// The digests that a peer published, so that they can be removed a few at a time.
#[derive(Default)]
struct Held {
    index: HashTable<u32>,
    entries: Vec<(BlockHash, u32)>,
    /// Snapshots begun.
    round: u32,
    /// Entries below this index may be of an earlier round; later entries are not.
    unswept: usize,
}

impl Held {
    /// Reserves room for `keys` keys in total.
    fn reserve(&mut self, keys: usize) {
        let more = keys.saturating_sub(self.entries.len());
        self.entries.reserve(more);
        let entries = &self.entries;
        self.index.reserve(more, |&at| entries[at as usize].0.0);
    }

    fn start_over(&mut self) {
        self.round = self.round.checked_add(1).expect("2^32 snapshots");
        self.unswept = self.entries.len();
    }

    /// Whether the digest is new, so that the table has to be updated.
    fn add(&mut self, digest: BlockHash) -> bool {
        let Held {
            index,
            entries,
            round,
            ..
        } = self;
        let entry = index.entry(
            digest.0,
            |&at| entries[at as usize].0 == digest,
            |&at| entries[at as usize].0.0,
        );
        match entry {
            hashbrown::hash_table::Entry::Occupied(entry) => {
                entries[*entry.get() as usize].1 = *round;
                false
            }
            hashbrown::hash_table::Entry::Vacant(entry) => {
                entry.insert(u32::try_from(entries.len()).expect("below 2^32 keys"));
                entries.push((digest, *round));
                true
            }
        }
    }

    fn remove(&mut self, digest: BlockHash) -> bool {
        let found = self
            .index
            .find(digest.0, |&at| self.entries[at as usize].0 == digest);
        let Some(&at) = found else { return false };
        self.remove_at(at as usize);
        true
    }

    fn remove_at(&mut self, at: usize) {
        let (digest, _) = self.entries.swap_remove(at);
        let gone = self
            .index
            .find_entry(digest.0, |&other| other as usize == at);
        gone.expect("an entry is indexed").remove();
        if let Some(&(moved, _)) = self.entries.get(at) {
            let from = to_u32(self.entries.len());
            let place = self.index.find_mut(moved.0, |&other| other == from);
            *place.expect("an entry is indexed") = to_u32(at);
        }
        self.unswept = self.unswept.min(self.entries.len());
    }

    /// Checks one entry that may be old; returns its digest if it was old and was removed.
    fn sweep_one(&mut self) -> Option<BlockHash> {
        let at = self.unswept.checked_sub(1)?;
        let (digest, round) = self.entries[at];
        let old = round != self.round;
        if old {
            self.remove_at(at); // the entry moved here is not old
        }
        self.unswept = at;
        old.then_some(digest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Change, KeySet};

    fn key(n: u64) -> [u8; 36] {
        let mut key = [0; 36];
        key[..8].copy_from_slice(&slipstream_base::mix::draw(1, n).to_le_bytes());
        key
    }

    fn prompt(n: u64) -> Vec<BlockHash> {
        (0..n).map(|n| digest(&key(n))).collect()
    }

    fn overlap(index: &PeerIndex, n: u64) -> Vec<u32> {
        let mut out = vec![u32::MAX; index.peers()];
        index.overlap(&prompt(n), &mut out);
        out
    }

    /// A set that holds `0..n`, with a consumer.
    fn set(n: u64, stream: u64) -> KeySet {
        let mut set = KeySet::new(0, stream);
        set.set_consumed(true);
        for n in 0..n {
            set.change(&key(n), Change::Add(0)).unwrap();
        }
        set
    }

    #[test]
    fn a_peer_counts_once_all_its_snapshot_has_come() {
        let index = PeerIndex::new(2, 1_000, 100);
        assert!(!index.awaits_snapshot());
        index.connect(SimTime(0), 1);
        assert!(index.awaits_snapshot() && !index.is_known(1));
        let mut set = set(100, 1);
        let mut messages = 0;
        while let Some(message) = set.message(8) {
            assert_eq!(overlap(&index, 100), [0, 0]);
            assert!(!index.holds(1, digest(&key(0))), "not all is known");
            index.apply(SimTime(1), 1, &message).unwrap();
            messages += 1;
        }
        assert!(messages > 5);
        assert_eq!(overlap(&index, 120), [0, 100]);
        assert!(index.is_known(1) && !index.awaits_snapshot());
        // A missing key in the middle is seen: no look-up is skipped.
        set.change(&key(37), Change::Remove(0)).unwrap();
        index
            .apply(SimTime(1), 1, &set.message(8).unwrap())
            .unwrap();
        assert_eq!(overlap(&index, 120), [0, 37]);
        let holds = |peer, n| index.holds(peer, digest(&key(n)));
        assert!(holds(1, 36) && !holds(1, 37) && holds(1, 38) && !holds(0, 36));
    }

    #[test]
    fn what_a_later_snapshot_does_not_repeat_is_gone() {
        let index = PeerIndex::new(1, 1_000, 100);
        index.connect(SimTime(0), 0);
        let mut set = set(300, 1);
        while let Some(message) = set.message(64) {
            index.apply(SimTime(0), 0, &message).unwrap();
        }
        assert_eq!(overlap(&index, 300), [300]);
        for n in 50..300 {
            set.change(&key(n), Change::Remove(0)).unwrap();
        }
        while set.message(64).is_some() {} // lost in transit
        set.request_snapshot();
        let first = set.message(10).unwrap();
        index.apply(SimTime(0), 0, &first).unwrap();
        assert_eq!(overlap(&index, 300), [0], "half a snapshot is not believed");
        while let Some(message) = set.message(10) {
            index.apply(SimTime(0), 0, &message).unwrap();
        }
        while index.tick(SimTime(0), 16) {}
        assert_eq!(overlap(&index, 300), [50]);
        let stale = index.apply(SimTime(0), 0, &first).unwrap_err();
        assert!(matches!(stale, KeyError::Stale { .. }));
        assert_eq!(
            overlap(&index, 300),
            [50],
            "a stale snapshot changes nothing"
        );
    }

    #[test]
    fn a_snapshot_for_another_hides_nothing_from_who_knows_all() {
        let old = PeerIndex::new(1, 1_000, 100);
        old.connect(SimTime(0), 0);
        let mut set = set(100, 1);
        while let Some(message) = set.message(64) {
            old.apply(SimTime(0), 0, &message).unwrap();
        }
        let new = PeerIndex::new(1, 1_000, 100);
        new.connect(SimTime(0), 0);
        set.request_snapshot();
        let mut held = 100;
        while let Some(message) = set.message(8) {
            for index in [&old, &new] {
                index.apply(SimTime(0), 0, &message).unwrap();
            }
            assert_eq!(overlap(&old, 200), [held]);
            // A key that the snapshot has not repeated yet is removed; the old follower sees that, too.
            if held > 90 {
                held -= 1;
                set.change(&key(u64::from(held)), Change::Remove(0))
                    .unwrap();
                let message = set.message(1).unwrap();
                for index in [&old, &new] {
                    index.apply(SimTime(0), 0, &message).unwrap();
                }
                assert_eq!(overlap(&old, 200), [held]);
            }
        }
        while new.tick(SimTime(0), 16) {}
        assert_eq!(
            (overlap(&old, 200), overlap(&new, 200)),
            (vec![90], vec![90])
        );
    }

    #[test]
    fn silent_and_lost_peers_hold_nothing_and_leave_no_key_behind() {
        let index = PeerIndex::new(1, 100, 50);
        for stream in 1..20 {
            index.connect(SimTime(0), 0);
            let mut set = set(100, stream);
            index
                .apply(SimTime(10), 0, &set.message(100).unwrap())
                .unwrap();
            while index.tick(SimTime(60), 16) {}
            assert_eq!(overlap(&index, 100), [100]);
            if stream % 2 == 0 {
                index.forget(0);
            } else {
                index.tick(SimTime(61), 0);
            }
            assert_eq!(overlap(&index, 100), [0]);
            assert!(
                !index.awaits_snapshot(),
                "no snapshot is due from a peer that is gone"
            );
            if stream % 3 == 0 {
                while index.tick(SimTime(61), 7) {}
            }
        }
        assert_eq!(index.dropped_total(), 0);
        while index.tick(SimTime(61), 7) {}
        assert_eq!(index.peer(0).held.entries.len(), 0);
    }

    #[test]
    fn a_gap_is_mended_by_a_snapshot_and_another_length_is_refused() {
        let index = PeerIndex::new(1, 1_000, 100);
        let mut set = set(10, 1);
        let now = SimTime(0);
        index.connect(now, 0);
        index.apply(now, 0, &set.message(100).unwrap()).unwrap();
        set.change(&key(10), Change::Add(0)).unwrap();
        let lost = set.message(100).unwrap();
        set.change(&key(11), Change::Add(0)).unwrap();
        let error = index.apply(now, 0, &set.message(100).unwrap()).unwrap_err();
        assert_eq!(error, KeyError::Gap { want: 2, got: 3 });
        assert_eq!(overlap(&index, 20), [0]);
        assert!(index.awaits_snapshot());
        // The lost message arrives late.
        assert!(index.apply(now, 0, &lost).is_err());
        set.request_snapshot();
        index.apply(now, 0, &set.message(100).unwrap()).unwrap();
        while index.tick(now, 100) {}
        assert_eq!(overlap(&index, 20), [12]);
        let mut short = KeySet::new(0, 1);
        short.set_consumed(true);
        short.change(b"short", Change::Add(0)).unwrap();
        let mut message = short.message(8);
        for _ in 0..4 {
            short.change(b"other", Change::Add(0)).unwrap();
            message = short.message(8).or(message);
            short.change(b"other", Change::Remove(0)).unwrap();
            message = short.message(8).or(message);
        }
        let mut next = message.unwrap();
        next[24..32].copy_from_slice(&5u64.to_le_bytes());
        let error = index.apply(now, 0, &next).unwrap_err();
        assert!(matches!(error, KeyError::Checksum { .. }), "{error}");
        assert_eq!(overlap(&index, 20), [0]);
    }
}
