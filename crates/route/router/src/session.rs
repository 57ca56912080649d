//! The last target of each session.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use lru::LruCache;
use slipstream_base::SimTime;
use slipstream_base::mix::{below, mix64};
use slipstream_base::sync::lock;
use slipstream_base::width::to_usize;

/// Limit of sessions; the least recently used one is evicted first, and counted.
const SESSIONS_MAX: usize = 1 << 18;
/// Locks over which sessions are spread, so that shards seldom wait for each other.
const LOCKS: usize = 64;

/// Sessions and their targets, expired `ttl_ns` after their last request.
pub(crate) struct SessionTable {
    ttl_ns: u64,
    parts: Box<[Mutex<LruCache<u64, Entry>>]>,
    dropped: AtomicU64,
}

#[derive(Clone, Copy)]
struct Entry {
    target: u32,
    until: SimTime,
}

impl SessionTable {
    pub(crate) fn new(ttl_ns: u64) -> SessionTable {
        SessionTable {
            ttl_ns,
            parts: (0..LOCKS)
                .map(|_| Mutex::new(LruCache::unbounded()))
                .collect(),
            dropped: AtomicU64::new(0),
        }
    }

    /// The target of `session` at `now`.
    pub(crate) fn target(&self, now: SimTime, session: u64) -> Option<u32> {
        let part = self.part(session);
        let entry = part.peek(&session)?;
        (entry.until > now).then_some(entry.target)
    }

    /// `session` was routed to `target` at `now`.
    pub(crate) fn on_routed(&self, now: SimTime, session: u64, target: u32) {
        const PART_MAX: NonZeroUsize = NonZeroUsize::new(SESSIONS_MAX / LOCKS).expect("above 0");
        let mut part = self.part(session);
        let until = now + self.ttl_ns;
        part.put(session, Entry { target, until });
        // At most two expire for each that is added, so the table shrinks after a burst, and no
        // single request pays for it.
        for _ in 0..2 {
            let full = part.len() > PART_MAX.get();
            match part.peek_lru() {
                Some((_, quiet)) if quiet.until <= now => {}
                Some(_) if full => {
                    self.dropped.fetch_add(1, Ordering::Relaxed);
                }
                _ => break,
            }
            part.pop_lru();
        }
    }

    /// Sessions evicted before their expiry.
    pub(crate) fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    fn part(&self, session: u64) -> MutexGuard<'_, LruCache<u64, Entry>> {
        lock(&self.parts[to_usize(below(mix64(session), LOCKS as u64))])
    }
}
