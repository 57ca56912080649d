//! Events on their way from engine threads to the bus: encoded, in batches, in bounded queues.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::{Bytes, BytesMut};
use slipstream_base::RankId;
use tokio::sync::Notify;

use crate::zmtp;

/// What an event tells of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A forward pass.
    Fpm,
    /// Changes of a KV cache.
    Kv,
}

/// A batch is closed at this size, so that a full queue drops little at once.
const BATCH_BYTES: usize = 64 << 10;

/// Where a rank's events go: formatted once, in every form that a bus may want.
#[derive(Clone, Debug)]
pub struct RankTopics {
    /// Whose.
    pub rank: RankId,
    /// The worker's name in records.
    pub worker_id: String,
    /// Subject of its forward-pass metrics.
    pub fpm: Topic,
    /// Subject of its KV events.
    pub kv: Topic,
}

/// A subject, and what of it is made once.
#[derive(Clone, Debug)]
pub struct Topic {
    /// As NATS and people know it: `slipstream.fpm.w0.0`.
    pub subject: async_nats::Subject,
    /// As ZeroMQ knows it.
    pub topic: Bytes,
    /// The ZMTP frame of `topic`, which more frames follow.
    pub(crate) frame: Box<[u8]>,
}

impl Topic {
    /// A topic whose ZeroMQ form is another than its subject.
    ///
    /// # Errors
    /// If NATS would not take the subject.
    pub(crate) fn new(subject: &str, topic: &[u8]) -> Result<Topic, async_nats::SubjectError> {
        let mut frame = Vec::new();
        zmtp::put_frame(&mut frame, topic, true);
        Ok(Topic {
            subject: async_nats::Subject::validated(subject)?,
            topic: Bytes::copy_from_slice(topic),
            frame: frame.into(),
        })
    }
}

/// Where in a batch an event lies. The batch holds it as ZMTP frames: topic, sequence (8 bytes,
/// big-endian), payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// Index of the rank among the process's.
    pub rank: u32,
    /// Number among the rank's events of this kind.
    pub sequence: u64,
    start: u32,
    frames: u32,
    payload: u32,
    end: u32,
}

/// Events of one kind from one engine thread, in order.
#[derive(Clone, Debug)]
pub struct Batch {
    /// Of what.
    pub kind: Kind,
    /// The events.
    pub records: Vec<Record>,
    bytes: Bytes,
}

impl Batch {
    /// All events as ZMTP frames.
    pub(crate) fn wire(&self) -> &Bytes {
        &self.bytes
    }

    /// One event as ZMTP frames.
    pub(crate) fn record_wire(&self, record: &Record) -> Bytes {
        self.bytes.slice(record.start as usize..record.end as usize)
    }

    /// The frames of an event that follow its topic.
    pub(crate) fn after_topic(&self, record: &Record) -> Bytes {
        self.bytes
            .slice(record.frames as usize..record.end as usize)
    }

    /// The payload of an event.
    pub fn payload(&self, record: &Record) -> Bytes {
        self.bytes
            .slice(record.payload as usize..record.end as usize)
    }
}

/// What a queue has dropped and passed on.
#[derive(Debug, Default)]
pub struct QueueCounters {
    /// Events put in.
    pub queued: AtomicU64,
    /// Events dropped as the queue was full.
    pub dropped: AtomicU64,
}

/// Events of one kind that wait for the bus. Beyond `bytes_max` the oldest batch is dropped.
///
/// The lock is held to copy an encoded event (some 450 bytes), and by the bus to take a batch; it
/// costs what an uncontended one does, which `benches/events.rs` has in its figures.
#[derive(Debug)]
pub(crate) struct Lane {
    kind: Kind,
    bytes_max: usize,
    inner: Mutex<Inner>,
    pub(crate) counters: QueueCounters,
}

#[derive(Debug, Default)]
struct Inner {
    open: BytesMut,
    records: Vec<Record>,
    closed: VecDeque<Batch>,
    closed_bytes: usize,
}

