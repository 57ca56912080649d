//! Subscribes to the KV events of one rank of an engine, and keeps a [`KvMirror`] correct through
//! gaps, restarts and lost connections.
//!
//! Sequences of batches grow by one. A batch that is missing may have removed blocks, so a gap is
//! repaired by the engine's replay endpoint or, if the batches are no longer kept there or the
//! engine has none, by clearing the view. Missing batches from before the first connection need no
//! repair: blocks that are not known merely look not cached. After a lost connection the engine may
//! be another process with the same numbers. The view survives only if the last applied batch is
//! replayed with the same bytes.
//!
//! A view is unusable ([`ViewState`]) while the engine's events do not arrive, until they have named a
//! block, and if too few of them are readable. The router guesses the engine's cache then.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use slipstream_base::{KvDelta, KvOp, RankId};
use slipstream_events::zmq::{ZmqError, ZmqReplay, ZmqSubscriber};
use slipstream_events::{Event, KvEventBatch};
use tokio::time::Instant;
use xxhash_rust::xxh3::xxh3_128;

use crate::facts::KvEventSource;
use crate::mirror::{KvMirror, MirrorCounts, MirrorOptions};
use crate::readability::{Readability, Reading};

/// Time limit for a connection.
const CONNECT: Duration = Duration::from_secs(5);

/// Time limit for the connection to the replay endpoint, and for each message of a replay: live events wait for it.
const REPLAY: Duration = Duration::from_secs(2);

/// First and longest time for which nothing is replayed after an endpoint kept live events waiting.
const REPLAY_AGAIN: (Duration, Duration) = (Duration::from_secs(20), Duration::from_secs(600));

/// Batches read from one replay at most. vLLM keeps 10,000 by default (`buffer_steps`).
const REPLAY_BATCHES_MAX: u64 = 10_000_000;

/// Burst and refill interval of the rate limit on replays. A publisher whose sequence jumps or runs
/// backwards would cause one per batch.
const REPLAYS: (u32, Duration) = (8, Duration::from_secs(1));

/// Number of recent batches in which a repeated batch is recognized; others come from a restarted engine.
const RECENT: usize = 64;

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
    /// Events that could not be read, or whose blocks could not be placed. Each invalidates the blocks that it
    /// may have changed.
    pub unreadable_events: AtomicU64,
    /// Batches received twice, and ignored.
    pub duplicates: AtomicU64,
    /// Replays not requested because of the rate limit.
    pub withheld_replays: AtomicU64,
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
    /// Stored blocks skipped because they could not be placed: their parent, their tokens or their sizes.
    pub skipped_blocks: AtomicU64,
    /// Stored blocks of other memory than the GPU's, or of groups of layers that are not followed.
    pub other_blocks: AtomicU64,
    /// Blocks dropped beyond the limit.
    pub over_capacity: AtomicU64,
    /// Whether the engine's hashes do not identify prefixes ([`KvMirror::is_unusable`]).
    pub unusable: AtomicBool,
    /// Whether the view is unusable ([`ViewState::Useless`]).
    pub useless: AtomicBool,
    /// Whether the engine's cache is guessed instead. Set by those who use the view.
    pub guessed: AtomicBool,
    /// Pauses in reading, because the events took too long to read.
    pub pauses: AtomicU64,
    /// Time of these pauses, ms.
    pub paused_ms: AtomicU64,
}

/// Followers share a thread. Work on one engine's batches before the others get a turn.
const TURN: Duration = Duration::from_millis(2);

/// Then its follower pauses this many times as long as it has worked, so that it takes a quarter of the thread at most.
const PAUSE_PER_WORK: u32 = 3;

/// Longest of these pauses.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// Interval in which a view counts as late if its follower paused for half of it.
const LATE_WITHIN: Duration = Duration::from_secs(5);

/// A follower's turns.
#[derive(Debug)]
struct Turns {
    /// Work since the last pause.
    spent: Duration,
    since: Instant,
    paused: Duration,
    is_late: bool,
}

impl Turns {
    fn new() -> Turns {
        Turns {
            spent: Duration::ZERO,
            since: Instant::now(),
            paused: Duration::ZERO,
            is_late: false,
        }
    }

