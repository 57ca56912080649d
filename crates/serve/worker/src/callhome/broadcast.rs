//! KV deltas and readiness, from engine threads to every connection that wants them.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Waker;

use slipstream_base::sync::lock;
use slipstream_base::{ForwardPassMetrics, KvDelta, WorkerId};
use slipstream_planes::EventSink;
use slipstream_planes::bell::TaskBell;
use slipstream_planes::wire;

/// Bytes of KV deltas that may wait for one connection. A subscriber that is further behind loses those
/// that wait, and gets snapshots instead.
const WAITING_BYTES_MAX: usize = 32 << 20;

/// Bytes that an engine thread gathers before it hands them over within a round.
const GATHERED_BYTES: usize = 256 << 10;

/// Handle of a subscriber. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub(crate) struct EventBroadcast {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    /// Locked once per round of an engine thread that has something to publish, and when connections
    /// come and go.
    subscribers: Mutex<Vec<Arc<Subscriber>>>,
    /// Those that want KV deltas: without any, none is encoded.
    kv_wanted: AtomicUsize,
    overflows: AtomicU64,
}

#[derive(Debug, Default)]
struct Subscriber {
    waiting: Mutex<Waiting>,
    wants_kv: AtomicBool,
    /// KV deltas were lost since the last look.
    lost: AtomicBool,
    bell: TaskBell,
    /// For a simulator: as if as many bytes waited as may.
    #[cfg(feature = "sim")]
    full: AtomicBool,
}

/// Whole frames.
#[derive(Debug, Default)]
struct Waiting {
    /// Readiness, and the end of the process. Nothing replaces these frames, so none is dropped. An engine
    /// reports at most twice, and a process ends once.
    states: Vec<u8>,
    kv: Vec<u8>,
}

impl EventBroadcast {
    /// Adds a subscriber. Readiness comes from now on, KV deltas from [`Subscription::want_kv`] on.
    pub(crate) fn subscribe(&self) -> Subscription {
        let subscriber = Arc::<Subscriber>::default();
        lock(&self.shared.subscribers).push(Arc::clone(&subscriber));
        Subscription {
            broadcast: self.clone(),
            subscriber,
        }
    }

    /// Publishes whether `worker` takes requests.
    pub(crate) fn on_ready(&self, worker: WorkerId, ready: bool) {
        let mut bytes = Vec::new();
        wire::encode_ready(worker, ready, &mut bytes);
        self.publish_state(&bytes);
    }

    /// Asks all shards for no more requests.
    pub(crate) fn on_stopping(&self) {
        let mut bytes = Vec::new();
        wire::encode_bare(wire::FrameKind::Bye, &mut bytes);
        self.publish_state(&bytes);
    }

    /// Every subscriber to KV deltas is too far behind now, and for the next ones.
    #[cfg(feature = "sim")]
    pub(crate) fn lose(&self) {
        for subscriber in lock(&self.shared.subscribers).iter() {
            if subscriber.wants_kv.load(Ordering::Acquire) {
                subscriber.lose_kv(&mut lock(&subscriber.waiting));
                subscriber.bell.ring();
            }
            subscriber.full.store(true, Ordering::Relaxed);
        }
    }

    /// Bytes of KV deltas that wait for a connection's task.
    #[cfg(feature = "sim")]
    pub(crate) fn kv_waiting(&self) -> usize {
        let subscribers = lock(&self.shared.subscribers);
        subscribers
            .iter()
            .map(|of| lock(&of.waiting).kv.len())
            .sum()
    }

    /// Times that a subscriber was too far behind.
    pub(crate) fn overflows(&self) -> u64 {
        self.shared.overflows.load(Ordering::Relaxed)
    }

    fn publish_state(&self, bytes: &[u8]) {
        for subscriber in lock(&self.shared.subscribers).iter() {
            lock(&subscriber.waiting).states.extend_from_slice(bytes);
            subscriber.bell.ring();
        }
    }

