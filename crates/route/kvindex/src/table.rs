//! A hash table from block hash to a set of owners that is read without locks.
//!
//! ```text
//!   bucket = 7 slots          meta word: 7 tags (8 bits of the hash; 0 = empty) + 1 overflow count
//!   ┌──────┬───────────────┬───────────────┬─ … ─┐
//!   │ meta │ hash owners×W │ hash owners×W │     │   W = words of 64 owners; W = 1: 128 bytes
//!   └──────┴───────────────┴───────────────┴─ … ─┘
//! ```
//!
//! A key is stored in its home bucket or, if that was full, in the next one that had room. Each bucket
//! counts the keys that had to pass it, so a look-up knows when to stop. A removal leaves
//! no tombstone: it decrements the counts and empties its slot. (The counting is that of F14,
//! Facebook's hash table, 2019.) Keys never move, so a reader that runs concurrently with a writer finds
//! every key that stays.
//!
//! Writers of one shard must exclude each other ([`crate::BlockIndex`] holds one lock per shard); the
//! table relies on it.

use std::sync::atomic::{AtomicU64, Ordering};

use slipstream_base::BlockHash;
use slipstream_base::mix::below;
use slipstream_base::width::to_usize;

/// An atomic word. A trait, so that loom can test the interleavings of this code with its own atomics.
pub(crate) trait Word: Sized {
    /// `count` zeros.
    fn zeros(count: usize) -> Box<[Self]>;
    fn load_acquire(&self) -> u64;
    fn store_release(&self, value: u64);
}

impl Word for AtomicU64 {
    fn zeros(count: usize) -> Box<[AtomicU64]> {
        // Zero pages from the system: pages that are never written take no memory.
        bytemuck::zeroed_slice_box(count)
    }
    #[inline]
    fn load_acquire(&self) -> u64 {
        self.load(Ordering::Acquire)
    }
    #[inline]
    fn store_release(&self, value: u64) {
        self.store(value, Ordering::Release);
    }
}

/// Slots per bucket: as many tags as fit in a word together with the count.
const SLOTS: usize = 7;
/// Planned keys per bucket. With random keys, 1 in 11 is then stored outside its home bucket, and no
/// more than 11 buckets away in a table of a million. At 5 it is 1 in 4, up to 24 away, and changes
/// take half as long again.
const KEYS_PER_BUCKET: usize = 4;
/// Maximum distance of a key from its home bucket: far more than chance brings about at the planned load.
/// A table that holds more than planned rejects keys instead of getting slow.
const PROBES_MAX: usize = 64;
/// Minimum keys per shard, so that a shard's number of keys deviates little from the mean (3 %).
const SHARD_KEYS_MIN: usize = 1024;
/// Maximum number of shards.
const SHARDS_MAX: usize = 64;

/// Two cache lines, which Intel's and AMD's prefetchers fetch as a pair.
const LINE_WORDS: usize = 16;
const ONES: u64 = 0x0101_0101_0101_0101;
/// The top bit of each tag; the count's byte is excluded.
const TAG_TOPS: u64 = 0x0080_8080_8080_8080;
const COUNT_SHIFT: u32 = 56;
const COUNT_MAX: u64 = 0xff;

pub(crate) struct Table<A> {
    words: Box<[A]>,
    /// Index of the first word that begins a pair of cache lines.
    first: usize,
    owner_words: usize,
    /// Words per bucket; a multiple of `LINE_WORDS`.
    bucket_words: usize,
    shard_bits: u32,
    shard_buckets: u64,
}

/// The home of a hash.
#[derive(Clone, Copy)]
struct Home {
    key: u64,
    tag: u64,
    shard: usize,
    bucket: u64,
}

/// The table has no room for a key near its home.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Full;

