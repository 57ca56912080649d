//! The exact index: owners by block hash, fed by KV deltas.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use slipstream_base::sync::lock;
use slipstream_base::width::to_u32;
use slipstream_base::{BlockHash, KvDelta, KvOp};

use crate::owners::{Owners, Padded};
use crate::table::Full;

/// Operations of a delta whose table entries are prefetched together before they are changed: about as
/// many misses as a core keeps in flight (Skylake: 12 line fill buffers), with some to spare.
const TOUCHED: usize = 16;

/// The holders of each block, shared by routers (readers) and engine threads (writers).
///
/// Readers take no lock and never wait. A look-up that runs concurrently with a change sees it or does
/// not; blocks that stay are always found.
///
/// A writer locks the shard of a hash (up to 64 shards) for one operation, and the event stream of its
/// target for a whole delta. `docs/routing.md` has the measurements behind this use of locks.
pub struct BlockIndex {
    owners: Owners,
    streams: Box<[Padded<Stream>]>,
    /// One bit per target: the index has all of its blocks.
    trusted: Box<[AtomicU64]>,
}

/// A target's deltas.
#[derive(Default)]
struct Stream {
    /// The next sequence number. Locked while a delta is applied, so that deltas of one target are
    /// applied one after the other.
    next: Mutex<u64>,
    /// Blocks held.
    held: AtomicU64,
}

/// The result of applying a delta.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// Earlier deltas are missing and no snapshot has arrived since. The target counts as holding
    /// nothing until a snapshot ([`KvOp::Cleared`], then every held block) arrives; request one from
    /// its engine.
    pub gap: bool,
    /// The delta was applied before, and is ignored.
    pub duplicate: bool,
    /// Blocks that the target newly holds.
    pub stored: u32,
    /// Blocks that the target no longer holds.
    pub removed: u32,
    /// Blocks that found no room: the targets hold more than the capacity passed to `new`. They count as
    /// not cached.
    pub dropped: u32,
}

impl BlockIndex {
    /// An empty index for `targets` owners that hold at most `capacity_blocks_total` blocks
    /// in total (the sum of their `num_gpu_blocks`). Memory is allocated on first use: up to 32 bytes per
    /// block for up to 64 targets, then 64 to 128, and about 14 for each further 64 targets beyond 512.
    pub fn new(targets: usize, capacity_blocks_total: usize) -> BlockIndex {
        let owners = Owners::new(targets, capacity_blocks_total);
        let trusted = vec![u64::MAX; owners.words()];
        BlockIndex {
            streams: (0..targets).map(|_| Padded::default()).collect(),
            trusted: trusted.into_iter().map(AtomicU64::new).collect(),
            owners,
        }
    }

    /// Promises that from now on no two threads change the index at the same time; readers may run
    /// concurrently. This saves the locks, a third of the cost of a change. If the promise is broken,
    /// blocks may be lost or found on targets that do not hold them.
    pub fn promise_single_writer(&self) {
        self.owners.promise_single_writer();
    }

    /// Number of owners.
    pub fn targets(&self) -> usize {
        self.owners.targets()
    }

    /// Size of the table, bytes.
    pub fn bytes(&self) -> usize {
        self.owners.bytes()
    }

    /// Applies the changes of one step of `target`.
    ///
    /// A delta older than expected is ignored as a duplicate. A delta newer than expected is a gap: the
    /// target is no longer trusted, and its deltas are skipped. The gap ends when a delta that begins
    /// with [`KvOp::Cleared`] (a snapshot) arrives in the same stream, or when [`BlockIndex::resync`] is
    /// called.
    ///
    /// # Panics
    /// If `target` is not below [`BlockIndex::targets`].
    pub fn apply(&self, target: usize, delta: &KvDelta) -> Applied {
        let mut next = self.stream(target);
        if delta.sequence < *next {
            return Applied {
                duplicate: true,
                ..Applied::default()
            };
        }
        let missing = delta.sequence > *next;
        *next = delta.sequence.saturating_add(1);
        if delta.ops.first() != Some(&KvOp::Cleared) && (missing || !self.is_trusted(target)) {
            self.set_trusted(target, false);
            return Applied {
                gap: true,
                ..Applied::default()
            };
        }
        let applied = self.change(target, &delta.ops);
        self.set_trusted(target, true);
        applied
    }

