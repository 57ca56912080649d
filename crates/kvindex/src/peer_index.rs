//! Blocks of many peers, fed by their messages, for prefix look-ups that never wait.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use hashbrown::HashTable;
use slipstream_base::{BlockHash, SimTime};

use crate::key_message::{KeyError, KeyMessage, Knowledge, Order, digest};
use crate::owners::{Owners, Padded};

/// Keys whose places are looked at together before they are changed; see `block_index.rs`.
const TOUCHED: usize = 16;
/// Old keys forgotten for each key that a message brings: with two, a peer's old keys are gone
/// before as many new ones have come.
const SWEPT_PER_KEY: usize = 2;

/// Which peer holds which keys, by the keys' digests ([`digest`]).
///
/// One thread or several feed it ([`PeerIndex::apply`], [`PeerIndex::tick`]); they take a lock a
/// peer. Readers ([`PeerIndex::overlap`]) take none and never wait: a peer of which not all is
/// known counts as holding nothing. No call costs more than its arguments ask for, so that a
/// resync is spread over the messages that bring it.
///
/// A digest stands for a key but is not the key: a hit says where a block is worth asking for.
/// Who serves it compares whole keys.
pub struct PeerIndex {
    owners: Owners,
    peers: Box<[Padded<Mutex<Peer>>]>,
    /// One bit a peer: all of its keys are known.
    known: Box<[AtomicU64]>,
    /// One bit a peer: it is connected, and will say more.
    connected: Box<[AtomicU64]>,
    /// Keys of a peer for which there is room from its connection on: a table that grows in the
    /// middle of a resync takes longer for that step than for all its keys.
    keys_each: usize,
    /// A peer that is silent for longer is forgotten, ns.
    silence_ns_max: u64,
    dropped: AtomicU64,
}

/// What the feeding threads know of a peer.
#[derive(Default)]
struct Peer {
    order: Order,
    heard: SimTime,
    connected: bool,
    /// Digests entered in the table, each with the count of snapshots when it was last said.
    held: Held,
}

/// What came of a message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// Keys that the peer holds and was not known to.
    pub added: u32,
    /// Keys that it held and does no longer.
    pub removed: u32,
    /// Keys that found no room; they count as not held.
    pub dropped: u32,
}

impl PeerIndex {
    /// An index of up to `peers` peers that hold at most `keys_total` keys between them, each
    /// forgotten after `silence_ns_max` without a word. Memory: 32 bytes a key up to 64 peers, and
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

    /// Number of peers there may be.
    pub fn peers(&self) -> usize {
        self.peers.len()
    }

    /// A connection to `peer` stands. What it holds is not known until its snapshot has come.
    ///
    /// # Panics
    /// If `peer` is not below [`PeerIndex::peers`]; so do all calls that name a peer.
    pub fn connect(&self, now: SimTime, peer: usize) {
        let mut state = self.peer(peer);
        state.heard = now;
        state.connected = true;
        state.held.reserve(self.keys_each);
        self.distrust(peer, &mut state);
        set_bit(&self.connected, peer, true);
    }

