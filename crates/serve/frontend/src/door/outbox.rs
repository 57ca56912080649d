//! Entries of requests that shards hand over to a thread, which writes or sends them. A shard never waits: an entry for
//! which there is no room is dropped and counted.

use std::io;
use std::sync::atomic::{
    AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use slipstream_base::sync::unpoisoned;

use crate::door::access::Entry;

/// Entries that were handed over, and those that were not.
#[derive(Debug, Default)]
pub(crate) struct Handed {
    queued: AtomicU64,
    /// The queue was full.
    crowded: AtomicU64,
}

impl Handed {
    /// Entries that were dropped because the queue was full.
    pub(crate) fn crowded(&self) -> u64 {
        self.crowded.load(Relaxed)
    }

    /// Waits until `settled` entries, those that the thread is done with, are all that were handed over before;
    /// `time` at most. Returns whether they are.
    pub(crate) fn await_settled(&self, time: Duration, settled: impl Fn() -> u64) -> bool {
        let (end, queued) = (Instant::now() + time, self.queued.load(Acquire));
        let done = || settled() >= queued;
        while !done() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
        }
        done()
    }
}

/// The queue and the thread.
pub(crate) struct Outbox {
    send: Option<SyncSender<Box<Entry>>>,
    handed: Arc<Handed>,
    /// A message once the thread has ended.
    ended: Mutex<Receiver<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Outbox {
    /// Starts the thread `name`, which runs `run` until the queue of at most `capacity` entries is closed and empty.
    ///
    /// # Errors
    /// The thread cannot be made.
    pub(crate) fn start(
        name: &str,
        capacity: usize,
        handed: Arc<Handed>,
        run: impl FnOnce(&Receiver<Box<Entry>>) + Send + 'static,
    ) -> io::Result<Outbox> {
        let (send, receive) = sync_channel(capacity);
        let (say_ended, ended) = sync_channel(1);
        let thread = std::thread::Builder::new()
            .name(name.into())
            .spawn(move || {
                run(&receive);
                let _ = say_ended.send(());
            })?;
        Ok(Outbox {
            send: Some(send),
            handed,
            ended: Mutex::new(ended),
            thread: Some(thread),
        })
    }

    /// Hands an entry over, if there is room.
    pub(crate) fn send(&self, entry: Box<Entry>) {
        let sent = self.send.as_ref().map(|send| send.try_send(entry));
        let count = match sent {
            Some(Ok(())) => &self.handed.queued,
            _ => &self.handed.crowded,
        };
        count.fetch_add(1, Release);
    }

    /// Closes the queue and waits for the thread, `time` at most: what it writes to must not hold the exit up.
    /// Returns whether it has ended.
    pub(crate) fn close(&mut self, time: Duration) -> bool {
        self.send = None;
        if let Some(thread) = &self.thread {
            thread.thread().unpark(); // it may pause
        }
        let ended = unpoisoned(self.ended.get_mut());
        if ended.recv_timeout(time) == Err(RecvTimeoutError::Timeout) {
            return false;
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        true
    }
}
