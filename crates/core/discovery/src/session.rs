//! A backend on a thread of its own, and entries as typed records.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;
use slipstream_base::SimTime;
use slipstream_base::width::nanos;

use crate::{Backend, BackendError, Change, Waker};

/// How long a start waits for its record to be published.
const START_MAX: Duration = Duration::from_secs(10);
/// How long dropping a session waits for its thread, which removes the record.
const STOP_MAX: Duration = Duration::from_secs(1);
/// Renewals per lease: two may fail.
const RENEWALS: u32 = 3;
/// A backend that failed is asked again after this.
const RETRY_NS: u64 = 500_000_000;
/// Time between two polls, so that a burst of changes is one.
const POLL_MIN: Duration = Duration::from_millis(10);

/// A record that a process publishes.
pub trait Record: Serialize + DeserializeOwned + Clone + PartialEq + Send + 'static {
    /// The key of its entry, which no other record has: letters, digits, `-` and `_`.
    fn key(&self) -> String;

    /// Checks that it is usable.
    ///
    /// # Errors
    ///
    /// Why it is not, for people.
    fn check(&self) -> Result<(), String> {
        Ok(())
    }
}

/// An event that a session reports.
#[derive(Debug)]
pub enum SessionEvent<R> {
    /// A record was published.
    Appeared(R),
    /// A record was deleted, its lease ended, or another one replaces it.
    Vanished(R),
    /// Something that is no record; reported once.
    Invalid {
        /// Where it is.
        name: String,
        /// Why it is invalid.
        reason: String,
    },
    /// Every record that was there at the start was reported, or the backend cannot be read.
    Synced,
    /// The backend cannot be used; reported once per error. Records that were
    /// reported stay valid.
    Failed(BackendError),
    /// It can be used again.
    Recovered,
}

/// Why a session did not start.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// The record was not published.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// The backend does not answer.
    #[error(
        "publishing takes longer than {} s; check that the discovery folder's file system, or etcd, answers",
        START_MAX.as_secs()
    )]
    Stalled,
    /// No thread.
    #[error("cannot start the discovery thread; raise ulimit -u")]
    Thread(#[source] io::Error),
}

/// Publishes a record for as long as it lives, and reports those of others.
pub struct Session {
    is_stopped: Arc<AtomicBool>,
    waker: Waker,
    /// Disconnected when the thread has ended.
    ended: Receiver<()>,
}

impl Session {
    /// Starts a thread that publishes a record for a lease, if there is one, renews it, and calls
    /// `on_event`. A handler that blocks delays renewals, so it waits for nothing that may stall for a
    /// lease.
    ///
    /// # Errors
    ///
    /// [`SessionError`]
    pub fn start<R: Record>(
        thread: &str,
        backend: impl Backend + 'static,
        publish: Option<(R, Duration)>,
        on_event: impl FnMut(SessionEvent<R>) + Send + 'static,
    ) -> Result<Session, SessionError> {
        let is_stopped = Arc::new(AtomicBool::new(false));
        let waker = backend.waker();
        let (published, is_published) = sync_channel(1);
        let (end, ended) = sync_channel(0);
        let driver = Driver {
            backend,
            is_stopped: Arc::clone(&is_stopped),
            records: BTreeMap::new(),
            on_event,
            failure: None,
        };
        std::thread::Builder::new()
            .name(thread.into())
            .spawn(move || driver.run(publish, &published, end))
            .map_err(SessionError::Thread)?;
        let session = Session {
            is_stopped,
            waker,
            ended,
        };
        match is_published.recv_timeout(START_MAX) {
            Ok(Ok(())) => Ok(session),
            Ok(Err(error)) => Err(error.into()),
            Err(RecvTimeoutError::Timeout) => Err(SessionError::Stalled),
            Err(RecvTimeoutError::Disconnected) => {
                unreachable!("the thread sends before it ends")
            }
        }
    }

    /// Removes the record and ends the thread, without waiting for either.
    pub fn stop(&self) {
        self.is_stopped.store(true, Ordering::Release);
        (self.waker)();
    }
}

impl Drop for Session {
    /// Waits for the thread for a second at most: a file system that does not answer keeps no
    /// process from ending. The record's lease ends then.
    fn drop(&mut self) {
        self.stop();
        let _ = self.ended.recv_timeout(STOP_MAX);
    }
}