impl<A: Word> Table<A> {
    /// A table for `owners` owners and `keys` keys.
    pub(crate) fn new(owners: usize, keys: usize) -> Table<A> {
        let shards = (keys / SHARD_KEYS_MIN)
            .next_power_of_two()
            .clamp(1, SHARDS_MAX);
        let owner_words = owners.div_ceil(64).max(1);
        let bucket_words = (1 + SLOTS * (1 + owner_words)).next_multiple_of(LINE_WORDS);
        // Two extra buckets absorb the variance of small tables.
        let shard_buckets = keys.div_ceil(KEYS_PER_BUCKET * shards) + 2;
        let words = A::zeros(shards * shard_buckets * bucket_words + LINE_WORDS - 1);
        let beyond = words.as_ptr().addr() % (LINE_WORDS * 8) / 8;
        Table {
            first: (LINE_WORDS - beyond) % LINE_WORDS,
            words,
            owner_words,
            bucket_words,
            shard_bits: shards.trailing_zeros(),
            shard_buckets: shard_buckets as u64,
        }
    }

    pub(crate) fn shards(&self) -> usize {
        1 << self.shard_bits
    }

    pub(crate) fn owner_words(&self) -> usize {
        self.owner_words
    }

    /// Size, once all pages have been touched, bytes.
    pub(crate) fn bytes(&self) -> usize {
        (self.words.len() - (LINE_WORDS - 1)) * size_of::<u64>()
    }

    #[inline]
    fn home(&self, hash: BlockHash) -> Home {
        let key = stored_key(hash);
        // Fibonacci hashing (Knuth, TAOCP 6.4) spreads hashes of unknown quality, such as a
        // real engine's; our own hashes are uniform already.
        let mixed = key.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let (shard, rest) = if self.shard_bits == 0 {
            (0, mixed)
        } else {
            (
                to_usize(mixed >> (64 - self.shard_bits)),
                mixed << self.shard_bits,
            )
        };
        Home {
            key,
            tag: (mixed >> 16 & 0xff).max(1),
            shard,
            bucket: below(rest, self.shard_buckets),
        }
    }

    /// The shard of `hash`. A writer holds its lock.
    pub(crate) fn shard_of(&self, hash: BlockHash) -> usize {
        self.home(hash).shard
    }

    #[inline]
    fn word(&self, index: usize) -> &A {
        &self.words[self.first + index]
    }

    /// First word of a bucket.
    #[inline]
    fn base(&self, shard: usize, bucket: u64) -> usize {
        (shard * to_usize(self.shard_buckets) + to_usize(bucket)) * self.bucket_words
    }

    /// The word with the hash of slot `slot` of the bucket that begins at `base`; its owners follow.
    #[inline]
    fn slot(&self, base: usize, slot: usize) -> usize {
        base + 1 + slot * (1 + self.owner_words)
    }

    #[inline]
    fn next(&self, bucket: u64) -> u64 {
        if bucket + 1 == self.shard_buckets {
            0
        } else {
            bucket + 1
        }
    }

    fn probes_max(&self) -> usize {
        PROBES_MAX.min(to_usize(self.shard_buckets))
    }

    /// Prefetches the first two cache lines of the home bucket of `hash`: reads a word of each, and
    /// nothing waits for the result.
    #[inline]
    pub(crate) fn touch(&self, hash: BlockHash) -> u64 {
        let home = self.home(hash);
        let base = self.base(home.shard, home.bucket);
        self.word(base).load_acquire() ^ self.word(base + LINE_WORDS / 2).load_acquire()
    }

    /// The slot that holds `hash`.
    ///
    /// A reader may find a slot that a writer is about to reuse; [`Table::owners`] detects it.
    #[inline]
    pub(crate) fn find(&self, hash: BlockHash) -> Option<usize> {
        let home = self.home(hash);
        let mut bucket = home.bucket;
        for _ in 0..self.probes_max() {
            let base = self.base(home.shard, bucket);
            let meta = self.word(base).load_acquire();
            let mut matches = match_tags(meta, home.tag);
            while matches != 0 {
                let slot = self.slot(base, to_usize(matches.trailing_zeros()) / 8);
                if self.word(slot).load_acquire() == home.key {
                    return Some(slot);
                }
                matches &= matches - 1;
            }
            if meta >> COUNT_SHIFT == 0 {
                return None;
            }
            bucket = self.next(bucket);
        }
        None
    }

