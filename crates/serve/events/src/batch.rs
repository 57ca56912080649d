//! Events between engine threads and the bus: encoded, in batches, in bounded queues.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use bytes::Bytes;
use slipstream_base::RankId;
use slipstream_base::sync::lock;
use slipstream_base::width::to_u32;
use tokio::sync::Notify;

use crate::zmtp;

/// Kind of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EventKind {
    /// A forward pass.
    Fpm,
    /// Changes of a KV cache.
    Kv,
}

/// A batch is closed at this size, so that a full queue drops little at once.
const BATCH_BYTES: usize = 64 << 10;

/// Destination of a rank's events: formatted once, in every form that a bus may need.
#[derive(Clone, Debug)]
pub struct RankTopics {
    /// The rank.
    pub rank: RankId,
    /// The worker's name in records.
    pub worker_id: String,
    /// Subject of its forward-pass metrics.
    pub fpm: Topic,
    /// Subject of its KV events.
    pub kv: Topic,
}

/// A subject, with its encoded forms.
#[derive(Clone, Debug)]
pub struct Topic {
    /// For NATS and people: `slipstream.fpm.w0.0`.
    pub subject: Box<str>,
    /// For ZeroMQ.
    pub topic: Bytes,
    /// The ZMTP frame of `topic`, followed by more frames.
    pub(crate) frame: Box<[u8]>,
}

impl Topic {
    /// A topic whose ZeroMQ form differs from its subject.
    ///
    /// # Errors
    /// If NATS would reject the subject.
    pub(crate) fn new(subject: &str, topic: &[u8]) -> Result<Topic, InvalidSubject> {
        let is_token = |token: &str| !token.is_empty() && !token.contains([' ', '\t', '\r', '\n']);
        if !subject.split('.').all(is_token) {
            return Err(InvalidSubject);
        }
        let mut frame = Vec::new();
        zmtp::put_frame(&mut frame, topic, true);
        Ok(Topic {
            subject: subject.into(),
            topic: Bytes::copy_from_slice(topic),
            frame: frame.into(),
        })
    }
}

/// A subject with an empty token or whitespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InvalidSubject;

/// Position of an event in a batch. The batch holds it as ZMTP frames: topic, sequence (8 bytes,
/// big-endian), payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventPosition {
    /// Index of the rank among those of the process.
    pub rank: u32,
    /// Number among the rank's events of this kind.
    pub sequence: u64,
    start: u32,
    payload: u32,
    end: u32,
}

/// Events of one kind from one engine thread, in order.
#[derive(Clone, Debug)]
pub struct Batch {
    /// Their kind.
    pub kind: EventKind,
    /// The events.
    pub records: Vec<EventPosition>,
    bytes: Bytes,
}

impl Batch {
    /// All events as ZMTP frames.
    pub(crate) fn wire(&self) -> &Bytes {
        &self.bytes
    }

    /// One event as ZMTP frames.
    pub(crate) fn record_wire(&self, record: &EventPosition) -> Bytes {
        self.bytes.slice(record.start as usize..record.end as usize)
    }

    /// The payload of an event.
    pub fn payload(&self, record: &EventPosition) -> Bytes {
        self.bytes
            .slice(record.payload as usize..record.end as usize)
    }
}

/// Counters of a queue.
#[derive(Debug, Default)]
pub struct QueueCounters {
    /// Events added.
    pub queued: AtomicU64,
    /// Events dropped because the queue was full.
    pub dropped: AtomicU64,
}

/// Queued events of one kind. Beyond `bytes_max` the oldest batch is dropped; the newest stays,
/// whatever its size.
///
/// Events are encoded in place, under the lock: about 50 ns for a pass. The bus takes the lock to
/// remove a batch. The figures of `benches/events.rs` include this cost.
#[derive(Debug)]
pub(crate) struct Lane {
    kind: EventKind,
    bytes_max: usize,
    inner: Mutex<Inner>,
    pub(crate) counters: QueueCounters,
}

#[derive(Debug, Default)]
struct Inner {
    open: Open,
    closed: VecDeque<Batch>,
    closed_bytes: usize,
    /// Memory for the next open batch.
    spare: Open,
}

/// A batch in progress.
#[derive(Debug, Default)]
struct Open {
    bytes: Vec<u8>,
    records: Vec<EventPosition>,
}