    /// Replaces all blocks of `target` by `snapshot`, whatever its sequence. For a requested snapshot,
    /// which takes no number of the stream: its sequence is that of the next delta.
    pub fn resync(&self, target: usize, snapshot: &KvDelta) -> Applied {
        let mut next = self.stream(target);
        *next = snapshot.sequence;
        self.set_trusted(target, false); // readers must not see half a snapshot
        let cleared = self.change(target, &[KvOp::Cleared]);
        let mut applied = self.change(target, &snapshot.ops);
        applied.removed += cleared.removed;
        self.set_trusted(target, true);
        applied
    }

    /// Removes all blocks of `target`, whose engine is gone; the next one starts at sequence 0.
    pub fn forget(&self, target: usize) {
        let mut next = self.stream(target);
        *next = 0;
        self.change(target, &[KvOp::Cleared]);
        self.set_trusted(target, true);
    }

    /// Whether the index has all blocks of `target`; `false` from a gap to the next snapshot.
    pub fn is_trusted(&self, target: usize) -> bool {
        self.trusted[target / 64].load(Ordering::Acquire) >> (target % 64) & 1 == 1
    }

    /// Blocks that `target` holds.
    pub fn held(&self, target: usize) -> u64 {
        self.streams[target].0.held.load(Ordering::Relaxed)
    }

