//! The set of keys in the tiers, and the messages that publish its changes.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use slipstream_base::width::to_u32;
use slipstream_kvindex::{Change, KeySet};

use crate::clock;
use crate::tier::{Tier, TierChange};

/// Maximum number of untaken messages; beyond it the follower gets a snapshot instead.
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
    pub(super) fn write_messages(&mut self, keys_max: usize, resend: bool) {
        if resend {
            self.messages.clear();
            self.keys.request_snapshot();
        }
        while self.messages.len() < MESSAGES_MAX
            && let Some(message) = self.keys.message(keys_max)
        {
            self.messages.push_back(message);
        }
        if self.messages.len() == MESSAGES_MAX {
            // The follower is too far behind, so it starts over.
            self.messages.clear();
            self.keys.request_snapshot();
        }
        let Some(tiers) = &mut self.tiers else { return };
        if resend || self.tier_messages.len() >= MESSAGES_MAX {
            self.tier_messages.clear();
            tiers.iter_mut().for_each(KeySet::request_snapshot);
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
