//! The set of keys in the tiers, and the messages that publish its changes.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use slipstream_base::width::to_u32;
use slipstream_kvindex::{Change, KeySet};

use crate::clock;
use crate::tier::{Tier, TierChange};

/// Maximum number of untaken messages. The next ones are written once the follower has taken some.
const MESSAGES_MAX: usize = 1_024;

/// The keys of all tiers, and messages not taken yet. A tier is a holder of keys, by its index.
pub(super) struct KeyLedger {
    /// The keys, for the follower that takes messages.
    keys: KeySet,
    /// The same keys, for peers.
    pub(super) served: KeySet,
    /// Keys by tier, if they are published.
    tiers: Option<Vec<KeySet>>,
    changes: Vec<TierChange>,
    pub(super) messages: VecDeque<Vec<u8>>,
    /// The tier's index, and a message about its keys.
    pub(super) tier_messages: VecDeque<(usize, Vec<u8>)>,
    /// Changes of keys that no message can represent. Read without the ledger's lock.
    unpublished: Arc<AtomicU64>,
}

impl KeyLedger {
    /// `blocks` is the capacity of the first tier.
    pub(super) fn new(
        blocks: usize,
        tiers: usize,
        by_tier: bool,
        unpublished: Arc<AtomicU64>,
    ) -> KeyLedger {
        let followed = |blocks: usize| {
            let mut keys = KeySet::new(blocks, clock::unix_ns());
            keys.set_consumed(true);
            keys
        };
        let of_tier = |tier: usize| followed(if tier == 0 { blocks } else { 0 });
        KeyLedger {
            keys: followed(blocks),
            served: KeySet::new(blocks, clock::unix_ns()),
            tiers: by_tier.then(|| (0..tiers).map(of_tier).collect()),
            changes: Vec::new(),
            messages: VecDeque::new(),
            tier_messages: VecDeque::new(),
            unpublished,
        }
    }

    /// Applies the changes of a tier.
    pub(super) fn update(&mut self, index: usize, tier: &dyn Tier) {
        let mut changes = std::mem::take(&mut self.changes);
        if !tier.take_changes(&mut changes) {
            // Some changes are lost: compare the current keys with the published ones.
            changes.clear();
            self.clear_tier(index);
            changes.extend(tier.keys().into_iter().map(TierChange::Stored));
        }
        for change in changes.drain(..) {
            self.apply(index, &change);
        }
        self.changes = changes;
    }

    /// Removes all keys that were published for a tier.
    pub(super) fn clear_tier(&mut self, index: usize) {
        let holder = to_u32(index);
        for keys in [&mut self.keys, &mut self.served] {
            let held: Vec<Box<[u8]>> = keys.iter().map(Into::into).collect();
            let _ = keys.apply(held.iter().map(|key| (&key[..], Change::Remove(holder))));
        }
        if let Some(tiers) = &mut self.tiers {
            tiers[index].clear();
        }
    }

    fn apply(&mut self, index: usize, change: &TierChange) {
        let holder = to_u32(index);
        let (key, change) = match change {
            TierChange::Stored(key) => (key, Change::Add(holder)),
            TierChange::Removed(key) => (key, Change::Remove(holder)),
        };
        if let Err(error) = self.keys.change(key, change) {
            // A disk may hold keys of another length, from another hash function.
            if self.unpublished.fetch_add(1, Ordering::Relaxed) == 0 {
                tracing::warn!(
                    "a stored block is not published: {error}; or give this engine its own \
                     disk_dir"
                );
            }
            return;
        }
        let _ = self.served.change(key, change);
        if let Some(tiers) = &mut self.tiers {
            let _ = tiers[index].change(key, change);
        }
    }

    /// Writes messages of at most `keys_max` keys about changes or, with `resend`, about all keys.
    ///
    /// A snapshot of any size passes through the queue in parts. Changes that wait for room are bounded too: beyond as
    /// many as the queue holds, the follower gets a snapshot instead.
    pub(super) fn write_messages(&mut self, keys_max: usize, resend: bool) {
        let waiting_max = MESSAGES_MAX * keys_max.max(1);
        if resend || self.keys.unpublished() > waiting_max {
            self.messages.clear();
            start_over(&mut self.keys, keys_max);
        }
        while self.messages.len() < MESSAGES_MAX
            && let Some(message) = self.keys.message(keys_max)
        {
            self.messages.push_back(message);
        }
        let Some(tiers) = &mut self.tiers else { return };
        if resend || tiers.iter().any(|keys| keys.unpublished() > waiting_max) {
            self.tier_messages.clear();
            for keys in &mut *tiers {
                start_over(keys, keys_max);
            }
        }
        for (tier, keys) in tiers.iter_mut().enumerate() {
            while self.tier_messages.len() < MESSAGES_MAX
                && let Some(message) = keys.message(keys_max)
            {
                self.tier_messages.push_back((tier, message));
            }
        }
    }
}