impl Lane {
    fn new(kind: Kind, bytes_max: usize) -> Lane {
        Lane {
            kind,
            bytes_max,
            inner: Mutex::default(),
            counters: QueueCounters::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Nothing panics while it is held.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts an event in; adds to `lost` the ranks (with repeats) whose events were dropped for it.
    pub(crate) fn put(
        &self,
        rank: u32,
        sequence: u64,
        topic_frame: &[u8],
        payload: &[u8],
        lost: &mut Vec<u32>,
    ) {
        let mut inner = self.lock();
        let inner = &mut *inner;
        let len = topic_frame.len() + 10 + 9 + payload.len();
        if inner.open.len() + len > BATCH_BYTES {
            inner.close(self.kind);
        }
        while inner.closed_bytes + inner.open.len() + len > self.bytes_max {
            if inner.closed.is_empty() {
                inner.close(self.kind);
            }
            let Some(oldest) = inner.closed.pop_front() else {
                break; // a single event that is larger than the queue goes through it alone
            };
            inner.closed_bytes -= oldest.bytes.len();
            let dropped = oldest.records.len() as u64;
            self.counters.dropped.fetch_add(dropped, Ordering::Relaxed);
            lost.extend(oldest.records.iter().map(|record| record.rank));
        }
        // Batches that leave early share an allocation, so that whoever keeps one (for replay)
        // keeps little more than its bytes.
        if inner.open.capacity() - inner.open.len() < len {
            inner.open.reserve(len.max(BATCH_BYTES));
        }
        let start = inner.open.len();
        inner.open.extend_from_slice(topic_frame);
        let frames = inner.open.len();
        inner.open.extend_from_slice(&[1, 8]); // a short frame, which more follow
        inner.open.extend_from_slice(&sequence.to_be_bytes());
        if let Ok(len) = u8::try_from(payload.len()) {
            inner.open.extend_from_slice(&[0, len]);
        } else {
            inner.open.extend_from_slice(&[2]);
            inner
                .open
                .extend_from_slice(&(payload.len() as u64).to_be_bytes());
        }
        let at = inner.open.len();
        inner.open.extend_from_slice(payload);
        inner.records.push(Record {
            rank,
            sequence,
            start: start as u32,
            frames: frames as u32,
            payload: at as u32,
            end: inner.open.len() as u32,
        });
        self.counters.queued.fetch_add(1, Ordering::Relaxed);
    }

    /// Takes the oldest batch.
    pub(crate) fn take(&self) -> Option<Batch> {
        let mut inner = self.lock();
        if inner.closed.is_empty() {
            inner.close(self.kind);
        }
        let batch = inner.closed.pop_front()?;
        inner.closed_bytes -= batch.bytes.len();
        Some(batch)
    }

    /// Whether less than half of it is in use.
    pub(crate) fn has_room(&self) -> bool {
        let inner = self.lock();
        inner.closed_bytes + inner.open.len() < self.bytes_max / 2
    }
}

impl Inner {
    fn close(&mut self, kind: Kind) {
        if self.records.is_empty() {
            return;
        }
        // The buffer is used again once the bus is done with what is split off.
        let bytes = self.open.split().freeze();
        let next = Vec::with_capacity(self.records.len());
        self.closed_bytes += bytes.len();
        self.closed.push_back(Batch {
            kind,
            records: std::mem::replace(&mut self.records, next),
            bytes,
        });
    }
}

/// The queues of one engine thread.
#[derive(Debug)]
pub(crate) struct ThreadQueue {
    pub(crate) fpm: Lane,
    pub(crate) kv: Lane,
    /// Wakes the bus.
    pub(crate) bell: Arc<Notify>,
}

impl ThreadQueue {
    pub(crate) fn new(bytes_max: usize, bell: Arc<Notify>) -> ThreadQueue {
        ThreadQueue {
            fpm: Lane::new(Kind::Fpm, bytes_max),
            kv: Lane::new(Kind::Kv, bytes_max),
            bell,
        }
    }

    pub(crate) fn lanes(&self) -> [&Lane; 2] {
        [&self.kv, &self.fpm]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(lane: &Lane, sequence: u64, payload: &[u8]) -> Vec<u32> {
        let mut lost = Vec::new();
        lane.put(7, sequence, &[1, 1, b't'], payload, &mut lost);
        lost
    }

    #[test]
    fn events_come_out_in_order_as_frames() {
        let lane = Lane::new(Kind::Fpm, 1 << 20);
        put(&lane, 5, b"five");
        put(&lane, 6, &[6; 300]);
        let batch = lane.take().unwrap();
        assert!(lane.take().is_none());
        assert_eq!(batch.payload(&batch.records[0]), b"five"[..]);
        assert_eq!(batch.payload(&batch.records[1]), [6; 300][..]);
        let mut wire = BytesMut::from(&batch.wire()[..]);
        let mut frames = Vec::new();
        while let Some(frame) = zmtp::take_frame(&mut wire, 1000).unwrap() {
            frames.push((frame.body.to_vec(), frame.more));
        }
        let expected = [
            (b"t".to_vec(), true),
            (5u64.to_be_bytes().to_vec(), true),
            (b"five".to_vec(), false),
            (b"t".to_vec(), true),
            (6u64.to_be_bytes().to_vec(), true),
            (vec![6; 300], false),
        ];
        assert_eq!(frames, expected);
        assert_eq!(
            batch.record_wire(&batch.records[0]).len() + batch.record_wire(&batch.records[1]).len(),
            batch.wire().len()
        );
    }

    #[test]
    fn a_full_queue_drops_the_oldest_and_says_whose() {
        let max = 4 * BATCH_BYTES;
        let lane = Lane::new(Kind::Kv, max);
        let mut lost = Vec::new();
        for sequence in 0..1000 {
            lost.extend(put(&lane, sequence, &[0; 1000]));
        }
        let (mut kept, mut bytes) = (Vec::new(), 0);
        while let Some(batch) = lane.take() {
            bytes += batch.wire().len();
            kept.extend(batch.records.iter().map(|record| record.sequence));
        }
        assert!(bytes <= max);
        let dropped = lane.counters.dropped.load(Ordering::Relaxed);
        assert_eq!(lost.len() as u64, dropped);
        assert!(lost.iter().all(|&rank| rank == 7));
        // What is left is the newest, without a hole.
        assert_eq!(kept, (dropped..1000).collect::<Vec<_>>());
        assert!(dropped > 0 && lane.has_room());
    }

    #[test]
    fn an_event_larger_than_the_queue_goes_through_alone() {
        let lane = Lane::new(Kind::Kv, BATCH_BYTES);
        put(&lane, 0, b"small");
        put(&lane, 1, &vec![0; 3 * BATCH_BYTES]);
        let batch = lane.take().unwrap();
        assert_eq!(batch.records.len(), 1);
        assert_eq!(batch.records[0].sequence, 1);
        assert_eq!(lane.counters.dropped.load(Ordering::Relaxed), 1);
        put(&lane, 2, b"small");
        assert_eq!(lane.take().unwrap().records[0].sequence, 2);
    }
}