    fn stream(&self, target: usize) -> MutexGuard<'_, u64> {
        lock(&self.streams[target].0.next)
    }

    fn set_trusted(&self, target: usize, trusted: bool) {
        if self.is_trusted(target) == trusted {
            return; // the usual case; without a write, the line stays in its readers' caches
        }
        let bit = 1 << (target % 64);
        let word = &self.trusted[target / 64];
        if trusted {
            word.fetch_or(bit, Ordering::Release);
        } else {
            word.fetch_and(!bit, Ordering::Release);
        }
    }

    /// Prefetches the table entries that `ops` will change, so that their cache misses overlap. For
    /// several small deltas that will be applied next: one by one, each would wait for its own misses.
    pub fn touch(&self, ops: &[KvOp]) {
        self.owners.touch(ops.iter().filter_map(|op| match op {
            KvOp::Stored { hash, .. } | KvOp::Removed { hash } => Some(*hash),
            KvOp::Cleared => None,
        }));
    }

    /// Applies `ops` one by one; the caller holds the stream of `target`.
    fn change(&self, target: usize, ops: &[KvOp]) -> Applied {
        let mut applied = Applied::default();
        for (at, op) in ops.iter().enumerate() {
            // The table is larger than the cache, and its lines are far apart. Locked changes wait
            // for their lines one by one; prefetching many lines lets the waits overlap.
            if at % TOUCHED == 0 {
                self.touch(&ops[at..ops.len().min(at + TOUCHED)]);
            }
            match *op {
                KvOp::Stored { hash, .. } => match self.owners.insert(hash, target) {
                    Ok(fresh) => applied.stored += u32::from(fresh),
                    Err(Full) => applied.dropped += 1,
                },
                KvOp::Removed { hash } => {
                    applied.removed += u32::from(self.owners.remove(hash, target));
                }
                // Blocks that this delta stored earlier are removed as well, and are not yet in `held`.
                KvOp::Cleared if self.held(target) == 0 && applied.stored == 0 => {}
                KvOp::Cleared => applied.removed += to_u32(self.owners.clear(target)),
            }
        }
        // The stream's lock makes this thread the only writer.
        let held = self.held(target) + u64::from(applied.stored) - u64::from(applied.removed);
        self.streams[target].0.held.store(held, Ordering::Relaxed);
        applied
    }

    /// For each target, the number of leading `blocks` that it holds without a break. Shape of `out`: `[T]`.
    ///
    /// The walk looks up one block in eight, and every block of a stretch in which some target's run
    /// ends. A target that holds both ends of a stretch is assumed to hold the blocks between them, as
    /// engines that evict a chain from its end do.
    ///
    /// # Panics
    /// If the length of `out` is not the number of targets.
    pub fn overlap(&self, blocks: &[BlockHash], out: &mut [u32]) {
        self.owners.overlap(blocks, out, |word| {
            self.trusted[word].load(Ordering::Acquire)
        });
    }

    /// The number of leading `blocks` that one target holds without a break; see [`BlockIndex::overlap`].
    pub fn overlap_of(&self, target: usize, blocks: &[BlockHash]) -> u32 {
        if self.is_trusted(target) {
            self.owners.overlap_of(target, blocks)
        } else {
            0
        }
    }

    /// Whether `target` holds `hash`. Ignores whether the target is trusted.
    pub fn holds(&self, target: usize, hash: BlockHash) -> bool {
        self.owners.overlap_of(target, &[hash]) == 1
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeSet, HashMap};

    use proptest::prelude::*;
    use slipstream_base::mix::draw;

    use super::*;

    fn hash(n: u64) -> BlockHash {
        BlockHash(draw(0, n))
    }

    fn stored(n: u64) -> KvOp {
        KvOp::Stored {
            hash: hash(n),
            parent: BlockHash(0),
        }
    }

    fn delta(sequence: u64, ops: &[KvOp]) -> KvDelta {
        KvDelta {
            sequence,
            ops: ops.into(),
            ..KvDelta::default()
        }
    }

    fn overlap(index: &BlockIndex, blocks: &[BlockHash]) -> Vec<u32> {
        let mut out = vec![u32::MAX; index.targets()];
        index.overlap(blocks, &mut out);
        for (target, &hit) in out.iter().enumerate() {
            assert_eq!(index.overlap_of(target, blocks), hit, "target {target}");
        }
        out
    }

    /// Applies `deltas` to target 0 of 2; checks the gaps, and whether block 1 is found in the end.
    fn check_stream(deltas: &[(u64, &[KvOp])], gaps: &[bool], found: bool) {
        let index = BlockIndex::new(2, 100);
        index.apply(1, &delta(0, &[stored(1)]));
        let answers: Vec<bool> = deltas
            .iter()
            .map(|&(sequence, ops)| index.apply(0, &delta(sequence, ops)).gap)
            .collect();
        assert_eq!(answers, gaps);
        assert_eq!(overlap(&index, &[hash(1)]), [u32::from(found), 1]);
        assert_eq!(index.is_trusted(0), gaps.last() != Some(&true));
    }

    #[test]
    fn a_gap_is_told_until_a_snapshot_comes() {
        let one = [stored(1)];
        let two = [stored(2)];
        let snapshot = [KvOp::Cleared, stored(1)];
        check_stream(&[(0, &one)], &[false], true);
        check_stream(&[(0, &two), (2, &one)], &[false, true], false);
        check_stream(&[(0, &one), (2, &two)], &[false, true], false);
        check_stream(
            &[(0, &one), (2, &two), (3, &two)],
            &[false, true, true],
            false,
        );
        check_stream(
            &[(0, &one), (2, &two), (3, &snapshot)],
            &[false, true, false],
            true,
        );
        // A snapshot that arrives after a gap is complete by itself.
        check_stream(&[(0, &two), (7, &snapshot)], &[false, false], true);
        check_stream(
            &[(0, &one), (2, &two), (3, &[KvOp::Cleared])],
            &[false, true, false],
            false,
        );
    }

    #[test]
    fn a_single_writer_needs_no_locks() {
        let run = |single: bool| {
            // Miri takes 1,000 times as long.
            let most = if cfg!(miri) { 60 } else { 3_000 };
            let index = BlockIndex::new(2, 4_000);
            if single {
                index.promise_single_writer();
            }
            for n in 0..most {
                index.apply((n % 2) as usize, &delta(n / 2, &[stored(n), stored(n + 1)]));
            }
            let gone: Vec<KvOp> = (0..most / 2)
                .map(|n| KvOp::Removed { hash: hash(n) })
                .collect();
            index.apply(0, &delta(most / 2, &gone));
            let held = [index.held(0), index.held(1)];
            (
                held,
                (0..=most)
                    .map(|n| index.holds(0, hash(n)))
                    .collect::<Vec<_>>(),
            )
        };
        assert_eq!(run(true), run(false));
        assert!(run(true).0[0] > 10);
    }

    #[test]
    fn duplicates_are_ignored_whole() {
        let index = BlockIndex::new(1, 100);
        index.apply(0, &delta(0, &[stored(1)]));
        index.apply(0, &delta(1, &[KvOp::Removed { hash: hash(1) }]));
        let again = index.apply(0, &delta(0, &[stored(1)]));
        assert!(again.duplicate && again.stored == 0);
        assert_eq!(overlap(&index, &[hash(1)]), [0]);
        // Delivery is at least once within a delta, too.
        let twice = index.apply(0, &delta(2, &[stored(3), stored(3)]));
        assert_eq!((twice.stored, index.held(0)), (1, 1));
        let unknown = index.apply(0, &delta(3, &[KvOp::Removed { hash: hash(9) }]));
        assert_eq!((unknown.removed, index.held(0)), (0, 1));
    }

    #[test]
    fn resync_replaces_what_was_held_and_forget_starts_over() {
        let index = BlockIndex::new(1, 100);
        index.apply(0, &delta(0, &[stored(1), stored(2)]));
        assert!(index.apply(0, &delta(5, &[stored(3)])).gap);
        index.resync(0, &delta(6, &[KvOp::Cleared, stored(2)]));
        assert_eq!((index.held(0), index.is_trusted(0)), (1, true));
        assert!(index.apply(0, &delta(5, &[stored(1)])).duplicate, "late");
        // The delta after the snapshot has the snapshot's number, and may repeat some of its blocks.
        let next = index.apply(0, &delta(6, &[stored(2), stored(3)]));
        assert!(!next.gap && !next.duplicate && next.stored == 1);
        assert_eq!(overlap(&index, &[hash(2), hash(3)]), [2]);
        index.forget(0);
        assert_eq!(overlap(&index, &[hash(2), hash(3)]), [0]);
        assert!(!index.apply(0, &delta(0, &[stored(1)])).gap);
    }

    #[test]
    fn more_blocks_than_promised_are_dropped_and_counted() {
        let index = BlockIndex::new(1, 100);
        let sent = if cfg!(miri) { 600 } else { 5_000 };
        let ops: Vec<KvOp> = (0..sent).map(stored).collect();
        let applied = index.apply(0, &delta(0, &ops));
        assert!(applied.stored >= 100 && applied.dropped > 0);
        assert_eq!(u64::from(applied.stored + applied.dropped), sent);
        assert_eq!(index.held(0), u64::from(applied.stored));
        index.apply(0, &delta(1, &[KvOp::Cleared]));
        assert_eq!(index.held(0), 0);
    }

    #[test]
    #[cfg_attr(miri, ignore = "it writes 10 MB, to no end that Miri checks")]
    fn memory_is_what_the_docs_say() {
        const BLOCKS: usize = 1 << 16;
        for (targets, bytes) in [(8, 32), (64, 32), (65, 64), (512, 128), (640, 160)] {
            let index = BlockIndex::new(targets, BLOCKS);
            // Two extra buckets per shard are below 1 %.
            let planned = bytes * BLOCKS;
            assert!(
                (planned..planned + planned / 100).contains(&index.bytes()),
                "{targets} targets: {}",
                index.bytes()
            );
        }
    }

    #[test]
    fn no_blocks_and_last_target_of_a_word() {
        for targets in [1, 63, 64, 65, 128, 129] {
            let index = BlockIndex::new(targets, 100);
            index.apply(targets - 1, &delta(0, &[stored(1)]));
            assert_eq!(overlap(&index, &[]), vec![0; targets]);
            let mut expected = vec![0; targets];
            expected[targets - 1] = 1;
            assert_eq!(overlap(&index, &[hash(1), hash(2)]), expected);
        }
    }

    #[derive(Clone, Debug)]
    enum Change {
        Stored(u64),
        Removed(u64),
        Cleared,
    }

    fn change() -> impl Strategy<Value = Change> {
        prop_oneof![
            40 => (0u64..200).prop_map(Change::Stored),
            30 => (0u64..200).prop_map(Change::Removed),
            1 => Just(Change::Cleared),
        ]
    }

    /// Deltas of a history. Miri takes seconds for each.
    const DELTAS: usize = if cfg!(miri) { 5 } else { 40 };

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 2 } else { 64 }))]

        #[test]
        fn holds_what_a_plain_map_holds(
            targets in prop::sample::select(vec![1usize, 3, 64, 65, 130]),
            deltas in prop::collection::vec((any::<prop::sample::Index>(), prop::collection::vec(change(), 1..40)), 1..DELTAS),
        ) {
            let index = BlockIndex::new(targets, 200);
            let mut naive: HashMap<u64, BTreeSet<usize>> = HashMap::new();
            let mut sequences = vec![0; targets];
            for (target, changes) in &deltas {
                let target = target.index(targets);
                let mut ops = Vec::new();
                let (mut added, mut gone) = (0, 0);
                for change in changes {
                    match *change {
                        Change::Stored(n) => {
                            added += u32::from(naive.entry(n).or_default().insert(target));
                            ops.push(stored(n));
                        }
                        Change::Removed(n) => {
                            gone += u32::from(naive.entry(n).or_default().remove(&target));
                            ops.push(KvOp::Removed { hash: hash(n) });
                        }
                        Change::Cleared => {
                            for owners in naive.values_mut() {
                                gone += u32::from(owners.remove(&target));
                            }
                            ops.push(KvOp::Cleared);
                        }
                    }
                }
                let applied = index.apply(target, &delta(sequences[target], &ops));
                sequences[target] += 1;
                prop_assert_eq!((applied.stored, applied.removed), (added, gone));
                prop_assert!(!applied.gap && applied.dropped == 0);
            }
            // Of so many look-ups, Miri has time for few.
            let step = if cfg!(miri) { 23 } else { 1 };
            for target in (0..targets).step_by(step) {
                let held: Vec<u64> = (0..200)
                    .filter(|n| naive.get(n).is_some_and(|owners| owners.contains(&target)))
                    .collect();
                prop_assert_eq!(index.held(target), held.len() as u64);
                for n in (0..200).step_by(step) {
                    prop_assert_eq!(index.holds(target, hash(n)), held.contains(&n));
                }
            }
        }

        /// Targets hold chains from their beginning, as engines do; then the strided walk is exact.
        #[test]
        fn overlap_is_the_longest_prefix(
            targets in prop::sample::select(vec![1usize, 5, 64, 70]),
            held in prop::collection::vec((any::<prop::sample::Index>(), 0usize..200), 0..30),
            asked in 0usize..200,
            branch in 0usize..200,
        ) {
            // Blocks 0..branch are a common start; each target then follows the prompt or leaves it.
            let prompt: Vec<BlockHash> = (0..asked as u64).map(hash).collect();
            let index = BlockIndex::new(targets, 200 * 30);
            let mut expected = vec![0; targets];
            for (sequence, (target, len)) in held.iter().enumerate() {
                let target = target.index(targets);
                let leaves = sequence % 2 == 1;
                let ops: Vec<KvOp> = (0..*len)
                    .map(|n| stored(if leaves && n >= branch { 1_000 + n as u64 } else { n as u64 }))
                    .collect();
                index.resync(target, &delta(0, &ops));
                let on_path = if leaves { branch.min(*len) } else { *len };
                expected[target] = on_path.min(asked) as u32;
            }
            prop_assert_eq!(overlap(&index, &prompt), expected);
        }

        /// For any set of held blocks, a run is never counted short, and a single look-up is exact.
        #[test]
        fn overlap_never_misses_a_prefix(held in prop::collection::btree_set(0u64..60, 0..60)) {
            let index = BlockIndex::new(1, 100);
            let ops: Vec<KvOp> = held.iter().copied().map(stored).collect();
            index.apply(0, &delta(0, &ops));
            let prompt: Vec<BlockHash> = (0..60).map(hash).collect();
            let exact = (0..60).take_while(|n| held.contains(n)).count() as u32;
            prop_assert!(overlap(&index, &prompt)[0] >= exact);
        }
    }
}