    /// Word `word` of the owners of `hash`, which was found in `slot`.
    ///
    /// 0 if the slot was given to another key since. That key was written before its owners, so
    /// a reader of the new owners sees the new key in its second read. Exception: if the first key is
    /// back already, this one answer may have wrong owners.
    #[inline]
    pub(crate) fn owners(&self, slot: usize, hash: BlockHash, word: usize) -> u64 {
        let owners = self.word(slot + 1 + word).load_acquire();
        if self.word(slot).load_acquire() == stored_key(hash) {
            owners
        } else {
            0
        }
    }

    /// Adds `owner` to the owners of `hash`. Returns whether it is new.
    ///
    /// The caller holds the lock of the hash's shard.
    pub(crate) fn insert(&self, hash: BlockHash, owner: usize) -> Result<bool, Full> {
        let (word, bit) = (owner / 64, 1 << (owner % 64));
        if let Some(slot) = self.find(hash) {
            let cell = self.word(slot + 1 + word);
            let owners = cell.load_acquire();
            cell.store_release(owners | bit);
            return Ok(owners & bit == 0);
        }
        let home = self.home(hash);
        let mut bucket = home.bucket;
        for passed in 0..self.probes_max() {
            let base = self.base(home.shard, bucket);
            let meta = self.word(base).load_acquire();
            let free = match_tags(meta, 0);
            if free != 0 {
                let at = free.trailing_zeros() / 8;
                let slot = self.slot(base, at as usize);
                // The key is written before the owners: see `owners`.
                self.word(slot).store_release(home.key);
                self.word(slot + 1 + word).store_release(bit);
                self.word(base).store_release(meta | home.tag << (at * 8));
                self.count_passed(home, passed, 1);
                return Ok(true);
            }
            bucket = self.next(bucket);
        }
        Err(Full)
    }

    /// Removes `owner` from the owners of `hash`. Returns whether it was one.
    ///
    /// The caller holds the lock of the hash's shard.
    pub(crate) fn remove(&self, hash: BlockHash, owner: usize) -> bool {
        let home = self.home(hash);
        let mut bucket = home.bucket;
        for passed in 0..self.probes_max() {
            let base = self.base(home.shard, bucket);
            let meta = self.word(base).load_acquire();
            let mut matches = match_tags(meta, home.tag);
            while matches != 0 {
                let at = matches.trailing_zeros() as usize / 8;
                let slot = self.slot(base, at);
                if self.word(slot).load_acquire() == home.key {
                    return self.remove_at(home, passed, base, at, owner);
                }
                matches &= matches - 1;
            }
            if meta >> COUNT_SHIFT == 0 {
                return false;
            }
            bucket = self.next(bucket);
        }
        false
    }

    fn remove_at(&self, home: Home, passed: usize, base: usize, at: usize, owner: usize) -> bool {
        let slot = self.slot(base, at);
        let (word, bit) = (owner / 64, 1 << (owner % 64));
        let cell = self.word(slot + 1 + word);
        let owners = cell.load_acquire();
        if owners & bit == 0 {
            return false;
        }
        cell.store_release(owners & !bit);
        if (0..self.owner_words).all(|word| self.word(slot + 1 + word).load_acquire() == 0) {
            let meta = self.word(base).load_acquire();
            self.word(base).store_release(meta & !(0xff << (at * 8)));
            self.word(slot).store_release(0);
            self.count_passed(home, passed, -1);
        }
        true
    }