    /// `work` was done at `now`. Returns the pause that must follow.
    fn on_work(&mut self, work: Duration, now: Instant) -> Option<Duration> {
        let passed = now.saturating_duration_since(self.since);
        if passed >= LATE_WITHIN {
            self.is_late = self.paused >= passed / 2;
            (self.since, self.paused) = (now, Duration::ZERO);
        }
        self.spent += work;
        if self.spent < TURN {
            return None;
        }
        let pause = (std::mem::take(&mut self.spent) * PAUSE_PER_WORK).min(PAUSE_MAX);
        self.paused += pause;
        Some(pause)
    }
}

/// Whether the view of an engine's cache is usable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ViewState {
    /// Not yet: no event has named a block.
    Unproven,
    /// Usable.
    Followed,
    /// Usable, but late: the events take longer to read than one engine's may.
    Late,
    /// Unusable, with the reason as a predicate of the engine. The engine's cache must be guessed.
    Useless(String),
}

/// Called with each change of the state. The first state is [`ViewState::Unproven`].
type OnState = Box<dyn Fn(&ViewState) + Send>;

/// What decides the state of a view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    Unproven,
    Followed,
    Late,
    /// Its events do not arrive.
    Cut,
    /// Its hashes do not identify prefixes.
    Ambiguous,
    Unreadable,
}

/// Token bucket that limits replays.
#[derive(Debug)]
struct ReplayBudget {
    left: u32,
    since: Instant,
    /// Until then nothing is replayed, and the next pause of that kind.
    blocked: Option<(Instant, Duration)>,
}

impl ReplayBudget {
    fn new() -> ReplayBudget {
        ReplayBudget {
            left: REPLAYS.0,
            since: Instant::now(),
            blocked: None,
        }
    }

    /// A replay kept live events waiting for `took`, and failed or not.
    fn on_replay(&mut self, failed: bool, took: Duration, now: Instant) {
        if !failed {
            self.blocked = None;
        } else if took >= REPLAY / 2 {
            let pause = self.blocked.map_or(REPLAY_AGAIN.0, |(_, next)| next);
            self.blocked = Some((now + pause, (pause * 2).min(REPLAY_AGAIN.1)));
        }
    }

    /// Whether one more replay may be requested at `now`.
    fn take(&mut self, now: Instant) -> bool {
        if self.blocked.is_some_and(|(until, _)| now < until) {
            return false;
        }
        let (max, each) = REPLAYS;
        let due = now.saturating_duration_since(self.since).as_nanos() / each.as_nanos();
        let due = u32::try_from(due).unwrap_or(u32::MAX);
        if self.left.saturating_add(due) >= max {
            (self.left, self.since) = (max, now);
        } else {
            self.left += due;
            self.since += each * due;
        }
        let may = self.left > 0;
        self.left -= u32::from(may);
        may
    }
}

fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

/// Follows the KV events of one rank. Drop the future of [`run`](KvFollower::run) to stop.
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
    /// Sequences and digests of the last batches, applied or not.
    recent: VecDeque<(u64, u128)>,
    replays: ReplayBudget,
    turns: Turns,
    readability: Readability,
    /// Reason of the first unreadable event.
    unreadable: String,
    /// Whether too few of the recent events were readable.
    too_unreadable: bool,
    /// Why the last connection ended, until there is another.
    cut: Option<String>,
    /// Whether an event of this engine has named a block.
    proven: bool,
    standing: Standing,
    on_state: OnState,
}

