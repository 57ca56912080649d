//! Engines on the thread of the shard that reads their frames.
//!
//! A step wakes two threads: the engine's, by its deadline, and the shard's, by the frame. With few streams these
//! wake-ups cost more than all else. So an engine thread may leave its work to a shard's thread, and waits until it comes
//! back: one wake-up per step, and rings that no other thread reads at the time.
//!
//! ```text
//!   engine thread ── HostSlot::lend (waits) ──►  shard: Lent::turn, again and again
//!                 ◄─────────────── Turn::Leave, a panic, or the shard's end
//! ```

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};

use slipstream_base::sync::{lock, unpoisoned};

use crate::bell::TaskBell;

/// An engine thread's work.
pub trait Work: Any + Send {
    /// Runs the rounds that are due, and never waits. `waker` is woken for more.
    fn turn(&mut self, waker: &Waker) -> Turn;

    /// The work returns to its own thread.
    fn leave(&mut self);
}

/// The next wish of some work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// Another turn at this time of `CLOCK_MONOTONIC`, ns, or when woken.
    Until(u64),
    /// To return to its own thread.
    Leave,
}

/// Where an engine thread lends its work to one shard.
#[derive(Default)]
pub struct HostSlot {
    state: Mutex<State>,
    /// The owner waits by it.
    returned: Condvar,
    /// The shard waits by it.
    bell: TaskBell,
}

#[derive(Default)]
struct State {
    /// A shard takes work.
    open: bool,
    lent: Option<Box<dyn Work>>,
    /// It is on its way back, or a panic is all that is left of it.
    back: Option<Result<Box<dyn Work>, Box<dyn Any + Send>>>,
}

impl std::fmt::Debug for HostSlot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostSlot").finish_non_exhaustive()
    }
}

impl HostSlot {
    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Whether a shard takes work.
    pub fn is_open(&self) -> bool {
        self.lock().open
    }

    /// Lends `work` to the shard, and waits until it is back; at once if no shard takes it.
    ///
    /// # Panics
    /// As the work did at the shard.
    pub fn lend(&self, work: Box<dyn Work>) -> Box<dyn Work> {
        let mut state = self.lock();
        if !state.open {
            return work;
        }
        state.lent = Some(work);
        drop(state);
        self.bell.ring();
        let mut state = self.lock();
        loop {
            match state.back.take() {
                Some(Ok(work)) => return work,
                Some(Err(panic)) => {
                    drop(state);
                    std::panic::resume_unwind(panic)
                }
                None => {
                    let woken = self.returned.wait(state);
                    state = unpoisoned(woken);
                }
            }
        }
    }

    fn give_back(&self, back: Result<Box<dyn Work>, Box<dyn Any + Send>>) {
        self.lock().back = Some(back);
        self.returned.notify_one();
    }
}

/// A shard's end of a slot. The slot takes work while it exists.
#[derive(Debug)]
pub struct Host {
    slot: Arc<HostSlot>,
}

impl Host {
    /// Opens `slot`.
    pub fn open(slot: Arc<HostSlot>) -> Host {
        slot.lock().open = true;
        Host { slot }
    }

    /// Waits for work.
    pub fn poll_lent(&mut self, cx: &mut Context<'_>) -> Poll<Lent> {
        let lent = || {
            let work = self.slot.lock().lent.take()?;
            let slot = self.slot.clone();
            Some(Lent {
                slot,
                work: Some(work),
            })
        };
        if let Some(lent) = lent() {
            return Poll::Ready(lent);
        }
        self.slot.bell.prepare(cx.waker());
        match lent() {
            Some(lent) => {
                self.slot.bell.stay_awake();
                Poll::Ready(lent)
            }
            None => Poll::Pending,
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let mut state = self.slot.lock();
        state.open = false;
        let lent = state.lent.take();
        drop(state);
        if let Some(work) = lent {
            self.slot.give_back(Ok(work));
        }
    }
}

/// Work that a shard has. It returns to its owner when this is dropped.
pub struct Lent {
    slot: Arc<HostSlot>,
    work: Option<Box<dyn Work>>,
}

impl std::fmt::Debug for Lent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lent").finish_non_exhaustive()
    }
}

