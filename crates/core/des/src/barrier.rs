//! The barrier of threads between two windows.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex};

/// How long a thread waits at the barrier before it parks.
///
/// A barrier that only spins collapses on a shared machine: spinning threads waste their cores while
/// they wait for a thread that lost its core. One that only parks costs a system call per window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spin {
    /// Reads of the epoch before parking, each followed by a pause instruction (tens of ns).
    pub looks: u32,
}

impl Default for Spin {
    fn default() -> Self {
        Spin { looks: 300 }
    }
}

/// Synchronizes `threads` threads, and lets one of them prepare the next window while the rest wait.
pub struct WindowBarrier {
    threads: u32,
    spin: Spin,
    arrived: AtomicU32,
    epoch: AtomicU64,
    sleepers: AtomicU32,
    lock: Mutex<()>,
    wake: Condvar,
}

impl WindowBarrier {
    /// A barrier for `threads` threads.
    pub fn new(threads: u32, spin: Spin) -> Self {
        WindowBarrier {
            threads,
            spin,
            arrived: AtomicU32::new(0),
            epoch: AtomicU64::new(0),
            sleepers: AtomicU32::new(0),
            lock: Mutex::new(()),
            wake: Condvar::new(),
        }
    }

    /// Waits for all threads. The last to arrive runs `prepare` before any of them continues.
    pub fn meet(&self, prepare: impl FnOnce()) {
        if self.threads == 1 {
            prepare();
            return;
        }
        let epoch = self.epoch.load(Ordering::Acquire);
        if self.arrived.fetch_add(1, Ordering::AcqRel) + 1 == self.threads {
            prepare();
            self.arrived.store(0, Ordering::Relaxed);
            self.epoch.store(epoch + 1, Ordering::SeqCst);
            // A thread that is about to sleep has either counted itself, and is woken here, or
            // sees the new epoch under the lock.
            if self.sleepers.load(Ordering::SeqCst) > 0 {
                let _guard = self.lock.lock().expect("no thread panics while holding it");
                self.wake.notify_all();
            }
            return;
        }
        for _ in 0..self.spin.looks {
            if self.epoch.load(Ordering::Acquire) != epoch {
                return;
            }
            std::hint::spin_loop();
        }
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let mut guard = self.lock.lock().expect("no thread panics while holding it");
        while self.epoch.load(Ordering::SeqCst) == epoch {
            guard = self
                .wake
                .wait(guard)
                .expect("no thread panics while holding it");
        }
        drop(guard);
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)] // they have threads
mod tests {
    use super::*;

    fn check_meetings(threads: u32, looks: u32) {
        let barrier = WindowBarrier::new(threads, Spin { looks });
        let (sum, prepared) = (AtomicU32::new(0), AtomicU32::new(0));
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    for round in 1..=200 {
                        sum.fetch_add(1, Ordering::Relaxed);
                        barrier.meet(|| {
                            prepared.fetch_add(1, Ordering::Relaxed);
                            assert_eq!(sum.load(Ordering::Relaxed), round * threads);
                        });
                        assert_eq!(prepared.load(Ordering::Relaxed), round);
                        barrier.meet(|| ());
                    }
                });
            }
        });
    }

    #[test]
    fn nobody_passes_before_all_have_come() {
        check_meetings(1, 100);
        check_meetings(4, 1000);
        check_meetings(4, 0);
    }
}