struct Driver<B, R, F> {
    backend: B,
    is_stopped: Arc<AtomicBool>,
    /// By key.
    records: BTreeMap<String, R>,
    on_event: F,
    /// The error that was reported last, while the backend fails.
    failure: Option<String>,
}

impl<B: Backend, R: Record, F: FnMut(SessionEvent<R>)> Driver<B, R, F> {
    fn run(
        mut self,
        publish: Option<(R, Duration)>,
        published: &SyncSender<Result<(), BackendError>>,
        // Dropped at the end.
        _end: SyncSender<()>,
    ) {
        let own = publish.map(|(record, lease)| (record.key(), record, lease));
        if let Some((key, record, lease)) = &own {
            let value = serde_json::to_string(record).expect("a record is plain data");
            if let Err(error) = self.backend.put(now(), key, &value, *lease) {
                let _ = published.send(Err(error));
                return;
            }
        }
        if published.send(Ok(())).is_err() {
            // `Session::start` has given up waiting.
            self.is_stopped.store(true, Ordering::Release);
        }
        let key = own.as_ref().map(|(key, ..)| key.as_str());
        let renewal_ns = own
            .as_ref()
            .map_or(u64::MAX, |(.., lease)| nanos(*lease) / u64::from(RENEWALS));
        self.watch(key, renewal_ns.max(1));
        if let Some(key) = key {
            // If it cannot be removed, its lease ends it.
            let _ = self.backend.delete(key);
        }
    }

    fn watch(&mut self, key: Option<&str>, renewal_ns: u64) {
        let mut changes = Vec::new();
        let mut renew_at = now() + renewal_ns;
        let mut is_synced = false;
        while !self.is_stopped.load(Ordering::Acquire) {
            let mut renewed = Ok(());
            if let Some(key) = key
                && now() >= renew_at
            {
                renew_at = now() + renewal_ns;
                renewed = self.backend.renew(now(), key);
            }
            let polled = self.backend.poll(now(), &mut changes);
            let next = polled.as_ref().map_or(now() + RETRY_NS, |&next| next);
            self.report_failure(renewed.and(polled.map(|_| ())));
            for change in changes.drain(..) {
                self.apply(change);
            }
            if !is_synced {
                is_synced = true;
                (self.on_event)(SessionEvent::Synced);
            }
            let until = if key.is_some() {
                next.min(renew_at)
            } else {
                next
            };
            if self.is_stopped.load(Ordering::Acquire) {
                break;
            }
            self.backend.wait(until - now());
            if !self.is_stopped.load(Ordering::Acquire) {
                std::thread::sleep(POLL_MIN);
            }
        }
    }

    fn apply(&mut self, change: Change) {
        match change {
            Change::Put { key, value } => match parse::<R>(&key, &value) {
                Ok(record) => self.put(key, record),
                Err(reason) => (self.on_event)(SessionEvent::Invalid { name: key, reason }),
            },
            Change::Deleted { key } => {
                if let Some(record) = self.records.remove(&key) {
                    (self.on_event)(SessionEvent::Vanished(record));
                }
            }
            Change::Invalid { name, reason } => {
                (self.on_event)(SessionEvent::Invalid { name, reason });
            }
        }
    }

    fn put(&mut self, key: String, record: R) {
        match self.records.insert(key, record.clone()) {
            Some(old) if old == record => return,
            Some(old) => (self.on_event)(SessionEvent::Vanished(old)),
            None => {}
        }
        (self.on_event)(SessionEvent::Appeared(record));
    }

    fn report_failure(&mut self, result: Result<(), BackendError>) {
        match result {
            Ok(()) => {
                if self.failure.take().is_some() {
                    (self.on_event)(SessionEvent::Recovered);
                }
            }
            Err(error) => {
                let text = error.to_string();
                if self.failure.as_ref() != Some(&text) {
                    self.failure = Some(text);
                    (self.on_event)(SessionEvent::Failed(error));
                }
            }
        }
    }
}

fn parse<R: Record>(key: &str, value: &str) -> Result<R, String> {
    let record: R = serde_json::from_str(value).map_err(|error| error.to_string())?;
    if record.key() != key {
        return Err(format!("the key of this record is {}", record.key()));
    }
    record.check()?;
    Ok(record)
}

/// Time since the first call in this process.
fn now() -> SimTime {
    static ORIGIN: OnceLock<Instant> = OnceLock::new();
    SimTime::ZERO + nanos(ORIGIN.get_or_init(Instant::now).elapsed())
}

#[cfg(test)]
mod tests;
