//! The tasks of the threads of simulated processes.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Wake, Waker};

use tokio::task::LocalSet;

/// Wakes the simulation, and marks whose tasks have to be polled.
struct Flag {
    woken: AtomicBool,
    driver: Driver,
}

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.woken.store(true, Ordering::Relaxed);
        let driver = self.driver.lock().expect("nothing panics with it").take();
        if let Some(driver) = driver {
            driver.wake();
        }
    }
}

/// The tasks of one thread of a process.
pub(crate) struct Group {
    pub(crate) local: LocalSet,
    flag: Arc<Flag>,
    waker: Waker,
}

/// Wakes the simulation once.
pub(crate) type Driver = Arc<Mutex<Option<Waker>>>;

impl Group {
    pub(crate) fn new(driver: &Driver) -> Group {
        let flag = Arc::new(Flag {
            woken: AtomicBool::new(true),
            driver: driver.clone(),
        });
        Group {
            local: LocalSet::new(),
            waker: Waker::from(flag.clone()),
            flag,
        }
    }

    /// Has its tasks polled.
    pub(crate) fn wake(&self) {
        self.waker.wake_by_ref();
    }

    pub(crate) fn is_woken(&self) -> bool {
        self.flag.woken.load(Ordering::Relaxed)
    }

    /// Runs the tasks that were woken.
    pub(crate) fn poll(&mut self) {
        self.flag.woken.store(false, Ordering::Relaxed);
        let mut cx = Context::from_waker(&self.waker);
        // Ready if there is no task at the moment.
        let _ = Pin::new(&mut self.local).poll(&mut cx);
    }
}