    /// Updates the counts after a key `passed` buckets from its home was added or removed.
    fn count_passed(&self, home: Home, passed: usize, change: i64) {
        let mut bucket = home.bucket;
        for _ in 0..passed {
            let cell = self.word(self.base(home.shard, bucket));
            let meta = cell.load_acquire();
            // A saturated count stays saturated, because the true number is lost. Look-ups that
            // pass it stay correct, and cost one more probe.
            if meta >> COUNT_SHIFT != COUNT_MAX {
                cell.store_release(meta.wrapping_add_signed(change << COUNT_SHIFT));
            }
            bucket = self.next(bucket);
        }
    }

    /// Removes `owner` from every key of `shard`. Returns the number of those keys. Costs the size of the
    /// shard.
    ///
    /// The caller holds the shard's lock.
    pub(crate) fn clear(&self, shard: usize, owner: usize) -> u64 {
        let mut removed = 0;
        for bucket in 0..self.shard_buckets {
            let base = self.base(shard, bucket);
            for at in 0..SLOTS {
                let key = self.word(self.slot(base, at)).load_acquire();
                if key != 0 {
                    removed += u64::from(self.remove(BlockHash(key), owner));
                }
            }
        }
        removed
    }
}

/// A stored 0 means empty; the one hash in 2^64 that is 0 is stored as another.
#[inline]
fn stored_key(hash: BlockHash) -> u64 {
    if hash.0 == 0 { ONES } else { hash.0 }
}