impl Lent {
    /// Runs the rounds that are due. After [`Turn::Leave`] the work is back at its owner.
    pub fn turn(&mut self, waker: &Waker) -> Turn {
        let Some(mut work) = self.work.take() else {
            return Turn::Leave;
        };
        // A broken engine ends its own thread, as it would there, and no shard.
        match catch_unwind(AssertUnwindSafe(move || {
            let turn = work.turn(waker);
            (work, turn)
        })) {
            Ok((work, turn @ Turn::Until(_))) => {
                self.work = Some(work);
                turn
            }
            Ok((mut work, Turn::Leave)) => {
                work.leave();
                self.slot.give_back(Ok(work));
                Turn::Leave
            }
            Err(panic) => {
                self.slot.give_back(Err(panic));
                Turn::Leave
            }
        }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if let Some(mut work) = self.work.take() {
            work.leave();
            self.slot.give_back(Ok(work));
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::task::Waker;

    use super::*;

    /// Counts its turns, and leaves or panics after so many.
    struct Counts {
        turns: u32,
        leaves_at: u32,
        panics: bool,
        left: bool,
    }

    impl Work for Counts {
        fn turn(&mut self, _: &Waker) -> Turn {
            self.turns += 1;
            assert!(!self.panics, "a broken engine");
            if self.turns >= self.leaves_at {
                Turn::Leave
            } else {
                Turn::Until(u64::from(self.turns))
            }
        }

        fn leave(&mut self) {
            self.left = true;
        }
    }

    fn work(leaves_at: u32, panics: bool) -> Counts {
        Counts {
            turns: 0,
            leaves_at,
            panics,
            left: false,
        }
    }

    fn counts(work: Box<dyn Work>) -> Counts {
        let any: Box<dyn Any> = work;
        *any.downcast().expect("what was lent")
    }

    /// Lends `work` by another thread, to a shard that gives it up to `turns` turns.
    fn lend(work: Counts, turns: u32) -> std::thread::Result<Counts> {
        let slot = Arc::new(HostSlot::default());
        let mut host = Host::open(slot.clone());
        let owner = std::thread::spawn(move || counts(slot.lend(Box::new(work))));
        let mut cx = Context::from_waker(Waker::noop());
        let mut lent = loop {
            if let Poll::Ready(lent) = host.poll_lent(&mut cx) {
                break lent;
            }
            std::thread::yield_now();
        };
        for _ in 0..turns {
            if lent.turn(Waker::noop()) == Turn::Leave {
                break;
            }
        }
        drop(lent);
        owner.join()
    }

    #[test]
    fn work_comes_back_when_it_leaves_or_the_shard_does() {
        let back = lend(work(3, false), 100).unwrap();
        assert_eq!((back.turns, back.left), (3, true));
        let back = lend(work(100, false), 2).unwrap();
        assert_eq!((back.turns, back.left), (2, true));
        let panic = lend(work(100, true), 2).err().unwrap();
        assert_eq!(*panic.downcast::<&str>().unwrap(), "a broken engine");
    }

    #[test]
    fn work_for_a_shard_that_is_gone_stays() {
        let slot = Arc::new(HostSlot::default());
        let stays = |slot: &HostSlot| counts(slot.lend(Box::new(work(1, false)))).turns == 0;
        assert!(stays(&slot), "none has come");
        drop(Host::open(slot.clone()));
        assert!(!slot.is_open() && stays(&slot));
        // The shard leaves before it has looked.
        let host = Host::open(slot.clone());
        let owner = {
            let slot = slot.clone();
            std::thread::spawn(move || counts(slot.lend(Box::new(work(1, false)))).turns)
        };
        while slot.lock().lent.is_none() {
            std::thread::yield_now();
        }
        drop(host);
        assert_eq!(owner.join().unwrap(), 0);
    }
}