/// Discards the waiting changes and starts a snapshot, which repeats what still holds of them.
fn start_over(keys: &mut KeySet, keys_max: usize) {
    while keys.unpublished() > 0 {
        let _ = keys.message(keys_max);
    }
    keys.request_snapshot();
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;
    use slipstream_kvindex::KeyMirror;

    use super::*;

    fn key(n: u64) -> Box<[u8]> {
        n.to_le_bytes().into()
    }

    fn ledger() -> KeyLedger {
        KeyLedger::new(16, 2, true, Arc::default())
    }

    fn change(ledger: &mut KeyLedger, keys: &mut BTreeSet<u64>, n: u64, add: bool) {
        if add && keys.insert(n) {
            ledger.apply(0, &TierChange::Stored(key(n)));
        } else if !add && keys.remove(&n) {
            ledger.apply(0, &TierChange::Removed(key(n)));
        }
    }

    /// Takes up to `count` messages of both queues.
    fn take(ledger: &mut KeyLedger, mirrors: &mut [KeyMirror; 2], count: usize) {
        assert!(ledger.messages.len() <= MESSAGES_MAX);
        assert!(ledger.tier_messages.len() <= MESSAGES_MAX);
        for _ in 0..count {
            if let Some(message) = ledger.messages.pop_front() {
                let _ = mirrors[0].apply(&message);
            }
            if let Some((0, message)) = ledger.tier_messages.pop_front() {
                let _ = mirrors[1].apply(&message);
            }
        }
    }

    fn assert_equal(mirrors: &[KeyMirror; 2], keys: &BTreeSet<u64>) {
        for (at, mirror) in mirrors.iter().enumerate() {
            assert_eq!(
                mirror.keys().len(),
                keys.len(),
                "mirror {at}: {:?}",
                mirror.knowledge()
            );
            assert!(keys.iter().all(|n| mirror.keys().contains(&key(*n))));
        }
    }

    /// Three times as many keys as the queue holds, at a message per step, while keys change.
    #[test]
    fn a_snapshot_larger_than_the_queue_ends() {
        let (mut ledger, mut keys) = (ledger(), BTreeSet::new());
        let mut mirrors = [KeyMirror::default(), KeyMirror::default()];
        let count = 3 * 4 * MESSAGES_MAX as u64;
        for n in 0..count {
            change(&mut ledger, &mut keys, n, true);
        }
        ledger.write_messages(4, true);
        let steps = 4 * MESSAGES_MAX as u64;
        for step in 0..steps {
            change(&mut ledger, &mut keys, step * 7 % count, false);
            change(&mut ledger, &mut keys, count + step, true);
            take(&mut ledger, &mut mirrors, 1);
            ledger.write_messages(4, false);
        }
        take(&mut ledger, &mut mirrors, MESSAGES_MAX);
        assert_equal(&mirrors, &keys);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases / 16, ..ProptestConfig::default() })]

        /// A follower that stops for any time, and takes messages at any pace, has the keys in the end, and bounded memory
        /// is kept for it.
        #[test]
        fn a_follower_of_any_pace_has_the_keys_in_the_end(
            rounds in prop::collection::vec((0..2_000u64, 0..4_000u64, 0..64usize, any::<bool>()), 1..8),
            keys_max in 1..4usize,
        ) {
            let (mut ledger, mut keys) = (ledger(), BTreeSet::new());
            let mut mirrors = [KeyMirror::default(), KeyMirror::default()];
            for (n, (count, from, taken, resend)) in (0u64..).zip(rounds) {
                for at in 0..count {
                    change(&mut ledger, &mut keys, from + at, !(at + n).is_multiple_of(3));
                }
                ledger.write_messages(keys_max, resend && n % 4 == 3);
                take(&mut ledger, &mut mirrors, taken);
                let waiting = ledger.keys.unpublished();
                prop_assert!(waiting <= MESSAGES_MAX * keys_max + 2_000, "{waiting} changes");
            }
            for _ in 0..64 {
                ledger.write_messages(keys_max, false);
                take(&mut ledger, &mut mirrors, MESSAGES_MAX);
            }
            prop_assert!(ledger.messages.is_empty());
            assert_equal(&mirrors, &keys);
        }
    }
}
