//! How a sleeper hears that something was put in its ring.
//!
//! Both bells follow one protocol. The sleeper says that it sleeps, then looks at its rings once
//! more; the other side puts something in, then looks whether the sleeper sleeps. With a
//! sequentially consistent fence between the two steps on both sides, at least one of them sees
//! the other, so no wake-up is lost; and a sleeper that is awake costs the other side one load.

use std::task::Waker;

use crate::sync::{AtomicBool, AtomicU32, Mutex, Ordering, fence};

/// Wakes a task of a shard's executor.
#[derive(Debug)]
pub struct TaskBell {
    sleeping: AtomicBool,
    /// Locked when the task goes to sleep and when it is woken, never in between: a task that is
    /// awake is not rung. Uncontended but for a wake-up that meets the next sleep.
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
    /// The task says that it is about to sleep. It must then look at its rings once more, and
    /// call [`TaskBell::stay_awake`] if it finds something.
    pub fn prepare(&self, waker: &Waker) {
        let mut slot = lock(&self.waker);
        match &mut *slot {
            Some(old) => old.clone_from(waker), // clones only if it would wake another task
            None => *slot = Some(waker.clone()),
        }
        drop(slot);
        self.sleeping.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// The task does not sleep after all.
    pub fn stay_awake(&self) {
        self.sleeping.store(false, Ordering::Relaxed);
    }

    /// Wakes the task if it sleeps. To be called after something was put in a ring. Returns
    /// whether it had to be woken.
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

/// Wakes an engine thread, which sleeps until a deadline or until it is rung.
#[derive(Debug)]
pub struct ThreadBell {
    /// [`AWAKE`] or [`ASLEEP`]; on Linux the futex word.
    state: AtomicU32,
    #[cfg(any(loom, not(target_os = "linux")))]
    parked: parking::Parking,
}

const AWAKE: u32 = 0;
const ASLEEP: u32 = 1;

impl Default for ThreadBell {
    fn default() -> Self {
        ThreadBell {
            state: AtomicU32::new(AWAKE),
            #[cfg(any(loom, not(target_os = "linux")))]
            parked: parking::Parking::default(),
        }
    }
}

impl ThreadBell {
    /// The thread says that it is about to sleep. It must then look at its rings once more, and
    /// call either [`ThreadBell::wait`] or [`ThreadBell::stay_awake`].
    pub fn prepare(&self) {
        self.state.store(ASLEEP, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// The thread does not sleep after all.
    pub fn stay_awake(&self) {
        self.state.store(AWAKE, Ordering::Relaxed);
    }

    /// Sleeps until rung, until `deadline_ns` of `CLOCK_MONOTONIC` (`None`: for as long as it
    /// takes), or for no reason, whichever comes first. One absolute wait: a deadline already
    /// past returns at once, and time lost on the way to sleep is not added to it.
    pub fn wait(&self, deadline_ns: Option<u64>) {
        self.park(deadline_ns);
        self.state.store(AWAKE, Ordering::Relaxed);
        // What was put in the rings before the bell was rung is seen from here on.
        fence(Ordering::SeqCst);
    }

    /// Wakes the thread if it sleeps. To be called after something was put in a ring. Returns
    /// whether it had to be woken.
    #[inline]
    pub fn ring(&self) -> bool {
        fence(Ordering::SeqCst);
        if self.state.load(Ordering::Relaxed) != ASLEEP
            || self.state.swap(AWAKE, Ordering::AcqRel) != ASLEEP
        {
            return false;
        }
        self.unpark();
        true
    }

    #[cfg(all(target_os = "linux", not(loom)))]
    fn park(&self, deadline_ns: Option<u64>) {
        use rustix::thread::futex;
        use std::num::NonZeroU32;

        let deadline = deadline_ns.map(|ns| futex::Timespec {
            tv_sec: (ns / 1_000_000_000) as i64,
            tv_nsec: (ns % 1_000_000_000) as _,
        });
        // FUTEX_WAIT_BITSET takes an absolute time of CLOCK_MONOTONIC, where FUTEX_WAIT takes a
        // duration (futex(2)). Its outcomes (rung, timed out, interrupted, no longer asleep) all
        // mean the same to the caller, who looks at the clock and the rings.
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
        // An error could only say that the word is no futex, and then nobody sleeps on it.
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

/// A parking place without a futex: for other systems, and for loom, which models no system calls.
#[cfg(any(loom, not(target_os = "linux")))]
mod parking {
    #[cfg(loom)]
    use loom::sync::{Condvar, Mutex};
    #[cfg(not(loom))]
    use std::sync::{Condvar, Mutex};

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
                    None => self
                        .changed
                        .wait(guard)
                        .unwrap_or_else(std::sync::PoisonError::into_inner),
                    Some(deadline) => {
                        let now = crate::clock::monotonic_ns();
                        if now >= deadline {
                            return;
                        }
                        let left = std::time::Duration::from_nanos(deadline - now);
                        self.changed
                            .wait_timeout(guard, left)
                            .unwrap_or_else(std::sync::PoisonError::into_inner)
                            .0
                    }
                };
            }
        }

        pub(super) fn unpark(&self) {
            // Taking the lock puts this after a sleeper's last look at its state.
            drop(super::lock(&self.lock));
            self.changed.notify_one();
        }
    }
}

/// A poisoned lock guards a waker or nothing: both are as good as before.
#[cfg(not(loom))]
fn lock<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}
#[cfg(loom)]
fn lock<T>(mutex: &loom::sync::Mutex<T>) -> loom::sync::MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}
