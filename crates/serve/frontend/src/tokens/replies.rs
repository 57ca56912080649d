//! The replies of a shard, and the end of those that take too long.
//!
//! A body is asked for more only while its client reads: an HTTP/2 stream with a shut window gives no
//! sign. So the shard looks at all replies several times in the shortest limit. Replies note the number of
//! the last look (the tick) and not the time, so this costs nothing per token.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use slipstream_base::width::to_u32;
use slipstream_planes::clock::monotonic_ns;

use crate::door::limits::Limits;
use crate::openai::ApiError;
use crate::tokens::reply::Reply;
use crate::tokens::reply::state::Overdue;
use crate::tokens::workers::Workers;

/// Looks in the shortest limit: a reply ends at most a fourth of it too late.
const TICKS_PER_LIMIT: u32 = 4;
/// Replies that are looked at before others have a turn.
const REPLIES_PER_TURN: usize = 1024;

/// The replies that a shard looks after.
#[derive(Default)]
pub(crate) struct Replies {
    places: RefCell<Vec<Option<Rc<Reply>>>>,
    free: RefCell<Vec<u32>>,
    tick: Cell<u64>,
}

impl Replies {
    /// Number of the last look.
    #[inline]
    pub(crate) fn tick(&self) -> u64 {
        self.tick.get()
    }

    /// Adds a reply. Returns its place.
    pub(crate) fn add(&self, reply: &Rc<Reply>) -> u32 {
        let mut places = self.places.borrow_mut();
        let place = self.free.borrow_mut().pop().unwrap_or_else(|| {
            places.push(None);
            to_u32(places.len() - 1)
        });
        places[place as usize] = Some(reply.clone());
        place
    }

    /// Removes the reply at `place`.
    pub(crate) fn remove(&self, place: u32) {
        self.places.borrow_mut()[place as usize] = None;
        self.free.borrow_mut().push(place);
    }

    /// The replies from `place` on, up to a turn's worth; empty behind the last.
    fn some_from(&self, place: usize) -> Vec<Option<Rc<Reply>>> {
        let places = self.places.borrow();
        let rest = places.get(place..).unwrap_or_default();
        rest[..rest.len().min(REPLIES_PER_TURN)].to_vec()
    }
}

impl Workers {
    /// Ends replies that are overdue, for as long as the shard runs.
    pub(crate) async fn look_after_replies(self: Rc<Workers>) {
        let limits = self.shard.service.limits;
        let period = period(&limits);
        let ticks_max = ticks(limits.write_timeout, period);
        loop {
            tokio::time::sleep(period).await;
            self.replies.tick.set(self.replies.tick() + 1);
            let mut place = 0;
            loop {
                let replies = self.replies.some_from(place);
                if replies.is_empty() {
                    break;
                }
                place += replies.len();
                let (tick, now) = (self.replies.tick(), monotonic_ns());
                for reply in replies.into_iter().flatten() {
                    if let Some(why) = reply.overdue(tick, ticks_max, now) {
                        self.end_overdue(&reply, why);
                    }
                }
                tokio::task::yield_now().await;
            }
        }
    }

    /// Ends a reply for good, and gives back what it holds of the server.
    pub(crate) fn end_overdue(&self, reply: &Reply, why: Overdue) {
        let limits = &self.shard.service.limits;
        let error = match why {
            Overdue::Deadline => {
                self.shard.metrics.streams_cut_deadline.add(1);
                ApiError::deadline(limits.request_timeout.unwrap_or_default().as_secs_f64())
            }
            Overdue::Unread => {
                self.shard.metrics.streams_cut_slow.add(1);
                ApiError::overloaded(
                    format!(
                        "the client read nothing for {} s (`live.write_timeout_s`)",
                        limits.write_timeout.as_secs_f64()
                    ),
                    1,
                )
            }
        };
        reply.state.borrow_mut().cut(&error);
        reply.client.answered();
        self.end_streams(reply);
    }

    /// Kills, at the workers, what of `reply` has not ended, and closes its streams.
    pub(crate) fn end_streams(&self, reply: &Reply) {
        let streams = reply.take_streams();
        if streams.is_empty() {
            return;
        }
        for stream in &streams {
            self.cancel(stream.addr().stream.slot);
        }
        if !slipstream_base::planted!("leaked-quota") {
            self.shard.on_streams_closed(&reply.client, streams.len());
        }
        self.admit_queued();
        drop(streams);
    }
}

/// Time between two looks.
fn period(limits: &Limits) -> Duration {
    let shortest = limits
        .request_timeout
        .map_or(limits.write_timeout, |limit| {
            limit.min(limits.write_timeout)
        });
    (shortest / TICKS_PER_LIMIT).clamp(Duration::from_millis(5), Duration::from_secs(1))
}

/// Whole periods in `limit`, at least 1.
fn ticks(limit: Duration, period: Duration) -> u64 {
    let ticks = limit.as_nanos() / period.as_nanos().max(1);
    u64::try_from(ticks).unwrap_or(u64::MAX).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_come_several_times_in_the_shortest_limit() {
        let limits = |write_s: f64, request_s: Option<f64>| Limits {
            write_timeout: Duration::from_secs_f64(write_s),
            request_timeout: request_s.map(Duration::from_secs_f64),
            ..Limits::default()
        };
        assert_eq!(period(&limits(60.0, None)), Duration::from_secs(1));
        assert_eq!(period(&limits(60.0, Some(2.0))), Duration::from_millis(500));
        assert_eq!(period(&limits(0.01, None)), Duration::from_millis(5));
        assert_eq!(ticks(Duration::from_secs(60), Duration::from_secs(1)), 60);
        assert_eq!(ticks(Duration::MAX, Duration::from_secs(1)), u64::MAX);
        assert_eq!(ticks(Duration::from_millis(1), Duration::from_secs(1)), 1);
    }
}