/// The top bit of each tag byte of `meta` that equals `tag`. Exact up to the first match; a byte
/// above it may be a false match, which the hash in the slot rules out.
#[inline]
fn match_tags(meta: u64, tag: u64) -> u64 {
    let differ = meta ^ (tag * ONES);
    differ.wrapping_sub(ONES) & !differ & TAG_TOPS
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use slipstream_base::mix::draw;

    use super::*;

    impl Word for loom::sync::atomic::AtomicU64 {
        fn zeros(count: usize) -> Box<[Self]> {
            (0..count).map(|_| Self::new(0)).collect()
        }
        fn load_acquire(&self) -> u64 {
            self.load(Ordering::Acquire)
        }
        fn store_release(&self, value: u64) {
            self.store(value, Ordering::Release);
        }
    }

    /// Runs `test` in all interleavings. Loom explores other orders if a load follows another
    /// thread's store, so the writer is the first thread and the reader the spawned one.
    fn in_every_order(test: impl Fn() + Send + Sync + 'static) {
        let orders = Arc::new(std::sync::atomic::AtomicU64::new(0));
        let counted = Arc::clone(&orders);
        loom::model(move || {
            counted.fetch_add(1, Ordering::Relaxed);
            test();
        });
        assert!(
            orders.load(Ordering::Relaxed) > 10,
            "only {orders:?} orders: the threads did not meet"
        );
    }

    fn read<A: Word>(table: &Table<A>, hash: BlockHash) -> u64 {
        table
            .find(hash)
            .map_or(0, |slot| table.owners(slot, hash, 0))
    }

    /// Hashes with one home bucket, so that they compete for slots.
    fn neighbors<A: Word>(table: &Table<A>, n: usize) -> Vec<BlockHash> {
        (0..)
            .map(|index| BlockHash(draw(1, index)))
            .filter(|&hash| table.home(hash).bucket == 0)
            .take(n)
            .collect()
    }

    #[test]
    fn reader_finds_what_stays_and_never_another_keys_owner() {
        const GONE: usize = 1;
        const COMES: usize = 2;
        const STAYS: usize = 3;
        in_every_order(|| {
            let table: Arc<Table<loom::sync::atomic::AtomicU64>> = Arc::new(Table::new(64, 0));
            let keys = neighbors(&table, 3);
            table.insert(keys[0], GONE).unwrap();
            table.insert(keys[2], STAYS).unwrap();
            let reader = loom::thread::spawn({
                let (table, keys) = (Arc::clone(&table), keys.clone());
                move || {
                    assert_eq!(read(&table, keys[0]) & !(1 << GONE), 0);
                    assert_eq!(read(&table, keys[2]), 1 << STAYS);
                }
            });
            table.remove(keys[0], GONE);
            table.insert(keys[1], COMES).unwrap(); // takes the slot of keys[0]
            reader.join().unwrap();
            assert_eq!(read(&table, keys[0]), 0);
            assert_eq!(read(&table, keys[1]), 1 << COMES);
        });
    }

    #[test]
    fn reader_finds_a_key_beyond_its_full_home_bucket_while_others_come_and_go() {
        in_every_order(|| {
            let table: Arc<Table<loom::sync::atomic::AtomicU64>> = Arc::new(Table::new(64, 0));
            let keys = neighbors(&table, SLOTS + 2);
            for &key in &keys[..=SLOTS] {
                table.insert(key, 0).unwrap(); // the last one is stored in the next bucket
            }
            let reader = loom::thread::spawn({
                let (table, keys) = (Arc::clone(&table), keys.clone());
                move || assert_eq!(read(&table, keys[SLOTS]), 1)
            });
            table.insert(keys[SLOTS + 1], 5).unwrap();
            table.remove(keys[SLOTS + 1], 5);
            reader.join().unwrap();
            assert_eq!(read(&table, keys[SLOTS]), 1);
        });
    }

    #[test]
    fn removal_leaves_nothing_behind() {
        // 20 turnovers of a table at its planned load, with keys that never repeat.
        let held: u64 = if cfg!(miri) { 100 } else { 5_000 };
        let all = 20 * held;
        let table: Table<AtomicU64> = Table::new(64, held as usize);
        let key = |n: u64| BlockHash(draw(2, n));
        let mut longest = 0;
        for n in 0..all {
            assert_eq!(table.insert(key(n), (n % 64) as usize), Ok(true));
            if n >= held {
                let old = n - held;
                assert!(table.remove(key(old), (old % 64) as usize));
            }
            if n % (2 * held) == 0 {
                longest = longest.max(longest_full_run(&table));
            }
        }
        assert!(
            longest <= PROBES_MAX / 4,
            "{longest} full buckets side by side: look-ups get slow"
        );
        for n in all - held..all {
            assert!(table.remove(key(n), (n % 64) as usize));
        }
        assert!(table.words.iter().all(|word| word.load_acquire() == 0));
    }

    fn longest_full_run(table: &Table<AtomicU64>) -> usize {
        let full = |&bucket: &u64| {
            let meta = table.word(table.base(0, bucket)).load_acquire();
            match_tags(meta, 0) == 0
        };
        let mut longest = 0;
        let mut run = 0;
        for bucket in 0..table.shard_buckets {
            run = if full(&bucket) { run + 1 } else { 0 };
            longest = longest.max(run);
        }
        longest
    }

    #[test]
    fn a_full_table_refuses_and_keeps_what_it_has() {
        let table: Table<AtomicU64> = Table::new(1, 0); // 2 buckets
        let keys: Vec<_> = (0..20).map(|n| BlockHash(draw(3, n))).collect();
        let taken: Vec<_> = keys
            .iter()
            .filter(|&&key| table.insert(key, 0).is_ok())
            .collect();
        assert_eq!(taken.len(), 2 * SLOTS);
        assert!(taken.iter().all(|&&key| read(&table, key) == 1));
        assert!(taken.iter().all(|&&key| table.remove(key, 0)));
        assert_eq!(
            table.insert(keys[19], 0),
            Ok(true),
            "room is there again after removals"
        );
    }

    #[test]
    fn hash_zero_is_a_key_like_others() {
        let table: Table<AtomicU64> = Table::new(1, 10);
        assert_eq!(read(&table, BlockHash(0)), 0);
        assert_eq!(table.insert(BlockHash(0), 0), Ok(true));
        assert_eq!(read(&table, BlockHash(0)), 1);
        assert!(table.remove(BlockHash(0), 0));
        assert_eq!(read(&table, BlockHash(0)), 0);
    }
}