impl fmt::Debug for KvFollower {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = f.debug_struct("KvFollower");
        out.field("source", &self.source)
            .field("standing", &self.standing);
        out.finish_non_exhaustive()
    }
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
            recent: VecDeque::with_capacity(RECENT),
            replays: ReplayBudget::new(),
            turns: Turns::new(),
            readability: Readability::default(),
            unreadable: String::new(),
            too_unreadable: false,
            cut: None,
            proven: false,
            standing: Standing::Unproven,
            on_state: Box::new(|_| {}),
        }
    }

    /// Sets `on_state`, which is called with each change of the view's state.
    #[must_use]
    pub fn with_state(mut self, on_state: impl Fn(&ViewState) + Send + 'static) -> KvFollower {
        self.on_state = Box::new(on_state);
        self
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
            self.cut = Some(ended.to_string());
            if self.source.replay_endpoint.is_none() {
                // Without a replay there is no way to confirm the view later.
                self.restart(&mut apply);
            }
            self.update_state();
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
        self.cut = None;
        self.update_state();
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
        let all = u64::MAX;
        if !self.fresh
            && !self
                .replay(self.next.saturating_sub(1)..all, true, apply)
                .await
        {
            self.restart(apply);
        }
        if self.fresh {
            self.replay(0..all, false, apply).await;
        }
    }

    async fn on_live(&mut self, event: &Event, apply: &mut impl FnMut(&KvDelta)) {
        let sequence = event.sequence.unwrap_or(self.next);
        let restarted = self.last_live.is_some_and(|last| sequence <= last);
        if restarted && self.recent.contains(&(sequence, xxh3_128(&event.payload))) {
            add(&self.counters.duplicates, 1);
            return;
        }
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
        self.take_turn(sequence, &event.payload, apply).await;
    }

    /// As [`accept`](Self::accept), and lets other followers work after a while.
    async fn take_turn(&mut self, sequence: u64, payload: &[u8], apply: &mut impl FnMut(&KvDelta)) {
        let begun = std::time::Instant::now();
        self.accept(sequence, payload, apply);
        if let Some(pause) = self.turns.on_work(begun.elapsed(), Instant::now()) {
            add(&self.counters.pauses, 1);
            let ms = u64::try_from(pause.as_millis()).unwrap_or(u64::MAX);
            add(&self.counters.paused_ms, ms);
            tokio::time::sleep(pause).await;
        }
    }

    /// Asks for the batches before `sequence` again.
    async fn repair(&mut self, sequence: u64, apply: &mut impl FnMut(&KvDelta)) {
        let is_gap = !self.fresh;
        let lost = |counters: &KvCounters| counters.lost_batches.load(Ordering::Relaxed);
        let lost_before = lost(&self.counters);
        add(&self.counters.gaps, u64::from(is_gap));
        self.replay(self.next..sequence, false, apply).await;
        if is_gap && self.next >= sequence && lost(&self.counters) == lost_before {
            add(&self.counters.repaired, 1);
        }
    }

    /// Applies the batches of a replay with these sequences. With `confirming`, the first must be the
    /// last applied batch, byte for byte. Returns whether the replay was complete (and confirmed).
    async fn replay(
        &mut self,
        sequences: Range<u64>,
        confirming: bool,
        apply: &mut impl FnMut(&KvDelta),
    ) -> bool {
        let Some(endpoint) = self.source.replay_endpoint.clone() else {
            return false;
        };
        if !self.replays.take(Instant::now()) {
            add(&self.counters.withheld_replays, 1);
            return false;
        }
        let begun = Instant::now();
        let read = self
            .read_replay(&endpoint, sequences, confirming, apply)
            .await;
        self.replays
            .on_replay(read.is_err(), begun.elapsed(), Instant::now());
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
        Range { start, end }: Range<u64>,
        confirming: bool,
        apply: &mut impl FnMut(&KvDelta),
    ) -> Result<bool, ZmqError> {
        let mut replay = within(REPLAY, endpoint, ZmqReplay::request(endpoint, start)).await?;
        let mut confirmed = !confirming;
        for _ in 0..REPLAY_BATCHES_MAX {
            let Some(event) = within(REPLAY, endpoint, replay.next()).await? else {
                return Ok(confirmed);
            };
            let sequence = event.sequence.unwrap_or(self.next);
            if sequence >= end {
                return Ok(confirmed); // live events go on there
            }
            if !confirmed {
                let same = sequence == start && self.last == Some(xxh3_128(&event.payload));
                if !same {
                    return Ok(false);
                }
                confirmed = true;
            } else if sequence >= self.next {
                self.take_turn(sequence, &event.payload, apply).await;
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
        let digest = xxh3_128(payload);
        self.last = Some(digest);
        if self.recent.len() == RECENT {
            self.recent.pop_front();
        }
        self.recent.push_back((sequence, digest));
        let reading = match KvEventBatch::decode(payload) {
            Ok(batch) => {
                let mut ops = std::mem::take(&mut self.ops);
                let reading = self.mirror.apply(&batch, &mut ops);
                add(&self.counters.batches, 1);
                if let Some(error) = batch.unreadable.first {
                    self.log_unreadable(error);
                } else if reading.unreadable > 0 {
                    self.log_unreadable(
                        "stored blocks without tokens, or with fields that do not fit together"
                            .into(),
                    );
                }
                add(&self.counters.unreadable_events, reading.unreadable);
                self.publish(ops, apply);
                reading
            }
            Err(error) => {
                add(&self.counters.unreadable, 1);
                self.log_unreadable(error.to_string());
                self.clear(apply);
                Reading::NONE
            }
        };
        self.too_unreadable = self.readability.note(reading);
        self.update_state();
    }

    fn log_unreadable(&mut self, error: String) {
        if self.unreadable.is_empty() {
            tracing::warn!(
                endpoint = self.source.endpoint,
                error,
                "unreadable KV events; further ones are only counted"
            );
            self.unreadable = error;
        }
    }

    /// Reports the state of the view if it changed.
    fn update_state(&mut self) {
        let standing = if self.cut.is_some() {
            Standing::Cut
        } else if self.mirror.is_unusable() {
            Standing::Ambiguous
        } else if self.too_unreadable {
            Standing::Unreadable
        } else if !self.proven {
            Standing::Unproven
        } else if self.turns.is_late {
            Standing::Late
        } else {
            Standing::Followed
        };
        if std::mem::replace(&mut self.standing, standing) == standing {
            return;
        }
        let state = match standing {
            Standing::Unproven => ViewState::Unproven,
            Standing::Followed => ViewState::Followed,
            Standing::Late => ViewState::Late,
            Standing::Cut => ViewState::Useless(format!(
                "sends no KV events ({})",
                self.cut.as_deref().unwrap_or_default()
            )),
            Standing::Ambiguous => ViewState::Useless(
                "has one hash for two prefixes in its KV events, as earlier SGLang versions".into(),
            ),
            Standing::Unreadable => {
                let (events, unreadable) = self.readability.recent();
                ViewState::Useless(format!(
                    "sends KV events that cannot be read ({unreadable} of the last {events}; the first: {})",
                    self.unreadable
                ))
            }
        };
        let useless = matches!(state, ViewState::Useless(_));
        self.counters.useless.store(useless, Ordering::Relaxed);
        (self.on_state)(&state);
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
        self.proven = false;
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
        let other = counts.other_media + counts.other_groups;
        set(&self.counters.other_blocks, other);
        self.proven |= self.mirror.held() > 0;
        set(&self.counters.over_capacity, counts.over_capacity);
        let unusable = self.mirror.is_unusable();
        self.counters.unusable.store(unusable, Ordering::Relaxed);
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

#[cfg(test)]
mod tests {
    use super::*;

    /// However much batches cost, a follower works for a quarter of the time at most, but for one batch; and it counts as late
    /// only if it pauses for half of it.
    #[test]
    fn a_follower_takes_a_share_of_the_thread() {
        for (work_us, gap_us) in [(10, 0), (50, 100), (900, 0), (5_000, 50_000), (400_000, 0)] {
            let work = Duration::from_micros(work_us);
            let (mut turns, begun) = (Turns::new(), Instant::now());
            let (mut now, mut worked, mut paused) = (begun, Duration::ZERO, Duration::ZERO);
            while now - begun < 3 * LATE_WITHIN {
                now += work + Duration::from_micros(gap_us);
                worked += work;
                if let Some(pause) = turns.on_work(work, now) {
                    assert!(pause <= PAUSE_MAX);
                    now += pause;
                    paused += pause;
                }
            }
            let is_capped = work * PAUSE_PER_WORK > PAUSE_MAX;
            let most = (now - begun) / if is_capped { 3 } else { 4 };
            assert!(worked <= most + work + TURN, "{work:?}: {worked:?}");
            assert_eq!(
                turns.is_late,
                paused * 2 >= now - begun,
                "{work:?}: {paused:?}"
            );
        }
    }
}