    fn publish_kv(&self, bytes: &[u8]) {
        for subscriber in lock(&self.shared.subscribers).iter() {
            if !subscriber.wants_kv.load(Ordering::Acquire) {
                continue;
            }
            let mut waiting = lock(&subscriber.waiting);
            #[cfg(feature = "sim")]
            let full = subscriber.full.swap(false, Ordering::Relaxed);
            #[cfg(not(feature = "sim"))]
            let full = false;
            if full || waiting.kv.len() + bytes.len() > WAITING_BYTES_MAX {
                subscriber.lose_kv(&mut waiting);
                self.shared.overflows.fetch_add(1, Ordering::Relaxed);
            } else {
                waiting.kv.extend_from_slice(bytes);
            }
            drop(waiting);
            subscriber.bell.ring();
        }
    }
}

/// One connection's subscription. Dropping it ends it.
pub(crate) struct Subscription {
    broadcast: EventBroadcast,
    subscriber: Arc<Subscriber>,
}

impl Subscription {
    /// KV deltas are wanted as well.
    pub(crate) fn want_kv(&self) {
        if !self.subscriber.wants_kv.swap(true, Ordering::AcqRel) {
            self.broadcast
                .shared
                .kv_wanted
                .fetch_add(1, Ordering::AcqRel);
        }
    }

    /// Appends whole frames that wait to `out`, and has `waker` woken when more do. Returns whether KV
    /// deltas were lost before them: snapshots are needed.
    pub(crate) fn take(&self, waker: &Waker, out: &mut Vec<u8>) -> bool {
        let subscriber = &self.subscriber;
        // Before the look, and also if frames wait: the caller sleeps after it in either case.
        let some = || !lock(&subscriber.waiting).is_empty();
        if !(slipstream_base::planted!("unarmed-bell") && some()) {
            subscriber.bell.prepare(waker);
        }
        subscriber.take(out);
        subscriber.lost.swap(false, Ordering::AcqRel)
    }
}

impl Waiting {
    fn is_empty(&self) -> bool {
        self.states.is_empty() && self.kv.is_empty()
    }
}

impl Subscriber {
    fn take(&self, out: &mut Vec<u8>) {
        let mut waiting = lock(&self.waiting);
        out.append(&mut waiting.states);
        if out.is_empty() {
            std::mem::swap(&mut waiting.kv, out);
        } else {
            out.append(&mut waiting.kv);
        }
    }

    fn lose_kv(&self, waiting: &mut Waiting) {
        waiting.kv = Vec::new();
        self.lost.store(true, Ordering::Release);
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        let mut subscribers = lock(&self.broadcast.shared.subscribers);
        subscribers.retain(|other| !Arc::ptr_eq(other, &self.subscriber));
        if self.subscriber.wants_kv.load(Ordering::Acquire) {
            self.broadcast
                .shared
                .kv_wanted
                .fetch_sub(1, Ordering::AcqRel);
        }
    }
}

/// The sink of one engine thread.
pub(crate) struct BroadcastSink {
    broadcast: EventBroadcast,
    gathered: Vec<u8>,
}

impl BroadcastSink {
    pub(crate) fn new(broadcast: EventBroadcast) -> BroadcastSink {
        BroadcastSink {
            broadcast,
            gathered: Vec::new(),
        }
    }

    fn gather(&mut self, delta: &KvDelta, snapshot: bool) {
        if self.broadcast.shared.kv_wanted.load(Ordering::Acquire) == 0 {
            return;
        }
        wire::encode_kv(delta, snapshot, &mut self.gathered);
        if self.gathered.len() >= GATHERED_BYTES {
            self.flush();
        }
    }
}

impl EventSink for BroadcastSink {
    fn on_kv(&mut self, delta: &KvDelta) {
        self.gather(delta, false);
    }

    fn on_kv_snapshot(&mut self, snapshot: &KvDelta) {
        self.gather(snapshot, true);
    }

    fn on_fpm(&mut self, _metrics: &ForwardPassMetrics) {}

