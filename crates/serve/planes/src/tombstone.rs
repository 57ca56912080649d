//! Workers that vanished recently.
//!
//! When an instance vanishes, senders that chose it on a slightly older view
//! must notice at once, on every shard. A tombstone marks it for some seconds.
//! After that the fleet's own readiness is known everywhere, and the tombstone expires. It is also
//! removed when the instance returns.

use crate::sync::{AtomicU64, Ordering};

/// Tombstones by worker, shared by all shards. Reading one is a load.
#[derive(Debug)]
pub struct Tombstones {
    /// Expiry times, ns; 0: none.
    until_ns: Box<[AtomicU64]>,
    /// Lifetime of a tombstone, ns.
    stands_ns: u64,
}

/// Lifetime of a tombstone, ns.
pub const STANDS_NS: u64 = 5_000_000_000;

impl Tombstones {
    /// No tombstones, for workers below `workers`; each will last for `stands_ns`.
    pub fn new(workers: usize, stands_ns: u64) -> Tombstones {
        Tombstones {
            until_ns: (0..workers).map(|_| AtomicU64::new(0)).collect(),
            stands_ns,
        }
    }

    /// Marks `worker` as vanished at `now_ns`.
    pub fn raise(&self, worker: usize, now_ns: u64) {
        if let Some(until) = self.until_ns.get(worker) {
            // A swap and not a store: it and a check that removes the last tombstone are then in one
            // order, whichever was first (and loom, which checks it, has no other order).
            until.swap(
                now_ns.saturating_add(self.stands_ns).max(1),
                Ordering::AcqRel,
            );
        }
    }

    /// Removes the tombstone of `worker`, which is back.
    pub fn clear(&self, worker: usize) {
        if slipstream_base::planted!("stale-tombstone") {
            return;
        }
        if let Some(until) = self.until_ns.get(worker) {
            until.swap(0, Ordering::AcqRel);
        }
    }

    /// Whether `worker` vanished less than a lifetime before `now_ns`. Removes an expired tombstone:
    /// no other code does.
    pub fn stands(&self, worker: usize, now_ns: u64) -> bool {
        let Some(cell) = self.until_ns.get(worker) else {
            return false;
        };
        let until = cell.load(Ordering::Acquire);
        if until == 0 {
            return false;
        }
        if now_ns < until {
            return true;
        }
        // Only this tombstone: a newer one, set concurrently, stays.
        let _ = cell.compare_exchange(until, 0, Ordering::AcqRel, Ordering::Relaxed);
        false
    }

    /// Number of tombstones at `now_ns`.
    pub fn count(&self, now_ns: u64) -> usize {
        (0..self.until_ns.len())
            .filter(|&worker| self.stands(worker, now_ns))
            .count()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_stone_stands_for_its_time_for_its_worker_alone() {
        let stones = Tombstones::new(3, 5);
        stones.raise(1, 100);
        assert!(stones.stands(1, 104));
        assert!(!stones.stands(0, 104) && !stones.stands(2, 104));
        assert!(!stones.stands(1, 105), "it has expired");
        assert_eq!(
            stones.count(104),
            0,
            "and was taken away by the look that found it so"
        );
        stones.raise(7, 100); // beyond the cluster: ignored
        assert!(!stones.stands(7, 101));
    }

    #[test]
    fn a_return_clears_it_and_a_second_end_raises_it_again() {
        let stones = Tombstones::new(1, 5);
        stones.raise(0, 100);
        stones.clear(0);
        assert!(!stones.stands(0, 101));
        stones.raise(0, 102);
        assert!(stones.stands(0, 106));
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use crate::sync::Arc;

    /// A check that removes an old tombstone does not remove a concurrent new one.
    #[test]
    fn a_look_takes_no_newer_stone() {
        loom::model(|| {
            let stones = Arc::new(Tombstones::new(1, 5));
            stones.raise(0, 0);
            let other = stones.clone();
            let looker = loom::thread::spawn(move || {
                let _ = other.stands(0, 10); // the first has expired by then
            });
            stones.raise(0, 10);
            looker.join().unwrap();
            assert!(stones.stands(0, 11), "the second stands");
        });
    }
}
