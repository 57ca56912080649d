//! Subscribes to the KV events of one rank of an engine, and keeps a [`KvMirror`] correct through
//! gaps, restarts and lost connections.
//!
//! Sequences of batches grow by one. A batch that is missing may have removed blocks, so a gap is
//! repaired by the engine's replay endpoint or, if the batches are no longer kept there or the
//! engine has none, by clearing the view. Missing batches from before the first connection need no
//! repair: blocks that are not known merely look not cached. After a lost connection the engine may
//! be another process with the same numbers. The view survives only if the last applied batch is
//! replayed with the same bytes.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use slipstream_base::{KvDelta, KvOp, RankId};
use slipstream_events::zmq::{ZmqError, ZmqReplay, ZmqSubscriber};
use slipstream_events::{Event, KvEventBatch};
use xxhash_rust::xxh3::xxh3_128;

use crate::facts::KvEventSource;
use crate::mirror::{KvMirror, MirrorCounts, MirrorOptions};

/// Time limit for a connection.
const CONNECT: Duration = Duration::from_secs(5);

/// Time limit for each message of a replay.
const REPLAY: Duration = Duration::from_secs(10);

/// Batches read from one replay at most. vLLM keeps 10,000 by default (`buffer_steps`).
const REPLAY_BATCHES_MAX: u64 = 10_000_000;

/// First and longest pause between attempts to connect.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

/// Counters of a [`KvFollower`], for metrics; read from any thread.
#[derive(Debug, Default)]
pub struct KvCounters {
    /// Whether the subscription is connected.
    pub connected: AtomicBool,
    /// Connections, the first included.
    pub connections: AtomicU64,
    /// Batches applied.
    pub batches: AtomicU64,
    /// Batches that could not be decoded. The view is cleared, because they may have removed blocks.
    pub unreadable: AtomicU64,
    /// Gaps found in the sequence of batches.
    pub gaps: AtomicU64,
    /// Gaps repaired by replay.
    pub repaired: AtomicU64,
    /// Batches lost, in gaps that no replay repaired.
    pub lost_batches: AtomicU64,
    /// Restarts of the engine, and lost connections after which the view could not be confirmed.
    pub restarts: AtomicU64,
    /// Requests to the replay endpoint that failed.
    pub failed_replays: AtomicU64,
    /// The engine's blocks that are known.
    pub held_blocks: AtomicU64,
    /// Our blocks that are known.
    pub our_blocks: AtomicU64,
    /// Stored blocks skipped, over all reasons of [`MirrorCounts`].
    pub skipped_blocks: AtomicU64,
    /// Blocks dropped beyond the limit.
    pub over_capacity: AtomicU64,
    /// Whether the engine's hashes do not identify prefixes ([`KvMirror::is_unusable`]).
    pub unusable: AtomicBool,
}

fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

/// Follows the KV events of one rank. Drop the future of [`run`](KvFollower::run) to stop.
#[derive(Debug)]
pub struct KvFollower {
    source: KvEventSource,
    rank: RankId,
    mirror: KvMirror,
    counters: Arc<KvCounters>,
    /// Sequence of the next batch of the engine.
    next: u64,
    /// Digest of the last applied batch.
    last: Option<u128>,
    /// Whether nothing was applied since the last restart.
    fresh: bool,
    /// Sequence of the last batch of this connection.
    last_live: Option<u64>,
    /// Sequence of our next delta.
    sequence: u64,
    /// Memory for the changes of a batch.
    ops: Vec<KvOp>,
}

impl KvFollower {
    /// A follower of `source`, whose deltas are those of `rank`. Its deltas begin at sequence 0, so the
    /// index must not hold blocks of an earlier follower of the same target: call its `forget` first.
    pub fn new(source: KvEventSource, rank: RankId, options: MirrorOptions) -> KvFollower {
        KvFollower {
            source,
            rank,
            mirror: KvMirror::new(options),
            counters: Arc::default(),
            next: 0,
            last: None,
            fresh: true,
            last_live: None,
            sequence: 0,
            ops: Vec::new(),
        }
    }

    /// Counters that can be read while it runs.
    pub fn counters(&self) -> Arc<KvCounters> {
        Arc::clone(&self.counters)
    }

    /// Counters of the view.
    pub fn mirror_counts(&self) -> MirrorCounts {
        self.mirror.counts()
    }