    fn flush(&mut self) {
        if !self.gathered.is_empty() {
            self.broadcast.publish_kv(&self.gathered);
            self.gathered.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use slipstream_base::{BlockHash, KvOp, RankId};

    fn delta(sequence: u64, blocks: u64) -> KvDelta {
        KvDelta {
            rank: RankId::default(),
            sequence,
            ops: (0..blocks)
                .map(|n| KvOp::Removed { hash: BlockHash(n) })
                .collect(),
        }
    }

    fn sequences(mut bytes: &[u8]) -> Vec<u64> {
        let mut found = Vec::new();
        let mut delta = KvDelta::default();
        while let Some(frame) = wire::split(bytes).unwrap() {
            wire::decode_kv(frame.kind, frame.body, &mut delta).unwrap();
            found.push(delta.sequence);
            bytes = &bytes[frame.len..];
        }
        assert!(bytes.is_empty(), "whole frames");
        found
    }

    #[test]
    fn who_wants_deltas_gets_them_in_order_and_who_does_not_gets_none() {
        let broadcast = EventBroadcast::default();
        let mut sink = BroadcastSink::new(broadcast.clone());
        sink.on_kv(&delta(0, 1));
        let (one, other) = (broadcast.subscribe(), broadcast.subscribe());
        one.want_kv();
        sink.on_kv(&delta(1, 1));
        sink.on_kv(&delta(2, 1));
        sink.flush();
        let mut out = Vec::new();
        assert!(!one.take(Waker::noop(), &mut out));
        assert_eq!(sequences(&out), [1, 2]);
        let mut out = Vec::new();
        assert!(!other.take(Waker::noop(), &mut out));
        assert!(out.is_empty());
        broadcast.on_ready(WorkerId(3), true);
        assert!(!other.take(Waker::noop(), &mut out));
        assert_eq!(
            wire::split(&out).unwrap().unwrap().kind,
            wire::FrameKind::Ready
        );
        drop((one, other));
        sink.on_kv(&delta(3, 1));
        assert!(sink.gathered.is_empty(), "no subscriber");
    }

    #[test]
    fn a_subscriber_that_took_frames_is_woken_by_the_next_one() {
        struct Count(AtomicUsize);
        impl std::task::Wake for Count {
            fn wake(self: Arc<Self>) {
                self.0.fetch_add(1, Ordering::Relaxed);
            }
        }
        let count = Arc::new(Count(AtomicUsize::new(0)));
        let waker = Waker::from(count.clone());
        let broadcast = EventBroadcast::default();
        let one = broadcast.subscribe();
        for worker in 0..3 {
            broadcast.on_ready(WorkerId(worker), true);
            let mut out = Vec::new();
            one.take(&waker, &mut out);
            assert!(!out.is_empty());
            assert_eq!(count.0.load(Ordering::Relaxed), worker as usize);
        }
    }

    #[test]
    fn readiness_is_not_lost_with_kv_deltas() {
        let broadcast = EventBroadcast::default();
        let mut sink = BroadcastSink::new(broadcast.clone());
        let one = broadcast.subscribe();
        one.want_kv();
        broadcast.on_ready(WorkerId(3), true);
        for sequence in 0..5 {
            sink.on_kv(&delta(sequence, 1 << 20)); // 8 MiB each
        }
        broadcast.on_stopping();
        let mut out = Vec::new();
        assert!(one.take(Waker::noop(), &mut out), "deltas were lost");
        let (mut bytes, mut kinds) = (&out[..], Vec::new());
        while let Some(frame) = wire::split(bytes).unwrap() {
            kinds.push(frame.kind);
            bytes = &bytes[frame.len..];
        }
        assert_eq!(kinds[..2], [wire::FrameKind::Ready, wire::FrameKind::Bye]);
    }

    #[test]
    fn a_subscriber_too_far_behind_loses_all_deltas_and_is_told() {
        let broadcast = EventBroadcast::default();
        let mut sink = BroadcastSink::new(broadcast.clone());
        let one = broadcast.subscribe();
        one.want_kv();
        let large = 1 << 20; // blocks, 8 MiB
        for sequence in 0..5 {
            sink.on_kv(&delta(sequence, large));
        }
        sink.flush();
        let mut out = Vec::new();
        assert!(one.take(Waker::noop(), &mut out), "something was lost");
        assert_eq!(broadcast.overflows(), 1);
        assert!(out.len() <= WAITING_BYTES_MAX);
        assert_eq!(sequences(&out), [4]);
        assert!(!one.take(Waker::noop(), &mut Vec::new()), "said once");
    }
}