    /// `peer` is gone, and holds nothing from now on. Its place may be given to another once
    /// [`PeerIndex::tick`] has nothing left to do.
    pub fn forget(&self, peer: usize) {
        let mut state = self.peer(peer);
        self.lose(peer, &mut state);
        // A new peer in this place begins with a count of its own.
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

    /// `peer` said something that was no message about keys, at `now`.
    pub fn heard(&self, now: SimTime, peer: usize) {
        self.peer(peer).heard = now;
    }

    /// Takes a message of `peer` that came at `now`.
    ///
    /// # Errors
    ///
    /// Unless the error is [`KeyError::Stale`], the peer counts as holding nothing until its next
    /// snapshot; ask it for one.
    pub fn apply(&self, now: SimTime, peer: usize, message: &[u8]) -> Result<Taken, KeyError> {
        let mut state = self.peer(peer);
        state.heard = now;
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
            state.connected = true; // it was silent, and is back
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

    /// Calls `f` with the digest of each key, whose places in the table are under way by then.
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

    /// Forgets peers that were silent too long, and up to about `keys_max` keys of those that are
    /// forgotten or start over. To be called now and then. Returns whether work is left.
    pub fn tick(&self, now: SimTime, keys_max: usize) -> bool {
        let mut left = false;
        for peer in 0..self.peers.len() {
            let mut state = self.peer(peer);
            if state.connected && now.since(state.heard) > self.silence_ns_max {
                self.lose(peer, &mut state);
            }
            self.sweep(peer, &mut state, keys_max);
            left |= state.held.unswept > 0;
        }
        left
    }

    /// Looks at up to `count` keys that were said before the last snapshot began, and takes those
    /// from the table that it did not repeat. What is known is believed when none is left.
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
        state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// For each peer, how many leading keys it holds without a break. Shape of `out`: `[peers]`.
    /// Exact, but for keys that share a digest, and for a peer whose snapshot begins meanwhile, of
    /// which less may be seen.
    ///
    /// # Panics
    /// If `out` is not as long as there are peers.
    pub fn overlap(&self, keys: &[BlockHash], out: &mut [u32]) {
        self.owners
            .overlap(keys, out, |word| self.known[word].load(Ordering::Acquire));
    }

    /// Whether `peer` holds the key, as far as is known; as exact as [`PeerIndex::overlap`].
    pub fn holds(&self, peer: usize, key: BlockHash) -> bool {
        bit(&self.known, peer) && self.owners.holds(peer, key)
    }

    /// Whether all that `peer` holds is known.
    pub fn is_known(&self, peer: usize) -> bool {
        bit(&self.known, peer)
    }

    /// Whether some connected peer's keys are not known yet: a look-up may find more a little
    /// later.
    pub fn awaits_snapshot(&self) -> bool {
        self.known
            .iter()
            .zip(&self.connected)
            .any(|(known, connected)| {
                connected.load(Ordering::Acquire) & !known.load(Ordering::Acquire) != 0
            })
    }

    /// Keys that found no room since the start.
    pub fn dropped_total(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

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
        return; // nearly always, and the line stays with its readers
    }
    let (word, bit) = (&words[at / 64], 1 << (at % 64));
    if value {
        word.fetch_or(bit, Ordering::Release);
    } else {
        word.fetch_and(!bit, Ordering::Release);
    }
}

/// The digests that a peer said, so that they can be taken back a few at a time.
#[derive(Default)]
struct Held {
    index: HashTable<u32>,
    entries: Vec<(BlockHash, u32)>,
    /// Snapshots begun.
    round: u32,
    /// Entries below this one may be of an earlier round; those above are not.
    unswept: usize,
}

impl Held {
    /// Makes room for `keys` in all.
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

    /// Whether the digest is new, so that the table has to be told.
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
            let from = self.entries.len() as u32;
            let place = self.index.find_mut(moved.0, |&other| other == from);
            *place.expect("an entry is indexed") = at as u32;
        }
        self.unswept = self.unswept.min(self.entries.len());
    }

    /// Looks at one entry that may be old; returns the digest if it was, and is gone.
    fn sweep_one(&mut self) -> Option<BlockHash> {
        let at = self.unswept.checked_sub(1)?;
        let (digest, round) = self.entries[at];
        let old = round != self.round;
        if old {
            self.remove_at(at); // moves an entry here that is not old
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

    /// A set that holds `0..n`, followed.
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
        // A hole in the middle is seen: no look-up is skipped.
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
        while set.message(64).is_some() {} // lost on their way
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
            // One that was not repeated yet goes, and the old one hears of it, too.
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
                "nobody waits for a peer that is gone"
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
        // The lost one comes late.
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