impl Lane {
    fn new(kind: EventKind, bytes_max: usize) -> Lane {
        Lane {
            kind,
            bytes_max,
            inner: Mutex::default(),
            counters: QueueCounters::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // No code panics while it is held.
        lock(&self.inner)
    }

    /// Adds an event whose payload `encode` appends; appends to `lost` the ranks (with repeats)
    /// whose events were dropped for it.
    pub(crate) fn put(
        &self,
        rank: u32,
        sequence: u64,
        topic_frame: &[u8],
        encode: impl FnOnce(&mut Vec<u8>),
        lost: &mut Vec<u32>,
    ) {
        let mut inner = self.lock();
        let inner = &mut *inner;
        let bytes = &mut inner.open.bytes;
        if bytes.capacity() == 0 {
            // A batch is closed when full, so a pass fits behind the last one.
            bytes.reserve(BATCH_BYTES + 4096);
        }
        let start = bytes.len();
        bytes.extend_from_slice(topic_frame);
        bytes.extend_from_slice(&[1, 8]); // a short frame, followed by more
        bytes.extend_from_slice(&sequence.to_be_bytes());
        // A frame in its long form; its length is filled in below.
        bytes.extend_from_slice(&[2, 0, 0, 0, 0, 0, 0, 0, 0]);
        let payload = bytes.len();
        encode(bytes);
        let end = bytes.len();
        let len = (end - payload) as u64;
        bytes[payload - 8..payload].copy_from_slice(&len.to_be_bytes());
        inner.open.records.push(EventPosition {
            rank,
            sequence,
            start: to_u32(start),
            payload: to_u32(payload),
            end: to_u32(end),
        });
        self.counters.queued.fetch_add(1, Ordering::Relaxed);
        if end >= BATCH_BYTES {
            let full = std::mem::take(&mut inner.open);
            inner.closed_bytes += full.bytes.len();
            inner.closed.push_back(Batch {
                kind: self.kind,
                records: full.records,
                bytes: full.bytes.into(),
            });
        }
        let newest = usize::from(inner.open.records.is_empty());
        while inner.closed_bytes + inner.open.bytes.len() > self.bytes_max
            && inner.closed.len() > newest
        {
            let oldest = inner.closed.pop_front().expect("there is one");
            inner.closed_bytes -= oldest.bytes.len();
            let dropped = oldest.records.len() as u64;
            self.counters.dropped.fetch_add(dropped, Ordering::Relaxed);
            lost.extend(oldest.records.iter().map(|record| record.rank));
        }
    }

    /// Takes the oldest batch.
    pub(crate) fn take(&self) -> Option<Batch> {
        let mut open = {
            let mut inner = self.lock();
            if let Some(batch) = inner.closed.pop_front() {
                inner.closed_bytes -= batch.bytes.len();
                return Some(batch);
            }
            if inner.open.records.is_empty() {
                return None;
            }
            let spare = std::mem::take(&mut inner.spare);
            std::mem::replace(&mut inner.open, spare)
        };
        // Copied, so that a consumer that keeps it (for replay) keeps only its bytes, and this
        // memory, which is in the engine thread's cache, is reused.
        let batch = Batch {
            kind: self.kind,
            records: open.records.clone(),
            bytes: Bytes::copy_from_slice(&open.bytes),
        };
        open.bytes.clear();
        open.records.clear();
        self.lock().spare = open;
        Some(batch)
    }

    /// Whether less than half of it is in use.
    pub(crate) fn has_room(&self) -> bool {
        let inner = self.lock();
        inner.closed_bytes + inner.open.bytes.len() < self.bytes_max / 2
    }
}

/// The queues of one engine thread.
#[derive(Debug)]
pub(crate) struct ThreadQueue {
    pub(crate) fpm: Lane,
    pub(crate) kv: Lane,
    /// Wakes the bus's thread.
    pub(crate) bell: Arc<Notify>,
}

impl ThreadQueue {
    pub(crate) fn new(bytes_max: usize, bell: Arc<Notify>) -> ThreadQueue {
        ThreadQueue {
            fpm: Lane::new(EventKind::Fpm, bytes_max),
            kv: Lane::new(EventKind::Kv, bytes_max),
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
        let encode = |out: &mut Vec<u8>| out.extend_from_slice(payload);
        lane.put(7, sequence, &[1, 1, b't'], encode, &mut lost);
        lost
    }

    #[test]
    fn events_come_out_in_order_as_frames() {
        let lane = Lane::new(EventKind::Fpm, 1 << 20);
        put(&lane, 5, b"five");
        put(&lane, 6, &[6; 300]);
        let batch = lane.take().unwrap();
        assert!(lane.take().is_none());
        assert_eq!(batch.payload(&batch.records[0]), b"five"[..]);
        assert_eq!(batch.payload(&batch.records[1]), [6; 300][..]);
        let mut wire = bytes::BytesMut::from(&batch.wire()[..]);
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
        let lane = Lane::new(EventKind::Kv, max);
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
        // The newest events are left, without a gap.
        assert_eq!(kept, (dropped..1000).collect::<Vec<_>>());
        assert!(dropped > 0 && lane.has_room());
    }

    #[test]
    fn an_event_larger_than_the_queue_goes_through_until_a_newer_one_comes() {
        let lane = Lane::new(EventKind::Kv, BATCH_BYTES);
        let large = vec![0; 3 * BATCH_BYTES];
        put(&lane, 0, b"small");
        put(&lane, 1, &large);
        let sequences = |batch: Batch| batch.records.iter().map(|r| r.sequence).collect::<Vec<_>>();
        assert_eq!(sequences(lane.take().unwrap()), [0, 1]);
        put(&lane, 2, &large);
        assert_eq!(put(&lane, 3, b"small"), [7]);
        assert_eq!(lane.counters.dropped.load(Ordering::Relaxed), 1);
        assert_eq!(sequences(lane.take().unwrap()), [3]);
    }

    #[test]
    fn memory_is_used_again() {
        let lane = Lane::new(EventKind::Fpm, 1 << 20);
        put(&lane, 0, b"first");
        lane.take().unwrap();
        put(&lane, 1, b"second");
        lane.take().unwrap();
        let spare = lane.lock().spare.bytes.as_ptr();
        put(&lane, 2, b"third");
        assert_eq!(lane.take().unwrap().payload(&lane_record()), b"third"[..]);
        put(&lane, 3, b"fourth");
        assert_eq!(lane.lock().open.bytes.as_ptr(), spare);
    }

    /// Position of a five-byte record in a batch of its own.
    fn lane_record() -> EventPosition {
        EventPosition {
            rank: 7,
            sequence: 2,
            start: 0,
            payload: 3 + 10 + 9,
            end: 3 + 10 + 9 + 5,
        }
    }
}
