//! Wake-ups of a thread or task that sleeps until its ring has an entry.
//!
//! Both bells follow one protocol. The sleeper announces that it sleeps, then reads its rings once
//! more; the other side adds an entry, then reads whether the sleeper sleeps. With a
//! sequentially consistent fence between the two steps on both sides, at least one of them sees
//! the other, so no wake-up is lost. If the sleeper is awake, the other side pays only a fence and
//! a load. The sleeper's own steps are swaps, not stores: it does them only around a sleep, and in a
//! chain of swaps each step is ordered after the one it replaced, for loom as for the reader.

use std::task::Waker;

#[cfg(not(loom))]
use slipstream_base::sync::lock;

use crate::sync::{AtomicBool, AtomicU32, Mutex, Ordering, fence};

/// Wakes a task of a shard's executor.
#[derive(Debug)]
pub struct TaskBell {
    sleeping: AtomicBool,
    /// Locked when the task goes to sleep and when it is woken, never in between: a task that is
    /// awake is not rung. Uncontended, except for a wake-up that meets the next sleep.
    waker: Mutex<Option<Waker>>,
}

impl Default for TaskBell {
    fn default() -> Self {
        TaskBell {
            sleeping: AtomicBool::new(false),
            waker: Mutex::new(None),
        }
    }
}

impl TaskBell {
    /// Announces that the task is about to sleep. It must then read its rings once more, and
    /// call [`TaskBell::stay_awake`] if one has an entry.
    pub fn prepare(&self, waker: &Waker) {
        let mut slot = lock(&self.waker);
        match &mut *slot {
            Some(old) => old.clone_from(waker), // clones only if it would wake another task
            None => *slot = Some(waker.clone()),
        }
        drop(slot);
        self.sleeping.swap(true, Ordering::AcqRel);
        fence(Ordering::SeqCst);
    }

    /// Cancels the announced sleep.
    pub fn stay_awake(&self) {
        self.sleeping.swap(false, Ordering::AcqRel);
    }

    /// Wakes the task if it sleeps. Call it after adding an entry to a ring. Returns
    /// whether it was asleep.
    #[inline]
    pub fn ring(&self) -> bool {
        fence(Ordering::SeqCst);
        if !self.sleeping.load(Ordering::Relaxed) || !self.sleeping.swap(false, Ordering::AcqRel) {
            return false;
        }
        // Cloned, so that a waker that runs the task at once does not run it under the lock.
        let waker = lock(&self.waker).clone();
        if let Some(waker) = waker {
            waker.wake();
        }
        true
    }
}

/// Wakes an engine thread, which sleeps until a deadline or until it is rung. While a shard runs the thread's work
/// ([`crate::host`]), it wakes the shard's task instead.
#[derive(Debug)]
pub struct ThreadBell {
    /// [`AWAKE`] or [`ASLEEP`]; on Linux the futex word.
    state: AtomicU32,
    /// The task that runs the thread's work. Changed only while it is awake.
    task: Mutex<Option<Waker>>,
    #[cfg(any(loom, not(target_os = "linux")))]
    parked: parking::Parking,
}

const AWAKE: u32 = 0;
const ASLEEP: u32 = 1;

impl Default for ThreadBell {
    fn default() -> Self {
        ThreadBell {
            state: AtomicU32::new(AWAKE),
            task: Mutex::new(None),
            #[cfg(any(loom, not(target_os = "linux")))]
            parked: parking::Parking::default(),
        }
    }
}

impl ThreadBell {
    /// Announces that the thread is about to sleep. It must then read its rings once more, and
    /// call either [`ThreadBell::wait`] or [`ThreadBell::stay_awake`].
    pub fn prepare(&self) {
        self.state.swap(ASLEEP, Ordering::AcqRel);
        fence(Ordering::SeqCst);
    }

    /// Cancels the announced sleep.
    pub fn stay_awake(&self) {
        self.state.swap(AWAKE, Ordering::AcqRel);
        // As after a wait.
        fence(Ordering::SeqCst);
    }

    /// Wakes this task from now on; `None`: the thread. A ring that has begun may wake the one before, which is
    /// awake.
    pub fn wake_task(&self, task: Option<&Waker>) {
        let mut slot = lock(&self.task);
        match (&mut *slot, task) {
            (Some(old), Some(task)) => old.clone_from(task),
            (slot, task) => *slot = task.cloned(),
        }
    }