    /// Connects, and passes every change of the engine's cache to `apply`, until it is dropped. The
    /// sequences of the deltas grow by one from 0 and have no gaps, whatever the engine's do.
    /// Failures are logged once per state and retried with pauses of 0.1 to 5 s.
    pub async fn run(mut self, mut apply: impl FnMut(&KvDelta)) -> Infallible {
        let mut pause = PAUSES.0;
        let mut logged = false;
        loop {
            let connections = self.counters.connections.load(Ordering::Relaxed);
            let ended = self.connection(&mut apply).await;
            self.counters.connected.store(false, Ordering::Relaxed);
            if self.counters.connections.load(Ordering::Relaxed) > connections {
                (pause, logged) = (PAUSES.0, false);
            }
            if self.source.replay_endpoint.is_none() {
                // Without a replay there is no way to confirm the view later.
                self.restart(&mut apply);
            }
            if !logged {
                logged = true;
                tracing::warn!(endpoint = self.source.endpoint, error = %ended, "KV events interrupted");
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(PAUSES.1);
        }
    }

    /// One connection, to its end.
    async fn connection(&mut self, apply: &mut impl FnMut(&KvDelta)) -> ZmqError {
        let KvEventSource {
            endpoint, topic, ..
        } = &self.source;
        let subscriber = within(CONNECT, endpoint, ZmqSubscriber::connect(endpoint, topic)).await;
        let mut subscriber = match subscriber {
            Ok(subscriber) => subscriber,
            Err(error) => return error,
        };
        self.last_live = None;
        self.confirm(apply).await;
        add(&self.counters.connections, 1);
        self.counters.connected.store(true, Ordering::Relaxed);
        loop {
            match subscriber.recv().await {
                Ok(event) => self.on_live(&event, apply).await,
                // The sequence of the next event shows the loss.
                Err(error) if error.may_go_on() => add(&self.counters.unreadable, 1),
                Err(error) => return error,
            }
        }
    }

    /// Checks after a connection that the view is that of this engine, and catches up.
    async fn confirm(&mut self, apply: &mut impl FnMut(&KvDelta)) {
        if self.source.replay_endpoint.is_none() {
            return;
        }
        if !self.fresh && !self.replay(self.next.saturating_sub(1), true, apply).await {
            self.restart(apply);
        }
        if self.fresh {
            self.replay(0, false, apply).await;
        }
    }

    async fn on_live(&mut self, event: &Event, apply: &mut impl FnMut(&KvDelta)) {
        let sequence = event.sequence.unwrap_or(self.next);
        let restarted = self.last_live.is_some_and(|last| sequence <= last);
        self.last_live = Some(sequence);
        if restarted {
            self.restart(apply);
        } else if sequence < self.next {
            return; // it came with a replay
        }
        if sequence > self.next {
            self.repair(sequence, apply).await;
            if self.next > sequence {
                return;
            }
        }
        self.accept(sequence, &event.payload, apply);
    }

    /// Asks for the batches before `sequence` again.
    async fn repair(&mut self, sequence: u64, apply: &mut impl FnMut(&KvDelta)) {
        let is_gap = !self.fresh;
        let lost = |counters: &KvCounters| counters.lost_batches.load(Ordering::Relaxed);
        let lost_before = lost(&self.counters);
        add(&self.counters.gaps, u64::from(is_gap));
        self.replay(self.next, false, apply).await;
        if is_gap && self.next >= sequence && lost(&self.counters) == lost_before {
            add(&self.counters.repaired, 1);
        }
    }

    /// Applies the batches of a replay from `start` on. With `confirming`, the first must be the
    /// last applied batch, byte for byte. Returns whether the replay was complete (and confirmed).
    async fn replay(
        &mut self,
        start: u64,
        confirming: bool,
        apply: &mut impl FnMut(&KvDelta),
    ) -> bool {
        let Some(endpoint) = self.source.replay_endpoint.clone() else {
            return false;
        };
        let read = self.read_replay(&endpoint, start, confirming, apply).await;
        read.unwrap_or_else(|error| {
            if self.counters.failed_replays.fetch_add(1, Ordering::Relaxed) == 0 {
                tracing::warn!(%error, "no replay of KV events; further failures are only counted");
            }
            false
        })
    }

    async fn read_replay(
        &mut self,
        endpoint: &str,
        start: u64,
        confirming: bool,
        apply: &mut impl FnMut(&KvDelta),
    ) -> Result<bool, ZmqError> {
        let mut replay = within(CONNECT, endpoint, ZmqReplay::request(endpoint, start)).await?;
        let mut confirmed = !confirming;
        for _ in 0..REPLAY_BATCHES_MAX {
            let Some(event) = within(REPLAY, endpoint, replay.next()).await? else {
                return Ok(confirmed);
            };
            let sequence = event.sequence.unwrap_or(self.next);
            if !confirmed {
                let same = sequence == start && self.last == Some(xxh3_128(&event.payload));
                if !same {
                    return Ok(false);
                }
                confirmed = true;
            } else if sequence >= self.next {
                self.accept(sequence, &event.payload, apply);
            }
        }
        Ok(false)
    }

    /// Applies the batch `sequence`, which is the next one or a later one.
    fn accept(&mut self, sequence: u64, payload: &[u8], apply: &mut impl FnMut(&KvDelta)) {
        if sequence > self.next && !self.fresh {
            add(&self.counters.lost_batches, sequence - self.next);
            self.clear(apply);
        }
        self.fresh = false;
        self.next = sequence.saturating_add(1);
        self.last = Some(xxh3_128(payload));
        match KvEventBatch::decode(payload) {
            Ok(batch) => {
                let mut ops = std::mem::take(&mut self.ops);
                self.mirror.apply(&batch, &mut ops);
                add(&self.counters.batches, 1);
                self.publish(ops, apply);
            }
            Err(error) => {
                if self.counters.unreadable.fetch_add(1, Ordering::Relaxed) == 0 {
                    tracing::warn!(endpoint = self.source.endpoint, %error,
                        "unreadable KV events; further ones are only counted");
                }
                self.clear(apply);
            }
        }
    }

    /// The engine is, or may be, another process than before.
    fn restart(&mut self, apply: &mut impl FnMut(&KvDelta)) {
        if self.fresh {
            return;
        }
        add(&self.counters.restarts, 1);
        let mut ops = std::mem::take(&mut self.ops);
        self.mirror.restart(&mut ops);
        self.publish(ops, apply);
        self.next = 0;
        self.last = None;
        self.fresh = true;
    }

    fn clear(&mut self, apply: &mut impl FnMut(&KvDelta)) {
        let mut ops = std::mem::take(&mut self.ops);
        self.mirror.clear(&mut ops);
        self.publish(ops, apply);
    }

    fn publish(&mut self, ops: Vec<KvOp>, apply: &mut impl FnMut(&KvDelta)) {
        let counts = self.mirror.counts();
        let skipped = counts.unknown_parent + counts.without_tokens + counts.malformed;
        let set = |counter: &AtomicU64, value: u64| counter.store(value, Ordering::Relaxed);
        set(&self.counters.held_blocks, self.mirror.held() as u64);
        set(&self.counters.our_blocks, self.mirror.our_blocks() as u64);
        set(&self.counters.skipped_blocks, skipped);
        set(&self.counters.over_capacity, counts.over_capacity);
        let unusable = self.mirror.is_unusable();
        if self.counters.unusable.swap(unusable, Ordering::Relaxed) != unusable && unusable {
            tracing::error!(
                endpoint = self.source.endpoint,
                "the engine's KV events have one hash for two prefixes, as those of earlier SGLang versions; its cache \
                 counts as empty: use an approximate index for it"
            );
        }
        let mut delta = KvDelta {
            rank: self.rank,
            sequence: self.sequence,
            ops,
        };
        if !delta.ops.is_empty() {
            self.sequence += 1;
            apply(&delta);
        }
        delta.ops.clear();
        self.ops = delta.ops;
    }
}

/// `future`, or an error of `endpoint` after `limit`.
async fn within<T>(
    limit: Duration,
    endpoint: &str,
    future: impl Future<Output = Result<T, ZmqError>>,
) -> Result<T, ZmqError> {
    match tokio::time::timeout(limit, future).await {
        Ok(result) => result,
        Err(_) => Err(ZmqError::Peer {
            endpoint: endpoint.to_owned(),
            source: std::io::Error::from(std::io::ErrorKind::TimedOut).into(),
        }),
    }
}