    /// Sleeps until rung, until `deadline_ns` of `CLOCK_MONOTONIC` (`None`: no deadline), or until a
    /// spurious wake-up. One absolute wait: a deadline already
    /// past returns at once, and time lost on the way to sleep is not added to it.
    pub fn wait(&self, deadline_ns: Option<u64>) {
        self.park(deadline_ns);
        self.state.swap(AWAKE, Ordering::AcqRel);
        // Entries added before the bell was rung are visible from here on.
        fence(Ordering::SeqCst);
    }

    /// Whether the thread sleeps, or is about to. Call it after adding an entry to a ring: a thread that does not
    /// will see the entry.
    #[inline]
    pub fn sleeps(&self) -> bool {
        fence(Ordering::SeqCst);
        self.state.load(Ordering::Relaxed) == ASLEEP
    }

    /// Wakes the thread if it sleeps. Call it after adding an entry to a ring. Returns
    /// whether it was asleep.
    #[inline]
    pub fn ring(&self) -> bool {
        fence(Ordering::SeqCst);
        if self.state.load(Ordering::Relaxed) != ASLEEP
            || self.state.swap(AWAKE, Ordering::AcqRel) != ASLEEP
        {
            return false;
        }
        // Cloned, so that a waker that runs the task at once does not run it under the lock.
        let task = lock(&self.task).clone();
        match task {
            Some(task) => task.wake(),
            None => self.unpark(),
        }
        true
    }

    #[cfg(all(target_os = "linux", not(loom)))]
    fn park(&self, deadline_ns: Option<u64>) {
        use rustix::thread::futex;
        use std::num::NonZeroU32;

        let deadline = deadline_ns.map(|ns| futex::Timespec {
            tv_sec: (ns / 1_000_000_000).cast_signed(),
            tv_nsec: (ns % 1_000_000_000).cast_signed(),
        });
        // FUTEX_WAIT_BITSET takes an absolute time of CLOCK_MONOTONIC, whereas FUTEX_WAIT takes a
        // duration (futex(2)). Its outcomes (rung, timed out, interrupted, no longer asleep) are
        // equivalent for the caller, which reads the clock and the rings.
        let _ = futex::wait_bitset(
            &self.state,
            futex::Flags::PRIVATE,
            ASLEEP,
            deadline.as_ref(),
            NonZeroU32::MAX,
        );
    }

    #[cfg(all(target_os = "linux", not(loom)))]
    fn unpark(&self) {
        // The only possible error is an invalid futex word, on which no thread sleeps.
        let _ = rustix::thread::futex::wake(&self.state, rustix::thread::futex::Flags::PRIVATE, 1);
    }

    #[cfg(any(loom, not(target_os = "linux")))]
    fn park(&self, deadline_ns: Option<u64>) {
        self.parked
            .park(deadline_ns, || self.state.load(Ordering::Acquire) == ASLEEP);
    }

    #[cfg(any(loom, not(target_os = "linux")))]
    fn unpark(&self) {
        self.parked.unpark();
    }
}

/// A parking primitive without a futex: for other systems, and for loom, which models no system calls.
#[cfg(any(loom, not(target_os = "linux")))]
mod parking {
    #[cfg(loom)]
    use loom::sync::{Condvar, Mutex};
    #[cfg(not(loom))]
    use std::sync::{Condvar, Mutex};

    use slipstream_base::sync::unpoisoned;

    #[derive(Debug)]
    pub(super) struct Parking {
        lock: Mutex<()>,
        changed: Condvar,
    }

    impl Default for Parking {
        fn default() -> Self {
            Parking {
                lock: Mutex::new(()),
                changed: Condvar::new(),
            }
        }
    }

    impl Parking {
        pub(super) fn park(&self, deadline_ns: Option<u64>, asleep: impl Fn() -> bool) {
            let mut guard = super::lock(&self.lock);
            while asleep() {
                guard = match deadline_ns {
                    None => unpoisoned(self.changed.wait(guard)),
                    Some(deadline) => {
                        let now = crate::clock::monotonic_ns();
                        if now >= deadline {
                            return;
                        }
                        let left = std::time::Duration::from_nanos(deadline - now);
                        unpoisoned(self.changed.wait_timeout(guard, left)).0
                    }
                };
            }
        }

        pub(super) fn unpark(&self) {
            // Taking the lock orders this after a sleeper's last read of its state.
            drop(super::lock(&self.lock));
            self.changed.notify_one();
        }
    }
}

#[cfg(loom)]
fn lock<T>(mutex: &loom::sync::Mutex<T>) -> loom::sync::MutexGuard<'_, T> {
    slipstream_base::sync::unpoisoned(mutex.lock())
}

/// Interleavings of a producer and a sleeper: `RUSTFLAGS="--cfg loom" cargo test --release
/// --package slipstream-planes --lib loom`. The ring is a counter here; the possible error is a
/// lost wake-up. `LOOM_MAX_PREEMPTIONS=3` ends in seconds and finds most; without it
/// every interleaving is tried, in some minutes.
#[cfg(all(test, loom))]
mod loom_tests {
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn loom_a_thread_hears_of_everything() {
        loom::model(|| {
            let bell = Arc::new(ThreadBell::default());
            let ring = Arc::new(AtomicUsize::new(0));
            let producer = {
                let (bell, ring) = (bell.clone(), ring.clone());
                loom::thread::spawn(move || {
                    for _ in 0..2 {
                        ring.fetch_add(1, Ordering::Release);
                        bell.ring();
                    }
                })
            };
            let mut taken = 0;
            while taken < 2 {
                taken += ring.swap(0, Ordering::Acquire);
                if taken == 2 {
                    break;
                }
                bell.prepare();
                if ring.load(Ordering::Acquire) > 0 {
                    bell.stay_awake();
                } else {
                    // Without a deadline: a lost wake-up is a deadlock, which loom reports.
                    bell.wait(None);
                }
            }
            producer.join().unwrap();
        });
    }

    #[test]
    fn loom_a_task_hears_of_everything() {
        use loom::future::block_on;
        use std::future::poll_fn;
        use std::task::Poll;

        loom::model(|| {
            let bell = Arc::new(TaskBell::default());
            let ring = Arc::new(AtomicUsize::new(0));
            let producer = {
                let (bell, ring) = (bell.clone(), ring.clone());
                loom::thread::spawn(move || {
                    for _ in 0..2 {
                        ring.fetch_add(1, Ordering::Release);
                        bell.ring();
                    }
                })
            };
            let mut taken = 0;
            while taken < 2 {
                taken += block_on(poll_fn(|cx| {
                    let found = ring.swap(0, Ordering::Acquire);
                    if found > 0 {
                        return Poll::Ready(found);
                    }
                    bell.prepare(cx.waker());
                    let found = ring.swap(0, Ordering::Acquire);
                    if found > 0 {
                        bell.stay_awake();
                        return Poll::Ready(found);
                    }
                    Poll::Pending
                }));
            }
            producer.join().unwrap();
        });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;

    use super::*;

    struct Count(AtomicUsize);

    impl std::task::Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_task_is_woken_once_a_sleep() {
        let count = Arc::new(Count(AtomicUsize::new(0)));
        let waker = Waker::from(count.clone());
        let bell = TaskBell::default();
        assert!(!bell.ring(), "no thread sleeps");
        bell.prepare(&waker);
        assert!(bell.ring());
        assert!(!bell.ring(), "it is awake now");
        bell.prepare(&waker);
        bell.stay_awake();
        assert!(!bell.ring());
        assert_eq!(count.0.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn the_last_waker_counts() {
        let first = Arc::new(Count(AtomicUsize::new(0)));
        let second = Arc::new(Count(AtomicUsize::new(0)));
        let bell = TaskBell::default();
        bell.prepare(&Waker::from(first.clone()));
        bell.prepare(&Waker::from(second.clone()));
        bell.ring();
        let woken = [&first, &second].map(|c| c.0.load(Ordering::Relaxed));
        assert_eq!(woken, [0, 1]);
    }

    #[test]
    fn a_deadline_in_the_past_does_not_sleep() {
        let bell = ThreadBell::default();
        bell.prepare();
        bell.wait(Some(1));
        assert!(!bell.ring(), "it is awake");
    }

    #[test]
    fn a_sleeping_thread_is_rung() {
        let bell = Arc::new(ThreadBell::default());
        let ringer = {
            let bell = Arc::clone(&bell);
            // Rings until the thread was asleep: the sleeper below sleeps without a deadline.
            std::thread::spawn(move || {
                while !bell.ring() {
                    std::thread::yield_now();
                }
            })
        };
        bell.prepare();
        bell.wait(None);
        ringer.join().unwrap();
    }
}
